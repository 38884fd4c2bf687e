"""What a model needs in memory, against what there is: the budget before anything is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.architectures import Hyperparameters
from engine.formats import SyntheticCheckpoint
from engine.measure.memory import (
    MIB,
    Limits,
    Need,
    OverBudget,
    exceeded,
    limits_here,
    need,
    parse_limits,
    require_fits,
    reserve_of,
    sentence,
    table,
)
from engine.options import EngineOptions
from engine.package import Package, build_package

HP = Hyperparameters.from_json(
    {
        "architecture": "llama", "vocab": 128256, "width": 2048, "layers": 16, "heads": 32,
        "kv_heads": 8, "head_dim": 64, "ffn": 8192, "context": 131072, "rms_eps": 1e-5,
        "rope": "none", "rope_scale": 1.0, "tied": True, "qkv_bias": False,
        "output_bias": False,
        "qk_norm": False,
    }
)  # fmt: skip
NATIVE = EngineOptions.for_unit("native")
WEIGHTS = 700 << 20


@pytest.mark.parametrize(
    ("scheme", "mebibytes"), [("f32", 512), ("f16", 256), ("int8", 132), ("int4", 68)]
)
def test_the_cache_is_counted_by_its_scheme(scheme: str, mebibytes: int) -> None:
    """16 layers × 2 × 8 heads × 64 values × 8192 positions, with scales of 2 bytes for integers."""
    wanted = need(HP, WEIGHTS, dataclasses.replace(NATIVE, kv=scheme), 8192)
    assert (wanted.kv, wanted.weights) == (mebibytes, 700)


def test_a_model_that_is_too_large_is_refused_with_the_table() -> None:
    wanted = need(HP, WEIGHTS, NATIVE, 8192)
    limits = Limits(memory=946, reserve=reserve_of(946), available=800)
    assert exceeded(wanted, limits) == ("memory", "available")
    text = str(OverBudget(wanted, limits))
    first, *lines = text.splitlines()
    assert first.startswith(
        f"the model needs {wanted.total:.0f} MiB at a context of 8192, the boar"
    )
    for words in (
        "weights, mapped", "KV cache, 8192 positions, f16", "temporary", "Python and libraries",
        "kept for the system", "available now",
    ):  # fmt: skip
        assert sum(words in line for line in lines) == 1


def test_what_is_mapped_does_not_count_against_a_limit_of_the_process() -> None:
    wanted = need(HP, WEIGHTS, NATIVE, 2048)
    assert exceeded(wanted, Limits(data=400)) == ()
    copied = need(HP, WEIGHTS, EngineOptions(**{**vars(NATIVE), "huge_pages": True}), 2048)
    assert exceeded(copied, Limits(data=400)) == ("data",)
    assert "of its own, a process there may have for itself 400" in sentence(
        copied, Limits(data=400)
    )


def test_nothing_is_refused_where_nothing_is_known() -> None:
    wanted = need(HP, WEIGHTS, NATIVE, 8192)
    assert exceeded(wanted, Limits()) == ()
    assert sentence(wanted, Limits()).endswith("which fits")
    assert "memory in all" not in table(wanted, Limits())


def test_an_opened_package_is_measured_by_its_header(tmp_path: Path) -> None:
    build_package(SyntheticCheckpoint(seed=1), tmp_path / "m.pkg", name="m")
    with Package.open(tmp_path / "m.pkg") as package:
        wanted = require_fits(package, EngineOptions(), 64, Limits(memory=4096, available=2048))
        assert wanted.weights == package.weight_bytes / MIB
        with pytest.raises(OverBudget, match="the budget allows 8"):
            require_fits(package, EngineOptions(), 64, Limits(budget=8))


@given(st.integers(1, 4096), st.integers(1, 4096), st.sampled_from(["f32", "f16", "int8", "int4"]))
def test_a_longer_context_never_needs_less(one: int, other: int, kv: str) -> None:
    options = EngineOptions(unit="native", kv=kv, kv_layout="sd")
    short, long = (need(HP, WEIGHTS, options, size) for size in sorted((one, other)))
    assert short.total <= long.total


MEMINFO = "MemTotal:        3884124 kB\nMemFree:  100 kB\nMemAvailable:    3103416 kB\n"


def test_memory_is_what_the_kernel_says_less_what_the_system_keeps() -> None:
    limits = parse_limits(MEMINFO, [])
    assert limits.memory == pytest.approx(3793, abs=1)
    assert limits.available == pytest.approx(3030.7, abs=0.1)
    assert limits.reserve == 256


def test_a_control_group_lowers_both_and_its_file_cache_counts_as_free() -> None:
    groups = [
        (f"{1024 << 20}\n", f"{900 << 20}\n", f"anon 1\nfile {700 << 20}\n"),
        ("max\n", "5", ""),
    ]
    limits = parse_limits(MEMINFO, groups)
    assert (limits.memory, limits.reserve, limits.available) == (1024, 0, 824)


def test_the_control_groups_above_the_own_one_count(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/lab/run\n",
        "sys/fs/cgroup/lab/memory.max": str(512 << 20),
        "sys/fs/cgroup/lab/memory.current": str(100 << 20),
        "sys/fs/cgroup/lab/run/memory.max": "max",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert limits_here(tmp_path).available == 412


@pytest.mark.parametrize("text", ["", "MemTotal: many kB\n", "\x00"])
def test_a_system_that_tells_nothing_sets_no_limit(text: str) -> None:
    assert parse_limits(text, [("", "", "")]) == Limits()


def test_the_sum_is_that_of_its_parts() -> None:
    wanted = Need(1, 2, 3, 4, 10, "f32")
    assert (wanted.total, wanted.own) == (10, 9)
    assert Need(1, 2, 3, 4, 10, "f32", copied=True).own == 10
