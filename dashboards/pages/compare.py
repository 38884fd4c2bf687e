"""The page of a comparison: the verdict on B, an interval for each metric, every pair."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dashboards import plain
from dashboards.charts import Bar, Chart, Dot, Mark, Panel, Table, x_scale
from dashboards.pages.base import Page, Places, tint
from dashboards.scales import Scale, Tick, bounds, ticks
from dashboards.searches import Search
from harness.compare.judging import METRICS
from harness.statistics.pairs import MARGIN

KIND = "compare"
SHORT = {"tpot_s": "TPOT", "ttft_s": "TTFT", "rss_mb": "Memory"}
LANE = 44.0
BAND_Z = 2.58  # 99 %, as the verdict's own α


def page(search: Search, places: Places) -> Page:
    details = search.details
    metrics = _maps(details.get("metrics"))
    pairs = [one for one in details.get("pairs") or () if isinstance(one, Mapping)]
    noise = _numbers(details.get("noise"))
    return Page(
        places.search(search),
        "compare.html.jinja",
        {
            "title": f"Compare · {search.board}",
            "search": search,
            "tint": tint(search.status),
            "arms": [(letter, str(arm.get("title", "")))
                     for letter, arm in _maps(details.get("arms")).items()],
            "rows": rows(metrics, details.get("deciding") or ()),
            "forest": forest(metrics, noise, len(pairs)) if metrics else None,
            "pairs": [chart for name in METRICS
                      if (chart := pair_chart(name, pairs)) is not None],
            "difference": difference(details.get("difference")),
            "clocks": str(_maps({"c": details.get("clocks")}).get("c", {}).get("reason", "")),
            "plans": [f"{METRICS[name].words}: {one.get('sentence', '')}"
                      for name, one in _maps(details.get("plan")).items() if name in METRICS],
            "count": len(pairs) or search.count // 2,
        },
    )  # fmt: skip


def rows(metrics: Mapping[str, Mapping[str, Any]], deciding: Sequence[str]) -> list[dict[str, Any]]:
    """A metric each: verdict, change of B, its interval, p."""
    found = []
    for name, metric in METRICS.items():
        one = metrics.get(name)
        if one is None:
            continue
        found.append(
            {
                "words": metric.words,
                "verdict": str(one.get("verdict", "unknown")),
                "tint": tint(str(one.get("verdict"))),
                "change": _percent(one.get("ratio")),
                "interval": f"{_percent(one.get('low'))} … {_percent(one.get('high'))}",
                "p": plain.number(one.get("p"), 2),
                "decides": name in deciding,
            }
        )
    return found


def forest(
    metrics: Mapping[str, Mapping[str, Any]], noise: Mapping[str, float], pairs: int
) -> Chart | None:
    """B over A in percent for each metric: the interval of the verdict as a bar, its middle as a
    dot, and behind them what equal versions would give (the A/A band)."""
    names = [name for name in METRICS if name in metrics and _known(metrics[name].get("ratio"))]
    if not names:
        return None
    reach = [MARGIN, -MARGIN]
    for name in names:
        reach += [
            float(metrics[name][key]) - 1
            for key in ("low", "ratio", "high")
            if _known(metrics[name].get(key)) and 0 < metrics[name][key] < 10
        ]
    low, high = bounds([100 * value for value in reach])
    x = x_scale(low, high)
    top = 50.0
    bars, dots, labels, table = [], [], [], []
    for index, name in enumerate(names):
        one, middle = metrics[name], top + index * LANE + LANE / 2
        labels.append(Tick(round(middle, 1), SHORT[name]))
        sd = noise.get(name)
        band = BAND_Z * sd / math.sqrt(pairs) if sd and pairs else None
        if band is not None:
            left, right = max(x(-100 * band), x.start), min(x(100 * band), x.end)
            bars.append(
                Bar(
                    left,
                    middle - 14,
                    max(right - left, 1),
                    28,
                    "aa",
                    f"equal versions: within ± {plain.number(100 * band)} %",
                )
            )
        known = [_known(one.get(key)) for key in ("low", "high")]
        if all(known):
            left = min(max(x(100 * (one["low"] - 1)), x.start), x.end)
            right = min(max(x(100 * (one["high"] - 1)), x.start), x.end)
            bars.append(
                Bar(
                    left,
                    middle - 4,
                    max(right - left, 1.5),
                    8,
                    _style(one),
                    f"{_percent(one['low'])} to {_percent(one['high'])}",
                )
            )
        dots.append(
            Dot(
                x(100 * (one["ratio"] - 1)),
                middle,
                "s1",
                "diamond",
                f"{METRICS[name].words}: {_percent(one['ratio'])}",
            )
        )
        table.append(
            (
                METRICS[name].words,
                one.get("verdict"),
                one.get("ratio"),
                one.get("low"),
                one.get("high"),
                one.get("p"),
                None if band is None else band,
            )
        )
    panel = Panel(
        "B over A, %", top, len(names) * LANE, tuple(labels), bars=tuple(bars), dots=tuple(dots)
    )
    marks = (
        Mark(x(0.0), "sweep", "equal"),
        Mark(x(-100 * MARGIN), "sweep"),
        Mark(x(100 * MARGIN), "sweep"),
    )
    return Chart(
        "forest",
        "How much more of each metric B takes than A, with the interval of the verdict",
        (panel,),
        ticks(x, 8),
        "less is better; the outer lines are 1 %, below which a difference is none",
        panel.bottom + 52,
        marks=marks,
        legend=(("s1 diamond", "B over A"), ("band bar s1", "interval"),
                ("band bar aa", "equal versions on this board")),
        table=Table("Verdicts", ("metric", "verdict", "B / A", "low", "high", "p", "A/A ±"),
                    tuple(table)),
    )  # fmt: skip


def pair_chart(name: str, pairs: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Every pair's ratio in the order of measurement: a trend here is drift that was not shared."""
    values = [(number, _value(pair, "a", name), _value(pair, "b", name))
              for number, pair in enumerate(pairs, 1)]  # fmt: skip
    found = [(number, a, b) for number, a, b in values if a and b]
    if not found:
        return None
    metric = METRICS[name]
    x = x_scale(0.5, len(pairs) + 0.5)
    ratios = [100 * (b / a - 1) for _, a, b in found]
    low, high = bounds([*ratios, 100 * MARGIN, -100 * MARGIN])
    top, height = 50.0, 130.0
    y = Scale(low, high, top + height, top)
    dots = tuple(
        Dot(x(number), y(ratio), "s1", "circle", f"pair {number}: {plain.number(ratio)} %")
        for (number, _, _), ratio in zip(found, ratios, strict=True)
    )
    panel = Panel(f"{metric.words}, B over A, %", top, height, ticks(y, 4), dots=dots,
                  marks=(Mark(0, "zero", y=y(0.0)),))  # fmt: skip
    return Chart(
        f"pairs-{plain.slug(name)}",
        f"{metric.words} of B over A in {len(found)} pairs",
        (panel,),
        tuple(Tick(x(number), str(number), minor=number % 2 == 0)
              for number in range(1, len(pairs) + 1)),
        "pair",
        panel.bottom + 50,
        table=Table(
            f"Pairs: {metric.words}",
            ("pair", f"A {metric.unit}", f"B {metric.unit}", "B / A"),
            tuple((n, a * metric.scale, b * metric.scale, b / a) for n, a, b in found),
        ),
    )  # fmt: skip


def difference(found: Any) -> Table | None:
    """Where A and B are not the same."""
    rows = [tuple(map(str, row)) for row in found or () if isinstance(row, (list, tuple))]
    kept = tuple(row for row in rows if len(row) == 3)
    return Table("What differs", ("what", "A", "B"), kept) if kept else None


def _style(one: Mapping[str, Any]) -> str:
    return {"worse": "t-fail", "better": "t-pass", "equivalent": "t-pass"}.get(
        str(one.get("verdict")), "t-other"
    )


def _percent(ratio: Any) -> str:
    if not _known(ratio):
        return "–"
    return f"{100 * (ratio - 1):+.1f} %".replace("-", "\u2212")


def _known(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _value(pair: Mapping[str, Any], arm: str, name: str) -> float | None:
    found = _maps(pair).get(arm, {}).get(name)
    return float(found) if _known(found) and found is not None and found > 0 else None


def _maps(found: Any) -> dict[str, Mapping[str, Any]]:
    """The mappings of a mapping; details are plain JSON of whatever version wrote them."""
    if not isinstance(found, Mapping):
        return {}
    return {str(name): one for name, one in found.items() if isinstance(one, Mapping)}


def _numbers(found: Any) -> dict[str, float]:
    if not isinstance(found, Mapping):
        return {}
    return {str(name): float(value) for name, value in found.items() if _known(value)}
