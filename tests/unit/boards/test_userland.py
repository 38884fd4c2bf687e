"""Programs of another architecture: made once, by apt; or a reason why they cannot be had.

The tools are stand-ins here, small scripts on PATH that do as the real ones do; the real ones run
in tests/farm/boards.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.boards.virtual.emulation import PROGRAMS, Emulation
from harness.boards.virtual.processors import PROCESSORS
from harness.boards.virtual.userland import EMULATOR, NoUserland, last_words, userland
from harness.deadline import Deadline

# Downloads two packages where the settings say, and refuses to work without a state of our own.
APT = """
settings=${1#--config-file=}
echo "$@" >>"$CALLS"
lists=$(sed -n 's/^Dir::State::lists "\\(.*\\)";$/\\1/p' "$settings")
cache=$(sed -n 's/^Dir::Cache "\\(.*\\)";$/\\1/p' "$settings")
[ -d "$lists/partial" ] && [ -d "$cache/archives/partial" ] || exit 9
case "$*" in
  *update*) : >"$lists/main";;
  *install*) [ -e "$lists/main" ] && : >"$cache/archives/a.deb" && : >"$cache/archives/b.deb";;
esac
"""
UNPACK = """
mkdir -p "$3/usr/bin" "$3/usr/share/man"
printf '#!/bin/sh\\n' >"$3/usr/bin/python3"
touch "$3/usr/bin/$(basename "$2")"
"""
Tools = Callable[..., Path]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    """Scripts on PATH by name; `None` for a tool that is missing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    for tool in ("sh", "sed", "mkdir", "touch", "basename", "sleep"):
        place = next(p for p in ("/bin", "/usr/bin") if (Path(p) / tool).exists())
        (folder / tool).symlink_to(Path(place) / tool)
    monkeypatch.setenv("PATH", str(folder))

    def make(**scripts: str | None) -> Path:
        known: dict[str, str | None] = {
            "apt_get": APT,
            "dpkg_deb": UNPACK,
            "emulator": "echo aarch64",
        }
        names = {"apt_get": "apt-get", "dpkg_deb": "dpkg-deb", "emulator": EMULATOR}
        for key, text in {**known, **scripts}.items():
            path = folder / names[key]
            path.unlink(missing_ok=True)
            if text is not None:
                path.write_text(f"#!/bin/sh\n{text}\n")
                path.chmod(0o755)
        return tmp_path / "cache/userlands"

    return make


def test_the_programs_are_made_once(tools: Tools, tmp_path: Path) -> None:
    cache = tools()
    root = userland()
    assert root.parent == cache
    assert sorted(path.name for path in (root / "usr/bin").iterdir()) == [
        "a.deb",
        "b.deb",
        "python3",
    ]
    assert not (root / "usr/share").exists(), "manuals are not kept"
    tools(apt_get="exit 1")
    assert userland() == root
    calls = (tmp_path / "calls").read_text().splitlines()
    assert ["update" in call for call in calls] == [True, False]


def test_nothing_is_left_of_an_attempt_that_failed_and_the_next_one_may_work(tools: Tools) -> None:
    cache = tools(emulator="echo Illegal instruction >&2; exit 132")
    with pytest.raises(NoUserland, match="ends with 132: Illegal instruction"):
        userland()
    assert [path.name for path in cache.iterdir() if not path.name.endswith(".lock")] == []
    tools()
    assert userland().is_dir()


@pytest.mark.parametrize(
    ("scripts", "found", "remedy"),
    [
        ({"emulator": None}, f"no {EMULATOR} on PATH", "apt-get install qemu-user-static"),
        ({"apt_get": None}, "no apt-get on PATH", "remove 'isa'"),
        ({"dpkg_deb": None}, "no dpkg-deb on PATH", "remove 'isa'"),
        (
            {"apt_get": "echo 'E: Unable to locate package python3-minimal'; exit 100"},
            "apt-get install: E: Unable to locate package python3-minimal",
            "point this machine's apt at an archive",
        ),
        ({"dpkg_deb": "echo 'dpkg-deb: error: no space' >&2; exit 2"}, "no space", "is full"),
        ({"emulator": "echo x86_64"}, "the emulated Python ends with 0: x86_64", "remove 'isa'"),
    ],
)
def test_what_is_missing_is_told_with_a_remedy(
    tools: Tools, scripts: dict[str, str | None], found: str, remedy: str
) -> None:
    tools(**scripts)
    with pytest.raises(NoUserland) as caught:
        userland()
    assert found in caught.value.found
    assert remedy in caught.value.remedy
    assert caught.value.expected


def test_a_source_without_the_architecture_is_no_obstacle(tools: Tools) -> None:
    tools(apt_get=f"{APT}\ncase \"$*\" in *update*) echo 'E: a third party'; exit 100;; esac")
    assert userland().is_dir()


def test_why_the_lists_could_not_be_fetched_is_told_when_the_packages_are_missing(
    tools: Tools,
) -> None:
    tools(
        apt_get="case \"$*\" in *update*) echo 'E: could not resolve';; "
        "*) echo 'E: no such package';; esac; exit 100"
    )
    with pytest.raises(NoUserland) as caught:
        userland()
    assert "install: E: no such package; before, apt-get update: E: could not" in caught.value.found


def test_an_archive_that_does_not_answer_ends_at_the_deadline(tools: Tools) -> None:
    tools(apt_get="exec sleep 60")
    with pytest.raises(NoUserland, match="apt-get did not end in time"):
        userland(deadline=Deadline.after(0.2, "a moment"))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("", "it said nothing"),
        ("one\ntwo\n\n", "two"),
        ("E: first\nE: second\nW: a warning\n", "E: second"),
        ("Traceback\nImportError: no ssl\nbye", "ImportError: no ssl"),
    ],
)
def test_the_last_words_are_those_of_the_error(said: str, words: str) -> None:
    assert last_words(said) == words


def test_a_script_names_itself_to_the_program_it_emulates_and_passes_words_on(
    tools: Tools, tmp_path: Path
) -> None:
    tools(emulator='printf "%s\\n" "$@"')
    root, folder = tmp_path / "a root's folder", tmp_path / "board's bin"
    (root / "bin").mkdir(parents=True)
    folder.mkdir()
    for name in PROGRAMS:
        (root / "bin" / name).touch()
    (folder / "od").symlink_to("/bin/sh")
    emulation = Emulation.of(("cortex-a53", "cortex-a76"), root, count=2)
    emulation.write_programs(folder)
    with os.popen(f"\"{folder}/python3\" -c 'a b' ''") as pipe:
        said = pipe.read().split("\n")
    assert said[:4] == ["-cpu", "cortex-a76", "-L", str(root)]
    assert said[4:] == [
        "-0",
        str(folder / "python3"),
        str(root / "bin/python3"),
        "-c",
        "a b",
        "",
        "",
    ]
    assert not (folder / "od").is_symlink()
    assert emulation.cores == (PROCESSORS["cortex-a53"], PROCESSORS["cortex-a76"])


def test_a_folder_that_lacks_a_program_names_it(tools: Tools, tmp_path: Path) -> None:
    tools()
    with pytest.raises(LookupError, match=f"no uname below {tmp_path}; remove that folder"):
        Emulation.of(("cortex-a53",), tmp_path, count=1).command("uname")
