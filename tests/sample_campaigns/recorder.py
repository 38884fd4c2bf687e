"""Whole campaigns in a store, recorded through its public methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.records import Event
from harness.store import Store
from harness.verdicts import Outcome, Verdict, worst

from .profiles import profile_verdict
from .verdicts import accuracy_verdict, curve_verdict, facts, stress_verdict, tiny_verdict

MODEL = "SmolLM2-135M-Instruct"
SCHEME = "W4A16 (Q4_1)"
MODEL_HASH = "9c1f" * 16
HYPERPARAMETERS = {
    "architecture": "llama", "vocab": 49152, "width": 576, "layers": 30, "heads": 9, "kv_heads": 3,
    "head_dim": 64, "ffn": 1536, "context": 8192, "rms_eps": 1e-5, "rope": "none",
    "rope_scale": 1.0, "tied": True, "qkv_bias": False, "output_bias": False, "qk_norm": False,
}  # fmt: skip
FAULT = "scale:1.02@L07.ffn.down"
HOSTILE = "evil<script>document.title='owned'</script>"


class Recorder:
    """Writes campaigns into a store the way the runner does."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._campaign = ""

    def campaign(self, *command: str, kind: str = "bringup") -> str:
        self._campaign = self.store.begin_campaign(kind, list(command), {"seed": 0})
        return self._campaign

    def board(self, name: str, **values: Any) -> None:
        budget = {"memory_mb": 600, "min_tokens_per_s": 8.0, "min_cosine": 0.99}
        self.store.record_board(name, **{"budget": budget, "tags": ["nightly"], **values})

    def run(
        self,
        board: str,
        stage: str,
        verdict: Verdict | None,
        *,
        fault: str | None = None,
        error_kind: str | None = None,
        known: dict[str, Any] | None = None,
        seconds: float | None = None,
        model: str = MODEL,
    ) -> str:
        run_id = self.store.begin_run(
            campaign_id=self._campaign,
            board=board,
            stage=stage,
            parameters={"seed": 0, "unit": "packed"},
            model_hash=MODEL_HASH,
            model_name=model,
            scheme=SCHEME,
            engine_hash="e4b1" * 16,
            facts=known,
            boot_id=(known or {}).get("boot_id"),
        )
        if known is not None:
            self._events(run_id, fault)
        if verdict is not None:
            self.store.finish_run(run_id, verdict, error_kind=error_kind, seconds=seconds)
        return run_id

    def blocked(self, board: str, cause: str, *stages: str) -> None:
        for stage in stages:
            verdict = Verdict(outcome=Outcome.BLOCKED, headline=f"blocked by {cause}")
            self.run(board, stage, verdict)

    def finish(self, *outcomes: Outcome) -> None:
        self.store.finish_campaign(self._campaign, worst(list(outcomes)))

    def _events(self, run_id: str, fault: str | None) -> None:
        folder: Path = self.store.raw_folder(run_id)
        ready = {"attempt": 1, "unit": "packed", "threads": 4, "fault": fault}
        lines = [
            Event(0, 1_000, "run-start", {"run_id": run_id}),
            Event(1, 2_000, "ready", ready),
            Event(2, 3_000, "run-end", {"status": "finished", "reason": ""}),
        ]
        (folder / "events.jsonl").write_bytes(b"".join(line.to_line() for line in lines))

    def all_pass(
        self, board: str, seed: int, known: dict[str, Any], *, clocks: bool = True
    ) -> None:
        self.run(board, "tiny", tiny_verdict(), known=known, seconds=3.4)
        self.run(board, "accuracy", accuracy_verdict(seed), known=known, seconds=71)
        self.run(
            board,
            "curve",
            curve_verdict(seed, speed=1 + seed / 10, clocks=clocks),
            known=known,
            seconds=66,
        )
        self.run(board, "stress", stress_verdict(seed, clocks=clocks), known=known, seconds=1811)


def record_passing(store: Store) -> None:
    """One campaign, three boards, everything passes."""
    book = Recorder(store)
    book.campaign("harness", "bringup", "--model", "SmolLM2-135M-Instruct.Q4_1.gguf")
    store.record_model(MODEL_HASH, name=MODEL, scheme=SCHEME, hyperparameters=HYPERPARAMETERS)
    for seed, name in enumerate(("orin-nano-02", "pi5-03", "rk3588-01"), start=1):
        book.board(name, host=f"{name}.lab", facts=facts())
        book.all_pass(name, seed, facts())
    book.finish(Outcome.PASS)


def record_troubled(store: Store) -> None:
    """A second campaign in which everything that can be shown goes wrong somewhere."""
    book = Recorder(store)
    book.campaign(
        "harness",
        "bringup",
        "--model",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "--tag",
        "nightly",
        "--stress-minutes",
        "30",
    )
    known = facts()
    # A fault planted in one op of one board's engine.
    book.run("rk3588-01", "tiny", tiny_verdict(), known=known, fault=FAULT, seconds=3.3)
    book.run(
        "rk3588-01",
        "accuracy",
        accuracy_verdict(3, fault=True),
        known=known,
        fault=FAULT,
        seconds=70,
    )
    book.blocked("rk3588-01", "accuracy", "curve", "stress")
    # A board whose host key changed.
    book.run(
        "orin-nano-02",
        "tiny",
        Verdict(
            outcome=Outcome.ERROR,
            headline="board orin-nano-02: host key SHA256:Hn1v2q8fT0aWkz, devices.yaml pins "
            "SHA256:uVx4kQp7Lr3mEy",
            remedy="if you reflashed it run `harness boards enrol orin-nano-02`",
        ),
        error_kind="host-key",
    )
    book.blocked("orin-nano-02", "tiny", "accuracy", "curve", "stress")
    # A jump in the curve and heat in the stress run: warnings.
    book.run("pi5-03", "tiny", tiny_verdict(388), known=known, seconds=3.9)
    book.run("pi5-03", "accuracy", accuracy_verdict(2), known=known, seconds=80)
    book.run("pi5-03", "curve", curve_verdict(2, jump=True), known=known, seconds=69)
    book.run("pi5-03", "stress", stress_verdict(2, throttle=True), known=known, seconds=1810)
    book.run("pi5-03", "profile", profile_verdict(2), known=known, seconds=21)
    # A board without clocks, that is otherwise fine.
    book.board("a53-04", host="10.0.0.14", facts=facts(), budget={})
    book.all_pass("a53-04", 4, facts(thermal_zones=[], governor="", cpus=[]), clocks=False)
    # A board that throttled during the curve.
    book.board("n100-05", host="10.0.0.15", virtual=True)
    book.run("n100-05", "tiny", tiny_verdict(900), known=known, seconds=1.8)
    book.run("n100-05", "accuracy", accuracy_verdict(5), known=known, seconds=31)
    book.run(
        "n100-05", "curve", curve_verdict(5, speed=2.2, throttled=True), known=known, seconds=40
    )
    book.blocked("n100-05", "curve", "stress")
    # A board that says hostile things, and details that are only partly there.
    book.board(HOSTILE, host="10.0.0.66", tags=["<b>tag</b>"])
    odd = facts(os="\x1b[31mred\x1b[0m OS", kernel="Linux \u202eesrever", serial="<img src=x>")
    text = (
        "<script>document.title='owned'</script> \x1b[2J\u202egnidaer\u202c \u200bhidden &amp; ok"
    )
    book.run(HOSTILE, "tiny", tiny_verdict(), known=odd)
    verdict = accuracy_verdict(6, text=text)
    partial = {key: verdict.details[key] for key in ("ops", "text", "first_bad_op")}
    partial["logits"] = {"positions": "many"}
    verdict = verdict.model_copy(
        update={
            "outcome": Outcome.FAIL,
            "headline": "text \x1b[1mparts\x1b[0m at token 27 \u202e<script>alert(1)</script>",
            "remedy": '"><img src=x onerror=alert(1)>',
            "culprit": None,
            "details": partial,
        }
    )
    book.run(HOSTILE, "accuracy", verdict, known=odd)
    book.blocked(HOSTILE, "accuracy", "curve", "stress")
    book.finish(Outcome.ERROR)


def record_unfinished(store: Store) -> None:
    """A third campaign that is still at work on one board."""
    book = Recorder(store)
    book.campaign("harness", "stress", "--board", "a53-04", kind="stress")
    book.run("a53-04", "stress", None, known=facts())


def record_all(store: Store) -> None:
    record_passing(store)
    record_troubled(store)
