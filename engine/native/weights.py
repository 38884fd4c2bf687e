"""The tensors of a package as the kernels take them: structures that point into the mapped file."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

import numpy as np
import numpy.typing as npt

from engine.native.library import LAYOUTS, SCHEMES, Library, Weight
from engine.package import Package
from engine.quantize.schemes import PackedTensor, dequantize

PAGE = 4096
HUGE = 2 << 20  # bytes of a huge page
MADV_COLLAPSE = 25  # include/uapi/asm-generic/mman-common.h


class Weights:
    """Structures by tensor name, made when they are asked for and kept for good.

    Norms and biases, a few kilobytes a layer, are held as float32. With `huge_pages` the package's
    tensors are copied once into anonymous memory for which the kernel is asked to use huge pages;
    without, nothing is copied.
    """

    def __init__(self, package: Package, *, huge_pages: bool = False) -> None:
        self.package = package
        # Structures hold addresses alone: the mapping stays while its arrays are held.
        self._mapped = [part for t in package.tensors.values() for part in t.parts.values()]
        self._structures: dict[str, Weight] = {}
        self._vectors: dict[str, npt.NDArray[np.generic]] = {}
        self._huge = _HugeCopy(package) if huge_pages else None

    def matrix(self, name: str) -> Weight:
        """A tensor (N, K). Raises ValueError for one that the kernels cannot read."""
        found = self._structures.get(name)
        if found is None:  # of two threads that make one, both get the first
            found = self._structures.setdefault(name, self._structure(self.package.tensors[name]))
        return found

    def vector(self, name: str) -> int:
        """Address of a norm or bias (N,) as float32, or of frequencies (D/2,) as float64."""
        found = self._vectors.get(name)
        if found is None:
            tensor = self.package.tensors[name]
            data = tensor.parts["data"] if tensor.scheme == "f64" else dequantize(tensor)
            found = self._vectors.setdefault(name, np.ascontiguousarray(data))
        return int(found.ctypes.data)

    def address(self, part: npt.NDArray[np.generic]) -> int:
        """Where the kernels read a part: in the mapped file, or in its huge copy."""
        address = int(part.ctypes.data)
        return self._huge.address(address) if self._huge else address

    def touch(self, library: Library) -> int:
        """Read every page of every tensor once; returns the bytes. A first token then waits for no
        disk."""
        total = 0
        for tensor in self.package.tensors.values():
            for part in tensor.parts.values():
                library.functions.dn_touch(self.address(part), part.nbytes, PAGE)
                total += part.nbytes
        return total

    def _structure(self, tensor: PackedTensor) -> Weight:
        if len(tensor.shape) != 2 or tensor.scheme not in SCHEMES:
            raise ValueError(
                f"tensor {tensor.name}: scheme {tensor.scheme}, shape {tensor.shape}; the native "
                f"kernels read matrices of {', '.join(SCHEMES)}"
            )
        outputs, inputs = tensor.shape
        if tensor.scheme in ("f32", "f16", "bf16"):
            data = tensor.parts["data"]
            return Weight(
                scheme=SCHEMES.index(tensor.scheme), n=outputs, k=inputs, group=32,
                q=self.address(data),
            )  # fmt: skip
        parts = {name: self.address(part) for name, part in tensor.parts.items()}
        scale = tensor.parts["d"].dtype == np.float32
        return Weight(
            scheme=SCHEMES.index(tensor.scheme),
            layout=LAYOUTS.index(tensor.layout),
            n=outputs,
            k=inputs,
            group=tensor.group,
            zero=tensor.zero,
            scale_f32=int(scale),
            stride=tensor.parts["q"].strides[0] if tensor.layout == "interleaved" else 0,
            q=parts["q"],
            h=parts.get("h"),
            d=parts["d"],
            m=parts.get("m"),
            s=parts.get("s"),
            mn=parts.get("n"),
            dm=parts.get("dm"),
        )


class _HugeCopy:
    """All tensors of a package in one anonymous block, in the order and distances of the file."""

    def __init__(self, package: Package) -> None:
        parts = [part for tensor in package.tensors.values() for part in tensor.parts.values()]
        first = min(parts, key=lambda part: part.ctypes.data)
        self._first = int(first.ctypes.data)
        size = max(int(part.ctypes.data) + part.nbytes for part in parts) - self._first
        # Aligned to a huge page by hand: a mapping begins where the kernel likes. Private: what is
        # shared counts as a file's, for which the kernel has other switches, most often off.
        length = -(-size // HUGE) * HUGE + HUGE
        self._block = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._ask(getattr(mmap, "MADV_HUGEPAGE", None))
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._block))
        # The same distance from a cache line as in the file, so that alignment is kept.
        self._base = -(-base // HUGE) * HUGE + self._first % 64
        with package.path.open("rb") as file:
            file.seek(package.offset_of(first))
            view = memoryview(self._block)[self._base - base :]
            done = 0
            while done < size:
                count = file.readinto(view[done : min(done + (64 << 20), size)])
                if not count:
                    raise ValueError(f"{package.path}: ends {size - done} bytes early")
                done += count
        # Where memory was in pieces the kernel gave small pages: since Linux 6.1 it can be asked to
        # put them together now.
        self._ask(MADV_COLLAPSE if sys.platform == "linux" else None)

    def _ask(self, advice: int | None) -> None:
        """A kernel may know no huge pages, or have none: small ones work as well, only slower."""
        if advice is not None:
            with contextlib.suppress(OSError, ValueError):
                self._block.madvise(advice)

    def address(self, address: int) -> int:
        return self._base + address - self._first
