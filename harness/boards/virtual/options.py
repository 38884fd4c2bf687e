"""What a virtual board is like: its limits and its planted faults.

`Virtual` of the inventory is what a user writes; this is the same as plain data, so that the
board's process starts without the inventory and its libraries.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Options:
    """Defaults describe a healthy board.

    Limits
        cpus: cores that commands may use (an affinity mask), None for all of this machine.
        memory_mb: data limit of each process (see `commands.limited`), MB of 2**20 bytes.
        isa: the kinds of its cores (`processors.PROCESSORS`), little ones first; empty for this
            machine's own. Python and the programs that tell the architecture are then emulated.
        shell: login shell: sh, fish, csh or ash.
    Link
        refuse: "always": nothing listens; N: the first N connections are closed at once.
        freeze_after: seconds after the first login until nothing on the board answers any more.
        slow_kbps: each direction of each connection, kilobits (1000 bits) per second.
        drop_link_at: seconds after the first login; all connections are cut, once.
        drop_link_at_byte: bytes that the board receives until all connections are cut, once.
        host_key_changes: each start has a new host key, `Endpoint` names the first, as devices.yaml
            would.
        reboot_at: seconds after the first login; processes die, the boot_id is another.
        own_boot_id: the board's boot_id is its own from the start, not this machine's.
    Files
        full_disk, readonly_root, noexec_tmp: real mounts in a namespace of the board's own.
    Software
        clock: the year that `date` shows. noisy_shell: output before that of each command.
        no_sftp, no_python: not installed.
    """

    cpus: int | None = None
    memory_mb: int | None = None
    isa: tuple[str, ...] = ()
    shell: str = "sh"
    refuse: int | str = 0
    freeze_after: float | None = None
    slow_kbps: float | None = None
    drop_link_at: float | None = None
    drop_link_at_byte: int | None = None
    host_key_changes: bool = False
    reboot_at: float | None = None
    own_boot_id: bool = False
    full_disk: bool = False
    readonly_root: bool = False
    noexec_tmp: bool = False
    clock: int | None = None
    noisy_shell: bool = False
    no_sftp: bool = False
    no_python: bool = False

    @staticmethod
    def of(values: Mapping[str, Any]) -> Options:
        """Options from the inventory's fields; keys without a meaning here are not passed on."""
        names = {field.name for field in dataclasses.fields(Options)}
        known = {name: value for name, value in values.items() if name in names}
        if known.get("isa") == "native":
            del known["isa"]
        return Options(**{name: value for name, value in known.items() if value is not None})

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Options:
        values = json.loads(text)
        return Options(**{**values, "isa": tuple(values.get("isa", ()))})

    @property
    def digest(self) -> str:
        """Tells whether a running board was started with the same options."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def needs_namespace(self) -> bool:
        disk = self.full_disk or self.readonly_root or self.noexec_tmp
        return disk or self.shows_boot_id or bool(self.isa)

    @property
    def shows_boot_id(self) -> bool:
        return bool(self.reboot_at) or self.own_boot_id
