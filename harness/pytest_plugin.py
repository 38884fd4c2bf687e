"""Bring-up stages as pytest tests, and fixtures for tests of one's own on boards.

    pytest -m device                                    # every board of devices.yaml, every stage
    pytest -m device --boards rk-01,rk-02 --stress-minutes 30
    pytest -m device --tag nightly --model=model.gguf --junit-xml report.xml

FILEs are given with "=": pytest chooses its root folder before it knows the options below, and
would take a file that stands alone for a test.

Registered as an entry point, so it works in any repository where the harness is installed. It is
inert otherwise: device tests run only when `-m device` asks for them, or when their own file or
folder is named. Collecting never connects to anything.

A stage that fails is a failure. Trouble with a board (no link, no space, no Python) is an error of
the test's set-up, never a failure. Later stages of the same board are skipped, "blocked by …".
A board that was lost is tried again (--device-retries), and every try is told; a failure never is.

A test may end its whole process: by os._exit, or since native code broke. With pytest-xdist it
runs in a worker, is named as failed, and its board is free for the next:

    pytest -m device -n auto                            # a worker for each board, side by side
    pytest -m device -n 1                               # one worker; a new one after a crash
    pytest -m device -n 1 --max-worker-restart=0        # end the session at the first crash

Fixtures for one's own tests (mark them `device`; docs/device-tests.md): `board`, the board of
devices.yaml, once for each that was selected; `deployed`, the same board leased, connected, with
engine and model on it; `decode_session`, which runs the model there.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from harness.farm.decoding import DecodeSession
    from harness.farm.deployed import Deployed
    from harness.farm.devices import DeviceSession
    from harness.farm.results import StageResult
    from harness.inventory import Board

MARKER = "device: runs on the boards of devices.yaml; asked for with -m device"
DEFAULT_FARM = "devices.yaml"
WITH_EQUALS = "Write it with '=', or pytest takes FILE for a test when it chooses its root folder"


class Case(NamedTuple):
    """One stage of one board; `lacking` says why there is none."""

    board: str
    stage: str
    lacking: str = ""

    def __str__(self) -> str:
        return f"{self.board}-{self.stage}" if not self.lacking else "no-boards"


class Selection(NamedTuple):
    boards: tuple[Board, ...]
    lacking: str = ""  # why there are none


SELECTION = pytest.StashKey[Selection]()
CASES = pytest.StashKey[list[Case]]()
SESSION = pytest.StashKey["DeviceSession"]()
pytest_plugins = ["harness.pytest_running"]  # hooks for tests that run, and for xdist


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("decode-harness", "bring-up on boards (-m device)")
    group.addoption(
        "--farm",
        metavar="FILE",
        help=f"what describes the boards; default: {DEFAULT_FARM} here. {WITH_EQUALS}",
    )
    group.addoption(
        "--boards",
        action="append",
        default=[],
        metavar="NAME,NAME",
        help="only these boards; may be given again",
    )
    group.addoption(
        "--tag",
        action="append",
        default=[],
        metavar="TAG",
        help="only boards with this tag; given again: with all of them",
    )
    group.addoption(
        "--model",
        metavar="FILE",
        help=f"GGUF or safetensors; default: SmolLM2-135M-Instruct. {WITH_EQUALS}",
    )
    group.addoption(
        "--stress-minutes",
        type=float,
        metavar="MINUTES",
        help="length of the stress stage; default: the board's, or 30",
    )
    group.addoption(
        "--engine-sources",
        metavar="FOLDER",
        help="another engine's folder, to be put on boards in place of this checkout's, for tests "
        f"of one's own. {WITH_EQUALS.replace('FILE', 'FOLDER')}",
    )
    group.addoption(
        "--device-retries",
        type=_count,
        default=1,
        metavar="TIMES",
        help="how often a test of your own is run again when its board was lost; default: 1. "
        "Every try is told, and a failure is never tried again",
    )


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number from 0 on")
    return int(text)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    if asked_by_marker(config):
        selection(config)  # a mistake in devices.yaml or in an option ends the session here


# --- which tests ------------------------------------------------------------------------------


def asked_by_marker(config: pytest.Config) -> bool:
    """Whether the marker expression wants device tests, rather than `not device`."""
    expression = str(config.getoption("markexpr", "") or "")
    return re.search(r"(?<!\bnot )\bdevice\b", expression) is not None


def asked(config: pytest.Config, path: Path) -> bool:
    """Whether tests of the file `path` that need boards were asked for: by the marker, or since
    the file or its folder was named on the command line."""
    if asked_by_marker(config):
        return True
    return any(place in (path.resolve(), path.resolve().parent) for place in named(config))


def named(config: pytest.Config) -> list[Path]:
    """The files and folders that the command line names."""
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        return []
    folder = config.invocation_params.dir
    return [(folder / argument.split("::")[0]).resolve() for argument in config.args]


def selection(config: pytest.Config) -> Selection:
    """The boards that the options choose, read from the farm file once. Connects to nothing.

    Raises pytest.UsageError for a mistake in the file or in an option.
    """
    if SELECTION not in config.stash:
        config.stash[SELECTION] = _select(config)
    return config.stash[SELECTION]


def _select(config: pytest.Config) -> Selection:
    named = config.getoption("farm")
    candidates = [config.invocation_params.dir / (named or DEFAULT_FARM)]
    if not named:
        candidates.append(config.rootpath / DEFAULT_FARM)
    farm = next((path for path in candidates if path.is_file()), None)
    if farm is None and not named:
        return Selection((), f"needs a {DEFAULT_FARM} in {candidates[0].parent}, or --farm=FILE")
    from harness.errors import HarnessError
    from harness.farm.selection import bringup_options, choose_boards

    names = [name for text in config.getoption("boards") for name in text.split(",") if name]
    try:
        bringup_options(stress_minutes=config.getoption("stress_minutes"))
        return Selection(
            tuple(choose_boards(farm or candidates[0], names, config.getoption("tag")))
        )
    except HarnessError as error:
        raise pytest.UsageError(str(error)) from error


def _cases(selected: Selection) -> list[Case]:
    if selected.lacking:
        return [Case("", "", selected.lacking)]
    from harness.jobs import stages

    return [Case(board.name, stage.name) for board in selected.boards for stage in stages()]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per board and stage, or per board. Reads the farm file; connects to nothing."""
    if not any(metafunc.definition.iter_markers("device")):
        return
    # What nobody asked for is not looked up: it is deselected further down.
    wanted = asked(metafunc.config, metafunc.definition.path)
    selected = selection(metafunc.config) if wanted else Selection((), "not asked for")
    if "stage_case" in metafunc.fixturenames:
        metafunc.parametrize("stage_case", _cases(selected), ids=str)
    elif "board" in metafunc.fixturenames and _board_is_ours(metafunc):
        boards = selected.boards or (selected.lacking,)
        names = [getattr(board, "name", "no-boards") for board in boards]
        metafunc.parametrize("board", boards, ids=names, indirect=True, scope="session")


def _board_is_ours(metafunc: pytest.Metafunc) -> bool:
    """Other projects have fixtures named `board` too; only this module's is given parameters."""
    # pytest has no public way to ask which fixture a name means for a test.
    found = metafunc.definition._fixtureinfo.name2fixturedefs.get("board") or ()
    return any(definition.func.__module__ == __name__ for definition in found[-1:])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Adds the stage tests where `-m device` asks for them and no file brought them; drops device
    tests that nobody asked for. Runs before pytest's own -m and -k."""
    if asked_by_marker(config) and not named(config) and not any(map(is_stage, items)):
        items.extend(_stage_items(session))
    dropped = [
        item for item in items if item.get_closest_marker("device") and not asked(config, item.path)
    ]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]
    # Tests of one's own hold their board to the end of the session: the stages come before them.
    items.sort(key=lambda item: not is_stage(item))
    for item in items:
        _mark(config, item)


def _stage_items(session: pytest.Session) -> Iterator[pytest.Item]:
    path = Path(__file__).parent / "farm" / "stage_tests.py"
    module = pytest.Module.from_parent(session, path=path, nodeid="harness/farm/stage_tests.py")
    return session.genitems(module)


def is_stage(item: pytest.Item) -> bool:
    return isinstance(_parameter(item), Case)


def _parameter(item: pytest.Item) -> Any:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("stage_case") if callspec is not None else None


def _mark(config: pytest.Config, item: pytest.Item) -> None:
    if is_stage(item) and config.pluginmanager.hasplugin("timeout"):
        # A stage has deadlines of its own, and may well take half an hour.
        item.add_marker(pytest.mark.timeout(0))
    board = board_of(item)
    if board and config.pluginmanager.hasplugin("xdist"):
        item.add_marker(pytest.mark.xdist_group(board))


def board_of(item: pytest.Item) -> str:
    """The board that the test runs on, if it is one of ours."""
    if is_stage(item):
        return str(_parameter(item).board)
    callspec = getattr(item, "callspec", None)
    selected = item.config.stash.get(SELECTION, Selection(()))
    found = callspec.params.get("board") if callspec is not None else None
    return next((board.name for board in selected.boards if board is found), "")


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[CASES] = [
        _parameter(item) for item in session.items if is_stage(item) and not _parameter(item)[2]
    ]


# --- fixtures ---------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def device_session(request: pytest.FixtureRequest) -> Iterator[DeviceSession]:
    """The boards of this session, side by side; begun when the first test needs one."""
    from harness.farm.devices import DeviceSession

    config = request.config
    model = config.getoption("model")
    session = DeviceSession(
        selection(config).boards,
        [(case.board, case.stage) for case in config.stash[CASES]],
        model=Path(model) if model else None,
        stress_minutes=config.getoption("stress_minutes"),
        # A worker of xdist runs only some of the tests; it must not take boards of the others.
        all_at_once=not hasattr(config, "workerinput"),
        sources=_sources(config),
    )
    config.stash[SESSION] = session
    yield session
    del config.stash[SESSION]
    session.close()


def _sources(config: pytest.Config) -> Path | None:
    """Raises pytest.UsageError for a folder that holds no engine."""
    named = config.getoption("engine_sources")
    if not named:
        return None
    path = Path(config.invocation_params.dir, str(named))
    if not (path / "__init__.py").is_file():
        raise pytest.UsageError(f"--engine-sources: no engine in {path}")
    return path


@pytest.fixture
def stage_result(stage_case: Case, request: pytest.FixtureRequest) -> StageResult:
    """What the stage concluded; raises here, in the set-up, for trouble that is no finding."""
    from harness.cli.output import visible
    from harness.verdicts import Outcome

    _require(stage_case.lacking)
    session: DeviceSession = request.getfixturevalue("device_session")
    with _plain_errors():
        result = session.result(stage_case.board, stage_case.stage)
    # Not by record_property: it warns in every run that some readers of JUnit want no properties.
    request.node.user_properties += [
        (name, visible(str(value))) for name, value in session.properties(result).items()
    ]
    if result.outcome is Outcome.ERROR:
        pytest.fail(visible("\n".join(result.explain())), pytrace=False)
    if result.outcome is Outcome.BLOCKED:
        pytest.skip(visible(result.verdict.headline))
    return result


@pytest.fixture(scope="session")
def board(request: pytest.FixtureRequest) -> Board:
    """A board of devices.yaml; a test that takes it runs once for each selected board."""
    if not hasattr(request, "param"):
        pytest.fail("the fixture 'board' belongs to tests marked device", pytrace=False)
    if isinstance(request.param, str):
        _require(request.param)
    found: Board = request.param
    return found


@pytest.fixture(scope="session")
def deployed(board: Board, request: pytest.FixtureRequest) -> Iterator[Deployed]:
    """The board, leased and connected, with engine and model on it; released afterwards."""
    session: DeviceSession = request.getfixturevalue("device_session")
    with _plain_errors():
        retries = request.config.getoption("device_retries")
        context = session.deployed(board, retries)
        found = context.__enter__()
    try:
        yield found
    finally:
        context.__exit__(None, None, None)


@pytest.fixture
def decode_session(deployed: Deployed, tmp_path_factory: pytest.TempPathFactory) -> DecodeSession:
    """Decoding on the board: `decode_session.generate("Once upon a time", max_new=16)`."""
    from harness.farm.decoding import DecodeSession

    return DecodeSession(deployed, tmp_path_factory.mktemp("decode"))


def _require(lacking: str) -> None:
    """Skips for want of boards, or fails where HARNESS_STRICT says that they must be there."""
    if not lacking:
        return
    if os.environ.get("HARNESS_STRICT", "") not in ("", "0"):
        pytest.fail(f"HARNESS_STRICT=1, and this {lacking}", pytrace=False)
    pytest.skip(lacking)


class _plain_errors:
    """An error that a user can mend is told in one message, without our traceback."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        from engine.formats.checkpoint import FormatError
        from harness.cli.output import visible
        from harness.errors import HarnessError

        if isinstance(error, (HarnessError, FormatError)):
            pytest.fail(visible(str(error)), pytrace=False)
