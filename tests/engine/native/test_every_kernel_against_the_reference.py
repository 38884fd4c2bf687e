"""Every command, on every instruction set, computes what the reference computes.

Instruction sets of this machine run here; those of aarch64 on emulated cores: a Cortex-A53 has no
dot products, a Cortex-A76 has, "max" has i8mm too. A case is a package, options and a number of
tokens. Each native command is given the reference's inputs, so that no error adds up.
"""

from __future__ import annotations

import dataclasses
import functools
import platform
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.decode import program_of
from engine.native.features import detect
from engine.native.image import Image, answers
from engine.native.image import case as case_bytes
from engine.native.isa import ISAS, choose, machine_name
from engine.native.library import ROWS_R, Cache, Command, load
from engine.native.lowering import Lowering, cache_structure
from engine.native.team import Team
from engine.native.team import _needs as needs
from engine.native.weights import Weights
from engine.options import EngineOptions
from engine.package import Package
from engine.program.ops import Op
from engine.program.passes import separate_dequantisation
from engine.program.shapes import buffer_shapes
from engine.runtime.cache import KVCache
from engine.runtime.state import State, step_inputs
from engine.units.native import step_of
from engine.units.reference import Reference

CONTEXT = 352  # slots: more than one chunk of attention, panels of 32
CACHED = 284  # slots that are filled before the step: it crosses a panel
EMULATOR = "qemu-aarch64-static"
EMULATED = [("cortex-a53", "generic"), ("cortex-a53", "neon"), ("cortex-a76", "dotprod"),
            ("max", "i8mm")]  # fmt: skip
HERE = [("", isa.name) for isa in ISAS.get(machine_name(), ())]

PackageOf = Callable[[str], Package]


@dataclasses.dataclass(frozen=True)
class Case:
    """What is run. `package` names one of the fixture `packages`."""

    package: str
    tokens: int = 6
    options: tuple[tuple[str, Any], ...] = ()
    dequantise: str = "inside"
    sequences: int = 1
    threads: int = 1

    @property
    def name(self) -> str:
        words = [self.package, f"{self.tokens} tokens", self.dequantise]
        words += [f"{key}={value}" for key, value in self.options]
        words += [f"{self.sequences} sequences", f"{self.threads} threads"]
        return " ".join(w for w in words if w not in ("inside", "1 sequences", "1 threads"))

    @property
    def kv(self) -> str:
        return str(dict(self.options).get("kv", "f32"))


class Prepared:
    """A case with its expected values and the memory that the kernels will work on."""

    def __init__(self, case: Case, package: Package) -> None:
        self.case, self.package = case, package
        hp = package.hyperparameters
        self.options = EngineOptions(unit="reference", **dict(case.options))
        self.program = program_of(package, self.options)
        if case.dequantise == "before":
            self.program = separate_dequantisation(self.program)
        self.state = self._inputs(case)
        expected, native = self._cache(), self._cache()
        random = np.random.default_rng(1)
        for view in expected.buffers().values():
            for sequence in range(case.sequences):
                slots = slice(sequence * expected.slots, sequence * expected.slots + CACHED)
                view[slots] = random.standard_normal((CACHED, hp.kv_heads, hp.head_dim))
        native.block[...] = expected.block
        self.expected_cache, self.native_cache = expected, native
        self.written: dict[str, npt.NDArray[np.float32]] = {}
        self._held: dict[str, npt.NDArray[np.float32]] = {}
        self._caches: list[Cache] = []
        self._compute()
        self.weights = Weights(package)
        self.commands = self._lower()
        self.step = step_of(self.state)

    def _cache(self) -> KVCache:
        hp = self.package.hyperparameters
        return KVCache(
            hp.layers,
            CONTEXT,
            hp.kv_heads,
            hp.head_dim,
            scheme=self.options.kv,
            layout=self.options.kv_layout,
            sequences=self.case.sequences,
        )

    def _inputs(self, case: Case) -> State:
        """Tokens behind what is cached; with several sequences one each, of unlike lengths."""
        ids = np.arange(case.tokens) * 37 % self.package.hyperparameters.vocab
        rows = [0, case.tokens - 1] if case.tokens > 1 else [0]
        if case.sequences == 1:
            positions = np.arange(CACHED, CACHED + case.tokens)
            keep = self.options.keep
            prefix = positions + 100 if keep else None
            return step_inputs(ids, positions, rows, prefix_positions=prefix)
        slots = self._cache().slots
        lengths = CACHED - 130 * (np.arange(case.tokens) % 3)
        starts = np.arange(case.tokens) * slots
        return step_inputs(
            ids, lengths, rows, slots=starts + lengths, starts=starts, visible=lengths + 1
        )

    def _compute(self) -> None:
        state = {**self.state, **self.expected_cache.buffers()}
        unit = Reference(self.package, CONTEXT, np.float32)
        for op in self.program.ops:
            unit.execute(op, state)
        self.values = state

    def _lower(self) -> Any:
        lowering = Lowering(self.weights, self.package.hyperparameters)
        shapes = buffer_shapes(self.program, self.package.tensors)
        self._shapes, commands = shapes, []
        for number, op in enumerate(self.program.ops):
            made = lowering.lower(op, self, number)
            selected = [name for name in op.reads if name in shapes and shapes[name].rows == "R"]
            if op.kind != "select" and selected:
                for command in made:
                    command.flags |= ROWS_R
            commands += made
        return (Command * len(commands))(*commands)

    # What lowering asks of a place: inputs are the reference's, outputs lie elsewhere.

    def read(self, name: str) -> int:
        if name not in self.values:  # inside of a fused op that takes several commands
            return int(self.written[name].ctypes.data)
        if name not in self._held:
            self._held[name] = np.ascontiguousarray(self.values[name], np.float32)
        return int(self._held[name].ctypes.data)

    def width(self, name: str) -> int:
        return self._shapes[name].width

    def write(self, name: str, width: int) -> int:
        shape = self._shapes[name].of(len(self.state["tokens"]), len(self.state["rows"]))
        assert shape[1] == width
        self.written[name] = np.full(shape, np.nan, np.float32)
        return int(self.written[name].ctypes.data)

    def cache(self, keys: str, values: str) -> Cache:
        views = self.native_cache.buffers()
        self._caches.append(cache_structure(views[keys], views[values], keys))
        return self._caches[-1]

    def image(self) -> tuple[Image, int, int]:
        """(image, offset of the commands, offset of the step)."""
        image = Image()
        for tensor in self.package.tensors.values():
            for part in tensor.parts.values():
                image.array(part)
        for array in (*self.weights._vectors.values(), *self._held.values(), *self.step.held):
            image.array(array)
        self._outputs = {name: image.array(array) for name, array in self.written.items()}
        self._cached = image.array(self.native_cache.block)
        return image, image.commands(self.commands), image.structure(self.step)

    def take(self, block: memoryview) -> None:
        """Copy what the kernels wrote from a moved image back to where it belongs."""
        for name, offset in self._outputs.items():
            array = self.written[name]
            data = np.frombuffer(block, np.float32, array.size, offset)
            array[...] = data.reshape(array.shape)
        block_size = self.native_cache.block.size
        self.native_cache.block[...] = np.frombuffer(block, np.uint8, block_size, self._cached)

    def needs(self) -> tuple[int, ...]:
        return needs(self.commands, len(self.state["tokens"]))


# --- the cases -----------------------------------------------------------------------------------

SD16 = (("kv", "f16"), ("kv_layout", "sd"))
INT8 = (*SD16, ("activations", "int8"))
FUSED = (("fused", True),)
WEIGHTS = [
    *(f"{kind} {layout}" for kind in ("Q4_0", "Q4_1", "Q8_0", "w4-64a", "w8")
      for layout in ("row", "blocked", "interleaved")),
    "Q5_1 interleaved", "Q5_0 row",
    "Q4_K interleaved", "Q5_K interleaved", "Q6_K interleaved", "Q4_K row", "Q6_K blocked",
]  # fmt: skip
FLOATS = ["F32 row", "F16 row", "BF16 row"]
FAMILIES = ["qwen2 interleaved", "qwen3 interleaved"]
CACHES = [
    (("kv", scheme), ("kv_layout", layout))
    for scheme in ("f32", "f16", "int8", "int4")
    for layout in ("sd", "ds", "mixed", "numpy")
    if layout != "numpy" or scheme == "f32"
]
LATE = "Q8_0 interleaved"

CASES = [
    *(Case(name, tokens, (*INT8, *FUSED)) for name in WEIGHTS for tokens in (1, 6)),
    *(Case(name, 6, INT8) for name in WEIGHTS),
    *(Case(name, tokens, SD16) for name in (*WEIGHTS, *FLOATS) for tokens in (1, 6)),
    *(Case(name, 6, (*SD16, *FUSED)) for name in (*FLOATS, *FAMILIES)),
    *(Case(name, 6, (*INT8, *FUSED)) for name in FAMILIES),
    *(Case(name, 1, SD16) for name in FAMILIES),
    *(Case(name, 6, SD16, dequantise="before") for name in ("Q4_1 interleaved", "Q8_0 row")),
    *(Case(LATE, tokens, (*kv, *fused)) for kv in CACHES for tokens in (1, 20)
      for fused in ((), FUSED)),
    *(Case(LATE, tokens, (*kv, ("keep", 40), *fused)) for kv in CACHES[::3] for tokens in (1, 6)
      for fused in ((), FUSED)),
    *(Case(LATE, 3, (*kv, *FUSED), sequences=3) for kv in CACHES),
    *(Case(LATE, tokens, (*INT8, *FUSED), threads=3) for tokens in (1, 6, 20)),
]  # fmt: skip


def tolerance(op: Op) -> float:
    """Norm of the difference over the norm of what is expected.

    Kernels sum float32 in another order than numpy. Where a norm is computed on the way into a
    quantised input, a value on the edge of two steps may fall to the other side: one in a thousand
    of steps of 1/127 of the largest.
    """
    quantised = any(part.attributes.get("activations") == "int8" for part in op.parts)
    normed = any(part.kind == "rmsnorm" for part in op.parts)
    return 2e-3 if quantised and normed else 1e-5


def differences(prepared: Prepared, op: Op) -> list[str]:
    """What the kernels wrote for `op` and should not have."""
    found = []
    for name in op.writes:
        if name in prepared.program.caches:
            continue
        got, wanted = prepared.written[name], prepared.values[name]
        error = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
        if not error <= tolerance(op):
            found.append(f"{name}: {error:.2e} of its norm")
    return found


# --- running them --------------------------------------------------------------------------------


def run_here(isa: str, cases: list[Prepared]) -> list[int]:
    """On this machine, through the library; the result of each call."""
    results = []
    for prepared in cases:
        team = Team(load(), isa, prepared.case.threads)
        team.reserve(prepared.commands, len(prepared.state["tokens"]))
        results.append(int(team.run(prepared.commands, prepared.step)))
        team.close()
    return results


def run_emulated(
    cpu: str, isa: str, cases: list[Prepared], driver: Path, folder: Path
) -> list[int]:
    """On an emulated core. Raises CalledProcessError with the signal that ended it."""
    asked, answered = folder / "cases", folder / "results"
    images = [prepared.image() for prepared in cases]
    with asked.open("wb") as file:
        for prepared, (image, commands, step) in zip(cases, images, strict=True):
            threads, wanted = prepared.case.threads, prepared.needs()
            count = len(prepared.commands)
            file.write(case_bytes(image, commands, count, step, threads, wanted, isa))
    command = [EMULATOR, "-cpu", cpu, str(driver), str(asked), str(answered)]
    subprocess.run(command, check=True, timeout=900)
    found = answers(answered.read_bytes(), [image for image, _, _ in images])
    for prepared, (_, block) in zip(cases, found, strict=True):
        prepared.take(block)
    return [result for result, _ in found]


@dataclasses.dataclass(frozen=True)
class Ran:
    prepared: Prepared
    result: int


@pytest.fixture(scope="module")
def ran(
    package_of: PackageOf, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], dict[str, Ran]]:
    """All cases on one instruction set, by name; each core runs once."""

    @functools.cache
    def run(cpu: str, isa: str) -> dict[str, Ran]:
        if cpu:
            driver = request.getfixturevalue("driver")
        elif choose(detect().common, isa).missing:
            pytest.skip(f"this CPU has no {isa}")
        prepared = [Prepared(case, package_of(case.package)) for case in CASES]
        if cpu:
            results = run_emulated(cpu, isa, prepared, driver, tmp_path_factory.mktemp(cpu))
        else:
            results = run_here(isa, prepared)
        pairs = zip(prepared, results, strict=True)
        return {one.case.name: Ran(one, result) for one, result in pairs}

    return run


PLACES = [pytest.param(cpu, isa, id=f"{cpu or platform.machine()}-{isa}")
          for cpu, isa in (*HERE, *EMULATED)]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("cpu", "isa"), PLACES)
def test_each_op_computes_what_the_reference_computes(
    cpu: str, isa: str, case: Case, ran: Callable[[str, str], dict[str, Ran]]
) -> None:
    done = ran(cpu, isa)[case.name]
    assert done.result == 0
    program = done.prepared.program
    wrong = {op.id: found for op in program.ops if (found := differences(done.prepared, op))}
    assert not wrong


@pytest.mark.parametrize(("cpu", "isa"), PLACES)
def test_keys_and_values_are_cached_bit_by_bit_as_the_cache_encodes_them(
    cpu: str, isa: str, ran: Callable[[str, str], dict[str, Ran]]
) -> None:
    """Ops that append alone are given the very values that the reference appends."""
    for name, done in ran(cpu, isa).items():
        if not dict(done.prepared.case.options).get("fused"):
            prepared = done.prepared
            same = np.array_equal(prepared.native_cache.block, prepared.expected_cache.block)
            assert same, name


@pytest.mark.parametrize(("cpu", "isa"), PLACES)
def test_threads_change_no_bit(
    cpu: str, isa: str, ran: Callable[[str, str], dict[str, Ran]]
) -> None:
    done = ran(cpu, isa)
    compared = 0
    for case in CASES:
        alone = dataclasses.replace(case, threads=1).name
        if case.threads > 1 and alone in done:
            one, many = done[alone].prepared.written, done[case.name].prepared.written
            assert all(np.array_equal(one[name], many[name]) for name in one)
            compared += 1
    assert compared


@pytest.mark.parametrize(
    ("cpu", "isa"), [("cortex-a53", "dotprod"), ("cortex-a53", "i8mm"), ("cortex-a76", "i8mm")]
)
def test_kernels_that_a_core_lacks_end_the_process_by_an_illegal_instruction(
    cpu: str, isa: str, driver: Path, package_of: PackageOf, tmp_path: Path
) -> None:
    case = Case("Q4_0 interleaved", 6, INT8)
    prepared = [Prepared(case, package_of(case.package))]
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run_emulated(cpu, isa, prepared, driver, tmp_path)
    assert caught.value.returncode == -signal.SIGILL
    assert run_emulated(cpu, "neon", prepared, driver, tmp_path) == [0]
