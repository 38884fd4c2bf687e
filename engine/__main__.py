"""`python -m engine COMMAND` and the `engine` script.

On a board: `run` (a supervised run from a spec) and `work` (the process that it supervises). On one
machine: `generate` streams text from a model, `pack` makes a package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

HELP = """usage: engine COMMAND ...

  engine generate MODEL -p "What is a KV cache?"   stream text from a model on this machine
  engine pack MODEL PACKAGE                        make the one-file package that boards map
  engine run SPEC.json --spool DIR                 one supervised run, as the harness starts it
  engine work SPEC.json --spool DIR ...            the worker of a run, started by its supervisor

`engine COMMAND --help` tells more. MODEL is a GGUF file, a safetensors file
or folder, or a package.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 good, 1 a finding (such as NaN), 2 wrong use or trouble with files."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    # Each command imports its own parts: a worker sets threads before numpy is loaded, and a
    # supervisor stays small.
    if command == "run":
        from engine import supervisor

        return supervisor.main(rest)
    if command == "work":
        from engine.measure import worker

        return worker.main(rest)
    if command in ("generate", "pack"):
        from engine import commands

        return commands.main([command, *rest])
    if command in ("", "-h", "--help"):
        print(HELP, end="")
        return 0 if command else 2
    print(
        f"engine: unknown command {command!r}; expected generate, pack, run or work",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
