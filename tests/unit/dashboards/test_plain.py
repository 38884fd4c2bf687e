from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboards import plain


@given(st.text(st.characters(), max_size=60))
def test_no_character_that_hides_or_reorders_text_survives(text: str) -> None:
    shown = plain.visible(text)
    shown.encode()  # lone surrogates could not be written to a page
    for character in shown:
        if character in "\n\t":
            continue
        assert unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp")
        assert unicodedata.bidirectional(character) not in ("RLO", "LRO", "RLE", "LRE", "RLI")


def test_controls_are_named_so_that_a_reader_sees_what_a_board_sent() -> None:
    assert plain.visible("\x1b[31mred\x07") == "⟨ESC⟩[31mred⟨U+0007⟩"
    assert plain.visible("a\u202eb\u200f") == "a⟨U+202E⟩b⟨U+200F⟩"
    assert plain.visible("line\r\nnext\ttab") == "line\nnext\ttab"


def test_ordinary_text_of_any_language_stays_as_it_is() -> None:
    text = "naïve – 模型 – שלום – 🙂"
    assert plain.visible(text) == text


@given(st.text(max_size=200))
def test_a_slug_is_one_harmless_file_name(text: str) -> None:
    slug = plain.slug(text)
    assert slug
    assert len(slug) <= 60
    assert set(slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-")
    assert not slug.startswith((".", "-"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (256, "256"),
        (46080, "46\u202f080"),
        (34.1377, "34.1"),
        (1234.5, "1\u202f234"),
        (0.0112, "0.0112"),
        (0.9998, "0.9998"),
        (0.99999, "0.99999"),
        (1.0, "1"),
        (3.14e-7, "3.14e\u22127"),
        (-2.5, "\u22122.5"),
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "–"),
        ("as text", "as text"),
    ],
)
def test_numbers_read_as_people_write_them(value: object, text: str) -> None:
    assert plain.number(value) == text


@given(st.floats(0.9, 1, exclude_max=True))
def test_a_cosine_below_one_is_not_shown_as_one_unless_it_is_very_close(value: float) -> None:
    assert plain.cosine(value) != "1" or 1 - value < 1e-7


@given(st.floats(-1e300, 1e300))
def test_a_number_keeps_its_size_through_formatting(value: float) -> None:
    text = plain.number(value).replace("\u2212", "-").replace("\u202f", "")
    assert float(text) == pytest.approx(value, rel=6e-3, abs=1e-300)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.01, "under 0.1 s"),
        (0.42, "0.42 s"),
        (38, "38 s"),
        (59.9, "60 s"),
        (250, "4 min 10 s"),
        (1800, "30 min"),
        (3725, "1 h 02 min"),
        (None, "–"),
    ],
)
def test_durations_use_the_unit_that_fits(value: float | None, text: str) -> None:
    assert plain.seconds(value) == text


def test_memory_is_told_in_the_unit_that_fits() -> None:
    assert plain.mebibytes(812) == "812 MiB"
    assert plain.mebibytes(7921) == "7.74 GiB"
