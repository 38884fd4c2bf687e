"""Reads a decoder of any family: from GGUF's metadata keys, or from config.json beside safetensors.

Each key is required, defaulted, refused when it would change the result, or noted as not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.architectures import tensors
from engine.architectures.hyperparameters import Hyperparameters
from engine.architectures.layout import ConfigReader, ModelLayout
from engine.architectures.rope import Rope
from engine.architectures.traits import Traits
from engine.formats.checkpoint import Checkpoint, FormatError

# Keys that would change the result: (values that do not, what the others stand for).
GGUF_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "expert_count": ((0,), "mixture-of-experts layers"),
    "logit_scale": ((0, 1), "scaled logits"),
    "embedding_scale": ((0, 1), "scaled embeddings"),
    "residual_scale": ((0, 1), "scaled residuals"),
    "use_parallel_residual": ((False,), "parallel residuals"),
    "swin_norm": ((False,), "norms after the residual"),
    "attn_logit_softcapping": ((0,), "capped attention scores"),
    "final_logit_softcapping": ((0,), "capped logits"),
    "nextn_predict_layers": ((0,), "layers that predict further tokens"),
    "leading_dense_block_count": ((0,), "mixture-of-experts layers"),
    "pooling_type": ((0,), "a model of embeddings"),
    "attention.causal": ((True,), "attention to later tokens"),
    "attention.clamp_kqv": ((0,), "clamped queries and keys"),
    "attention.max_alibi_bias": ((0,), "ALiBi positions"),
    "attention.scale": ((0,), "another scale of attention scores"),
    "attention.temperature_scale": ((0,), "attention scores scaled by position"),
    "rope.dimension_sections": ((), "rotation by several positions (M-RoPE)"),
    "rope.scaling.alpha": ((0,), "RoPE scaled by alpha"),
    "rope.scaling.yarn_log_multiplier": ((0,), "another attention factor of YaRN"),
    "rope.scaling.yarn_ext_factor": ((1,), "another mix of YaRN"),
    "rope.scaling.yarn_attn_factor": ((1,), "another attention factor of YaRN"),
}
CONFIG_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "hidden_act": (("silu",), "another activation than SiLU"),
    "partial_rotary_factor": ((1,), "partial rotation"),
    "rope_interleaved": ((False,), "rotation of neighbours"),
    "use_mrope": ((False,), "rotation by several positions (M-RoPE)"),
    "quantization_config": ((), "a quantised checkpoint"),
    "mlp_bias": ((False,), "biases in the feed-forward part"),
    "num_experts": ((0,), "mixture-of-experts layers"),
    "num_local_experts": ((0,), "mixture-of-experts layers"),
    "attn_logit_softcapping": ((0,), "capped attention scores"),
    "final_logit_softcapping": ((0,), "capped logits"),
    "clip_qkv": ((), "clamped queries and keys"),
}
ROPE_SCALING = {
    "rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
    "mscale", "mscale_all_dim", "truncate",
}  # fmt: skip


def read_decoder(checkpoint: Checkpoint, traits: Traits) -> ModelLayout:
    """Raises FormatError naming the key or tensor that is missing, refused or out of range."""
    read = _read_config_json if checkpoint.format == "safetensors" else _read_gguf
    try:
        layout = read(checkpoint, traits)
    except FormatError:
        raise
    except ValueError as error:  # numbers that make no model or no RoPE
        raise FormatError(f"{checkpoint.path}: {error}") from error
    tensors.check_shapes(checkpoint, layout.hyperparameters, layout.sources)
    return layout


def _read_gguf(checkpoint: Checkpoint, traits: Traits) -> ModelLayout:
    prefix = str(checkpoint.metadata["general.architecture"])
    config = ConfigReader(checkpoint.path, checkpoint.metadata, f"{prefix}.")
    for key, (values, why) in GGUF_REFUSED.items():
        config.refuse(key, unless=values, why=why)
    config.ignore(
        "vocab_size", "expert_used_count", "rope.scaling.finetuned", "tensor_data_layout",
        "attention.sliding_window_pattern",
    )  # fmt: skip
    width, heads = config.integer("embedding_length"), config.integer("attention.head_count")
    head_dim = config.integer("attention.key_length", default=width // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        found = config.integer(key, default=head_dim)
        if found != head_dim:
            raise FormatError(
                f"{checkpoint.path}: {prefix}.{key} is {found}, expected the head dimension "
                f"{head_dim}; partial rotation and value heads of another size are not supported"
            )
    context, layers = config.integer("context_length"), config.integer("block_count")
    rope = _rope_of_gguf(config, head_dim, context)
    # GGUF's factor multiplies YaRN's own; config.json's (`attention_factor`) replaces it.
    rope_scale = rope.scale * config.number("rope.scaling.attn_factor", default=1.0)
    divisors = None
    if traits.gguf_neighbours and tensors.ROPE_DIVISORS in checkpoint.tensors:
        if rope.kind != "none":
            raise FormatError(
                f"{checkpoint.path}: {tensors.ROPE_DIVISORS} and {prefix}.rope.scaling.type "
                f"{rope.kind!r} at once; expected one RoPE scaling"
            )
        divisors = checkpoint.float32(tensors.ROPE_DIVISORS)
    sources = _find(checkpoint, tensors.GGUF, layers, traits)
    context, window_notes = _within_window(
        context, config.integer("attention.sliding_window", default=0)
    )
    hyperparameters = Hyperparameters(
        architecture=traits.name,
        vocab=checkpoint.tensors[sources["embed"]].shape[0],
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=config.integer("attention.head_count_kv", default=heads),
        head_dim=head_dim,
        ffn=config.integer("feed_forward_length"),
        context=context,
        rms_eps=config.number("attention.layer_norm_rms_epsilon"),
        rope="llama3" if divisors is not None else rope.kind,
        rope_scale=rope_scale,
        tied="head.logits" not in sources,
        qkv_bias="L00.attn.q.bias" in sources,
        output_bias="L00.attn.out.bias" in sources,
        qk_norm=traits.qk_norm,
    )
    return ModelLayout(
        hyperparameters,
        sources,
        rope.inverse_frequencies(divisors),
        (*config.notes(), *window_notes),
        unpermute_qk=traits.gguf_neighbours,
    )


def _rope_of_gguf(config: ConfigReader, head_dim: int, context: int) -> Rope:
    factor = config.number(
        "rope.scaling.factor", default=config.number("rope.scale_linear", default=1.0)
    )
    factor = factor or 1.0  # llama.cpp reads 0 as 1
    kind = config.text("rope.scaling.type", default="linear" if factor != 1 else "none")
    return Rope(
        dimension=head_dim,
        theta=config.number("rope.freq_base", default=10000.0),
        kind=kind,
        factor=factor,
        original_context=config.integer("rope.scaling.original_context_length", default=context),
        beta_fast=config.number("rope.scaling.yarn_beta_fast", default=32.0),
        beta_slow=config.number("rope.scaling.yarn_beta_slow", default=1.0),
    )


def _read_config_json(checkpoint: Checkpoint, traits: Traits) -> ModelLayout:
    values = {**traits.config_defaults, **checkpoint.metadata}
    config = ConfigReader(checkpoint.path, values, "")
    for key, (allowed, why) in {**CONFIG_REFUSED, **traits.refused}.items():
        config.refuse(key, unless=allowed, why=why)
    config.ignore(
        "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache",
        "bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "initializer_range",
        "attention_dropout", "vocab_size", "is_llama_config", "transformers.js_config",
        "_name_or_path", "max_window_layers",
    )  # fmt: skip
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    context = config.integer("max_position_embeddings")
    head_dim = config.optional_integer("head_dim") or width // max(heads, 1)
    rope, layers = _rope_of_config(config, head_dim, context), config.integer("num_hidden_layers")
    sources = _find(checkpoint, tensors.SAFETENSORS, layers, traits)
    _tie(checkpoint, sources, config.flag("tie_word_embeddings", default=False))
    _check_bias_flag(config, traits, sources)
    context, window_notes = _within_window(context, _window_of_config(config))
    hyperparameters = Hyperparameters(
        architecture=traits.name,
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
        tied="head.logits" not in sources,
        qkv_bias="L00.attn.q.bias" in sources,
        output_bias="L00.attn.out.bias" in sources,
        qk_norm=traits.qk_norm,
    )
    return ModelLayout(
        hyperparameters,
        sources,
        rope.inverse_frequencies(),
        (*config.notes(), *window_notes),
        unpermute_qk=False,
    )


def _rope_of_config(config: ConfigReader, head_dim: int, context: int) -> Rope:
    """`rope_theta` and `rope_scaling`, or the newer `rope_parameters` that holds both."""
    parameters = config.mapping("rope_parameters")
    scaling: Mapping[str, Any] = {**config.mapping("rope_scaling"), **parameters}
    unknown = sorted(set(scaling) - ROPE_SCALING)
    if unknown or scaling.get("mscale") or scaling.get("truncate") is False:
        raise FormatError(
            f"{config.path}: rope_scaling has {unknown or 'mscale or truncate'}, which cannot be "
            f"run yet; known: {sorted(ROPE_SCALING)}"
        )
    kind = str(scaling.get("rope_type", scaling.get("type", "none")))
    original = scaling.get("original_max_position_embeddings") or context
    theta = config.number("rope_theta", default=10000.0)
    return Rope(
        dimension=head_dim,
        theta=float(parameters.get("rope_theta") or theta),
        kind="none" if kind == "default" else kind,
        factor=float(scaling.get("factor") or 1.0),
        original_context=int(original),
        low_frequency_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_frequency_factor=float(scaling.get("high_freq_factor") or 4.0),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=scaling.get("attention_factor"),
    )


def _window_of_config(config: ConfigReader) -> int:
    """How many tokens a layer attends at most, the smallest of all layers; 0 for all."""
    window = config.optional_integer("sliding_window")
    switched_on = config.flag("use_sliding_window", default=True)
    kinds = config.texts("layer_types")
    known = {"full_attention", "sliding_attention"}
    if not set(kinds) <= known:
        raise FormatError(
            f"{config.path}: layer_types has {sorted(set(kinds) - known)}, known: {sorted(known)}"
        )
    sliding = "sliding_attention" in kinds if kinds else switched_on and window is not None
    if not sliding:
        return 0
    if not window:
        raise FormatError(
            f"{config.path}: sliding_window is {window}, expected a positive number, or null "
            "and no sliding layers"
        )
    return window


def _within_window(context: int, window: int) -> tuple[int, tuple[str, ...]]:
    """The context in which a window hides nothing, and a note when that is a shorter one.

    While no more than `window` tokens are cached, sliding and full attention are the same, so the
    results stay exact; what would differ, longer contexts, is refused when they are asked for.
    """
    if not 0 < window < context:
        return context, ()
    note = (
        f"attention slides over {window} tokens: the context is limited to them, {context} are "
        "what the config names"
    )
    return window, (note,)


def _find(
    checkpoint: Checkpoint, names: Mapping[str, str], layers: int, traits: Traits
) -> dict[str, str]:
    return tensors.find_tensors(
        checkpoint,
        names,
        layers,
        traits.name,
        required=traits.required,
        optional=traits.optional,
        divisors=traits.gguf_neighbours,
    )


def _tie(checkpoint: Checkpoint, sources: dict[str, str], tied: bool) -> None:
    """Make `sources` follow the config's flag. Raises FormatError where the tensors deny it."""
    head, embed = sources.get("head.logits"), sources["embed"]
    if head is None and not tied:
        raise FormatError(
            f"{checkpoint.path}: tensor {tensors.SAFETENSORS['head.logits']!r} is missing and "
            "tie_word_embeddings is not true; is the file complete? If the head shares the "
            "embedding's weights, the config must say so"
        )
    if head is not None and tied:
        if not _same_tensor(checkpoint, embed, head):
            raise FormatError(
                f"{checkpoint.path}: tie_word_embeddings is true, but {head!r} and {embed!r} "
                "differ; remove the tensor or the flag"
            )
        del sources["head.logits"]


def _same_tensor(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Whether two tensors hold the same bytes; some rows at a time, for they may be large."""
    if checkpoint.tensors[first].type != checkpoint.tensors[second].type:
        return False
    ours, theirs, rows = checkpoint.raw(first), checkpoint.raw(second), 4096
    return ours.shape == theirs.shape and all(
        np.array_equal(ours[start : start + rows], theirs[start : start + rows])
        for start in range(0, len(ours), rows)
    )


def _check_bias_flag(config: ConfigReader, traits: Traits, sources: Mapping[str, str]) -> None:
    """`attention_bias` gives all four linears of the attention a bias where a family has it."""
    if traits.qkv_bias is not None:
        config.ignore("attention_bias")
        return
    flag = config.flag("attention_bias", default=False)
    for name in ("L00.attn.q.bias", "L00.attn.out.bias"):
        if (name in sources) != flag:
            raise FormatError(
                f"{config.path}: attention_bias is {flag}, but the file has "
                f"{'no' if flag else 'a'} tensor for {name}; expected biases of q, k, v and the "
                "output with the flag, none without"
            )
