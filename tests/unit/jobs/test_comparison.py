"""The rule that tells a wrong op from a differently rounded one."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.program.ops import Op
from harness.jobs.comparison import added_to, code_steps, compare_all, compare_op, first_failure
from harness.jobs.details import OpError
from harness.verdicts import Outcome

OP = Op("L07.ffn.down", "linear", ("x",), ("L07.ffn.down",), ("w",))
Array = npt.NDArray[np.floating]


def outputs(seed: int = 0, rows: int = 6, values: int = 576, scale: float = 3.0) -> Array:
    """(rows, values) with a first row a hundred times larger, as decoders have."""
    x: Array = np.random.default_rng(seed).normal(size=(rows, values))
    x *= scale
    x[0] *= 100
    return x


def rounded(x: Array, seed: int = 1) -> Array:
    """`x` as another float32 implementation gives it: errors of some 1e-6 of each row's norm."""
    noise = np.random.default_rng(seed).normal(size=x.shape) * 1e-6
    near: Array = (x + noise * np.abs(x).max(axis=1, keepdims=True)).astype(np.float32)
    return near


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.floats(1e-4, 1e4))
def test_other_rounding_is_never_blamed(seed: int, scale: float) -> None:
    want = outputs(seed, scale=scale)
    found = compare_op(OP, "local", rounded(want, seed + 1), want, rounded(want, seed + 2))
    assert found.outcome == Outcome.PASS
    assert found.worst_row_rel_l2 is not None and found.worst_row_rel_l2 < 1e-4


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.floats(1e-4, 1e4))
def test_float16_storage_is_not_blamed(seed: int, scale: float) -> None:
    want = outputs(seed, scale=scale)
    largest = np.abs(want).max(axis=1, keepdims=True)
    stored = (want / largest).astype(np.float16).astype(np.float64) * largest
    assert compare_op(OP, "local", stored, want, want).outcome == Outcome.PASS


@pytest.mark.parametrize("factor", [1.02, 0.98])
def test_scale_of_two_percent_is_a_bug_although_the_cosine_is_one(factor: float) -> None:
    want = outputs()
    found = compare_op(OP, "local", want * factor, want, rounded(want))
    assert found.outcome == Outcome.FAIL
    assert found.cosine == pytest.approx(1.0, abs=1e-9)
    assert found.rel_l2 == pytest.approx(0.02, rel=1e-6)
    assert "naive" in found.reason


def test_error_in_a_small_row_is_not_hidden_by_a_large_one() -> None:
    want = outputs()
    got = want.copy()
    got[4] *= 1.02
    found = compare_op(OP, "local", got, want, want)
    assert found.outcome == Outcome.FAIL
    assert "row 4" in found.reason
    assert found.rel_l2 is not None and found.rel_l2 < 2e-3  # pooled, it would have passed


def test_one_lost_output_channel_among_tens_of_thousands_is_found() -> None:
    want = outputs(values=200_000)
    want[:, 1234] = 0.5 * np.sqrt(np.mean(want**2, axis=1))
    got = want.copy()
    got[:, 1234] = 0
    found = compare_op(OP, "local", got, want, want)
    assert found.outcome == Outcome.FAIL
    assert "value 1234" in found.reason


def test_naive_error_widens_the_limit() -> None:
    """Under int8 activations the naive implementation is off too, and so may the engine be."""
    want = outputs()
    noise = np.random.default_rng(5).normal(size=want.shape) * 0.01 * np.abs(want)
    assert compare_op(OP, "local", want + 2 * noise, want, want + noise).outcome == Outcome.PASS
    assert compare_op(OP, "local", want + 4 * noise, want, want + noise).outcome == Outcome.FAIL


def test_not_a_number_is_counted_and_placed() -> None:
    want = outputs()
    got = want.copy()
    got[2, 17] = np.nan
    got[3, 18] = np.inf
    found = compare_op(OP, "local", got, want, want)
    assert (found.outcome, found.non_finite) == (Outcome.FAIL, 2)
    assert "row 2, value 17" in found.reason
    assert found.max_abs is None and found.cosine is None


def test_zero_reference_has_an_explicit_verdict() -> None:
    want = outputs()
    want[3] = 0
    assert compare_op(OP, "local", want, want, want).outcome == Outcome.PASS
    got = want.copy()
    got[3, 0] = 1e-3
    found = compare_op(OP, "local", got, want, want)
    assert found.outcome == Outcome.FAIL
    assert "all zeros" in found.reason
    assert found.worst_row_rel_l2 is None  # infinite: said in the reason instead


def test_output_of_another_width_is_wrong_not_a_crash() -> None:
    want = outputs()
    found = compare_op(OP, "local", want[:, :-1], want, want)
    assert found.outcome == Outcome.FAIL
    assert "575 values" in found.reason


def test_op_that_was_not_reached_is_not_judged() -> None:
    found = compare_op(OP, "free", None, outputs(), None, shorter=True)
    assert found.outcome == Outcome.INVALID
    assert "not reached" in found.reason


def test_rows_that_an_early_end_left_out_are_not_compared() -> None:
    want = outputs()
    assert compare_op(OP, "free", want[:2], want, want, shorter=True).outcome == Outcome.PASS


def test_rows_that_are_missing_for_no_reason_make_the_op_invalid() -> None:
    want = outputs()
    found = compare_op(OP, "local", want[:1], want, want)
    assert found.outcome == Outcome.INVALID
    assert "only 1 of" in found.reason
    assert compare_op(OP, "local", None, want, want).outcome == Outcome.INVALID
    # What is there and wrong stays a finding.
    assert compare_op(OP, "local", want[:1] * 1.02, want, want).outcome == Outcome.FAIL


def test_more_rows_than_were_asked_for_fail() -> None:
    want = outputs()
    assert compare_op(OP, "local", np.concatenate([want, want]), want, want).outcome == Outcome.FAIL


def test_the_earliest_local_failure_is_blamed_and_a_free_one_never() -> None:
    ops = [Op(f"L{n:02d}.ffn.add", "add", ("x",), (f"L{n:02d}.ffn.add",)) for n in range(4)]
    want = {op.id: outputs(n) for n, op in enumerate(ops)}
    free = {name: value * 1.5 for name, value in want.items()}  # all of them off
    local = {**want, "L02.ffn.add": want["L02.ffn.add"] * 1.1, "L03.ffn.add": np.zeros((6, 576))}
    rows = compare_all(ops, "free", free, want, want) + compare_all(ops, "local", local, want, want)
    found = first_failure(rows)
    assert found is not None and (found.op, found.mode) == ("L02.ffn.add", "local")
    assert first_failure(compare_all(ops, "free", free, want, want)) is None


def test_op_with_two_outputs_is_judged_on_both() -> None:
    rope = Op("L00.attn.rope", "rope", ("q", "k"), ("q_rope", "k_rope"))
    want = {"q_rope": outputs(1), "k_rope": outputs(2, values=192)}
    got = {**want, "k_rope": want["k_rope"] * 1.02}
    (row,) = compare_all([rope], "local", got, want, want)
    assert row.outcome == Outcome.FAIL


def test_failure_in_prefill_blames_when_it_comes_earlier_in_the_program() -> None:
    ops = [dataclasses.replace(OP, id=f"L{n:02d}.ffn.down", writes=(f"x{n}",)) for n in range(4)]
    want = {f"x{n}": outputs(n) for n in range(4)}

    def rows(mode: str, wrong: int) -> list[OpError]:
        return compare_all(ops, mode, {**want, f"x{wrong}": want[f"x{wrong}"] * 2}, want, want)

    found = first_failure(rows("local", 3) + rows("prefill", 1) + rows("free", 0))
    assert found is not None and (found.op, found.mode) == ("L01.ffn.down", "prefill")
    found = first_failure(rows("local", 2) + rows("prefill", 2))
    assert found is not None and found.mode == "local"


def residual_op() -> Op:
    down = Op("L00.ffn.down", "linear", ("act",), ("down",), ("w",))
    add = Op("L00.ffn.add", "add", ("before", "down"), ("after",))
    parts = {"parts": (down, add)}
    return Op("L00.ffn.down", "fused", ("act", "before"), ("after",), ("w",), parts)


def test_a_residual_does_not_hide_what_a_fused_op_adds_to_it() -> None:
    """The residual is 2,000 times what is added: pooled with it, 2 % of that would be nothing."""
    rng = np.random.default_rng(3)
    before = rng.normal(size=(4, 64)).astype(np.float32).astype(np.float64) * 2000
    added = rng.normal(size=(4, 64))
    reference = {"act": added, "before": before, "after": before + added}
    wrong = {"after": (before + 1.02 * added).astype(np.float32)}
    naive = {"after": (before + added).astype(np.float32)}
    op = residual_op()
    assert added_to(op) == {"after": "before"}
    (alone,) = compare_all([op], "local", wrong, reference, naive)
    assert alone.outcome == Outcome.FAIL
    (good,) = compare_all([op], "local", naive, reference, naive)
    assert good.outcome == Outcome.PASS
    (free,) = compare_all([op], "free", wrong, reference, naive)
    assert free.outcome == Outcome.PASS  # there the residual is the engine's own


def test_rounding_to_codes_may_begin_in_any_row_and_op() -> None:
    """Free runs with few-bit codes: an error as large as the naive one's so far is none."""
    rng = np.random.default_rng(4)
    ops = [Op(f"L00.x{n}", "rmsnorm", (), (f"b{n}",)) for n in range(3)]
    want = {f"b{n}": rng.normal(size=(5, 32)) for n in range(3)}
    naive = {name: values.copy() for name, values in want.items()}
    naive["b1"][2] *= 1.05  # the naive run was unlucky here
    board = {name: values.copy() for name, values in want.items()}
    board["b2"][4] *= 1.05  # and the board there
    strict = compare_all(ops, "free", board, want, naive)
    assert [row.outcome for row in strict] == ["pass", "pass", "fail"]
    loose = compare_all(ops, "free", board, want, naive, scattered=True)
    assert [row.outcome for row in loose] == ["pass", "pass", "pass"]
    board["b0"][0] *= 1.05  # before any code was rounded
    early = compare_all(ops, "free", board, want, naive, scattered=True)
    assert early[0].outcome == Outcome.FAIL


def test_rows_of_zeros_get_a_verdict_of_their_own() -> None:
    want = outputs()
    empty = want.copy()
    empty[2] = 0
    gone = compare_op(OP, "local", empty, want, want)
    assert (gone.outcome, gone.cosine) == (Outcome.FAIL, 0.0)
    assert gone.reason == "row 2: the board's is all zeros, the reference's is not"
    made = compare_op(OP, "local", want, empty, empty)
    assert made.outcome == Outcome.FAIL
    assert made.reason == "row 2: the reference is all zeros, the board's is not"
    assert compare_op(OP, "local", empty, empty, empty).outcome == Outcome.PASS


def test_errors_are_told_in_steps_of_the_codes_that_values_share() -> None:
    want = np.zeros((2, 70))
    want[0, :32], want[1, 64:] = 127.0, 12.7  # steps of 1, and of 0.1 in a group of six
    error = np.zeros_like(want)
    error[0, 3] = 0.5
    assert code_steps(error, want) == pytest.approx(0.5)
    error[1, 69] = 0.2
    assert code_steps(error, want) == pytest.approx(2.0)
    error[0, 40] = 1e-9  # where the reference is zero there is no step
    assert code_steps(error, want) == np.inf
    assert compare_op(OP, "local", want + error, want, want).int8_steps is None
    rounded_codes = np.rint(outputs(5) / 3) * 3
    assert code_steps(rounded_codes - outputs(5), outputs(5)) > 0.3
