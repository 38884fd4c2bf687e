"""What every verdict shares."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness.verdicts import Check, Outcome, one_line


def test_a_headline_is_one_line_that_is_cut_between_words() -> None:
    assert one_line("a\nb   c") == "a b c"
    assert one_line("takes 25% of a token", 18) == "takes 25% of a …"
    assert one_line("takes 25% of a token", 20) == "takes 25% of a token"
    assert one_line("x" * 30, 10) == "x" * 9 + "…"  # one word: a hash, a path


@given(st.text(), st.integers(2, 200))
def test_it_keeps_to_the_limit_and_begins_as_the_text_does(text: str, limit: int) -> None:
    line = one_line(text, limit)
    assert len(line) <= limit
    assert " ".join(text.split()).startswith(line.removesuffix("…").rstrip())


def test_a_check_without_a_limit_is_noted_unless_it_objects() -> None:
    told = Check(name="leak", outcome=Outcome.PASS, measured=None, limit=None, sentence="short")
    assert told.noted
    assert not told.model_copy(update={"limit": 0.0}).noted
    assert not told.model_copy(update={"outcome": Outcome.WARN}).noted
