"""What a written value may mean: numbers, switches, hosts, fingerprints. Nothing is guessed.

Each `parse_*` takes what stands in the file (text) or a Python value given in code, and raises
`Refused` with found and expected.
"""

from __future__ import annotations

import ipaddress
import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator

HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
DECIMAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
BOARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SECRET_WORDS = frozenset(
    ("password", "passwd", "passphrase", "pass", "secret", "token", "credential", "credentials")
)


class Refused(ValueError):
    """A value that the schema does not take."""

    def __init__(self, found: str, expected: str, remedy: str = "") -> None:
        self.found, self.expected, self.remedy = found, expected, remedy
        super().__init__(f"found {found}, expected {expected}")


def describe(value: object) -> str:
    """A found value in an error message, short."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    written = repr(value)
    return written if len(written) <= 60 else written[:57] + "…" + written[-1]


def is_secret_name(key: str) -> bool:
    """Whether a key's own name says that its value is a secret."""
    words = re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower())
    return bool(SECRET_WORDS.intersection(words)) or "private_key" in key.lower()


def parse_whole(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", value):
        return int(value)
    digits = isinstance(value, str) and re.fullmatch(r"[-+]?[0-9][0-9_xobA-Fa-f]*", value)
    remedy = "write it in decimal without leading zeros" if digits else ""
    raise Refused(describe(value), "a whole number", remedy)


def parse_number(value: Any) -> float:
    written = isinstance(value, str) and DECIMAL.fullmatch(value)
    if not written and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise Refused(describe(value), "a number")
    number = float(value)
    if not math.isfinite(number):
        raise Refused(describe(value), "a finite number")
    return number


def parse_switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if isinstance(value, str) and value.lower() in known:
        return known[value.lower()]
    raise Refused(describe(value), "true or false")


Whole = Annotated[int, BeforeValidator(parse_whole)]
Number = Annotated[float, BeforeValidator(parse_number)]
Switch = Annotated[bool, BeforeValidator(parse_switch)]


def parse_host(value: str) -> tuple[str, int | None]:
    """`name`, `name:port`, `IPv4`, `IPv4:port`, `[IPv6]` or `[IPv6]:port` → (host, port or None).

    A bare IPv6 address is refused: its last group could be a port.
    """
    expected = "a name, an IPv4 address or '[IPv6]', each with an optional ':port'"
    if value.startswith("["):
        address, bracket, rest = value[1:].partition("]")
        try:
            ipaddress.IPv6Address(address)
        except ValueError as error:
            raise Refused(describe(value), expected) from error
        if not bracket or (rest and not rest.startswith(":")):
            raise Refused(describe(value), expected)
        return address, parse_port(rest[1:]) if rest else None
    if value.count(":") > 1:
        remedy = f"write it as '[{value}]', with ':port' after the bracket if needed"
        raise Refused(describe(value), expected, remedy)
    if "@" in value:
        raise Refused(describe(value.rpartition("@")[2]) + " with a user", expected, "use 'user:'")
    host, colon, port = value.partition(":")
    if re.fullmatch(r"[0-9.]+", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError as error:
            raise Refused(f"{value!r}, which is no IPv4 address", expected) from error
    elif not HOST_NAME.fullmatch(host) or len(host) > 253:
        raise Refused(describe(value), expected)
    return host, parse_port(port) if colon else None


def parse_port(value: Any) -> int:
    try:
        port = parse_whole(value)
    except Refused as error:
        raise Refused(describe(value), "a port between 1 and 65535") from error
    if not 1 <= port <= 65535:
        raise Refused(describe(value), "a port between 1 and 65535")
    return port


def parse_fingerprint(value: Any) -> str:
    if isinstance(value, str) and FINGERPRINT.fullmatch(value.rstrip("=")):
        return value.rstrip("=")
    raise Refused(
        describe(value),
        "'SHA256:' and 43 characters of base64",
        "run `harness boards enrol BOARD` to read the board's own, or `ssh-keygen -lf KEY.pub`",
    )
