"""Compares our engine with llama.cpp over the whole vocabulary, and records the figures.

The golden data keep the 128 best ids of a position; this reads the full logits that
`make_llama_cpp.py … --dump DIR` left, and adds to `llama_cpp.json` what cannot be computed from
the golden data alone:

    python tests/golden/compare_full_vocabulary.py SmolLM2-135M-Instruct.Q4_1.gguf --dump DIR
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from engine.decode import Decoder
from engine.formats import open_checkpoint
from engine.package import Package, build_package

UNITS = ("packed", "reference")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """(T, V) → (T, V) float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True)))


def compare(decoder: Decoder, golden: dict[str, np.ndarray], dump: Path) -> dict[str, float]:
    divergences, differences, agreements = [], [], []
    for file in sorted(dump.glob("*.npy")):
        theirs = np.load(file, allow_pickle=False)
        decoder.reset()
        tokens = golden[f"text/{file.stem}/tokens"].astype(np.int64)
        ours = decoder.advance(tokens, all_logits=True)
        p, q = log_softmax(theirs), log_softmax(ours)
        divergences.append((np.exp(p) * (p - q)).sum(axis=-1))
        differences.append(np.abs(theirs - ours).max(axis=-1))
        agreements.append(theirs.argmax(axis=-1) == ours.argmax(axis=-1))
    return {
        "positions": int(np.concatenate(divergences).size),
        "mean_kl_nats": float(np.concatenate(divergences).mean()),
        "max_kl_nats": float(np.concatenate(divergences).max()),
        "max_logit_difference": float(np.concatenate(differences).max()),
        "top1_agreement": float(np.concatenate(agreements).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare with llama.cpp over all logits.")
    parser.add_argument("model", type=Path, help="the GGUF file")
    parser.add_argument("--dump", type=Path, required=True, help="folder of the full logits")
    options = parser.parse_args()
    folder = Path(__file__).parent
    with np.load(folder / "llama_cpp.npz", allow_pickle=False) as file:
        golden = {name: file[name] for name in file.files}
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.package"
        build_package(open_checkpoint(options.model), path, name=options.model.stem)
        package = Package.open(path)
        figures = {
            unit: compare(Decoder(package, unit=unit), golden, options.dump) for unit in UNITS
        }
    record = json.loads((folder / "llama_cpp.json").read_text("utf-8"))
    record["full_vocabulary"] = {
        "note": "our units against llama.cpp, all logits, float32; by compare_full_vocabulary.py",
        **figures,
    }
    (folder / "llama_cpp.json").write_text(
        json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
