"""Crashes planted for real on virtual boards, x86-64 and emulated Arm: is the class right, and for
an illegal instruction the function and the instruction?

Each case is one run of a stage on a board of its own. What this machine cannot plant is left out
and said so: an instruction that its cores lack (there must be one), a memory limit (a cgroup that
this user may make), an emulated Arm userland.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import psutil

from engine.formats.gguf_writer import write_gguf
from engine.formats.synthetic import SyntheticCheckpoint
from engine.native.build import SOURCES, build
from engine.native.compilers import Target, local_compiler
from engine.native.features import detect
from harness.boards import virtual
from harness.boards.virtual import namespace
from harness.boards.virtual.userland import NoUserland, userland
from harness.deploy.models import PreparedModel, prepare_model
from harness.farm.progress import Silent
from harness.farm.runner import Resume, bringup
from harness.farm.selection import bringup_options, choose_boards, choose_stages
from harness.paths import cache_dir
from harness.store import Store
from harness.verdicts import CrashNote
from tests.planted.cases import Bench, Case, Context
from tests.planted.cases import Target as Goal

CLASS, INSTRUCTION, OP = "crash class", "crash instruction", "crash op"
OPS = ("L00.attn.out", "L00.ffn.up", "L01.attn.q", "L01.ffn.down")  # of one kind: linear
# Those that another queue waits for, and that no other op is fused with under another name.
AWAITED = ("L00.attn.out", "L01.ffn.down")
STALL_S, EMULATED_STALL_S = 8.0, 90.0  # an emulated Python takes long to start
LIMIT_BYTES = 220 << 20  # of a board's cgroup: the engine starts in it, and outgrows it

# /proc/cpuinfo's name → bytes of an instruction of it, its mnemonic
FOREIGN = {
    "avx512_vp2intersect": ("0x62,0xf2,0x6f,0x48,0x68,0xcb", "vp2intersectd"),
    "sse4a": ("0x66,0x0f,0x79,0xc8", "extrq"),
    "fma4": ("0xc4,0xe3,0xf9,0x69,0xc2,0x10", "vfmaddpd"),
}


@dataclasses.dataclass(frozen=True)
class Planted:
    """A board's entry, and what has to be named."""

    name: str
    entry: str
    truth: str
    function: str = ""
    instruction: str = ""
    op: str = ""
    memory_limit: bool = False
    stage: str = "tiny"
    stall_s: float = STALL_S


def plants(context: Context, folder: Path, number: int) -> list[Planted]:
    """What can be planted here; the seed and `number` say in which ops."""
    random = Random(f"{context.seed} {number}")
    found = [
        _fault("overrun", "overrun:4000000", random, "native", "out-of-bounds", tells_op=True),
        _fault("sigkill", "signal:9", random, "packed", "killed"),
        _fault("nan", "nan", random, "native", "non-finite", tells_op=True, ops=AWAITED),
        _fault(
            "lost",
            "lost",
            random,
            "packed, executor: async",
            "lost-event",
            tells_op=True,
            ops=AWAITED,
        ),
        _fault("abba", "abba", random, "packed", "deadlock"),
        _fault("spin", "spin", random, "packed", "hang"),
        _fault("abort", "signal:6", random, "native", "fatal-signal"),
    ]
    foreign = _foreign(folder)
    if foreign is not None:
        found.append(foreign)
    else:
        context.tell("crashes: every instruction known here runs on this machine: none is planted")
    group = _cgroup()
    if group is not None:
        group.rmdir()  # it is made again when its case comes
        leak = _fault("limit", "leak:16", random, "packed", "out-of-memory")
        found.append(dataclasses.replace(leak, memory_limit=True))
    else:
        context.tell("crashes: no memory cgroup can be made here: no limit is planted")
    if namespace.supported():
        with contextlib.suppress(NoUserland):
            userland()
            found += [
                Planted(
                    "a53",
                    "{virtual: {isa: cortex-a53}, engine: {unit: native, kernels: dotprod}}",
                    "illegal-instruction",
                    "int8_DN_Q4",
                    "sdot",
                    stage="accuracy",
                    stall_s=EMULATED_STALL_S,
                ),
                Planted(
                    "a53-overrun",
                    "{virtual: {isa: cortex-a53}, engine: {unit: native}, environment: "
                    "{ENGINE_FAULT: 'overrun:4000000@L01.ffn.down'}}",
                    "out-of-bounds",
                    stall_s=EMULATED_STALL_S,
                ),
                Planted(
                    "a76-i8mm",
                    "{virtual: {isa: cortex-a76}, engine: {unit: native, kernels: i8mm}}",
                    "illegal-instruction",
                    "int8_DN_Q4",
                    "usdot",
                    stage="accuracy",
                    stall_s=EMULATED_STALL_S,
                ),
            ]
    found += [Planted(f"clean-{unit}", f"{{virtual: {{}}, engine: {{unit: {unit}}}}}", "")
              for unit in ("native", "packed")]  # fmt: skip
    return found


def _fault(
    name: str,
    kind: str,
    random: Random,
    unit: str,
    truth: str,
    *,
    tells_op: bool = False,
    ops: Sequence[str] = OPS,
) -> Planted:
    op = random.choice(ops)
    fault = f"{kind}@{op}"
    entry = f"{{virtual: {{}}, environment: {{ENGINE_FAULT: '{fault}'}}, engine: {{unit: {unit}}}}}"
    return Planted(name, entry, truth, op=op if tells_op else "")


def _foreign(folder: Path) -> Planted | None:
    """A library with an instruction in one of its functions that this machine's cores lack."""
    if platform.machine() != "x86_64":
        return None
    features = detect().common
    missing = [name for name in FOREIGN if name not in features]
    if not missing:
        return None
    code, mnemonic = FOREIGN[missing[0]]
    sources = folder / "src"
    shutil.copytree(SOURCES, sources, dirs_exist_ok=True)
    path = sources / "run.c"
    text = path.read_text()
    mark = "static void run_select(dn_team *team, const dn_command *c, int32_t thread)\n{\n"
    if mark not in text:
        raise RuntimeError("run.c has no run_select any more: plant the instruction elsewhere")
    path.write_text(text.replace(mark, f'{mark}    __asm__ volatile(".byte {code}");\n'))
    # where the host looks for libraries by their build id
    library = build(Target.local(), local_compiler(), cache_dir("native"), sources=sources)
    entry = f"{{virtual: {{}}, environment: {{ENGINE_NATIVE_LIB: '{library}'}}"
    entry += ", engine: {unit: native}}"
    return Planted("foreign", entry, "illegal-instruction", "run_select", mnemonic)


# --- a memory limit ------------------------------------------------------------------------------


def _cgroup() -> Path | None:
    """A memory cgroup of our own with a limit, None where none can be made."""
    for root, limit in (
        (Path("/sys/fs/cgroup"), "memory.max"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    ):
        folder = root / f"planted-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
            if (folder / limit).exists():
                (folder / limit).write_text(str(LIMIT_BYTES))
                with contextlib.suppress(OSError):
                    (folder / "memory.swap.max").write_text("0")
                return folder
            folder.rmdir()
    return None


def _confine(folder: Path, home: Path, stop: threading.Event) -> None:
    """Every engine that runs below `home` is put into the cgroup as it starts."""
    while not stop.wait(0.05):
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                words = process.cmdline()
                if "work" in words and any(
                    str(home / "boards" / "limit") in word for word in words
                ):
                    (folder / "cgroup.procs").write_text(str(process.pid))


@contextlib.contextmanager
def _limited(planted: Planted, home: Path) -> Iterator[None]:
    folder = _cgroup() if planted.memory_limit else None
    if folder is None:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=_confine, args=(folder, home, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)
        for _ in range(50):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


# --- runs ----------------------------------------------------------------------------------------


def run(context: Context) -> Iterator[Case]:
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        folder = Path(name)
        before = os.environ.get("HARNESS_HOME")
        os.environ["HARNESS_HOME"] = str(folder / "home")
        try:
            with Store.open() as store:
                model = _model(folder)
                for number in range(context.cases):
                    for planted in plants(context, folder, number):
                        yield from _cases(planted, folder, store, model)
        finally:
            virtual.stop_all()
            if before is None:
                del os.environ["HARNESS_HOME"]
            else:
                os.environ["HARNESS_HOME"] = before


def _model(folder: Path) -> PreparedModel:
    """Quantised, so that the kernels of each instruction set are what runs."""
    source = SyntheticCheckpoint(seed=5, width=128, ffn=256, heads=4, kv_heads=2)
    names = [name for name in source.tensors if "norm" not in name]
    write_gguf(source, folder / "planted.gguf", types=dict.fromkeys(names, "Q4_0"))
    return prepare_model(folder / "planted.gguf")


def _cases(planted: Planted, folder: Path, store: Store, model: PreparedModel) -> Iterator[Case]:
    crash, seconds = _crash(planted, folder, store, model)
    truth = frozenset([planted.truth] if planted.truth else [])
    named = frozenset([crash.name] if crash is not None else [])
    note = crash.headline if crash is not None else ""
    yield Case(CLASS, truth, named, 1, seconds, note=f"{planted.name}: {note}")
    if planted.op:
        named = frozenset([crash.op] if crash is not None and crash.op else [])
        yield Case(OP, frozenset([planted.op]), named, 1, note=f"{planted.name}: {note}")
    if planted.instruction:
        told: set[str] = set()
        place = re.match(r"(\w+) in (\w+)(?: in (\w+))? \(", note)
        if place is not None:  # the instruction, a function inlined there, the function itself
            functions = {place[2], place[3] or place[2]}
            known = planted.function in functions
            told = {place[1], planted.function if known else place[3] or place[2]}
        wanted = frozenset([planted.instruction, planted.function])
        yield Case(INSTRUCTION, wanted, frozenset(told), 1, note=f"{planted.name}: {note}")


def _crash(
    planted: Planted, folder: Path, store: Store, model: PreparedModel
) -> tuple[CrashNote | None, float]:
    path = folder / "devices.yaml"
    path.write_text(
        f"defaults: {{threads: 1, pin: none}}\nboards:\n  {planted.name}: {planted.entry}\n"
    )
    boards = choose_boards(path, (), ())
    options = bringup_options(
        accuracy_tokens=8, accuracy_positions=16, accuracy_rows=3, stall_seconds=planted.stall_s
    )
    start = time.monotonic()
    with _limited(planted, folder / "home"):
        result: Any = bringup(
            boards,
            model,
            options,
            store,
            Silent(),
            stop=threading.Event(),
            stages=choose_stages([planted.stage]),
            resume=Resume.NEVER,
        )
    item = result.results[planted.name][planted.stage]
    if item.error_kind is not None:
        raise RuntimeError(f"{planted.name}: {item.error_kind}: {item.verdict.headline}")
    return item.verdict.crash, time.monotonic() - start


BENCH = Bench(
    name="crashes",
    help="crashes for real on virtual boards: class, and function and instruction",
    run=run,
    targets=(
        Goal(CLASS, "exact", at_least=1.0),
        Goal(CLASS, "wrong", at_most=0.0),
        Goal(INSTRUCTION, "exact", at_least=1.0),
        Goal(OP, "exact", at_least=1.0),
    ),
    cases=3,
    quick_cases=1,
)
