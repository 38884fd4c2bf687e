"""Model families: what each reads, what it refuses by name, and the ops it has of its own."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from engine.architectures import Hyperparameters, family_named, family_of
from engine.architectures.families import known_families
from engine.decode import ContextFull, Decoder
from engine.formats import FormatError, SyntheticCheckpoint, open_checkpoint
from engine.formats.gguf_writer import write_gguf
from engine.formats.synthetic import FAMILIES
from engine.native.library import NativeUnavailable
from engine.options import EngineOptions
from engine.package import Package, build_package
from engine.program.ops import Op
from engine.quantize.schemes import PackedTensor
from engine.runtime.trace import Taps
from engine.units.reference import Reference

WriteFolder = Callable[..., Path]
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
TOKENS = np.array([5, 90, 17, 17, 230, 64, 3])


def packed(source: Any, path: Path) -> Package:
    checkpoint = open_checkpoint(source) if isinstance(source, Path) else source
    build_package(checkpoint, path, name="test")
    return Package.open(path)


def changed(model: SyntheticCheckpoint, **changes: Any) -> SyntheticCheckpoint:
    model.metadata = {**model.metadata, **changes}
    return model


def edit_tensors(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def drop_key(folder: Path, key: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config[key]
    (folder / "config.json").write_text(json.dumps(config))


def relative(found: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def test_every_synthetic_family_is_read_by_the_module_of_its_name(
    tmp_path: Path, write_safetensors: WriteFolder
) -> None:
    assert set(FAMILIES) <= set(known_families())
    for family in FAMILIES:
        folder = write_safetensors(SyntheticCheckpoint(family=family), tmp_path / family, {})
        hp = family_of(open_checkpoint(folder)).read(open_checkpoint(folder)).hyperparameters
        assert hp.architecture == family
        assert (hp.qkv_bias, hp.output_bias, hp.qk_norm) == (
            family == "qwen2",
            False,
            family == "qwen3",
        )
        assert family_named(family).program(hp).ops


@pytest.mark.parametrize("unit", ["packed", "native"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_agrees_with_the_float64_reference_in_every_op(
    family: str, unit: str, tmp_path: Path
) -> None:
    options = EngineOptions(unit=unit)  # op by op, with floats throughout
    model = SyntheticCheckpoint(6, family=family, head_dim=32, heads=2, kv_heads=1)
    with packed(model, tmp_path / "x.pkg") as package:
        exact, taps = Decoder(package, unit="reference", dtype=np.float64), Taps()
        exact.advance(TOKENS, taps=taps, all_logits=True)
        try:
            batch, batch_taps = Decoder(package, options=options), Taps()
        except NativeUnavailable as error:
            pytest.skip(f"needs a C compiler: {error}")
        batch.advance(TOKENS, taps=batch_taps, all_logits=True)
        steps, step_taps = Decoder(package, options=options), Taps()
        for token in TOKENS:
            steps.advance(np.array([token]), taps=step_taps)
        for name in (name for op in exact.program.ops for name in op.writes):
            wanted = taps.stacked(name)
            assert relative(batch_taps.stacked(name), wanted) < 1e-5, f"prefill, {name}"
            assert relative(step_taps.stacked(name), wanted) < 1e-5, f"decode, {name}"


class Rounded(SyntheticCheckpoint):
    """A model with the values that a quantised file of it holds."""

    def take_values_of(self, path: Path) -> Rounded:
        self._file = open_checkpoint(path)
        return self

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        return self._file.float32(name)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_quantised_file_gives_the_logits_of_its_dequantised_weights(
    family: str, kind: str, tmp_path: Path
) -> None:
    model, path = Rounded(8, family=family), tmp_path / "model.gguf"
    matrices = [name for name, info in model.tensors.items() if len(info.shape) > 1]
    write_gguf(SyntheticCheckpoint(8, family=family), path, types=dict.fromkeys(matrices, kind))
    found = []
    for name, source in (("quantised", path), ("floats", model.take_values_of(path))):
        with packed(source, tmp_path / f"{name}.pkg") as package:
            found.append(Decoder(package).advance(TOKENS, all_logits=True))
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)


def test_qwen3_normalises_queries_and_keys_before_rope(tmp_path: Path) -> None:
    model = SyntheticCheckpoint(family="qwen3", layers=1)
    with packed(model, tmp_path / "x.pkg") as package:
        program = Decoder(package).program
        ids = [op.id for op in program.ops if ".attn." in op.id]
        assert ids[1:7] == [
            "L00.attn.q",
            "L00.attn.k",
            "L00.attn.v",
            "L00.attn.q_norm",
            "L00.attn.k_norm",
            "L00.attn.rope",
        ]
        assert program.op("L00.attn.q_norm").attributes == {"heads": 4}
        assert program.op("L00.attn.k_norm").attributes == {"heads": 2}
        assert program.op("L00.attn.rope").reads[:2] == ("L00.attn.q_norm", "L00.attn.k_norm")


def test_qwen2_has_biases_of_q_k_and_v_and_none_of_the_output(tmp_path: Path) -> None:
    model = SyntheticCheckpoint(family="qwen2", layers=1)
    with packed(model, tmp_path / "x.pkg") as package:
        program = Decoder(package).program
        for part, weights in (("q", 2), ("k", 2), ("v", 2), ("out", 1)):
            assert len(program.op(f"L00.attn.{part}").weights) == weights


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_rmsnorm_with_heads_normalises_each_head_alone(
    tokens: int, heads: int, dimension: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    x = random.normal(size=(tokens, heads * dimension))
    weight = random.normal(size=dimension).astype(np.float32)
    package: Any = types.SimpleNamespace(
        hyperparameters=types.SimpleNamespace(rms_eps=1e-6),
        tensors={"w": PackedTensor("w", "f32", (dimension,), {"data": weight})},
    )
    state = {"x": x}
    op = Op("norm", "rmsnorm", ("x",), ("y",), ("w",), {"heads": heads})
    Reference(package, 8, np.float64).execute(op, state)
    for token in range(tokens):
        for head in range(heads):
            part = slice(head * dimension, (head + 1) * dimension)
            values = x[token, part]
            wanted = values / np.sqrt((values**2).mean() + 1e-6) * weight
            np.testing.assert_allclose(state["y"][token, part], wanted, rtol=1e-12)


# Attention windows


@pytest.mark.parametrize(
    ("family", "config", "context"),
    [
        ("mistral", {"sliding_window": 16}, 16),
        ("mistral", {"sliding_window": 64}, 64),
        ("mistral", {"sliding_window": 65}, 64),
        ("mistral", {"sliding_window": None}, 64),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, 64),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, 16),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, 16),
        ("qwen2", {"sliding_window": None, "use_sliding_window": True}, 64),
        ("qwen3", {"sliding_window": 16}, 64),
        ("qwen3", {"sliding_window": 16, "use_sliding_window": True}, 16),
        (
            "qwen3",
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "full_attention"],
            },
            64,
        ),
        ("llama", {"sliding_window": 16}, 16),
    ],
)
def test_a_window_shorter_than_the_context_limits_the_context_and_says_so(
    family: str,
    config: Mapping[str, Any],
    context: int,
    tmp_path: Path,
    write_safetensors: WriteFolder,
) -> None:
    model = SyntheticCheckpoint(family=family, context=64)
    folder = write_safetensors(model, tmp_path / "model", config)
    with packed(folder, tmp_path / "x.pkg") as package:
        assert package.hyperparameters.context == context
        notes = [note for note in package.notes if "slides over 16 tokens" in note]
        assert bool(notes) == (context < 64)
        decoder = Decoder(package)
        decoder.advance(np.arange(context))
        with pytest.raises(ContextFull):
            decoder.advance(np.array([1]))


def test_within_the_window_logits_are_those_of_full_attention(
    tmp_path: Path, write_safetensors: WriteFolder
) -> None:
    model = SyntheticCheckpoint(family="mistral", context=64)
    found = []
    for window in (16, None):
        folder = write_safetensors(model, tmp_path / f"m{window}", {"sliding_window": window})
        with packed(folder, tmp_path / f"{window}.pkg") as package:
            found.append(Decoder(package).advance(np.arange(16), all_logits=True))
    np.testing.assert_array_equal(found[0], found[1])


def test_a_window_in_gguf_limits_the_context_too(tmp_path: Path) -> None:
    model = changed(SyntheticCheckpoint(), **{"llama.attention.sliding_window": 32})
    with packed(model, tmp_path / "x.pkg") as package:
        assert package.hyperparameters.context == 32


def test_a_mistral_config_without_the_key_has_the_window_of_its_config_class(
    tmp_path: Path, write_safetensors: WriteFolder
) -> None:
    model = SyntheticCheckpoint(family="mistral", context=8192)
    folder = write_safetensors(model, tmp_path / "model", {})
    drop_key(folder, "sliding_window")
    with packed(folder, tmp_path / "x.pkg") as package:
        assert package.hyperparameters.context == 4096


# Heads, ties


def test_a_qwen3_config_without_head_dim_means_128(
    tmp_path: Path, write_safetensors: WriteFolder
) -> None:
    model = SyntheticCheckpoint(family="qwen3", heads=2, kv_heads=1, head_dim=128)
    folder = write_safetensors(model, tmp_path / "model", {})
    drop_key(folder, "head_dim")
    with packed(folder, tmp_path / "x.pkg") as package:
        assert package.hyperparameters.head_dim == 128


def test_a_tied_config_with_an_equal_head_is_tied_and_with_another_head_refused(
    tmp_path: Path, write_safetensors: WriteFolder
) -> None:
    model = SyntheticCheckpoint(family="qwen2", tied=True)
    folder = write_safetensors(model, tmp_path / "model", {})
    with packed(folder, tmp_path / "alone.pkg") as package:
        wanted = Decoder(package).advance(TOKENS)
    edit_tensors(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].copy()}))
    with packed(folder, tmp_path / "both.pkg") as package:
        assert package.hyperparameters.tied
        np.testing.assert_array_equal(Decoder(package).advance(TOKENS), wanted)
    edit_tensors(folder, lambda tensors: tensors[HEAD].__setitem__((0, 0), 9.0))
    with pytest.raises(FormatError, match=r"tie_word_embeddings is true, but .* differ"):
        packed(folder, tmp_path / "x.pkg")


@pytest.mark.parametrize("flag", [False, None])
def test_a_missing_head_is_refused_unless_the_config_ties_it(
    flag: bool | None, tmp_path: Path, write_safetensors: WriteFolder
) -> None:
    model = SyntheticCheckpoint(family="qwen3", tied=True)
    folder = write_safetensors(model, tmp_path / "model", {"tie_word_embeddings": flag})
    with pytest.raises(FormatError, match=r"lm_head\.weight' is missing .* is the file complete"):
        packed(folder, tmp_path / "x.pkg")


# What would change the results is refused


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias is True, but the file has no tensor"),
        ("llama", {"num_local_experts": 8}, "num_local_experts is 8; mixture-of-experts"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True; biases in the feed-forward part"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved is True; rotation of neighbours"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0, expected a positive number"),
        ("mistral", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; another activation"),
        ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window is 'yes', expected true or"),
        ("qwen2", {"layer_types": ["full_attention", "mamba"]}, r"layer_types has \['mamba'\]"),
        ("qwen2", {"layer_types": "full"}, "layer_types is 'full', expected a list of texts"),
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": None},
            "sliding_window is None, expected a positive number",
        ),
        ("qwen2", {"use_mrope": True}, "use_mrope is True; rotation by several positions"),
        (
            "qwen2",
            {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
            r"rope_scaling has \['mrope_section'\]",
        ),
        ("qwen2", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not known"),
        (
            "qwen2",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            r"rope_scaling has \['full_attention'\]",
        ),
        ("qwen3", {"attention_bias": True}, "attention_bias is True; biases of the attention"),
        ("qwen3", {"num_experts": 128}, "num_experts is 128; mixture-of-experts"),
        ("qwen3", {"model_type": "qwen3_moe"}, "'qwen3_moe' is not known; known: llama, mistral"),
        ("qwen3", {"head_dim": 8}, r"q_proj.* has shape \(64, 64\), .* ask for \(32, 64\)"),
        ("qwen3", {"model_type": "llama"}, r"k_norm\.weight' has no place in a llama model \(4"),
        ("qwen2", {"model_type": "mistral"}, r"k_proj\.bias' has no place in a mistral model"),
        ("llama", {"model_type": "qwen2"}, r"q_proj\.bias' is missing"),
        ("llama", {"model_type": "qwen3"}, r"q_norm\.weight' is missing"),
    ],
)
def test_a_config_json_that_would_give_other_results_is_refused_by_key(
    family: str,
    config: Mapping[str, Any],
    message: str,
    tmp_path: Path,
    write_safetensors: WriteFolder,
) -> None:
    folder = write_safetensors(SyntheticCheckpoint(family=family), tmp_path / "model", config)
    with pytest.raises(FormatError, match=message):
        packed(folder, tmp_path / "x.pkg")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2", {"expert_count": 60}, "qwen2.expert_count is 60; mixture-of-experts"),
        ("qwen2", {"rope.dimension_sections": [2, 3, 3, 0]}, r"M-RoPE"),
        ("qwen2", {"attention.causal": False}, "attention to later tokens"),
        ("qwen3", {"rope.dimension_count": 8}, "rope.dimension_count is 8, expected the head dim"),
        ("qwen3", {"attention.value_length": 8}, "attention.value_length is 8, expected the head"),
        ("qwen3", {"rope.scaling.type": "longrope"}, "'longrope' is not known"),
        ("qwen3", {"pooling_type": 3}, "pooling_type is 3; a model of embeddings"),
        ("llama", {"attention.scale": 0.5}, "another scale of attention scores"),
        ("llama", {"final_logit_softcapping": 30.0}, "capped logits"),
    ],
)
def test_gguf_keys_that_would_give_other_results_are_refused(
    family: str, changes: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    keys = {f"{family}.{key}": value for key, value in changes.items()}
    with pytest.raises(FormatError, match=message):
        packed(changed(SyntheticCheckpoint(family=family), **keys), tmp_path / "x.pkg")


class Altered(SyntheticCheckpoint):
    """A model without some of its tensors, or with others beside them."""

    def without(self, part: str) -> Altered:
        self.tensors = {name: info for name, info in self.tensors.items() if part not in name}
        return self

    def plus(self, name: str) -> Altered:
        self._add(name, (2, 64))
        return self


@pytest.mark.parametrize(
    ("family", "part", "message"),
    [
        ("qwen2", "blk.1.attn_k.bias", r"'blk\.1\.attn_k\.bias' is missing"),
        ("qwen3", "blk.1.attn_q_norm", r"'blk\.1\.attn_q_norm\.weight' is missing"),
    ],
)
def test_a_part_that_the_family_needs_is_missed_by_name(
    family: str, part: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=message):
        packed(Altered(family=family).without(part), tmp_path / "x.pkg")


def test_biases_of_a_llama_model_are_in_every_layer_or_in_none(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"5 of .* all 6 or none; 'blk\.1\.attn_k\.bias'"):
        packed(Altered(biases=True).without("blk.1.attn_k.bias"), tmp_path / "x.pkg")
    model = Altered(biases=True).without("attn_output.bias")  # the output's are a group of its own
    with packed(model, tmp_path / "y.pkg") as package:
        assert package.hyperparameters.qkv_bias and not package.hyperparameters.output_bias


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_inp.weight", "blk.2.attn_norm.weight", "cls"])
def test_weights_that_have_no_place_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=f"'{name}' has no place in a llama model"):
        packed(Altered().plus(name), tmp_path / "x.pkg")


def test_tables_that_follow_from_the_config_are_passed_over(
    tmp_path: Path, write_safetensors: WriteFolder
) -> None:
    folder = write_safetensors(SyntheticCheckpoint(), tmp_path / "model", {})
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    edit_tensors(folder, lambda tensors: tensors.update(table))
    packed(folder, tmp_path / "x.pkg").close()


def test_divisors_beside_another_rope_scaling_are_refused(tmp_path: Path) -> None:
    model = SyntheticCheckpoint(rope={"scaling.type": "yarn"}, rope_divisors=[1.0] * 8)
    with pytest.raises(FormatError, match=r"rope_freqs\.weight and .* 'yarn' at once"):
        packed(model, tmp_path / "x.pkg")


def test_a_factor_without_a_type_is_linear_scaling(tmp_path: Path) -> None:
    """As llama.cpp reads it."""
    model = SyntheticCheckpoint(rope={"scaling.factor": 4.0})
    with packed(model, tmp_path / "x.pkg") as package:
        assert package.hyperparameters.rope == "linear"
        assert package.tensors["rope.inv_freq"].parts["data"][0] == 0.25


def test_a_gguf_file_of_architecture_mistral_is_refused_with_the_name_it_should_have(
    tmp_path: Path,
) -> None:
    model = changed(SyntheticCheckpoint(), **{"general.architecture": "mistral"})
    with pytest.raises(FormatError, match="is 'mistral', expected 'llama'"):
        packed(model, tmp_path / "x.pkg")


def test_hyperparameters_are_strict_about_names_and_types() -> None:
    model = SyntheticCheckpoint(family="qwen3")
    good = family_of(model).read(model).hyperparameters.to_json()
    assert Hyperparameters.from_json(good).qk_norm
    with pytest.raises(ValueError, match=r"unknown \['biases'\]"):
        Hyperparameters.from_json({**good, "biases": False})
    with pytest.raises(ValueError, match=r"missing \['qk_norm'\]"):
        Hyperparameters.from_json({k: v for k, v in good.items() if k != "qk_norm"})
    with pytest.raises(ValueError, match="qkv_bias is 1, expected true or false"):
        Hyperparameters.from_json({**good, "qkv_bias": 1})
