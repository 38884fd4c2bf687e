"""devices.yaml files with a mistake: the message leads to the line and says what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.inventory import Board, Virtual, load_farm


def refusal(text: str | bytes, folder: Path) -> str:
    (folder / "devices.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    before = Path.cwd()
    os.chdir(folder)
    try:
        with pytest.raises(HarnessError) as caught:
            load_farm(Path("devices.yaml"))
    finally:
        os.chdir(before)
    return str(caught.value)


KEY = "SHA256:" + "A" * 43
# text → what the message begins with, and what else it holds
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    # the document
    "": ("devices.yaml:1: the file is empty", ("boards",)),
    "- a\n": ("devices.yaml:1: a list", ("boards",)),
    "boards: {}\n": ("devices.yaml:1: no boards", ()),
    "defaults: {}\n": ("devices.yaml:1: no boards", ()),
    "boards: [a]\n": ("devices.yaml:1: 'boards' is a list", ("a mapping",)),
    "boards:\n  a: {host: h}\nbords: {}\n": (
        "devices.yaml:3: unknown key 'bords'",
        ("did you mean 'boards'?", "one of defaults, boards"),
    ),
    "boards:\n  a: {host: h}\n---\nboards: {}\n": ("devices.yaml:3: a second YAML document", ()),
    # YAML
    "boards:\n  a:\n\thost: h\n": ("devices.yaml:3: a tab", ("spaces",)),
    "boards:\n  a: {host: h}\n  a: {host: g}\n": (
        "devices.yaml:3: the key 'a' stands twice, first in line 2",
        ("remove one",),
    ),
    "boards:\n  a:\n    host: h\n    host: h\n": ("devices.yaml:4: the key 'host' stands", ()),
    "x: &a [1]\nboards: *a\n": ("devices.yaml:1: the anchor or alias 'a'", ("defaults",)),
    "boards:\n  a: *nothing\n": ("devices.yaml:2: the anchor or alias 'nothing'", ()),
    "boards:\n  a: {<<: {host: h}}\n": ("devices.yaml:2: the merge key '<<'", ("defaults",)),
    "boards:\n  a: !!python/object:os.system {}\n": ("devices.yaml:2: the tag", ("remove",)),
    "boards:\n  ? [a]\n  : {host: h}\n": ("devices.yaml:2: a list or mapping as a key", ()),
    "boards:\n  a: {host: 'h\n": ("devices.yaml:3: not YAML", ("quotes",)),
    "boards:\n  a: {host: h\n": ("devices.yaml:3: not YAML", ()),
    "boards:\n a: {host: h}\n  b: {host: g}\n": ("devices.yaml:3: not YAML", ("indentation",)),
    "boards:\n  a: {host: h, tags: [x, @y]}\n": ("devices.yaml:2: not YAML", ()),
    "boards:\n  a: {host: \x07}\n": ("devices.yaml:2: control character U+0007", ()),
    "boards:\n  a: {host: h, tags: " + "[" * 20 + "]" * 20 + "}\n": (
        "devices.yaml:2: more than 12 levels",
        (),
    ),
    # boards
    "boards:\n  a: h\n": ("devices.yaml:2: board 'a' is text", ("a mapping",)),
    "boards:\n  a:\n": ("devices.yaml:2: the key 'a' has no value", ()),
    "boards:\n  a: {}\n": ("devices.yaml:2: board 'a' has neither 'host' nor 'virtual'", ()),
    "boards:\n  -a b: {host: h}\n": ("devices.yaml:2: the board name '-a b'", ("letters",)),
    "boards:\n  a: {host: h, name: b}\n": ("devices.yaml:2: unknown key 'name'", ()),
    "boards:\n  a:\n    host: h\n    thread: 4\n": (
        "devices.yaml:4: unknown key 'thread'",
        ("did you mean 'threads'?", "one of host, port"),
    ),
    "boards:\n  a:\n    host: h\n    budget:\n      memory: 5\n": (
        "devices.yaml:5: unknown key 'memory' in budget",
        ("'memory_mb'", "min_cosine"),
    ),
    "boards:\n  a:\n    virtual: {freze_after: 3}\n": (
        "devices.yaml:3: unknown key 'freze_after' in virtual",
        ("did you mean 'freeze_after'?",),
    ),
    "boards:\n  a:\n    virtual: {}\n    host: h\n": ("devices.yaml:2: 'virtual' together", ()),
    "boards:\n  a:\n    virtual: yes\n": ("devices.yaml:3: virtual: 'yes'", ("a mapping",)),
    # defaults
    "defaults: {host: h}\nboards: {a: {virtual: {}}}\n": (
        "devices.yaml:1: 'host' in defaults",
        (),
    ),
    "defaults:\n  thraeds: 3\nboards: {a: {host: h}, b: {host: g}}\n": (
        "devices.yaml:2: unknown key 'thraeds'",
        ("did you mean 'threads'?",),
    ),
    "defaults:\n  threads: x\nboards:\n  a: {host: h, threads: 3}\n": (
        "devices.yaml:2: threads: 'x'",
        ("'auto' or a whole number",),
    ),
    "defaults: 3\nboards: {a: {host: h}}\n": ("devices.yaml:1: 'defaults' is text", ()),
    # values
    "boards:\n  a: {host: 2001:db8::1}\n": (
        "devices.yaml:2: '2001:db8::1'",
        ("write it as '[2001:db8::1]'",),
    ),
    "boards:\n  a: {host: 300.1.1.1}\n": ("devices.yaml:2: host: '300.1.1.1', which is no", ()),
    "boards:\n  a: {host: 'h:99999'}\n": ("devices.yaml:2: '99999'", ("1 and 65535",)),
    "boards:\n  a: {host: 'me@h'}\n": ("devices.yaml:2: host: 'h' with a user", ("'user:'",)),
    "boards:\n  a: {host: 'h;rm -rf'}\n": ("devices.yaml:2: host: 'h;rm -rf'", ()),
    "boards:\n  a: {host: 'h:22', port: 22}\n": ("devices.yaml:2: a port in 'host' and", ()),
    "boards:\n  a: {host: [h]}\n": ("devices.yaml:2: host: a list", ("text",)),
    "boards:\n  a: {host: h, port: 0755}\n": ("devices.yaml:2: port: '0755'", ("65535",)),
    "boards:\n  a: {host: h, tags: npu}\n": ("devices.yaml:2: tags: 'npu'", ("[a, b]",)),
    "boards:\n  a:\n    host: h\n    tags:\n      - ok\n      - not ok\n": (
        "devices.yaml:6: tags.1: 'not ok'",
        ("without spaces",),
    ),
    "boards:\n  a: {host: h, pin: small}\n": (
        "devices.yaml:2: pin: 'small'",
        ("'big', 'none' or a",),
    ),
    "boards:\n  a: {virtual: {isa: avr}}\n": (
        "devices.yaml:2: virtual.isa: 'avr'",
        ("'native'", "cortex-a53, cortex-a76, aarch64"),
    ),
    "boards:\n  a: {virtual: {isa: [cortex-a53, native]}}\n": (
        "devices.yaml:2: virtual.isa: 'native'",
        ("little cores first",),
    ),
    "boards:\n  a: {virtual: {isa: aarch64, memory_mb: 512}}\n": (
        "devices.yaml:2: virtual: 'memory_mb' together with 'isa'",
        ("the limit would be the emulator's",),
    ),
    "boards:\n  a: {virtual: {isa: []}}\n": ("devices.yaml:2: virtual.isa: an empty list", ()),
    "boards:\n  a: {virtual: {isa: {a76: 4}}}\n": ("devices.yaml:2: virtual.isa: a mapping", ()),
    "boards:\n  a: {host: h, pin: [0, 07]}\n": (
        "devices.yaml:2: pin: '07'",
        ("in decimal without leading zeros",),
    ),
    # the engine
    "boards:\n  a:\n    host: h\n    engine:\n      kv: f8\n": (
        "devices.yaml:5: engine.kv: 'f8'",
        ("one of f32, f16, int8, int4",),
    ),
    "boards:\n  a: {host: h, engine: {unit: gpu}}\n": (
        "devices.yaml:2: engine.unit: 'gpu'",
        ("one of auto, ", "packed"),
    ),
    "boards:\n  a: {host: h, engine: {kvs: f16}}\n": (
        "devices.yaml:2: unknown key 'kvs' in engine",
        ("did you mean 'kv'",),
    ),
    "boards:\n  a:\n    host: h\n    engine: {unit: packed, executor: compiled}\n": (
        "devices.yaml:4: engine: engine option executor is 'compiled' with unit 'packed'",
        ("executor sync",),
    ),
    "boards:\n  a:\n    host: h\n    engine:\n      threads: none\n": (
        "devices.yaml:5: engine.threads: 'none'",
        ("'auto' or a whole number",),
    ),
    "boards:\n  a: {host: h, threads: 2, engine: {threads: 4}}\n": (
        "devices.yaml:2: 'threads' beside 'engine' and inside it",
        ("one of them",),
    ),
    "boards:\n  a: {host: h, engine: {passes_off: qkv}}\n": (
        "devices.yaml:2: engine.passes_off: 'qkv'",
        ("a list of fusion passes",),
    ),
    "boards:\n  a: {host: h, pin: [1, 1]}\n": ("devices.yaml:2: pin: [1, 1]", ("different",)),
    "boards:\n  a: {host: h, host_key: 'SHA256:...'}\n": (
        "devices.yaml:2: host_key: 'SHA256:...'",
        ("harness boards enrol",),
    ),
    "boards:\n  a: {host: h, stress_minutes: .nan}\n": ("devices.yaml:2: stress_minutes", ()),
    "boards:\n  a: {host: h, stress_minutes: 1e999}\n": ("devices.yaml:2: stress_minutes", ()),
    "boards:\n  a: {host: h, budget: {min_cosine: 1.5}}\n": (
        "devices.yaml:2: budget.min_cosine: 1.5",
        ("from 0 to 1",),
    ),
    "boards:\n  a: {host: h, environment: {'A B': x}}\n": (
        "devices.yaml:2: environment.A B",
        ("environment variable",),
    ),
    "boards:\n  a: {host: h, folders: [tmp]}\n": ("devices.yaml:2: folders.0: 'tmp'", ("'/'",)),
    "boards:\n  a: {host: h, folders: ['/a:b']}\n": (
        "devices.yaml:2: folders.0: '/a:b'",
        ("without ':'",),
    ),
    "boards:\n  a: {host: h, folders: []}\n": ("devices.yaml:2: an empty list of folders", ()),
    "boards:\n  a: {host: h, toolchain: {kind: gcc}}\n": (
        "devices.yaml:2: toolchain.kind: 'gcc'",
        ("'zig' or 'cc'",),
    ),
    "boards:\n  a: {host: h, toolchain: {target: x}}\n": (
        "devices.yaml:2: the key 'kind' is missing in toolchain",
        (),
    ),
    "boards:\n  a: {host: h, toolchain: {kind: cc}}\n": (
        "devices.yaml:2: toolchain: kind: cc without 'command'",
        (),
    ),
    "boards:\n  a: {host: h, power: {driver: labgrid}}\n": (
        "devices.yaml:2: power: driver: labgrid without 'place'",
        (),
    ),
    "boards:\n  a: {host: h, console: {driver: labgrid, command: cat}}\n": (
        "devices.yaml:2: console: driver: labgrid without 'place'",
        (),
    ),
    "boards:\n  a: {host: h, power: {driver: fake}}\n": (
        "devices.yaml:2: power: driver: fake for a board of hardware",
        ("or a virtual board",),
    ),
    "boards:\n  a: {virtual: {}, power: {driver: fake, place: p}}\n": (
        "devices.yaml:2: power: driver: fake with 'place'",
        ("nothing beside 'driver'",),
    ),
    "boards:\n  a: {host: h, boot_seconds: 0}\n": (
        "devices.yaml:2: boot_seconds: 0",
        ("from 1 to 3600",),
    ),
    "boards:\n  a: {virtual: {full_disk: maybe}}\n": (
        "devices.yaml:2: virtual.full_disk: 'maybe'",
        ("true or false",),
    ),
    "boards:\n  a: {virtual: {refuse: -1}}\n": (
        "devices.yaml:2: virtual.refuse: '-1'",
        ("or 'al",),
    ),
    # jumps
    "boards:\n  aa: {host: h, jump: bb}\n  b: {host: g}\n": (
        "devices.yaml:2: jump: 'bb' is no board",
        ("host, user and host_key",),
    ),
    "boards:\n  a: {host: h, jump: b}\n  b: {host: g, jump: a}\n": (
        "devices.yaml:3: the jumps form a circle: a → b → a",
        (),
    ),
    "boards:\n  a: {host: h, jump: v}\n  v: {virtual: {}}\n": (
        "devices.yaml:2: jump: 'v' is a virtual board",
        (),
    ),
    "boards:\n  a: {host: h, jump: {host: g, via: x}}\n": ("devices.yaml:2: unknown key 'via'", ()),
}


@pytest.mark.parametrize("text", CASES, ids=range(len(CASES)))
def test_a_mistake_is_told_with_its_line_and_what_to_do(text: str, tmp_path: Path) -> None:
    begins, holds = CASES[text]
    message = refusal(text, tmp_path)
    assert message.startswith(begins)
    for part in holds:
        assert part in message


@pytest.mark.parametrize(
    "line",
    [
        "password: hunter2",
        "ssh_password: hunter2",
        "sudo-passwd: hunter2",
        "apiToken: hunter2",
        "environment: {HF_TOKEN: hunter2}",
        "environment: {DB_SECRET: hunter2}",
        "private_key: hunter2",
    ],
)
def test_a_secret_is_refused_without_being_repeated(line: str, tmp_path: Path) -> None:
    message = refusal(f"boards:\n  a:\n    host: h\n    {line}\n", tmp_path)
    assert message.startswith("devices.yaml:4: the key ")
    assert "HARNESS_SSH_PASSWORD_" in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("environment: {MODELS: 'see https://ann:hunter2@host/models'}", "environment.MODELS"),
        ("power: {command: {on: 'curl http://a:hunter2@pdu/1', off: x}}", "power.command.on"),
    ],
)
def test_a_password_in_an_address_is_refused_without_being_repeated(
    tmp_path: Path, line: str, key: str
) -> None:
    message = refusal(f"boards:\n  a:\n    host: h\n    {line}\n", tmp_path)
    assert message.startswith(f"devices.yaml:4: {key}: a URL with a password in it")
    assert "hunter2" not in message


def test_the_text_of_a_private_key_is_refused_without_being_repeated(tmp_path: Path) -> None:
    message = refusal(
        "boards:\n  a:\n    host: h\n    key_file: |\n"
        "      -----BEGIN OPENSSH PRIVATE KEY-----\n      hunter2\n",
        tmp_path,
    )
    assert "the text of a private key" in message
    assert "hunter2" not in message


def test_words_that_only_resemble_secrets_are_ordinary_keys(tmp_path: Path) -> None:
    path = tmp_path / "devices.yaml"
    path.write_text("boards: {a: {host: h, environment: {MAX_TOKENS: '5', PASSES: '2'}}}\n")
    assert load_farm(path).boards["a"].environment == {"MAX_TOKENS": "5", "PASSES": "2"}


def test_further_mistakes_are_listed_by_line(tmp_path: Path) -> None:
    text = "boards:\n  a:\n    host: h\n    x: 1\n    pin: no\n  b: {}\n"
    message = refusal(text, tmp_path)
    assert message.startswith("devices.yaml:4: unknown key 'x'")
    assert message.endswith("also wrong: line 5, 6")


def test_a_missing_file_is_answered_with_the_option_that_names_one(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"none\.yaml: no such file.*--farm FILE"):
        load_farm(tmp_path / "none.yaml")


def test_a_folder_is_no_farm(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"cannot be read: .*--farm FILE"):
        load_farm(tmp_path)


def test_bytes_that_are_no_text_are_told_with_their_line(tmp_path: Path) -> None:
    message = refusal(b"boards:\n  a: {host: \xff}\n", tmp_path)
    assert message.startswith("devices.yaml:2: byte 0xff is not UTF-8")


def test_a_huge_file_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    assert "bytes; expected at most" in refusal(b"#" * (2 << 20), tmp_path)


def test_a_board_made_in_code_is_checked_like_one_from_a_file() -> None:
    assert Board(name="v", virtual=Virtual(refuse=2)).virtual == Virtual(refuse=2)
    for wrong in ({"port": 0}, {"threads": True}, {"pin": []}, {"host": "a b"}):
        with pytest.raises(ValueError, match="found"):
            Board(name="b", **{"host": "h", **wrong})


@given(st.one_of(st.text(max_size=200), st.binary(max_size=200)))
def test_any_text_is_a_farm_or_a_clear_refusal(text: str | bytes) -> None:
    check(text)


WORDS = st.sampled_from(
    ["boards", "defaults", "host", "virtual", "budget", "jump", "pin", "a", "no", "1.10", "0x1"]
)
TREES = st.recursive(
    WORDS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.dictionaries(WORDS, inner, max_size=3).map(
            lambda table: "{" + ", ".join(f"{k}: {v}" for k, v in table.items()) + "}"
        ),
    ),
    max_leaves=12,
)


@given(TREES, TREES)
def test_any_shape_of_values_is_a_farm_or_a_clear_refusal(board: str, defaults: str) -> None:
    check(f"defaults: {defaults}\nboards: {{b: {board}, c: {{host: h}}}}\n")


def check(text: str | bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "devices.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
        try:
            said = str(load_farm(path).path)
        except HarnessError as error:
            said = str(error)
    assert said.startswith(str(path))


def test_what_is_no_number_at_all_is_not_advised_to_be_decimal(tmp_path: Path) -> None:
    told = refusal("boards:\n  a: {host: h, pin: [0, x]}\n", tmp_path)
    assert told == "devices.yaml:2: pin: 'x'; expected a whole number"


def test_the_lines_of_other_mistakes_do_not_repeat_the_first_ones(tmp_path: Path) -> None:
    told = refusal("boards:\n  a: {host: h, pin: x, threads: y}\n", tmp_path)
    assert "also wrong" not in told
    told = refusal("boards:\n  a: {host: h, pin: x, threads: y}\n  b: {host: g, q: 1}\n", tmp_path)
    assert told.startswith("devices.yaml:2:")
    assert told.endswith("also wrong: line 3")
