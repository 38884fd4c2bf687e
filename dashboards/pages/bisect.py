"""The page of a search for a culprit: the verdict, every trial, what was likeliest at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dashboards import plain
from dashboards.charts import (
    LEFT,
    RIGHT,
    WIDTH,
    Bar,
    Bars,
    Chart,
    Mark,
    Panel,
    Table,
    bars,
    x_scale,
)
from dashboards.pages.base import Page, Places, tint
from dashboards.scales import Scale, Tick, ticks
from dashboards.search_details import command_of, notes_of, posterior_of
from dashboards.searches import Search, Trial

TITLES = {"race": "Race", "options": "Options", "revision": "Revision"}
# Result → words of the legend; a bar's height differs as well as its colour.
RESULTS = {
    "fail": "it failed so",
    "pass": "it passed",
    "other": "it failed in another way",
    "infra": "board or link failed",
}
HEIGHTS = {"fail": 1.0, "pass": 0.62, "other": 0.4, "infra": 0.2}
LANE = 34.0  # pixels of a phase's lane
MOST_EFFECTS = 24  # of a ranking are drawn


def page(search: Search, places: Places) -> Page:
    posterior = posterior_of(search.details)
    ranking = search.details.get("ranking")
    return Page(
        places.search(search),
        "bisect.html.jinja",
        {
            "title": f"{TITLES.get(search.kind, search.kind)} · {search.board}",
            "search": search,
            "name": TITLES.get(search.kind, search.kind),
            "tint": tint(search.status),
            "repeat": command_of(search.details),
            "notes": notes_of(search.details),
            "figures": figures(search),
            "strip": strip(search.trials, search.count) if search.trials else None,
            "posterior": posterior_chart(posterior, search.culprits) if posterior else None,
            "effects": effects(ranking) if isinstance(ranking, Mapping) else None,
            "trials": trials_table(search.trials) if search.trials else None,
        },
    )


def figures(search: Search) -> list[tuple[str, str]]:
    """The key numbers as (name, words)."""
    found = [("Trials", plain.number(search.count))]
    failed = sum(trial.result == "fail" for trial in search.trials)
    found.append(("Failed so", plain.number(failed)))
    if search.confidence is not None:
        found.append(("Confidence", plain.cosine(search.confidence)))
    seconds = [trial.seconds for trial in search.trials if trial.seconds is not None]
    if seconds:
        found.append(("On the board", plain.seconds(sum(seconds))))
    return found


def strip(trials: Sequence[Trial], count: int) -> Chart:
    """Every trial as a bar: time goes right, each phase has its lane, heights and colours tell the
    result."""
    phases = list(dict.fromkeys(trial.phase for trial in trials))
    x = x_scale(0.5, len(trials) + 0.5)
    width = max(1.0, min(14.0, (WIDTH - LEFT - RIGHT) / len(trials) - 1))
    top = 22.0
    drawn, labels = [], []
    for index, phase in enumerate(phases):
        bottom = top + (index + 1) * LANE - 6
        labels.append(Tick(round(bottom - (LANE - 6) / 2, 1), phase[:11]))
        for trial in trials:
            if trial.phase == phase:
                height = (LANE - 8) * HEIGHTS.get(trial.result, 0.3)
                drawn.append(
                    Bar(
                        round(x(trial.number) - width / 2, 1),
                        round(bottom - height, 1),
                        round(width, 1),
                        round(height, 1),
                        f"t-{trial.result}" if trial.result in RESULTS else "t-infra",
                        _trial_words(trial),
                    )
                )
    panel = Panel("", top, len(phases) * LANE, tuple(labels), bars=tuple(drawn))
    used = [name for name in RESULTS if any(trial.result == name for trial in trials)]
    more = f", the first {len(trials)} of {count}" if count > len(trials) else ""
    return Chart(
        "trials",
        f"{len(trials)} trials in {len(phases)} phases{more}",
        (panel,),
        _whole_ticks(x, len(trials)),
        "trial",
        panel.bottom + 52,
        legend=tuple((f"band t-{name}", RESULTS[name]) for name in used),
    )


def _trial_words(trial: Trial) -> str:
    value = "" if trial.value is None else f", {plain.number(trial.value)}"
    sign = f" ({trial.signature})" if trial.signature else ""
    words = RESULTS.get(trial.result, trial.result)
    return f"{trial.number}. {trial.phase}: {trial.words}: {words}{sign}{value}"


def _whole_ticks(x: Scale, count: int) -> tuple[Tick, ...]:
    """Ticks of a scale of 1 … count at whole numbers."""
    found = ticks(x, 8) if count > 1 else (Tick(x(1), "1"),)
    return tuple(tick for tick in found if "." not in tick.label and tick.label != "0")


def posterior_chart(posterior: Sequence[tuple[str, float]], culprits: Sequence[str]) -> Chart:
    """A bar for each element of the list; what is named stands out, the likeliest has its name."""
    x = x_scale(0.5, len(posterior) + 0.5)
    top, height = 50.0, 150.0
    y = Scale(0.0, 1.0, top + height, top)
    width = max(1.0, (WIDTH - LEFT - RIGHT) / len(posterior) - 1)
    drawn = tuple(
        Bar(
            round(x(number) - width / 2, 1),
            y(share),
            round(width, 1),
            round(max(top + height - y(share), 0.8), 1),
            "s2" if _named(name, culprits) else "s1",
            f"{number}. {name}: {share:.3f}",
        )
        for number, (name, share) in enumerate(posterior, 1)
    )
    best = max(range(len(posterior)), key=lambda index: posterior[index][1])
    at = x(best + 1)
    anchor = "start" if at < WIDTH * 0.3 else "end" if at > WIDTH * 0.7 else "middle"
    mark = Mark(at, "sweep", posterior[best][0][:40], anchor=anchor)
    legend = [("band bar s1", "in the list")]
    if any(_named(name, culprits) for name, _ in posterior):
        legend.append(("band bar s2", "named"))
    return Chart(
        "posterior",
        f"Probability of each of {len(posterior)} to be the one; likeliest is "
        f"{posterior[best][0]} with {posterior[best][1]:.3f}",
        (Panel("probability", top, height, ticks(y, 4), bars=drawn),),
        _whole_ticks(x, len(posterior)),
        "place in the list",
        top + height + 52,
        marks=(mark,),
        legend=tuple(legend),
        table=Table(
            "Probability of each",
            ("place", "name", "probability", "named"),
            tuple(
                (number, name, share, "yes" if _named(name, culprits) else "")
                for number, (name, share) in enumerate(posterior, 1)
            ),
        ),
    )


def _named(name: str, culprits: Sequence[str]) -> bool:
    """Whether an element of the list is named; a commit is by its short hash."""
    return name in culprits or any(one.split()[:1] == name.split()[:1] for one in culprits if one)


def effects(ranking: Mapping[str, Any]) -> Bars | None:
    """What each option costs, the largest first; None where nothing was measured."""
    told = ranking.get("effects")
    rows = [item for item in told if isinstance(item, Mapping)] if isinstance(told, list) else []
    known = [
        (str(row.get("name", "")), float(row["mean"]))
        for row in rows
        if isinstance(row.get("mean"), (int, float)) and math.isfinite(row["mean"])
    ]
    if not known:
        return None
    table = Table(
        "What each option costs",
        ("option", "left out of all", "alone", "mean", "share"),
        tuple(
            (str(row.get("name", "")), *(row.get(key) for key in ("left_out", "alone", "mean")),
             row.get("share"))
            for row in rows
        ),
    )  # fmt: skip
    return bars(
        "effects",
        "What each option costs",
        [(name, [("s1", name, amount)]) for name, amount in known[:MOST_EFFECTS]],
        (),
        say=plain.number,
        table=table,
    )


def trials_table(trials: Sequence[Trial]) -> Table:
    return Table(
        "Every trial",
        ("trial", "phase", "tried", "result", "failure", "value", "s"),
        tuple(
            (t.number, t.phase, t.words, t.result, t.signature, t.value, t.seconds) for t in trials
        ),
    ).thinned(1500)
