"""A command list is moved as one block, and every pointer in it with it."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest

from engine.native.image import ALIGNMENT, Image, answers, case
from engine.native.library import Command, Step, Weight


def word(image: Image, offset: int) -> int:
    return int(struct.unpack_from("<q", image.block, offset)[0])


def test_pointers_lead_to_the_same_bytes_in_the_block() -> None:
    x = np.arange(8, dtype=np.float32)
    codes = np.arange(64, dtype=np.uint8)
    weight = Weight(n=3, k=8, q=codes.ctypes.data + 16)
    commands = (Command * 2)()
    for command in commands:
        command.x = x.ctypes.data
        command.w[1] = ctypes.pointer(weight)
    image = Image()
    image.array(x)
    image.array(codes)
    start = image.commands(commands)
    moves = dict(image.relocations)
    for number in range(2):
        at = start + number * ctypes.sizeof(Command)
        at_x = moves[at + Command.x.offset]
        assert np.frombuffer(image.block, np.float32, 8, at_x).tolist() == x.tolist()
        at_weight = moves[at + Command.w.offset + 8]  # the second of three; the others are null
        assert Weight.from_buffer_copy(image.block, at_weight).n == 3
        assert image.block[moves[at_weight + Weight.q.offset]] == codes[16]
    assert len(moves) == 2 * 2 + 1  # both commands share one weight
    assert all(target % ALIGNMENT in (0, 16) for target in moves.values())


def test_a_pointer_to_what_was_not_taken_in_is_refused() -> None:
    elsewhere = np.zeros(4)
    step = Step(tokens=1, ids=elsewhere.ctypes.data)
    image = Image()
    image.array(np.zeros(4))
    with pytest.raises(ValueError, match="in no array of the image"):
        image.structure(step)
    with pytest.raises(ValueError, match="expected a contiguous one"):
        image.array(np.zeros((4, 4))[:, :2])


def test_a_case_begins_with_what_the_driver_needs_to_know() -> None:
    array = np.arange(4)
    image = Image()
    image.array(array)
    step = image.structure(Step(tokens=1, slots=array.ctypes.data))
    data = case(image, 0, 0, step, 2, (1, 2, 3, 4, 5, 6), "neon")
    numbers = struct.unpack_from("<12q16s", data)
    assert numbers[:6] == (len(image.block), 1, 0, 0, step, 2)
    assert numbers[6:12] == (1, 2, 3, 4, 5, 6)
    assert numbers[12].rstrip(b"\0") == b"neon"
    assert len(data) == 112 + 16 + len(image.block)


def test_answers_are_taken_apart_and_cut_ones_refused() -> None:
    image = Image()
    image.array(np.arange(4))
    data = struct.pack("<q", -1) + bytes(image.block)
    ((result, block), (other, _)) = answers(data + data, [image, image])
    assert (result, other) == (-1, -1)
    assert bytes(block) == bytes(image.block)
    assert word(image, 8) == 1
    with pytest.raises(ValueError, match="bytes of answers to 1 cases"):
        answers(data + data, [image])
