"""Searches as the harness would record them: of options, a race, a graded loss, and an open one."""

from __future__ import annotations

import random

from harness.bisect.trials import Result, Trial
from harness.store import Store
from harness.store.searches import Searches

STEPS = [f"L{layer:02}.{op}" for layer in range(30) for op in ("attn.q", "attn.kv", "ffn.down")]


def record_searches(store: Store) -> dict[str, str]:
    """Kind → id of one search of each."""
    searches = Searches(store)
    found = {kind: _begin(searches, kind) for kind in ("options", "race", "graded", "open")}
    rng = random.Random(1)
    for number in range(160):
        phase = ("all on", "prefix", "alone", "without")[number // 40]
        result = rng.choices([Result.PASS, Result.FAIL, Result.OTHER, Result.INFRA], [8, 3, 1, 1])[
            0
        ]
        on = STEPS[: rng.randrange(len(STEPS))]
        for kind in ("options", "race"):
            told = on if kind == "options" else {"only": on}
            signature = "logits" if result is Result.FAIL else None
            searches.add(found[kind], Trial(phase, {"on": told}, result, signature, None, 2.0))
    named = {"name": "L07.attn.kv", "probability": 0.991}
    rest = [{"name": step, "probability": 0.0001} for step in STEPS if step != named["name"]]
    searches.finish(
        found["options"],
        "named",
        "fusion.qkv with L07.attn.kv make it fail; without L07.attn.kv it passes",
        culprits=["fusion.qkv", "L07.attn.kv"],
        confidence=0.991,
        details={
            "posterior": [*rest[:22], named, *rest[22:]],
            "command": "harness align -b pi5-03",
        },
    )
    sentence = "`L07.attn.kv` completes after `L07.attn.mix` starts: no event between them"
    searches.finish(
        found["race"],
        "inconclusive",
        "no step can be named: it lies between `L07.attn.kv` and `L09.attn.kv`",
        details={
            "races": [{"sentence": sentence, "command": "harness bisect race --try L07.attn.kv"}]
        },
    )
    effects = [
        {"name": f"int8.L{layer:02}", "mean": 0.003 / (1 + layer), "left_out": 0.003, "alone": None}
        for layer in range(30)
    ]
    searches.finish(
        found["graded"],
        "graded",
        "no set of at most 5 options fails alone: many of them add to it, each a little",
        details={"ranking": {"effects": effects}},
    )
    return found


def _begin(searches: Searches, kind: str) -> str:
    command = ["harness", "bisect", kind, "--board", "pi5-03"]
    return searches.begin(kind, "pi5-03", command, {"kind": kind})
