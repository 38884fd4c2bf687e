"""Tests of your own on boards. Copy this file beside your devices.yaml, then:

    pytest -m device -k my_boards                   # on every board of devices.yaml
    pytest -m device -k my_boards --boards rk-01    # on one
    pytest -m device -k my_boards -n auto           # on all of them side by side (pytest-xdist)

docs/device-tests.md tells what the fixtures hold, and what is tried again when a board is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness.deadline import Deadline

if TYPE_CHECKING:
    from harness.farm.decoding import DecodeSession
    from harness.farm.deployed import Deployed
    from harness.inventory import Board

PROMPT = "The harbour woke before the town did."

# Nothing below runs, or connects to anything, unless `-m device` asks for it.
pytestmark = pytest.mark.device


def test_the_board_has_room_for_the_results_of_a_night(board: Board, deployed: Deployed) -> None:
    """`board` is the entry of devices.yaml; `deployed.facts` is what the board said of itself."""
    assert deployed.facts.machine, f"{board.name} did not tell its architecture"
    assert max(folder.free_mb or 0 for folder in deployed.facts.usable_folders) > 64


def test_the_engine_that_is_on_the_board_can_be_imported(deployed: Deployed) -> None:
    """`deployed.session` runs commands; each has a deadline, after which its processes are ended.

    A list of words needs no quoting. With `check=True` a status other than 0 fails the test.
    """
    command = [*deployed.python, "-c", "import engine, numpy; print(numpy.ones(3).sum())"]
    result = deployed.session.run(command, deadline=Deadline.after(60, "an import"), check=True)
    assert result.stdout.strip() == b"3.0"


def test_the_same_prompt_gives_the_same_tokens(decode_session: DecodeSession) -> None:
    """Each call of `decode_session` is a run of its own: a new process, an empty cache."""
    first = decode_session.generate(PROMPT, max_new=8)
    again = decode_session.generate(PROMPT, max_new=8)
    assert len(first.tokens) == 8
    assert first.tokens == again.tokens, f"{first.text!r}, then {again.text!r}"


@pytest.mark.parametrize("executor", ["sync", "async"])
def test_the_tokens_do_not_depend_on_the_executor(
    decode_session: DecodeSession, executor: str
) -> None:
    """Parameters of your own work as everywhere; `engine` says how the engine runs in this call."""
    usual = decode_session.generate(PROMPT, max_new=6)
    turn = decode_session.generate(PROMPT, max_new=6, engine={"executor": executor})
    assert turn.tokens == usual.tokens


def test_a_second_turn_goes_on_in_the_same_cache(decode_session: DecodeSession) -> None:
    """One conversation: each prompt follows what was said before."""
    first, second = decode_session.chat([PROMPT, "Why?"], max_new=6)
    assert (len(first.tokens), len(second.tokens)) == (6, 6)
    assert second.finish == "length"


def test_a_token_comes_within_two_seconds(decode_session: DecodeSession) -> None:
    """Times are the board's own, so that the link does not count."""
    turn = decode_session.generate(PROMPT, max_new=8)
    assert turn.tpot_s is not None
    assert turn.tpot_s < 2.0
