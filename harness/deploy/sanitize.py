"""Runs the engine's tests, or any command, over sanitised builds of the native library.

    python -m harness.deploy.sanitize [address] [thread] [undefined] [-- COMMAND ...]

Each sanitiser builds the library for this machine and starts the command with it: by default the
engine's tests, without those on emulated cores, which have the sanitiser nowhere. The command's
first fault ends it with the sanitiser's report.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from engine.native.build import SANITIZERS, build_local
from engine.native.compilers import BuildError
from harness.deploy.native import sanitizer_environment

TESTS = (
    *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=1200"),
    *("-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"),
    *("tests/engine", "--ignore=tests/engine/native_build", "-k", "not cortex and not max-i8mm"),
    # They start engines as a board does, with an environment of their own, where nothing is
    # preloaded, and judge their ends with capstone, whose way of loading no sanitiser allows.
    "--ignore=tests/engine/test_measure_native.py",
    "--ignore=tests/engine/test_measure_stages.py",
    # Its processes die on purpose, and a sanitiser has handlers of its own for that.
    "--ignore=tests/engine/test_crash_record.py",
)
# The thread sanitiser has a thread of its own, which one of these counts, and supports no threads
# in a process that a process with threads forked, which is what the other does.
NOT_UNDER_THREAD = (
    "tests/engine/test_native_team.py::test_threads_of_decoders_that_are_gone_are_gone",
    "tests/engine/test_native_team.py"
    "::test_after_a_fork_the_child_is_told_to_make_a_decoder_of_its_own",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all runs are clean, 1 when one is not, 2 for wrong use or a build that fails."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    at = words.index("--") if "--" in words else len(words)
    chosen, command = words[:at] or list(SANITIZERS), words[at + 1 :] or list(TESTS)
    unknown = [name for name in chosen if name not in SANITIZERS]
    if unknown:
        print(
            f"sanitiser {unknown[0]!r}; expected some of {', '.join(SANITIZERS)}", file=sys.stderr
        )
        return 2
    failed = []
    for name in chosen:
        print(f"{name}: building", file=sys.stderr)
        try:
            environment = sanitizer_environment(name, build_local(sanitize=name))
        except BuildError as error:
            print(error, file=sys.stderr)
            return 2
        print(f"{name}: {environment['ENGINE_NATIVE_LIB']}", file=sys.stderr)
        usual = name == "thread" and at == len(words)
        more = [f"--deselect={test}" for test in NOT_UNDER_THREAD] if usual else []
        done = subprocess.run([*command, *more], env=environment, check=False)
        if done.returncode != 0:
            failed.append(f"{name} (status {done.returncode})")
    print(f"not clean: {', '.join(failed)}" if failed else f"clean: {', '.join(chosen)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
