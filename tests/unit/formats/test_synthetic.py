from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from engine.formats import FormatError, SyntheticCheckpoint, open_checkpoint
from engine.formats.gguf_writer import write_gguf
from engine.tokenizer import Tokenizer


def test_weights_are_the_same_on_every_machine() -> None:
    """The hash was recorded once; it holds whatever the numpy version, libm or processor."""
    values = SyntheticCheckpoint(7).float32("blk.1.ffn_down.weight")
    digest = hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()
    assert digest == "90e41972e6d8e3dae1369cd2265b200d630db446c27a010c6558b0a05793a72d"


def test_seed_and_name_decide_the_weights() -> None:
    first, again, other = (SyntheticCheckpoint(seed) for seed in (1, 1, 2))
    name, neighbour = "blk.0.attn_q.weight", "blk.1.attn_q.weight"
    np.testing.assert_array_equal(first.float32(name), again.float32(name))
    assert not np.array_equal(first.float32(name), other.float32(name))
    assert not np.array_equal(first.float32(name), first.float32(neighbour))


def test_values_are_nearly_normal() -> None:
    values = SyntheticCheckpoint(3, vocab=4096, width=64).float32("token_embd.weight")
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - 1) < 0.01
    assert 3 < np.abs(values).max() < 3.5


@pytest.mark.parametrize("vocab", [256, 258, 259, 300, 1000])
def test_tokenizer_covers_the_vocabulary_and_round_trips_text(vocab: int) -> None:
    model = SyntheticCheckpoint(0, vocab=vocab)
    assert model.tokenizer is not None
    tokenizer = Tokenizer(model.tokenizer)
    assert tokenizer.vocab_size == vocab == model.tensors["token_embd.weight"].shape[0]
    text = "the cat — naïve 😀\n\x00 日本"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert tokenizer.encode(chat).count(model.tokenizer["eos_id"]) == 1
    assert model.tokenizer["eos_id"] in tokenizer.stop_ids


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"heads": 3, "kv_heads": 2}, "3 heads cannot share 2"),
        ({"width": 65}, "no multiple of 4 heads"),
        ({"head_dim": 15}, "is odd"),
        ({"vocab": 100}, "cannot spell every byte"),
        ({"rope_divisors": [1.0]}, "1 rope divisors, 8 expected"),
    ],
)
def test_sizes_that_make_no_model_are_refused(arguments: dict[str, object], expected: str) -> None:
    with pytest.raises(FormatError, match=expected):
        SyntheticCheckpoint(0, **arguments)  # type: ignore[arg-type]  # wrong on purpose


def test_small_vocabulary_is_fine_without_a_tokenizer() -> None:
    assert SyntheticCheckpoint(0, vocab=10, tokenizer=False).tokenizer is None


def test_written_as_gguf_it_reads_back_the_same(tmp_path: Path) -> None:
    model = SyntheticCheckpoint(4, vocab=300, biases=True, rope_divisors=[1.0] * 8)
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path)
    found = open_checkpoint(path)
    assert found.tokenizer == model.tokenizer
    assert found.tensors == model.tensors
    for name in model.tensors:
        np.testing.assert_array_equal(found.float32(name), model.float32(name))
        np.testing.assert_array_equal(found.raw(name), model.raw(name))
    for key, value in model.metadata.items():
        assert found.metadata[key] == pytest.approx(value)


def test_written_as_gguf_tensors_may_have_another_type(tmp_path: Path) -> None:
    model, path = SyntheticCheckpoint(4), tmp_path / "tiny.gguf"
    name = "blk.0.ffn_up.weight"
    write_gguf(model, path, types={name: "Q8_0"})
    found = open_checkpoint(path)
    assert found.tensors[name].type == "Q8_0"
    np.testing.assert_allclose(found.float32(name), model.float32(name), atol=0.002)
    with pytest.raises(FormatError, match="cannot be written as Q8_K"):
        write_gguf(model, path, types={name: "Q8_K"})
