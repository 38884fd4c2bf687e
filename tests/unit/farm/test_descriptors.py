"""A large farm gets the open files that it needs. Limits are a process's: each test starts one."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import logging, resource, sys
from harness.farm.descriptors import make_room
logging.basicConfig(format="%(message)s")
soft, hard, boards = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
make_room(boards)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limits_after(soft: int, hard: int, boards: int) -> tuple[str, str]:
    command = [sys.executable, "-c", SCRIPT, str(soft), str(hard), str(boards)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr.strip()


def test_the_soft_limit_is_raised_to_what_the_boards_need() -> None:
    assert limits_after(400, 4000, 200) == ("3456 4000", "")


def test_a_limit_that_is_enough_stays() -> None:
    assert limits_after(400, 4000, 3) == ("400 4000", "")


def test_a_hard_limit_that_is_too_low_is_told() -> None:
    limits, said = limits_after(400, 1000, 200)
    assert limits == "1000 1000"
    assert said.startswith("200 boards need up to 3456 open files, this process may have 1000")
