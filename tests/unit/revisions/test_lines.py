"""Which positions of a line can be blamed."""

from __future__ import annotations

import pytest

from harness.bisect.lines import Line


def positions(line: Line) -> list[tuple[int, ...]]:
    return [candidate.positions for candidate in line.candidates()]


def test_every_revision_with_a_build_of_its_own_is_a_candidate() -> None:
    assert positions(Line("abcd")) == [(1,), (2,), (3,)]


def test_a_revision_that_changes_nothing_on_a_board_is_none() -> None:
    line = Line("aabbcc")
    assert positions(line) == [(2,), (4,)]
    assert [line.canonical(at) for at in range(6)] == [0, 0, 2, 2, 4, 4]


def test_what_cannot_be_tested_is_one_candidate_with_its_successor() -> None:
    line = Line("abcde")
    line.exclude(2)
    line.exclude(3)
    assert positions(line) == [(1,), (2, 3, 4)]


def test_a_build_that_comes_back_is_on_one_side() -> None:
    # b was reverted: a is good, so no change lies before its second time.
    assert positions(Line("abac")) == [(3,)]
    assert positions(Line("abcb")) == [(1,)]


def test_excluding_a_build_excludes_it_everywhere() -> None:
    line = Line("abbc")
    line.exclude(1)
    assert not line.testable(2)
    assert positions(line) == [(1, 3)]


def test_a_line_needs_two_ends() -> None:
    with pytest.raises(ValueError, match="at least two"):
        Line("a")
