"""The decode step that all families share; hyper-parameters switch its optional parts."""

from __future__ import annotations

from engine.architectures.hyperparameters import Hyperparameters
from engine.program.ops import Op, Program


def decoder_program(hp: Hyperparameters) -> Program:
    """The unfused decode step: every op alone, so that each can be blamed alone."""
    ops = [Op("embed.tokens", "embed", ("tokens",), ("embed.tokens",), ("embed",))]
    caches: list[str] = []
    residual = "embed.tokens"

    def linear(op_id: str, source: str) -> Op:
        bias = (f"{op_id}.bias",) if hp.biases and ".attn." in op_id else ()
        return Op(op_id, "linear", (source,), (op_id,), (op_id, *bias))

    for layer in range(hp.layers):
        at = f"L{layer:02d}"
        attn, ffn = f"{at}.attn", f"{at}.ffn"
        caches += [f"{at}.k", f"{at}.v"]
        ops += [
            Op(f"{attn}.norm", "rmsnorm", (residual,), (f"{attn}.norm",), (f"{attn}.norm",)),
            linear(f"{attn}.q", f"{attn}.norm"),
            linear(f"{attn}.k", f"{attn}.norm"),
            linear(f"{attn}.v", f"{attn}.norm"),
            Op(
                f"{attn}.rope",
                "rope",
                (f"{attn}.q", f"{attn}.k", "positions"),
                (f"{attn}.q_rope", f"{attn}.k_rope"),
                ("rope.inv_freq",),
            ),
            Op(
                f"{attn}.kv",
                "kv_append",
                (f"{attn}.k_rope", f"{attn}.v", "positions"),
                (f"{at}.k", f"{at}.v"),
            ),
            Op(
                f"{attn}.mix",
                "attention",
                (f"{attn}.q_rope", f"{at}.k", f"{at}.v", "positions"),
                (f"{attn}.mix",),
            ),
            linear(f"{attn}.out", f"{attn}.mix"),
            Op(f"{attn}.add", "add", (residual, f"{attn}.out"), (f"{attn}.add",)),
            Op(f"{ffn}.norm", "rmsnorm", (f"{attn}.add",), (f"{ffn}.norm",), (f"{ffn}.norm",)),
            linear(f"{ffn}.gate", f"{ffn}.norm"),
            linear(f"{ffn}.up", f"{ffn}.norm"),
            Op(f"{ffn}.act", "swiglu", (f"{ffn}.gate", f"{ffn}.up"), (f"{ffn}.act",)),
            linear(f"{ffn}.down", f"{ffn}.act"),
            Op(f"{ffn}.add", "add", (f"{attn}.add", f"{ffn}.down"), (f"{ffn}.add",)),
        ]
        residual = f"{ffn}.add"
    ops += [
        Op("head.select", "select", (residual, "rows"), ("head.select",)),
        Op("head.norm", "rmsnorm", ("head.select",), ("head.norm",), ("head.norm",)),
        Op(
            "head.logits",
            "linear",
            ("head.norm",),
            ("head.logits",),
            ("embed" if hp.tied else "head.logits",),
        ),
    ]
    return Program(tuple(ops), ("tokens", "positions", "rows"), "head.logits", tuple(caches))
