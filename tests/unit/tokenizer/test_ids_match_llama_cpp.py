"""Token ids against those of llama.cpp, for small vocabularies under each pre-tokenizer.

The golden data come from `tests/golden/make_llama_cpp_tokenizers.py`.
"""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from engine.tokenizer import Tokenizer

RECORD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "golden" / "llama_cpp_tokenizers.json").read_text("utf-8")
)
# llama.cpp approximates these two models' patterns: it cuts words at combining marks, and takes
# a letter beyond ASCII for capital and small alike. Ours are the patterns of the models' own
# tokenizer.json.
APPROXIMATED = ("tekken", "gpt-4o")


def is_approximated(text: str) -> bool:
    kinds = [unicodedata.category(character) for character in text if not character.isascii()]
    return any(kind[0] == "M" or kind in ("Lu", "Ll", "Lt") for kind in kinds)


def tokenizer_of(case: str) -> Tokenizer:
    entry = RECORD["cases"][case]
    return Tokenizer({**RECORD["data"][entry["data"]], **entry["extra"]})


@pytest.mark.parametrize("case", list(RECORD["cases"]))
def test_ids_are_those_of_llama_cpp(case: str) -> None:
    tokenizer, compared = tokenizer_of(case), 0
    entry = RECORD["cases"][case]
    for text, parsed, plain in zip(RECORD["texts"], entry["parsed"], entry["plain"], strict=True):
        if case in APPROXIMATED and is_approximated(text):
            continue
        assert tokenizer.encode(text) == parsed, text
        assert tokenizer.encode(text, add_special=False, parse_special=False) == plain, text
        compared += 1
    assert compared > 60


@pytest.mark.parametrize("case", list(RECORD["cases"]))
def test_ids_decode_to_the_text_they_came_from(case: str) -> None:
    tokenizer = tokenizer_of(case)
    for text in RECORD["texts"]:
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text
        assert (
            tokenizer.decode(tokenizer.encode(text, parse_special=False, add_special=False)) == text
        )


def test_pretokenizers_differ_in_the_golden_data() -> None:
    """Otherwise the comparison would not tell one from another."""
    found = {
        json.dumps(entry["plain"])
        for entry in RECORD["cases"].values()
        if entry["data"] == "byte_level"
    }
    assert len(found) == sum(entry["data"] == "byte_level" for entry in RECORD["cases"].values())
