"""Did tests that must not be skipped run? From the results of a run of pytest (--junitxml).

    python scripts/none_skipped.py out/tests.xml tests/autograd/test_overlap*.py

Exit code 1, with a line for each, if a file has a test that was skipped, or none that ran.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import PurePosixPath


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
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    with open(sys.argv[1], encoding="utf-8") as file:
        found = problems(file.read(), sys.argv[2:])
    print("\n".join(found) or f"all tests of {len(sys.argv) - 2} files ran")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
