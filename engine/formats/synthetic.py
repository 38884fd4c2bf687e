"""A small model made from a seed: no file, no download, the same numbers on every machine.

Weights come from the raw 64-bit words of Philox-4x64 (a counter-based generator, Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by the seed and the tensor's name.
Each word's four 16-bit parts are summed (Irwin-Hall, close to normal) in whole numbers, so that no
library's notion of a normal distribution, and no machine's `log`, changes them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.formats.bytelevel import byte_characters
from engine.formats.checkpoint import FormatError, TensorInfo

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Bytes that no UTF-8 text contains. A vocabulary of exactly 256 gives their places to the special
# tokens, and still spells every text.
_NEVER_IN_UTF8 = (0xFD, 0xFE, 0xFF)
_WORDS = (
    "the of and to in is that it for was on are as with his they at be this have from or one had"
)
_LOGIT_SPREAD = 3.0  # standard deviation of the logits, so that the best token stands out


# Family → its name in GGUF files.
FAMILIES: Mapping[str, str] = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}


class SyntheticCheckpoint:
    """A model under GGUF's metadata keys and tensor names; float32 weights. See `Checkpoint`.

    `family` is one of FAMILIES. `head_dim` None is width / heads. `tied` leaves the output matrix
    out, so the embedding serves. `biases` gives a llama model's q, k, v and attention output one;
    q, k and v of a qwen2 model always have one. `rope` adds or overrides metadata keys (those after
    `ARCHITECTURE.rope.`), and `rope_divisors` (head_dim / 2 numbers) becomes the tensor
    `rope_freqs.weight`, for RoPE variants.
    Raises FormatError for sizes that make no model, and for a part that the family has not.
    """

    format = "synthetic"

    def __init__(
        self,
        seed: int = 0,
        *,
        family: str = "llama",
        layers: int = 2,
        width: int = 64,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int | None = None,
        ffn: int = 128,
        vocab: int = 256,
        context: int = 256,
        tokenizer: bool = True,
        tied: bool = False,
        biases: bool = False,
        rope: Mapping[str, Any] | None = None,
        rope_divisors: Sequence[float] | None = None,
    ) -> None:
        if family not in FAMILIES:
            raise FormatError(
                f"synthetic model: family {family!r} is not known; known: {sorted(FAMILIES)}"
            )
        arch = FAMILIES[family]
        if biases and family != "llama":
            raise FormatError(f"synthetic model: a {family} model has no choice of biases")
        if rope_divisors is not None and arch != "llama":
            raise FormatError(f"synthetic model: a {family} model has no rope divisors")
        sizes = {
            "layers": layers,
            "width": width,
            "heads": heads,
            "kv_heads": kv_heads,
            "ffn": ffn,
            "vocab": vocab,
            "context": context,
        }
        for name, size in sizes.items():
            if size < 1:
                raise FormatError(f"synthetic model: {name} is {size}, at least 1 expected")
        if heads % kv_heads:
            raise FormatError(
                f"synthetic model: {heads} heads cannot share {kv_heads} key/value heads evenly"
            )
        if head_dim is None:
            if width % heads:
                raise FormatError(f"synthetic model: width {width} is no multiple of {heads} heads")
            head_dim = width // heads
        if head_dim % 2:
            raise FormatError(
                f"synthetic model: head dimension {head_dim} is odd; RoPE needs pairs"
            )
        self.seed, self.family = seed, family
        self.path = Path(f"synthetic-{seed}")
        self.metadata: Mapping[str, Any] = {
            "general.architecture": arch,
            "general.name": f"synthetic {layers}x{width} seed {seed}",
            f"{arch}.block_count": layers,
            f"{arch}.context_length": context,
            f"{arch}.embedding_length": width,
            f"{arch}.feed_forward_length": ffn,
            f"{arch}.attention.head_count": heads,
            f"{arch}.attention.head_count_kv": kv_heads,
            f"{arch}.attention.key_length": head_dim,
            f"{arch}.attention.value_length": head_dim,
            f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
            f"{arch}.rope.dimension_count": head_dim,
            f"{arch}.rope.freq_base": 10000.0,
            f"{arch}.vocab_size": vocab,
            **{f"{arch}.rope.{key}": value for key, value in (rope or {}).items()},
        }
        self._deviations: dict[str, tuple[float, float]] = {}
        self._tensors: dict[str, TensorInfo] = {}
        self.tensors: Mapping[str, TensorInfo] = self._tensors
        self._add("token_embd.weight", (vocab, width), 1.0)
        for layer in range(layers):
            self._add_layer(layer, heads, kv_heads, head_dim, width, ffn, output_bias=biases)
        self._add("output_norm.weight", (width,), 0.1, mean=1.0)
        if not tied:
            self._add("output.weight", (vocab, width), _LOGIT_SPREAD / math.sqrt(width))
        self._divisors = rope_divisors
        if rope_divisors is not None:
            if len(rope_divisors) != head_dim // 2:
                raise FormatError(
                    f"synthetic model: {len(rope_divisors)} rope divisors, {head_dim // 2} expected"
                )
            self._add("rope_freqs.weight", (head_dim // 2,))
        self.tokenizer: Mapping[str, Any] | None = byte_tokenizer(vocab) if tokenizer else None

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The float32 values as bytes: (rows, bytes per row)."""
        info = self._info(name)
        rows = self.float32(name).reshape(math.prod(info.shape[:-1]), info.shape[-1])
        return rows.view(np.uint8)

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        info = self._info(name)
        if name == "rope_freqs.weight":
            return np.array(self._divisors, np.float32)
        deviation, mean = self._deviations[name]
        return deterministic_normal(self.seed, name, info.shape, deviation, mean)

    def close(self) -> None:
        """Nothing is held open."""

    def _add_layer(
        self,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        width: int,
        ffn: int,
        *,
        output_bias: bool,
    ) -> None:
        block = f"blk.{layer}."
        self._add(block + "attn_norm.weight", (width,), 0.1, mean=1.0)
        self._add(block + "attn_q.weight", (heads * head_dim, width))
        self._add(block + "attn_k.weight", (kv_heads * head_dim, width))
        self._add(block + "attn_v.weight", (kv_heads * head_dim, width))
        self._add(block + "attn_output.weight", (width, heads * head_dim))
        if output_bias or self.family == "qwen2":
            self._add(block + "attn_q.bias", (heads * head_dim,), 0.5)
            self._add(block + "attn_k.bias", (kv_heads * head_dim,), 0.5)
            self._add(block + "attn_v.bias", (kv_heads * head_dim,), 0.5)
        if output_bias:
            self._add(block + "attn_output.bias", (width,), 0.5)
        if self.family == "qwen3":
            self._add(block + "attn_q_norm.weight", (head_dim,), 0.3, mean=1.0)
            self._add(block + "attn_k_norm.weight", (head_dim,), 0.3, mean=1.0)
        self._add(block + "ffn_norm.weight", (width,), 0.1, mean=1.0)
        self._add(block + "ffn_gate.weight", (ffn, width))
        self._add(block + "ffn_up.weight", (ffn, width))
        self._add(block + "ffn_down.weight", (width, ffn))

    def _add(
        self,
        name: str,
        shape: tuple[int, ...],
        deviation: float | None = None,
        *,
        mean: float = 0.0,
    ) -> None:
        """Without a deviation the outputs of a unit-variance input have unit variance."""
        scale = 1.0 / math.sqrt(shape[-1]) if deviation is None else deviation
        self._deviations[name] = (scale, mean)
        self._tensors[name] = TensorInfo(name, shape, "F32", 4 * math.prod(shape))

    def _info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise FormatError(f"{self.path}: no tensor {name!r} among its {len(self._tensors)}")
        return self._tensors[name]


def deterministic_normal(
    seed: int, name: str, shape: tuple[int, ...], deviation: float, mean: float = 0.0
) -> npt.NDArray[np.float32]:
    """Nearly normal values (within 3.5 deviations), the same for a seed and name everywhere."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    key = np.frombuffer(digest[:16], "<u8")
    words = np.random.Philox(key=key).random_raw(math.prod(shape))
    total = np.zeros(words.shape, np.int64)
    for shift in (0, 16, 32, 48):
        total += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
    # Four uniform numbers of 0..65535: mean 2 * 65535, variance 4 * (65536² - 1) / 12.
    centred = (total - 2 * 65535).astype(np.float32)
    step = np.float32(deviation / math.sqrt((65536.0**2 - 1) / 3))
    return (centred * step + np.float32(mean)).reshape(shape)


def byte_tokenizer(vocab: int) -> dict[str, Any]:
    """A byte-level BPE vocabulary of `vocab` entries: bytes, special tokens, merges, unused ones.

    Raises FormatError below 256, where bytes have no room.
    """
    if vocab < 256:
        raise FormatError(
            f"synthetic model: a vocabulary of {vocab} cannot spell every byte; "
            "use at least 256, or tokenizer=False"
        )
    characters = byte_characters()
    tokens = [characters[byte] for byte in range(256)]
    types = [1] * 256  # LLAMA_TOKEN_TYPE_NORMAL
    merges: list[str] = []
    if vocab < 256 + len(SPECIALS):
        for byte, special in zip(_NEVER_IN_UTF8, SPECIALS):
            tokens[byte], types[byte] = special, 3  # LLAMA_TOKEN_TYPE_CONTROL
    else:
        tokens += SPECIALS
        types += [3] * len(SPECIALS)
        for left, right in _word_merges():
            if len(tokens) < vocab and left + right not in tokens:
                tokens.append(left + right)
                types.append(1)
                merges.append(f"{left} {right}")
    unused = vocab - len(tokens)
    tokens += [f"<|unused_{index}|>" for index in range(unused)]
    types += [5] * unused  # LLAMA_TOKEN_TYPE_UNUSED
    return {
        "kind": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_types": types,
        "merges": merges,
        "bos_id": tokens.index(SPECIALS[0]),
        "eos_id": tokens.index(SPECIALS[2]),
        "add_bos": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _word_merges() -> list[tuple[str, str]]:
    """Merges that build common words letter by letter, with the space before them."""
    found: list[tuple[str, str]] = []
    for word in _WORDS.split():
        built = byte_characters()[0x20]
        for letter in word:
            found.append((built, letter))
            built += letter
    return found
