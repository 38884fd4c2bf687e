"""What the kinds of searches leave in their details, as a page shows it. All of it may be missing,
or of another shape: it is plain JSON of whatever version wrote it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Details = Mapping[str, Any]


def command_of(details: Details) -> str:
    """The command that shows the failure; "" where none is told."""
    for one in (details, *_maps(details.get("races"))):
        if isinstance(one.get("command"), str):
            return str(one["command"])
    return ""


def notes_of(details: Details) -> tuple[str, ...]:
    """Sentences beside the headline: notes, what each race is, what the schedule lacks."""
    found = [*_texts(details.get("notes")), *_texts(details.get("findings"))]
    found += [
        race["sentence"]
        for race in _maps(details.get("races"))
        if isinstance(race.get("sentence"), str)
    ]
    return tuple(dict.fromkeys(found))


def posterior_of(details: Details) -> list[tuple[str, float]]:
    """(name, probability) in the order of the list: options, steps, or a range of commits."""
    named = [
        (str(item.get("name", "")), item.get("probability"))
        for item in _maps(details.get("posterior"))
    ]
    if not named:
        levels = reversed([*_maps(details.get("levels"))])  # the innermost line that was searched
        named = next((found for level in levels if (found := _level(level))), [])
    return [
        (name, min(1.0, max(0.0, float(share))))
        for name, share in named
        if isinstance(share, (int, float)) and math.isfinite(share)
    ]


def _level(level: Details) -> list[tuple[str, Any]]:
    """The commits of a line, each with its share; those between two of them that were told apart
    have none of their own."""
    shares = level.get("posterior")
    if not isinstance(shares, Mapping):
        return []
    return [
        (f"{one.get('short', '')} {one.get('subject', '')}".strip(), shares.get(str(at), 0.0))
        for at, one in enumerate(_maps(level.get("revisions")))
        if at  # the first one is known to be good
    ]


def tried(subject: Details) -> str:
    """What one trial tried, in a line."""
    words = []
    for key, prefix in (("on", ""), ("delayed", "held back: ")):
        told = _set(subject.get(key))
        if told and not (key == "delayed" and told == "none"):
            words.append(prefix + told)
    for key in ("revision", "commit", "prefix"):
        if isinstance(subject.get(key), (str, int)):
            words.append(f"{key} {str(subject[key])[:12]}")
    return "; ".join(words)


def _set(value: Any) -> str:
    """`["a", "b"]`, `{"only": […]}` or `{"all_but": […]}` in words; "" for anything else."""
    if isinstance(value, list):
        return _few(value) if value else "none"
    if isinstance(value, Mapping):
        if isinstance(value.get("only"), list):
            return _few(value["only"]) if value["only"] else "none"
        if isinstance(value.get("all_but"), list):
            return f"all but {_few(value['all_but'])}" if value["all_but"] else "all"
    return ""


def _few(names: Sequence[Any]) -> str:
    shown = ", ".join(map(str, names[:4]))
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown


def _maps(value: Any) -> Iterator[Details]:
    return (
        (one for one in value if isinstance(one, Mapping)) if isinstance(value, list) else iter(())
    )


def _texts(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
