"""Facts of a board, and verdicts of the four stages as their judges would give them.

The numbers are made from a seed with the shapes that real runs have: 30 layers, three sweeps, a
long dialogue.
"""

from __future__ import annotations

import math
import random
from typing import Any

from harness.jobs.details import (
    AccuracyDetails,
    CurveDetails,
    CurveFit,
    CurveJump,
    CurvePoint,
    LogitsAgreement,
    OpError,
    StressDetails,
    StressSample,
    StressTurn,
    TextComparison,
    TinyDetails,
)
from harness.verdicts import Check, Outcome, Verdict

LAYERS = 30
OPS = (
    *(f"attn.{name}" for name in ("norm", "q", "k", "v", "rope", "mix", "out", "add")),
    *(f"ffn.{name}" for name in ("norm", "gate", "up", "act", "down", "add")),
)

TEXT = (
    " The lighthouse keeper climbed the stairs each evening with the same tin lamp, counting the "
    "steps aloud so that the sea would know he was still there. When the storm came, he lit the "
    "wick and waited. Ships passed like slow thoughts along the horizon, and each one answered "
    "with a single low note."
)


def facts(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "machine": "aarch64",
        "kernel": "Linux 6.1.75",
        "os": "Debian GNU/Linux 12 (bookworm)",
        "model": "Radxa ROCK 5B",
        "serial": "c3d9b8a1f0e2",
        "libc": "glibc 2.36",
        "cpus": [{"number": n, "part": "cortex-a55", "max_mhz": 1800} for n in range(4)]
        + [{"number": n, "part": "cortex-a76", "max_mhz": 2304} for n in range(4, 8)],
        "features": ["asimd", "asimddp", "fphp", "aes"],
        "memory_mb": 7921,
        "available_mb": 6730,
        "python": {"path": "/usr/bin/python3", "version": "3.11.2"},
        "boot_id": "6f9619ff-8b86-d011-b42d-00cf4fc964ff",
        "thermal_zones": [{"name": "thermal_zone0", "kind": "soc-thermal", "celsius": 41.0}],
        "governor": "performance",
        "sftp": True,
    }
    return {**found, **changes}


def tiny_verdict(speed: float = 412.0) -> Verdict:
    details = TinyDetails(
        prompts=4,
        tokens_compared=256,
        first_mismatch=None,
        rss_first_mb=61.2,
        rss_last_mb=61.4,
        tokens_per_s=speed,
    )
    checks = (
        Check(
            name="tokens_equal",
            outcome=Outcome.PASS,
            measured=256,
            limit=256,
            sentence="All 256 tokens of 4 prompts are the reference's.",
        ),
        Check(
            name="memory_growth",
            outcome=Outcome.PASS,
            measured=0.2,
            limit=5,
            unit="MB",
            sentence="Memory stays level from the first prompt to the last.",
        ),
    )
    return Verdict(
        outcome=Outcome.PASS,
        headline="256 tokens equal the reference, memory level",
        checks=checks,
        details=details.model_dump(mode="json"),
    )


def op_errors(seed: int, *, fault: bool = False, nan: bool = False) -> tuple[OpError, ...]:
    """Errors of every op in both modes; `fault` scales L07.ffn.down, `nan` breaks L11.attn.mix."""
    chance = random.Random(seed)
    names: list[tuple[str, int | None]] = [("embed.tokens", None)]
    names += [(f"L{layer:02d}.{op}", layer) for layer in range(LAYERS) for op in OPS]
    names += [("head.norm", None), ("head.logits", None)]
    found = []
    for mode in ("local", "free"):
        for index, (op, layer) in enumerate(names):
            base = 10 ** chance.uniform(-6.6, -5.6)
            error = base * chance.uniform(0.8, 1.6)
            if mode == "free":
                error *= 1 + 9 * index / len(names)
            outcome, reason = "pass", ""
            at = names.index(("L07.ffn.down", 7))
            if fault and (op == "L07.ffn.down" or (mode == "free" and index > at)):
                error = 0.02 if op == "L07.ffn.down" else 0.012 * chance.uniform(0.3, 1.1)
                if op == "L07.ffn.down":
                    outcome = "fail"
                    reason = "relative L2 is 2,400 times the naive baseline's, local and free"
                elif error > 0.008:
                    outcome, reason = "warn", "carries an error from further up"
            broken = nan and mode == "local" and op == "L11.attn.mix"
            found.append(
                OpError(
                    op=op,
                    kind="linear" if op.split(".")[-1] in ("q", "k", "v", "down") else "other",
                    layer=layer,
                    mode=mode,
                    max_abs=None if broken else error * 30,
                    rel_l2=None if broken else error,
                    cosine=None if broken else 1 - error * error / 2,
                    worst_row_rel_l2=None if broken else error * 1.7,
                    base_rel_l2=base,
                    non_finite=576 if broken else 0,
                    outcome="fail" if broken else outcome,
                    reason="576 values are not finite" if broken else reason,
                )
            )
    return tuple(found)


def accuracy_verdict(seed: int, *, fault: bool = False, text: str | None = None) -> Verdict:
    board_text = TEXT if text is None else text
    if fault:
        board_text = (
            TEXT[:120] + " he could be sure of the tide. Then the storm came, and he waited."
        )
    mean = 3.1e-3 if fault else 4.2e-7
    middle = -2.6 if fault else -6.5
    bins = tuple(
        (middle - 2 + 0.25 * index, round(40 * math.exp(-(((index - 8) / 3.2) ** 2))))
        for index in range(17)
    )
    logits = LogitsAgreement(
        positions=256,
        mean_kl=mean,
        p99_kl=mean * 9,
        mean_kl_low=mean * 0.8,
        mean_kl_high=mean * 1.3,
        top1=0.949 if fault else 0.996,
        top1_low=0.914 if fault else 0.978,
        top1_high=0.971 if fault else 0.9993,
        kl_histogram=bins,
    )
    details = AccuracyDetails(
        ops=op_errors(seed, fault=fault),
        first_bad_op="L07.ffn.down" if fault else None,
        logits=logits,
        text=TextComparison(
            prompt="Tell me a short story about a lighthouse.",
            reference=TEXT,
            board=board_text,
            tokens=200,
            first_divergence=None if board_text == TEXT else 27,
            near_tie=False,
            margin=None if board_text == TEXT else 0.83,
            noise=0.004,
            repetition_rate=0.021,
        ),
        repeats=3,
        repeatable=True,
        hash_with_taps="77aa",
        hash_without_taps="77aa",
    )
    outcome = Outcome.FAIL if fault else Outcome.PASS
    checks = (
        Check(
            name="ops_local",
            outcome=outcome,
            measured=0.9998 if fault else 0.9999999,
            limit=0.99,
            sentence="Lowest cosine of an op that is fed the reference's inputs."
            if not fault
            else "L07.ffn.down errs by 2,400 times the naive baseline.",
        ),
        Check(
            name="mean_kl",
            outcome=Outcome.PASS,
            measured=mean,
            limit=0.05,
            sentence="Mean KL divergence of the logits over 256 positions.",
        ),
        Check(
            name="text",
            outcome=Outcome.WARN if fault else Outcome.PASS,
            measured="27 of 200 tokens" if fault else "200 of 200 tokens",
            limit=None,
            sentence="Tokens until the text parts from the reference's.",
        ),
    )
    return Verdict(
        outcome=outcome,
        headline="L07.ffn.down is off by 2 %: relative L2 0.02, local and free"
        if fault
        else "423 ops agree, top-1 99.6 %, text identical",
        checks=checks,
        culprit="L07.ffn.down" if fault else None,
        remedy="look at the kernel and the packed scales of ffn.down in layer 7; the op before it "
        "is clean, so its inputs are right"
        if fault
        else None,
        details=details.model_dump(mode="json"),
    )


def curve_verdict(
    seed: int,
    *,
    speed: float = 1.0,
    jump: bool = False,
    clocks: bool = True,
    throttled: bool = False,
) -> Verdict:
    chance = random.Random(seed)
    lengths = sorted({8, *(round(8 * (2040 / 8) ** (index / 27)) for index in range(28)), 1024})

    def model(length: float) -> float:
        base = (41.0 + 0.0112 * length) / speed
        return base * (1.09 if jump and length >= 1024 else 1.0)

    points = []
    started, slowed_at = 0.0, None
    for sweep in range(3):
        order = list(lengths)
        chance.shuffle(order)
        for place, length in enumerate(order):
            started += chance.uniform(0.55, 0.95)
            slow = 1.24 if throttled and sweep == 2 else 1.0
            slowed_at = started if slow > 1 and slowed_at is None else slowed_at
            points.append(
                CurvePoint(
                    sweep=sweep,
                    order=place,
                    length=length,
                    tpot_ms=model(length) * slow * chance.gauss(1, 0.007),
                    started_s=started,
                    clock_mhz=None if not clocks else (1840 if slow > 1 else 2304),
                    temperature_c=None if not clocks else 46 + 0.3 * started,
                )
            )
    jumps = (CurveJump(length=1024, ratio=1.09, cause="engine"),) if jump else ()
    if slowed_at is not None:
        jumps += (CurveJump(length=512, ratio=1.24, cause="throttling", started_s=slowed_at),)
    fit = CurveFit(
        model="step" if jump else "affine",
        delta_bic=61.4 if jump else 0.0,
        intercept_ms=41.0 / speed,
        slope_us_per_position=11.2 / speed,
        fitted=tuple((length, model(length)) for length in lengths),
        jumps=jumps,
    )
    start, end = 1000 / model(8), 1000 / model(2040)
    details = CurveDetails(
        points=tuple(points),
        fit=fit,
        context=2048,
        tokens_per_s_start=start,
        tokens_per_s_end=end,
        end_ratio=end / start,
        ttft_s=1.84 / speed,
        prefill_tokens_per_s=69.6 * speed,
        weight_bytes=94_371_840,
        kv_bytes_per_position=46_080,
        bandwidth_gb_s=9.4,
        ceiling_tokens_per_s=9.4e9 / 94_371_840,
        physics="Reading the weights alone would take 10 ms of the 41 ms; KV reads cost 2.3× their "
        "bytes, so the time goes to dequantisation, not to the memory.",
        rss_peak_mb=284.0,
        memory_mb={"weights": 90.0, "kv": 90.0, "temporary": 31.5, "other": 72.5},
        clocks="unknown" if not clocks else "the clock fell by 20 %" if throttled else "valid",
    )
    outcome = Outcome.INVALID if throttled else Outcome.WARN if jump else Outcome.PASS
    checks = (
        Check(
            name="tokens_per_s_at_end",
            outcome=Outcome.PASS if not throttled else Outcome.INVALID,
            measured=end,
            limit=8.0,
            unit="tok/s",
            sentence="Speed with a full context.",
        ),
        Check(
            name="memory",
            outcome=Outcome.PASS,
            measured=284.0,
            limit=600.0,
            unit="MB",
            sentence="Peak memory of the engine.",
        ),
        Check(
            name="jumps",
            outcome=Outcome.WARN if jump else Outcome.PASS,
            measured=1 if jump else 0,
            limit=0,
            sentence="Steps in the time per token." if jump else "No step in the time per token.",
        ),
    )
    headline = {
        Outcome.PASS: f"{start:.1f} → {end:.1f} tok/s over 2,048 positions, no jump",
        Outcome.WARN: f"{start:.1f} → {end:.1f} tok/s, jump of 9 % at 1,024 positions",
        Outcome.INVALID: "the clock fell by 20 % in the third sweep: timings are not judged",
    }[outcome]
    return Verdict(
        outcome=outcome,
        headline=headline,
        checks=checks,
        remedy="cool the board or fix its clock (governor performance), then run the curve again"
        if throttled
        else None,
        details=details.model_dump(mode="json"),
    )


def stress_verdict(
    seed: int, *, minutes: float = 30.0, clocks: bool = True, throttle: bool = False
) -> Verdict:
    chance = random.Random(seed)
    count = min(2000, int(minutes * 60))
    samples = []
    for index in range(count):
        t = index * minutes * 60 / count
        hot = throttle and 0.55 < index / count < 0.72
        pause = index % 120 < 3
        samples.append(
            StressSample(
                t_s=t,
                own_mb=58 + 6 * (1 - math.exp(-t / 200)) + chance.gauss(0, 0.05),
                rss_mb=284 + 6 * (1 - math.exp(-t / 200)) + chance.gauss(0, 0.15),
                cpu_percent=0.0 if pause else 196 + chance.gauss(0, 2),
                temperature_c=None
                if not clocks
                else 44 + 24 * (1 - math.exp(-t / 400)) + (3 if hot else 0) + chance.gauss(0, 0.3),
                clock_mhz=None if not clocks else 1608 if hot else 2304,
                tokens_per_s=None
                if pause
                else (13.5 if hot else 19.5) * chance.gauss(1, 0.03) * (1 - (index % 120) / 500),
            )
        )
    turns = []
    cached = 0
    total = max(6, int(minutes * 2))
    for index in range(total):
        conversation, turn = divmod(index, 6)
        cached = 40 if turn == 0 else cached + 180
        finish = "stop"
        if index == total // 3:
            finish = "cancelled"
        elif index == total // 2:
            finish = "killed"
        turns.append(
            StressTurn(
                conversation=conversation,
                turn=turn,
                attempt=1 if index <= total // 2 else 2,
                prompt_tokens=36,
                new_tokens=chance.randint(60, 144),
                cached_tokens=cached,
                finish=finish,
                started_s=index * minutes * 60 / total,
                ttft_s=None if finish == "killed" else 0.5 + cached / 3000,
                tpot_ms=None if finish == "killed" else 50 + cached * 0.011 + chance.gauss(0, 0.6),
            )
        )
    details = StressDetails(
        minutes=minutes,
        tokens=sum(turn.new_tokens for turn in turns),
        turns=tuple(turns),
        samples=tuple(samples),
        itl_p50_ms=53.1,
        itl_p99_ms=78.4,
        leak="none" if minutes >= 10 else "too short to tell",
        leak_growth_mb=0.6 if minutes >= 10 else None,
        leak_p=0.31 if minutes >= 10 else None,
        sustained_ratio=0.991 if minutes >= 10 else None,
        throttled_s=306.0 if throttle else 0.0,
        cancelled=1,
        restarts=1,
        golden_before="5d1e",
        golden_after="5d1e",
    )
    outcome = Outcome.WARN if throttle else Outcome.PASS
    return Verdict(
        outcome=outcome,
        headline=f"{minutes:g} min, no leak, speed held"
        if not throttle
        else f"{minutes:g} min, no leak, throttled for 5 min in the heat",
        checks=(
            Check(
                name="leak",
                outcome=Outcome.PASS,
                measured=0.6,
                limit=5.0,
                unit="MB",
                sentence="Growth of memory after the warm-up.",
            ),
            Check(
                name="golden_same",
                outcome=Outcome.PASS,
                measured="785a2030bae559cf",
                limit="785a2030bae559cf",
                sentence="2 golden generations gave the same tokens.",
            ),
            Check(
                name="context_limit",
                outcome=outcome,
                measured=0 if throttle else 3,
                limit=1,
                unit="dialogues",
                sentence="Dialogues that grew to the context limit.",
            ),
            Check(
                name="sustained_speed",
                outcome=outcome,
                measured=0.991,
                limit=0.95,
                sentence="Speed of the last minutes over the early ones.",
            ),
        ),
        details=details.model_dump(mode="json"),
    )
