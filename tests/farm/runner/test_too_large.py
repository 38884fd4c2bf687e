"""A model that is larger than its board's budget: refused before it is sent."""

from __future__ import annotations

from typing import Any

import pytest


def test_a_model_that_does_not_fit_is_never_sent_and_the_result_holds_the_table(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.farm import placing

    sent: list[str] = []
    deploy = placing.deploy

    def watched(session: Any, facts: Any, bundle: Any, packages: Any, **more: Any) -> Any:
        sent.extend(path.name for path in packages)
        return deploy(session, facts, bundle, packages, **more)

    monkeypatch.setattr(placing, "deploy", watched)
    boards = lab.boards("  v: {virtual: {}, budget: {memory_mb: 10}}")
    result = lab.run(boards, stages=["accuracy", "curve"])
    accuracy = result.results["v"]["accuracy"]
    assert (accuracy.outcome.value, accuracy.attempts) == ("fail", 1)
    assert [check.name for check in accuracy.verdict.checks] == ["memory_budget"]
    assert lab.outcomes(result, "v")["curve"] == "blocked"
    assert (sent, result.exit_code) == ([], 1)
    (row, _) = lab.store.campaign_runs(result.id, "v")
    assert row.remote_spool is None  # nothing was started
    assert row.details["memory_table"][0][0] == "weights, mapped"
