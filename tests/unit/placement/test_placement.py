"""Which cores are big, and what a ladder tries: from what real boards' kernels tell of their cores.

Each file begins with the expected result; its other lines are as `collect` writes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.placement import (
    Core,
    big_cores,
    candidates,
    classes,
    collect,
    counts,
    parse_cores,
    parse_list,
    ranges,
)

DATA = Path(__file__).with_name("data")
FILES = sorted(DATA.glob("*.cores"))


def read(path: Path) -> tuple[dict[str, Any], str]:
    lines = path.read_text().splitlines(keepends=True)
    head = [line[2:] for line in lines if line.startswith("# ")]
    return json.loads("".join(head)), "".join(line for line in lines if not line.startswith("# "))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_boards_cores_are_grouped_and_tried_by_strength(path: Path) -> None:
    wanted, text = read(path)
    cores = parse_cores(text)
    assert [list(group) for group in classes(cores, wanted["allowed"])] == wanted["classes"]
    assert [str(place) for place in candidates(cores, wanted["allowed"])] == wanted["candidates"]
    assert list(big_cores(cores, wanted["allowed"])) == wanted["classes"][0]


def test_small_cores_are_never_tried_before_the_big_ones_are_full() -> None:
    _, text = read(DATA / "rk3588.cores")
    for place in candidates(parse_cores(text), range(8)):
        if place.threads <= 4:
            assert place.cpus == (4, 5, 6, 7)


def test_a_tree_of_files_is_collected_as_lines(tmp_path: Path) -> None:
    wanted = "".join(
        f"cpu{n}/cpu_capacity {400 + n}\ncpu{n}/topology/thread_siblings_list {n}\n"
        for n in (0, 2, 10)
    )
    for line in wanted.splitlines():
        name, value = line.split()
        path = tmp_path / "sys/devices/system/cpu" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value + "\n")
    (tmp_path / "sys/devices/system/cpu/cpuidle").mkdir()
    assert collect(tmp_path) == wanted
    assert [core.number for core in parse_cores(wanted)] == [0, 2, 10]


def test_a_core_that_tells_nothing_leaves_all_in_one_group() -> None:
    cores = [Core(0, 500), Core(1, None), Core(2, 1024)]
    assert classes(cores, (0, 1, 2)) == [(0, 1, 2)]
    assert classes([Core(0, 500)], (0, 1)) == [(0, 1)]


def test_clocks_decide_where_the_kernel_tells_no_capacity() -> None:
    cores = [Core(0, None, 1_800_000), Core(1, None, 2_400_000)]
    assert classes(cores, (0, 1)) == [(1,), (0,)]


def test_garbled_lines_are_left_out() -> None:
    text = "cpu0/cpu_capacity twelve\ncpu1/cpu_capacity 99\nnonsense\ncpu2/cpu_capacity 1 2\n"
    assert parse_cores(text) == (Core(0, siblings=(0,)), Core(1, 99, siblings=(1,)))
    assert parse_list("0-3,8") == (0, 1, 2, 3, 8)
    assert parse_list("0-x") == ()


@given(st.sets(st.integers(0, 40)))
def test_ranges_and_lists_are_inverse(numbers: set[int]) -> None:
    assert parse_list(ranges(numbers).replace(" ", "")) == tuple(sorted(numbers))


@given(
    st.lists(st.tuples(st.integers(100, 1024), st.booleans()), min_size=1, max_size=24),
)
def test_every_candidate_fits_its_cores_and_every_core_is_used_by_one(
    given_cores: list[tuple[int, bool]],
) -> None:
    cores = [Core(n, capacity, None, (n,)) for n, (capacity, _) in enumerate(given_cores)]
    allowed = [n for n, (_, may) in enumerate(given_cores) if may]
    tried = candidates(cores, allowed)
    assert len({(place.threads, place.cpus) for place in tried}) == len(tried)
    for place in tried:
        assert 1 <= place.threads <= len(place.cpus or allowed)
        assert set(place.cpus or ()) <= set(allowed)
    assert (tried[-1].cpus is None and tried[-1].threads == len(allowed)) if allowed else not tried


def test_counts_grow_and_end_with_all() -> None:
    assert counts(0) == []
    assert counts(1) == [1]
    assert counts(5) == [1, 2, 3, 4, 5]
    assert counts(16) == [1, 2, 3, 4, 6, 8, 12, 16]
