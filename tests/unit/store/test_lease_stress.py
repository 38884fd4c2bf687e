"""Leases under many processes that are killed at any moment: one owner, and no board lost for long.

What decides is no clock of the test but witnesses: an flock per board, which the kernel frees when
its holder dies, and the times at which a killed process was certainly dead. All processes of a
machine share CLOCK_MONOTONIC, so their notes can be compared. LEASE_STRESS_S=600 runs it longer.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from harness.boards.leases import Lease, Leases
from harness.errors import BoardError
from harness.store import Store

SECONDS = float(os.environ.get("LEASE_STRESS_S", "7"))
BOARDS = ("rk-01", "rk-02", "rk-03")
WORKERS = 8
TTL_S = 0.8
FEWEST = 8  # takings of each board

# Children are forked, so that they start in milliseconds and can be killed in numbers.
processes = multiprocessing.get_context("fork")


class Notes:
    """A line per fact, appended in one write each: what a killed process wrote is there."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._fd = os.open(folder / kind, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, *words: object) -> None:
        os.write(self._fd, (" ".join(map(str, words)) + "\n").encode())


def read(folder: Path, kind: str) -> list[list[str]]:
    path = folder / kind
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def work(path: Path, folder: Path, number: int) -> None:
    """Takes, renews and gives back boards for ever.

    Every second worker has the name of somebody on another machine: only its TTL ends its lease.
    """
    rng = random.Random(number)
    leases = Leases(Store.open(path))
    taken, refused, wrong = (Notes(folder, kind) for kind in ("taken", "refused", "wrong"))
    owner = f"worker-{number}@elsewhere" if number % 2 else None
    while True:
        board = rng.choice(BOARDS)
        began = time.monotonic()
        try:
            lease = leases.acquire(board, owner, f"{number}", TTL_S)
        except BoardError:
            asked = time.monotonic()
            holder = leases.holder(board)
            if holder is not None:
                refused.add(asked, board, holder.reason)
            time.sleep(rng.uniform(0, 0.04))
            continue
        got = time.monotonic()
        taken.add(board, lease.token, number)
        with contextlib.suppress(BoardError):  # taken over: this machine did not let it run
            hold(folder / f"{board}.held", lease, began, got, rng, wrong)
        lease.release()
        lease.release()


def hold(
    file: Path, lease: Lease, renewed: float, got: float, rng: random.Random, wrong: Notes
) -> None:
    """Is alone at the board, or says who else is. `renewed`, `got`: before and after it was taken.

    Raises BoardError when somebody else has taken the board over.
    """
    with file.open("a+") as board:
        try:
            fcntl.flock(board, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Whoever did not come to renew its lease for a TTL was rightly taken over, and has not
            # noticed yet. Otherwise there are two owners.
            board.seek(0)
            other, _, since = (board.read().splitlines()[-1:] or ["nobody 0 0"])[0].split()
            if got < float(since) + TTL_S:
                wrong.add(file.name, lease.reason, lease.token, "beside", other, got, since)
            return
        usual = (0.0, 0.0, 0.005, 0.02, 0.05, 0.05)
        end = time.monotonic() + rng.choice((*usual, 2.5 * TTL_S * rng.random()))
        while True:
            board.write(f"{lease.reason} {lease.token} {renewed}\n")
            board.flush()
            if time.monotonic() >= end:
                return
            time.sleep(rng.uniform(0.01, TTL_S / 4))
            renewed = time.monotonic()
            lease.heartbeat()


def few(folder: Path) -> bool:
    """Whether a board changed hands less often than is worth looking at."""
    names = [name for name, _, _ in read(folder, "taken")]
    return any(names.count(board) < FEWEST for board in BOARDS)


def test_many_processes_that_are_killed_never_share_a_board_or_lose_one(
    store: Store, tmp_path: Path
) -> None:
    path, rng = tmp_path / "results.sqlite", random.Random(1)
    workers: dict[int, BaseProcess] = {}
    died: dict[str, float] = {}  # worker → when it certainly was dead

    def start(number: int) -> None:
        workers[number] = processes.Process(target=work, args=(path, tmp_path, number))
        workers[number].start()

    def kill(number: int) -> None:
        worker = workers.pop(number)
        worker.kill()
        worker.join()
        died[str(number)] = time.monotonic()

    end = time.monotonic() + SECONDS
    for number in range(WORKERS):
        start(number)
    try:
        count = WORKERS
        # On a machine that is busy with other things: until the fight was one.
        while time.monotonic() < end or (few(tmp_path) and time.monotonic() < end + 30):
            time.sleep(rng.uniform(0.02, 0.3))
            kill(rng.choice(list(workers)))
            start(count)
            count += 1
    finally:
        for number in list(workers):
            kill(number)

    assert read(tmp_path, "wrong") == []
    taken = read(tmp_path, "taken")
    for board in BOARDS:
        tokens = [int(token) for name, token, _ in taken if name == board]
        assert len(tokens) >= FEWEST
        assert len(set(tokens)) == len(tokens)  # a token is one owner's for ever
    # Nobody was refused for the sake of a process that had been dead for longer than the TTL; one
    # of this machine stands in the way of nobody once it is dead.
    refusals = read(tmp_path, "refused")
    assert refusals
    for asked, board, holder in refusals:
        allowed = died[holder] + (TTL_S if int(holder) % 2 else 0.0)
        assert float(asked) <= allowed, (board, holder)
    time.sleep(TTL_S)
    leases = Leases(store)
    for board in BOARDS:
        assert leases.holder(board) is None
        leases.acquire(board, reason="after the fight", ttl_s=60).release()
