"""`harness align` and `harness bisect options`, as a user, on boards with planted faults."""

from __future__ import annotations

from typing import Any

from harness.store.searches import Searches

OPTIONS = ["--unit", "packed", "--engine-option", "fused=yes"]


def test_align_names_the_planted_op_and_what_it_does_to_logits_and_text(lab: Any) -> None:
    lab.boards("  one: {virtual: {}}\n")
    model = lab.model.source
    command = ["align", "--board", "one", "--model", str(model), *OPTIONS]
    command += ["--prompts", "3", "--positions", "24", "--rows", "4", "--text-tokens", "24"]
    fault = ["--board-env", "one:ENGINE_FAULT=swap-heads:1@L01.attn.mix"]
    code, told = lab.command(*command, *fault, "--json").finish()
    assert code == 1
    found = told["boards"]["one"]["accuracy"]
    assert (found["outcome"], found["culprit"]) == ("fail", "L01.attn.mix")
    details = told["details"]["one"]
    assert details["first_bad_op"] == "L01.attn.mix"
    assert details["logits"]["prompts"] == 3
    assert details["text"]["tokens"] > 0
    assert lab.spools() == []
    assert lab.leases.held() == []


def test_a_killed_search_goes_on_and_names_the_option(lab: Any) -> None:
    lab.boards("  one: {virtual: {}}\n")
    model = lab.model.source
    # A fusion pass that is wrong, among five others and two options of the cache.
    command = ["bisect", "options", "--board", "one", "--model", str(model), *OPTIONS]
    command += ["--kv", "f16", "--engine-option", "kv_layout=sd", "--positions", "16"]
    command += ["--board-env", "one:ENGINE_FAULT=scale:10@L00.attn.v?pass=residual", "--json"]
    searches = Searches(lab.store)

    def three_trials() -> bool:
        rows = searches.newest("options")
        return bool(rows) and len(searches.trials(rows[0].id)) >= 3

    killed = lab.command(*command)
    lab.wait(three_trials)
    killed.kill()
    (row,) = searches.newest("options")
    before = searches.trials(row.id)
    code, told = lab.command(*command).finish()
    assert code == 0, told
    assert (told["outcome"], told["disable"]) == ("named", ["fusion.residual"])
    assert told["search"] == row.id
    trials = searches.trials(row.id)
    assert trials[: len(before)] == before
    assert len(trials) == told["trials"]
    assert "passes_off=residual" in told["commands"]["passes"]
    assert searches.get(row.id).culprits == ["fusion.residual"]
    assert lab.spools() == []
    assert lab.leases.held() == []
