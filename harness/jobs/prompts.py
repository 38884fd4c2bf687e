"""What the stages give the engine to read: a text, a question, dialogues, as token ids.

A model without a tokenizer gets ids from a seeded generator instead; every stage works with those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.tokenizer import Tokenizer, TokenizerError

if TYPE_CHECKING:
    from harness.deploy.models import PreparedModel

TEXT = """The harbour woke before the town did. Boats came in with the tide, low in the water, and \
the women on the quay counted them without a word: seven, eight, nine. On the hill the baker had \
lit his oven at three, as his father had, and the smell of rye bread ran down the lanes ahead of \
the light. In 1884 the lighthouse got its first lamp, a ring of four wicks behind a lens from \
Paris; it turned once in 30 seconds and could be seen for 18 miles. Today a small computer does \
the work. It measures fog, wind (in knots) and the height of the waves, adds a time stamp and \
sends one line a second: `wind=12.5;fog=0;wave=0.8`. Nobody reads these lines. They are written \
to a disk, and every spring somebody deletes the oldest of them to make room. When asked why they \
are kept at all, the harbour master shrugs. "Because the day we need them," he says, "we will need \
all of them." His daughter, who studies mathematics, calls this the price of not knowing the \
question. She is right, of course; but he has seen three storms that no forecast had, and after \
each of them someone came and asked what the sea had done the night before."""

# One that is answered at length, so that the texts are long enough to diverge.
QUESTION = "Explain in detail, step by step, how the water of the sea becomes rain over a mountain."

TURNS = (
    "Tell me about the sea at night.",
    "Why is that so? Give two reasons.",
    "Can you say it again for a child?",
    "What would a sailor answer to that?",
    "Write a short list of five words about it.",
    "Now tell me a story with three of these words.",
    "What happens next in the story?",
    "Who is the main character, and what does she want?",
    "Give the story another end.",
    "Summarise everything so far in one sentence.",
)
# Only for finding what a chat template writes around an answer; no template contains it.
_MARK = "\x00answer\x00"


_tokenizers: dict[str, Tokenizer] = {}  # by package hash; the data are too large to hash each time


def tokenizer(model: PreparedModel) -> Tokenizer | None:
    """The model's tokenizer, made once per package; None when it has none."""
    if model.tokenizer is None:
        return None
    if model.sha256 not in _tokenizers:
        _tokenizers[model.sha256] = Tokenizer(model.tokenizer)
    return _tokenizers[model.sha256]


def decode(model: PreparedModel, ids: Sequence[int]) -> str:
    """Text of some ids; the ids themselves when the model has no tokenizer."""
    found = tokenizer(model)
    return found.decode(list(ids)) if found else " ".join(str(token) for token in ids)


def stop_ids(model: PreparedModel) -> list[int]:
    found = tokenizer(model)
    return sorted(found.stop_ids) if found else []


def text_tokens(model: PreparedModel, count: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """(count,) ids of a real text, repeated when it is shorter."""
    found = tokenizer(model)
    if found is None:
        return random_tokens(model, count, seed)
    ids = found.encode(TEXT)
    return np.array((ids * (count // len(ids) + 1))[:count], np.int64)


def passages(model: PreparedModel, number: int, count: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """(number, count) ids: further texts beside `text_tokens`, each the same real text from another
    sentence on; seeded ids for a model without a tokenizer."""
    found = tokenizer(model)
    if found is None:
        rows = [random_tokens(model, count, seed + 1 + index) for index in range(number)]
        return np.array(rows, np.int64).reshape(number, count)
    sentences = TEXT.split(". ")
    rows = []
    for index in range(1, number + 1):
        first = index * len(sentences) // (number + 1)
        turned = [*sentences[first:], *sentences[:first]]
        ids = found.encode(". ".join(turned))
        rows.append(np.array((ids * (count // len(ids) + 1))[:count], np.int64))
    return np.array(rows, np.int64).reshape(number, count)


def random_tokens(model: PreparedModel, count: int, seed: int) -> npt.NDArray[np.int64]:
    """(count,) ids from Philox, the same on every machine."""
    words = np.random.Philox(key=seed).random_raw(count)
    return (words % np.uint64(model.hyperparameters.vocab)).astype(np.int64)


def question(model: PreparedModel, text: str = QUESTION) -> list[int]:
    """Ids of one question, in the model's chat template where it has one."""
    found = tokenizer(model)
    if found is None:
        return [int(token) for token in random_tokens(model, 24, 1)]
    try:
        return found.encode(found.chat([{"role": "user", "content": text}]), add_special=False)
    except TokenizerError:  # a base model: no template
        return found.encode(text)


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """`first` opens a conversation; each of `later` is appended after an answer."""

    first: list[int]
    later: list[list[int]]


def dialogue(model: PreparedModel, start: int, turns: int = len(TURNS)) -> Dialogue:
    """User turns as ids, beginning with turn `start` of a fixed round of questions.

    What stands between an answer and the next question (its end mark, the roles) is taken from the
    model's template, so that the cached dialogue reads as the template would write it.
    """
    texts = [TURNS[(start + index) % len(TURNS)] for index in range(turns)]
    found = tokenizer(model)
    if found is None:
        parts = [random_tokens(model, 12, 100 + start * 50 + index) for index in range(turns)]
        ids = [[int(token) for token in part] for part in parts]
        return Dialogue(ids[0], ids[1:])
    try:
        first = found.encode(found.chat([{"role": "user", "content": texts[0]}]), add_special=False)
        later = [found.encode(_glue(found, text), add_special=False) for text in texts[1:]]
    except TokenizerError:  # no template: plain roles
        first = found.encode(f"Question: {texts[0]}\nAnswer:")
        later = [
            found.encode(f"\nQuestion: {text}\nAnswer:", add_special=False) for text in texts[1:]
        ]
    return Dialogue(first, later)


def _glue(found: Tokenizer, text: str) -> str:
    """What the template writes after an answer: its end mark, the next question, the next role."""
    whole = found.chat(
        [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _MARK},
            {"role": "user", "content": text},
        ]
    )
    before, mark, after = whole.rpartition(_MARK)
    if not mark or not before:
        raise TokenizerError("the chat template leaves answers out of the dialogue")
    return after
