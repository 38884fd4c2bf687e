"""What has to become of each board of a chaos night, and whether it did.

Claims are read from the night's own report (`harness nightly --json`) and from what is found on
this machine afterwards: nothing is taken on trust from the report alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

FARM = Path(__file__).with_name("farm.yaml")
STRESS = "stress"


@dataclasses.dataclass(frozen=True)
class Fate:
    """What becomes of a board: the stage that tells, its outcome, kinds of trouble that say it, a
    word of the report, and the trouble of an attempt before, where one is expected."""

    stage: str | None  # None: all stages pass
    outcome: str = "pass"
    kinds: tuple[str | None, ...] = (None,)
    word: str = ""
    before: str | None = None


# `first` stands for the first stage that was asked for, `real` for the first with the real model.
FATES: Mapping[str, Fate] = {
    "healthy-1": Fate(None),
    "healthy-2": Fate(None),
    "slow-link": Fate(None),
    "dropped-link": Fate(None),
    "rebooted": Fate(None, before="board-reset"),
    "frozen": Fate(STRESS, "error", ("board-lost", "timeout"), before="board-lost"),
    "refusing": Fate("first", "error", ("unreachable",)),
    "full-disk": Fate("first", "error", ("no-space",)),
    "no-place": Fate("first", "error", ("no-folder",)),
    "other-key": Fate("first", "error", ("host-key",)),
    "no-python": Fate("first", "error", ("no-python",)),
    "hung": Fate("real", "fail", (None,), word="spin"),
}
# Faults that have to be provoked, and what the board's own log says when they come.
TIMED = {
    "frozen": "fault: the board freezes",
    "dropped-link": "fault: the link drops",
    "rebooted": "fault: the board reboots",
}


@dataclasses.dataclass(frozen=True)
class Claim:
    what: str
    holds: bool
    found: str = ""

    def __str__(self) -> str:
        mark = "ok    " if self.holds else "FAILED"
        return f"{mark} {self.what}" + ("" if self.holds else f"; found {self.found}")


def claims(told: Mapping[str, Any], home: Path, stages: list[str]) -> list[Claim]:
    """Of a night with the report `told`, whose state folder is `home`."""
    made = [_fate(name, fate, told, stages) for name, fate in FATES.items()]
    for name, said in TIMED.items():
        log = (home / "boards" / name / "server.log").read_text(errors="replace")
        made.append(Claim(f"the fault of {name} came", said in log, log[-200:]))
    made += _report(told)
    made += _left(home)
    made.append(Claim("the exit code says that there are findings", told["exit_code"] == 1,
                      str(told["exit_code"])))  # fmt: skip
    return made


def _fate(name: str, fate: Fate, told: Mapping[str, Any], stages: list[str]) -> Claim:
    row = told["boards"].get(name, {})
    found = {stage: (item["outcome"], item["error_kind"]) for stage, item in row.items()}
    names = {"first": stages[0], "real": stages[1]}
    deciding = names.get(fate.stage or "", fate.stage)
    before = [item["error_kind"] for tries in told["retried"].get(name, {}).values()
              for item in tries]  # fmt: skip
    good = set(found) == set(stages)
    for number, stage in enumerate(stages):
        outcome, kind = found.get(stage, ("", None))
        if deciding is None or number < stages.index(deciding):
            good &= outcome in ("pass", "warn")
        elif stage == deciding:
            good &= outcome == fate.outcome and kind in fate.kinds
        else:
            good &= outcome == "blocked"
    if deciding is not None:
        checks = " ".join(check["sentence"] for check in row.get(deciding, {}).get("checks", ()))
        good &= fate.word in checks
    good &= before == ([] if fate.before is None else [fate.before])
    kinds = " or ".join(str(kind) for kind in fate.kinds if kind)
    what = "passes every stage" if deciding is None else f"is {fate.outcome} in {deciding}"
    what += f" ({kinds})" if kinds else ""
    what += f", after an attempt that ended in {fate.before}" if fate.before else ""
    return Claim(f"{name} {what}", bool(good), f"{found}, attempts before: {before}")


def _report(told: Mapping[str, Any]) -> Iterator[Claim]:
    """The report for people says all of it, by name."""
    text = "\n".join(told["report"])
    passed = next((line for line in told["report"] if line.startswith("passed: ")), "")
    for name, fate in FATES.items():
        if fate.stage is None:
            yield Claim(f"the report counts {name} among those that passed",
                        name in passed.replace(",", " ").split(), passed)  # fmt: skip
        else:
            kinds = [kind for kind in fate.kinds if kind]
            lines = [line for line in told["report"] if line.startswith(f"{name} ")]
            good = any(fate.outcome.upper() in line for line in lines)
            good &= not kinds or any(f"({kind})" in line for line in lines for kind in kinds)
            yield Claim(f"the report names {name}", good, str(lines))
        if fate.before is not None:
            yield Claim(f"the report tells the attempt of {name} that ended in {fate.before}",
                        f"ended in {fate.before}" in text, "not told")  # fmt: skip
    told_left = any("left behind" in line for line in told["report"])
    yield Claim("the report says whether anything is left behind", told_left, text[-300:])


def _left(home: Path) -> Iterator[Claim]:
    """Nothing of the night is left on this machine, which all its boards are on."""
    from harness.boards import virtual
    from harness.boards.leases import Leases
    from harness.store import Store

    with Store.open(home / "results.sqlite") as store:
        held = [str(holder) for holder in Leases(store).held()]
    yield Claim("no lease is left", held == [], str(held))
    alive = processes(home)
    yield Claim("no process is left", alive == [], str(alive))
    boards = [state.name for state in virtual.running()]
    yield Claim("no virtual board is left running", boards == [], str(boards))
    partial = [str(path) for path in (home / "boards").rglob("*.partial")]
    yield Claim("no partial upload is left", partial == [], str(partial))
    # On a board that nobody reaches any more, nobody can clear its spool away; the report says so.
    spools = [path for path in (home / "boards").glob("*/home/.cache/decode-harness/runs/*")
              if path.is_dir() and "frozen" not in path.parts]  # fmt: skip
    yield Claim("no run is left on a board that could be reached", spools == [], str(spools))


def processes(home: Path) -> list[str]:
    """Commands of living processes that have to do with the night's state folder."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), process.cwd()]
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if process.pid != psutil.Process().pid and any(str(home) in word for word in words):
            found.append(" ".join(words)[:200])
    return found
