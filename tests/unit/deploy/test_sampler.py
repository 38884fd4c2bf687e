"""One look at a process and its board."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from engine.measure.sampler import (
    Sample,
    Sampler,
    clocks_mhz,
    parse_faults,
    parse_kilobytes,
    parse_pressure,
    sample,
    temperatures,
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_sample_of_this_process_agrees_with_psutil() -> None:
    found = sample(os.getpid())
    rss = psutil.Process().memory_info().rss / 2**20
    assert found.rss_mb is not None
    assert abs(found.rss_mb - rss) < 0.1 * rss
    if found.pss_mb is not None:
        assert 0 < found.pss_mb <= found.rss_mb * 1.05
    assert found.threads is not None
    assert found.threads >= 1
    assert found.cpu_percent is None  # it takes two looks


def test_a_process_that_has_given_its_memory_back_has_no_figures() -> None:
    with subprocess.Popen(["true"]) as ended:
        sampler = Sampler(ended.pid)
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet collected
        assert sampler.sample().rss_mb is None


def test_memory_that_is_taken_is_seen() -> None:
    sampler = Sampler(os.getpid())
    before = sampler.sample()
    with mmap.mmap(-1, 64 << 20) as block:
        block.write(b"x" * (64 << 20))
        after = sampler.sample()
    assert before.rss_mb is not None
    assert after.rss_mb is not None
    assert 55 < after.rss_mb - before.rss_mb < 150
    assert (after.minor_faults or 0) > (before.minor_faults or 0)


def test_a_busy_process_shows_its_load() -> None:
    sampler = Sampler(os.getpid())
    sampler.sample()
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    found = sampler.sample().cpu_percent
    assert found is not None
    assert found > 1


def test_anonymous_memory_counts_the_heap_and_not_mapped_files(tmp_path: Path) -> None:
    size = 64 << 20  # beyond what malloc ever takes from memory that was freed before
    file = tmp_path / "weights"
    file.write_bytes(b"1" * size)
    before = sample(os.getpid())
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        assert sum(mapped[:: mmap.PAGESIZE]) > 0  # every page is resident now
        with_map = sample(os.getpid())
        heap = bytearray(b"1") * size
        with_heap = sample(os.getpid())
    assert len(heap) == size
    if before.anonymous_mb is None:
        pytest.skip("needs smaps_rollup, Linux 4.14")
    assert before.rss_mb is not None and with_map.rss_mb is not None
    assert with_map.rss_mb - before.rss_mb > 24
    assert with_map.anonymous_mb is not None and with_heap.anonymous_mb is not None
    assert with_map.anonymous_mb - before.anonymous_mb < 8
    assert with_heap.anonymous_mb - with_map.anonymous_mb > 24


def test_an_ended_process_leaves_the_boards_own_fields() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    sampler = Sampler(process.pid)
    process.wait()
    found = sampler.sample()
    assert found.rss_mb is None
    assert found.mem_available_mb is not None
    assert "rss_mb" not in found.to_data()
    assert sample(2**22 + 1).rss_mb is None  # never was one


def test_unknown_fields_are_left_out_and_zeros_kept() -> None:
    assert Sample(rss_mb=0.0, clocks_mhz=[0.0]).to_data() == {"rss_mb": 0.0, "clocks_mhz": [0.0]}


def test_faults_are_found_behind_any_command_name() -> None:
    text = "7 (a b) (c) S 1 7 7 0 -1 4194560 1234 0 56 0 10 20 0 0 20 0 1 0 99 0 0\n"
    assert parse_faults(text) == (1234, 56)
    assert parse_faults("") == (None, None)


def test_zones_are_named_by_type_and_told_apart(tmp_path: Path) -> None:
    zones = {
        "sys/class/thermal/thermal_zone0/type": "soc-thermal\n",
        "sys/class/thermal/thermal_zone0/temp": "41250\n",
        "sys/class/thermal/thermal_zone1/type": "soc-thermal\n",
        "sys/class/thermal/thermal_zone1/temp": "43000\n",
        "sys/class/thermal/thermal_zone10/temp": "-5000\n",
        "sys/class/thermal/thermal_zone2/type": "off\n",
        "sys/class/thermal/thermal_zone2/temp": "",
    }
    assert temperatures(write(tmp_path, zones)) == {
        "soc-thermal": 41.25,
        "soc-thermal#1": 43.0,
        "thermal_zone10": -5.0,
    }


def test_clocks_come_in_the_order_of_the_cores(tmp_path: Path) -> None:
    cores = {
        f"sys/devices/system/cpu/cpu{n}/cpufreq/scaling_cur_freq": f"{1000 + n}000\n"
        for n in (10, 2, 0)
    }
    assert clocks_mhz(write(tmp_path, cores)) == [1000.0, 1002.0, 1010.0]


def test_clocks_of_a_virtual_machine_come_from_cpuinfo(tmp_path: Path) -> None:
    text = "processor\t: 0\ncpu MHz\t\t: 2599.998\n\nprocessor\t: 1\ncpu MHz\t\t: 2600.000\n"
    assert clocks_mhz(write(tmp_path, {"proc/cpuinfo": text})) == [2599.998, 2600.0]
    assert clocks_mhz(tmp_path / "absent") == []


def test_memory_and_pressure_files_are_read() -> None:
    text = "5581-7ffd r--p 00000000 00:00 0  [rollup]\nRss:      2000 kB\nPss:  1024 kB\n"
    assert parse_kilobytes(text) == {"Rss": 2000, "Pss": 1024}
    pressure = "some avg10=1.50 avg60=0.00 avg300=0.00 total=12\nfull avg10=0.10 total=1\n"
    assert parse_pressure(pressure) == 1.5
    assert parse_pressure("") is None
