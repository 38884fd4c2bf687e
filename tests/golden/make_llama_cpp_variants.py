"""Records llama.cpp's logits for tiny models that differ in heads, biases, RoPE and family.

The models are synthetic (`engine.formats.synthetic`), so only seeds and logits are stored. Run it
where `make_llama_cpp.py` runs, from the root of the repository:

    PYTHONPATH=. golden/bin/python tests/golden/make_llama_cpp_variants.py \
        families --out tests/golden

Written for a set, such as `families`: `llama_cpp_families.npz` (tokens (T,), and for each model the
logits (KEPT, V) float32 of the last positions) and `llama_cpp_families.json` (the models'
arguments, versions, settings).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from engine.formats.gguf_writer import write_gguf
from engine.formats.synthetic import SyntheticCheckpoint

SEED = 20
TOKENS = 96  # more than the original context of the scaled variants
KEPT = {"variants": 24, "families": 4}  # positions at the end whose logits are stored
VOCAB = 320
F32 = 0  # GGML_TYPE_F32

COMMON: dict[str, Any] = {"layers": 2, "width": 64, "ffn": 96, "vocab": VOCAB, "context": 256}
SMALL: dict[str, Any] = {**COMMON, "heads": 4, "kv_heads": 2, "head_dim": 16}
YARN = {
    "scaling.type": "yarn",
    "scaling.factor": 4.0,
    "scaling.original_context_length": 64,
}
# Divisors as a converter writes them for llama3 scaling (factor 8, low 1, high 4, 64 positions).
LLAMA3_DIVISORS = [1.0, 1.0, 1.0, 2.0, 5.5, 8.0, 8.0, 8.0]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": SMALL,
    "32 heads, 4 kv heads": {**COMMON, "heads": 32, "kv_heads": 4, "head_dim": 16},
    "as many kv heads as heads": {**COMMON, "heads": 4, "kv_heads": 4, "head_dim": 16},
    "wide heads": {**COMMON, "heads": 4, "kv_heads": 1, "head_dim": 48},
    "tied": {**SMALL, "tied": True},
    "biases": {**SMALL, "biases": True},
    "large base": {**SMALL, "rope": {"freq_base": 1000000.0}},
    "linear": {**SMALL, "rope": {"scaling.type": "linear", "scaling.factor": 4.0}},
    "llama3": {**SMALL, "rope_divisors": LLAMA3_DIVISORS},
    "yarn": {**SMALL, "rope": YARN},
    "yarn, attention factor": {**SMALL, "rope": {**YARN, "scaling.attn_factor": 1.25}},
}
QWEN2: dict[str, Any] = {**SMALL, "family": "qwen2"}
QWEN3: dict[str, Any] = {**SMALL, "family": "qwen3"}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": QWEN2,
    "qwen2, tied": {**QWEN2, "tied": True},
    # llama.cpp wants heads of a qwen2 model to make up the width.
    "qwen2, 32 heads, 4 kv heads": {
        **QWEN2,
        "heads": 32,
        "kv_heads": 4,
        "head_dim": 8,
        "width": 256,
    },
    "qwen2, large base": {**QWEN2, "rope": {"freq_base": 1000000.0}},
    "qwen2, yarn": {**QWEN2, "rope": YARN},
    "qwen3": QWEN3,
    "qwen3, tied": {**QWEN3, "tied": True},
    "qwen3, 32 heads, 4 kv heads": {**QWEN3, "heads": 32, "kv_heads": 4},
    "qwen3, wide heads": {**QWEN3, "kv_heads": 1, "head_dim": 48},
    "qwen3, yarn": {**QWEN3, "rope": YARN},
}
SETS = {"variants": VARIANTS, "families": FAMILIES}


def main() -> None:
    parser = argparse.ArgumentParser(description="Record llama.cpp's logits of tiny models.")
    parser.add_argument("set", choices=list(SETS), help="which models")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two golden files")
    options = parser.parse_args()
    models, kept = SETS[options.set], KEPT[options.set]
    # Spread over the vocabulary without the special tokens, the same on every machine.
    tokens = [(7 + 37 * index + index * index) % 256 for index in range(TOKENS)]
    arrays = {"tokens": np.array(tokens, np.int64)}
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in models.items():
            path = Path(folder) / "tiny.gguf"
            write_gguf(SyntheticCheckpoint(SEED, **arguments), path)
            llama = llama_cpp.Llama(
                str(path),
                n_ctx=256,
                n_threads=1,
                n_threads_batch=1,
                n_gpu_layers=0,
                flash_attn=False,
                type_k=F32,
                type_v=F32,
                # -1 takes the model's own values in place of this library's defaults.
                yarn_attn_factor=-1.0,
                yarn_beta_fast=-1.0,
                yarn_beta_slow=-1.0,
                logits_all=True,
                verbose=False,
            )
            llama.eval(tokens)
            arrays[f"logits/{name}"] = np.array(llama.scores[TOKENS - kept : TOKENS], np.float32)
            llama.close()
    np.savez_compressed(options.out / f"llama_cpp_{options.set}.npz", **arrays)
    record = {
        "command": "PYTHONPATH=. python tests/golden/make_llama_cpp_variants.py "
        f"{options.set} --out tests/golden",
        "versions": {
            "llama-cpp-python": llama_cpp.__version__,
            "gguf": importlib.metadata.version("gguf"),
        },
        "settings": {"n_threads": 1, "flash_attn": False, "type_k": "F32", "type_v": "F32"},
        "seed": SEED,
        "variants": models,
    }
    (options.out / f"llama_cpp_{options.set}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
