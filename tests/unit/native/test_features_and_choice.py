"""Features of real cores, and the instruction set that follows. One file in data/ for each board:
a /proc/cpuinfo with the machine and the expected choice at its head."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from engine.native.features import (
    HWCAP,
    HWCAP2,
    CpuFeatures,
    detect,
    features_of,
    hwcap_features,
    parse_cpuinfo,
)
from engine.native.isa import ISAS, UnknownIsa, choose, isas_of, machine_name

DATA = Path(__file__).with_name("data")
FILES = sorted(DATA.glob("*.cpuinfo"))


def read(name: str) -> tuple[dict[str, str], str]:
    lines = (DATA / f"{name}.cpuinfo").read_text().splitlines()
    head = [line[2:].partition(": ") for line in lines if line.startswith("# ")]
    return {key: value for key, _, value in head}, "\n".join(lines)


def features(name: str, *allowed: int) -> CpuFeatures:
    cores = parse_cpuinfo(read(name)[1])
    return features_of(cores, allowed or tuple(cores))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_board_gets_the_best_kernels_that_all_its_cores_can_run(path: Path) -> None:
    head, _ = read(path.stem)
    assert choose(features(path.stem).common, machine=head["machine"]).name == head["isa"]


def test_cores_of_two_kinds_count_by_what_they_share_and_only_where_allowed() -> None:
    everywhere = features("mixed-cores")
    assert "asimddp" not in everywhere
    assert everywhere.partial["asimddp"] == (2, 3)
    assert everywhere.explain(["asimddp", "i8mm"]) == "asimddp on cores 2, 3 alone"
    assert choose(everywhere.common, machine="aarch64").name == "neon"
    big = features("mixed-cores", 2, 3)
    assert not big.partial
    assert choose(big.common, machine="aarch64").name == "dotprod"


def test_an_old_kernel_tells_the_features_of_all_cores_at_once() -> None:
    cores = parse_cpuinfo(read("old-kernel")[1])
    assert set(cores) == {0, 1, 2, 3}
    assert all("asimd" in found for found in cores.values())


@pytest.mark.parametrize("text", ["", "garbage\n:::\nprocessor : x\n", "processor\t: 0\n"])
def test_a_cpuinfo_that_tells_nothing_leads_to_the_portable_kernels(text: str) -> None:
    found = features_of(parse_cpuinfo(text), (0,))
    assert found.common == ()
    assert choose(found.common, machine="x86_64").name == "generic"


def test_the_auxiliary_vector_takes_away_what_the_system_does_not_offer() -> None:
    cores = parse_cpuinfo(read("phone")[1])
    hwcap = frozenset({"fp", "asimd", "asimddp"})
    found = features_of(cores, tuple(cores), hwcap)
    assert "asimddp" in found
    assert "i8mm" not in found
    assert "lrcpc" in found  # not among the bits we know: left as it is told
    assert choose(found.common, machine="aarch64").name == "dotprod"


@pytest.mark.parametrize("foreign", ["x86-zen3", None])
def test_the_auxiliary_vector_alone_is_believed_where_cpuinfo_is_missing_or_foreign(
    foreign: str | None,
) -> None:
    """An emulator of arm64 shows the x86 of its host."""
    cores = parse_cpuinfo(read(foreign)[1]) if foreign else {}
    # "aes" is a name that both have
    found = features_of(cores, (0, 1), frozenset({"fp", "asimd", "aes"}))
    assert found.common == ("aes", "asimd", "fp")
    assert found.source == "auxiliary vector"


def test_bits_of_the_auxiliary_vector_have_the_names_of_cpuinfo() -> None:
    cortex_a76 = 0x0010_0FFF  # without cpuid and the like
    assert {"asimd", "asimddp", "fphp"} <= hwcap_features(cortex_a76, 0)
    assert "i8mm" not in hwcap_features(cortex_a76, 0)
    everything = hwcap_features((1 << 32) - 1, (1 << 32) - 1)
    assert everything == set(HWCAP) | set(HWCAP2)
    for isa in ISAS["aarch64"]:
        assert set(isa.needs) <= everything


def test_this_computer_is_read_for_the_cores_that_we_may_use(tmp_path: Path) -> None:
    found = detect()
    assert choose(found.common).isa in isas_of()
    text = f"processor : {min(os.sched_getaffinity(0))}\nflags : sse2 asimd fp\n"
    (tmp_path / "cpuinfo").write_text(text)
    assert "fp" in detect(tmp_path / "cpuinfo")


def test_an_override_is_obeyed_and_says_what_the_cores_lack() -> None:
    forced = choose({"asimd"}, "dotprod", "aarch64")
    assert (forced.name, forced.missing) == ("dotprod", ("asimddp",))
    assert "although the cores lack asimddp" in forced.reason
    lower = choose({"avx2", "fma", "f16c"}, "generic", "x86_64")
    assert (lower.name, lower.missing) == ("generic", ())


def test_a_choice_says_what_the_next_better_one_needs() -> None:
    assert "dotprod needs asimddp on every allowed core" in choose({"asimd"}, None, "arm64").reason


def test_unknown_kernels_and_machines_are_refused_with_the_names_there_are() -> None:
    with pytest.raises(UnknownIsa, match="generic, neon, dotprod, i8mm"):
        choose({"asimd"}, "avx2", "aarch64")
    with pytest.raises(UnknownIsa, match="'riscv64'; expected x86_64 or aarch64"):
        choose((), None, "riscv64")
    assert machine_name("arm64") == "aarch64"


def test_every_table_begins_with_portable_kernels_and_grows() -> None:
    for table in ISAS.values():
        assert table[0].name == "generic"
        assert not table[0].needs
        for lesser, better in itertools.pairwise(table):
            assert set(lesser.needs) < set(better.needs)
