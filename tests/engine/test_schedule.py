"""Placement, schedules and the happens-before check, against brute force on small programs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.decode import Decoder
from engine.package import Package
from engine.program.conflicts import BEGIN, END
from engine.program.happens_before import check
from engine.program.ops import KINDS, Op, Program
from engine.program.passes import apply
from engine.program.placement import DEFAULT, PARTS, part_of, placement
from engine.program.schedule import Edge, Schedule, async_ids, derive, queues_of

Pair = tuple[str, str, int]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Up to eight ops that read each other, some appending to caches, some leading nowhere."""
    caches = ("c0", "c1")
    known = ["i0", "i1"]
    ops = []
    for number in range(draw(st.integers(2, 8))):
        reads = draw(st.lists(st.sampled_from([*known, *caches]), min_size=1, max_size=3))
        kind = draw(st.sampled_from(KINDS))
        written = draw(st.sampled_from(caches)) if kind == "kv_append" else f"b{number}"
        ops.append(Op(f"op{number}", kind, tuple(dict.fromkeys(reads)), (written,)))
        if written not in caches:
            known.append(written)
    return Program(tuple(ops), ("i0", "i1"), draw(st.sampled_from(known)), caches)


@st.composite
def memories(draw: st.DrawFn, program: Program) -> Mapping[str, tuple[int, int]]:
    names = [name for op in program.ops for name in op.writes if name not in program.caches]
    chosen = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    starts = {name: draw(st.integers(0, 12)) for name in chosen}
    return {name: (start, start + draw(st.integers(1, 4))) for name, start in starts.items()}


placements = st.dictionaries(st.sampled_from(KINDS), st.sampled_from(PARTS)).map(placement)


def unordered(
    program: Program, schedule: Schedule, memory: Mapping[str, tuple[int, int]], steps: int = 4
) -> set[Pair]:
    """(first, second, steps apart) of conflicting acts that no path orders: by brute force."""
    acts: list[tuple[str, set[str], set[str]]] = [
        (BEGIN, set(), set(program.inputs)),
        *((op.id, set(op.reads), set(op.writes)) for op in program.ops),
        (END, {program.output}, set()),
    ]
    arrows: dict[object, set[object]] = {}

    def arrow(first: object, second: object) -> None:
        arrows.setdefault(first, set()).add(second)

    caller: object = None
    newest: dict[str, object] = {}
    parts = {op_id: part for part, queue in schedule.queues.items() for op_id in queue}
    for step, (act, _, _) in itertools.product(range(steps), acts):
        here = (act, step)
        for edge in schedule.edges:
            if edge.consumer == act and edge.steps <= step:
                arrow((edge.producer, step - edge.steps), here)
        arrow(caller, here)
        if act in (BEGIN, END):
            caller = here
            continue
        arrow(newest.get(parts[act]), here)
        newest[parts[act]] = here
        if act not in schedule.asynchronous:
            waited = ("waited", *here)
            arrow(caller, waited)
            arrow(here, waited)
            caller = waited

    def reachable(start: object) -> set[object]:
        seen: set[object] = set()
        left = [start]
        while left:
            for following in arrows.get(left.pop(), ()):
                if following not in seen:
                    seen.add(following)
                    left.append(following)
        return seen

    def meet(names: set[str], others: set[str]) -> bool:
        for name, other in itertools.product(names, others):
            if name == other:
                return True
            if name in memory and other in memory:
                (a, b), (c, d) = memory[name], memory[other]
                if max(a, c) < min(b, d):
                    return True
        return False

    found = set()
    nodes = list(itertools.product(range(steps), acts))
    for index, (step, (first, reads, writes)) in enumerate(nodes):
        behind = reachable((first, step))
        for later, (second, more_reads, more_writes) in nodes[index + 1 :]:
            touches = meet(writes, more_reads | more_writes) or meet(reads, more_writes)
            if touches and (second, later) not in behind:
                found.add((first, second, later - step))
    return found


@given(st.data())
@settings(max_examples=150)
def test_a_derived_schedule_orders_every_conflict_whatever_is_asynchronous(
    data: st.DataObject,
) -> None:
    program, table = data.draw(programs()), data.draw(placements)
    memory = data.draw(memories(program))
    schedule = derive(program, table, memory=memory)
    assert check(program, schedule, memory) == []
    assert unordered(program, schedule, memory) == set()
    ids = data.draw(st.lists(st.sampled_from([op.id for op in program.ops]), unique=True))
    assert check(program, schedule.with_async(program, ids), memory) == []


@given(st.data())
@settings(max_examples=150)
def test_every_edge_of_a_derived_schedule_is_needed_and_its_loss_is_found(
    data: st.DataObject,
) -> None:
    program, table = data.draw(programs()), data.draw(placements)
    memory = data.draw(memories(program))
    schedule = derive(program, table, memory=memory)
    for edge in schedule.edges:
        findings = check(program, schedule.without(edge), memory)
        assert (edge.producer, edge.consumer, edge.steps) in {
            (finding.first, finding.second, finding.missing.steps) for finding in findings
        }


@given(st.data())
@settings(max_examples=200)
def test_the_check_finds_what_brute_force_finds(data: st.DataObject) -> None:
    program, table = data.draw(programs()), data.draw(placements)
    memory = data.draw(memories(program))
    schedule = derive(program, table, memory=memory)
    ids = data.draw(st.lists(st.sampled_from([op.id for op in program.ops]), unique=True))
    schedule = schedule.with_async(program, ids)
    edges = sorted(schedule.edges, key=str)
    lost = data.draw(st.lists(st.sampled_from(edges), unique=True)) if edges else []
    schedule = schedule.without(*lost)
    found = {(f.first, f.second, f.missing.steps) for f in check(program, schedule, memory)}
    wanted = unordered(program, schedule, memory)
    assert found <= wanted
    assert bool(found) == bool(wanted)
    # Adding what the findings name repairs everything.
    named = {f.missing for f in check(program, schedule, memory)}
    repaired = dataclasses.replace(schedule, edges=schedule.edges | named)
    assert unordered(program, repaired, memory) == set()


def small(*, append: str = "vector") -> tuple[Program, Schedule]:
    """Append on one part, attention on another."""
    program = Program(
        (
            Op("kv", "kv_append", ("x", "x", "slots"), ("cache",)),
            Op("mix", "attention", ("x", "cache"), ("mix",)),
            Op("out", "linear", ("mix",), ("out",)),
        ),
        ("x", "slots"),
        "out",
        ("cache",),
    )
    return program, derive(program, placement({"kv_append": append, "attention": "control"}))


def test_a_finding_names_both_ops_the_buffer_and_the_missing_edge() -> None:
    program, schedule = small()
    assert schedule.edges == {Edge("kv", "mix"), Edge("mix", "out"), Edge("out", END)}
    (finding,) = check(program, schedule.without(Edge("kv", "mix")))[:1]
    assert (finding.hazard, finding.first, finding.second) == ("RAW", "kv", "mix")
    assert finding.buffer == "cache" and finding.missing == Edge("kv", "mix")
    assert str(finding) == (
        "RAW: mix may read cache before it is written by kv; no queue or event orders them, the "
        "edge kv → mix is missing"
    )


def test_an_op_that_is_waited_for_needs_no_edge() -> None:
    program, schedule = small()
    lost = schedule.without(Edge("kv", "mix"))
    assert check(program, lost.with_async(program, ["mix", "out"])) == []
    assert check(program, lost.with_async(program, ["kv"]))


def test_a_result_that_is_not_waited_for_is_found() -> None:
    program, schedule = small()
    findings = check(program, schedule.without(Edge("out", END)))
    assert ("RAW", "out", END) in {(f.hazard, f.first, f.second) for f in findings}


def test_ops_that_lead_nowhere_hold_back_the_next_step() -> None:
    """The caller does not wait for an append and an attention that the logits do not need."""
    program = Program(
        (
            Op("in", "select", ("x",), ("in",)),
            Op("watch", "attention", ("in", "cache"), ("seen",)),
            Op("kv", "kv_append", ("in", "in", "in"), ("cache",)),
            Op("out", "linear", ("in",), ("out",)),
        ),
        ("x",),
        "out",
        ("cache",),
    )
    table = placement({"select": "matrix", "kv_append": "control"})
    schedule = derive(program, table)
    across = {str(edge) for edge in schedule.edges if edge.steps}
    assert across == {"kv → in of the next step"}  # and watch before kv, within the step
    findings = [str(finding) for finding in check(program, schedule.without(Edge("kv", "in", 1)))]
    assert findings == [
        "WAR: in of the next step may overwrite in before it is read by watch; no queue or event "
        "orders them, the edge watch → in of the next step is missing",
        "WAR: in of the next step may overwrite in before it is read by kv; no queue or event "
        "orders them, the edge kv → in of the next step is missing",
        "RAW: watch of the next step may read cache before it is written by kv; no queue or event "
        "orders them, the edge kv → watch of the next step is missing",
    ]


def test_memory_that_is_used_again_needs_order_too() -> None:
    program = Program(
        (
            Op("a", "add", ("x",), ("a",)),
            Op("b", "linear", ("a",), ("b",)),
            Op("c", "add", ("x",), ("c",)),
            Op("d", "linear", ("c",), ("d",)),
            Op("e", "add", ("b", "d"), ("e",)),
        ),
        ("x",),
        "e",
        (),
    )
    apart, together = derive(program), derive(program, memory={"a": (0, 8), "c": (4, 12)})
    assert together.edges - apart.edges == {Edge("b", "c")}
    (finding,) = check(program, apart, {"a": (0, 8), "c": (4, 12)})
    assert str(finding) == (
        "WAR: c may overwrite c, which shares memory with a before it is read by b; no queue or "
        "event orders them, the edge b → c is missing"
    )


def test_fused_ops_go_where_their_products_go(package_in: Callable[[str], Package]) -> None:
    program = apply(Decoder(package_in("F32")).program)
    parts = {op.id: part_of(op) for op in program.ops}
    assert parts["L00.attn.qkv"] == parts["L00.ffn.gate_up"] == parts["head.logits"] == "matrix"
    assert parts["L00.attn.mix"] == parts["embed.tokens"] == "vector"
    assert parts["head.select"] == "control"
    moved = queues_of(program, placement({"attention": "matrix"}))
    assert "L00.attn.mix" in moved["matrix"]


@pytest.mark.parametrize("fused", [False, True])
def test_the_real_program_is_ordered_and_every_edge_counts(
    fused: bool, package_in: Callable[[str], Package]
) -> None:
    program = Decoder(package_in("F32")).program
    program = apply(program) if fused else program
    for table in (DEFAULT, placement({"kv_append": "control", "attention": "matrix"})):
        schedule = derive(program, table)
        assert check(program, schedule) == []
        for edge in schedule.edges:
            assert check(program, schedule.without(edge)), str(edge)


def test_a_placement_names_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="op kind 'softmax' is not known, expected one of embed"):
        placement({"softmax": "vector"})
    with pytest.raises(ValueError, match="a fused op goes where its parts go"):
        placement({"fused": "matrix"})
    with pytest.raises(
        ValueError, match="placement of rmsnorm: part 'npu' is not known, expected one of control"
    ):
        placement({"rmsnorm": "npu"})


def test_a_schedule_that_does_not_fit_is_refused() -> None:
    program, schedule = small()

    def changed(**changes: object) -> Schedule:
        return dataclasses.replace(schedule, **changes)  # type: ignore[arg-type]

    for bad, message in [
        (changed(queues={"vector": ("kv", "mix")}), "'out' is not in exactly one queue"),
        (changed(queues={"vector": ("kv", "mix", "out", "kv")}), "'kv' is not in exactly one"),
        (changed(queues={"vector": ("mix", "kv", "out")}), "queue vector is not in the order"),
        (changed(edges=frozenset({Edge("out", "kv")})), "edge out → kv points backwards"),
        (changed(edges=frozenset({Edge("ghost", "kv")})), "names 'ghost', which is no op"),
        (changed(edges=frozenset({Edge("kv", "mix", 2)})), "spans 2 steps"),
        (changed(asynchronous=frozenset({"ghost"})), "async op 'ghost' is not in the program"),
    ]:
        with pytest.raises(ValueError, match=message):
            check(program, bad)
    with pytest.raises(KeyError, match="the schedule has no edge kv → out"):
        schedule.without(Edge("kv", "out"))


def test_async_ops_are_all_none_or_ids_of_the_program() -> None:
    program, _ = small()
    assert async_ids(program, "all") == {"kv", "mix", "out"}
    assert async_ids(program, "none") == frozenset()
    with pytest.raises(ValueError, match="expected 'all', 'none' or a list of op ids"):
        async_ids(program, "some")
    with pytest.raises(ValueError, match="async op 'mixx' is not in this program; near: mix"):
        async_ids(program, ["kv", "mixx"])
