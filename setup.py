"""Where the packages are, and the README with links that work on PyPI. The rest is in pyproject.toml.

Type checkers read the folders that a .pth file names. They do not read the import hook that setuptools installs for a
package whose name differs from its folder. So an editable install names one folder, .packages, with a link to each.
"""

import re
import sys
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent.resolve()
FOLDERS = {"pynccl": "pynccl", "pynccl_autograd": "autograd"}
LINKS = ".packages"


def readme() -> str:
    """README.md with its relative links made absolute, since PyPI shows it away from the repository."""
    found = re.search(r'^Repository = "(.+)"$', (HERE / "pyproject.toml").read_text(), re.MULTILINE)
    assert found, "pyproject.toml has no Repository"
    text = (HERE / "README.md").read_text()
    text = re.sub(r"(!\[[^\]]*\]\()(?!\w+:|#)", rf"\1{found[1]}/raw/HEAD/", text)  # images
    return re.sub(r"((?<!!)\[[^\]!]*\]\()(?!\w+:|#)", rf"\1{found[1]}/blob/HEAD/", text)


readme_options = {"long_description": readme(), "long_description_content_type": "text/markdown"}
if "editable_wheel" in sys.argv:
    (HERE / LINKS).mkdir(exist_ok=True)
    for name, folder in FOLDERS.items():
        link = HERE / LINKS / name
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..", folder))
    setup(package_dir={"": LINKS}, **readme_options)
else:
    setup(package_dir=FOLDERS, **readme_options)
