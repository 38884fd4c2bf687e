"""`harness results event`, `harness results alerts`: what nights are held against, and found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.output import emit, emit_json, guard, say, visible
from harness.errors import HarnessError

RightOption = Annotated[
    str | None,
    typer.Option("--right", metavar="ID", help="This one was right: the first characters."),
]
WrongOption = Annotated[
    str | None, typer.Option("--wrong", metavar="ID", help="This one was a false alarm.")
]


@guard
def event(
    text: Annotated[str, typer.Argument(metavar="WHAT", help='Such as "new kernel".')],
    board: Annotated[
        list[str] | None,
        typer.Option("--board", "-b", metavar="NAME", help="On this board; may be given again."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="On every board of devices.yaml.")] = False,
    farm: Annotated[
        Path, typer.Option("--farm", help="The file that describes the boards.")
    ] = Path("devices.yaml"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Declare that a board is another from now on: later nights are held against nights after
    this, and against none before. Only this and a confirmed change end a segment.

    \b
    Examples
      harness results event "new kernel" --board rk3588-01
      harness results event "fans replaced" --board pi4-01 --board pi4-02
      harness results event "moved to the cool room" --all
    """
    from harness.boards.care import EVENT, Care, this_person
    from harness.inventory import load_farm
    from harness.store import Store

    if bool(board) == every:
        raise HarnessError("no board", expected="--board NAME, or --all, and not both")
    if not text.strip():
        raise HarnessError("an event without words", expected='such as "new kernel"')
    names = [found.name for found in load_farm(farm).select(board or (), ())]
    told = f"{text.strip()[:300]} (declared by {this_person()})"
    with Store.open() as store:
        for name in names:
            Care(store).note(name, EVENT, True, told)
    if as_json:
        emit_json({"boards": names, "event": told})
    else:
        say(visible(f"{', '.join(names)}: {told}"))


@guard
def alerts(
    board: Annotated[
        str | None, typer.Option("--board", "-b", metavar="NAME", help="Only this board.")
    ] = None,
    right: RightOption = None,
    wrong: WrongOption = None,
    store: Annotated[
        str | None,
        typer.Option("--store", metavar="FILE|URL", help="As for `harness results show`."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """List what nights suspected and what became of it, and how often each detector was right.

    An A/B settles a suspect; a person may with --right and --wrong.

    \b
    Examples
      harness results alerts
      harness results alerts --board rk3588-01 --json
      harness results alerts --wrong 3f2a91bc
    """
    import dataclasses

    from harness.cli.results import open_existing
    from harness.farm.series import METRIC
    from harness.store.alerts import Alerts

    with open_existing(store) as opened:
        ledger = Alerts(opened)
        for text, word in ((right, True), (wrong, False)):
            if text is not None:
                ledger.settle(text, word)
        found, records = ledger.all(board), ledger.records(board)
    if as_json:
        emit_json(
            {
                "alerts": [dataclasses.asdict(alert) for alert in found],
                "detectors": [
                    {**dataclasses.asdict(one), "precision": one.precision} for one in records
                ],
            }
        )
        return
    if not found:
        say("nights have suspected nothing yet")
    for alert in found:
        metric = METRIC.get(alert.metric)
        shift = "" if alert.shift is None else f" {alert.shift:+.1%}"
        words = metric.words if metric is not None else alert.metric
        emit(
            visible(
                f"{alert.id[:8]}  {alert.night:%Y-%m-%d}  {alert.board}  {words}{shift}  "
                f"{alert.decided}: {alert.told}"
            )
        )
    for one in records:
        share = "none decided yet" if one.precision is None else f"{one.precision:.0%} right"
        emit(f"{one.detector}: {one.alerts} suspects, {share}, {one.open} open")
