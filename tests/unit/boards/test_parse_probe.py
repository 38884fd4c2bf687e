"""Facts from the probe's output: golden files of odd boards, and whatever else is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.tags import platform_tags as packaging_tags

from harness.boards.facts import CpuFacts, Facts, common_features, platform_tags
from harness.boards.parse import SIZE_LIMIT, VALUE_LIMIT, ProbeError, parse_probe

GOLDEN = sorted((Path(__file__).parent / "data").glob("*.probe"))


def read(path: Path) -> tuple[dict[str, Any], bytes]:
    """The expected result at the head of a golden file, and the board's output below it."""
    head, _, raw = path.read_bytes().partition(b"---\n")
    return json.loads(head.decode().replace("# ", "")), raw


def raw(name: str) -> bytes:
    return next(read(path)[1] for path in GOLDEN if path.stem == name)


def seen(facts: Facts, expected: dict[str, Any]) -> dict[str, Any]:
    """What `facts` say about the keys of `expected`."""
    python = facts.python
    values: dict[str, Any] = {
        **facts.model_dump(),
        "parts": [cpu.part for cpu in facts.cpus],
        "max_mhz": [cpu.max_mhz for cpu in facts.cpus],
        "capacity": [cpu.capacity for cpu in facts.cpus],
        "big_cores": list(facts.big_cores),
        "some_features": [name for name in expected["some_features"] if name in facts.features],
        "absent_features": [
            name for name in expected.get("absent_features", []) if name not in facts.features
        ],
        "python": python and python.path,
        "version": python and python.version,
        "abi": python and python.abi,
        "first_tag": next(iter(python.platform_tags), None) if python else None,
        "python_refused": list(facts.python_refused),
        "usable": [folder.path for folder in facts.usable_folders],
        "reasons": {folder.path: folder.reason for folder in facts.folders if folder.reason},
        "free_mb": [folder.free_mb for folder in facts.folders],
        "zones": {zone.kind: zone.celsius for zone in facts.thermal_zones},
    }
    return {key: values[key] for key in expected}


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_facts_of_an_odd_board_are_those_at_the_head_of_its_golden_file(path: Path) -> None:
    expected, output = read(path)
    assert seen(parse_probe(output), expected) == expected


def test_carriage_returns_colours_and_nuls_change_nothing() -> None:
    clean = parse_probe(raw("rk3588"))
    dirty = raw("rk3588").replace(b"\n", b"\r\n").replace(b"cortex", b"\x1b[31mcortex\x1b[0m")
    dirty = dirty.replace(b"Radxa", b"\x1b]0;title\x07Ra\x00dxa").replace(
        b"folder ", b"folder \x00"
    )
    assert parse_probe(dirty) == clean


def test_no_value_carries_a_control_character_whatever_the_board_sends() -> None:
    hostile = raw("rk3588").replace(
        b"Radxa ROCK 5B", b"\x1b[2J\x9b31mx\x1b]8;;http://evil\x07\x08\x0b<script>"
    )
    text = parse_probe(hostile).model_dump_json()
    assert not any(
        ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in json.loads(text)["model"]
    )


def test_megabytes_in_one_value_are_cut() -> None:
    long = raw("rk3588").replace(b"Radxa ROCK 5B", b"A" * (1 << 20))
    assert len(parse_probe(long).model) == VALUE_LIMIT


def test_output_beyond_the_size_limit_is_refused_and_names_where_it_breaks_off() -> None:
    flood = raw("rk3588").replace(b"Radxa ROCK 5B", b"A\n" * SIZE_LIMIT)
    with pytest.raises(ProbeError, match="breaks off in 'model'"):
        parse_probe(flood)


def test_a_board_that_imitates_a_section_without_the_nonce_is_not_believed() -> None:
    forged = raw("rk3588").replace(b"Radxa ROCK 5B", b"=== 0000000000000000 python\ncandidate x|ok")
    facts = parse_probe(forged)
    assert facts.python is not None
    assert facts.python.path == "/usr/bin/python3"


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (b"", "printed nothing"),
        (b"Sorry, command not-allowed\r\n", "begins with b'Sorry"),
        (
            b"=== 5f3a9c01d2e4b687 probe 1\n=== 5f3a9c01d2e4b687 uname\nLinux\n",
            "breaks off in 'uname'",
        ),
    ],
)
def test_output_that_is_no_probe_is_refused_and_shown(output: bytes, message: str) -> None:
    with pytest.raises(ProbeError, match=message):
        parse_probe(output)


@settings(max_examples=200)
@given(
    name=st.sampled_from([path.stem for path in GOLDEN]),
    cut=st.integers(0, 6000),
    garbage=st.binary(max_size=60),
)
def test_garbage_anywhere_gives_facts_or_a_probe_error(name: str, cut: int, garbage: bytes) -> None:
    output = raw(name)
    damaged = output[:cut] + garbage + output[cut + len(garbage) :]
    try:
        facts = parse_probe(damaged)
    except ProbeError:
        return
    assert Facts.model_validate_json(facts.model_dump_json()) == facts


def test_features_are_those_common_to_all_allowed_cores() -> None:
    cores = [
        CpuFacts(number=0, features=("fp", "asimd", "asimddp")),
        CpuFacts(number=4, features=("fp", "asimd")),
    ]
    assert common_features(cores) == ("fp", "asimd")
    assert common_features([]) == ()


def test_a_feature_of_the_allowed_cores_counts_even_if_others_lack_it() -> None:
    """The container of the golden file may use cores 1 and 2, of which only 1 has AVX-512."""
    output = raw("x86-container")
    assert "avx512f" not in parse_probe(output).features
    only_strong = output.replace(b"Cpus_allowed_list:\t1-2", b"Cpus_allowed_list:\t0-1")
    assert "avx512f" in parse_probe(only_strong).features


def test_wheel_tags_begin_at_the_boards_own_libc_and_end_at_the_oldest_one_with_wheels() -> None:
    tags = platform_tags("aarch64", "glibc 2.31")
    assert tags[0] == "manylinux_2_31_aarch64"
    assert tags[-2:] == ("manylinux_2_17_aarch64", "manylinux2014_aarch64")
    assert platform_tags("x86_64", "glibc 2.17")[-1] == "manylinux1_x86_64"
    assert platform_tags("x86_64", "musl 1.2.4") == tuple(
        f"musllinux_1_{minor}_x86_64" for minor in (2, 1, 0)
    )
    assert platform_tags("aarch64", "bionic") == ()


def test_wheel_tags_agree_with_the_packaging_library_on_this_machine() -> None:
    here = [tag for tag in packaging_tags() if tag.startswith(("manylinux", "musllinux"))]
    if not here:
        pytest.skip("needs a glibc or musl machine")
    kind, major, minor, machine = here[0].split("_", 3)
    libc = "glibc" if kind == "manylinux" else "musl"
    assert list(platform_tags(machine, f"{libc} {major}.{minor}")) == here
