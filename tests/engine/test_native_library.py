"""What the native unit refuses, by name: libraries, instruction sets, models; and odd sizes."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.decode import ContextFull, Decoder
from engine.formats import SyntheticCheckpoint
from engine.native.library import _FUNCTIONS, NativeUnavailable, find, load
from engine.options import EngineOptions
from engine.package import Package, build_package

NATIVE = dataclasses.replace(EngineOptions.for_unit("native"), threads=2)
FLOATS = EngineOptions(unit="native", executor="compiled", fused=True, threads=2)
REFERENCE = EngineOptions(unit="reference")


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`load` looks anew, and the library of this process comes back afterwards."""
    monkeypatch.delenv("ENGINE_NATIVE_LIB", raising=False)
    load.cache_clear()
    yield
    load.cache_clear()


@pytest.fixture
def library_of(tmp_path: Path) -> Callable[[str], Path]:
    """A library of this C text."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler of the system")

    def make(text: str) -> Path:
        source, library = tmp_path / "other.c", tmp_path / "libother.so"
        source.write_text(text)
        command = [compiler, "-shared", "-fPIC", str(source), "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        return library

    return make


@pytest.fixture
def packed(tmp_path: Path) -> Callable[..., Package]:
    try:
        load()
    except NativeUnavailable as error:
        pytest.skip(f"needs a C compiler: {error}")

    def make(layout: str = "interleaved", scheme: str | None = "w4", **sizes: Any) -> Package:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.pkg"
        build_package(SyntheticCheckpoint(6, **sizes), path, name="x", layout=layout, scheme=scheme)
        return Package.open(path)

    return make


# --- the library ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_loaded")
def test_without_a_library_the_error_names_the_three_places(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ENGINE_CC", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("ENGINE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(NativeUnavailable) as caught:
        load()
    text = str(caught.value)
    assert "ENGINE_NATIVE_LIB is not set" in text
    assert str(Path("native_lib") / "libdecode_native.so") + " is not on the path" in text
    assert "it cannot be built here" in text and "no-compiler" in text
    assert "unit: packed" in text
    monkeypatch.setenv("ENGINE_NATIVE_LIB", str(tmp_path / "gone.so"))
    with pytest.raises(NativeUnavailable, match=r"ENGINE_NATIVE_LIB is '.*gone\.so', which is no"):
        load()


@pytest.mark.usefixtures("nothing_loaded")
def test_a_deployed_library_on_the_path_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deployed = tmp_path / "native_lib" / "libdecode_native.so"
    deployed.parent.mkdir()
    deployed.write_bytes(b"")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert find() == deployed
    with pytest.raises(NativeUnavailable, match=r"libdecode_native\.so: cannot be loaded"):
        load()


@pytest.mark.usefixtures("nothing_loaded")
def test_a_library_of_other_sources_is_refused(
    monkeypatch: pytest.MonkeyPatch, library_of: Callable[[str], Path]
) -> None:
    names = [name for name in _FUNCTIONS if name != "dn_sizes"]
    stub = "".join(f"void *{name}(void) {{ return 0; }}\n" for name in names)
    sizes = "void dn_sizes(long long *s) { for (int i = 0; i < 5; i++) s[i] = 8 * i; }\n"
    monkeypatch.setenv("ENGINE_NATIVE_LIB", str(library_of(stub + sizes)))
    with pytest.raises(NativeUnavailable, match=r"structures of \[0, 8, 16, 24, 32\] bytes, expec"):
        load()


@pytest.mark.usefixtures("nothing_loaded")
def test_a_library_without_our_functions_is_refused(
    monkeypatch: pytest.MonkeyPatch, library_of: Callable[[str], Path]
) -> None:
    monkeypatch.setenv("ENGINE_NATIVE_LIB", str(library_of("int nothing;\n")))
    with pytest.raises(NativeUnavailable, match=r"cannot be loaded: .*build it again"):
        load()


@pytest.mark.parametrize("how", ["option", "environment"])
def test_an_unknown_instruction_set_lists_the_known(
    how: str, packed: Callable[..., Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = NATIVE
    if how == "option":
        options = dataclasses.replace(NATIVE, kernels="mmx")
    else:
        monkeypatch.setenv("ENGINE_KERNELS", "mmx")
    with pytest.raises(ValueError, match=r"kernels 'mmx' on .*expected one of generic, "):
        Decoder(packed(), options=options)


def test_the_unit_says_which_kernels_run_and_what_they_are_slow_for(
    packed: Callable[..., Package],
) -> None:
    fast = Decoder(packed(), options=dataclasses.replace(NATIVE, kernels="generic")).unit
    assert fast.kernels["linear"] == fast.kernels["all"] == "generic"  # type: ignore[attr-defined]
    slow = Decoder(packed("row"), options=dataclasses.replace(NATIVE, kernels="generic")).unit
    said = slow.kernels["linear"]  # type: ignore[attr-defined]
    assert said.startswith("generic, slow for ") and "layout row, not interleaved" in said


# --- models --------------------------------------------------------------------------------------


def test_a_head_that_no_kernel_fits_is_refused_when_the_decoder_is_made(
    packed: Callable[..., Package],
) -> None:
    odd = packed(width=96, heads=4, kv_heads=2, head_dim=24)
    with pytest.raises(ValueError, match=r"heads of 24 elements.*multiple of 16.*unit packed"):
        Decoder(odd, options=NATIVE)
    Decoder(odd, options=EngineOptions()).advance(np.arange(3))
    sixteen = packed(width=64, heads=4, kv_heads=2)
    Decoder(sixteen, options=NATIVE).advance(np.arange(3))
    with pytest.raises(ValueError, match=r"heads of 16 elements.*multiple of 32.*int4"):
        Decoder(sixteen, options=dataclasses.replace(NATIVE, kv="int4")).advance(np.arange(3))


@pytest.mark.parametrize("layout", ["row", "blocked", "interleaved"])
@pytest.mark.parametrize("scheme", [None, "w4", "w4-row", "w4-128a", "w8", "w8-32a"])
@pytest.mark.parametrize("tied", [True, False])
def test_models_whose_sizes_fit_no_vector_run_in_every_layout(
    tied: bool, scheme: str | None, layout: str, packed: Callable[..., Package]
) -> None:
    """A vocabulary of 257 and a width of 80: some tensors stay in 16-bit floats, and no matrix has
    a multiple of 16 outputs but those of the heads."""
    package = packed(
        layout, scheme, tied=tied, vocab=257, width=80, heads=5, kv_heads=1, head_dim=32, ffn=136
    )
    tokens = np.array([256, 0, 17, 255, 3, 100, 256])
    for options in (FLOATS, dataclasses.replace(FLOATS, activations="int8")):
        reference = dataclasses.replace(REFERENCE, activations=options.activations)
        wanted = Decoder(package, options=reference).advance(tokens, all_logits=True)
        batch = Decoder(package, options=options)
        steps = Decoder(package, options=options)
        found = [batch.advance(tokens, all_logits=True)]
        found.append(np.array([steps.advance(tokens[at : at + 1]) for at in range(len(tokens))]))
        for logits in found:
            limit = 1e-5 if options.activations == "float" else 3e-2
            assert np.linalg.norm(logits - wanted) < limit * np.linalg.norm(wanted)


@pytest.mark.parametrize("context", [1, 2, 31, 33, 255, 257])
@pytest.mark.parametrize(
    "cache", [("f32", "numpy"), ("f16", "mixed"), ("f16", "ds"), ("int8", "sd"), ("int4", "ds")]
)
def test_any_context_is_filled_to_its_last_slot(
    cache: tuple[str, str], context: int, packed: Callable[..., Package]
) -> None:
    package = packed(width=64, heads=2, kv_heads=1, head_dim=32, context=257)
    kv, layout = cache
    options = dataclasses.replace(FLOATS, kv=kv, kv_layout=layout)
    reference = dataclasses.replace(REFERENCE, kv=kv, kv_layout=layout)
    tokens = np.random.default_rng(context).integers(0, 250, context)
    decoder = Decoder(package, options=options, context=context)
    found = [decoder.advance(tokens[:-1], all_logits=True)] if context > 1 else []
    found.append(decoder.advance(tokens[-1:])[None])
    wanted = Decoder(package, options=reference, context=context).advance(tokens, all_logits=True)
    # Few bits in the cache: what differs by a rounding is stored a step apart.
    limit = {"f32": 1e-5, "f16": 1e-3, "int8": 1e-2, "int4": 5e-2}[kv]
    assert np.linalg.norm(np.concatenate(found) - wanted) < limit * np.linalg.norm(wanted)
    with pytest.raises(ContextFull):
        decoder.advance(tokens[:1])
