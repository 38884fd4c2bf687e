"""Deploying to virtual boards: what is missing travels, once; a failure leaves nothing behind."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.records import RunSpec
from harness.boards.facts import FolderFacts
from harness.boards.probe import probe
from harness.deadline import Deadline
from harness.deploy.bundle import Bundle, Part, build_bundle, plain_tar
from harness.deploy.models import prepare_tiny
from harness.errors import BoardError, HarnessError
from harness.jobs import lifecycle

if TYPE_CHECKING:
    from tests.farm.deploy.conftest import Target

    MakeTarget = Callable[..., Target]
    MakeBundle = Callable[..., Bundle]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """3 MB that do not compress."""
    path = tmp_path / "model.package"
    path.write_bytes(os.urandom(3 << 20))
    return path


def everything(folder: Path) -> list[str]:
    """Files below a folder, byte code left out."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(p.relative_to(folder)) for p in files if "__pycache__" not in p.parts)


def test_a_second_deploy_sends_nothing(
    target: MakeTarget, make_bundle: MakeBundle, model: Path
) -> None:
    board, bundle = target(), make_bundle()
    told: list[tuple[str, int, int]] = []
    first = board.deploy(bundle, model, on_progress=lambda *x: told.append(x))
    size = sum(part.bytes for part in bundle.parts) + model.stat().st_size
    assert first.sent_bytes == size
    assert first.sent_parts == ("engine", "numpy 0", "psutil 0", "model.package")
    assert ("model.package", 3 << 20, 3 << 20) in told
    (path,) = first.paths.values()
    assert Path(path).read_bytes() == model.read_bytes()
    before = everything(Path(first.root) / "parts")
    told.clear()
    second = board.deploy(bundle, model, on_progress=lambda *x: told.append(x))
    assert (second.sent_bytes, second.sent_parts, told) == (0, (), [])
    assert second.kept_parts == first.sent_parts
    assert (second.root, second.paths) == (first.root, first.paths)
    assert everything(Path(first.root) / "parts") == before


def test_python_files_in_the_login_folder_are_not_imported(
    target: MakeTarget, make_bundle: MakeBundle, model: Path
) -> None:
    board = target()
    for name in ("json", "tarfile", "engine", "numpy", "sysconfig"):
        (board.home / name).mkdir()
        (board.home / name / "__init__.py").write_text("raise RuntimeError('of the user')\n")
    board.facts = probe(board.session, deadline=Deadline.after(30))
    assert board.facts.python is not None
    assert len(board.deploy(make_bundle(), model).sent_parts) == 4


def test_only_the_part_that_changed_travels_and_the_old_one_stays(
    target: MakeTarget, make_bundle: MakeBundle, model: Path
) -> None:
    board = target()
    first = board.deploy(make_bundle(b"1"), model)
    second = board.deploy(make_bundle(b"2"), model)
    assert second.sent_parts == ("engine",)
    code = ["-c", "import engine; print(engine.version)"]
    for deployment, version in ((first, b"1\n"), (second, b"2\n")):
        path = deployment.environment["PYTHONPATH"]
        command = ["env", f"PYTHONPATH={path}", *deployment.python, *code]
        assert board.session.run(command, deadline=Deadline.after(30)).stdout == version


def test_what_the_board_lost_is_sent_again(
    target: MakeTarget, make_bundle: MakeBundle, model: Path
) -> None:
    board = target()
    first = board.deploy(make_bundle(), model)
    next(iter(Path(path) for path in first.paths.values())).unlink()
    second = board.deploy(make_bundle(), model)
    assert second.sent_parts == ("model.package",)


def test_a_full_disk_is_told_with_numbers_and_leaves_nothing(
    target: MakeTarget, make_bundle: MakeBundle, model: Path
) -> None:
    board = target(folders=("~/work", "/tmp/work"), full_disk=True)
    with pytest.raises(BoardError) as caught:
        board.deploy(make_bundle(), model)
    assert caught.value.kind == "no-space"
    assert "MiB free" in str(caught.value)
    assert "/home/work" in str(caught.value)
    assert "/tmp/work" in str(caught.value)
    assert "folders:" in caught.value.remedy
    assert board.run("ls -A ~/work /tmp/work 2>&1 | grep -v 'No such file'").strip() == ""


def test_a_disk_that_fills_up_on_the_way_leaves_no_partial_upload(
    target: MakeTarget, make_bundle: MakeBundle, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = target(full_disk=True)
    monkeypatch.setattr("harness.deploy.push._ON_BOARD", _with_optimism(model.parent))
    with pytest.raises(BoardError) as caught:
        board.deploy(make_bundle(), model)
    assert caught.value.kind == "no-space"
    assert "MiB needed" in str(caught.value)
    assert board.run("cd ~/work && find blobs incoming -type f").strip() == ""


def _with_optimism(folder: Path) -> Path:
    """The board's script, with a survey that believes in an endless disk."""
    from harness.deploy import on_board

    text = Path(on_board.__file__).read_text()
    path = folder / "on_board.py"
    path.write_text(text.replace("if free < need:", "if False:"))
    return path


def test_a_read_only_root_sends_the_deployment_to_the_next_candidate(
    target: MakeTarget, make_bundle: MakeBundle, model: Path
) -> None:
    board = target(folders=("~/work", "/var/lib/work", "/tmp/work"), readonly_root=True)
    deployment = board.deploy(make_bundle(), model)
    assert deployment.root == "/tmp/work"


def test_without_a_usable_folder_each_candidate_is_told_with_its_reason(
    target: MakeTarget, make_bundle: MakeBundle, model: Path
) -> None:
    board = target(folders=("/var/lib/work", "/proc/work"), readonly_root=True)
    with pytest.raises(BoardError) as caught:
        board.deploy(make_bundle(), model)
    assert caught.value.kind == "no-folder"
    assert "/var/lib/work: " in str(caught.value)
    assert "/proc/work: " in str(caught.value)


def test_a_folder_that_went_bad_since_the_probe_is_passed_over(
    target: MakeTarget, make_bundle: MakeBundle, model: Path
) -> None:
    board = target(folders=("~/work", "~/other"))
    (board.home / "work").write_text("a file in the way")
    deployment = board.deploy(make_bundle(), model)
    assert deployment.root == str(board.home / "other")
    only = FolderFacts(path=str(board.home / "work"), writable=True, executable=True)
    board.facts = board.facts.model_copy(update={"folders": (only,)})
    with pytest.raises(BoardError, match="work: ") as caught:
        board.deploy(make_bundle(), model)
    assert caught.value.kind == "no-folder"


def test_a_board_without_python_is_refused_before_anything_is_sent(
    target: MakeTarget, make_bundle: MakeBundle, model: Path
) -> None:
    board = target(no_python=True)
    with pytest.raises(BoardError) as caught:
        board.deploy(make_bundle(), model)
    assert caught.value.kind == "no-python"
    assert not (board.home / "work").exists()


def test_libraries_that_do_not_load_are_removed_again(
    target: MakeTarget, make_bundle: MakeBundle, model: Path
) -> None:
    board = target()
    broken = make_bundle(numpy=b"raise ImportError('GLIBC_2.99 not found')\n")
    with pytest.raises(BoardError, match=r"GLIBC_2\.99 not found") as caught:
        board.deploy(broken, model)
    assert caught.value.kind == "deploy"
    assert everything(board.home / "work" / "parts") == []
    assert everything(board.home / "work" / "incoming") == []
    assert board.deploy(make_bundle(), model).sent_parts == ("engine", "numpy 0", "psutil 0")


def test_parts_that_a_power_loss_damaged_are_sent_again(
    target: MakeTarget, make_bundle: MakeBundle, model: Path
) -> None:
    board, bundle = target(), make_bundle()
    first = board.deploy(bundle, model)
    for path in (board.home / "work" / "parts").rglob("numpy/__init__.py"):
        path.write_bytes(b"\0" * 50)
    (blob,) = first.paths.values()
    os.truncate(blob, 1 << 20)
    second = board.deploy(bundle, model)
    assert sorted(second.sent_parts) == sorted(first.sent_parts)
    assert second.sent_bytes == first.sent_bytes
    assert Path(blob).read_bytes() == model.read_bytes()
    assert board.deploy(bundle, model).sent_bytes == 0


def test_a_user_who_stops_leaves_no_partial_upload(
    target: MakeTarget, make_bundle: MakeBundle, model: Path
) -> None:
    board = target()

    def stop(name: str, done: int, total: int) -> None:
        if name == "model.package" and done > 1 << 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        board.deploy(make_bundle(), model, on_progress=stop)
    assert everything(board.home / "work" / "blobs") == []
    assert everything(board.home / "work" / "incoming") == []


def test_an_upload_that_a_lost_link_cut_goes_on_where_it_ended(
    target: MakeTarget, make_bundle: MakeBundle, model: Path
) -> None:
    board = target()

    def cut(name: str, done: int, total: int) -> None:
        if name == "model.package" and done > 2 << 20:
            board.session.transport.close()

    with pytest.raises(BoardError) as caught:
        board.deploy(make_bundle(), model, on_progress=cut)
    assert caught.value.kind == "board-lost"
    board.reconnect()
    told: list[tuple[str, int]] = []
    board.deploy(make_bundle(), model, on_progress=lambda name, done, _: told.append((name, done)))
    assert min(done for name, done in told if name == "model.package" and done) > 1 << 20
    names = everything(board.home / "work" / "blobs")
    assert len(names) == 1
    assert (board.home / "work" / "blobs" / names[0]).read_bytes() == model.read_bytes()


def test_a_part_that_arrived_whole_before_the_link_was_lost_is_not_sent_again(
    target: MakeTarget, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    board, bundle = target(), make_bundle()
    big = tmp_path / "big.tar"
    content = os.urandom(2 << 20)
    big.write_bytes(plain_tar([("big.bin", content)]))
    digest = hashlib.sha256(big.read_bytes()).hexdigest()
    part = Part("big", "wheel", big, digest, big.stat().st_size, 2 << 20)
    bundle = Bundle((*bundle.parts, part), bundle.hash)
    last = board.home / "last"  # sent after the parts, and never arrives
    last.write_bytes(os.urandom(2 << 20))

    def cut(name: str, done: int, total: int) -> None:
        if name == "last" and done:
            board.session.transport.close()

    with pytest.raises(BoardError):
        board.deploy(bundle, last, on_progress=cut)
    assert (board.home / "work" / "incoming" / digest).exists()
    board.reconnect()
    told: list[tuple[str, int]] = []
    board.deploy(bundle, last, on_progress=lambda name, done, _: told.append((name, done)))
    assert [done for name, done in told if name == "big"] == [0, part.bytes]
    found = board.home / "work" / "parts" / digest / "big.bin"
    assert found.read_bytes() == content


def test_noise_and_a_board_without_sftp_change_nothing(
    target: MakeTarget, make_bundle: MakeBundle, model: Path
) -> None:
    board = target(noisy_shell=True, no_sftp=True)
    deployment = board.deploy(make_bundle(), model)
    (path,) = deployment.paths.values()
    assert Path(path).read_bytes() == model.read_bytes()
    assert board.deploy(make_bundle(), model).sent_bytes == 0


def test_the_real_bundle_runs_the_real_engine(target: MakeTarget, tmp_path: Path) -> None:
    board = target()
    try:
        bundle = build_bundle(board.facts, board.board.name, native=True)
    except HarnessError as error:
        if isinstance(error, BoardError):
            raise
        pytest.skip(f"needs a package registry: {error}")
    if bundle.native is None:
        pytest.skip(f"needs a compiler: {bundle.why_not_native}")
    model = prepare_tiny(0)
    deployment = board.deploy(bundle, model.package)
    case = {"name": "one", "prompt": [1, 2, 3], "max_new": 4}
    spec = RunSpec(
        run_id="real",
        job="tiny",
        package=deployment.paths[model.sha256],
        package_sha256=model.sha256,
        parameters={"cases": [case], "rounds": 2, "context": 64},
        options={"unit": "native"},
    )
    run = lifecycle.start(
        board.session, deployment, spec, None, environment={}, deadline=Deadline.after(60)
    )
    log = lifecycle.follow(
        lambda: board.session, run, tmp_path / "raw", deadline=Deadline.after(60)
    )
    assert (log.status, log.reason) == ("finished", "")
    assert log.ready is not None
    assert log.ready["versions"]["numpy"] == bundle.parts[1].name.split()[1]
    assert len(log.data("case")["turns"][0]["tokens"]) == 4
    assert lifecycle.clean_up(board.session, deployment, run, Deadline.after(30)) == []
    assert board.deploy(bundle, model.package).sent_bytes == 0
