"""The part of deploying and cleaning that runs on a board; sent over as text, never imported there.

    python -S -s - REQUEST < on_board.py      REQUEST and the answer are one JSON object each

Standard library of Python 3.9 only. The work folder it keeps:

    parts/SHA256/      unpacked bundle parts          blobs/SHA256   packages and other files
    used/SHA256        in which deployment (a count) it was last used: the clock is not trusted
    incoming/          what is being sent             runs/RUN_ID/   spools
    current.json       what the last deployment consists of
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

FOLDERS = ("parts", "blobs", "used", "incoming", "runs")
RESERVE_BYTES = 32 << 20  # left free for spools and the board itself
HASH = re.compile(r"[0-9a-f]{64}")
TERM_S = 8.0  # longer than the supervisor's own patience with its engine
KILL_S = 5.0


# --- deploying -----------------------------------------------------------------------------------


def survey(request: dict[str, Any]) -> dict[str, Any]:
    """Choose the first folder of `candidates` that can hold what is missing of `needed`.

    needed: [{"hash", "kind": "parts"|"blobs", "bytes": most that it takes while it is installed}].
    Answers {"root": path or None, "have": [hash], "refused": [[path, reason]], "short": [[path,
    free, needed]]}, and where nothing is missing "trial": `try_out` of the request's. Items that
    nothing needs are removed where space is short.
    """
    answer: dict[str, Any] = {"root": None, "have": [], "refused": [], "short": []}
    for candidate in request["candidates"]:
        root = Path(candidate).expanduser()
        made = not root.exists()
        try:
            _furnish(root)
        except OSError as error:
            answer["refused"].append([str(root), error.strerror or str(error)])
            _withdraw(root, made)
            continue
        have = [item["hash"] for item in request["needed"] if _holds(root, item)]
        missing = [item for item in request["needed"] if item["hash"] not in have]
        sent = tidy_incoming(root, {item["hash"] for item in missing})
        need = sum(max(0, item["bytes"] - sent.get(item["hash"], 0)) for item in missing)
        need += RESERVE_BYTES if missing else 0
        if free_bytes(root) < need:
            prune(root, {item["hash"] for item in request["needed"]}, 0)
        free = free_bytes(root)
        if free < need:
            answer["short"].append([str(root), free, need])
            _withdraw(root, made)
            continue
        mark_used(root, have)
        answer.update(root=str(root), have=have)
        if not missing:
            answer["trial"] = try_out(request["trial"], root)
        return answer
    return answer


def try_out(trial: dict[str, Any], root: Path) -> dict[str, Any]:
    """Start what proves that the deployment works: {"status": as a shell's, "said": its last line}.

    trial: argv, environment: {name: value}, root: the text in these values that stands for the work
    folder. In the request that finds or installs the parts, since each round trip to 200 boards
    counts; in a process of its own, since a bad library may end the process that loads it.
    """
    import subprocess  # for this request alone: it takes longer to import than all others here

    values = {k: v.replace(trial["root"], str(root)) for k, v in trial["environment"].items()}
    try:
        ended = subprocess.run(
            trial["argv"],
            cwd=root,  # Python imports first from there: not from the user's home
            env={**os.environ, **values},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        return {"status": 127, "said": error.strerror or str(error)}
    lines = ended.stderr.decode(errors="replace").strip().splitlines()
    code = ended.returncode
    return {"status": code if code >= 0 else 128 - code, "said": lines[-1][-500:] if lines else ""}


def _furnish(root: Path) -> None:
    """Make the folder's inside and prove that it can be written. Raises OSError."""
    for name in FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
    trial = root / "incoming" / f".trial.{os.getpid()}"
    try:
        trial.write_bytes(b"x" * 4096)
    finally:
        trial.unlink(missing_ok=True)


def _withdraw(root: Path, made: bool) -> None:
    """Leave no empty folders behind in a candidate that is not used."""
    for name in FOLDERS if made else ():
        with contextlib.suppress(OSError):
            (root / name).rmdir()
    try:
        if made:
            root.rmdir()
    except OSError:
        pass


def _holds(root: Path, item: dict[str, Any]) -> bool:
    path: Path = root / item["kind"] / item["hash"]
    if item["kind"] == "parts":
        return path.is_dir()
    return path.is_file() and path.stat().st_size == item["bytes"]


def tidy_incoming(root: Path, missing: set[str]) -> dict[str, int]:
    """Remove what an interrupted deployment left and nobody will go on with.

    Returns {hash: bytes that are here} of partial uploads of `missing`, which are resumed. An
    upload that arrived whole, but was not installed any more, becomes a partial one again.
    """
    sent: dict[str, int] = {}
    for path in [*(root / "incoming").iterdir(), *(root / "blobs").iterdir()]:
        if path.parent.name == "blobs" and HASH.fullmatch(path.name):
            continue
        digest = path.name[:64]
        if digest not in missing or path.is_dir() or path.suffix not in ("", ".partial"):
            remove(path)
            continue
        if path.name == digest:
            path = path.replace(path.with_name(f"{digest}.{digest[:16]}.partial"))
        sent[digest] = sent.get(digest, 0) + path.stat().st_size
    return sent


def free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def install(request: dict[str, Any]) -> dict[str, Any]:
    """Unpack the parts that arrived, note the deployment, remove what is old.

    request: root, parts: [hash] in incoming, current: {...} to note, keep: [hash], budget: bytes,
    trial: see `try_out`. Answers {"pruned": [hash], "trial": …}, or {"error": text} when a part
    cannot be unpacked, which then leaves nothing behind.
    """
    root = Path(request["root"])
    unpacked = {digest: root / "incoming" / f".{digest}.unpacked" for digest in request["parts"]}
    for digest, temporary in unpacked.items():
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            unpack(root / "incoming" / digest, temporary)
        except (OSError, ValueError, EOFError, tarfile.TarError) as error:
            for folder in unpacked.values():
                shutil.rmtree(folder, ignore_errors=True)
            return {"error": f"part {digest[:12]}: {type(error).__name__}: {error}"}
    if unpacked:
        # Power may fail at any time, and a name can reach the disk before its content. Once for
        # all: an fsync for each of a thousand files takes minutes on a memory card.
        os.sync()
    for digest, temporary in unpacked.items():
        target = root / "parts" / digest
        if target.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.rename(target)
        (root / "incoming" / digest).unlink()
    mark_used(root, request["keep"])
    temporary = root / ".current.json"
    temporary.write_text(json.dumps(request["current"], indent=1, sort_keys=True))
    temporary.replace(root / "current.json")
    clear_incoming(root)
    if unpacked:
        os.sync()
    pruned = prune(root, set(request["keep"]), request["budget"])
    return {"pruned": pruned, "trial": try_out(request["trial"], root)}


def unpack(archive: Path, target: Path) -> None:
    """Extract plain files alone, each inside `target`. Raises ValueError for anything else."""
    target.mkdir(parents=True)
    with tarfile.open(archive) as tar:
        for entry in tar:
            parts = entry.name.split("/")
            if not entry.isreg() or entry.name.startswith("/") or {"", ".", ".."} & set(parts):
                raise ValueError(f"{entry.name!r} is not a plain file inside the archive")
            path = target.joinpath(*parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(entry)
            if source is None:
                raise ValueError(f"{entry.name!r} has no content")
            with path.open("xb") as file:
                shutil.copyfileobj(source, file, 1 << 20)


def mark_used(root: Path, hashes: list[str]) -> None:
    """Note that the newest deployment uses these items."""
    count = 1 + max([_used(path) for path in (root / "used").iterdir()], default=0)
    for digest in hashes:
        (root / "used" / digest).write_text(str(count))


def _used(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def prune(root: Path, keep: set[str], budget: int) -> list[str]:
    """Remove items, the longest unused first, until all take at most `budget` bytes.

    What `keep` names stays, and what a spool that is still there was started with.
    """
    for record in (root / "runs").glob("*/deployment.txt"):
        keep = keep | set(HASH.findall(record.read_text(errors="replace")))
    items = [path for kind in ("parts", "blobs") for path in (root / kind).iterdir()]
    sizes = {path: size_of(path) for path in items}
    total, gone = sum(sizes.values()), []
    for path in sorted(items, key=lambda item: (_used(root / "used" / item.name), item.name)):
        if total <= budget:
            break
        if path.name in keep or not HASH.fullmatch(path.name):
            continue
        doomed = root / "incoming" / f".{path.name}.old"  # half removed, it must not look whole
        path.rename(doomed)
        remove(doomed)
        (root / "used" / path.name).unlink(missing_ok=True)
        total -= sizes[path]
        gone.append(path.name)
    return gone


def size_of(path: Path) -> int:
    """Bytes on the disk of a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        return sum(size_of(child) for child in path.iterdir())
    return path.lstat().st_blocks * 512


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def discard(request: dict[str, Any]) -> dict[str, Any]:
    """After a failed deployment: remove what was half sent, and parts that proved unusable."""
    root = Path(request["root"])
    clear_incoming(root)
    for digest in request["parts"]:
        remove(root / "parts" / digest)
        (root / "used" / digest).unlink(missing_ok=True)
    return {"free": free_bytes(root)}


def clear_incoming(root: Path) -> None:
    for path in (root / "incoming").iterdir():
        remove(path)
    for path in (root / "blobs").iterdir():
        if not HASH.fullmatch(path.name):
            remove(path)


# --- runs ----------------------------------------------------------------------------------------


def stop(request: dict[str, Any]) -> dict[str, Any]:
    """Ask the supervisor of a spool to cancel, and wait for it. Answers {"alive": bool}."""
    pid = supervisor_pid(Path(request["spool"]))
    if pid is None:
        return {"alive": False}
    _signal(pid, signal.SIGTERM)
    until = time.monotonic() + request.get("wait_s", TERM_S)
    while time.monotonic() < until and stat_fields(pid)[:1] != ["T"]:  # a stopped one never will
        if supervisor_pid(Path(request["spool"])) is None:
            return {"alive": False}
        time.sleep(0.05)
    return {"alive": True}


def clean(request: dict[str, Any]) -> dict[str, Any]:
    """End every process of a run, prove it, remove its spool. Answers {"left": [text]}."""
    spool = Path(request["spool"])
    if processes_of(request["run_id"], spool):
        stop(request)
    until = time.monotonic() + KILL_S
    found = processes_of(request["run_id"], spool)
    while found and time.monotonic() < until:
        for pid in found:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.05)
        found = processes_of(request["run_id"], spool)
    left = [f"process {pid} ({name})" for pid, name in found.items()]
    if not left:  # the spool is the evidence as long as something still runs in it
        try:
            if spool.exists():
                shutil.rmtree(spool)
        except OSError as error:
            left.append(f"folder {spool} ({error.strerror})")
    return {"left": left}


def runs(request: dict[str, Any]) -> dict[str, Any]:
    """The runs in the work folders `roots` of which any process is alive.

    Answers {"runs": [{"run_id", "spool", "pids": [pid], "age_s": since the oldest of them began, or
    None}]}.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in request["roots"]:
        for spool in sorted(Path(name).expanduser().glob("runs/*")):
            pids = set(processes_of(spool.name, spool))
            supervisor = supervisor_pid(spool)
            if supervisor is not None:
                pids.add(supervisor)
            ages = [age for age in map(_age_s, pids) if age is not None]
            if pids:
                found[spool.name] = {
                    "run_id": spool.name,
                    "spool": str(spool),
                    "pids": sorted(pids),
                    "age_s": max(ages, default=None),
                }
    return {"runs": list(found.values())}


def _age_s(pid: int) -> float | None:
    """For how long the process has been running. By uptime: a board's wall clock may be wrong."""
    fields = stat_fields(pid)
    try:
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return None


def supervisor_pid(spool: Path) -> int | None:
    """The pid of the spool's supervisor if that very process is alive."""
    try:
        record = json.loads((spool / "supervisor.json").read_text())
        pid, ticks = int(record["pid"]), record.get("start_ticks")
        boot = Path("/proc/sys/kernel/random/boot_id")
        if (
            record.get("boot_id")
            and boot.exists()
            and boot.read_text().strip() != record["boot_id"]
        ):
            return None
        os.kill(pid, 0)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    fields = stat_fields(pid)
    if fields and (fields[0] in "ZX" or (ticks is not None and int(fields[19]) != ticks)):
        return None
    return pid


def processes_of(run_id: str, spool: Path) -> dict[int, str]:
    """{pid: name} of the live processes of a run.

    They carry its id in their environment, which children inherit, or name its spool as an
    argument. This process and those above it do too, in the request, and are left out.
    """
    mark = f"ENGINE_RUN_ID={run_id}".encode()
    above = {os.getpid()}
    pid = os.getppid()
    while pid > 1 and pid not in above:
        above.add(pid)
        fields = stat_fields(pid)
        pid = int(fields[1]) if fields else 0
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        fields = stat_fields(pid)
        if pid in above or not fields or fields[0] in "ZX":
            continue
        try:
            marked = mark in (entry / "environ").read_bytes().split(b"\0")
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            name = (entry / "comm").read_text(errors="replace").strip()
        except OSError:  # another user's, or gone by now
            continue
        if marked or os.fsencode(spool) in arguments:
            found[pid] = f"{name}, state {fields[0]}"
    return found


def stat_fields(pid: int) -> list[str]:
    """/proc/PID/stat after the command's name: state first, then parent; start time is the 20th."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


REQUESTS = {
    "survey": survey,
    "install": install,
    "discard": discard,
    "stop": stop,
    "clean": clean,
    "runs": runs,
}

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(REQUESTS[asked["do"]](asked)))
