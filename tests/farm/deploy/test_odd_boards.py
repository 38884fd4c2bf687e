"""Whole deployments to boards that are slow, cut off, minimal or hostilely named."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.boards import virtual
from harness.boards.virtual import home as home_module
from harness.boards.virtual.options import Options
from harness.deploy.bundle import Bundle
from harness.errors import BoardError
from harness.inventory import Board

if TYPE_CHECKING:
    from tests.farm.deploy.conftest import Target

    MakeTarget = Callable[..., Target]
    MakeBundle = Callable[..., Bundle]

# What no small busybox has; the deployment must do without.
ABSENT = ("setsid", "timeout", "stat", "truncate", "mktemp", "readlink", "realpath", "dd", "od")
BUSYBOX = """#!/bin/sh
export PATH={folder}
exec sh -c "$SSH_ORIGINAL_COMMAND"
"""
HOSTILE = (
    "two words",
    'it\'s "quoted" `id`',
    "$(touch pwned) ;touch pwned& #",
    "-rf *",
    "a\\b\\n%s%n",
    "ünïcode ✓",
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """2 MB that do not compress."""
    path = tmp_path / "model.package"
    path.write_bytes(os.urandom(2 << 20))
    return path


def left_over(root: Path) -> list[str]:
    """What a deployment must not leave: anything on its way, and files without a whole hash."""
    names = [path.name for path in (root / "incoming").iterdir()]
    return names + [path.name for path in (root / "blobs").iterdir() if len(path.name) != 64]


def test_a_whole_deployment_goes_through_a_link_of_20_kilobytes_a_second(
    target: MakeTarget, make_bundle: MakeBundle
) -> None:
    board, bundle = target(slow_kbps=160), make_bundle()
    first = board.deploy(bundle)
    assert first.sent_bytes == sum(part.bytes for part in bundle.parts)
    assert left_over(Path(first.root)) == []
    assert board.deploy(bundle).sent_bytes == 0
    assert board.session.alive  # slow, and never taken for lost


def test_wherever_the_link_is_cut_the_next_deployment_is_whole(
    target: MakeTarget, make_bundle: MakeBundle, model: Path, relay: Callable[..., Any]
) -> None:
    endpoint = virtual.ensure_running(Board(name="cut-deploy", virtual={}))
    own = Board(name="cut-deploy", **vars(endpoint))
    try:
        way = relay(own)
        work = virtual.board_folder("cut-deploy") / "home" / "work"
        for count in (9_000, 30_000, 1_000_000, 2_100_000):
            board = target(("~/work",), way.board(own))
            way.cut_after(count)
            with pytest.raises(BoardError) as caught:
                board.deploy(make_bundle(), model)
            assert caught.value.kind == "board-lost"
            board.reconnect()
            done = board.deploy(make_bundle(), model)
            assert left_over(work) == []
            assert [Path(path).read_bytes() for path in done.paths.values()] == [model.read_bytes()]
            board.run("rm -rf ~/work")
    finally:
        virtual.stop("cut-deploy")


def test_what_a_cut_link_left_of_a_file_that_is_not_wanted_any_more_is_removed(
    target: MakeTarget, make_bundle: MakeBundle, model: Path, relay: Callable[..., Any]
) -> None:
    board = target(drop_link_at_byte=1_500_000)
    with pytest.raises(BoardError):
        board.deploy(make_bundle(), model)
    work = board.home / "work"
    assert [path.suffix for path in (work / "blobs").iterdir()] == [".partial"]
    board.reconnect()
    board.deploy(make_bundle())
    assert left_over(work) == []


@pytest.mark.parametrize("shell", ["fish", "csh", "ash"])
def test_a_login_shell_of_any_kind_gets_the_same_deployment(
    target: MakeTarget, make_bundle: MakeBundle, model: Path, shell: str
) -> None:
    try:
        home_module.login_shell(Options(shell=shell))
    except home_module.MissingShell:
        pytest.skip(f"needs {shell}")
    board = target(shell=shell)
    done = board.deploy(make_bundle(), model)
    assert len(done.sent_parts) == 4
    assert board.deploy(make_bundle(), model).sent_bytes == 0


def test_busybox_alone_without_setsid_or_sftp_is_enough_to_deploy(
    target: MakeTarget, make_bundle: MakeBundle, model: Path, servers: Any, tmp_path: Path
) -> None:
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("needs busybox")
    programs = tmp_path / "bin"
    programs.mkdir()
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    for name in set(applets.stdout.split()) - {*ABSENT, "busybox"}:
        (programs / name).symlink_to(busybox)
    (programs / "busybox").symlink_to(busybox)
    (programs / "python3").symlink_to(home_module.base_interpreter())
    server = servers.sshd(force=BUSYBOX.format(folder=programs), sftp=None)
    board = target((str(tmp_path / "work"),), server.board)
    assert "setsid" not in board.facts.tools
    assert "busybox" in board.facts.tools
    done = board.deploy(make_bundle(), model)
    assert [Path(path).read_bytes() for path in done.paths.values()] == [model.read_bytes()]
    assert board.deploy(make_bundle(), model).sent_bytes == 0


@pytest.mark.parametrize("name", HOSTILE)
def test_a_folder_of_any_name_is_a_folder_and_no_command(
    target: MakeTarget, make_bundle: MakeBundle, model: Path, name: str
) -> None:
    board = target((f"~/{name}/work",))
    done = board.deploy(make_bundle(), model)
    root = board.home / name / "work"
    assert done.root == str(root)
    assert [Path(path).read_bytes() for path in done.paths.values()] == [model.read_bytes()]
    assert board.deploy(make_bundle(), model).sent_bytes == 0
    assert sorted(path.name for path in board.home.iterdir()) == sorted(["bin", name])
    assert list(board.home.rglob("pwned")) == []


def test_a_folder_that_python_cannot_be_given_is_passed_over_with_its_reason(
    target: MakeTarget, make_bundle: MakeBundle
) -> None:
    board = target(("~/a:b", "~/good"))
    assert board.deploy(make_bundle()).root == str(board.home / "good")
    only = [folder for folder in board.facts.folders if ":" in folder.path]
    board.facts = board.facts.model_copy(update={"folders": tuple(only)})
    with pytest.raises(BoardError, match="cannot hold a ':'") as caught:
        board.deploy(make_bundle())
    assert caught.value.kind == "no-folder"
    assert not (board.home / "a:b").exists()
