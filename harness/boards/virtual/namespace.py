"""What a board's programs see of the system, by real mounts in a namespace of the board's own.

No root is needed, and nothing is left to clean up.

The board's process leaves the machine's mount namespace (and, unless it is root, its user
namespace) at its start. What it mounts then is seen by itself and its commands only, and ends with
the last of them. Errors are the kernel's own: ENOSPC, EROFS, EACCES, in shell and SFTP alike.
Sources: mount(2), mount_setattr(2), user_namespaces(7).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 8, 32, 4096, 16384, 1 << 18
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, SYS_MOUNT_SETATTR = -100, 0x8000, 1, 442

TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - the folders that are mounted over
VOLATILE = ("/tmp", "/dev/shm", "/run")  # noqa: S108 - in memory on a board with a read-only root
FULL_DISK_KB = 2048  # all that a full disk has left: a small file fits, a bundle does not


class NamespaceRefused(OSError):
    """This machine lets its user make no namespace (a container's seccomp profile, a sysctl)."""


class _Libc:
    """The calls used, with errno turned into OSError."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def _check(self, result: int, what: str) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")

    def unshare(self, flags: int) -> None:
        self._check(self._libc.unshare(ctypes.c_int(flags)), "unshare")

    def mount(self, source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
        result = self._libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            kind.encode() if kind else None,
            ctypes.c_ulong(flags),
            data.encode() or None,
        )
        self._check(result, f"mount {target}")

    def read_only_everywhere(self) -> None:
        attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)  # struct mount_attr
        result = self._libc.syscall(
            ctypes.c_long(SYS_MOUNT_SETATTR),
            ctypes.c_int(AT_FDCWD),
            b"/",
            ctypes.c_uint(AT_RECURSIVE),
            ctypes.byref(attributes),
            ctypes.c_size_t(ctypes.sizeof(attributes)),
        )
        self._check(result, "mount_setattr /")


def supported() -> bool:
    """Whether `enter` would work here, tried in a child process."""
    if sys.platform != "linux":
        return False
    pid = os.fork()
    if pid == 0:
        try:
            _enter(_Libc())
            os._exit(0)
        except OSError:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _enter(libc: _Libc) -> None:
    user, group = os.getuid(), os.getgid()
    if os.geteuid() == 0:
        try:
            libc.unshare(CLONE_NEWNS)
        except PermissionError:  # root of a container without CAP_SYS_ADMIN
            libc.unshare(CLONE_NEWUSER | CLONE_NEWNS)
            _map_user(user, group)
    else:
        libc.unshare(CLONE_NEWUSER | CLONE_NEWNS)
        _map_user(user, group)
    libc.mount("none", "/", None, MS_REC | MS_PRIVATE)


def _map_user(user: int, group: int) -> None:
    """The same ids inside as outside, so that `id` on the board shows the user itself."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


class Mounts:
    """A mount namespace that this process has entered, and what it can look like.

    keep: folders that stay as they are even where they lie below one that is mounted over.
    Raises NamespaceRefused, before anything is changed.
    """

    def __init__(self, keep: Sequence[Path]) -> None:
        self._keep = tuple(keep)
        self._libc = _Libc()
        try:
            _enter(self._libc)
        except OSError as error:
            raise NamespaceRefused(
                error.errno, f"no mount namespace for this user here: {error.strerror}"
            ) from error

    def show_boot_id(self, file: Path) -> None:
        """The text of `file` is the kernel's boot_id from now on, also when it changes."""
        self._libc.mount(str(file), "/proc/sys/kernel/random/boot_id", None, MS_BIND)

    def show_processors(self, info: Path, cpus: Path) -> None:
        """The file `info` is /proc/cpuinfo, the folder `cpus` /sys/devices/system/cpu."""
        self._libc.mount(str(info), "/proc/cpuinfo", None, MS_BIND)
        self._libc.mount(str(cpus), "/sys/devices/system/cpu", None, MS_BIND)

    def fill_disks(self, home: Path) -> None:
        """The home and the folders for temporary files have FULL_DISK_KB left, and begin empty."""
        for place in (*_present(TEMPORARY), str(home)):
            with self._kept(place):
                self._libc.mount("full", place, "tmpfs", 0, f"size={FULL_DISK_KB}k,mode=1777")

    def make_root_read_only(self) -> None:
        """Everything, except memory file systems on the usual volatile folders."""
        self._libc.read_only_everywhere()
        for place in _present(VOLATILE):
            with self._kept(place):
                self._libc.mount("volatile", place, "tmpfs", 0, "mode=1777")

    def forbid_programs_in_tmp(self) -> None:
        for place in _present(TEMPORARY):
            with self._kept(place):
                self._libc.mount(place, place, None, MS_BIND | MS_REC)
                self._libc.mount(place, place, None, MS_BIND | MS_REMOUNT | MS_NOEXEC)

    @contextlib.contextmanager
    def _kept(self, place: str) -> Iterator[None]:
        """Binds folders below `place` that the mount in the block hides back to where they were."""
        hidden = [path for path in self._keep if path.is_relative_to(place) and path != Path(place)]
        kept = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in hidden}
        yield
        for path, descriptor in kept.items():
            path.mkdir(parents=True, exist_ok=True)
            self._libc.mount(f"/proc/self/fd/{descriptor}", str(path), None, MS_BIND | MS_REC)
            os.close(descriptor)


def _present(places: Sequence[str]) -> list[str]:
    return [place for place in places if Path(place).is_dir() and not Path(place).is_symlink()]
