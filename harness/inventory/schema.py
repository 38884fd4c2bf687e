"""What `devices.yaml` may say about a board. Every key is named here; unknown keys are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    model_validator,
)

from harness.credentials import has_password
from harness.inventory.engine import Engine, parse_threads
from harness.inventory.entry import Entry
from harness.inventory.scalars import (
    BOARD_NAME,
    VARIABLE,
    Number,
    Refused,
    Switch,
    Whole,
    describe,
    parse_fingerprint,
    parse_host,
    parse_port,
    parse_whole,
)

# Tried in this order; a home folder first, since /tmp is often small, noexec or emptied at boot.
DEFAULT_FOLDERS = (
    "~/.cache/decode-harness",
    "/var/tmp/decode-harness",  # noqa: S108 - a folder on the board, probed before use
    "/tmp/decode-harness",  # noqa: S108 - as above
)


def _bounded(low: float, high: float) -> AfterValidator:
    def check(value: float) -> float:
        if not low <= value <= high:
            raise Refused(f"{value:g}", f"a number from {low:g} to {high:g}")
        return value

    return AfterValidator(check)


def _one_line(value: str) -> str:
    if not value or any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        raise Refused(describe(value), "text on one line without control characters")
    return value


def _pin(value: Any) -> str | tuple[int, ...]:
    if value in ("auto", "big", "none"):
        return str(value)
    if not isinstance(value, (list, tuple)) or not value:
        raise Refused(
            describe(value),
            "'auto', 'big', 'none' or a list of core numbers such as [4, 5, 6, 7]",
        )
    cores = tuple(parse_whole(core) for core in value)
    if min(cores) < 0 or max(cores) > 4095 or len(set(cores)) != len(cores):
        raise Refused(str(list(cores)), "different core numbers from 0 to 4095")
    return cores


def _refuse_count(value: Any) -> int | str:
    if value == "always":
        return "always"
    try:
        count = parse_whole(value)
    except Refused as error:
        raise Refused(describe(value), "a number of connections or 'always'") from error
    if count < 0:
        raise Refused(describe(value), "a number of connections or 'always'")
    return count


def _key_file(value: Any, info: ValidationInfo) -> str:
    if not isinstance(value, (str, Path)) or not str(value):
        raise Refused(describe(value), "the path of a private key file")
    if "PRIVATE KEY" in str(value):
        raise Refused("the text of a private key", "the path of a key file", "never paste keys")
    path = Path(value).expanduser()
    folder = (info.context or {}).get("folder")
    return str(Path(folder) / path if folder else path)


def _folder(value: str) -> str:
    _one_line(value)
    if not (value.startswith("/") or value == "~" or value.startswith("~/")):
        raise Refused(describe(value), "a path on the board beginning with '/' or '~/'")
    if ":" in value:
        raise Refused(describe(value), "a path without ':', which PYTHONPATH cannot hold")
    return value


def _variable(value: str) -> str:
    if not VARIABLE.fullmatch(value):
        raise Refused(describe(value), "the name of an environment variable")
    return value


def _value(value: str) -> str:
    if has_password(value):
        raise Refused(
            "a URL with a password in it",
            "no secrets: this file is shared, and the value is sent to the board",
            "keep the address in a file on the board, and give the engine that file's path",
        )
    return value


def _command(value: str) -> str:
    if has_password(value):
        raise Refused(
            "a URL with a password in it",
            "no secrets: this file is shared",
            "keep it in the environment of the harness: a command is run by the shell, so "
            "$PDU_PASSWORD works",
        )
    return _one_line(value)


def _tag(value: str) -> str:
    if not value or any(letter.isspace() or letter == "," for letter in value):
        raise Refused(describe(value), "a tag without spaces or commas")
    return value


OneLine = Annotated[str, AfterValidator(_one_line)]
Command = Annotated[str, AfterValidator(_command)]
Positive = Annotated[Number, _bounded(1e-9, 1e12)]
Share = Annotated[Number, _bounded(0, 1)]
Count = Annotated[Whole, _bounded(1, 1 << 40)]
Port = Annotated[int, BeforeValidator(parse_port)]
Fingerprint = Annotated[str, BeforeValidator(parse_fingerprint)]
KeyFile = Annotated[Path, BeforeValidator(_key_file)]


class Budget(Entry):
    """What the board must reach. None: not judged."""

    memory_mb: Positive | None = None  # MiB, peak of the engine
    min_tokens_per_s: Positive | None = None
    max_ttft_s: Positive | None = None
    min_cosine: Share = 0.99  # of every op's output against the reference
    max_kl: Positive = 0.05  # nats, mean over positions
    min_end_of_context_ratio: Share | None = None  # tokens/s at the end over the start


CORES = ("cortex-a53", "cortex-a76", "aarch64")  # what a virtual board can have, emulated


def _isa(value: Any) -> str | tuple[str, ...]:
    names = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    expected = (
        f"'native' for this machine's own processor, or one of {', '.join(CORES)}, or a list of "
        "them, little cores first"
    )
    if value == "native":
        return "native"
    for name in names:
        if name not in CORES:
            raise Refused(describe(name), expected)
    if not names:
        raise Refused("an empty list", expected)
    return names


class Virtual(Entry):
    """A board simulated on this machine, and the faults it shows. Times in seconds."""

    cpus: Count | None = None
    memory_mb: Count | None = None  # MiB, a real limit for each process on the board
    isa: Annotated[Literal["native"] | tuple[str, ...], BeforeValidator(_isa)] = "native"
    shell: Literal["sh", "fish", "csh", "ash"] = "sh"  # the login shell
    freeze_after: Positive | None = None  # after a session began: stops answering, stays connected
    refuse: Annotated[int | Literal["always"], BeforeValidator(_refuse_count)] = 0  # connections
    slow_kbps: Count | None = None  # kilobit/s, each direction
    drop_link_at: Positive | None = None  # after a session began, once: the connection is cut
    drop_link_at_byte: Count | None = (
        None  # of what the board receives: the connection is cut, once
    )
    reboot_at: Positive | None = None  # after a session began, once: processes end, new boot_id
    full_disk: Switch = False
    readonly_root: Switch = False
    noexec_tmp: Switch = False
    clock: Annotated[Whole, _bounded(1970, 2100)] | None = None  # the year the wall clock shows
    noisy_shell: Switch = False  # the shell's start files print on both streams
    no_sftp: Switch = False
    host_key_changes: Switch = False  # a new host key at each start
    no_python: Switch = False

    @model_validator(mode="after")
    def _consistent(self) -> Virtual:
        if self.memory_mb is not None and self.isa != "native":
            # An emulator needs 200 MiB for itself, and hangs or crashes where it does not get them.
            raise Refused(
                "'memory_mb' together with 'isa'",
                "one of them: the limit would be the emulator's",
                "limit the memory of a board with this machine's own processor",
            )
        return self


class Toolchain(Entry):
    """How native code for the board is built on the host."""

    kind: Literal["zig", "cc"]
    target: OneLine | None = None  # zig: a triple, with the board's libc version
    cpu: OneLine | None = None
    command: OneLine | None = None  # cc: the compiler
    flags: tuple[OneLine, ...] = ()

    @model_validator(mode="after")
    def _complete(self) -> Toolchain:
        needed, value = ("target", self.target) if self.kind == "zig" else ("command", self.command)
        if value is None:
            raise Refused(f"kind: {self.kind} without '{needed}'", f"'{needed}'")
        return self


class PowerCommands(Entry):
    """Shell commands on the host. `status` prints on, off or anything else for unknown."""

    on: Command
    off: Command
    cycle: Command | None = None
    status: Command | None = None


class Power(Entry):
    """What switches the board's supply."""

    driver: Literal["labgrid", "command", "fake"] = "command"
    place: OneLine | None = None  # labgrid
    command: PowerCommands | None = None

    @model_validator(mode="after")
    def _complete(self) -> Power:
        needed = {"labgrid": "place", "command": "command"}.get(self.driver)
        if needed is not None and getattr(self, needed) is None:
            raise Refused(f"driver: {self.driver} without '{needed}'", f"'{needed}'")
        for other in ("place", "command"):
            if other != needed and getattr(self, other) is not None:
                only = f"only '{needed}'" if needed else "nothing beside 'driver'"
                raise Refused(f"driver: {self.driver} with '{other}'", only)
        return self


class Console(Entry):
    """What tells a board's serial console."""

    driver: Literal["labgrid", "command"] = "command"
    place: OneLine | None = None  # labgrid
    command: Command | None = None  # on the host: prints the console, and waits for no input

    @model_validator(mode="after")
    def _complete(self) -> Console:
        needed, other = {"labgrid": ("place", "command"), "command": ("command", "place")}[
            self.driver
        ]
        if getattr(self, needed) is None:
            raise Refused(f"driver: {self.driver} without '{needed}'", f"'{needed}'")
        if getattr(self, other) is not None:
            raise Refused(f"driver: {self.driver} with '{other}'", f"only '{needed}'")
        return self


def _split_host(data: Any) -> Any:
    """Before validation: `host: name:port` becomes host and port."""
    if isinstance(data, dict) and isinstance(data.get("host"), str):
        host, port = parse_host(data["host"]) if ":" in data["host"] else (data["host"], None)
        if port is not None and "port" in data:
            raise Refused("a port in 'host' and a key 'port'", "one of them")
        data = {**data, "host": f"[{host}]" if ":" in host else host}
        if port is not None:
            data["port"] = port
    return data


def _host(value: str) -> str:
    return parse_host(value)[0]


Host = Annotated[str, AfterValidator(_host)]


class Jump(Entry):
    """A host that connections pass through. `via` is the next one towards us."""

    name: str = ""
    host: Host
    port: Port = 22
    user: OneLine = "root"
    host_key: Fingerprint | None = None
    key_file: KeyFile | None = None
    via: Jump | None = None

    @model_validator(mode="before")
    @classmethod
    def _host_and_port(cls, data: Any) -> Any:
        return _split_host(data)


class Board(Entry):
    """One board. For a virtual one, host and port are chosen when it starts."""

    name: str
    host: Host = "127.0.0.1"
    port: Port = 22
    user: OneLine = "root"
    host_key: Fingerprint | None = None  # SHA256 fingerprint; without it no connection is made
    key_file: KeyFile | None = None  # None: the agent's keys
    jump: Jump | None = None
    tags: tuple[Annotated[str, AfterValidator(_tag)], ...] = ()
    python: OneLine | None = None  # path on the board; None: the probe looks for one
    threads: Annotated[int | Literal["auto"], BeforeValidator(parse_threads)] = "auto"
    pin: Annotated[Literal["auto", "big", "none"] | tuple[int, ...], BeforeValidator(_pin)] = "auto"
    engine: Engine = Field(default_factory=Engine)
    environment: dict[
        Annotated[str, AfterValidator(_variable)], Annotated[str, AfterValidator(_value)]
    ] = Field(default_factory=dict)
    folders: tuple[Annotated[str, AfterValidator(_folder)], ...] = DEFAULT_FOLDERS
    power: Power | None = None
    console: Console | None = None
    reboot: OneLine | None = None  # a command on the board that restarts it; None: never asked to
    boot_seconds: Annotated[Number, _bounded(1, 3600)] = 180.0  # from a restart to an answer
    toolchain: Toolchain | None = None
    budget: Budget = Field(default_factory=Budget)
    virtual: Virtual | None = None
    stress_minutes: Annotated[Number, _bounded(0.1, 7 * 24 * 60)] = 30.0

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, data: Any) -> Any:
        if isinstance(data, dict):
            nothing = {key for key in ("power", "console") if data.get(key) == "none"}
            data = {key: None if key in nothing else value for key, value in data.items()}
        return _split_host(data)

    @property
    def wanted_threads(self) -> int | Literal["auto"]:
        return self.threads if self.engine.threads is None else self.engine.threads

    @model_validator(mode="after")
    def _consistent(self) -> Board:
        if not BOARD_NAME.fullmatch(self.name):
            raise Refused(
                f"the board name {describe(self.name)}",
                "letters, digits, '.', '_' and '-', at most 64, a letter or digit first",
            )
        if not self.folders:
            raise Refused("an empty list of folders", "at least one folder")
        if self.engine.threads is not None and "threads" in self.model_fields_set:
            raise Refused("'threads' beside 'engine' and inside it", "one of them")
        if self.virtual is None and "host" not in self.model_fields_set:
            raise Refused(
                f"board {self.name!r} has neither 'host' nor 'virtual'",
                "one of them",
                "name its address in 'host', or write 'virtual: {}' for a simulated board",
            )
        extra = [
            key
            for key in ("host", "port", "host_key", "key_file", "jump")
            if getattr(self, key) != type(self).model_fields[key].default
        ]
        if self.virtual is not None and extra:
            raise Refused(
                f"'virtual' together with {', '.join(map(repr, extra))}",
                "one or the other: a virtual board chooses these itself",
            )
        if self.power is not None and self.power.driver == "fake" and self.virtual is None:
            raise Refused(
                "power: driver: fake for a board of hardware",
                "a driver that switches it, or a virtual board",
            )
        return self
