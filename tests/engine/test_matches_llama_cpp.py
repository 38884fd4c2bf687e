"""Our engine against llama.cpp on a real model, through golden data made by `tests/golden/`.

The golden data keep the 128 best ids of each position and the mass of all others. The divergence
over these 129 classes is a lower bound of the divergence over the vocabulary (merging classes never
adds information); the figures over all logits stand in `llama_cpp.json`, "full_vocabulary".
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.decode import Decoder, generate
from engine.formats import open_checkpoint
from engine.native.library import NativeUnavailable, load
from engine.options import EngineOptions
from engine.package import Package, build_package
from engine.sampling import Sampling
from engine.tokenizer import Tokenizer
from harness.deploy.models import demo_model
from harness.errors import HarnessError

GOLDEN = Path(__file__).parent.parent / "golden"
WAYS = {
    "packed": EngineOptions(),
    "reference": EngineOptions(unit="reference"),
    "native": EngineOptions(unit="native", executor="compiled", fused=True, threads=2),
}
# Changes of the native unit's options → mean KL in nats, and share of equal best tokens, that do.
# int8 activations alone cost this small model 4e-3 nats, on whatever unit.
FEW_BITS: dict[str, tuple[dict[str, Any], float, float]] = {
    "float16 cache": ({"activations": "float"}, 1e-5, 0.99),
    "int8 cache": ({"activations": "float", "kv": "int8"}, 3e-3, 0.96),
    "int8 activations": ({}, 8e-3, 0.92),
    "int8 activations, int8 cache": ({"kv": "int8"}, 1e-2, 0.9),
}
# Two correct float32 engines differ by rounding: 1.5e-4 at most in any logit of this model. Where
# the best token leads by less than this, in nats, either may be chosen.
NOISE_FLOOR = 1e-3
Golden = dict[str, npt.NDArray[Any]]


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / "llama_cpp.json").read_text("utf-8"))
    return found


@pytest.fixture(scope="module")
def golden() -> Golden:
    with np.load(GOLDEN / "llama_cpp.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def model(record: dict[str, Any]) -> Path:
    try:
        path = demo_model()
    except HarnessError as error:
        pytest.skip(f"needs the demonstration model: {error}")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == record["model_sha256"]
    return path


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    data = open_checkpoint(model).tokenizer
    assert data is not None
    return Tokenizer(data)


@pytest.fixture(scope="module")
def package(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    path = tmp_path_factory.mktemp("package") / "model.package"
    build_package(open_checkpoint(model), path, name=model.stem)
    package = Package.open(path)
    yield package
    package.close()


@pytest.fixture(scope="module")
def native_package(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    """In the layout of the native unit."""
    try:
        load()
    except NativeUnavailable as error:
        pytest.skip(f"needs a C compiler: {error}")
    path = tmp_path_factory.mktemp("package") / "native.package"
    build_package(open_checkpoint(model), path, name=model.stem, layout="interleaved")
    with Package.open(path) as package:
        yield package


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """(T, V) → (T, V) float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True)))


def coarse_divergence(
    golden: Golden, name: str, ours: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """KL(llama.cpp ‖ ours) per position (T,) in nats, over the stored ids and "any other"."""
    ids = golden[f"text/{name}/ids"].astype(np.int64)
    theirs = golden[f"text/{name}/logp"].astype(np.float64)
    rest = golden[f"text/{name}/rest"].astype(np.float64)
    top = np.take_along_axis(ours, ids, axis=-1)
    others = np.log(np.maximum(1.0 - np.exp(top).sum(axis=-1), 1e-12))
    p = np.exp(np.concatenate((theirs, rest[:, None]), axis=-1))
    difference = np.concatenate((theirs - top, (rest - others)[:, None]), axis=-1)
    return np.asarray((p * difference).sum(axis=-1))


def test_golden_data_cover_enough_text(record: dict[str, Any], golden: Golden) -> None:
    lengths = [golden[f"text/{name}/tokens"].size for name in record["texts"]]
    assert len(lengths) >= 5
    assert sum(lengths) == record["teacher_forced_tokens"] >= 300


def test_token_ids_are_those_of_llama_cpp(
    record: dict[str, Any], golden: Golden, tokenizer: Tokenizer
) -> None:
    for name, text in record["texts"].items():
        assert tokenizer.encode(text) == golden[f"text/{name}/tokens"].tolist(), name
        assert tokenizer.decode(golden[f"text/{name}/tokens"].tolist()) == text, name
    for index, prompt in enumerate(record["prompts"]):
        assert tokenizer.encode(prompt) == golden[f"greedy/{index}/prompt"].tolist()


def test_chat_template_renders_as_in_llama_cpp_python(
    record: dict[str, Any], tokenizer: Tokenizer
) -> None:
    assert tokenizer.chat(record["messages"]) == record["texts"]["dialogue"]


@dataclasses.dataclass
class Agreement:
    """How near a decoder is to llama.cpp over all texts."""

    mean: float  # KL in nats
    best: float  # share of positions with the same best token
    worst: float  # difference of log-probabilities
    clear: bool  # the best token is the same wherever llama.cpp's leads clearly


def agreement(decoder: Decoder, record: dict[str, Any], golden: Golden) -> Agreement:
    divergences, agreements, worst, same = [], [], 0.0, True
    for name in record["texts"]:
        decoder.reset()
        tokens = golden[f"text/{name}/tokens"].astype(np.int64)
        ours = log_softmax(decoder.advance(tokens, all_logits=True))
        ids = golden[f"text/{name}/ids"].astype(np.int64)
        logp = golden[f"text/{name}/logp"]
        divergences.append(coarse_divergence(golden, name, ours))
        agrees = ours.argmax(axis=-1) == ids[:, 0]
        agreements.append(agrees)
        same &= bool(agrees[logp[:, 0] - logp[:, 1] > NOISE_FLOOR].all())
        worst = max(worst, float(np.abs(np.take_along_axis(ours, ids, axis=-1) - logp).max()))
    mean = float(np.concatenate(divergences).mean())
    found = Agreement(mean, float(np.concatenate(agreements).mean()), worst, same)
    print(f"{decoder.options}: {found}")
    return found


@pytest.mark.parametrize("way", WAYS)
def test_teacher_forced_distributions_match_llama_cpp(
    way: str, record: dict[str, Any], golden: Golden, request: pytest.FixtureRequest
) -> None:
    package = request.getfixturevalue("native_package" if way == "native" else "package")
    found = agreement(Decoder(package, options=WAYS[way], context=512), record, golden)
    assert found.clear, "another best token where llama.cpp's leads clearly"
    assert found.best >= 0.99
    assert abs(found.mean) <= 1e-6  # the stored float32 log-probabilities alone give some 1e-8
    assert found.worst <= NOISE_FLOOR


@pytest.mark.parametrize("way", FEW_BITS)
def test_few_bits_on_the_native_unit_stay_near_llama_cpp(
    way: str, record: dict[str, Any], golden: Golden, native_package: Package
) -> None:
    changes, divergence, best = FEW_BITS[way]
    options = dataclasses.replace(EngineOptions.for_unit("native"), threads=2, **changes)
    found = agreement(Decoder(native_package, options=options, context=512), record, golden)
    assert 0 < found.mean <= divergence
    assert found.best >= best


def equal_until_a_near_tie(
    ours: list[int], theirs: npt.NDArray[Any], margins: npt.NDArray[Any]
) -> int:
    """How many tokens are equal; fails where they part although llama.cpp's choice was clear."""
    for step, (mine, wanted) in enumerate(zip(ours, theirs.tolist(), strict=True)):
        if mine != wanted:
            assert margins[step] < NOISE_FLOOR, (
                f"step {step}: chose {mine}, llama.cpp {wanted} with a lead of {margins[step]:.4f}"
            )
            return step
    return len(ours)


@pytest.mark.parametrize("way", ["packed", "native"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_greedy_continuation_equals_llama_cpp_until_a_near_tie(
    index: int, way: str, golden: Golden, request: pytest.FixtureRequest
) -> None:
    package = request.getfixturevalue("native_package" if way == "native" else "package")
    prompt, theirs = golden[f"greedy/{index}/prompt"], golden[f"greedy/{index}/tokens"]
    decoder = Decoder(package, options=WAYS[way], context=256)
    run = generate(
        decoder,
        [int(token) for token in prompt],
        sampling=Sampling(temperature=0),
        max_new=theirs.size,
    )
    chosen = [event.token for event in run]
    equal = equal_until_a_near_tie(chosen, theirs, golden[f"greedy/{index}/margins"])
    print(f"prompt {index}: {equal} of {theirs.size} tokens equal")


@pytest.mark.parametrize("index", [0, 1, 2])
def test_reference_unit_chooses_the_same_greedy_tokens(
    index: int, golden: Golden, package: Package
) -> None:
    """In one pass over llama.cpp's own continuation, which is the same as choosing step by step."""
    prompt, theirs = golden[f"greedy/{index}/prompt"], golden[f"greedy/{index}/tokens"]
    decoder = Decoder(package, unit="reference", context=256)
    tokens = np.concatenate((prompt, theirs[:-1])).astype(np.int64)
    best = decoder.advance(tokens, all_logits=True)[prompt.size - 1 :].argmax(axis=-1)
    margins = golden[f"greedy/{index}/margins"]
    wrong = [
        step
        for step in range(theirs.size)
        if best[step] != theirs[step] and margins[step] > NOISE_FLOOR
    ]
    assert not wrong
