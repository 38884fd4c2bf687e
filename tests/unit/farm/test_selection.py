"""What a user may ask for, and what is told when it is wrong."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.formats.gguf_writer import write_gguf
from engine.formats.synthetic import SyntheticCheckpoint
from harness.cli.bringup import app
from harness.deploy.models import prepare_model, prepare_tiny
from harness.errors import HarnessError
from harness.farm.faults import environment_for, require_ops
from harness.farm.progress import Silent
from harness.farm.runner import open_campaign
from harness.farm.selection import (
    bringup_options,
    choose_boards,
    choose_stages,
    engine_words,
)
from harness.jobs import stages
from harness.store import Store


@pytest.fixture
def farm(tmp_path: Path) -> Path:
    path = tmp_path / "devices.yaml"
    path.write_text(
        "boards:\n"
        "  virt-1: {virtual: {}, environment: {OMP_NUM_THREADS: '1'}}\n"
        "  virt-2: {virtual: {}, tags: [fast]}\n"
    )
    return path


def test_extra_environment_reaches_only_its_board(farm: Path) -> None:
    one, two = choose_boards(farm, (), (), ["virt-1:ENGINE_FAULT=scale:1.02@L07.ffn.down"])
    assert one.environment == {
        "OMP_NUM_THREADS": "1",
        "ENGINE_FAULT": "scale:1.02@L07.ffn.down",
    }
    assert two.environment == {}


@pytest.mark.parametrize("text", ["virt-1", "virt-1:KEY", "KEY=1", "virt-1:=1", "virt-1:A B=1", ""])
def test_what_is_no_assignment_is_refused_with_the_form(farm: Path, text: str) -> None:
    with pytest.raises(HarnessError, match="BOARD:KEY=VALUE"):
        choose_boards(farm, (), (), [text])


def test_environment_of_a_board_that_takes_no_part_is_refused(farm: Path) -> None:
    with pytest.raises(HarnessError, match="'virt-1', which takes no part; expected one of virt-2"):
        choose_boards(farm, (), ["fast"], ["virt-1:KEY=1"])


@pytest.mark.parametrize(
    "text",
    [
        "virt-1:HF_TOKEN=hunter2",
        "virt-2:dbPassword=hunter2",
        "virt-1:MODELS=https://ann:hunter2@host/",
        "HF_TOKEN=hunter2",
        "x:KEY=hunter2",
    ],
)
def test_secrets_are_refused_and_no_message_repeats_a_value(farm: Path, text: str) -> None:
    with pytest.raises(HarnessError) as caught:
        choose_boards(farm, (), (), [text])
    assert "hunter2" not in str(caught.value)
    assert ("secrets" in str(caught.value)) == text.startswith("virt-")


def test_stages_run_in_their_order_however_they_are_named() -> None:
    names = [stage.name for stage in stages()]
    assert [stage.name for stage in choose_stages(names[::-1])] == names
    assert [stage.name for stage in choose_stages(())] == names


def test_an_unknown_stage_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(HarnessError, match=r"no stage 'acuracy'.*did you mean 'accuracy'"):
        choose_stages(["acuracy"])


def test_an_option_out_of_range_is_named() -> None:
    with pytest.raises(HarnessError, match=r"stress_minutes: found 0.*greater than 0"):
        bringup_options(stress_minutes=0)


@pytest.mark.parametrize("fault", ["sclae:1.02@L00.ffn.down", "scale:much@L00.ffn.down", "nan"])
@pytest.mark.parametrize("written", ["--board-env", "devices.yaml"])
def test_a_fault_that_cannot_be_planted_is_refused_before_anything_runs(
    farm: Path, fault: str, written: str
) -> None:
    extra = [f"virt-2:ENGINE_FAULT={fault}"]
    if written == "devices.yaml":
        extra = []
        entry = f"  virt-2: {{virtual: {{}}, environment: {{ENGINE_FAULT: '{fault}'}}}}\n"
        farm.write_text("boards:\n" + entry)
    with pytest.raises(HarnessError, match=r"board virt-2: ENGINE_FAULT"):
        choose_boards(farm, ["virt-2"], (), extra)


def test_a_context_beyond_the_model_is_refused_before_anything_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path / "state"))
    (tmp_path / "devices.yaml").write_text("boards:\n  v: {virtual: {}}\n")
    model = tmp_path / "small.gguf"
    write_gguf(SyntheticCheckpoint(seed=7), model)
    largest = prepare_model(model).hyperparameters.context
    words = ["--farm", tmp_path / "devices.yaml", "--model", model, "--context", largest + 1]
    told = CliRunner().invoke(app, [str(word) for word in words])
    assert told.exit_code == 2
    assert f"a context of {largest + 1}; expected at most {largest}" in told.stderr
    assert not (tmp_path / "state" / "results.sqlite").exists()


def test_no_caller_may_begin_a_campaign_beyond_the_models_context(tmp_path: Path) -> None:
    model = prepare_tiny(0)
    options = bringup_options(context=model.hyperparameters.context + 1)
    with (
        Store.open(tmp_path / "results.sqlite") as store,
        pytest.raises(HarnessError, match="expected at most"),
    ):
        open_campaign([], model, options, store, Silent(), stop=threading.Event())


def test_engine_options_of_the_command_line_are_put_together() -> None:
    words = ["huge_pages=yes", "passes_off=qkv,residual", "threads=2"]
    assert engine_words(words, unit="native", kv="int8").asked == {
        "unit": "native",
        "kv": "int8",
        "huge_pages": True,
        "passes_off": ("qkv", "residual"),
        "threads": 2,
    }
    assert engine_words(()).asked == {}


@pytest.mark.parametrize(
    ("words", "named", "told"),
    [
        (["kvv=f16"], {}, "--engine-option kvv=f16: no engine option 'kvv'.*did you mean 'kv'"),
        (["fused=perhaps"], {}, "--engine-option fused=perhaps: 'perhaps'; expected true or false"),
        (["fused"], {}, "--engine-option fused; expected NAME=VALUE"),
        (["kv=f16"], {"kv": "f32"}, "--engine-option kv=f16 beside --kv f32"),
        ([], {"kv": "f8"}, "--kv f8: 'f8'; expected one of f32, f16"),
        ([], {"unit": "gpu"}, "--unit gpu: 'gpu'; expected one of auto"),
        ([], {"unit": "packed", "executor": "compiled"}, "--unit packed --executor compiled: "),
    ],
)
def test_an_engine_option_that_cannot_be_is_refused_as_it_was_written(
    words: list[str], named: dict[str, str], told: str
) -> None:
    with pytest.raises(HarnessError, match=told):
        engine_words(words, **named)


def test_a_wrong_engine_option_ends_the_command_before_anything_starts(
    farm: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path / "home"))
    ended = CliRunner().invoke(app, ["--farm", str(farm), "--kv", "int3"])
    assert ended.exit_code == 2
    assert not (tmp_path / "home").exists()


def test_a_fault_in_an_op_that_the_model_has_not_is_refused_naming_near_ones(farm: Path) -> None:
    model = prepare_tiny(0)
    boards = choose_boards(farm, (), (), ["virt-2:ENGINE_FAULT=scale:1.02@L07.ffn.down"])
    with pytest.raises(HarnessError, match=r"no op 'L07.ffn.down'.*such as L00.ffn.down"):
        require_ops(boards, model)
    require_ops(choose_boards(farm, (), (), ["virt-2:ENGINE_FAULT=nan@L01.attn.qkv"]), model)


def test_a_stage_gets_the_faults_that_its_model_has_ops_for() -> None:
    model = prepare_tiny(0)  # two layers
    fault = "nan@L00.attn.q; scale:1.02@L07.ffn.down"
    kept = environment_for({"A": "1", "ENGINE_FAULT": fault}, model)
    assert kept == {"A": "1", "ENGINE_FAULT": "nan@L00.attn.q"}
    assert environment_for({"ENGINE_FAULT": "nan@L07.attn.q"}, model) == {}
    assert environment_for({"A": "1"}, model) == {"A": "1"}
