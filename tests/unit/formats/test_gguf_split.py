from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.formats import FormatError, open_checkpoint


def part(make: Any, number: int, count: int, tensor: str, total: int | None = 2) -> bytes:
    pairs = [
        make.pair("split.no", 2, struct.pack("<H", number)),
        make.pair("split.count", 2, struct.pack("<H", count)),
    ]
    if total is not None:
        pairs.append(make.pair("split.tensors.count", 5, struct.pack("<i", total)))
    if number == 0:
        pairs.append(make.string_pair("general.architecture", "llama"))
    data: bytes = make.gguf(pairs, [make.Entry(tensor, (2,), 0, make.weights(2, 10 * number))])
    return data


def write_both(make: Any, **changes: Any) -> list[Path]:
    return [
        make.write(part(make, number, 2, name, **changes), f"model-0000{number + 1}-of-00002.gguf")
        for number, name in enumerate(("first", "second"))
    ]


@pytest.mark.parametrize("index", [0, 1])
def test_any_part_opens_the_whole_model(make: Any, index: int) -> None:
    model = open_checkpoint(write_both(make)[index])
    assert model.metadata["general.architecture"] == "llama"
    assert list(model.tensors) == ["first", "second"]
    np.testing.assert_array_equal(model.float32("second"), [10, 11])


def test_folder_of_parts_opens_as_one_model(make: Any, tmp_path: Path) -> None:
    write_both(make)
    assert len(open_checkpoint(tmp_path).tensors) == 2


def test_missing_part_is_named(make: Any) -> None:
    first, second = write_both(make)
    second.unlink()
    with pytest.raises(FormatError, match=r"model-00002-of-00002.gguf: part 2 of 2 is missing"):
        open_checkpoint(first)


def test_part_under_another_number_is_refused(make: Any) -> None:
    first, second = write_both(make)
    second.write_bytes(first.read_bytes())
    with pytest.raises(FormatError, match=r"split.no is 0, the file's name says 1"):
        open_checkpoint(first)


def test_part_of_another_count_is_refused(make: Any) -> None:
    first, second = write_both(make)
    second.write_bytes(part(make, 1, 3, "second"))
    with pytest.raises(FormatError, match=r"split.count is 3, the file's name says 2"):
        open_checkpoint(first)


def test_tensor_in_two_parts_is_refused(make: Any) -> None:
    first, second = write_both(make)
    second.write_bytes(part(make, 1, 2, "first"))
    with pytest.raises(FormatError, match=r"tensor 'first' is already in .*00001-of"):
        open_checkpoint(first)


def test_total_that_does_not_add_up_is_refused(make: Any) -> None:
    with pytest.raises(FormatError, match=r"split.tensors.count is 5, the parts hold 2"):
        open_checkpoint(write_both(make, total=5)[0])


def test_part_whose_name_hides_it_is_refused(make: Any) -> None:
    path = make.write(part(make, 1, 2, "second"), "renamed.gguf")
    with pytest.raises(FormatError, match=r"is part 1 of 2 .*, but its name does not say so"):
        open_checkpoint(path)


def test_truncated_second_part_is_refused(make: Any) -> None:
    first, second = write_both(make)
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"00002-of-00002.gguf: tensor 'second'"):
        open_checkpoint(first)
