from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from engine.encoding import known_pretokenizers
from engine.formats.synthetic import byte_tokenizer
from engine.tokenizer import Tokenizer, TokenizerError

BYTES = byte_tokenizer(400)


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """Bytes, and the pieces of "hello" after a space."""
    pieces = [*"▁helo", "▁h", "el", "lo", "ello", "▁hello"]
    return {
        "kind": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces],
        "token_types": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "bos_id": 1,
        "eos_id": 2,
        "unk_id": 0,
        **changes,
    }


def huggingface(**changes: Any) -> dict[str, Any]:
    """The byte-level vocabulary as the tokenizers library saves it."""
    library = LibraryTokenizer(
        models.BPE(
            {text: index for index, text in enumerate(BYTES["tokens"])},
            [tuple(line.split(" ")) for line in BYTES["merges"]],
        )
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    special = [
        text for text, kind in zip(BYTES["tokens"], BYTES["token_types"], strict=True) if kind == 3
    ]
    library.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return {
        "kind": "huggingface",
        "tokenizer_json": json.loads(library.to_str()),
        "config": {
            "bos_token": "<|endoftext|>",
            "eos_token": {"content": "<|im_end|>", "lstrip": False},
            "chat_template": BYTES["chat_template"],
        },
        **changes,
    }


KINDS = {"byte level": BYTES, "sentencepiece": sentencepiece(), "huggingface": huggingface()}


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=150)
@given(text=st.text())
def test_any_text_comes_back_exactly(kind: str, text: str) -> None:
    tokenizer = Tokenizer(KINDS[kind])
    if kind == "sentencepiece":
        text = text.replace("▁", "")  # the mark for a space cannot be told from a space
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=100)
@given(data=st.data())
def test_stream_gives_the_text_of_decode_in_whole_characters(kind: str, data: Any) -> None:
    tokenizer = Tokenizer(KINDS[kind])
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", list(KINDS))
def test_emoji_over_several_tokens_is_shown_once_it_is_whole(kind: str) -> None:
    tokenizer = Tokenizer(KINDS[kind])
    ids = tokenizer.encode("a😀b", add_special=False)
    assert len(ids) >= 6
    stream = tokenizer.stream()
    shown = [stream.push(token) for token in ids]
    assert [piece for piece in shown if piece] == ["a", "😀", "b"]
    assert stream.flush() == ""


def test_unfinished_character_at_the_end_is_flushed_as_a_replacement() -> None:
    tokenizer = Tokenizer(BYTES)
    ids = tokenizer.encode("é", add_special=False)
    stream = tokenizer.stream()
    assert stream.push(ids[0]) == ""
    assert stream.flush() == "\ufffd"


def test_stream_may_leave_control_tokens_out() -> None:
    tokenizer = Tokenizer(BYTES)
    ids = tokenizer.encode("a<|im_end|>b")
    assert tokenizer.decode(ids) == "a<|im_end|>b"
    assert tokenizer.decode(ids, special=False) == "ab"


def test_continued_text_keeps_the_space_that_a_new_text_loses() -> None:
    tokenizer = Tokenizer(sentencepiece())
    ids = tokenizer.encode("hello", add_special=False)
    assert ids == [tokenizer.vocab_size - 1]
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, start=False) == " hello"


def test_each_stretch_of_text_between_control_tokens_loses_its_added_space() -> None:
    tokenizer = Tokenizer(sentencepiece())
    ids = tokenizer.encode("hello</s>hello", add_special=False)
    assert ids == [tokenizer.vocab_size - 1, 2, tokenizer.vocab_size - 1]
    assert tokenizer.decode(ids) == "hello</s>hello"


def test_decoding_needs_neither_tokenizers_nor_jinja2() -> None:
    code = (
        "import sys, json; sys.modules['tokenizers'] = sys.modules['jinja2'] = None\n"
        "from engine.tokenizer import Tokenizer, TokenizerError\n"
        "from engine.formats.synthetic import byte_tokenizer\n"
        "tokenizer = Tokenizer(byte_tokenizer(256))\n"
        "print(json.dumps(tokenizer.decode(list('é😀'.encode()))))\n"
        "for call in (lambda: tokenizer.encode('x'), lambda: tokenizer.chat([])):\n"
        "    try: call()\n"
        "    except TokenizerError as error: print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    lines = result.stdout.splitlines()
    assert json.loads(lines[0]) == "é😀"
    assert "needs the `tokenizers` library" in lines[1]
    assert "need the `jinja2` library" in lines[2]


@pytest.mark.parametrize("pre", [None, "", "default"])
def test_missing_pretokenizer_falls_back_with_a_warning(
    pre: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = Tokenizer({**BYTES, "pre": pre})
    assert len(tokenizer.warnings) == 1
    assert "cut by llama.cpp's `default` rules" in tokenizer.warnings[0]
    assert tokenizer.warnings[0] in caplog.text
    assert tokenizer.decode(tokenizer.encode("it's 12345!")) == "it's 12345!"


def test_unknown_pretokenizer_lists_the_known_ones_and_still_decodes() -> None:
    tokenizer = Tokenizer({**BYTES, "pre": "martian"})
    assert "martian" in tokenizer.warnings[0]
    assert tokenizer.decode([104, 105]) == "hi"
    with pytest.raises(TokenizerError) as caught:
        tokenizer.encode("hi")
    for name in ("smollm", "llama-bpe", "qwen2", "gpt-2", "default"):
        assert name in known_pretokenizers()
        assert name in str(caught.value)


@pytest.mark.parametrize("pre", known_pretokenizers())
def test_every_known_pretokenizer_encodes(pre: str) -> None:
    tokenizer = Tokenizer({**BYTES, "pre": pre})
    text = "Don't panic: 42 ÄÖ 日本 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def test_control_tokens_in_strangers_text_can_be_read_as_text() -> None:
    for kind in ("byte level", "huggingface"):
        tokenizer = Tokenizer(KINDS[kind])
        end = BYTES["eos_id"]
        assert end in tokenizer.encode("a<|im_end|>")
        plain = tokenizer.encode("a<|im_end|>", parse_special=False)
        assert end not in plain
        assert tokenizer.decode(plain) == "a<|im_end|>"


def test_user_defined_tokens_are_parsed_in_any_text() -> None:
    types = list(BYTES["token_types"])
    index = BYTES["tokens"].index("<|unused_0|>")
    types[index] = 4
    tokenizer = Tokenizer({**BYTES, "token_types": types})
    assert index in tokenizer.encode("a<|unused_0|>", parse_special=False)


def test_bos_is_added_where_the_model_wants_it_and_only_once() -> None:
    tokenizer = Tokenizer(sentencepiece())
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("hello")[0] == 1
    assert tokenizer.encode("<s>hello").count(1) == 1
    assert 1 not in tokenizer.encode("hello", add_special=False)
    assert Tokenizer(BYTES).encode("") == []
    with_end = Tokenizer(sentencepiece(add_eos=True))
    assert with_end.encode("hello")[-1] == 2
    assert with_end.encode("hello</s>").count(2) == 1


def test_all_end_tokens_stop_a_generation() -> None:
    tokens = [*BYTES["tokens"][:-2], "<|eot_id|>", "<|end_of_text|>"]
    tokenizer = Tokenizer({**BYTES, "tokens": tokens, "eom_id": 5})
    expected = {
        BYTES["tokens"].index("<|endoftext|>"),
        BYTES["tokens"].index("<|im_end|>"),
        len(tokens) - 2,
        len(tokens) - 1,
        5,
    }
    assert tokenizer.stop_ids == expected
    assert tokenizer.is_control(len(tokens) - 1)
    assert Tokenizer(huggingface(stop_ids=[7])).stop_ids >= {7, BYTES["eos_id"]}


def test_chat_renders_the_template() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for kind in ("byte level", "huggingface"):
        tokenizer = Tokenizer(KINDS[kind])
        expected = "<|im_start|>user\nHi<|im_end|>\n"
        assert tokenizer.has_chat_template
        assert tokenizer.chat(messages) == expected + "<|im_start|>assistant\n"
        assert tokenizer.chat(messages, add_generation_prompt=False) == expected


def test_named_chat_templates_use_the_default_one() -> None:
    templates = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    assert Tokenizer({**BYTES, "chat_template": templates}).chat([]) == "D"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "chat template failed"),
        ("{{ messages[0]['role'].nothing() }}", "chat template failed"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        (None, "carries no chat template"),
    ],
)
def test_template_that_fails_or_breaks_out_is_refused(template: str | None, expected: str) -> None:
    tokenizer = Tokenizer({**BYTES, "chat_template": template})
    with pytest.raises(TokenizerError, match=expected):
        tokenizer.chat([{"role": "user", "content": "Hi"}])


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(TokenizerError, match="cannot be encoded as UTF-8"):
        Tokenizer(BYTES).encode("a\ud800")


@pytest.mark.parametrize("token", [-1, 400, 10**9])
def test_id_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(TokenizerError, match="outside the vocabulary of 400"):
        Tokenizer(BYTES).decode([token])


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"kind": "bert"}, "'bert' is not supported"),
        ({}, "None is not supported"),
        ({"kind": "gpt2"}, "tokens are missing"),
        ({**BYTES, "token_types": [1]}, "1 token types for 400 tokens"),
        ({**BYTES, "eos_id": 400}, "eos_id is 400"),
        ({"kind": "huggingface"}, "no `model`"),
        ({"kind": "huggingface", "tokenizer_json": {"model": {"type": "WordPiece"}}}, "WordPiece"),
        (
            {"kind": "huggingface", "tokenizer_json": {"model": {"vocab": {"a": 10**12}}}},
            "ids 1000000000000 to 1000000000000 for 1 tokens",
        ),
    ],
)
def test_unusable_data_are_refused(data: dict[str, Any], expected: str) -> None:
    with pytest.raises(TokenizerError, match=expected):
        Tokenizer(data)


@pytest.mark.parametrize("scores", [None, [0.0], ["x"] * 269])
def test_sentencepiece_without_scores_is_refused(scores: Any) -> None:
    with pytest.raises(TokenizerError, match="scores"):
        Tokenizer(sentencepiece(scores=scores)).encode("x")


def test_merges_of_unknown_tokens_are_left_out_with_a_warning() -> None:
    tokenizer = Tokenizer({**BYTES, "merges": [*BYTES["merges"], "zz yy"]})
    assert tokenizer.decode(tokenizer.encode("zzyy the")) == "zzyy the"
    assert any("1 merges name tokens" in warning for warning in tokenizer.warnings)


JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 500), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
KEYS = sorted({*BYTES, *sentencepiece(), *huggingface(), "stop_ids", "add_space_prefix", "eot_id"})


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=100)
@given(changes=st.dictionaries(st.sampled_from(KEYS), JUNK, min_size=1, max_size=3))
def test_junk_in_the_data_gives_an_error_or_a_working_tokenizer(
    kind: str, changes: dict[str, Any]
) -> None:
    with contextlib.suppress(TokenizerError):
        tokenizer = Tokenizer({**KINDS[kind], **changes})
        tokenizer.decode(range(tokenizer.vocab_size))
        tokenizer.encode("the <|im_end|> 1")
        tokenizer.chat([{"role": "user", "content": "x"}])
