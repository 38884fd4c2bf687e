"""Runs under a clock that jumps, over a slow link, in folders and with values of any text."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.store import raw

if TYPE_CHECKING:
    from tests.farm.lifecycle.conftest import Bench

    MakeBench = Callable[..., Bench]

# As a time daemon that finds out: from the moment that a file appears, the wall clock is another.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long jump(void) {
  const char *file = getenv("CLOCK_JUMPS_WITH"), *by = getenv("CLOCK_JUMPS_BY");
  return file && by && access(file, F_OK) == 0 ? atol(by) : 0;
}
int clock_gettime(clockid_t id, struct timespec *now) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(id, now);
  if (id == CLOCK_REALTIME) now->tv_sec += jump();
  return result;
}
time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
int gettimeofday(struct timeval *restrict out, void *restrict zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  out->tv_sec = now.tv_sec;
  out->tv_usec = now.tv_nsec / 1000;
  return 0;
}
"""
HOSTILE = ("two words", 'it\'s $(touch pwned) "x" `id` ;&', "-a\\b\\n%s * ~", "ünïcode ✓")


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library whose wall clock jumps."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(CLOCK)
    library = folder / "clock.so"
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(folder / "clock.c"), "-ldl"]
    subprocess.run(command, check=True)
    return library


@pytest.mark.parametrize("years", [30, -56])  # to a wrong future; back to the clock of no battery
def test_a_jump_of_the_wall_clock_changes_no_duration(
    bench: MakeBench, clock: Path, tmp_path: Path, years: int
) -> None:
    board, now = bench(), tmp_path / "now"
    run = board.start(
        [{"do": "wall"}, {"do": "sleep", "s": 1.0}, {"do": "wall"}],
        environment={
            "LD_PRELOAD": str(clock),
            "CLOCK_JUMPS_WITH": str(now),
            "CLOCK_JUMPS_BY": str(years * 365 * 86400),
        },
        deadline_s=30.0,
    )
    events = Path(run.spool) / "events.jsonl"
    board.until(lambda: b'"wall"' in events.read_bytes(), "the clock before the jump")
    now.touch()
    log = board.follow(run, tmp_path / "raw")
    assert (log.status, log.reason) == ("finished", "")
    before, after = log.all_data("wall")
    assert abs(after - before) > 29 * 365 * 86400  # it did jump
    seconds = raw.duration(tmp_path / "raw")
    assert seconds is not None
    assert 1.0 <= seconds < 30.0
    times = [event.t_ns for event in log.events]
    assert max(times) - min(times) < 30e9
    assert 5 <= len(log.samples) < 300  # the sampler neither stopped nor ran wild


def test_a_run_is_followed_over_a_link_of_20_kilobytes_a_second(
    bench: MakeBench, tmp_path: Path
) -> None:
    board = bench(slow_kbps=160)
    run = board.start(
        [
            {"do": "data", "name": "a", "count": 30, "pad": "x" * 500},
            {"do": "array", "name": "x", "n": 3000},
        ]
    )
    log = board.follow(run, tmp_path / "raw")
    assert (log.status, log.reason) == ("finished", "")
    assert log.all_data("a") == list(range(30))
    assert len(log.arrays("x")["x"]) == 3000
    assert board.opened == 1
    assert board.clean_up(run) == []


@pytest.mark.parametrize("name", HOSTILE)
def test_folders_and_values_of_any_text_reach_the_engine_as_they_are(
    bench: MakeBench, tmp_path: Path, name: str
) -> None:
    board = bench(name)
    value = f"{name}\n$HOME 'x' \\ $(touch {tmp_path}/pwned)"
    run = board.start(
        [{"do": "variable", "name": "TOLD"}, {"do": "array", "name": "x", "n": 3}],
        environment={"TOLD": value},
    )
    log = board.follow(run, tmp_path / "raw")
    assert (log.status, log.reason) == ("finished", "")
    assert log.data("TOLD") == value
    assert log.arrays("x")["x"].tolist() == [0, 1, 2]
    assert board.clean_up(run) == []
    assert not Path(run.spool).exists()
    assert list(tmp_path.rglob("pwned")) == []
