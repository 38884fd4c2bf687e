"""What a virtual board shows of its cores, read by those who read it on a real one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.native.features import parse_cpuinfo
from engine.placement import CPUS, big_cores, candidates, collect, parse_cores
from harness.boards.facts import Facts
from harness.boards.parse import parse_probe
from harness.boards.virtual.processors import (
    PROCESSORS,
    Processor,
    cpuinfo,
    executing,
    on_cores,
    write_folder,
)
from harness.inventory.schema import CORES

A53, A76, NEWEST = (PROCESSORS[name] for name in ("cortex-a53", "cortex-a76", "aarch64"))


def probed(cores: list[Processor], folder: Path) -> Facts:
    """What the probe would find on a board that shows these cores in `folder`."""
    write_folder(folder, cores, machine=folder)
    lines = [
        f"cpu{number} {(place / 'cpufreq/cpuinfo_max_freq').read_text().strip()} "
        f"{(place / 'cpu_capacity').read_text().strip()} -"
        for number in range(len(cores))
        for place in [folder / f"cpu{number}"]
    ]
    mark = "=== 0123456789abcdef"
    text = (
        f"{mark} probe 1\n{mark} cpuinfo\n{cpuinfo(cores)}\n{mark} cpus\n"
        + "\n".join(lines)
        + f"\n{mark} end\n"
    )
    return parse_probe(text.encode())


def test_the_inventory_knows_the_same_cores() -> None:
    assert set(CORES) == set(PROCESSORS)
    assert all(name == item.name for name, item in PROCESSORS.items())


def test_the_probe_finds_little_and_big_cores_and_what_they_share(tmp_path: Path) -> None:
    facts = probed(on_cores(("cortex-a53", "cortex-a76"), 6), tmp_path / "cpu")
    assert [cpu.part for cpu in facts.cpus] == ["cortex-a53"] * 3 + ["cortex-a76"] * 3
    assert facts.big_cores == (3, 4, 5)
    assert [cpu.capacity for cpu in facts.cpus] == [380] * 3 + [1024] * 3
    assert [cpu.max_mhz for cpu in facts.cpus] == [1400] * 3 + [2400] * 3
    assert "asimddp" in facts.cpus[5].features
    assert "asimddp" not in facts.features
    assert "asimd" in facts.features


def test_equal_cores_are_all_strongest(tmp_path: Path) -> None:
    facts = probed(on_cores(("cortex-a53",), 4), tmp_path / "cpu")
    assert {cpu.capacity for cpu in facts.cpus} == {1024}
    assert facts.big_cores == (0, 1, 2, 3)


def test_the_engine_reads_the_features_of_each_core() -> None:
    found = parse_cpuinfo(cpuinfo([A53, NEWEST]))
    assert found == {0: frozenset(A53.features), 1: frozenset(NEWEST.features)}
    assert "i8mm" in found[1]


@given(
    names=st.lists(st.sampled_from(sorted(PROCESSORS)), min_size=1, max_size=4),
    count=st.integers(1, 64),
)
def test_every_kind_has_its_share_of_the_cores_in_order(names: list[str], count: int) -> None:
    cores = [core.name for core in on_cores(names, count)]
    assert len(cores) == count
    if count >= len(names):
        shares = [count // len(names), -(-count // len(names))]
        runs = [cores.count(name) / names.count(name) for name in set(names)]
        assert all(shares[0] <= run <= shares[1] for run in runs)
    positions = [names.index(core) for core in cores] if len(set(names)) == len(names) else []
    assert positions == sorted(positions)


@given(st.lists(st.sampled_from(list(PROCESSORS.values())), min_size=1, max_size=8))
def test_the_emulator_executes_what_any_of_the_cores_can(cores: list[Processor]) -> None:
    chosen = executing(cores)
    assert all(set(core.features) <= set(chosen.features) for core in cores)
    assert chosen in cores


def test_the_register_that_identifies_a_core_is_that_of_the_manual() -> None:
    assert (A53.midr, A76.midr) == (0x410FD034, 0x414FD0B1)


def test_each_core_is_one_thread_and_has_nothing_of_the_machine_s_own(tmp_path: Path) -> None:
    machine = tmp_path / "machine"
    (machine / "cpu0/topology").mkdir(parents=True)
    (machine / "cpu0/cache/index0").mkdir(parents=True)
    (machine / "cpu0/topology/thread_siblings_list").write_text("0-1\n")
    (machine / "online").write_text("0-1\n")
    shown = tmp_path / "shown"
    write_folder(shown, [A53, A76], machine)
    assert (shown / "cpu1/topology/thread_siblings_list").read_text() == "1\n"
    assert (shown / "cpu1/topology/core_siblings_list").read_text() == "0-1\n"
    assert (shown / "online").read_text() == "0-1\n"
    assert not (shown / "possible").exists()
    assert not (shown / "cpu0/cache").exists()
    assert (shown / "cpu1/regs/identification/midr_el1").read_text() == "0x00000000414fd0b1\n"


def test_the_ladder_begins_with_the_big_cores(tmp_path: Path) -> None:
    shown = tmp_path / CPUS
    shown.parent.mkdir(parents=True)
    write_folder(shown, on_cores(("cortex-a53", "cortex-a76"), 8), machine=tmp_path / "none")
    cores = parse_cores(collect(tmp_path))
    assert big_cores(cores, range(8)) == (4, 5, 6, 7)
    first, *_, last = candidates(cores, range(8))
    assert (first.threads, first.cpus) == (1, (4, 5, 6, 7))
    assert (last.threads, last.cpus) == (8, None)


def test_a_list_of_no_known_core_is_refused() -> None:
    with pytest.raises(KeyError):
        on_cores(["avr"], 2)
