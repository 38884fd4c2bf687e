"""A decoder's tensors: their names in the package, in GGUF and in safetensors, and their shapes."""

from __future__ import annotations

from collections.abc import Mapping

from engine.architectures.hyperparameters import Hyperparameters
from engine.formats.checkpoint import Checkpoint, FormatError

# package tensor (in a layer) → name in the file; {} is the layer's number
GGUF: Mapping[str, str] = {
    "embed": "token_embd.weight",
    "head.norm": "output_norm.weight",
    "head.logits": "output.weight",
    "attn.norm": "blk.{}.attn_norm.weight",
    "attn.q": "blk.{}.attn_q.weight",
    "attn.k": "blk.{}.attn_k.weight",
    "attn.v": "blk.{}.attn_v.weight",
    "attn.out": "blk.{}.attn_output.weight",
    "attn.q.bias": "blk.{}.attn_q.bias",
    "attn.k.bias": "blk.{}.attn_k.bias",
    "attn.v.bias": "blk.{}.attn_v.bias",
    "attn.out.bias": "blk.{}.attn_output.bias",
    "attn.q_norm": "blk.{}.attn_q_norm.weight",
    "attn.k_norm": "blk.{}.attn_k_norm.weight",
    "ffn.norm": "blk.{}.ffn_norm.weight",
    "ffn.gate": "blk.{}.ffn_gate.weight",
    "ffn.up": "blk.{}.ffn_up.weight",
    "ffn.down": "blk.{}.ffn_down.weight",
}
SAFETENSORS: Mapping[str, str] = {
    "embed": "model.embed_tokens.weight",
    "head.norm": "model.norm.weight",
    "head.logits": "lm_head.weight",
    "attn.norm": "model.layers.{}.input_layernorm.weight",
    "attn.q": "model.layers.{}.self_attn.q_proj.weight",
    "attn.k": "model.layers.{}.self_attn.k_proj.weight",
    "attn.v": "model.layers.{}.self_attn.v_proj.weight",
    "attn.out": "model.layers.{}.self_attn.o_proj.weight",
    "attn.q.bias": "model.layers.{}.self_attn.q_proj.bias",
    "attn.k.bias": "model.layers.{}.self_attn.k_proj.bias",
    "attn.v.bias": "model.layers.{}.self_attn.v_proj.bias",
    "attn.out.bias": "model.layers.{}.self_attn.o_proj.bias",
    "attn.q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "attn.k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "ffn.norm": "model.layers.{}.post_attention_layernorm.weight",
    "ffn.gate": "model.layers.{}.mlp.gate_proj.weight",
    "ffn.up": "model.layers.{}.mlp.up_proj.weight",
    "ffn.down": "model.layers.{}.mlp.down_proj.weight",
}
ROPE_DIVISORS = "rope_freqs.weight"  # of GGUF files, see Rope.inverse_frequencies
QKV_BIAS = ("attn.q.bias", "attn.k.bias", "attn.v.bias")
OUTPUT_BIAS = ("attn.out.bias",)
QK_NORM = ("attn.q_norm", "attn.k_norm")
# Tables of rotations that old converters wrote; they follow from the hyper-parameters.
_DERIVED = (".rotary_emb.inv_freq", ".attn_rot_embd.weight")


def find_tensors(
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    layers: int,
    family: str,
    *,
    required: tuple[str, ...],
    optional: tuple[tuple[str, ...], ...],
    divisors: bool,
) -> dict[str, str]:
    """Package tensor → file tensor.

    `required` are parts that this family has beside those of every decoder; each group of
    `optional` is there as a whole, in every layer, or not at all; `divisors` lets GGUF's RoPE
    divisors pass. Raises FormatError for a tensor that is missing, and for one that has no place:
    weights that nobody multiplies with would change the result in silence.
    """
    extra = (*QKV_BIAS, *OUTPUT_BIAS, *QK_NORM)
    found: dict[str, str] = {}
    for part, pattern in names.items():
        if part in extra and part not in required:
            continue
        for name, tensor in _spread(part, pattern, layers):
            if tensor in checkpoint.tensors:
                found[name] = tensor
            elif part != "head.logits":
                raise FormatError(
                    f"{checkpoint.path}: tensor {tensor!r} is missing ({len(checkpoint.tensors)} "
                    f"tensors found, {layers} layers of {family} expected); is the file complete?"
                )
    for group in optional:
        spread = dict(pair for part in group for pair in _spread(part, names[part], layers))
        held = {name: tensor for name, tensor in spread.items() if tensor in checkpoint.tensors}
        if held and len(held) != len(spread):
            missing = next(tensor for name, tensor in spread.items() if name not in held)
            raise FormatError(
                f"{checkpoint.path}: {len(held)} of the tensors {', '.join(group)} in {layers} "
                f"layers, expected all {len(spread)} or none; {missing!r} is missing"
            )
        found.update(held)
    _refuse_others(
        checkpoint, set(found.values()) | ({ROPE_DIVISORS} if divisors else set()), family
    )
    return found


def _spread(part: str, pattern: str, layers: int) -> list[tuple[str, str]]:
    """(package tensor, file tensor) of a part, in every layer if it is in layers."""
    if "{}" not in pattern:
        return [(part, pattern)]
    return [(f"L{layer:02d}.{part}", pattern.format(layer)) for layer in range(layers)]


def _refuse_others(checkpoint: Checkpoint, used: set[str], family: str) -> None:
    others = [
        name for name in checkpoint.tensors if name not in used and not name.endswith(_DERIVED)
    ]
    if others:
        raise FormatError(
            f"{checkpoint.path}: tensor {others[0]!r} has no place in a {family} model "
            f"({len(others)} such tensors); to leave weights out would change the results"
        )


def tensor_shapes(hp: Hyperparameters) -> dict[str, tuple[int, ...]]:
    """Shape of each part, in numpy order (outputs, inputs)."""
    q, kv = hp.heads * hp.head_dim, hp.kv_heads * hp.head_dim
    return {
        "embed": (hp.vocab, hp.width),
        "head.logits": (hp.vocab, hp.width),
        "head.norm": (hp.width,),
        "attn.norm": (hp.width,),
        "attn.q": (q, hp.width),
        "attn.k": (kv, hp.width),
        "attn.v": (kv, hp.width),
        "attn.out": (hp.width, q),
        "attn.q.bias": (q,),
        "attn.k.bias": (kv,),
        "attn.v.bias": (kv,),
        "attn.out.bias": (hp.width,),
        "attn.q_norm": (hp.head_dim,),
        "attn.k_norm": (hp.head_dim,),
        "ffn.norm": (hp.width,),
        "ffn.gate": (hp.ffn, hp.width),
        "ffn.up": (hp.ffn, hp.width),
        "ffn.down": (hp.width, hp.ffn),
    }


def check_shapes(checkpoint: Checkpoint, hp: Hyperparameters, sources: Mapping[str, str]) -> None:
    """Raises FormatError naming a tensor whose shape is not what the config's sizes ask for."""
    expected = tensor_shapes(hp)
    for name, tensor in sources.items():
        wanted = expected[name.split(".", 1)[1] if name[0] == "L" else name]
        found = checkpoint.tensors[tensor].shape
        if found != wanted:
            raise FormatError(
                f"{checkpoint.path}: tensor {tensor!r} has shape {found}, the config's sizes ask "
                f"for {wanted}"
            )
