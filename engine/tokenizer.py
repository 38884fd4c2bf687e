"""Text to token ids and back, from the data that a model file carries.

Encoding and chat templates use the `tokenizers` and `jinja2` libraries of the lab host. Decoding is
a table of bytes per id and needs neither, so a board can stream text with numpy alone.
"""

from __future__ import annotations

import codecs
import functools
import json
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.encoding import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    TokenizerError,
    make_encoder,
    numbers,
    pretokenizer_family,
    texts,
    whole_words,
)
from engine.formats.bytelevel import character_bytes

# End tokens known by their text; model files often name only one of those that a model emits.
END_TEXTS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "<｜end▁of▁sentence｜>",
        "<end_of_utterance>",
    )
)

_BYTE_TEXT = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")

_log = logging.getLogger(__name__)


class Tokenizer:
    """Made from `Checkpoint.tokenizer` (or `Package.tokenizer`).

    `data["kind"]` is "gpt2" (byte-level BPE), "llama" (SentencePiece BPE with byte fallback) or
    "huggingface" (a tokenizer.json). `warnings` tells what had to be assumed; a pre-tokenizer that
    is not known is among them, and then only decoding works.
    Raises TokenizerError for data of another kind or with parts missing.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data
        self.kind = data.get("kind")
        self.warnings: tuple[str, ...] = ()
        config = data.get("config")  # of a tokenizer.json: tokenizer_config.json
        self._config: Mapping[str, Any] = config if isinstance(config, Mapping) else {}
        if self.kind == "huggingface":
            self._tokens, self._types = _huggingface_vocabulary(data)
            self._byte_level = _mentions(data["tokenizer_json"].get("decoder"), "ByteLevel")
        elif self.kind in ("gpt2", "llama"):
            self._tokens = texts(data.get("tokens"), "tokens")
            self._types = numbers(
                data.get("token_types", [NORMAL] * len(self._tokens)),
                "token types",
                len(self._tokens),
            )
            self._byte_level = self.kind == "gpt2"
        else:
            raise TokenizerError(
                f"tokenizer model {self.kind!r} is not supported, expected gpt2 (byte-level BPE), "
                "llama (SentencePiece) or a tokenizer.json; give token ids instead of text"
            )
        self.vocab_size = len(self._tokens)
        self._ids = {text: index for index, text in enumerate(self._tokens)}
        self.bos_id = self._special("bos")
        self.eos_id = self._special("eos")
        self.stop_ids = self._end_tokens()
        if self.kind == "gpt2":
            # Decoding does without the pre-tokenizer, so an unknown one fails encoding only.
            try:
                self._warn(pretokenizer_family(data.get("pre"))[1])
            except TokenizerError as error:
                self._warn(str(error))
        self._prefix = self.kind == "llama" and bool(data.get("add_space_prefix", True))
        if self.kind == "huggingface" and not self._byte_level:
            self._prefix = _mentions(data["tokenizer_json"].get("decoder"), "Strip") or _mentions(
                data["tokenizer_json"].get("decoder"), "Metaspace"
            )
        self.add_bos = bool(data.get("add_bos", self.kind == "llama" or whole_words(data)))
        self.add_eos = bool(data.get("add_eos", False))
        self._pieces = [self._piece(index) for index in range(self.vocab_size)]

    # ---- text to ids

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of `text`.

        `add_special` adds BOS (once, even if the text spells it) and EOS where the model wants
        them. `parse_special` False reads the spelling of control tokens, such as `<|im_end|>`, as
        plain text: right for text that strangers wrote. Raises TokenizerError for text that no
        UTF-8 can hold, and where the `tokenizers` library is missing.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(f"text cannot be encoded as UTF-8: {error}") from error
        encoder = self._encoder if parse_special else self._plain_encoder
        if self.kind == "huggingface":
            return list(encoder.encode(text, add_special_tokens=add_special).ids)
        ids = list(encoder.encode(text, add_special_tokens=False).ids)
        if add_special and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if add_special and self.add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return ids

    def chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The dialogue as the model's own template writes it, in a sandbox.

        Encode the result with `parse_special=True`. Raises TokenizerError where the model has no
        template, or its template fails or refuses the messages.
        """
        template = self._chat_template()
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise TokenizerError(
                "chat templates need the `jinja2` library, which is not installed here"
            ) from error
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        # What templates find in Transformers, where they were written (`chat_template_utils.py`).
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, **options
        )

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: time.strftime(form)
        try:
            rendered: str = environment.from_string(template).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token="" if self.bos_id is None else self._tokens[self.bos_id],
                eos_token="" if self.eos_id is None else self._tokens[self.eos_id],
            )
            return rendered
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TokenizerError(f"the model's chat template failed: {error}") from error

    # ---- ids to text

    def decode(self, ids: Iterable[int], *, special: bool = True, start: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD.

        `special` False leaves control tokens out. `start` False continues a text, so that the space
        which SentencePiece models put before a text is kept. Raises TokenizerError for an id that
        the vocabulary does not have.
        """
        stream = self.stream(special=special, start=start)
        return "".join([stream.push(token) for token in ids]) + stream.flush()

    def stream(self, *, special: bool = True, start: bool = True) -> Stream:
        """Turns ids into text as they come; options as for `decode`."""
        return Stream(self, special, start and self._prefix)

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for; for SentencePiece with its leading space."""
        if not 0 <= token < self.vocab_size:
            raise TokenizerError(f"token {token} is outside the vocabulary of {self.vocab_size}")
        return self._pieces[token]

    def is_control(self, token: int) -> bool:
        """Whether the token is a mark of the model's format and no text."""
        return self._types[token] in (CONTROL, UNKNOWN)

    def _piece(self, index: int) -> bytes:
        text, kind = self._tokens[index], self._types[index]
        if kind in (CONTROL, USER_DEFINED, UNKNOWN):
            return text.encode("utf-8", "replace")
        if self._byte_level:
            table = character_bytes()
            try:
                return bytes([table[character] for character in text])
            except KeyError:
                return text.encode("utf-8", "replace")
        if kind == BYTE and (spelled := _BYTE_TEXT.match(text)):
            return bytes([int(spelled[1], 16)])
        return text.replace("▁", " ").encode("utf-8", "replace")

    # ---- what the data say

    def _special(self, name: str) -> int | None:
        found = self._data.get(f"{name}_id")
        if self.kind == "huggingface":
            token = self._config.get(f"{name}_token")
            text = token.get("content") if isinstance(token, Mapping) else token
            found = self._ids.get(text) if isinstance(text, str) else None
        return None if found is None else self._checked_id(f"{name}_id", found)

    def _checked_id(self, name: str, found: Any) -> int:
        if type(found) is not int or not 0 <= found < self.vocab_size:
            raise TokenizerError(
                f"tokenizer: {name} is {found!r}, the vocabulary has {self.vocab_size} entries"
            )
        return found

    def _end_tokens(self) -> frozenset[int]:
        found = {self._special(name) for name in ("eos", "eot", "eom")} - {None}
        found.update(index for text, index in self._ids.items() if text in END_TEXTS)
        stops = self._data.get("stop_ids", [])
        found.update(self._checked_id("stop_ids", index) for index in numbers(stops, "stop ids"))
        ends = frozenset(index for index in found if index is not None)
        for index in ends:  # some files mark them as plain text
            self._types[index] = CONTROL
        return ends

    @property
    def has_chat_template(self) -> bool:
        return bool(self._data.get("chat_template") or self._config.get("chat_template"))

    def _chat_template(self) -> str:
        template = self._data.get("chat_template") or self._config.get("chat_template")
        if isinstance(template, list):  # several named templates, as Hugging Face writes them
            named = [item for item in template if isinstance(item, Mapping)]
            named.sort(key=lambda item: item.get("name") != "default")
            template = named[0].get("template") if named else None
        if not isinstance(template, str):
            raise TokenizerError("the model carries no chat template; give plain text instead")
        return template

    def _warn(self, message: str) -> None:
        if message:
            self.warnings = (*self.warnings, message)
            _log.warning("%s", message)

    @functools.cached_property
    def _encoder(self) -> Any:
        return self._make_encoder((CONTROL, USER_DEFINED, UNKNOWN))

    @functools.cached_property
    def _plain_encoder(self) -> Any:
        return self._make_encoder((USER_DEFINED,))

    def _make_encoder(self, parsed: tuple[int, ...]) -> Any:
        return make_encoder(
            self._data,
            self._tokens,
            self._types,
            parsed=parsed,
            prefix=self._prefix,
            warn=self._warn,
        )


class Stream:
    """Text of ids that come one by one. Never hands out part of a character."""

    def __init__(self, tokenizer: Tokenizer, special: bool, strip: bool) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._strips = strip  # whether texts of this model begin with a space that is not theirs
        self._strip = strip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that `token` completes; "" while one is unfinished."""
        piece = self._tokenizer.bytes_of(token)
        if self._tokenizer.is_control(token):
            self._strip = self._strips
            return self._decoder.decode(piece) if self._special else ""
        if self._strip and piece:
            self._strip = False
            piece = piece[1:] if piece[:1] == b" " else piece
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """What an unfinished character leaves behind: U+FFFD, or "" when there is none."""
        return self._decoder.decode(b"", True)


def _mentions(part: Any, kind: str) -> bool:
    """Whether a component of a tokenizer.json, or one inside it, is of this type."""
    if isinstance(part, Mapping):
        return part.get("type") == kind or any(_mentions(item, kind) for item in part.values())
    return isinstance(part, list) and any(_mentions(item, kind) for item in part)


def _huggingface_vocabulary(data: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Token texts by id, and their types, of a tokenizer.json."""
    raw = data.get("tokenizer_json")
    model = raw.get("model") if isinstance(raw, Mapping) else None
    if not isinstance(raw, Mapping) or not isinstance(model, Mapping):
        raise TokenizerError("tokenizer.json: no `model` in it")
    vocabulary = model.get("vocab")
    if model.get("type", "BPE") != "BPE" or not isinstance(vocabulary, Mapping):
        raise TokenizerError(
            f"tokenizer.json: its model is {model.get('type')!r}, byte-pair encoding (BPE) expected"
        )
    added = raw.get("added_tokens") or []
    if not isinstance(added, list) or not all(_is_added_token(item) for item in added):
        raise TokenizerError(
            "tokenizer.json: added_tokens is no list of tokens with id and content"
        )
    entries = [(index, text, NORMAL) for text, index in vocabulary.items()]
    entries += [
        (item["id"], item["content"], CONTROL if item.get("special") else USER_DEFINED)
        for item in added
    ]
    ids = numbers([index for index, _, _ in entries], "token ids")
    size = max(ids, default=-1) + 1
    if not entries or min(ids) < 0 or size > 2 * len(entries):
        raise TokenizerError(
            f"tokenizer.json: ids {min(ids, default=0)} to {size - 1} for {len(entries)} tokens"
        )
    tokens, types = [""] * size, [UNUSED] * size
    for index, text, kind in entries:
        is_byte = kind == NORMAL and model.get("byte_fallback") and _BYTE_TEXT.match(text)
        tokens[index], types[index] = text, BYTE if is_byte else kind
    return tokens, types


def _is_added_token(item: Any) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("content"), str) and "id" in item


__all__ = ["Stream", "Tokenizer", "TokenizerError"]
