"""Each end of an engine gets the class that its evidence proves, and never more than that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.runtime.queues import Cancelled, ExecutorStuck, Job, Queues
from harness.triage.case import Case
from harness.triage.deciding import classes, decide, title
from harness.triage.finding import Finding
from harness.triage.signature import note_of

End = Callable[..., Case]
SDOT, SMMLA, UDF, NOP = "0094824e", "00a4824e", "00000000", "1f2003d5"
OOM_LINE = (
    "[ 2210.331902] Memory cgroup out of memory: Killed process 4212 (python3) "
    "total-vm:1239424kB, anon-rss:261240kB, file-rss:8192kB, shmem-rss:0kB, UID:0"
)


def record(
    signal: int = 4,
    code: str = SDOT,
    *,
    pc: int = 0xFFFF9C2D1A40,
    lines: Sequence[str] = (),
    machine: str = "aarch64",
) -> str:
    """A record whose code is mapped at 0xffff9c2c0000, and heap at 0xaaaa00000000."""
    return "\n".join(
        [
            "crash-record 1",
            f"machine {machine}",
            "build 0123456789abcdef0123456789abcdef",
            f"signal {signal}",
            *(lines or ["code 1", f"address 0x{pc:x}"]),
            "process 4212",
            "thread 4212",
            "op L00.attn.q",
            f"pc 0x{pc:x}",
            "sp 0xffffe0001000",
            f"at 0x{pc:x} {code}{NOP}",
            "maps",
            "aaaa00000000-aaaa00100000 rw-p 00000000 00:00 0 ",
            "ffff9c2c0000-ffff9c2dd000 r-xp 00000000 b3:02 1234    /board/libdecode_native.so",
            "end",
            "",
        ]
    )


def found(case: Case) -> Finding:
    finding = decide(case)
    assert finding is not None
    return finding


def test_classes_are_files_in_the_order_in_which_they_decide() -> None:
    names = [one.NAME for one in classes()]
    order = ["board-reset", "out-of-memory", "policy-kill", "illegal-instruction", "out-of-bounds"]
    order += ["non-finite", "deadlock", "lost-event", "hang", "killed"]
    assert [name for name in names if name in order] == order
    assert len({one.ORDER for one in classes()}) == len(names)
    assert all(title(name) != name for name in names)


def test_a_run_that_ended_well_has_no_crash(end: End) -> None:
    assert decide(end("finished", code=0)) is None


# --- illegal instructions ------------------------------------------------------------------------


def test_an_instruction_of_an_extension_that_the_cores_lack_is_named_with_its_flag(
    end: End,
) -> None:
    native = {"isa": "dotprod", "features": ["fp", "asimd"], "missing": ["asimddp"]}
    case = end(signal="SIGILL", record=record(), ready={"native": native})
    finding = found(case)
    assert finding.name == "illegal-instruction"
    assert finding.kind == "sdot"
    assert "sdot in libdecode_native.so+0x11a40 needs dotprod" in finding.headline
    assert "the cores have no asimddp" in finding.sentence
    assert "-march=armv8.2-a+dotprod" in finding.sentence
    assert "run the neon kernels" in finding.remedy
    assert (finding.signal, finding.code, finding.op) == ("SIGILL", "ILL_ILLOPC", "L00.attn.q")


def test_the_flag_is_that_of_the_kernels_that_ran_where_several_allow_it(end: End) -> None:
    native = {"isa": "i8mm", "features": ["asimd"]}
    sentence = found(end(signal="SIGILL", record=record(), ready={"native": native})).sentence
    assert "-march=armv8.2-a+dotprod+i8mm" in sentence
    matrix = found(end(signal="SIGILL", record=record(code=SMMLA), ready={"native": native}))
    assert (matrix.kind, "i8mm" in matrix.headline) == ("smmla", True)


@pytest.mark.parametrize(
    ("code", "features", "words"),
    [
        (SDOT, ["asimd", "asimddp"], "which the cores are said to have"),
        (NOP, ["asimd"], "which every aarch64 core has"),
        (UDF, ["asimd"], "a trap that the compiler put there"),
        ("ffffffff", ["asimd"], "are no instruction"),
    ],
)
def test_what_is_no_missing_extension_is_not_called_one(
    code: str, features: list[str], words: str, end: End
) -> None:
    case = end(signal="SIGILL", record=record(code=code), ready={"native": {"features": features}})
    assert words in found(case).headline


def test_a_jump_to_where_no_code_is_is_corrupted_control_flow(end: End) -> None:
    for pc in (0xAAAA00000100, 0x1234):
        finding = found(end(signal="SIGILL", record=record(pc=pc)))
        assert finding.kind == "corrupted control flow"
        assert "where no code is" in finding.headline


def test_what_the_dying_process_wrote_comes_before_what_it_was_seen_to_end_by(
    end: End,
) -> None:
    # Two threads meet the instruction; the emulator ends by another signal meanwhile.
    finding = found(end(signal="SIGSEGV", record=record()))
    assert finding.name == "illegal-instruction"
    assert (finding.signal, finding.code) == ("SIGILL", "ILL_ILLOPC")


def test_a_signal_that_was_sent_blames_no_instruction(end: End) -> None:
    case = end(signal="SIGILL", record=record(lines=["code 0", "sender 77"]))
    assert "sent SIGILL by process 77" in found(case).headline


def test_without_a_record_the_kernels_line_and_the_engines_word_are_told(end: End) -> None:
    line = "[  101.2] python3[4212]: undefined instruction: pc=0000ffff9c2d1a40"
    native = {"isa": "dotprod", "missing": ["asimddp"]}
    case = end(
        signal="SIGILL",
        ready={"native": native},
        evidence={"kernel": {"source": "kmsg", "lines": [line]}},
    )
    finding = found(case)
    assert "its dotprod kernels need asimddp" in finding.headline
    assert line in finding.sentence


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        (0x18, "null pointer"),
        (0xAAAA00100000 + 64, "overrun"),
        (0xAAAA00000000 - 64, "underrun"),
        (0xFFFF9C2C0000, "protected"),
        (0x5555_0000_0000, "wild pointer"),
    ],
)
def test_a_bad_access_is_told_by_where_its_address_lies(address: int, kind: str, end: End) -> None:
    case = end(signal="SIGSEGV", record=record(11, NOP, lines=["code 1", f"address 0x{address:x}"]))
    finding = found(case)
    assert (finding.name, finding.kind, finding.code) == ("out-of-bounds", kind, "SEGV_MAPERR")
    assert f"0x{address:x}" in finding.headline


def test_a_sanitisers_report_goes_before_the_abort_that_follows_it(end: End) -> None:
    report = (
        "==1==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x61 at pc 0x7f bp 0x7f\n"
        "WRITE of size 4 at 0x61 thread T0\n"
        "    #0 0x7f in float_products /decode_native/kernels_linear.h:201:30\n\n"
        "SUMMARY: AddressSanitizer: heap-buffer-overflow\n"
    )
    finding = found(end(signal="SIGABRT", output=report))
    assert (finding.name, finding.kind) == ("out-of-bounds", "heap-buffer-overflow")
    assert "a write of 4 bytes in float_products (kernels_linear.h:201:30)" in finding.headline


@pytest.mark.parametrize("where", ["kernel", "journal"])
def test_a_kill_that_the_kernel_recorded_for_this_process_is_out_of_memory(
    where: str, end: End
) -> None:
    case = end(signal="SIGKILL", evidence={where: {"source": "kmsg", "lines": [OOM_LINE]}})
    finding = found(case)
    assert (finding.name, finding.kind) == ("out-of-memory", "memory cgroup")
    assert OOM_LINE in finding.sentence


def test_a_kill_of_another_process_is_no_evidence(end: End) -> None:
    other = OOM_LINE.replace("4212", "77")
    case = end(signal="SIGKILL", evidence={"kernel": {"source": "kmsg", "lines": [other]}})
    assert found(case).name == "killed"


def test_the_counter_of_its_own_cgroup_is_evidence(end: End) -> None:
    group = {"before": {"events": {"oom_kill": 2}}, "after": {"events": {"oom_kill": 3}}}
    assert found(end(signal="SIGKILL", evidence={"cgroup": group})).kind == "memory cgroup"
    same = {"before": {"events": {"oom_kill": 2}}, "after": {"events": {"oom_kill": 2}}}
    assert found(end(signal="SIGKILL", evidence={"cgroup": same})).name == "killed"


def test_a_kill_by_policy_is_told_with_the_record_and_not_as_out_of_memory(end: End) -> None:
    line = (
        "I lowmemorykiller: Kill 'com.termux' (4212), uid 10123, oom_score_adj 900 to free "
        "812340kB rss, 0kB swap; reason: low watermark is breached"
    )
    case = end(signal="SIGKILL", evidence={"journal": {"source": "logcat", "lines": [line]}})
    finding = found(case)
    assert finding.name == "policy-kill"
    assert "low watermark is breached" in finding.headline


def test_without_evidence_the_cause_is_unknown_and_the_memory_trend_stands_beside_it(
    end: End,
) -> None:
    case = end(signal="SIGKILL", samples=((200.0, 900.0), (1800.0, 40.0)), evidence={})
    finding = found(case)
    assert (finding.name, finding.headline) == ("killed", "killed, cause unknown")
    assert "from 200 to 1800 MB" in finding.sentence


def test_a_reset_board_says_nothing_about_the_engine(end: End) -> None:
    finding = found(end("board-reset", reason="boot_id was a, is b", signal="SIGILL"))
    assert (finding.name, finding.finding) == ("board-reset", False)


# --- numbers, waiting ----------------------------------------------------------------------------


def test_bad_numbers_are_told_with_op_layer_range_and_scale(end: End) -> None:
    error = {
        "kind": "NonFinite", "message": "step 3, op L03.attn.out: 1 of 576 values are NaN",
        "step": 3, "layer": 3, "op": "L03.attn.out",
        "evidence": {
            "kind": "NaN", "range of the rest": [-3.5, 12.25],
            "weight L03.attn.out": "q4 576x576, largest scale 0.0123",
        },
    }  # fmt: skip
    finding = found(end(error=error, code=1))
    assert (finding.name, finding.op, finding.kind) == ("non-finite", "L03.attn.out", "NaN")
    for words in ("layer 3", "-3.5 to 12.25", "largest scale 0.0123"):
        assert words in finding.sentence


def stuck(queues: Queues, jobs: Sequence[tuple[str, Job]], awaited: str) -> dict[str, Any]:
    """The error event of queues that do not get on."""
    queues.start({})
    for queue, job in jobs:
        queues.submit(queue, job)
    with pytest.raises(ExecutorStuck) as caught:
        queues.wait([(awaited, 1)], "the caller")
    queues.stop()
    return {
        "kind": "ExecutorStuck", "message": str(caught.value), "evidence": caught.value.evidence
    }  # fmt: skip


def nothing() -> None:
    pass


def dropped() -> None:
    raise Cancelled


def test_queues_that_wait_for_each_other_are_a_deadlock_with_its_ring(end: End) -> None:
    jobs = [
        ("matrix", Job("A", (0, 0), (("B", 1),), nothing)),
        ("vector", Job("B", (0, 1), (("A", 1),), nothing)),
    ]
    finding = found(end(error=stuck(Queues(["matrix", "vector"], 0.3), jobs, "B"), code=1))
    assert (finding.name, finding.kind) == ("deadlock", "event cycle")
    assert "waits before A for B, which vector has" in finding.headline
    assert "waits before B for A, which matrix has" in finding.headline


def test_an_op_whose_end_nobody_was_told_is_a_lost_event(end: End) -> None:
    jobs = [
        ("matrix", Job("A", (0, 0), (), dropped)),
        ("vector", Job("B", (0, 1), (("A", 1),), nothing)),
    ]
    finding = found(end(error=stuck(Queues(["matrix", "vector"], 0.3), jobs, "B"), code=1))
    assert (finding.name, finding.op) == ("lost-event", "A")
    assert "vector waits for A, whose end nobody will tell" in finding.headline


FRAMES = """Thread 0x00007f01 (most recent call first):
  File "/b/engine/units/faulty.py", line 150 in other_thread

Current thread 0x00007f02 (most recent call first):
  File "/b/engine/units/faulty.py", line 158 in _abba
"""


def look(*threads: str) -> str:
    lines = [f"thread {n} (python3): {text}" for n, text in enumerate(threads, 9)]
    return "\n".join([f"process 9, {len(threads)} threads", *lines, FRAMES])


ASLEEP = "state S, 0.00 of 0.30 s on a CPU, waits in futex_wait_queue"


@pytest.mark.parametrize(
    ("threads", "name", "kind"),
    [
        ((ASLEEP, ASLEEP), "deadlock", "locks"),
        ((ASLEEP, "state R, 0.30 of 0.30 s on a CPU"), "hang", "spin"),
        (("state D, 0.00 of 0.30 s on a CPU, waits in rknpu_wait",), "hang", "driver rknpu_wait"),
        (("state S, 0.00 of 0.30 s on a CPU, waits in poll_schedule_timeout",), "hang", "waiting"),
    ],
)
def test_an_engine_that_stood_still_is_told_by_what_its_threads_did(
    threads: tuple[str, ...], name: str, kind: str, end: End
) -> None:
    case = end("hung", reason="silent", stacks=look(*threads), signal="SIGTERM",
               ended_by="supervisor")  # fmt: skip
    finding = found(case)
    assert (finding.name, finding.kind) == (name, kind)
    assert finding.frames[0] == "faulty.py:158 _abba"


def test_an_npu_that_gave_up_is_named_and_its_canary_asked_for(end: End) -> None:
    line = "[ 3301.7] RKNPU: failed to wait job, task counter: 0, flags: 0x5, ret = -110"
    case = end(
        "hung",
        stacks=look(ASLEEP.replace("S,", "R,")),
        signal="SIGKILL",
        ended_by="supervisor",
        evidence={"kernel": {"source": "kmsg", "lines": [line]}},
    )
    finding = found(case)
    assert finding.kind == "npu"
    assert "health" in finding.remedy


# --- signatures ----------------------------------------------------------------------------------


def test_the_same_crash_on_another_board_has_the_same_signature_and_another_op_has_not(
    end: End,
) -> None:
    native = {"native": {"isa": "dotprod", "features": ["asimd"]}, "model": "a"}
    first = end(signal="SIGILL", record=record(), ready=native)
    moved = record().replace("ffff9c2", "ffff8d1")  # loaded elsewhere
    second = end(signal="SIGILL", record=moved, ready={**native, "model": "b"})
    other = end(signal="SIGILL", record=record().replace("attn.q", "attn.k"), ready=native)
    notes = [note_of(case, found(case)) for case in (first, second, other)]
    assert notes[0].hash == notes[1].hash != notes[2].hash
    assert notes[0].finer != notes[1].finer
    assert notes[0].signature == (
        "illegal-instruction | SIGILL ILL_ILLOPC | L00.attn.q | libdecode_native.so+0x11a40 | sdot"
    )


def test_evidence_of_any_form_is_no_reason_to_fail(end: End) -> None:
    for junk in (None, 3, [], {"lines": 3}, {"lines": [3, None]}, "x"):
        evidence = dict.fromkeys(
            ("kernel", "journal", "cgroup", "process", "pressure", "pstore", "record"), junk
        )
        assert found(end(signal="SIGKILL", evidence=evidence)).name == "killed"
        assert found(end(signal="SIGILL", evidence=evidence, ready={"native": junk})).name
        assert found(end(signal="SIGSEGV", evidence=evidence)).name == "out-of-bounds"
