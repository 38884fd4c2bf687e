"""`python -m harness.boards.null COUNT FOLDER`: null boards until standard input ends.

Started by `null_boards`; by hand to try the harness on a large farm:

    python -m harness.boards.null 50 /tmp/nulls --farm devices.yaml

writes a farm file with the boards for `--farm=devices.yaml` of any command; Ctrl-D ends them.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from harness.boards.null.server import run


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.boards.null",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("count", type=int, help="how many, 1 to 999")
    parser.add_argument("folder", type=Path, help="for their home folders and the client's key")
    parser.add_argument("--farm", type=Path, metavar="FILE", help="write a farm file with them")
    arguments = parser.parse_args()
    if not 1 <= arguments.count <= 999:
        parser.error(f"count is {arguments.count}, expected 1 to 999")
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    logging.getLogger("asyncssh").setLevel(logging.ERROR)
    run(arguments.count, arguments.folder.resolve(), arguments.farm)
    return 0


if __name__ == "__main__":
    sys.exit(main())
