"""Where the packages lie. All else is in pyproject.toml.

Type checkers read the folders that a .pth file names, and not the import hook that setuptools installs where a package
has another name than its folder. So an editable install names one folder, .packages, that holds a link to each.
"""

import sys
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent.resolve()
FOLDERS = {"pynccl": "pynccl", "pynccl_autograd": "autograd"}
LINKS = ".packages"

if "editable_wheel" in sys.argv:
    (HERE / LINKS).mkdir(exist_ok=True)
    for name, folder in FOLDERS.items():
        link = HERE / LINKS / name
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..", folder))
    setup(package_dir={"": LINKS})
else:
    setup(package_dir=FOLDERS)
