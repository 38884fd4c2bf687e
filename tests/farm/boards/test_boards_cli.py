"""`harness boards`, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner, Result

from harness.boards import virtual
from harness.boards.leases import Leases
from harness.cli.boards import app
from harness.farm.resume import mark_stopped
from harness.inventory import Board, load_farm
from harness.store import CampaignRow, Store
from harness.verdicts import Outcome, Verdict

Make = Callable[..., Board]


def harness_boards(*arguments: str | Path, input: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(item) for item in arguments], input=input)


@pytest.fixture
def farm(home: Path) -> Path:
    """Two virtual boards, and one address where nothing listens."""
    path = home / "devices.yaml"
    path.write_text(
        "boards:\n"
        "  virt-1: {virtual: {cpus: 1}, tags: [a]}\n"
        "  virt-2: {virtual: {noisy_shell: true, no_python: true}, tags: [a, b]}\n"
        "  dead: {host: 127.0.0.1, port: 1, host_key: 'SHA256:" + "A" * 42 + "E'}\n"
    )
    return path


@pytest.fixture
def real(home: Path, make_board: Make) -> tuple[Path, str]:
    """A board of hardware, as far as the farm's file knows: the file, and its true key."""
    endpoint = virtual.ensure_running(make_board("stand-in"))
    path = home / "real.yaml"
    path.write_text(
        "boards:\n  rk-01:   # on the shelf\n"
        f"    host: {endpoint.host}\n    port: {endpoint.port}\n"
    )
    return path, endpoint.host_key


def test_list_shows_boards_without_connecting_or_starting_any(farm: Path, home: Path) -> None:
    farm.write_text(farm.read_text() + f"  far: {{host: {'long-name.' * 9}example, user: me}}\n")
    result = harness_boards("list", "--farm", farm)
    assert result.exit_code == 0
    # In a pipe, nothing is cut to the width of a terminal.
    (row,) = (line for line in result.stdout.splitlines() if " far " in line)
    assert f"me@{'long-name.' * 9}example:22" in row
    assert " ssh " in row
    assert all(name in result.stdout for name in ("virt-1", "virt-2", "dead", "free"))
    assert virtual.running() == []
    assert not (home / "results.sqlite").exists()


def test_list_as_json_can_be_narrowed_by_tags(farm: Path) -> None:
    result = harness_boards("list", "--farm", farm, "--tag", "a", "--tag", "b", "--json")
    (entry,) = json.loads(result.stdout)
    assert (entry["board"], entry["virtual"], entry["address"]) == ("virt-2", True, "stopped")


def test_probe_asks_side_by_side_and_one_dead_board_does_not_keep_the_others(farm: Path) -> None:
    result = harness_boards("probe", "--farm", farm, "--json")
    assert result.exit_code == 2
    answers = json.loads(result.stdout)
    assert list(answers) == ["virt-1", "virt-2", "dead"]
    assert answers["dead"]["kind"] == "unreachable"
    assert answers["virt-1"]["python"]["version"].startswith("3.")
    assert answers["virt-2"]["python"] is None
    assert answers["virt-2"]["noise"] is True
    assert "board dead" in result.stderr


def test_probe_for_people_says_what_is_missing(farm: Path) -> None:
    result = harness_boards("probe", "virt-2", "--farm", farm)
    assert result.exit_code == 0
    assert "none:" in result.stdout
    assert "MiB free" in result.stdout


def test_why_says_who_holds_a_board_and_until_when(farm: Path) -> None:
    with Store.open() as store:
        lease = Leases(store).acquire("virt-1", "ada@lab", "nightly", ttl_s=600)
        result = harness_boards("why", "virt-1", "--farm", farm)
        assert result.exit_code == 0
        assert "virt-1 is held by ada@lab: nightly" in result.stdout
        assert "until" in result.stdout
        lease.release()
    assert "virt-1 is free" in harness_boards("why", "virt-1", "--farm", farm).stdout


def test_why_tells_the_last_run_and_the_last_trouble(farm: Path) -> None:
    with Store.open() as store:
        campaign = store.begin_campaign("bringup", ["harness"], {})
        for outcome, headline in ((Outcome.ERROR, "disk full"), (Outcome.PASS, "200 tokens agree")):
            run = store.begin_run(campaign_id=campaign, board="virt-1", stage="tiny")
            store.finish_run(
                run,
                Verdict(outcome=outcome, headline=headline, remedy="make room"),
                error_kind="no-space" if outcome is Outcome.ERROR else None,
            )
    lines = harness_boards("why", "virt-1", "--farm", farm).stdout.splitlines()
    assert lines[0] == "virt-1 is free"
    assert lines[1].startswith("last run: tiny on ")
    assert lines[1].endswith("pass, 200 tokens agree")
    assert lines[2].endswith("error (no-space), disk full")
    assert lines[3].strip() == "what to do: make room"
    entry = json.loads(harness_boards("list", "--farm", farm, "--json").stdout)[0]
    assert entry["last"]["outcome"] == "pass"


@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped"])
def test_why_tells_the_run_of_a_dead_harness_and_how_it_is_continued(
    farm: Path, stopped: bool
) -> None:
    script = "from harness.store import current_owner; print(current_owner())"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    with Store.open() as store:
        campaign = store.begin_campaign("stress", ["harness", "stress"], {})
        run = store.begin_run(campaign_id=campaign, board="virt-1", stage="stress")
        assert "stress" not in harness_boards("why", "virt-1", "--farm", farm).stdout
        with store.database.writing() as session:
            session.execute(sa.update(CampaignRow).values(owner=done.stdout.decode().strip()))
        mark_stopped(store, campaign, stopped)
        told = harness_boards("why", "virt-1", "--farm", farm).stdout
        assert f"a stress run ({run[:8]}) of a harness that ended may still be on it" in told
        assert ("--resume continues it" in told) == stopped
        store.finish_campaign(campaign, Outcome.INVALID)
        assert "stress" not in harness_boards("why", "virt-1", "--farm", farm).stdout


def test_why_does_not_advise_itself(farm: Path) -> None:
    with Store.open() as store:
        campaign = store.begin_campaign("bringup", ["harness"], {})
        run = store.begin_run(campaign_id=campaign, board="virt-1", stage="tiny")
        busy = Verdict(
            outcome=Outcome.ERROR, headline="held", remedy="see `harness boards why virt-1`"
        )
        store.finish_run(run, busy, error_kind="busy")
    told = harness_boards("why", "virt-1", "--farm", farm).stdout
    assert "error (busy), held" in told
    assert "boards why" not in told


def test_enrol_pins_the_shown_key_after_a_yes(real: tuple[Path, str]) -> None:
    path, key = real
    result = harness_boards("enrol", "rk-01", "--farm", path, "--yes")
    assert result.exit_code == 0, result.output
    assert key in result.stdout
    assert load_farm(path).boards["rk-01"].host_key == key
    assert "rk-01:   # on the shelf" in path.read_text()
    again = harness_boards("enrol", "rk-01", "--farm", path, "--json")
    assert json.loads(again.stdout)["changed"] is False


def test_enrol_with_a_fingerprint_refuses_any_other_key_and_shows_both(
    real: tuple[Path, str],
) -> None:
    path, key = real
    before = path.read_text()
    other = "SHA256:" + "B" * 42 + "E"
    result = harness_boards("enrol", "rk-01", "--farm", path, "--fingerprint", other)
    assert result.exit_code == 2
    assert key in result.stderr.replace("\n", "")
    assert other in result.stderr.replace("\n", "")
    assert path.read_text() == before
    assert harness_boards("enrol", "rk-01", "--farm", path, "--fingerprint", key).exit_code == 0


@pytest.mark.parametrize("written", ["abc", "SHA256:abc", "MD5:" + "ab:" * 15 + "ab", ""])
def test_enrol_refuses_what_is_no_fingerprint_before_it_asks_the_board(
    farm: Path, written: str
) -> None:
    result = harness_boards("enrol", "dead", "--farm", farm, "--fingerprint", written)
    assert result.exit_code == 2
    told = result.stderr.replace("\n", " ")
    assert f"--fingerprint {written!r}; expected 'SHA256:' and 43 characters of base64" in told
    assert "unreachable" not in told


def test_enrol_without_a_terminal_pins_nothing_unasked(real: tuple[Path, str]) -> None:
    path, key = real
    result = harness_boards("enrol", "rk-01", "--farm", path, input="y\n")
    assert result.exit_code == 2
    assert f"--fingerprint {key}" in result.stderr.replace("\n", "")
    assert "host_key" not in path.read_text()


def test_enrol_of_a_board_that_does_not_answer_is_one_message(farm: Path) -> None:
    result = harness_boards("enrol", "dead", "--farm", farm, "--yes")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: board dead: ")
    assert "Traceback" not in result.output


def test_enrol_of_a_virtual_board_is_refused(farm: Path) -> None:
    result = harness_boards("enrol", "virt-1", "--farm", farm, "--yes")
    assert result.exit_code == 2
    assert "virtual" in result.stderr


@pytest.mark.parametrize("command", ["list", "probe", "why", "enrol"])
def test_help_of_each_command_has_examples(command: str) -> None:
    result = harness_boards(command, "--help")
    assert result.exit_code == 0
    assert f"harness boards {command}" in result.stdout


def test_the_repositorys_own_farm_is_three_virtual_boards() -> None:
    farm = load_farm(Path(__file__).resolve().parents[3] / "devices.yaml")
    assert list(farm.boards) == ["virt-1", "virt-2", "virt-3"]
    assert all(board.virtual is not None for board in farm.boards.values())
    assert all(board.budget.min_tokens_per_s for board in farm.boards.values())
