"""Records what llama.cpp computes for a model, as golden data for our engine.

Run it in an environment of its own, because llama.cpp is built there and is no dependency of ours:

    python -m venv golden && golden/bin/pip install llama-cpp-python==0.3.36 gguf==0.19.0
    golden/bin/python tests/golden/make_llama_cpp.py SmolLM2-135M-Instruct.Q4_1.gguf \
        --out tests/golden

The model's weights are dequantised to F32 first and llama.cpp runs those, in F32 throughout (KV
cache too, flash attention off): llama.cpp's own quantised kernels round activations to 8 bits,
which would drown the differences that this data is meant to show.

Written: `llama_cpp.npz` (token ids; the 128 best ids with their log-probabilities and the mass of
all others, per position; greedy continuations with the margin of each choice) and `llama_cpp.json`
(the texts, versions, settings and the model's hash). `--dump DIR` also writes the full logits, for
`compare_full_vocabulary.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

TOP = 128
GREEDY_TOKENS = 64
THREADS = 2
CONTEXT = 1024
F32 = 0  # GGML_TYPE_F32

MESSAGES = [
    {"role": "user", "content": "Name three colours of the sky at dusk."},
    {"role": "assistant", "content": "Orange, pink and a deep violet."},
    {"role": "user", "content": "Which of them comes last?"},
]
TEXTS = {
    "prose": (
        "The lighthouse keeper climbed the spiral stairs every evening, carrying a lamp that his "
        "grandmother had carried before him. Below, the sea worked at the rocks with the patience "
        "of something that has never been in a hurry. He didn't mind the cold; it kept the nights "
        "honest. When the ships passed, small and bright on the horizon, he would raise one hand, "
        "although he knew that nobody could see it."
    ),
    "code": (
        "import math\n\n\ndef softmax(values):\n    largest = max(values)\n"
        "    exps = [math.exp(v - largest) for v in values]\n    total = sum(exps)\n"
        "    return [e / total for e in exps]\n\n\nif __name__ == '__main__':\n"
        "    print(softmax([1.0, 2.0, 3.0]))  # [0.09, 0.24, 0.67]\n"
    ),
    "odd formats": (
        "| id | price  | due        |\n|----|--------|------------|\n| 7  | $1,299.99 | 2024-02-29 "
        '|\n{"pi": 3.14159265, "hex": "0xDEADBEEF", "ok": true, "list": [1, 22, 333, 4444]}\n'
        "\t\tRoman: ⅣⅧ, half: ½, IPv6: fe80::1%eth0 -- 50% of £20 is £10...\r\n\r\n"
    ),
    "other languages": (
        "Der Zug fährt über die Brücke; je préfère le thé vert. Привет, мир! 日本語の文章も少し。"
        "مرحبا بالعالم. हिन्दी में एक वाक्य। 👩‍👩‍👧‍👦 🇩🇪 😀 naïve café — “quoted” …"
    ),
}
PROMPTS = (
    "Once upon a time, in a village by the river,",
    "def fibonacci(n):\n",
    "The three primary colours are",
)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def dequantised_copy(source: Path, target: Path) -> None:
    """The same model with every tensor as F32 and its metadata kept."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value: Any = field.contents()
        if key == "general.file_type":
            value = int(gguf.LlamaFileType.ALL_F32)
        item = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, field.types[0], item)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """(T, V) → (T, V) float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def coarse(logits: np.ndarray) -> dict[str, np.ndarray]:
    """Per position: the TOP best ids (T, TOP), their log-probabilities, the others' log mass."""
    logp = log_softmax(logits)
    best = np.argsort(-logp, axis=-1, kind="stable")[:, :TOP]
    top = np.take_along_axis(logp, best, axis=-1)
    others = logp.copy()
    np.put_along_axis(others, best, -np.inf, axis=-1)
    rest = np.log(np.exp(others).sum(axis=-1))
    return {
        "ids": best.astype(np.uint32),
        "logp": top.astype(np.float32),
        "rest": rest.astype(np.float32),
    }


def greedy(llama: llama_cpp.Llama, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The continuation, one token a step, and by how much (in nats) each choice was the best."""
    llama.reset()
    llama.eval(prompt)
    ids, margins = [], []
    for _ in range(GREEDY_TOKENS):
        logits = llama.scores[llama.n_tokens - 1].astype(np.float64)
        second, first = np.sort(logits)[-2:]
        ids.append(int(logits.argmax()))
        margins.append(float(first - second))
        llama.eval([ids[-1]])
    return ids, margins


def main() -> None:
    parser = argparse.ArgumentParser(description="Record llama.cpp's numbers as golden data.")
    parser.add_argument("model", type=Path, help="the GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two golden files")
    parser.add_argument("--dump", type=Path, help="folder for the full logits (large)")
    options = parser.parse_args()

    arrays: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "model-f32.gguf"
        dequantised_copy(options.model, copy)
        llama = llama_cpp.Llama(
            str(copy),
            n_ctx=CONTEXT,
            n_threads=THREADS,
            n_threads_batch=THREADS,
            n_gpu_layers=0,
            flash_attn=False,
            type_k=F32,
            type_v=F32,
            logits_all=True,
            verbose=False,
        )
        template = llama.metadata["tokenizer.chat_template"]
        formatter = llama_cpp.llama_chat_format.Jinja2ChatFormatter(
            template=template,
            eos_token=llama.detokenize([llama.token_eos()], special=True).decode(),
            bos_token=llama.detokenize([llama.token_bos()], special=True).decode(),
        )
        texts = {**TEXTS, "dialogue": formatter(messages=MESSAGES).prompt}
        for name, text in texts.items():
            ids = llama.tokenize(text.encode(), add_bos=True, special=True)
            llama.reset()
            llama.eval(ids)
            logits = np.array(llama.scores[: len(ids)], np.float32)
            arrays[f"text/{name}/tokens"] = np.array(ids, np.uint32)
            for part, values in coarse(logits).items():
                arrays[f"text/{name}/{part}"] = values
            if options.dump:
                options.dump.mkdir(parents=True, exist_ok=True)
                np.save(options.dump / f"{name}.npy", logits, allow_pickle=False)
        for index, prompt in enumerate(PROMPTS):
            ids = llama.tokenize(prompt.encode(), add_bos=True, special=True)
            chosen, margins = greedy(llama, ids)
            arrays[f"greedy/{index}/prompt"] = np.array(ids, np.uint32)
            arrays[f"greedy/{index}/tokens"] = np.array(chosen, np.uint32)
            arrays[f"greedy/{index}/margins"] = np.array(margins, np.float32)

    options.out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(options.out / "llama_cpp.npz", **arrays)
    record = {
        "model": options.model.name,
        "model_sha256": sha256(options.model),
        "command": (
            f"python tests/golden/make_llama_cpp.py {options.model.name} --out tests/golden"
        ),
        "versions": {
            "llama-cpp-python": llama_cpp.__version__,
            "gguf": importlib.metadata.version("gguf"),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "system": llama_cpp.llama_print_system_info().decode(),
        "settings": {
            "weights": "dequantised to F32",
            "n_threads": THREADS,
            "n_ctx": CONTEXT,
            "flash_attn": False,
            "type_k": "F32",
            "type_v": "F32",
        },
        "messages": MESSAGES,
        "texts": texts,
        "prompts": list(PROMPTS),
        "teacher_forced_tokens": sum(len(arrays[f"text/{name}/tokens"]) for name in texts),
    }
    (options.out / "llama_cpp.json").write_text(
        json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
