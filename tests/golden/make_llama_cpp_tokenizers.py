"""Records llama.cpp's token ids for small vocabularies under each of its pre-tokenizers.

The vocabulary's merges are learnt from the texts without cutting them into words first, so that
nearly every boundary a pre-tokenizer sets, or fails to set, changes the ids. Run it where
`make_llama_cpp.py` runs, from the root of the repository:

    PYTHONPATH=. golden/bin/python tests/golden/make_llama_cpp_tokenizers.py --out tests/golden

Written: `llama_cpp_tokenizers.json` (texts; for each case the tokenizer data, and the ids with
special tokens parsed and not parsed).
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp

from engine.formats.bytelevel import byte_characters
from engine.formats.gguf_writer import write_gguf
from engine.formats.synthetic import SPECIALS, SyntheticCheckpoint

PRETOKENIZERS = (
    "default", "gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o", "falcon",
)  # fmt: skip
MERGES = 500
FIXED = (
    "",
    "hi",
    " hi",
    "  two  spaces   three\n\n\n tab\t\tx",
    "don't we'll I'M IT'S they'Ve 'tis",
    "12345 3.14159 1,000,000 0x1F 2024-01-31",
    "ⅣⅧ ½ ²³ ٣٤ 123456789",
    "日本語のテキスト。中文 한국어",
    "👩‍👩‍👧‍👦🇩🇪 emoji 😀😃",
    "def f(x):\n    return x**2  # comment\n",
    "a<|im_end|>b <|im_start|>  c",
    "\r\n\r\n  \r\n x",
    "nbsp\u00a0em\u2003ideo\u3000",
    "naïve café é e\u0301",
    "CamelCase HTTPServer ABCdef aBC",
    "_under_score__x",
    "   ",
    "\n",
    "a \n b",
    "!!!???...  //path/to\n/x",
    "…—–“quoted” £$€ `code` ~^|",
    "<tool>call</tool> <tool>",
    "हिन्दी में पाठ ไทย",
    "x\n\n\n",
    "A1b2C3 99bottles",
)
PARTS = (
    " ", "  ", "\n", "\r\n", "\t", "a", "b", "The", "the", "'s", "'S", "'ll", "12", "9", "٣", "é",
    "e\u0301", "日", "本", "😀", "!", "..", "/", "$", "`", "<|im_end|>", "<tool>", "_", "-", "É",
    "ß", "\u00a0", "े", "ⅷ", "AB", "cD",
)  # fmt: skip


def texts() -> list[str]:
    generator = random.Random(5)
    mixed = [
        "".join(generator.choice(PARTS) for _ in range(generator.randint(2, 12)))
        for _ in range(120)
    ]
    return [*FIXED, *mixed]


def learn(lines: list[list[str]]) -> list[tuple[str, str]]:
    """The most frequent pair joined again and again: byte-pair merges."""
    merges = []
    while len(merges) < MERGES:
        counts = collections.Counter(pair for line in lines for pair in itertools.pairwise(line))
        # Not the pair that makes a special token: that has its own entry.
        found = [pair for pair in counts if "".join(pair) not in (*SPECIALS, "<tool>")]
        if not found:
            break
        best = max(found, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        for line in lines:
            at = 0
            while at < len(line) - 1:
                if (line[at], line[at + 1]) == best:
                    line[at : at + 2] = ["".join(best)]
                at += 1
    return merges


def byte_level(lines: list[str]) -> dict[str, Any]:
    table = byte_characters()
    merges = learn([[table[byte] for byte in line.encode()] for line in lines])
    tokens = [*table, *SPECIALS, "<tool>", *("".join(pair) for pair in merges)]
    return {
        "kind": "gpt2",
        "tokens": tokens,
        "token_types": [1] * 256 + [3] * 3 + [4] + [1] * len(merges),
        "merges": [" ".join(pair) for pair in merges],
        "bos_id": 256,
        "eos_id": 258,
    }


def sentencepiece(lines: list[str]) -> dict[str, Any]:
    lines = ["▁" + line.replace(" ", "▁") for line in lines]
    # Characters from U+0590 on have no piece of their own, so they fall back to bytes.
    known = re.compile("[\\u0001-\u058f▁]+")
    merges = learn([list(part) for line in lines for part in known.findall(line)])
    characters = sorted(
        {letter for line in lines for part in known.findall(line) for letter in part}
    )
    pieces = list(dict.fromkeys([*characters, *("".join(pair) for pair in merges)]))
    return {
        "kind": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces],
        "token_types": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "bos_id": 1,
        "eos_id": 2,
        "unk_id": 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Record llama.cpp's token ids.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the golden file")
    options = parser.parse_args()
    lines = texts()
    data = {"byte_level": byte_level(lines), "sentencepiece": sentencepiece(lines)}
    cases: dict[str, Any] = {
        name: {"data": "byte_level", "extra": {"pre": name}} for name in PRETOKENIZERS
    }
    cases["sentencepiece"] = {"data": "sentencepiece", "extra": {}}
    cases["sentencepiece without prefix"] = {
        "data": "sentencepiece",
        "extra": {"add_space_prefix": False},
    }
    with tempfile.TemporaryDirectory() as folder:
        for case in cases.values():
            tokenizer = {**data[case["data"]], **case["extra"]}
            model = SyntheticCheckpoint(0, vocab=len(tokenizer["tokens"]), tokenizer=False)
            model.tokenizer = tokenizer
            path = Path(folder) / "tiny.gguf"
            write_gguf(model, path)
            llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
            case["parsed"] = [
                llama.tokenize(line.encode(), add_bos=True, special=True) for line in lines
            ]
            case["plain"] = [
                llama.tokenize(line.encode(), add_bos=False, special=False) for line in lines
            ]
            llama.close()
    record = {
        "command": (
            "PYTHONPATH=. python tests/golden/make_llama_cpp_tokenizers.py --out tests/golden"
        ),
        "versions": {"llama-cpp-python": llama_cpp.__version__},
        "texts": lines,
        "data": data,
        "cases": cases,
    }
    (options.out / "llama_cpp_tokenizers.json").write_text(
        json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
