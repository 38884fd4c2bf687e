"""`python -m harness.boards.virtual NAME --folder DIR --options JSON`: one board, in this process.

Started by `manage.ensure_running`, which makes the keys and reads the state file; by hand only to
look at a board that does not start.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from harness.boards.virtual.namespace import NamespaceRefused
from harness.boards.virtual.options import Options
from harness.boards.virtual.server import Board, Setting

EXIT_UNSUPPORTED = 3  # the machine lacks something that the options need; told on the last line


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.boards.virtual", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--folder", type=Path, required=True, help="with the board's keys")
    parser.add_argument("--options", default="{}", help="harness.boards.virtual.options, as JSON")
    parser.add_argument("--idle-s", type=float, default=900.0, help="ends after so long unused")
    parser.add_argument("--userland", type=Path, help="root of the emulated programs")
    arguments = parser.parse_args()
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("asyncssh").setLevel(logging.WARNING)
    # Whoever started this may ignore them (nohup, a script's background job); what runs on a board
    # must not inherit that.
    for name in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(name) is signal.SIG_IGN:
            signal.signal(name, signal.SIG_DFL)
    package = Path(__file__).resolve().parents[3]
    keep = tuple(path for path in (Path(sys.prefix), package) if path.is_dir())
    setting = Setting(
        name=arguments.name,
        folder=arguments.folder.resolve(),
        options=Options.from_json(arguments.options),
        idle_s=arguments.idle_s,
        keep=keep,
        userland=arguments.userland,
    )
    try:
        asyncio.run(_life(setting))
    except (NamespaceRefused, LookupError) as error:
        print(error, file=sys.stderr)
        return EXIT_UNSUPPORTED
    return 0


async def _life(setting: Setting) -> None:
    await Board(setting).run()


if __name__ == "__main__":
    sys.exit(main())
