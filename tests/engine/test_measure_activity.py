"""What a board tells of its cores, accelerators and counters, and what it does not."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from engine.measure import counters
from engine.measure.activity import (
    NOTHING,
    Usage,
    accelerators,
    busy_shares,
    cores,
    parse_stat,
    usage,
)
from engine.measure.counters import EVENTS, Counters

STAT = """cpu  300 0 100 1600 0 0 0 0 0 0
cpu0 100 10 40 800 50 0 0 0 90 0
cpu1 200 0 50 750
intr 12345 0 0
"""


def test_busy_is_all_but_idle_and_waiting_for_storage() -> None:
    assert parse_stat(STAT) == {0: (150, 1000), 1: (250, 1000)}  # guests count as users already
    assert parse_stat("cpu0 1 2\ngarbage\ncpux 1 2 3 4") == {}
    later = {0: (250, 1100), 1: (250, 1100), 7: (1, 2)}
    assert busy_shares(parse_stat(STAT), later) == {0: 1.0, 1: 0.0}


def test_a_kernel_that_tells_nothing_gives_nothing(tmp_path: Path) -> None:
    assert cores(tmp_path) == {}
    assert accelerators(tmp_path) == {}


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("sys/class/devfreq/fdab0000.npu/load", "37@1000000000Hz\n", {"fdab0000.npu": 0.37}),
        ("sys/class/devfreq/dmc/load", "80@2112000000Hz\n", {}),  # the memory controller
        ("sys/class/drm/card0/device/gpu_busy_percent", "99\n", {"card0": 0.99}),
        ("sys/devices/gpu.0/load", "503\n", {"gpu.0": 0.503}),
        ("sys/class/kgsl/kgsl-3d0/gpu_busy_percentage", "12 %\n", {"kgsl-3d0": 0.12}),
        (
            "sys/kernel/debug/rknpu/load",
            "NPU load:  Core0: 61%, Core1:  0%, Core2:  0%,\n",
            {"rknpu": 0.61},
        ),
        ("sys/class/drm/card0/device/gpu_busy_percent", "\x00?\n", {}),
    ],
)
def test_accelerators_are_read_where_their_drivers_show_a_load(
    file: str, text: str, expected: dict[str, float], tmp_path: Path
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert accelerators(tmp_path) == pytest.approx(expected)


def test_usage_is_a_difference_that_adds_up() -> None:
    before = usage()
    with mmap.mmap(-1, 8 << 20) as pages:  # new ones, whatever memory was freed before
        for at in range(0, len(pages), 4096):
            pages[at] = 1
        used = usage().since(before)
    assert used.minor_faults > 0 and used.wall_s > 0 and used.cpu_s >= 0
    assert NOTHING.plus(used).since(used) == NOTHING
    assert used.plus(used) == Usage(*(2 * x for x in vars(used).values()))


def test_every_event_is_counted_or_has_a_reason() -> None:
    found = Counters()
    found.start()
    sum(range(100_000))
    counted = found.stop()
    found.close()
    found.close()
    assert set(counted) | set(found.missing) == set(EVENTS)
    assert all(found.missing.values())
    if "instructions" in counted:
        assert counted["instructions"] > 100_000


def test_an_unknown_machine_has_a_reason_for_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters.platform, "machine", lambda: "vax")
    found = Counters()
    assert set(found.missing) == set(EVENTS)
    assert "vax" in found.missing["cycles"]
    found.start()
    assert found.stop() == {}
