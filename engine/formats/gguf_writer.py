"""Writes a checkpoint as a GGUF file, through the `gguf` library of the lab host.

For synthetic models, so that they can be handed to anything that reads GGUF, llama.cpp included.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.formats.checkpoint import Checkpoint, FormatError

# Tokenizer data → the key after `tokenizer.ggml.`; the reverse of `gguf.tokenizer_data`.
_TOKENIZER_KEYS = {
    "kind": "model",
    "pre": "pre",
    "tokens": "tokens",
    "token_types": "token_type",
    "scores": "scores",
    "merges": "merges",
    "bos_id": "bos_token_id",
    "eos_id": "eos_token_id",
    "add_bos": "add_bos_token",
    "add_space_prefix": "add_space_prefix",
}


def write_gguf(
    checkpoint: Checkpoint, path: Path | str, *, types: Mapping[str, str] | None = None
) -> None:
    """Writes metadata, tokenizer and tensors of a checkpoint that has GGUF's own names.

    `types` gives tensors another type than their own, by name (such as "Q8_0"). Raises FormatError
    for a safetensors checkpoint, for a type that the library cannot quantise to, and where the
    library is missing.
    """
    if checkpoint.format == "safetensors":
        raise FormatError(f"{checkpoint.path}: its names are not GGUF's; convert it with llama.cpp")
    try:
        from gguf import GGMLQuantizationType, GGUFWriter
        from gguf.quants import quantize
    except ImportError as error:
        raise FormatError(
            "writing GGUF needs the `gguf` library, which is not installed here"
        ) from error
    writer: Any = GGUFWriter(Path(path), str(checkpoint.metadata["general.architecture"]))
    metadata = {
        key: value
        for key, value in checkpoint.metadata.items()
        if key != "general.architecture" and not key.startswith("tokenizer.")
    }
    for name, key in _TOKENIZER_KEYS.items():
        if checkpoint.tokenizer and name in checkpoint.tokenizer:
            metadata[f"tokenizer.ggml.{key}"] = checkpoint.tokenizer[name]
    if checkpoint.tokenizer and "chat_template" in checkpoint.tokenizer:
        metadata["tokenizer.chat_template"] = checkpoint.tokenizer["chat_template"]
    if not checkpoint.tokenizer:
        metadata["tokenizer.ggml.model"] = "none"
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, info in checkpoint.tensors.items():
        kind = (types or {}).get(name, info.type)
        target = GGMLQuantizationType[kind]
        if kind == info.type:
            bytes_per_row = checkpoint.raw(name).shape[1]
            raw = np.ascontiguousarray(checkpoint.raw(name))
            shape = (*info.shape[:-1], bytes_per_row)
            writer.add_tensor(name, raw.reshape(shape), raw_dtype=target)
            continue
        try:
            packed = quantize(checkpoint.float32(name), target)
        except (NotImplementedError, ValueError) as error:
            raise FormatError(f"tensor {name!r}: cannot be written as {kind}: {error}") from error
        raw = packed.view(np.uint8) if packed.dtype != np.uint8 else packed
        writer.add_tensor(name, raw, raw_dtype=target)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))
