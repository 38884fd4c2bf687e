"""Power drivers, against real commands: what was switched is looked at, nobody waits for ever."""

from __future__ import annotations

import importlib
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest

from harness.boards.power import PowerState, Supply
from harness.deadline import Deadline
from harness.errors import BoardError, HarnessError
from harness.inventory import Board
from harness.inventory.schema import Power

Make = Callable[..., Supply]


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds, "a test")


@pytest.fixture
def supply(tmp_path: Path) -> Make:
    """A relay that is a file: `on` and `off` write it and a log, `status` reads it."""

    def make(**commands: str | None) -> Supply:
        relay, log = (shlex.quote(str(tmp_path / name)) for name in ("relay", "log"))
        usual: dict[str, str | None] = {
            word: f"echo {word} | tee -a {log} > {relay}" for word in ("on", "off")
        }
        usual["status"] = f"cat {relay}"
        said: dict[str, Any] = {**usual, **commands}
        board = Board.model_validate({"name": "rk-01", "host": "h", "power": {"command": said}})
        return Supply(board, off_s=0.0, settle_s=0.3)

    return make


def orders(folder: Path) -> list[str]:
    return (folder / "log").read_text().split()


def test_every_driver_that_the_farm_file_may_name_is_a_module_with_a_driver() -> None:
    names = get_args(Power.model_fields["driver"].annotation)
    assert "command" in names
    for name in names:
        assert callable(importlib.import_module(f"harness.boards.power.{name}").DRIVER)


def test_a_board_without_power_says_where_it_is_named() -> None:
    with pytest.raises(HarnessError, match=r"nothing switches its power.*'power' in devices"):
        Supply(Board(name="rk-01", host="h"))


def test_on_and_off_are_told_by_the_status(supply: Make) -> None:
    relay = supply()
    assert relay.status(soon()) is PowerState.UNKNOWN, "the file is not there yet"
    assert relay.on(soon()) is PowerState.ON
    assert relay.status(soon()) is PowerState.ON
    assert relay.off(soon()) is PowerState.OFF


def test_a_cycle_is_off_and_on_unless_the_relay_has_its_own(supply: Make, tmp_path: Path) -> None:
    assert supply().cycle(soon()) is PowerState.ON
    assert orders(tmp_path) == ["off", "on"]
    log, relay = tmp_path / "log", tmp_path / "relay"
    own = supply(cycle=f"echo cycle >> {log}; echo ON > {relay}")
    assert own.cycle(soon()) is PowerState.ON
    assert orders(tmp_path) == ["off", "on", "cycle"]


@pytest.mark.parametrize(
    "status", [None, "echo maybe", "echo on; exit 3", "true"], ids=["none", "word", "code", "mute"]
)
def test_a_state_that_nobody_can_tell_is_unknown_and_no_error(
    supply: Make, status: str | None
) -> None:
    relay = supply(status=status)
    assert relay.status(soon()) is PowerState.UNKNOWN
    assert relay.on(soon()) is PowerState.UNKNOWN


def test_a_status_that_hangs_is_unknown_at_its_deadline(supply: Make) -> None:
    assert supply(status="sleep 60").status(soon(0.3)) is PowerState.UNKNOWN


def test_a_relay_that_says_the_contrary_is_asked_twice_and_then_an_error(
    supply: Make, tmp_path: Path
) -> None:
    stuck = supply(on=f"echo on >> {tmp_path / 'log'}", status="echo off")
    with pytest.raises(BoardError, match="switched on, and its supply says off") as caught:
        stuck.on(soon())
    assert caught.value.kind == "power"
    assert orders(tmp_path) == ["on", "on"]


def test_an_order_that_failed_once_and_is_carried_out_the_second_time_is_no_error(
    supply: Make, tmp_path: Path
) -> None:
    relay, mark = tmp_path / "relay", tmp_path / "mark"
    flaky = supply(on=f"[ -e {mark} ] || {{ touch {mark}; exit 1; }}; echo on > {relay}")
    flaky.off(soon())
    assert flaky.on(soon()) is PowerState.ON


def test_an_order_that_answered_too_late_counts_when_the_status_shows_it(
    supply: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.boards.power.supply.ACTION_S", 0.5)
    late = supply(on=f"echo on > {tmp_path / 'relay'}; sleep 60")
    assert late.on(soon()) is PowerState.ON


def test_a_command_that_fails_is_told_by_its_own_words_and_not_repeated(supply: Make) -> None:
    broken = supply(on="echo no such port >&2; exit 7 # token-of-the-relay", status=None)
    with pytest.raises(BoardError, match="power on ended with status 7: no such port") as caught:
        broken.on(soon())
    assert "token-of-the-relay" not in str(caught.value)
    assert "power.command.on" in caught.value.remedy


def test_the_password_in_the_address_of_a_relay_is_in_no_message(
    supply: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAY_PASSWORD", "hunter2")
    broken = supply(on='echo "no answer: http://a:$RELAY_PASSWORD@pdu/1" >&2; exit 7', status=None)
    with pytest.raises(BoardError, match="no answer: http://…@pdu/1") as caught:
        broken.on(soon())
    assert "hunter2" not in str(caught.value)


def test_a_command_past_its_deadline_leaves_no_process(supply: Make, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    hanging = supply(on=f"sleep 61 & echo $! $$ > {pids}; wait", status=None)
    with pytest.raises(BoardError, match="did not end in time"):
        hanging.on(soon(0.5))
    (child, shell) = map(int, pids.read_text().split())
    until = soon(5)
    while not until.expired and any(map(_lives, (child, shell))):
        time.sleep(0.02)
    assert not _lives(child)
    assert not _lives(shell)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_child_in_the_background_does_not_keep_the_command(supply: Make, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    relay = supply(on=f"sleep 30 & echo $! > {pid}", status="echo on")
    try:
        assert relay.on(soon(10)) is PowerState.ON
    finally:
        psutil.Process(int(pid.read_text())).kill()


def test_commands_are_given_the_boards_name(supply: Make, tmp_path: Path) -> None:
    named = supply(on=f'echo "$HARNESS_BOARD" > {tmp_path / "name"}', status=None)
    named.on(soon())
    assert (tmp_path / "name").read_text() == "rk-01\n"
