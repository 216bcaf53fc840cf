"""Make docs/collectives.html: every collective and its adjoint, to be moved by hand in a browser.

The numbers come from runs of the collectives on the host library, and the page is the same each time it is made. With
--check nothing is written.

examples:
  python scripts/collectives_page.py --check
  python scripts/collectives_page.py --out out/collectives.html
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYNCCL_WATCH", "off")  # nobody will ask what these ranks did

from pynccl.tools import command
from pynccl.tools.explain.page import page

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = command.Parser(__doc__, failed="with --check, the page is not what it would be now")
    parser.add_argument("--out", type=command.output_file, default=ROOT / "docs/collectives.html", help="the page")
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    options = parser.parse_args()
    made = page()
    if not options.check:
        options.out.write_text(made, encoding="utf-8")
        print(f"{options.out}: {len(made.encode())} bytes")
        return 0
    if options.out.exists() and options.out.read_text(encoding="utf-8") == made:
        print(f"{options.out} is current")
        return 0
    print(f"{options.out} is out of date: run `make collectives`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    command.run(main)
