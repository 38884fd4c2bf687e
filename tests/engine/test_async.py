"""The async executor: the same bits as sync whatever overlaps, and real races where edges lack."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.decode import Decoder, NonFinite
from engine.native.library import NativeUnavailable
from engine.options import EngineOptions
from engine.package import Package
from engine.program.happens_before import check
from engine.program.ops import Op, Program
from engine.program.passes import apply, int8_activations
from engine.program.placement import PARTS, part_of, placement
from engine.program.schedule import Edge, Schedule, derive
from engine.program.shapes import buffer_shapes
from engine.runtime.async_ import AsyncExecutor
from engine.runtime.queues import ExecutorStuck
from engine.runtime.state import State
from engine.runtime.sync import SyncExecutor
from engine.runtime.trace import Taps, Trace
from engine.units import unit_names
from engine.units.faulty import plant

TOKENS = np.array([5, 90, 17, 17, 230, 64, 3])


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [t.name for t in set(threading.enumerate()) - before if t.name.startswith("engine-")]
    assert left == []


@pytest.fixture
def package(package_in: Callable[[str], Package]) -> Package:
    return package_in("Q4_1")


def with_executor(package: Package, executor: Any, program: Program) -> Decoder:
    decoder = Decoder(package)
    decoder.program, decoder.executor = program, executor
    return decoder


def decode(decoder: Decoder, taps: Taps | None = None) -> list[np.ndarray]:
    """A prefill of four tokens, three steps, and a longer prefill behind them."""
    found = [decoder.advance(TOKENS[:4], taps=taps, all_logits=True)]
    found += [decoder.advance(np.array([token]), taps=taps) for token in TOKENS[4:]]
    return [*found, decoder.advance(TOKENS, taps=taps)]


def program_of(package: Package, *, fused: bool) -> Program:
    program = Decoder(package).program
    return apply(program) if fused else program


def pair(
    package: Package,
    program: Program,
    unit: str = "packed",
    kv: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> list[Decoder]:
    """The same program under the sync and the async executor."""
    try:
        decoders = [Decoder(package, options=EngineOptions(unit=unit, **kv)) for _ in range(2)]
    except NativeUnavailable as error:
        pytest.skip(f"needs a C compiler: {error}")
    executors = (
        SyncExecutor(program, decoders[0].unit),
        AsyncExecutor(program, decoders[1].unit, **options),
    )
    for decoder, executor in zip(decoders, executors, strict=True):
        decoder.program, decoder.executor = program, executor  # type: ignore[assignment]
    return decoders


def same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("async_ops", ["all", "none"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kv", [("f32", "numpy"), ("f16", "sd"), ("int8", "ds")], ids="-".join)
@pytest.mark.parametrize("unit", unit_names())
def test_async_gives_the_bits_of_sync(
    unit: str, kv: tuple[str, str], fused: bool, async_ops: str, package: Package
) -> None:
    program = int8_activations(program_of(package, fused=fused), package)
    caches = {"kv": kv[0], "kv_layout": kv[1]}
    plain, overlapped = pair(package, program, unit, caches, async_ops=async_ops)
    wanted, found = Taps(), Taps()
    with overlapped.executor:  # type: ignore[attr-defined]
        assert same(decode(plain, wanted), decode(overlapped, found))
    assert wanted.values.keys() == found.values.keys()
    for name in wanted.values:
        assert np.array_equal(wanted.stacked(name), found.stacked(name)), name
    for name, cache in plain.cache.buffers().items():
        assert np.array_equal(np.asarray(cache), np.asarray(overlapped.cache.buffers()[name])), name


@given(st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_subset_of_async_ops_any_placement_and_any_delays_give_the_bits_of_sync(
    package: Package, data: st.DataObject
) -> None:
    program = program_of(package, fused=data.draw(st.booleans()))
    kinds = st.sampled_from(["linear", "attention", "kv_append", "rope", "add", "rmsnorm"])
    table = placement(data.draw(st.dictionaries(kinds, st.sampled_from(PARTS))))
    op_ids = st.sampled_from([op.id for op in program.ops])
    plain, overlapped = pair(
        package,
        program,
        placement=table,
        async_ops=data.draw(st.sets(op_ids)),
        delays=data.draw(st.dictionaries(op_ids, st.floats(0, 0.003), max_size=4)),
    )
    with overlapped.executor:  # type: ignore[attr-defined]
        assert same(decode(plain), decode(overlapped))


def test_ops_of_different_parts_overlap(package: Package) -> None:
    """Two ops that each wait until the other has begun can only end side by side."""
    program = Program(
        (
            Op("embed", "embed", ("tokens",), ("embed",), ("embed",)),
            Op("norm", "rmsnorm", ("embed",), ("norm",), ("L00.attn.norm",)),
            Op("up", "linear", ("embed",), ("up",), ("L00.ffn.up",)),
            Op("down", "linear", ("up",), ("down",), ("L00.ffn.down",)),
            Op("out", "add", ("down", "norm"), ("out",)),
        ),
        ("tokens", "rows"),
        "out",
        (),
    )
    meeting = threading.Barrier(2, timeout=20)
    inner = Decoder(package).unit

    class Meeting:
        name, dtype, package = "meeting", inner.dtype, inner.package

        def execute(self, op: Op, state: State) -> None:
            if op.id in ("norm", "up"):
                meeting.wait()
            inner.execute(op, state)

    with AsyncExecutor(program, Meeting()) as executor:
        inputs = {"tokens": TOKENS[:3], "rows": np.zeros(1, np.int64)}
        wanted = SyncExecutor(program, inner).run(dict(inputs))
        assert np.array_equal(executor.run(dict(inputs)), wanted)


def test_buffers_share_memory_and_the_derived_edges_guard_it(package: Package) -> None:
    program = program_of(package, fused=False)
    executor = AsyncExecutor(program, Decoder(package).unit)
    shapes = buffer_shapes(program, package.tensors)
    used = max(stop for _, stop in executor.memory.values())
    assert used < sum(shape.width * 4 for shape in shapes.values()) / 2
    assert check(program, executor.schedule, executor.memory) == []
    apart = derive(program)
    unguarded = check(program, apart, executor.memory)
    assert unguarded and all(finding.hazard in ("WAR", "WAW") for finding in unguarded)
    assert all(finding.shared_with for finding in unguarded)


def branching() -> Program:
    """Product b waits in its queue behind a; norm2, later in the program, waits for neither."""
    return Program(
        (
            Op("embed", "embed", ("tokens",), ("embed",), ("embed",)),
            Op("a", "linear", ("embed",), ("a",), ("L00.ffn.up",)),
            Op("norm", "rmsnorm", ("embed",), ("norm",), ("L00.attn.norm",)),
            Op("b", "linear", ("norm",), ("b",), ("L00.ffn.gate",)),
            Op("norm2", "rmsnorm", ("embed",), ("norm2",), ("L01.ffn.norm",)),
            Op("c", "linear", ("norm2",), ("c",), ("L00.ffn.up",)),
            Op("ab", "add", ("a", "b"), ("ab",)),
            Op("out", "add", ("ab", "c"), ("out",)),
        ),
        ("tokens", "rows"),
        "out",
        (),
    )


def test_memory_that_is_used_again_too_early_gives_other_numbers(package: Package) -> None:
    """A product waits behind another in its queue while what it will read is written over."""
    program = branching()
    memory = {"norm": (0, 256), "norm2": (128, 384)}
    unit = Decoder(package).unit
    wanted = SyncExecutor(program, unit).run({"tokens": TOKENS, "rows": TOKENS[:1] * 0})
    careless, guarded = derive(program), derive(program, memory=memory)
    assert guarded.edges - careless.edges == {Edge("b", "norm2")}
    assert [str(finding.missing) for finding in check(program, careless, memory)] == ["b → norm2"]
    for schedule, right in ((careless, False), (guarded, True)):
        with AsyncExecutor(
            program, unit, schedule=schedule, memory=memory, delays={"a": 0.05}
        ) as executor:
            found = executor.run({"tokens": TOKENS, "rows": TOKENS[:1] * 0})
        assert np.isfinite(found).all() and np.array_equal(found, wanted) == right


def test_memory_that_loses_a_buffer_in_any_order_is_refused(package: Package) -> None:
    program = program_of(package, fused=False)
    lost = {"L00.attn.q": (0, 256), "L00.attn.k": (128, 256)}
    with pytest.raises(
        ValueError,
        match=r"memory: L00.attn.k writes where L00.attn.q lies, which L00.attn.rope still reads",
    ):
        AsyncExecutor(program, Decoder(package).unit, memory=lost)


def raced(package: Package) -> tuple[Program, Schedule, Edge]:
    """A schedule whose attention does not wait for the newest keys and values."""
    program = program_of(package, fused=False)
    schedule = derive(program, placement({"kv_append": "control"}))
    edge = Edge("L01.attn.kv", "L01.attn.mix")
    return program, schedule.without(edge), edge


def test_a_missing_edge_is_a_real_race_that_a_delay_shows_and_the_check_names(
    package: Package,
) -> None:
    program, schedule, edge = raced(package)
    delays = {"L01.attn.kv": 0.05}
    plain, overlapped = pair(package, program, schedule=schedule, delays=delays)
    wanted = decode(plain)
    with overlapped.executor:  # type: ignore[attr-defined]
        found = decode(overlapped)
    assert all(np.isfinite(logits).all() for logits in found), "stale numbers, not bad ones"
    assert not same(wanted, found)
    assert edge in [finding.missing for finding in check(program, schedule)]

    waited = schedule.with_async(program, {op.id for op in program.ops} - {"L01.attn.kv"})
    assert check(program, waited) == []
    plain, repaired = pair(package, program, schedule=waited, delays=delays)
    with repaired.executor:  # type: ignore[attr-defined]
        assert same(decode(plain), decode(repaired))


def test_a_delayed_append_is_not_seen_in_time(package: Package) -> None:
    """Attention of the first token sees an empty slot, as if the append had not happened."""
    program, schedule, _ = raced(package)
    plain, overlapped = pair(package, program, schedule=schedule, delays={"L01.attn.kv": 0.1})
    plain.unit = plant(plain.unit, "stale@L01.attn.kv")
    plain.executor = SyncExecutor(program, plain.unit)
    with overlapped.executor:  # type: ignore[attr-defined]
        assert same([plain.advance(TOKENS[:1])], [overlapped.advance(TOKENS[:1])])


def test_a_result_nobody_waits_for_is_the_last_steps(package: Package) -> None:
    program = program_of(package, fused=True)
    schedule = derive(program)
    (end,) = [edge for edge in schedule.edges if edge.consumer == "step.end"]
    with AsyncExecutor(
        program, Decoder(package).unit, schedule=schedule.without(end), delays={"head.logits": 0.2}
    ) as executor:
        decoder = with_executor(package, executor, program)
        assert not decoder.advance(TOKENS[:1]).any(), "what lay there before anything ran"


class Failing:
    """Another unit that raises at some ops."""

    def __init__(self, decoder: Decoder, errors: dict[str, BaseException]) -> None:
        self.inner, self.errors = decoder.unit, errors
        self.name, self.dtype, self.package = "failing", self.inner.dtype, self.inner.package

    def execute(self, op: Op, state: State) -> None:
        if op.id in self.errors:
            raise self.errors[op.id]
        self.inner.execute(op, state)


@pytest.mark.parametrize("async_ops", ["all", "none"])
def test_an_error_of_a_worker_reaches_the_caller_and_the_next_step_runs(
    async_ops: str, package: Package
) -> None:
    program = program_of(package, fused=False)
    plain = Decoder(package)
    errors: dict[str, BaseException] = {"L01.attn.mix": OSError("the part is gone")}
    unit = Failing(Decoder(package), errors)
    with AsyncExecutor(program, unit, async_ops=async_ops) as executor:
        decoder = with_executor(package, executor, program)
        with pytest.raises(OSError, match="the part is gone"):
            decoder.advance(TOKENS)
        assert [t for t in threading.enumerate() if t.name.startswith("engine-")] == []
        errors.clear()
        decoder.reset()
        assert same(decode(plain), decode(decoder))


def test_of_several_errors_the_first_in_program_order_is_raised(package: Package) -> None:
    """Even where it comes last: b begins when norm2 has failed long since."""
    program = branching()
    errors: dict[str, BaseException] = {"b": ValueError("first"), "norm2": ValueError("second")}
    unit = Failing(Decoder(package), errors)
    with AsyncExecutor(program, unit, delays={"a": 0.05}) as executor:
        with pytest.raises(ValueError, match="first"):
            executor.run({"tokens": TOKENS, "rows": TOKENS[:1] * 0})
        del errors["b"]
        with pytest.raises(ValueError, match="second"):
            executor.run({"tokens": TOKENS, "rows": TOKENS[:1] * 0})


def test_bad_numbers_name_step_and_op_as_sync_does(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_FAULT", "nan@L01.attn.out")
    monkeypatch.setenv("ENGINE_FAULT_AFTER", "2")
    program = program_of(package, fused=True)
    messages = []
    for decoder in pair(package, program):
        with pytest.raises(NonFinite) as caught:
            decode(decoder)
        messages.append(str(caught.value))
        decoder.executor.close()
    assert messages[0] == messages[1]
    assert messages[0].startswith("step 2, op L01.attn.out: ")


def test_an_error_behind_the_result_comes_with_a_later_step(
    package: Package,
) -> None:
    program = program_of(package, fused=False)
    last = Op("watch", "add", ("L01.ffn.add", "L01.ffn.add"), ("watch",))
    watched = Program((*program.ops, last), program.inputs, program.output, program.caches)
    unit = Failing(Decoder(package), {"watch": OSError("nobody looked")})
    executor = AsyncExecutor(watched, unit)
    decoder = with_executor(package, executor, watched)

    def steps() -> None:  # whether the first is over before the op or not
        for token in TOKENS:
            decoder.advance(np.array([token]))

    with pytest.raises(OSError, match="nobody looked"):
        steps()
    executor.close()


class Hanging:
    """Another unit whose one op lasts until it is let go."""

    def __init__(self, decoder: Decoder, op: str) -> None:
        self.inner, self.op = decoder.unit, op
        self.name, self.dtype, self.package = "hanging", self.inner.dtype, self.inner.package
        self.begun, self.let_go = threading.Event(), threading.Event()

    def execute(self, op: Op, state: State) -> None:
        if op.id == self.op:
            self.begun.set()
            assert self.let_go.wait(60)
        self.inner.execute(op, state)


def test_a_stuck_op_is_named_with_what_waits_for_it(package: Package) -> None:
    program = program_of(package, fused=False)
    unit = Hanging(Decoder(package), "L00.attn.mix")
    executor = AsyncExecutor(program, unit, deadline_s=0.3)
    decoder = with_executor(package, executor, program)
    with pytest.raises(ExecutorStuck) as caught:
        decoder.advance(TOKENS)
    unit.let_go.set()
    message = str(caught.value)
    assert "step.end waits for head.logits" in message
    assert "vector is at L00.attn.mix" in message
    assert "matrix waits before L00.attn.out for L00.attn.mix" in message
    assert "control waits before head.select for L01.ffn.add" in message
    for thread in threading.enumerate():
        if thread.name.startswith("engine-"):
            thread.join(20)
    executor.close()


def test_an_interrupt_joins_every_thread(package: Package) -> None:
    program = program_of(package, fused=False)
    unit = Hanging(Decoder(package), "L01.ffn.up")
    executor = AsyncExecutor(program, unit)
    decoder = with_executor(package, executor, program)

    def interrupt() -> None:
        assert unit.begun.wait(60)
        signal.raise_signal(signal.SIGINT)  # to the process; the main thread waits for the step
        unit.let_go.set()

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        decoder.advance(TOKENS)
    helper.join()
    assert [t for t in threading.enumerate() if t.name.startswith("engine-")] == []
    decoder.reset()
    unit.op = ""
    with executor:
        assert same(decode(Decoder(package)), decode(decoder))


def test_a_closed_executor_refuses_and_closing_twice_is_nothing(package: Package) -> None:
    program = program_of(package, fused=True)
    executor = AsyncExecutor(program, Decoder(package).unit)
    decoder = with_executor(package, executor, program)
    decoder.advance(TOKENS)
    executor.close()
    executor.close()
    with pytest.raises(RuntimeError, match="the executor is closed"):
        decoder.advance(TOKENS[:1])


def test_an_executor_that_is_dropped_ends_its_threads(package: Package) -> None:
    program = program_of(package, fused=True)
    decoder = with_executor(package, AsyncExecutor(program, Decoder(package).unit), program)
    decoder.advance(TOKENS)
    del decoder  # the fixture looks for threads


def test_the_trace_has_every_op_once_a_step_with_its_part(package: Package) -> None:
    program, trace = program_of(package, fused=False), Trace()
    delays = {"embed.tokens": 0.02, "L00.attn.kv": 0.02}
    with AsyncExecutor(program, Decoder(package).unit, trace, delays=delays) as ex:
        decoder = with_executor(package, ex, program)
        decoder.advance(TOKENS[:4])
        decoder.advance(TOKENS[4:5])
    rows = trace.rows()
    for step in (0, 1):
        ops = rows[rows[:, 0] == step]
        assert sorted(ops[:, 1]) == list(range(len(program.ops)))
        spans = {program.ops[index].id: (start, end) for _, index, start, end in ops}
        assert all(start <= end for start, end in spans.values())
        for edge in ex.schedule.edges:
            if edge.consumer in spans:
                assert spans[edge.producer][1] <= spans[edge.consumer][0], str(edge)
        for op_id in delays:
            start, end = spans[op_id]
            assert end - start >= 20_000_000
    assert ex.parts == tuple(part_of(op) for op in program.ops)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delays": {"L07.attn.q": 0.1}}, "op 'L07.attn.q' is not in this program; near: L00"),
        ({"delays": {"L00.attn.q": -1.0}}, "delay of op L00.attn.q is -1.0, expected seconds"),
        ({"delays": {"L00.attn.q": float("nan")}}, "expected seconds from 0 on"),
        ({"async_ops": ["L00.attn.w"]}, "async op 'L00.attn.w' is not in this program"),
        ({"async_ops": "some"}, "expected 'all', 'none' or a list"),
    ],
)
def test_what_the_program_does_not_have_is_refused(
    options: dict[str, Any], message: str, package: Package
) -> None:
    with pytest.raises(ValueError, match=message):
        AsyncExecutor(program_of(package, fused=False), Decoder(package).unit, **options)
