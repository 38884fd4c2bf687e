"""Questions to the store, and files made of the answers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness.errors import HarnessError
from harness.store import Store
from harness.verdicts import Outcome, Verdict


@pytest.fixture
def campaigns(store: Store) -> list[str]:
    return [store.begin_campaign("bringup", ["harness"], {"night": n}) for n in range(3)]


def test_an_empty_store_gives_empty_frames(store: Store) -> None:
    assert store.frames.runs().empty
    assert store.frames.checks().empty
    assert store.frames.history("x").empty
    matrix = store.frames.latest_matrix()
    assert matrix.empty
    assert {"board", "stage", "outcome", "previous_outcome", "changed"} <= set(matrix.columns)


def test_frames_are_filtered_by_campaign_board_and_stage(
    store: Store, campaigns: list[str], add_run: Callable[..., str]
) -> None:
    wanted = add_run(campaigns[0], "a", "curve")
    for campaign, board, stage in [
        (campaigns[1], "a", "curve"),
        (campaigns[0], "b", "curve"),
        (campaigns[0], "a", "tiny"),
    ]:
        add_run(campaign, board, stage)
    runs = store.frames.runs(campaign=campaigns[0], board="a", stage="curve")
    assert runs["id"].tolist() == [wanted]
    checks = store.frames.checks(campaign=campaigns[0], board="a", stage="curve")
    assert checks["run_id"].tolist() == [wanted, wanted]
    assert checks["measured"].tolist()[0] == 4.5
    assert checks["measured_text"].tolist() == [None, "equal"]


def test_times_are_utc_and_json_is_decoded(store: Store, add_run: Callable[..., str]) -> None:
    add_run(parameters={"lengths": [64, 128]}, facts={"machine": "aarch64"})
    row = store.frames.runs().iloc[0]
    assert str(row["started_at"].tz) == "UTC"
    assert row["parameters"] == {"lengths": [64, 128]}
    assert row["facts"] == {"machine": "aarch64"}
    assert row["campaign_kind"] == "bringup"


def test_the_matrix_holds_the_newest_verdict_of_each_cell(
    store: Store, campaigns: list[str], add_run: Callable[..., str]
) -> None:
    add_run(campaigns[0], "b", "tiny", Outcome.PASS)
    add_run(campaigns[0], "a", "stress", Outcome.PASS)
    old = add_run(campaigns[0], "a", "tiny", Outcome.PASS)
    new = add_run(campaigns[1], "a", "tiny", Outcome.FAIL)
    store.begin_run(campaign_id=campaigns[2], board="a", stage="tiny")  # not judged yet
    matrix = store.frames.latest_matrix()
    assert matrix[["board", "stage", "outcome"]].values.tolist() == [
        ["a", "tiny", "fail"],
        ["a", "stress", "pass"],
        ["b", "tiny", "pass"],
    ]
    cell = matrix.iloc[0]
    assert (cell["run_id"], cell["previous_run_id"]) == (new, old)
    assert (cell["previous_outcome"], bool(cell["changed"])) == ("pass", True)
    assert matrix["changed"].tolist() == [True, False, False]
    assert matrix.iloc[1]["previous_outcome"] is None


def test_a_retry_is_compared_with_the_last_campaign_not_with_its_own_first_try(
    store: Store, campaigns: list[str], add_run: Callable[..., str]
) -> None:
    add_run(campaigns[0], "a", "tiny", Outcome.PASS)
    add_run(campaigns[1], "a", "tiny", Outcome.ERROR)
    add_run(campaigns[1], "a", "tiny", Outcome.PASS)
    cell = store.frames.latest_matrix().iloc[0]
    assert (cell["outcome"], cell["previous_outcome"], bool(cell["changed"])) == (
        "pass",
        "pass",
        False,
    )


def test_models_have_cells_of_their_own_even_without_a_hash(
    store: Store, campaigns: list[str], add_run: Callable[..., str]
) -> None:
    add_run(campaigns[0], "a", "tiny")
    run_id = store.begin_run(campaign_id=campaigns[0], board="a", stage="tiny")
    store.finish_run(run_id, Verdict(outcome=Outcome.PASS, headline="fine"))
    assert len(store.frames.latest_matrix()) == 2


def test_history_follows_one_measure_and_skips_what_measured_nothing(
    store: Store, campaigns: list[str], add_run: Callable[..., str]
) -> None:
    for campaign, outcome in zip(
        campaigns, [Outcome.PASS, Outcome.INVALID, Outcome.FAIL], strict=True
    ):
        add_run(campaign, "a", "curve", outcome)
    add_run(campaigns[0], "b", "curve")
    history = store.frames.history("tokens_per_s_at_end", board="a")
    assert history["campaign_id"].tolist() == [campaigns[0], campaigns[2]]
    assert history["measured"].tolist() == [4.5, 4.5]
    assert store.frames.history("greedy").empty  # its value is a text


def test_series_are_frames(store: Store, add_run: Callable[..., str]) -> None:
    run_id = add_run()
    assert store.frames.series_names(run_id) == ["events", "tokens", "samples"]
    tokens = store.frames.series(run_id, "tokens")
    assert tokens["t_ns"].tolist() == [0, 10, 20, 30]
    assert tokens["index"].tolist()[:3] == [0, 1, 2]
    assert np.isnan(tokens["index"].iloc[3])
    assert tokens["grid.1"].tolist() == [1.0] * 4
    assert tokens["seed"].tolist() == [7] * 4
    samples = store.frames.series(run_id, "samples")
    assert samples["rss_mb"].tolist() == [10.5, 11.0]
    assert samples["temperatures.soc"].iloc[0] == 41.0
    assert samples["clocks_mhz.1"].iloc[1] == 900
    events = store.frames.series(run_id, "events")
    assert events["kind"].tolist() == ["run-start", "sample", "sample", "run-end"]


def test_an_unknown_series_is_refused_with_those_there_are(
    store: Store, add_run: Callable[..., str]
) -> None:
    with pytest.raises(HarnessError, match="one of: events, tokens"):
        store.frames.series(add_run(), "logits")


def test_a_raw_file_that_changed_or_vanished_is_not_trusted(
    store: Store, add_run: Callable[..., str]
) -> None:
    run_id = add_run()
    path = store.raw_folder(run_id) / "arrays" / "tokens.npz"
    np.savez(path, t_ns=np.arange(5))
    with pytest.raises(HarnessError, match="changed since"):
        store.frames.series(run_id, "tokens")
    path.unlink()
    with pytest.raises(HarnessError, match="missing"):
        store.frames.series(run_id, "tokens")


def test_an_array_that_is_no_table_says_so(store: Store, add_run: Callable[..., str]) -> None:
    run_id = add_run()
    np.savez(store.raw_folder(run_id) / "arrays" / "cube.npz", cube=np.zeros((2, 3, 4)))
    store.finish_run(run_id, Verdict(outcome=Outcome.PASS, headline="fine"))
    with pytest.raises(HarnessError, match=r"\(2, 3, 4\)"):
        store.frames.series(run_id, "cube")


def test_an_event_line_cut_short_at_the_end_is_left_out(
    store: Store, add_run: Callable[..., str]
) -> None:
    run_id = add_run()
    with (store.raw_folder(run_id) / "events.jsonl").open("ab") as file:
        file.write(b'{"v":1,"n":4,"t_')
    store.finish_run(run_id, Verdict(outcome=Outcome.PASS, headline="fine"))
    assert len(store.frames.series(run_id, "events")) == 4


# Export


def test_csv_and_parquet_hold_the_same_rows(
    store: Store, campaigns: list[str], add_run: Callable[..., str], tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
    for board in ("a", "b"):
        add_run(campaigns[0], board, parameters={"lengths": [64]})
    assert store.export(tmp_path / "runs.csv") == 2
    assert store.export(tmp_path / "runs.parquet") == 2
    csv, parquet = pd.read_csv(tmp_path / "runs.csv"), pd.read_parquet(tmp_path / "runs.parquet")
    expected = store.frames.runs()
    for frame in (csv, parquet):
        assert frame.columns.tolist() == expected.columns.tolist()
        assert frame["id"].tolist() == expected["id"].tolist()
        assert frame["headline"].tolist() == expected["headline"].tolist()
        assert [json.loads(text) for text in frame["details"]] == expected["details"].tolist()
        assert frame["seconds"].tolist() == [3.5, 3.5]
        times = pd.to_datetime(frame["started_at"], utc=True)
        assert times.tolist() == expected["started_at"].tolist()


def test_json_keeps_nested_values_and_missing_ones(
    store: Store, add_run: Callable[..., str], tmp_path: Path
) -> None:
    add_run()
    store.export(tmp_path / "runs.json")
    (row,) = json.loads((tmp_path / "runs.json").read_text(encoding="utf-8"))
    assert row["details"]["note"] == "größer, 'quoted', 改行\n"
    assert row["toolchain"] is None
    store.export(tmp_path / "checks.json", table="checks")
    checks = json.loads((tmp_path / "checks.json").read_text(encoding="utf-8"))
    assert [check["limit"] for check in checks] == [12.0, None]


def test_an_export_can_be_filtered_and_its_format_named(
    store: Store, campaigns: list[str], add_run: Callable[..., str], tmp_path: Path
) -> None:
    add_run(campaigns[0], "a")
    add_run(campaigns[0], "b")
    assert store.export(tmp_path / "out", "csv", board="b") == 1
    assert pd.read_csv(tmp_path / "out")["board"].tolist() == ["b"]


@pytest.mark.parametrize("name", ["runs.xlsx", "runs"])
def test_an_unknown_format_is_refused_with_those_there_are(
    store: Store, tmp_path: Path, name: str
) -> None:
    with pytest.raises(HarnessError, match="csv, json, parquet"):
        store.export(tmp_path / name)
    assert not list(tmp_path.glob("*runs*"))


def test_parquet_without_pyarrow_says_what_to_install(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "pyarrow" else real(name)
    )
    with pytest.raises(HarnessError, match=r"decode-harness\[parquet\]"):
        store.export(tmp_path / "runs.parquet")


def test_an_export_that_fails_leaves_no_file(store: Store, tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(HarnessError, match=r"folder\.csv"):
        store.export(tmp_path / "folder.csv")
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".partial")]
