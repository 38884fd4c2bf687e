"""Leases: never two owners of a board, whoever dies when."""

from __future__ import annotations

import datetime
import fcntl
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from harness.boards.leases import Lease, Leases, lease_guard
from harness.errors import BoardError, HarnessError
from harness.store import LeaseRow, Store, current_owner, is_dead
from harness.store.owner import Owner

# Children are forked, so that they start in milliseconds and can be killed in numbers.
processes = multiprocessing.get_context("fork")


@pytest.fixture
def leases(store: Store) -> Leases:
    return Leases(store)


def put_clock_back(store: Store, board: str, seconds: float) -> None:
    """Makes a lease as old as if `seconds` had passed."""
    with store.database.writing() as session:
        row = session.get(LeaseRow, board)
        assert row is not None
        row.expires_s -= seconds


def hold_until_killed(path: Path, ready: Path) -> None:
    Leases(Store.open(path)).acquire("rk-01", reason="to be killed", ttl_s=3600)
    ready.touch()
    time.sleep(60)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.01)


@pytest.fixture
def killed_holder(store: Store, tmp_path: Path) -> Iterator[str]:
    """A board whose holder, a real process, has just died by SIGKILL."""
    child = processes.Process(
        target=hold_until_killed, args=(tmp_path / "results.sqlite", tmp_path / "ready")
    )
    child.start()
    wait_for(tmp_path / "ready")
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and still a zombie
    yield "rk-01"
    child.join()


def test_a_held_board_is_refused_with_who_and_why_and_until_when(leases: Leases) -> None:
    leases.acquire("rk-01", "ann", "nightly", ttl_s=60)
    with pytest.raises(BoardError) as caught:
        leases.acquire("rk-01", "bob", "bring-up", ttl_s=60)
    assert caught.value.kind == "busy"
    for part in ("rk-01", "ann", "nightly", "until", "harness boards why rk-01"):
        assert part in str(caught.value)


def test_other_boards_are_free(leases: Leases) -> None:
    leases.acquire("rk-01", "ann", "nightly", ttl_s=60)
    assert leases.acquire("rk-02", "bob", "bring-up", ttl_s=60).board == "rk-02"
    assert [holder.owner for holder in leases.held()] == ["ann", "bob"]


def test_a_released_board_is_free_and_its_token_is_never_used_again(leases: Leases) -> None:
    first = leases.acquire("rk-01", "ann", "nightly", ttl_s=60)
    first.release()
    assert leases.holder("rk-01") is None
    assert leases.acquire("rk-01", "bob", "bring-up", ttl_s=60).token > first.token


def test_release_is_idempotent_and_never_frees_the_next_owner(leases: Leases) -> None:
    first = leases.acquire("rk-01", "ann", "nightly", ttl_s=60)
    first.release()
    first.release()
    leases.acquire("rk-01", "bob", "bring-up", ttl_s=60)
    first.release()
    holder = leases.holder("rk-01")
    assert holder is not None
    assert holder.owner == "bob"


def test_stale_lease_is_taken_over_after_its_ttl(store: Store, leases: Leases) -> None:
    stale = leases.acquire("rk-01", "ann@elsewhere", "nightly", ttl_s=60)
    put_clock_back(store, "rk-01", 59)
    with pytest.raises(BoardError):
        leases.acquire("rk-01", "bob", "bring-up", ttl_s=60)
    put_clock_back(store, "rk-01", 2)
    assert leases.holder("rk-01") is None
    assert leases.acquire("rk-01", "bob", "bring-up", ttl_s=60).token == stale.token + 1


def test_heartbeat_keeps_a_lease_beyond_its_ttl(store: Store, leases: Leases) -> None:
    lease = leases.acquire("rk-01", "ann@elsewhere", "nightly", ttl_s=60)
    put_clock_back(store, "rk-01", 50)
    lease.heartbeat()
    put_clock_back(store, "rk-01", 50)
    assert leases.holder("rk-01") is not None


def test_the_fencing_token_refuses_an_owner_that_was_taken_over(
    store: Store, leases: Leases
) -> None:
    slow = leases.acquire("rk-01", "ann@elsewhere", "nightly", ttl_s=60)
    put_clock_back(store, "rk-01", 61)
    leases.acquire("rk-01", "bob", "bring-up", ttl_s=60)
    with pytest.raises(BoardError, match="taken over by bob"):
        slow.heartbeat()


def test_a_heartbeat_after_the_release_is_refused(leases: Leases) -> None:
    lease = leases.acquire("rk-01", "ann", "nightly", ttl_s=60)
    lease.release()
    with pytest.raises(BoardError, match="released"):
        lease.heartbeat()


def test_a_dead_process_of_this_machine_is_replaced_at_once(
    killed_holder: str, leases: Leases
) -> None:
    assert leases.holder(killed_holder) is None
    assert leases.acquire(killed_holder, reason="bring-up", ttl_s=60).token == 2


def test_a_living_process_of_this_machine_is_not_replaced(leases: Leases) -> None:
    leases.acquire("rk-01", reason="nightly", ttl_s=60)
    with pytest.raises(BoardError, match="nightly"):
        leases.acquire("rk-01", reason="bring-up", ttl_s=60)


def test_an_owner_of_an_earlier_boot_or_with_a_reused_process_number_is_dead() -> None:
    own = Owner.parse(current_owner())
    assert own is not None
    assert not is_dead(str(own))
    earlier_boot = Owner(own.user, own.host, own.pid, own.place, "0" * 12, own.ticks)
    reused_number = Owner(own.user, own.host, own.pid, own.place, own.boot, own.ticks + 1)
    assert is_dead(str(earlier_boot))
    assert is_dead(str(reused_number))


def test_an_owner_that_cannot_be_looked_at_is_never_taken_for_dead() -> None:
    own = Owner.parse(current_owner())
    assert own is not None
    other_machine = Owner(own.user, own.host, 2**22, "0" * 8, own.boot, own.ticks)
    assert not is_dead(str(other_machine))
    assert not is_dead("a person")


def test_a_step_of_the_wall_clock_ends_no_lease(store: Store, leases: Leases) -> None:
    leases.acquire("rk-01", "ann@elsewhere", "nightly", ttl_s=60)
    with store.database.writing() as session:
        row = session.get(LeaseRow, "rk-01")
        assert row is not None
        row.expires_at -= datetime.timedelta(days=1)  # as if the clock had jumped a day ahead
    assert leases.holder("rk-01") is not None


def test_a_lease_of_an_earlier_boot_is_judged_by_the_wall_clock(
    store: Store, leases: Leases
) -> None:
    leases.acquire("rk-01", "ann@elsewhere", "nightly", ttl_s=60)
    with store.database.writing() as session:
        row = session.get(LeaseRow, "rk-01")
        assert row is not None
        row.clock, row.expires_s = "boot 0", 0.0  # that clock is gone, and counted from anywhere
    assert leases.holder("rk-01") is not None
    with store.database.writing() as session:
        row = session.get(LeaseRow, "rk-01")
        assert row is not None
        row.expires_at -= datetime.timedelta(seconds=61)
    assert leases.holder("rk-01") is None


def expiry(store: Store, board: str) -> float:
    with store.database.reading() as session:
        row = session.get(LeaseRow, board)
        assert row is not None
        return row.expires_s


def test_guard_renews_the_lease_and_releases_it_at_the_end(store: Store, leases: Leases) -> None:
    with lease_guard(leases, "rk-01", "stress", ttl_s=1.0) as lease:
        at_first = expiry(store, "rk-01")
        end = time.monotonic() + 30
        while expiry(store, "rk-01") < at_first + 1.0:
            assert time.monotonic() < end, "the lease was not renewed over a whole life of it"
            time.sleep(0.05)
        lease.heartbeat()  # still the same owner's
    assert leases.holder("rk-01") is None


def test_guard_releases_when_its_block_raises(leases: Leases) -> None:
    with pytest.raises(RuntimeError, match="stage"), lease_guard(leases, "rk-01", "stress"):
        raise RuntimeError("stage")
    assert leases.holder("rk-01") is None


def test_guard_tells_its_block_that_the_board_was_taken_over(store: Store, leases: Leases) -> None:
    lost = threading.Event()
    errors: list[HarnessError] = []

    def on_lost(error: HarnessError) -> None:
        errors.append(error)
        lost.set()

    def block() -> None:
        with lease_guard(
            leases, "rk-01", "stress", owner="ann@elsewhere", ttl_s=1, on_lost=on_lost
        ):
            with store.database.writing() as session:
                row = session.get(LeaseRow, "rk-01")
                assert row is not None
                row.token, row.owner, row.expires_s = row.token + 1, "bob", row.expires_s + 60
            assert lost.wait(20)

    with pytest.raises(BoardError, match="taken over by bob"):
        block()
    assert len(errors) == 1
    holder = leases.holder("rk-01")
    assert holder is not None
    assert holder.owner == "bob"


def test_threads_that_ask_at_once_get_one_lease(leases: Leases) -> None:
    barrier = threading.Barrier(8)
    won: list[Lease] = []
    refused: list[str] = []

    def ask() -> None:
        barrier.wait()
        try:
            won.append(leases.acquire("rk-01", reason="race", ttl_s=60))
        except BoardError as error:
            refused.append(error.kind)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert refused == ["busy"] * 7


def contend(path: Path, folder: Path, seed: int) -> None:
    """Takes and gives back one board for ever; writes down each token, and any second owner.

    The kernel frees an flock when its process dies, so it shows who really is at the board.
    """
    rng = random.Random(seed)
    leases = Leases(Store.open(path))
    with (folder / "board").open("a") as board:
        while True:
            try:
                lease = leases.acquire("rk-01", reason=f"worker {seed}", ttl_s=3600)
            except BoardError:
                time.sleep(rng.uniform(0, 0.005))
                continue
            try:
                fcntl.flock(board, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                (folder / f"violation-{seed}").touch()
                return
            # O_APPEND: one short write is one line, also between processes.
            board.write(f"{lease.token}\n")
            board.flush()
            lease.heartbeat()
            time.sleep(rng.uniform(0, 0.01))
            fcntl.flock(board, fcntl.LOCK_UN)
            lease.release()
            lease.release()


def test_contending_processes_that_are_killed_never_share_the_board(
    store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "results.sqlite"
    rng = random.Random(1)
    workers: list[BaseProcess] = []

    def start(seed: int) -> BaseProcess:
        worker = processes.Process(target=contend, args=(path, tmp_path, seed))
        worker.start()
        return worker

    try:
        workers = [start(seed) for seed in range(5)]
        for kill in range(25):
            time.sleep(rng.uniform(0.02, 0.15))
            victim = rng.randrange(len(workers))
            workers[victim].kill()
            if kill % 2:  # sometimes a zombie is left standing while the others go on
                workers[victim].join()
            else:
                time.sleep(0.05)
                workers[victim].join()
            workers[victim] = start(100 + kill)
        lines = (tmp_path / "board").read_text().split()
        wait_until_longer(tmp_path / "board", len(lines) + 20)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    tokens = [int(line) for line in (tmp_path / "board").read_text().split()]
    assert not list(tmp_path.glob("violation-*"))
    assert len(tokens) > 20
    assert tokens == sorted(set(tokens))
    # Whoever was killed last holds nothing any more, although the lease is for an hour.
    Leases(store).acquire("rk-01", reason="after the fight", ttl_s=60)


def wait_until_longer(path: Path, lines: int) -> None:
    end = time.monotonic() + 60
    while len(path.read_text().split()) < lines:
        assert time.monotonic() < end, "the board was not taken any more after the last kill"
        time.sleep(0.05)
