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
from harness.boards.care import HEALTH, POWER, Care
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


def test_quarantine_is_shown_by_list_and_why_until_it_is_lifted(farm: Path) -> None:
    reason = "its fan is loose"
    result = harness_boards("quarantine", "virt-1", "--reason", reason, "--farm", farm)
    assert result.exit_code == 0, result.output
    row = next(line for line in harness_boards("list", "--farm", farm).stdout.splitlines()
               if " virt-1 " in line)  # fmt: skip
    assert f"quarantined: {reason}" in row
    told = harness_boards("why", "virt-1", "--farm", farm).stdout
    assert "virt-1 is quarantined since 20" in told
    assert f"{reason}\n" in told
    assert "harness boards health virt-1" in told
    entry = json.loads(harness_boards("why", "virt-1", "--farm", farm, "--json").stdout)
    assert entry["quarantine"]["reason"] == reason
    lifted = harness_boards("release", "virt-1", "--farm", farm)
    assert "virt-1 is re-admitted; it was quarantined since 20" in lifted.stdout
    assert "is quarantined" not in harness_boards("why", "virt-1", "--farm", farm).stdout
    again = harness_boards("release", "virt-1", "--farm", farm)
    assert (again.exit_code, again.stdout) == (0, "virt-1 was not in quarantine\n")


def test_quarantine_needs_a_reason_and_a_known_board(farm: Path) -> None:
    assert harness_boards("quarantine", "virt-1", "--farm", farm).exit_code == 2
    assert harness_boards("quarantine", "virt-1", "--reason", " ", "--farm", farm).exit_code == 2
    wrong = harness_boards("quarantine", "virt-9", "--reason", "x", "--farm", farm)
    assert "no board 'virt-9'" in wrong.stderr


def test_why_tells_health_what_was_done_and_earlier_runs(farm: Path) -> None:
    with Store.open() as store:
        care = Care(store)
        care.note("virt-1", POWER, False, "power cycle: no answer within 180 s")
        care.note("virt-1", HEALTH, True, "pass: 96 tokens equal the reference")
        campaign = store.begin_campaign("bringup", ["harness"], {})
        for number in range(7):
            run = store.begin_run(campaign_id=campaign, board="virt-1", stage="tiny")
            store.finish_run(run, Verdict(outcome=Outcome.PASS, headline=f"run {number}"))
    told = harness_boards("why", "virt-1", "--farm", farm).stdout
    assert "power: 20" in told
    assert "bad, power cycle: no answer within 180 s" in told
    assert "good, pass: 96 tokens equal the reference" in told
    order = [word for word in range(7) if f"run {word}\n" in told]
    assert order == [2, 3, 4, 5, 6]
    assert told.index("run 6") < told.index("run 5") < told.index("run 2")


@pytest.fixture
def switched(home: Path) -> Path:
    """A board whose supply is a file."""
    path = home / "switched.yaml"
    relay = home / "relay"
    path.write_text(
        "boards:\n  rk-01:\n    host: h\n    power:\n      command:\n"
        f"        on: echo on > {relay}\n        off: echo off > {relay}\n"
        f"        status: cat {relay}\n"
    )
    return path


def test_power_switches_a_board_tells_its_state_and_is_journalled(
    switched: Path, home: Path
) -> None:
    def power(action: str) -> Result:
        return harness_boards("power", "rk-01", action, "--farm", switched)

    assert (power("status").stdout, power("status").exit_code) == ("rk-01: unknown\n", 0)
    assert power("off").stdout == "rk-01: off\n"
    assert (home / "relay").read_text() == "off\n"
    assert power("status").stdout == "rk-01: off\n"
    assert power("on").stdout == "rk-01: on\n"
    with Store.open() as store:
        events = Care(store).events("rk-01")
        assert Leases(store).held() == []
    assert [(event.kind, event.good) for event in events] == [(POWER, True), (POWER, True)]
    assert "on by " in events[0].told


def test_power_of_a_board_that_somebody_holds_is_refused_but_its_state_is_told(
    switched: Path, home: Path
) -> None:
    with Store.open() as store:
        lease = Leases(store).acquire("rk-01", "ada@lab", "nightly", ttl_s=600)
        result = harness_boards("power", "rk-01", "off", "--farm", switched)
        assert result.exit_code == 2
        assert "held by ada@lab (nightly)" in result.stderr.replace("\n", " ")
        assert not (home / "relay").exists()
        assert harness_boards("power", "rk-01", "status", "--farm", switched).exit_code == 0
        lease.release()


def test_power_says_what_is_missing_or_unknown(farm: Path, switched: Path) -> None:
    assert "'power' in devices.yaml" in harness_boards(
        "power", "virt-1", "on", "--farm", farm
    ).stderr.replace("\n", " ")
    wrong = harness_boards("power", "rk-01", "up", "--farm", switched)
    assert (wrong.exit_code, "one of on, off, cycle, status" in wrong.stderr) == (2, True)


def test_a_passing_health_check_readmits_a_board_and_a_dead_one_stays_out(farm: Path) -> None:
    with Store.open() as store:
        care = Care(store)
        care.quarantine("virt-1", "it was lost")
        care.quarantine("dead", "it was lost")
        care.quarantine("virt-2", "on the bench", "ann@lab")
    result = harness_boards("health", "--quarantined", "--farm", farm, "--json")
    assert result.exit_code == 2
    boards = json.loads(result.stdout)["boards"]
    assert set(boards) == {"virt-1", "dead"}, "what a person set aside is left alone"
    assert boards["virt-1"]["health"]["outcome"] == "pass"
    assert boards["dead"]["health"]["error_kind"] == "unreachable"
    with Store.open() as store:
        out = [name for name in ("virt-1", "virt-2", "dead") if Care(store).quarantined(name)]
    assert out == ["virt-2", "dead"]


@pytest.mark.parametrize(
    "command",
    ["list", "probe", "why", "enrol", "health", "quarantine", "release", "power"],
)
def test_help_of_each_command_has_examples(command: str) -> None:
    result = harness_boards(command, "--help")
    assert result.exit_code == 0
    assert f"harness boards {command}" in result.stdout


def test_the_repositorys_own_farm_is_three_virtual_boards() -> None:
    farm = load_farm(Path(__file__).resolve().parents[3] / "devices.yaml")
    assert list(farm.boards) == ["virt-1", "virt-2", "virt-3"]
    assert all(board.virtual is not None for board in farm.boards.values())
    assert all(board.budget.min_tokens_per_s for board in farm.boards.values())
