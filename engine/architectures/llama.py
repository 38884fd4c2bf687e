"""The Llama family: Llama 2 and 3, SmolLM2, TinyLlama, Mistral without sliding window.

A family module has the same skeleton as every other: `NAMES`, `read` (hyper-parameters and where
each tensor of the package comes from) and `program` (the ops of a decode step).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.architectures.hyperparameters import Hyperparameters
from engine.architectures.layout import ModelLayout, config_reader
from engine.architectures.rope import Rope
from engine.architectures.skeleton import decoder_program
from engine.formats.checkpoint import Checkpoint, FormatError
from engine.program.ops import Program

NAMES = ("llama", "mistral")  # GGUF general.architecture and config.json model_type


def read(checkpoint: Checkpoint) -> ModelLayout:
    """Raises FormatError naming the key or tensor that is missing, refused or out of range."""
    if checkpoint.format == "safetensors":
        return _read_config_json(checkpoint)
    return _read_gguf(checkpoint)


def _read_gguf(checkpoint: Checkpoint) -> ModelLayout:
    prefix = str(checkpoint.metadata["general.architecture"])
    config = config_reader(checkpoint, prefix=f"{prefix}.")
    config.refuse("expert_count", unless=(0,), why="mixture-of-experts layers")
    config.refuse("attention.sliding_window", unless=(0,), why="sliding-window attention")
    config.refuse("logit_scale", unless=(0, 1), why="scaled logits")
    config.refuse("embedding_scale", unless=(0, 1), why="scaled embeddings")
    config.refuse("residual_scale", unless=(0, 1), why="scaled residuals")
    config.refuse("use_parallel_residual", unless=(False,), why="parallel residuals")
    config.ignore("vocab_size", "expert_used_count", "rope.scaling.finetuned")
    width = config.integer("embedding_length")
    heads = config.integer("attention.head_count")
    head_dim = config.integer("attention.key_length", default=width // max(heads, 1))
    if config.integer("attention.value_length", default=head_dim) != head_dim:
        raise FormatError(f"{checkpoint.path}: value heads of another size than key heads")
    rope_dimension = config.integer("rope.dimension_count", default=head_dim)
    if rope_dimension != head_dim:
        raise FormatError(
            f"{checkpoint.path}: {prefix}.rope.dimension_count is {rope_dimension}, expected the "
            f"head dimension {head_dim}; partial rotation is not supported"
        )
    context = config.integer("context_length")
    rope = Rope(
        dimension=head_dim,
        theta=config.number("rope.freq_base", default=10000.0),
        kind=config.text("rope.scaling.type", default="none"),
        factor=config.number(
            "rope.scaling.factor", default=config.number("rope.scale_linear", default=1.0)
        ),
        original_context=config.integer("rope.scaling.original_context_length", default=context),
    )
    # GGUF's factor multiplies YaRN's own; config.json's (`attention_factor`) replaces it.
    rope_scale = rope.scale * config.number("rope.scaling.attn_factor", default=1.0)
    sources, tied = _sources(checkpoint, config.integer("block_count"), GGUF_TENSORS)
    divisors = checkpoint.tensors.get("rope_freqs.weight")
    embedding = checkpoint.tensors[sources["embed"]]
    hyperparameters = Hyperparameters(
        architecture=prefix,
        vocab=embedding.shape[0],
        width=width,
        layers=config.integer("block_count"),
        heads=heads,
        kv_heads=config.integer("attention.head_count_kv", default=heads),
        head_dim=head_dim,
        ffn=config.integer("feed_forward_length"),
        context=context,
        rms_eps=config.number("attention.layer_norm_rms_epsilon"),
        rope="llama3" if divisors else rope.kind,
        rope_scale=rope_scale,
        tied=tied,
        qkv_bias="L00.attn.q.bias" in sources,
        output_bias="L00.attn.out.bias" in sources,
        qk_norm=False,
    )
    frequencies = rope.inverse_frequencies(checkpoint.float32(divisors.name) if divisors else None)
    notes = config.notes()
    return ModelLayout(hyperparameters, sources, frequencies, notes, unpermute_qk=True)


def _read_config_json(checkpoint: Checkpoint) -> ModelLayout:
    config = config_reader(checkpoint)
    config.refuse("hidden_act", unless=("silu",), why="another activation than SiLU")
    config.refuse("sliding_window", unless=(None,), why="sliding-window attention")
    config.refuse("partial_rotary_factor", unless=(None, 1, 1.0), why="partial rotation")
    config.refuse("quantization_config", unless=(None,), why="a quantised checkpoint")
    config.refuse("mlp_bias", unless=(None, False), why="biases in the feed-forward part")
    config.ignore(
        "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache",
        "bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "initializer_range",
        "attention_bias", "attention_dropout", "tie_word_embeddings", "vocab_size",
        "is_llama_config", "rope_interleaved", "transformers.js_config", "_name_or_path",
    )  # fmt: skip
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    context = config.integer("max_position_embeddings")
    head_dim = config.optional_integer("head_dim") or width // max(heads, 1)
    rope, layers = _rope_of_config(config, head_dim, context), config.integer("num_hidden_layers")
    sources, tied = _sources(checkpoint, layers, SAFETENSORS_TENSORS)
    hyperparameters = Hyperparameters(
        architecture="llama",
        vocab=checkpoint.tensors[sources["embed"]].shape[0],
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=config.optional_integer("num_key_value_heads") or heads,
        head_dim=head_dim,
        ffn=config.integer("intermediate_size"),
        context=context,
        rms_eps=config.number("rms_norm_eps"),
        rope=rope.kind,
        rope_scale=rope.scale,
        tied=tied,
        qkv_bias="L00.attn.q.bias" in sources,
        output_bias="L00.attn.out.bias" in sources,
        qk_norm=False,
    )
    return ModelLayout(
        hyperparameters, sources, rope.inverse_frequencies(), config.notes(), unpermute_qk=False
    )


def _rope_of_config(config: Any, head_dim: int, context: int) -> Rope:
    """`rope_theta` and `rope_scaling`, or the newer `rope_parameters` that holds both."""
    scaling: Mapping[str, Any] = dict(config.mapping("rope_scaling"))
    parameters = config.mapping("rope_parameters")
    scaling = {**scaling, **parameters}
    known = {
        "rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings",
        "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
        "mscale", "mscale_all_dim", "truncate",
    }  # fmt: skip
    unknown = sorted(set(scaling) - known)
    if unknown or scaling.get("mscale") or scaling.get("truncate") is False:
        raise FormatError(
            f"{config.path}: rope_scaling has {unknown or 'mscale or truncate'}, which the llama "
            f"family does not know; known: {sorted(known)}"
        )
    kind = str(scaling.get("rope_type", scaling.get("type", "none")))
    original = scaling.get("original_max_position_embeddings") or context
    return Rope(
        dimension=head_dim,
        theta=float(parameters.get("rope_theta") or config.number("rope_theta", default=10000.0)),
        kind="none" if kind == "default" else kind,
        factor=float(scaling.get("factor") or 1.0),
        original_context=int(original),
        low_frequency_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_frequency_factor=float(scaling.get("high_freq_factor") or 4.0),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=scaling.get("attention_factor"),
    )


# package tensor (in a layer) → name in the file; {} is the layer's number
GGUF_TENSORS = {
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
    "ffn.norm": "blk.{}.ffn_norm.weight",
    "ffn.gate": "blk.{}.ffn_gate.weight",
    "ffn.up": "blk.{}.ffn_up.weight",
    "ffn.down": "blk.{}.ffn_down.weight",
}
SAFETENSORS_TENSORS = {
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
    "ffn.norm": "model.layers.{}.post_attention_layernorm.weight",
    "ffn.gate": "model.layers.{}.mlp.gate_proj.weight",
    "ffn.up": "model.layers.{}.mlp.up_proj.weight",
    "ffn.down": "model.layers.{}.mlp.down_proj.weight",
}


def _sources(
    checkpoint: Checkpoint, layers: int, names: Mapping[str, str]
) -> tuple[dict[str, str], bool]:
    """Package tensor → file tensor, and whether the head is tied to the embedding."""
    sources: dict[str, str] = {}
    for part, pattern in names.items():
        outside_layers = "{}" not in pattern
        for layer in [0] if outside_layers else range(layers):
            tensor = pattern.format(layer)
            name = part if outside_layers else f"L{layer:02d}.{part}"
            optional = part.endswith(".bias") or part == "head.logits"
            if tensor in checkpoint.tensors:
                sources[name] = tensor
            elif not optional:
                raise FormatError(
                    f"{checkpoint.path}: tensor {tensor!r} is missing ({len(checkpoint.tensors)} "
                    f"tensors found, {layers} layers expected); is the file complete?"
                )
    biases = [name for name in sources if name.endswith(".bias")]
    if biases and len(biases) != 4 * layers:
        raise FormatError(
            f"{checkpoint.path}: {len(biases)} biases of the attention's q, k, v and output in "
            f"{layers} layers, expected all {4 * layers} or none"
        )
    return sources, "head.logits" not in sources


def program(hp: Hyperparameters) -> Program:
    return decoder_program(hp)
