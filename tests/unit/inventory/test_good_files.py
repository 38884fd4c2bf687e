"""devices.yaml files that are right, and what they mean."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.options import EngineOptions
from harness.errors import HarnessError
from harness.inventory import Board, Budget, Engine, Farm, Virtual, load_farm

KEY = "SHA256:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU"
GOLDEN = f"""\
defaults: {{user: root, stress_minutes: 30}}
boards:
  rk3588-01:
    host: 192.0.2.11            # name, IPv4, "[v6]:port", jump: other-board-or-host
    host_key: {KEY}
    tags: [rk3588, npu, nightly]
    toolchain: {{kind: zig, target: aarch64-linux-gnu.2.31, cpu: cortex_a76}}
    threads: auto               # or a number; `pin: big` | [4,5,6,7]
    power: {{driver: labgrid, place: rk3588-01}}
    budget: {{memory_mb: 4096, min_tokens_per_s: 12, max_ttft_s: 1.0, min_cosine: 0.99,
             max_kl: 0.05, min_end_of_context_ratio: 0.8}}
  virt-1: {{virtual: {{}}}}
"""


def farm_of(text: str, folder: Path) -> Farm:
    path = folder / "devices.yaml"
    path.write_text(text, encoding="utf-8")
    return load_farm(path)


def board_of(lines: str, folder: Path) -> Board:
    """The board of a file with one entry, whose lines are `lines`."""
    indented = "".join(f"    {line}\n" for line in lines.splitlines())
    return farm_of(f"boards:\n  b:\n{indented}", folder).boards["b"]


def test_the_documented_example_is_read_as_written(tmp_path: Path) -> None:
    farm = farm_of(GOLDEN, tmp_path)
    assert list(farm.boards) == ["rk3588-01", "virt-1"]
    board = farm.boards["rk3588-01"]
    assert (board.host, board.port, board.user, board.host_key) == ("192.0.2.11", 22, "root", KEY)
    assert board.tags == ("rk3588", "npu", "nightly")
    assert board.toolchain is not None
    assert (board.toolchain.kind, board.toolchain.target) == ("zig", "aarch64-linux-gnu.2.31")
    assert board.threads == "auto"
    assert board.power is not None
    assert (board.power.driver, board.power.place) == ("labgrid", "rk3588-01")
    assert board.stress_minutes == 30.0
    assert board.budget == Budget(
        memory_mb=4096,
        min_tokens_per_s=12,
        max_ttft_s=1.0,
        min_cosine=0.99,
        max_kl=0.05,
        min_end_of_context_ratio=0.8,
    )
    assert farm.boards["virt-1"].virtual == Virtual()


@pytest.mark.parametrize("written", ["4225e043", "no", "0755", "1.10", "0o17", "null", "~", "1_0"])
def test_strings_stay_as_they_were_written(tmp_path: Path, written: str) -> None:
    board = board_of(
        f"host: h\ntags: [{written}]\nenvironment: {{A: {written}}}\npython: {written}", tmp_path
    )
    assert (board.tags, board.environment) == ((written,), {"A": written})
    assert board.python == written


def test_a_mac_address_and_a_time_stay_strings(tmp_path: Path) -> None:
    board = board_of("host: h\nenvironment: {MAC: 00:1a:2b:3c:4d:5e, AT: 12:30:45}", tmp_path)
    assert board.environment == {"MAC": "00:1a:2b:3c:4d:5e", "AT": "12:30:45"}


def test_a_board_named_no_or_like_a_number_keeps_its_name(tmp_path: Path) -> None:
    farm = farm_of("boards:\n  no: {host: a}\n  0755: {host: b}\n  1e3: {host: c}\n", tmp_path)
    assert list(farm.boards) == ["no", "0755", "1e3"]


@pytest.mark.parametrize(
    ("written", "host", "port"),
    [
        ("rk-01", "rk-01", 22),
        ("rk_01.lab.example.org:2222", "rk_01.lab.example.org", 2222),
        ("192.0.2.11:2201", "192.0.2.11", 2201),
        ('"[2001:db8::1]:2222"', "2001:db8::1", 2222),
        ('"[::1]"', "::1", 22),
    ],
)
def test_an_address_may_carry_a_port(tmp_path: Path, written: str, host: str, port: int) -> None:
    board = board_of(f"host: {written}", tmp_path)
    assert (board.host, board.port) == (host, port)


def test_a_boards_own_values_go_before_the_defaults(tmp_path: Path) -> None:
    farm = farm_of(
        "defaults:\n  user: pi\n  threads: 4\n  tags: [all]\n"
        "  budget: {memory_mb: 100, max_kl: 0.1}\n  environment: {A: '1', B: '2'}\n"
        "boards:\n  plain: {host: a}\n"
        "  own: {host: b, user: root, tags: [mine], budget: {max_kl: 0.2},\n"
        "        environment: {B: '3'}}\n",
        tmp_path,
    )
    plain, own = farm.boards["plain"], farm.boards["own"]
    assert (plain.user, plain.threads, plain.tags) == ("pi", 4, ("all",))
    assert (own.user, own.threads, own.tags) == ("root", 4, ("mine",))
    assert (own.budget.memory_mb, own.budget.max_kl) == (100, 0.2)
    assert own.environment == {"A": "1", "B": "3"}


def test_defaults_for_reaching_boards_do_not_concern_virtual_ones(tmp_path: Path) -> None:
    farm = farm_of("defaults: {key_file: id, port: 2222}\nboards: {v: {virtual: {}}}\n", tmp_path)
    assert farm.boards["v"].key_file is None


def test_a_key_file_is_relative_to_the_farm_file(tmp_path: Path) -> None:
    assert board_of("host: h\nkey_file: keys/id", tmp_path).key_file == tmp_path / "keys/id"
    home = board_of("host: h\nkey_file: ~/.ssh/id", tmp_path).key_file
    assert home == Path("~/.ssh/id").expanduser()


@pytest.mark.parametrize(
    ("written", "pin"),
    [("big", "big"), ("auto", "auto"), ("none", "none"), ("[4, 5, 6]", (4, 5, 6)), ("[0]", (0,))],
)
def test_pinning_is_a_word_or_cores(tmp_path: Path, written: str, pin: object) -> None:
    assert board_of(f"host: h\npin: {written}", tmp_path).pin == pin


def test_every_fault_of_a_virtual_board_has_its_type(tmp_path: Path) -> None:
    board = board_of(
        "virtual:\n  cpus: 2\n  memory_mb: 512\n  isa: native\n  shell: fish\n"
        "  freeze_after: 2.5\n  refuse: 3\n  slow_kbps: 800\n  drop_link_at: 1\n  reboot_at: 4\n"
        "  drop_link_at_byte: 70000\n"
        "  full_disk: yes\n  readonly_root: false\n  noexec_tmp: on\n  clock: 1970\n"
        "  noisy_shell: true\n  no_sftp: true\n  host_key_changes: True\n  no_python: no\n",
        tmp_path,
    )
    assert board.virtual == Virtual(
        cpus=2,
        memory_mb=512,
        isa="native",
        shell="fish",
        freeze_after=2.5,
        refuse=3,
        slow_kbps=800,
        drop_link_at=1,
        drop_link_at_byte=70000,
        reboot_at=4,
        full_disk=True,
        noexec_tmp=True,
        clock=1970,
        noisy_shell=True,
        no_sftp=True,
        host_key_changes=True,
    )


@pytest.mark.parametrize(
    ("written", "cores"),
    [
        ("cortex-a76", ("cortex-a76",)),
        ("aarch64", ("aarch64",)),
        ("[cortex-a53, cortex-a76]", ("cortex-a53", "cortex-a76")),
    ],
)
def test_the_cores_of_a_virtual_board_are_one_kind_or_several(
    tmp_path: Path, written: str, cores: tuple[str, ...]
) -> None:
    virtual = board_of(f"virtual: {{isa: {written}}}", tmp_path).virtual
    assert virtual is not None
    assert virtual.isa == cores


def test_power_may_be_commands_or_none(tmp_path: Path) -> None:
    text = "host: h\npower: {command: {on: relay 1, off: relay 0, status: relay}}"
    power = board_of(text, tmp_path).power
    assert power is not None
    assert power.command is not None
    assert (power.driver, power.command.on, power.command.off) == ("command", "relay 1", "relay 0")
    assert board_of("host: h\npower: none", tmp_path).power is None


def test_a_jump_through_boards_is_resolved_to_the_way(tmp_path: Path) -> None:
    farm = farm_of(
        f"boards:\n  far: {{host: 10.0.0.2, jump: near}}\n"
        f"  near: {{host: '[2001:db8::7]:2200', host_key: {KEY}, user: gate, jump: "
        f"{{host: bastion:22, user: me, host_key: {KEY}}}}}\n",
        tmp_path,
    )
    hop = farm.boards["far"].jump
    assert hop is not None
    assert (hop.name, hop.host, hop.port, hop.user, hop.host_key) == (
        "near",
        "2001:db8::7",
        2200,
        "gate",
        KEY,
    )
    assert hop.via is not None
    assert (hop.via.host, hop.via.user, hop.via.via) == ("bastion", "me", None)


@pytest.mark.parametrize("name", ["rk3588-01", "virt-1"])
def test_a_board_survives_json(tmp_path: Path, name: str) -> None:
    board = farm_of(GOLDEN, tmp_path).boards[name]
    assert Board.model_validate_json(board.model_dump_json()) == board


def test_boards_are_selected_by_name_and_by_every_tag(tmp_path: Path) -> None:
    farm = farm_of(
        "boards:\n  a: {host: a, tags: [npu, nightly]}\n  b: {host: b, tags: [npu]}\n"
        "  c: {host: c}\n",
        tmp_path,
    )

    def names(*asked: str, tags: tuple[str, ...] = ()) -> list[str]:
        return [board.name for board in farm.select(asked, tags)]

    assert names() == ["a", "b", "c"]
    assert names("c", "a") == ["a", "c"]
    assert names(tags=("npu",)) == ["a", "b"]
    assert names(tags=("npu", "nightly")) == ["a"]
    assert names("b", tags=("npu",)) == ["b"]
    with pytest.raises(HarnessError, match="no board has tags nightly among b"):
        names("b", tags=("nightly",))


def test_an_unknown_name_or_tag_is_answered_with_near_ones(tmp_path: Path) -> None:
    farm = farm_of(GOLDEN, tmp_path)
    with pytest.raises(HarnessError, match=r"no board 'virt-2'.*did you mean 'virt-1'\?"):
        farm.select(["virt-2"])
    with pytest.raises(HarnessError, match=r"no tag 'nigthly'.*did you mean 'nightly'\?"):
        farm.select(tags=["nigthly"])


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "devices.yaml"
    path.write_bytes(b"\xef\xbb\xbfboards:\r\n  a: {host: h}\r\n")
    assert list(load_farm(path).boards) == ["a"]


@given(st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True), st.text()))
def test_any_quoted_text_comes_back_as_it_was(values: dict[str, str]) -> None:
    import json
    import tempfile

    from harness.inventory.scalars import is_secret_name

    values = {key: text for key, text in values.items() if not is_secret_name(key)}
    # JSON's strings are YAML's double-quoted ones; JSON's surrogate pairs are not.
    values = {key: text for key, text in values.items() if all(ord(c) < 0x10000 for c in text)}
    with tempfile.TemporaryDirectory() as folder:
        board = board_of(f"host: h\nenvironment: {json.dumps(values)}", Path(folder))
    assert board.environment == values


def test_engine_options_are_those_of_the_engine(tmp_path: Path) -> None:
    board = board_of(
        "host: h\nengine: {unit: native, kv: int8, fused: no, passes_off: [qkv], keep: 4}", tmp_path
    )
    assert board.engine.asked == {
        "unit": "native", "kv": "int8", "fused": False, "passes_off": ("qkv",), "keep": 4,
    }  # fmt: skip
    assert set(Engine.model_fields) == {f.name for f in dataclasses.fields(EngineOptions)}


def test_threads_may_stand_with_the_engines_options(tmp_path: Path) -> None:
    assert board_of("host: h\nengine: {threads: 4}", tmp_path).wanted_threads == 4
    assert board_of("host: h\nthreads: 3\nengine: {kv: f16}", tmp_path).wanted_threads == 3
    assert board_of("host: h", tmp_path).wanted_threads == "auto"


def test_a_boards_engine_options_are_added_to_the_defaults_of_the_same_unit(tmp_path: Path) -> None:
    (tmp_path / "devices.yaml").write_text(
        "defaults: {engine: {unit: native, kv: int8}}\n"
        "boards:\n"
        "  same: {host: h, engine: {huge_pages: yes}}\n"
        "  other: {host: h, engine: {unit: packed}}\n"
    )
    boards = load_farm(tmp_path / "devices.yaml").boards
    assert boards["same"].engine.asked == {"unit": "native", "kv": "int8", "huge_pages": True}
    assert boards["other"].engine.asked == {"unit": "packed"}


def test_the_command_line_goes_before_the_board_and_another_unit_drops_its_options() -> None:
    board = Engine(unit="native", kv="int8", fused=False)
    assert Engine(kv="f32").over(board).asked == {"unit": "native", "kv": "f32", "fused": False}
    assert Engine(unit="native", kv="f32").over(board).asked["fused"] is False
    assert Engine(unit="packed").over(board).asked == {"unit": "packed"}
