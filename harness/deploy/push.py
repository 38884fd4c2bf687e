"""Putting a bundle and models on a board by content hash: only what is missing travels."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.deadline import Deadline
from harness.deploy.answers import BYTES_LIMIT, parse_answer
from harness.deploy.bundle import Bundle, usable_python
from harness.deploy.cache import remembered_sha256
from harness.errors import BoardError, HarnessError

if TYPE_CHECKING:
    from harness.boards.facts import Facts
    from harness.connect import BoardSession

Progress = Callable[[str, int, int], None]  # (name, bytes done, bytes in all)

KEPT_BYTES = 4 << 30  # of old parts and models on a board; older ones go first
CLEAN_S = 20.0
PYTHON_FLAGS = ("-S", "-s")  # nothing that is installed on the board is imported
# What an import proves: the libraries load on this libc and this core.
SMOKE = "import engine, numpy, psutil; numpy.ones((4, 4), 'f4') @ numpy.ones((4, 4), 'f4')"
SMOKE_NATIVE = "; from engine.native.library import load; load()"
ROOT_MARK = "@work-folder@"  # in the trial's environment: only the board knows its work folder
_ON_BOARD = Path(__file__).with_name("on_board.py")


@dataclasses.dataclass(frozen=True)
class Deployment:
    """What lies where on a board. `paths` names files by SHA-256; paths are the board's."""

    root: str
    python: tuple[str, ...]  # argv that starts Python
    environment: Mapping[str, str]
    paths: Mapping[str, str]
    sent_bytes: int = 0
    sent_parts: tuple[str, ...] = ()
    kept_parts: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Item:
    """One thing that must be on the board."""

    name: str
    kind: str  # "parts": a tar to unpack; "blobs": a file
    path: Path
    sha256: str
    bytes: int
    space: int  # the most it takes on the board while it is installed

    def target(self, root: str) -> str:
        folder = "incoming" if self.kind == "parts" else "blobs"
        return f"{root}/{folder}/{self.sha256}"


def deploy(
    session: BoardSession,
    facts: Facts,
    bundle: Bundle,
    files: Sequence[Path],
    *,
    deadline: Deadline,
    on_progress: Progress | None = None,
) -> Deployment:
    """Put `bundle` and `files` on the board; a second call sends nothing and is one round trip.

    Raises BoardError: "no-python"; "no-folder" and "no-space" with the reason for each candidate;
    "deploy" when the board cannot unpack or load what it was sent; and what the connection raises.
    A failure leaves nothing half sent behind, unless the link itself is gone: then the next call
    goes on where this one ended. Parts that were there and do not load any more (the board's disk
    was damaged) are sent again, once.
    """
    python = (usable_python(facts, session.board.name).path, *PYTHON_FLAGS)
    items = _items(bundle, files)
    parts = [item for item in items if item.kind == "parts"]
    first, trouble = _place(session, python, facts, bundle, items, deadline, on_progress)
    if trouble is None:
        return first
    _give_up(session, first, parts, trouble)
    if all(item.name in first.sent_parts for item in parts):
        raise trouble
    second, trouble = _place(session, python, facts, bundle, items, deadline, on_progress)
    if trouble is not None:
        _give_up(session, second, parts, trouble)
        raise trouble
    return dataclasses.replace(
        second,
        sent_bytes=first.sent_bytes + second.sent_bytes,
        sent_parts=(*first.sent_parts, *second.sent_parts),
    )


def _place(
    session: BoardSession,
    python: tuple[str, ...],
    facts: Facts,
    bundle: Bundle,
    items: Sequence[_Item],
    deadline: Deadline,
    on_progress: Progress | None,
) -> tuple[Deployment, BoardError | None]:
    """Send what is missing, unpack it and note the deployment; and why it does not load, if so."""
    trial = _trial(bundle, python)
    survey = _choose_folder(session, python, facts, items, trial, deadline)
    root, have = str(survey["root"]), set(survey["have"])
    missing = [item for item in items if item.sha256 not in have]
    deployment = Deployment(
        root=root,
        python=python,
        environment=bundle.environment(root),
        paths={item.sha256: item.target(root) for item in items if item.kind == "blobs"},
        sent_bytes=sum(item.bytes for item in missing),
        sent_parts=tuple(item.name for item in missing),
        kept_parts=tuple(item.name for item in items if item.sha256 in have),
    )
    answer = survey
    try:
        for item in missing:
            _send(session, item, root, deadline, on_progress)
        if missing:
            answer = _install(session, deployment, bundle, items, missing, trial, deadline)
    except BaseException as error:
        _give_up(session, deployment, missing, error)
        raise
    return deployment, _why_not_loading(session, answer, trial)


def ask_board(
    session: BoardSession, python: Sequence[str], request: Mapping[str, Any], deadline: Deadline
) -> dict[str, Any]:
    """Run one request of on_board.py on the board; its answer. Raises BoardError."""
    # Python imports first from the folder it is started in: not from the user's home.
    script = f"cd / && exec {shlex.join([*python, '-', json.dumps(request)])}"
    result = session.run(
        script, stdin=_ON_BOARD.read_bytes(), deadline=deadline, limit_bytes=BYTES_LIMIT
    )
    said = result.stderr.decode(errors="replace").strip()
    if result.status == 127 or result.status == 126:
        raise BoardError(
            session.board.name,
            "no-python",
            f"{python[0]} cannot be run: {said[-300:]}",
            remedy="probe the board again, or name its Python in devices.yaml (`python:`)",
        )
    if result.status != 0:
        raise BoardError(
            session.board.name,
            "deploy",
            f"{request['do']} ended with status {result.status}: {said[-500:] or 'no message'}",
            remedy="the last line is the board's own; the disk and the Python there are suspect",
        )
    try:
        return parse_answer(str(request["do"]), result.stdout)
    except ValueError as error:
        raise BoardError(
            session.board.name,
            "protocol",
            f"the answer to {request['do']!r} cannot be read: {error}",
            expected="one JSON object, as harness/deploy/on_board.py prints it",
            remedy="see what else the board's Python prints when it starts (sitecustomize)",
        ) from error


def _items(bundle: Bundle, files: Sequence[Path]) -> list[_Item]:
    items = []
    for part in bundle.parts:
        space = part.bytes + part.unpacked_bytes
        items.append(_Item(part.name, "parts", part.path, part.sha256, part.bytes, space))
    for path in files:
        try:
            size, digest = path.stat().st_size, remembered_sha256(path)
        except OSError as error:
            raise HarnessError(
                f"cannot be read: {error.strerror}", where=str(path), remedy="make it again"
            ) from error
        items.append(_Item(path.name, "blobs", path, digest, size, size))
    return list({item.sha256: item for item in items}.values())


def _choose_folder(
    session: BoardSession,
    python: Sequence[str],
    facts: Facts,
    items: Sequence[_Item],
    trial: Mapping[str, Any],
    deadline: Deadline,
) -> dict[str, Any]:
    """Ask the board, in one round trip, which folder can be used and what it already holds; and
    whether the engine loads, if it holds all."""
    board = session.board.name
    usable = [folder.path for folder in facts.usable_folders if ":" not in folder.path]
    refused = [f"{f.path}: {f.reason}" for f in facts.folders if not f.usable]
    refused += [
        f"{f.path}: PYTHONPATH, which names folders there, cannot hold a ':'"
        for f in facts.usable_folders
        if ":" in f.path
    ]
    needed = [{"hash": item.sha256, "kind": item.kind, "bytes": item.space} for item in items]
    survey: dict[str, Any] = {"root": None, "refused": [], "short": []}
    if usable:
        request = {"do": "survey", "candidates": usable, "needed": needed, "trial": trial}
        survey = ask_board(session, python, request, deadline)
    if survey["root"] is not None:
        return survey
    refused += [f"{path}: {reason}" for path, reason in survey["refused"]]
    short = [
        f"{path}: {free >> 20} MiB free, {need >> 20} MiB needed"
        for path, free, need in survey["short"]
    ]
    if short:
        raise BoardError(
            board,
            "no-space",
            "; ".join(short + refused),
            expected="one folder with enough space",
            remedy="free space there, or name another folder in devices.yaml (`folders:`)",
        )
    raise BoardError(
        board,
        "no-folder",
        "; ".join(refused) or facts.why_no_folder(),
        expected="one folder that can be written and that programs can be run from",
        remedy="mount one so, or name another in devices.yaml (`folders:`)",
    )


def _send(
    session: BoardSession,
    item: _Item,
    root: str,
    deadline: Deadline,
    on_progress: Progress | None,
) -> None:
    def tell(done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(item.name, done, total)

    tell(0, item.bytes)
    session.push_file(item.path, item.target(root), deadline=deadline, on_progress=tell)
    tell(item.bytes, item.bytes)


def _install(
    session: BoardSession,
    deployment: Deployment,
    bundle: Bundle,
    items: Sequence[_Item],
    missing: Sequence[_Item],
    trial: Mapping[str, Any],
    deadline: Deadline,
) -> dict[str, Any]:
    """Unpack what arrived, note the deployment, try it out; the board's answer."""
    parts = [item.sha256 for item in missing if item.kind == "parts"]
    request = {
        "do": "install",
        "root": deployment.root,
        "parts": parts,
        "keep": [item.sha256 for item in items],
        "current": {"bundle": bundle.hash, "items": {item.sha256: item.name for item in items}},
        "budget": KEPT_BYTES,
        "trial": trial,
    }
    answer = ask_board(session, deployment.python, request, deadline)
    if "error" in answer:
        raise BoardError(
            session.board.name,
            "deploy",
            f"unpacking failed: {answer['error']}",
            remedy="run the command again; if it fails again, check the board's disk",
        )
    return answer


def _trial(bundle: Bundle, python: Sequence[str]) -> dict[str, Any]:
    """What on_board.py starts to prove that the engine's libraries load. Every deployment asks: it
    takes Python and numpy to start, and a disk that lost data is found before a run fails by it."""
    smoke = SMOKE + (SMOKE_NATIVE if bundle.native is not None else "")
    return {
        "argv": [*python, "-c", smoke],
        "environment": bundle.environment(ROOT_MARK),
        "root": ROOT_MARK,
    }


def _why_not_loading(
    session: BoardSession, answer: Mapping[str, Any], trial: Mapping[str, Any]
) -> BoardError | None:
    """None when the trial in the board's answer went well."""
    try:
        status, said = int(answer["trial"]["status"]), str(answer["trial"]["said"])
    except (KeyError, TypeError, ValueError) as error:
        return BoardError(
            session.board.name,
            "deploy",
            f"its answer does not say whether the engine loads: {type(error).__name__}: {error}",
            expected="a status and a line of text",
            remedy="the disk and the Python there are suspect",
        )
    if status == 0:
        return None
    return BoardError(
        session.board.name,
        "deploy",
        f"the engine's libraries do not load (status {status}): {said}",
        expected=f"`{shlex.join(trial['argv'][-2:])}` to work",
        remedy="the wheels fit this board's Python and libc by name; its core may lack an "
        "instruction, or its disk may be damaged",
    )


def _give_up(
    session: BoardSession,
    deployment: Deployment,
    missing: Sequence[_Item],
    error: BaseException,
) -> None:
    """Remove what was half sent. Raises BoardError "no-space" when that is why it failed."""
    if not session.alive:
        return
    parts = [item.sha256 for item in missing if item.kind == "parts"]
    request = {"do": "discard", "root": deployment.root, "parts": parts}
    deadline = Deadline.after(CLEAN_S, "removing a partial upload")
    try:
        free = int(ask_board(session, deployment.python, request, deadline)["free"])
    except BoardError:
        return  # the first error says what is wrong; this one would hide it
    needed = sum(item.space for item in missing)
    transfer = isinstance(error, BoardError) and error.kind in ("transfer", "deploy", "no-space")
    if transfer and free < needed:
        raise BoardError(
            session.board.name,
            "no-space",
            f"{deployment.root}: {free >> 20} MiB free, {needed >> 20} MiB needed",
            remedy="something else filled the disk meanwhile; free space there",
        ) from error
