"""What the pages say, as records: before any HTML."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dashboards.data import Details, Results
from dashboards.pages import alignment, bringup, curve, farm, stress
from dashboards.pages.base import Places, clock_note, key_figure
from dashboards.reading import load
from harness.jobs.details import AccuracyDetails, CurveDetails, OpError, StressDetails
from harness.store import Store
from harness.verdicts import Outcome, Verdict


@pytest.fixture(scope="module")
def results(troubled_store: Store) -> Results:
    return load(troubled_store)


def case_of(results: Results, board: str) -> Any:
    return next(case for case in results.cases if case.board.name == board)


def op(name: str, mode: str = "local", **changes: Any) -> OpError:
    values: dict[str, Any] = {
        "op": name,
        "kind": "linear",
        "layer": int(name[1:3]) if name[0] == "L" else None,
        "mode": mode,
        "max_abs": 1e-5,
        "rel_l2": 1e-6,
        "cosine": 1.0,
        "worst_row_rel_l2": 1e-6,
        "base_rel_l2": 1e-6,
        "non_finite": 0,
        "outcome": "pass",
    }
    return OpError(**{**values, **changes})


# Farm


def test_the_headline_names_the_single_board_of_each_kind_of_trouble(results: Results) -> None:
    words = farm.headline(results.cases)
    assert "orin-nano-02 could not be tested" in words
    assert "2 boards fail" in words
    assert "n100-05 gave numbers that cannot be judged" in words
    assert words.endswith("2 pass")


def test_the_headline_of_a_healthy_farm_is_one_short_sentence(store: Store, sample: Any) -> None:
    assert farm.headline(()) == "No results yet"
    sample.record_passing(store)
    assert farm.headline(load(store).cases) == "All 3 boards pass every stage"


def test_infrastructure_comes_before_findings_and_carries_what_it_blocks(results: Results) -> None:
    found = farm.attention(results, Places(results))
    assert [item.run.status for item in found] == ["error", "fail", "fail", "invalid"]
    assert found[0].blocked == ("accuracy", "curve", "stress")
    fault = next(item for item in found if item.case.board.name == "rk3588-01")
    assert fault.run.culprit == "L07.ffn.down"
    assert fault.link.endswith("/alignment.html")


def test_an_error_without_measurements_links_to_its_stage_of_the_bring_up(results: Results) -> None:
    found = farm.attention(results, Places(results))
    assert found[0].link.endswith("index.html#stage-tiny")


def test_a_blocked_stage_is_told_with_its_cause_not_as_a_change_of_its_own(
    results: Results,
) -> None:
    found = {
        (change.case.board.name, change.stage): change
        for change in farm.changes(results, Places(results))
    }
    assert set(found) == {
        ("orin-nano-02", "tiny"),
        ("pi5-03", "curve"),
        ("pi5-03", "stress"),
        ("rk3588-01", "accuracy"),
    }
    assert found["rk3588-01", "accuracy"].blocked == ("curve", "stress")
    assert not any(change.better for change in found.values())


def test_a_board_that_recovers_is_listed_as_better(store: Store, sample: Any) -> None:
    book = sample.Recorder(store)
    book.campaign("harness", "bringup")
    book.run("b1", "tiny", Verdict(outcome=Outcome.FAIL, headline="token 5 differs"))
    book.campaign("harness", "bringup")
    book.run("b1", "tiny", sample.tiny_verdict())
    results = load(store)
    (change,) = farm.changes(results, Places(results))
    assert change.better
    assert (change.before.status, change.after.status) == ("fail", "pass")


def test_a_warning_is_told_with_its_reasons_on_the_farm_page(results: Results) -> None:
    found = {
        (item.case.board.name, item.run.stage): item.reasons
        for item in farm.warned(results, Places(results))
    }
    assert found == {
        ("pi5-03", "curve"): ("Steps in the time per token.",),
        ("pi5-03", "stress"): (
            "Dialogues that grew to the context limit.",
            "Speed of the last minutes over the early ones.",
        ),
    }


def test_a_run_that_must_not_be_judged_shows_no_figure(results: Results) -> None:
    assert key_figure(case_of(results, "n100-05").runs["curve"]) == ""
    assert key_figure(case_of(results, "pi5-03").runs["curve"]).endswith("tok/s")


def test_boards_whose_names_look_alike_get_pages_of_their_own(store: Store, sample: Any) -> None:
    book = sample.Recorder(store)
    book.campaign("harness", "bringup")
    for name in ("Board A", "board/a", "../board a", "board a"):
        book.run(name, "tiny", sample.tiny_verdict())
    results = load(store)
    places = Places(results)
    paths = {places.case(case) for case in results.cases}
    assert len(paths) == 4
    assert all(path.startswith("boards/") and ".." not in path for path in paths)


# Bring-up


def test_the_memory_bar_is_the_sum_of_its_parts_against_the_budget(results: Results) -> None:
    bar = bringup.memory(case_of(results, "pi5-03"))
    assert bar is not None
    ((_, segments),) = bar.rows
    assert [segment.name for segment in segments][:2] == ["Weights", "KV cache"]
    ends = [round(segment.x + segment.width, 1) for segment in segments]
    assert ends[:-1] == [round(segment.x, 1) for segment in segments[1:]]
    (limit,) = bar.limits
    assert limit.name == "budget"
    assert limit.x == pytest.approx(100 / 1.03, abs=0.2)  # 600 MiB is the largest of all


def test_the_speed_bars_are_on_the_scale_of_the_bandwidth_ceiling(results: Results) -> None:
    bars = bringup.ceiling(case_of(results, "pi5-03"))
    assert bars is not None
    widths = {words: segments[0].width for words, segments in bars.rows}
    assert widths["Bandwidth allows"] > widths["Start of context"] > widths["End of context"] > 0
    details = CurveDetails.model_validate(_details(results, "pi5-03", "curve"))
    assert details.ceiling_tokens_per_s is not None
    share = widths["Start of context"] / widths["Bandwidth allows"]
    assert share == pytest.approx(
        details.tokens_per_s_start / details.ceiling_tokens_per_s, abs=0.01
    )


def _details(results: Results, board: str, stage: str) -> dict[str, Any]:
    details = case_of(results, board).runs[stage].details
    models = {"curve": CurveDetails, "stress": StressDetails, "accuracy": AccuracyDetails}
    return {name: details[name] for name in models[stage].model_fields}


def test_the_largest_errors_begin_with_the_op_that_failed(results: Results) -> None:
    top = bringup.top_ops(case_of(results, "rk3588-01"))
    assert (top[0].op, top[0].outcome) == ("L07.ffn.down", "fail")
    sizes = [error.rel_l2 for error in top[1:]]
    assert sizes == sorted(sizes, reverse=True)


def test_a_board_that_was_never_reached_has_a_page_without_measurements(
    store: Store, sample: Any
) -> None:
    book = sample.Recorder(store)
    book.campaign("harness", "bringup")
    book.run("gone", "tiny", Verdict(outcome=Outcome.ERROR, headline="no route"))
    results = load(store)
    (case,) = results.cases
    values = bringup.page(case, Places(results)).values
    assert values["ceiling"] is None
    assert values["memory"] is None
    assert values["thermal"] is None
    assert values["trouble"].headline == "no route"


def test_notes_name_the_planted_fault_and_unknown_clocks(results: Results, sample: Any) -> None:
    (fault,) = bringup.notes(case_of(results, "rk3588-01"))
    assert sample.FAULT in fault
    assert "on purpose" in fault
    (clocks,) = bringup.notes(case_of(results, "a53-04"))
    assert "throttling cannot be ruled out" in clocks


def test_a_reason_for_invalid_clocks_is_passed_on(results: Results) -> None:
    assert "fell by 20 %" in clock_note(case_of(results, "n100-05").runs["curve"])
    assert clock_note(case_of(results, "pi5-03").runs["curve"]) == ""


def test_numbers_against_limits_and_what_did_not_pass_are_always_visible(
    results: Results,
) -> None:
    values = bringup.page(case_of(results, "pi5-03"), Places(results)).values
    step = next(step for step in values["steps"] if step.stage == "stress")
    assert [check.name for check in step.telling] == ["leak", "context_limit", "sustained_speed"]
    assert [check.name for check in step.quiet] == ["golden_same"]


def test_a_long_list_of_features_is_cut_to_what_kernels_are_chosen_by(
    store: Store, sample: Any
) -> None:
    many = ["fpu", "vme", "sse2", "avx2", "fma", *(f"x{index}" for index in range(20))]
    book = sample.Recorder(store)
    book.campaign("harness", "bringup")
    book.run("b1", "tiny", sample.tiny_verdict(), known=sample.facts(features=many))
    facts = dict(bringup.board_facts(load(store).cases[0]))
    assert facts["Features"] == "avx2, fma and 23 more"
    assert facts["Cores"] == "4 × cortex-a55 at 1\u202f800 MHz, 4 × cortex-a76 at 2\u202f304 MHz"


# Curve


def test_slowing_down_is_marked_in_time_and_not_at_a_length(sample: Any) -> None:
    details = CurveDetails.model_validate(sample.curve_verdict(5, throttled=True).details)
    by_length = curve.curve_chart(details.points, details.fit)
    in_time = curve.wall_chart(details.points, details.fit)
    assert [mark for mark in by_length.marks if "jump" in mark.style] == []
    assert len([piece for piece in by_length.panels[0].lines if piece.style == "fit"]) == 1
    assert in_time is not None
    (mark,) = [mark for mark in in_time.marks if "jump" in mark.style]
    third = [mark for mark in in_time.marks if mark.style == "sweep"][2]
    assert mark.label == "1"
    assert mark.x == pytest.approx(third.x, abs=1)  # the sample slows down with its third sweep


def test_the_fitted_line_is_cut_where_it_jumps(sample: Any) -> None:
    details = CurveDetails.model_validate(sample.curve_verdict(2, jump=True).details)
    chart = curve.curve_chart(details.points, details.fit)
    assert len(chart.panels[0].lines) == 2
    assert [mark.label for mark in chart.marks] == ["1"]
    assert len(chart.panels[0].dots) == len(details.points)
    smooth = CurveDetails.model_validate(sample.curve_verdict(2).details)
    assert len(curve.curve_chart(smooth.points, smooth.fit).panels[0].lines) == 1


def test_a_larger_time_is_drawn_higher(sample: Any) -> None:
    details = CurveDetails.model_validate(sample.curve_verdict(1).details)
    dots = curve.curve_chart(details.points, details.fit).panels[0].dots
    first, last = min(dots, key=lambda dot: dot.x), max(dots, key=lambda dot: dot.x)
    assert last.y < first.y


def test_sweeps_differ_in_shape_not_only_in_colour(sample: Any) -> None:
    details = CurveDetails.model_validate(sample.curve_verdict(1).details)
    dots = curve.curve_chart(details.points, details.fit).panels[0].dots
    assert {(dot.style, dot.shape) for dot in dots} == {
        ("s1", "circle"),
        ("s2", "square"),
        ("s3", "triangle"),
    }


def test_the_fit_is_interpolated_between_its_nodes_only(sample: Any) -> None:
    details = CurveDetails.model_validate(sample.curve_verdict(1).details)
    fit = details.fit.model_copy(update={"fitted": ((10, 1.0), (20, 3.0))})
    assert curve.fitted_at(fit, 15) == 2.0
    assert curve.fitted_at(fit, 9) is None
    assert curve.fitted_at(fit.model_copy(update={"fitted": ()}), 15) is None


def test_clock_and_temperature_have_a_panel_only_where_they_are_known(sample: Any) -> None:
    for clocks, panels in ((True, 3), (False, 1)):
        details = CurveDetails.model_validate(sample.curve_verdict(1, clocks=clocks).details)
        chart = curve.wall_chart(details.points, details.fit)
        assert chart is not None
        assert len(chart.panels) == panels


def test_a_curve_of_one_point_still_draws(sample: Any) -> None:
    details = CurveDetails.model_validate(sample.curve_verdict(1).details)
    point = details.points[:1]
    fit = details.fit.model_copy(update={"fitted": ((point[0].length, 41.0),)})
    assert len(curve.curve_chart(point, fit).panels[0].dots) == 1
    assert curve.wall_chart(point, fit) is None
    assert len(curve.curve_chart(point, None).panels) == 1


# Alignment


def test_the_first_bad_op_is_ringed_in_every_map(sample: Any) -> None:
    details = AccuracyDetails.model_validate(sample.accuracy_verdict(3, fault=True).details)
    found = alignment.maps(details.ops, details.first_bad_op)
    assert [one.metric for one in found] == ["rel_l2", "cosine", "max_abs"]
    for one in found:
        assert len(one.heats) == 2
        for _, drawn in one.heats:
            assert drawn.ring is not None
            assert drawn.ring.title.startswith("L07.ffn.down: ")
            assert drawn.ring.style.endswith(" bad")
            assert len(drawn.cells) == len(details.ops) / 2


def test_values_that_are_not_finite_and_ops_not_reached_look_different() -> None:
    broken = op(
        "L00.attn.mix", max_abs=None, rel_l2=None, cosine=None, non_finite=9, outcome="fail"
    )
    missing = op("L01.attn.mix", max_abs=None, rel_l2=None, cosine=None, outcome="invalid")
    assert alignment.cell_style(broken, "rel_l2") == "nonfinite bad"
    assert alignment.cell_style(missing, "rel_l2") == "absent"
    assert "9 values not finite" in alignment.say(broken, "cosine")
    assert alignment.say(missing, "cosine") == "not compared"


def test_a_cosine_below_a_limit_is_of_a_stronger_level() -> None:
    levels = [
        alignment.cell_style(op("L00.attn.q", cosine=value), "cosine")
        for value in (1.0, 0.99999999, 0.9999, 0.985, 0.94)
    ]
    assert levels == ["h0", "h1", "h3", "h4", "h5"]


def test_columns_are_embedding_layers_head_in_the_order_of_the_program() -> None:
    ops = [op("embed.tokens"), op("L10.attn.q"), op("L02.attn.q"), op("head.logits")]
    assert [name for name, _ in alignment.layer_columns(ops)] == ["embed", "2", "10", "head"]


def test_the_strip_shows_the_worst_op_of_a_layer() -> None:
    ops = [op("L00.attn.q", cosine=0.999), op("L00.attn.k", cosine=0.97), op("L00.attn.v")]
    worst = alignment.worst_of_columns(ops, [("0", 0)])
    assert worst["local", "0"].op == "L00.attn.k"


def test_a_text_difference_is_marked_on_both_sides() -> None:
    gone, new = alignment.diff("the red fox ran", "the blue fox ran on")
    assert [(piece.kind, piece.text) for piece in gone] == [
        ("same", "the "),
        ("gone", "red"),
        ("same", " fox ran"),
    ]
    assert "".join(piece.text for piece in new) == "the blue fox ran on"
    assert [piece.text for piece in new if piece.kind == "new"] == ["blue", " on"]


def test_very_long_texts_are_compared_up_to_a_bound_and_shown_whole() -> None:
    text = "word " * 20_000
    gone, new = alignment.diff(text, text)
    assert "".join(piece.text for piece in gone) == text
    assert all(piece.kind == "same" for piece in new)


# Stress


def test_bands_of_low_clocks_follow_the_rule_of_the_verdict(results: Results, sample: Any) -> None:
    case = case_of(results, "pi5-03")
    details = StressDetails.model_validate(sample.stress_verdict(2, throttle=True).details)
    ((start, end),) = stress.throttle_bands(case, details.samples)
    assert start == pytest.approx(0.55 * 1800, abs=5)
    assert end == pytest.approx(0.72 * 1800, abs=5)
    steady = StressDetails.model_validate(sample.stress_verdict(2).details)
    assert stress.throttle_bands(case, steady.samples) == []
    little = [s.model_copy(update={"clock_mhz": 0.93 * 2304}) for s in details.samples[-60:]]
    assert len(stress.throttle_bands(case, [*steady.samples[:-60], *little])) == 1


def test_a_virtual_board_has_no_bands_for_the_clocks_of_its_host(
    results: Results, sample: Any
) -> None:
    case = case_of(results, "pi5-03")
    virtual = dataclasses.replace(case, board=dataclasses.replace(case.board, virtual=True))
    details = StressDetails.model_validate(sample.stress_verdict(2, throttle=True).details)
    assert stress.throttle_bands(virtual, details.samples) == []
    strips = [stress.thermal_of(one, details.samples, ()) for one in (case, virtual)]
    assert [len(strip.bands) for strip in strips if strip] == [1, 0]


def test_golden_hash_that_is_missing_proves_nothing(results: Results) -> None:
    run = case_of(results, "pi5-03").runs["stress"]
    for before, after in (("5d1e", ""), ("", "")):
        raw = {"golden_before": before, "golden_after": after}
        assert stress.golden_words(dataclasses.replace(run, details=Details("stress", raw))) == ""


def test_a_board_without_clocks_has_no_panel_and_no_band_for_them(sample: Any) -> None:
    details = StressDetails.model_validate(sample.stress_verdict(4, clocks=False).details)
    chart = stress.stress_chart(details.samples, details.turns)
    assert chart is not None
    titles = [panel.title for panel in chart.panels]
    assert "Clock, MHz" not in titles
    assert titles[0] == "Tokens per second"
    assert chart.bands == ()
    assert stress.thermal_strip(details.samples) is None


def test_cancelled_and_killed_turns_are_marked_differently(sample: Any) -> None:
    details = StressDetails.model_validate(sample.stress_verdict(2).details)
    chart = stress.stress_chart(details.samples, details.turns)
    assert chart is not None
    assert [(mark.style, mark.label) for mark in chart.marks] == [
        ("cancelled", "■"),
        ("killed", "✕"),
    ]


def test_of_many_cancelled_turns_some_are_marked_and_the_legend_says_how_many(sample: Any) -> None:
    details = StressDetails.model_validate(sample.stress_verdict(2).details)
    cancelled = next(turn for turn in details.turns if turn.finish == "cancelled")
    chart = stress.stress_chart(details.samples, [*details.turns, *[cancelled] * 99])
    assert chart is not None
    styles = [mark.style for mark in chart.marks]
    assert styles.count("cancelled") == 20
    assert styles.count("killed") == 1
    assert ("mark cancelled", "■ cancelled generation (every 5. of 100)") in chart.legend


def test_panels_share_one_time_axis_and_do_not_overlap(sample: Any) -> None:
    details = StressDetails.model_validate(sample.stress_verdict(2, throttle=True).details)
    chart = stress.stress_chart(details.samples, details.turns)
    assert chart is not None
    for upper, lower in zip(chart.panels, chart.panels[1:], strict=False):
        assert upper.bottom < lower.top
    assert chart.panels[-1].bottom < chart.height


def test_a_leak_is_told_with_its_size_and_its_evidence(results: Results) -> None:
    run = case_of(results, "pi5-03").runs["stress"]
    assert stress.leak_words(run) == "No leak found: 0.6 MiB over the run (trend p = 0.31)."
    assert stress.golden_words(run).startswith("The same prompt gives the same tokens")
