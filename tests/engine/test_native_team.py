"""Teams of native threads: they end, they share a CPU, they stand other threads and a fork; steps
that do not fit are refused before anything runs."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.decode import Decoder
from engine.formats import SyntheticCheckpoint
from engine.native.library import NativeUnavailable, load
from engine.native.team import Team
from engine.options import EngineOptions
from engine.package import Package, build_package
from engine.runtime.state import step_inputs
from engine.runtime.sync import SyncExecutor
from engine.runtime.trace import Trace
from engine.units import load_unit
from engine.units.native import step_of

TOKENS = np.random.default_rng(8).integers(0, 250, 40)
NATIVE = dataclasses.replace(EngineOptions.for_unit("native"), threads=4)
CPUS = os.cpu_count() or 1


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    try:
        load()
    except NativeUnavailable as error:
        pytest.skip(f"needs a C compiler: {error}")
    path = tmp_path_factory.mktemp("team") / "model.pkg"
    model = SyntheticCheckpoint(3, width=96, heads=6, kv_heads=3, head_dim=32)
    build_package(model, path, name="team", layout="interleaved", scheme="w4")
    with Package.open(path) as opened:
        yield opened


def threads_now() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def written(package: Package, options: EngineOptions = NATIVE) -> npt.NDArray[Any]:
    decoder = Decoder(package, options=options)
    parts = [decoder.advance(TOKENS[:30], all_logits=True)]
    parts += [decoder.advance(TOKENS[at : at + 1])[None] for at in range(30, 40)]
    return np.concatenate(parts)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
def test_threads_of_decoders_that_are_gone_are_gone(package: Package) -> None:
    gc.collect()
    before = threads_now()
    for repeat in range(25):
        executor = ("sync", "compiled")[repeat % 2]
        decoder = Decoder(package, options=dataclasses.replace(NATIVE, executor=executor))
        decoder.advance(TOKENS[:3])
        assert threads_now() == before + 3
        del decoder
    assert threads_now() == before  # without a collection: nothing refers in circles


def test_more_threads_than_cpus_compute_the_same(package: Package) -> None:
    alone = dataclasses.replace(NATIVE, threads=1)
    many = dataclasses.replace(NATIVE, threads=4 * CPUS + 1)
    assert np.array_equal(written(package, many), written(package, alone))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux's affinities")
def test_helpers_are_pinned_where_they_are_told_and_the_caller_stays(package: Package) -> None:
    mine = os.sched_getaffinity(0)
    last, before = max(mine), set(Path("/proc/self/task").iterdir())
    unit = load_unit("native", package, threads=3, pin=(last,))
    decoder = Decoder(package, options=NATIVE)
    decoder.executor = SyncExecutor(decoder.program, unit)
    decoder.advance(TOKENS[:3])
    made = {int(path.name) for path in set(Path("/proc/self/task").iterdir()) - before}
    pinned = [thread for thread in made if os.sched_getaffinity(thread) == {last}]
    assert len(pinned) == 2 or len(mine) == 1
    assert os.sched_getaffinity(0) == mine


def test_decoders_in_several_threads_do_not_disturb_each_other(package: Package) -> None:
    """While yet another thread makes rubbish and collects it."""
    wanted = written(package)
    found: list[Any] = []
    done = threading.Event()

    def rubbish() -> None:
        while not done.is_set():
            Team(load(), "generic", 2)
            circle: list[Any] = [Team(load(), "generic", 2)]
            circle.append(circle)
            del circle
            gc.collect()

    def work() -> None:
        for _ in range(4):
            found.append(written(package))

    workers = [threading.Thread(target=work) for _ in range(3)]
    collector = threading.Thread(target=rubbish)
    for thread in (*workers, collector):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    collector.join()
    assert len(found) == 12
    assert all(np.array_equal(one, wanted) for one in found)


def test_a_decoder_may_be_used_by_another_thread_than_made_it(package: Package) -> None:
    made: list[Decoder] = []
    maker = threading.Thread(target=lambda: made.append(Decoder(package, options=NATIVE)))
    maker.start()
    maker.join()
    assert np.array_equal(made[0].advance(TOKENS), Decoder(package, options=NATIVE).advance(TOKENS))


SCRIPT = """
import dataclasses, os, sys
import numpy as np
from engine.decode import Decoder
from engine.options import EngineOptions
from engine.package import Package
package = Package.open(sys.argv[1])
options = EngineOptions.for_unit("native")
def decoder(threads):
    return Decoder(package, options=dataclasses.replace(options, threads=threads))
tokens = np.arange(9)
several, one = decoder(3), decoder(1)
wanted = several.advance(tokens)
one.advance(tokens)
"""


def run(script: str, package: Package) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT + script, str(package.path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("ending", "status"),
    [("", 0), ("sys.exit(3)", 3), ("raise KeyError('x')", 1), ("os._exit(4)", 4),
     ("import threading; keep = several; threading.Thread(target=decoder(2).advance, "
      "args=(tokens,)).start()", 0)],
)  # fmt: skip
def test_a_process_ends_while_its_threads_wait(ending: str, status: int, package: Package) -> None:
    done = run(ending, package)
    assert done.returncode == status, done.stderr
    assert ("Traceback" in done.stderr) == ("raise" in ending)


FORK = """
child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    several.reset()
    assert np.array_equal(several.advance(tokens), wanted)
    sys.exit(os.waitstatus_to_exitcode(status))
try:
    several.advance(tokens[:1])
except RuntimeError as error:
    print(error)
one.advance(tokens[:1])
assert np.array_equal(decoder(3).advance(tokens), wanted)
del several, one
print("done")
"""


def test_after_a_fork_the_child_is_told_to_make_a_decoder_of_its_own(package: Package) -> None:
    """Its parent's threads are not there. A team of the caller alone works on."""
    done = run(FORK, package)
    assert done.returncode == 0, done.stderr
    assert "its threads belong to the process that forked this one" in done.stdout
    assert done.stdout.endswith("done\n")


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "rows"), [(3, 1), (1, 3), (200, 1)])
def test_a_step_larger_than_was_reserved_is_refused(
    package: Package, tokens: int, rows: int
) -> None:
    decoder = Decoder(package, options=NATIVE)
    decoder.advance(TOKENS[:1])
    commands = decoder.executor._commands  # type: ignore[attr-defined]
    positions = np.arange(tokens)
    step = step_of(step_inputs(positions % 250, positions, np.zeros(rows, np.int64)))
    team = Team(load(), "generic", 2)
    with pytest.raises(RuntimeError, match="refused a step: it has more rows than were reserved"):
        team.run(commands, step)
    team.reserve(commands, 2)
    with pytest.raises(RuntimeError, match="refused a step: it has more rows than were reserved"):
        team.run(commands, step)
    with pytest.raises(MemoryError, match="no memory for 1099511627776 rows"):
        team.reserve(commands, 1 << 40)
    step.tokens = step.rows = 1
    with pytest.raises(RuntimeError, match="refused a step: it has more rows than were reserved"):
        team.run(commands, step)
    team.reserve(commands, 2)
    assert team.run(commands, step) is False
    team.close()
    team.close()
    with pytest.raises(RuntimeError, match="the team of threads is closed"):
        team.run(commands, step)


def test_inputs_that_do_not_fit_a_compiled_step_are_refused_by_name(package: Package) -> None:
    decoder = Decoder(package, options=NATIVE)
    good = step_inputs(TOKENS[:3], np.arange(3), [2])
    wanted = decoder.run(good)
    with pytest.raises(ValueError, match="a step of 129 rows, expected at most 128"):
        decoder.run(step_inputs(np.zeros(129), np.arange(129), [0]))
    with pytest.raises(ValueError, match="a step of 129 rows, expected at most 128"):
        decoder.run(step_inputs([1], [0], np.zeros(129)))
    with pytest.raises(ValueError, match="input positions has 2 rows, expected 3"):
        decoder.run({**good, "positions": np.arange(2)})
    with pytest.raises(KeyError, match="visible"):
        decoder.run({name: values for name, values in good.items() if name != "visible"})
    for name, values in (("tokens", [5, 256, 1]), ("rows", [3]), ("slots", [0, 1, 256])):
        with pytest.raises(RuntimeError, match="a token, row or slot lies outside"):
            decoder.run({**good, name: np.array(values)})
    assert np.array_equal(decoder.run(good), wanted)


def test_a_team_that_cannot_be_made_says_so(package: Package) -> None:
    for isa, threads in (("mmx", 1), ("generic", 0)):
        with pytest.raises(MemoryError, match=f"a team of {threads} {isa} threads"):
            Team(load(), isa, threads)


def test_a_trace_that_is_gone_is_not_written_to(package: Package) -> None:
    """The team outlives the decoder whose steps it traced."""
    decoder = Decoder(package, options=NATIVE, trace=Trace(50))
    decoder.advance(TOKENS)
    unit, program = decoder.unit, decoder.program
    ring = decoder.executor.trace.ring  # type: ignore[attr-defined]
    before = ring.copy()
    state = {**step_inputs([1], [0], [0]), **decoder.cache.buffers()}
    for op in program.ops:
        unit.execute(op, state)
    assert np.array_equal(ring, before)
