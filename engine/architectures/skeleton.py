"""The decode step that all families share; hyper-parameters switch its optional parts."""

from __future__ import annotations

from engine.architectures.hyperparameters import Hyperparameters
from engine.program.ops import Op, Program

# As engine.runtime.state.step_inputs fills them.
INPUTS = ("tokens", "positions", "rows", "slots", "starts", "visible")


def decoder_program(hp: Hyperparameters) -> Program:
    """The unfused decode step: every op alone, so that each can be blamed alone."""
    ops = [Op("embed.tokens", "embed", ("tokens",), ("embed.tokens",), ("embed",))]
    caches: list[str] = []
    residual = "embed.tokens"

    def linear(op_id: str, source: str, *, bias: bool = False) -> Op:
        return Op(op_id, "linear", (source,), (op_id,), (op_id, *([f"{op_id}.bias"] * bias)))

    def norm(op_id: str, source: str, **attributes: int) -> Op:
        return Op(op_id, "rmsnorm", (source,), (op_id,), (op_id,), attributes)

    for layer in range(hp.layers):
        at = f"L{layer:02d}"
        attn, ffn = f"{at}.attn", f"{at}.ffn"
        q, k = f"{attn}.q", f"{attn}.k"
        caches += [f"{at}.k", f"{at}.v"]
        ops += [
            norm(f"{attn}.norm", residual),
            linear(q, f"{attn}.norm", bias=hp.qkv_bias),
            linear(k, f"{attn}.norm", bias=hp.qkv_bias),
            linear(f"{attn}.v", f"{attn}.norm", bias=hp.qkv_bias),
        ]
        if hp.qk_norm:
            ops += [
                norm(f"{q}_norm", q, heads=hp.heads),
                norm(f"{k}_norm", k, heads=hp.kv_heads),
            ]
            q, k = f"{q}_norm", f"{k}_norm"
        ops += [
            Op(
                f"{attn}.rope",
                "rope",
                (q, k, "positions"),
                (f"{attn}.q_rope", f"{attn}.k_rope"),
                ("rope.inv_freq",),
            ),
            Op(
                f"{attn}.kv",
                "kv_append",
                (f"{attn}.k_rope", f"{attn}.v", "slots"),
                (f"{at}.k", f"{at}.v"),
            ),
            Op(
                f"{attn}.mix",
                "attention",
                (f"{attn}.q_rope", f"{at}.k", f"{at}.v", "starts", "visible"),
                (f"{attn}.mix",),
            ),
            linear(f"{attn}.out", f"{attn}.mix", bias=hp.output_bias),
            Op(f"{attn}.add", "add", (residual, f"{attn}.out"), (f"{attn}.add",)),
            norm(f"{ffn}.norm", f"{attn}.add"),
            linear(f"{ffn}.gate", f"{ffn}.norm"),
            linear(f"{ffn}.up", f"{ffn}.norm"),
            Op(f"{ffn}.act", "swiglu", (f"{ffn}.gate", f"{ffn}.up"), (f"{ffn}.act",)),
            linear(f"{ffn}.down", f"{ffn}.act"),
            Op(f"{ffn}.add", "add", (f"{attn}.add", f"{ffn}.down"), (f"{ffn}.add",)),
        ]
        residual = f"{ffn}.add"
    ops += [
        Op("head.select", "select", (residual, "rows"), ("head.select",)),
        norm("head.norm", "head.select"),
        Op(
            "head.logits",
            "linear",
            ("head.norm",),
            ("head.logits",),
            ("embed" if hp.tied else "head.logits",),
        ),
    ]
    return Program(tuple(ops), INPUTS, "head.logits", tuple(caches))
