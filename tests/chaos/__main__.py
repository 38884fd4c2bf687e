"""`make chaos`: one night on a bad farm, and whether everything came as it had to.

Runs `harness nightly` over the twelve boards of farm.yaml in a state folder of its own, lets the
timed faults come while the boards are in their stress stage, and then checks each claim of
expected.py. Exit code 0 when all hold, 1 when one does not, 2 when the night could not be run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.expected import FARM, STRESS, TIMED, Claim, claims

STAGES = ["tiny", "accuracy", "curve", "stress"]
STALL_S = 40  # twelve boards share one machine: patience for each of them is still short
# What a night may take beside its stress stages, of which the rebooted board has two: everything
# else on twelve boards at once, and the patience with the board that froze.
BESIDE_S = 900.0
GRACE_S = 120.0  # for an orderly end once a night is too long


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="of the stress stage (3)")
    parser.add_argument("--keep", action="store_true", help="keep the night's state folder")
    options = parser.parse_args(argv)
    # Not below a longer path: the boards' sockets lie in it.
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    os.environ["HARNESS_HOME"] = str(folder / "home")
    os.environ.pop("HARNESS_NOTIFY_URL", None)  # nobody wants to be told of this night
    began = time.monotonic()
    try:
        made = night(folder, options.minutes)
        minutes = (time.monotonic() - began) / 60
        for claim in made:
            print(claim)
        failed = sum(not claim.holds for claim in made)
        print(f"{len(made) - failed} of {len(made)} claims hold, after {minutes:.1f} minutes")
        return 1 if failed else 0
    finally:
        from harness.boards import virtual

        virtual.stop_all()
        if options.keep:
            print(f"kept: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def night(folder: Path, minutes: float) -> list[Claim]:
    """Runs it; the claims, of which the first is that it ended in time."""
    model = folder / "small.gguf"
    write_model(model)
    limit_s = 2 * 60 * minutes + BESIDE_S
    command = [sys.executable, "-m", "harness.cli.main", "nightly", f"--farm={FARM}"]
    command += [f"--model={model}", f"--minutes={minutes}", f"--stall-seconds={STALL_S}"]
    command += ["--curve-seconds=10", "--context=96", "--json"]
    output = folder / "night.json"
    with output.open("wb") as sink:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=sink)
    in_time = True
    try:
        provoke_until_done(process, folder / "home", limit_s)
    except subprocess.TimeoutExpired:
        in_time = False
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    text = output.read_text()
    ended = Claim(f"the night ends within {limit_s / 60:.0f} minutes", in_time, "it went on")
    if not text:
        return [ended, Claim("the night tells a result", False, f"exit code {process.returncode}")]
    told: dict[str, Any] = json.loads(text)
    print("\n".join(told["report"]), end="\n\n")
    agrees = Claim("the exit code is the report's", process.returncode == told["exit_code"],
                   str(process.returncode))  # fmt: skip
    return [ended, agrees, *claims(told, folder / "home", STAGES)]


def write_model(path: Path) -> None:
    """A small model with a tokenizer, and one layer more than the tiny stage's."""
    from engine.formats.gguf_writer import write_gguf
    from engine.formats.synthetic import SyntheticCheckpoint

    write_gguf(SyntheticCheckpoint(seed=7, layers=3), path)


def provoke_until_done(process: subprocess.Popen[bytes], home: Path, limit_s: float) -> None:
    """Waits for the night; a board's timed fault comes once its stress stage has told a turn.

    Raises subprocess.TimeoutExpired.
    """
    from harness.boards import virtual

    waiting = set(TIMED)
    until = time.monotonic() + limit_s
    while process.poll() is None:
        if time.monotonic() > until:
            raise subprocess.TimeoutExpired(process.args, limit_s)
        for name in sorted(waiting):
            if in_stress(home / "boards" / name):
                virtual.provoke(name)
                waiting.remove(name)
        time.sleep(0.3)


def in_stress(board: Path) -> bool:
    """Whether a stress run on this virtual board has told a turn."""
    for spec in board.glob("home/.cache/decode-harness/runs/*/spec.json"):
        with contextlib.suppress(OSError, ValueError):  # it is being written, or removed
            if json.loads(spec.read_text())["job"] == STRESS:
                return b'"turn"' in spec.with_name("events.jsonl").read_bytes()
    return False


if __name__ == "__main__":
    sys.exit(main())
