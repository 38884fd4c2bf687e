"""The host's half of the tokenizer: text to ids through the `tokenizers` library.

Kept apart from `engine.tokenizer` because a board never needs it: the library is imported only
here, when a first text is encoded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

# Token types, after `enum llama_token_type` of llama.cpp (`include/llama.h`).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


class TokenizerError(ValueError):
    """Tokenizer data or input that cannot be used: says found, expected and remedy."""


# The patterns that cut text into words before byte-pair merges; each cuts what the one before left.
# They are those of the models' own tokenizer.json files. llama.cpp gives each a name
# (`tokenizer.ggml.pre`; `src/llama-vocab.cpp`), and several names share one set.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)

_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (rf"{_ENGLISH}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",),
    "qwen2": (rf"{_ENGLISH}|{_LETTERS}|\p{{N}}|{_REST}",),
    "tekken": (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_REST_SLASH}",),
    "gpt-4o": (rf"{_CASED[0]}{_ENGLISH}?|{_CASED[1]}{_ENGLISH}?|\p{{N}}{{1,3}}|{_REST_SLASH}",),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_SHARED: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (
        *("phi-2", "jina-es", "jina-de", "gigachat", "jina-v1-en", "jina-v2-es", "jina-v2-de"),
        *("jina-v2-code", "roberta-bpe", "mpt", "olmo", "jais"),
    ),
    "smollm": ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    "llama-bpe": (
        *("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral"),
        *("dbrx", "smaug-bpe", "chatglm-bpe"),
    ),
    "qwen2": ("stablelm2", "deepseek-r1-qwen", "megrez"),
}
_FAMILY_OF: Mapping[str, str] = {
    **{family: family for family in _FAMILIES},
    **{name: family for family, names in _SHARED.items() for name in names},
}
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "tekken")


def known_pretokenizers() -> list[str]:
    """The values of `tokenizer.ggml.pre` that are read."""
    return sorted(_FAMILY_OF)


def pretokenizer_family(name: str | None) -> tuple[str, str]:
    """The set of patterns for a `tokenizer.ggml.pre`, and a warning ("" when there is none).

    Raises TokenizerError for a name that is not known, listing those that are.
    """
    if name in (None, "", "default"):
        return "default", (
            f"tokenizer.ggml.pre is {repr(name) if name else 'missing'}: words are cut by "
            "llama.cpp's `default` rules, which may not be this model's, so text may be encoded "
            "worse than it should be; convert the model again with a current converter"
        )
    family = _FAMILY_OF.get(str(name))
    if family is None:
        raise TokenizerError(
            f"tokenizer.ggml.pre is {name!r}, which is not known; known: "
            f"{', '.join(known_pretokenizers())}; give token ids instead of text"
        )
    return family, ""


def whole_words(data: Mapping[str, Any]) -> bool:
    """Whether the model looks a whole word up before merging, and begins every text with BOS."""
    return data.get("pre") in _WHOLE_WORDS


def make_encoder(
    data: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    *,
    parsed: Collection[int],
    prefix: bool,
    warn: Callable[[str], None],
) -> Any:
    """A `tokenizers.Tokenizer` for a vocabulary (texts and types by id).

    `parsed` are the token types whose spelling in a text stands for the token itself; `prefix`
    puts a space before each stretch of text, as SentencePiece models want. Raises TokenizerError.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise TokenizerError(
            "encoding text needs the `tokenizers` library, which is not installed here; "
            "encode on the host and send token ids"
        ) from error
    if data["kind"] == "huggingface":
        return _from_tokenizer_json(data["tokenizer_json"], with_special=CONTROL in parsed)
    ids = {text: index for index, text in enumerate(tokens)}
    if data["kind"] == "gpt2":
        encoder = _byte_level_bpe(data, tokens, types, warn)
    else:
        encoder = _sentencepiece_bpe(data, tokens, types, ids, prefix)
    encoder.add_tokens(
        [
            tokenizers.AddedToken(text, normalized=False, special=kind != USER_DEFINED)
            for text, kind in zip(tokens, types)
            if kind in parsed and text
        ]
    )
    return encoder


def _from_tokenizer_json(raw: Mapping[str, Any], *, with_special: bool) -> Any:
    from tokenizers import Tokenizer

    added = [
        token for token in raw.get("added_tokens") or () if with_special or not token.get("special")
    ]
    try:
        return Tokenizer.from_str(json.dumps({**raw, "added_tokens": added}))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"tokenizer.json cannot be used: {error}") from error


def _byte_level_bpe(
    data: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    warn: Callable[[str], None],
) -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    ids = {text: index for index, text in enumerate(tokens)}
    # A vocabulary of single bytes needs no merges, and writers leave an empty list out.
    needed = any(kind == NORMAL and len(text) > 1 for text, kind in zip(tokens, types))
    merges, unusable = [], 0
    for line in texts(data.get("merges", None if needed else []), "merges"):
        cut = line.find(" ", 1)  # a merge may begin with a space of its own
        left, right = line[:cut], line[cut + 1 :]
        if cut > 0 and {left, right, left + right} <= ids.keys():
            merges.append((left, right))
        else:
            unusable += 1
    if unusable:
        warn(f"tokenizer: {unusable} merges name tokens that the vocabulary lacks")
    encoder = Tokenizer(models.BPE(dict(ids), merges, ignore_merges=whole_words(data)))
    cuts: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in _FAMILIES[pretokenizer_family(data.get("pre"))[0]]
    ]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    return encoder


def _sentencepiece_bpe(
    data: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    ids: Mapping[str, int],
    prefix: bool,
) -> Any:
    from tokenizers import Tokenizer, models, normalizers

    scores = numbers(data.get("scores"), "scores", len(tokens), kind=float)
    # A SentencePiece model joins the neighbours whose union has the best score; the same as ranked
    # merges, one for each way of cutting a piece into two pieces.
    pieces = {
        text: index for text, index in ids.items() if types[index] in (NORMAL, USER_DEFINED, UNUSED)
    }
    ranked = sorted(
        (-scores[index], index, cut)
        for text, index in pieces.items()
        for cut in range(1, len(text))
        if text[:cut] in pieces and text[cut:] in pieces
    )
    merges = [(tokens[index][:cut], tokens[index][cut:]) for _, index, cut in ranked]
    unknown = data.get("unk_id")
    if unknown is not None and (type(unknown) is not int or not 0 <= unknown < len(tokens)):
        raise TokenizerError(f"tokenizer: unk_id is {unknown!r} of {len(tokens)} tokens")
    encoder = Tokenizer(
        models.BPE(
            dict(ids),
            merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    encoder.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    return encoder


def texts(found: Any, name: str) -> list[str]:
    """`found` as a list of strings; raises TokenizerError for anything else."""
    if not isinstance(found, (list, tuple)) or not all(isinstance(text, str) for text in found):
        raise TokenizerError(f"tokenizer: its {name} are missing or no list of strings")
    return list(found)


def numbers(
    found: Any, name: str, length: int | None = None, *, kind: type[int] | type[float] = int
) -> list[Any]:
    """`found` as a list of numbers, `length` of them if given; else raises TokenizerError."""
    if not isinstance(found, (list, tuple)) or not all(
        isinstance(item, (int, kind)) and not isinstance(item, bool) for item in found
    ):
        raise TokenizerError(f"tokenizer: its {name} are missing or no list of numbers")
    if length is not None and len(found) != length:
        raise TokenizerError(
            f"tokenizer: {len(found)} {name} for {length} tokens, one each expected"
        )
    return list(found)
