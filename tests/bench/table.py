"""Rows as a table for the terminal, and as files: JSON for programs, Markdown for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from .results import INVALID, MISSED, REACHED, SKIPPED, TROUBLE, Row

COLOURS = {
    REACHED: "green",
    MISSED: "red",
    INVALID: "bold red",
    TROUBLE: "bold red",
    SKIPPED: "yellow",
}
VERSION = 1


def number(value: float, unit: str) -> str:
    """Three digits that matter, and the unit where it is not the plain ×."""
    if unit == "%":
        return f"{100 * value:.1f} %"
    text = f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return f"{text} {unit}"


def cells(row: Row) -> tuple[str, str, str, str, str]:
    """What was measured, result, spread, target, verdict."""
    if row.ratio is None:
        return row.name, "–", "", str(row.target or ""), row.verdict
    result = number(row.ratio.value, row.unit)
    spread = " … ".join(number(value, row.unit) for value in (row.ratio.low, row.ratio.high))
    verdict = f"{row.verdict} (close)" if row.close else row.verdict
    return row.name, result, spread, target_text(row), verdict


def target_text(row: Row) -> str:
    if row.target is None:
        return ""
    sign = "≥" if row.target.at_least else "≤"
    text = f"{sign} {number(row.target.limit, row.unit)}"
    return text if row.target.aim is None else f"{text}, aim {number(row.target.aim, row.unit)}"


def as_table(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading, justify in (
        ("measured", "left"),
        ("result", "right"),
        ("min … max", "right"),
        ("target", "right"),
        ("verdict", "left"),
        ("speeds and notes", "left"),
    ):
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]  # rich's literal type of the two words above
    bench = ""
    for row in rows:
        if row.bench != bench:
            bench = row.bench
            table.add_section()
            table.add_row(Text(bench, style="bold"))
        name, result, spread, target, verdict = cells(row)
        colour = COLOURS.get(row.verdict, "")
        # Text, not markup: names and notes may hold brackets.
        remarks = "; ".join(part for part in (row.speeds, *row.notes) if part)
        table.add_row(
            Text(name),
            Text(result, style="bold"),
            Text(spread),
            Text(target),
            Text(verdict, style=colour),
            Text(remarks),
        )
    return table


def as_markdown(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    """The table, then how it was measured, golden checks included."""
    lines = [f"# Benchmarks, {about.get('started', '')}", ""]
    lines += ["| measured | result | min … max | target | verdict | speeds and notes |"]
    lines += ["|---|---:|---:|---:|---|---|"]
    bench = ""
    for row in rows:
        if row.bench != bench:
            bench = row.bench
            lines.append(f"| **{_plain(bench)}** | | | | | |")
        remarks = "; ".join(part for part in (row.speeds, *row.notes) if part)
        lines.append("| " + " | ".join(_plain(cell) for cell in (*cells(row), remarks)) + " |")
    lines += ["", "## Golden tokens", ""]
    lines += _unique(
        f"- {_plain(row.name.rpartition(', ')[0] or row.name)}: {_plain(str(check))}"
        for row in rows
        for check in row.checks
    )
    lines += ["", "## Where and how", ""]
    lines += [f"- **{key}**: {_plain(_flat(value))}" for key, value in about.items()]
    for row in rows:
        if row.evidence.get("profile"):
            lines += ["", f"## Where the time goes: {_plain(row.bench)}, {_plain(row.name)}", ""]
            lines += ["| ops | ms | share |", "|---|---:|---:|"]
            lines += [
                f"| {_plain(part['ops'])} | {part['ms']:.3f} | {part['share']:.1%} |"
                for part in row.evidence["profile"]
            ]
    return "\n".join(lines) + "\n"


def store(folder: Path, rows: Sequence[Row], about: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write `result.json` and `report.md` into `folder`, which is made; returns both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    result, report = folder / "result.json", folder / "report.md"
    record = {"version": VERSION, "about": about, "rows": [row.to_json() for row in rows]}
    result.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
    report.write_text(as_markdown(rows, about), "utf-8")
    return result, report


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_flat(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_flat(item) for item in value)
    return str(value)


def _plain(text: str) -> str:
    """Nothing in a cell may end it."""
    return text.replace("|", "\\|").replace("\n", " ")


def _unique(lines: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(lines))
