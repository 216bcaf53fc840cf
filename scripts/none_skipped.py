"""Did tests that must not be skipped run? From the results of a run of pytest (--junitxml). It
prints a line for each file with a test that was skipped, or none that ran.

examples:
  python scripts/none_skipped.py out/tests.xml tests/autograd/test_overlap_config.py tests/tools/test_timeline.py
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import PurePosixPath

from pynccl.tools import command


def problems(results: str, files: Sequence[str]) -> list[str]:
    """What is wrong, a line each. results: the text of the XML file"""
    ran: dict[str, int] = {}
    skipped: list[str] = []
    for case in ElementTree.fromstring(results).iter("testcase"):
        module = case.get("classname", "")
        if (skip := case.find("skipped")) is not None:
            skipped.append(f"{module}: {case.get('name')} was skipped: {skip.get('message')}")
        else:
            ran[module] = ran.get(module, 0) + 1
    wanted = {".".join(PurePosixPath(file).with_suffix("").parts): file for file in files}
    missing = [f"{file}: no test of it ran" for module, file in wanted.items() if not ran.get(module)]
    return missing + [line for line in skipped if line.partition(":")[0] in wanted]


def main() -> int:
    parser = command.Parser(__doc__, failed="a test was skipped, or a file has none that ran")
    parser.add_argument("results", type=command.input_file, help="the XML file of pytest --junitxml")
    parser.add_argument("files", nargs="+", metavar="TEST.py", help="files of tests, named as for pytest")
    options = parser.parse_args()
    try:
        found = problems(options.results.read_text(encoding="utf-8"), options.files)
    except (ElementTree.ParseError, UnicodeDecodeError) as error:
        raise ValueError(f"{options.results} is no XML of pytest --junitxml: {error}") from None
    print("\n".join(found) or f"all tests of {len(options.files)} files ran")
    return 1 if found else 0


if __name__ == "__main__":
    command.run(main)
