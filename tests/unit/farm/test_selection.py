"""What a user may ask for, and what is told when it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.farm.selection import bringup_options, choose_boards, choose_stages
from harness.jobs import stages


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
    ["virt-1:HF_TOKEN=hunter2", "virt-2:dbPassword=hunter2", "HF_TOKEN=hunter2", "x:KEY=hunter2"],
)
def test_secrets_are_refused_and_no_message_repeats_a_value(farm: Path, text: str) -> None:
    with pytest.raises(HarnessError) as caught:
        choose_boards(farm, (), (), [text])
    assert "hunter2" not in str(caught.value)
    assert ("a secret" in str(caught.value)) == text.startswith("virt-")


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
