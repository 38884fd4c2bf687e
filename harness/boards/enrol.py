"""Pins a board's host key in `devices.yaml`, leaving everything else in the file as it was written.

The file is not written anew from its values, which would lose comments and layout; one value is
replaced, or one line or item inserted, at the position that the YAML parser gives.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import yaml

from harness.errors import HarnessError
from harness.inventory import Farm, load_farm


def pin_host_key(path: Path, board: str, fingerprint: str) -> bool:
    """Writes `host_key: fingerprint` for `board`. False when it stands there already.

    The file is replaced in one step, and only by one that reads as the same farm except for that
    key. Raises HarnessError for a file that is not valid, an unknown board, a virtual one.
    """
    target = path.resolve()  # a link to the file stays one
    farm = load_farm(path)
    entry = farm.select([board])[0]
    if entry.virtual is not None:
        raise HarnessError(
            "it is virtual, its key is made and checked by the harness itself",
            where=f"board {board}",
            expected="a board with 'host'",
        )
    if entry.host_key == fingerprint:
        return False
    raw = target.read_bytes()
    mark = b"\xef\xbb\xbf" if raw.startswith(b"\xef\xbb\xbf") else b""
    edited = mark + with_host_key(raw.decode("utf-8-sig"), board, fingerprint).encode()
    temporary = _write_beside(target, edited)
    try:
        _check_only_the_key_changed(farm, load_farm(temporary), board, fingerprint)
        temporary.chmod(target.stat().st_mode & 0o7777)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def with_host_key(text: str, board: str, fingerprint: str) -> str:
    """`text`, valid YAML of a farm, with the host key of `board` set.

    Raises HarnessError when the entry has no place for it.
    """
    document = yaml.compose(text, Loader=yaml.SafeLoader)
    entry = _value(_value(document, "boards"), board)
    if not isinstance(entry, yaml.MappingNode) or not entry.value:
        raise HarnessError(f"no entry for board {board!r} to write the host key into")
    present = _value(entry, "host_key")
    if isinstance(present, yaml.ScalarNode):
        begin, end = present.start_mark.index, present.end_mark.index
        return text[:begin] + fingerprint + text[end:]
    # After the address, where people look for it.
    keys = [(key.value, key, value) for key, value in entry.value]
    _, key, value = next((item for item in keys if item[0] == "host"), keys[0])
    item = f"host_key: {fingerprint}"
    if entry.flow_style:
        end = value.end_mark.index
        return f"{text[:end]}, {item}{text[end:]}"
    newline = "\r\n" if "\r\n" in text else "\n"
    line_end = text.find("\n", value.end_mark.index)
    if isinstance(value, yaml.CollectionNode) and not value.flow_style:
        # A block of several lines ends at the beginning of the line after it.
        line_end = text.rfind("\n", 0, value.end_mark.index)
    indent = " " * key.start_mark.column
    if line_end < 0:  # the last line has no end
        return f"{text}{newline}{indent}{item}"
    return f"{text[: line_end + 1]}{indent}{item}{newline}{text[line_end + 1 :]}"


def _value(node: yaml.Node | None, key: str) -> yaml.Node | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for name, value in node.value if name.value == key), None)


def _write_beside(target: Path, data: bytes) -> Path:
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise HarnessError(
            f"cannot be written: {error.strerror}",
            where=str(target),
            expected="a folder that you may write to",
            remedy="change its permissions, or write the host_key yourself",
        ) from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        with contextlib.suppress(OSError):  # some network file systems cannot
            os.fsync(file.fileno())
    return Path(name)


def _check_only_the_key_changed(before: Farm, after: Farm, board: str, fingerprint: str) -> None:
    """A guard against an entry that is written in a way this module does not know."""
    expected = {
        name: entry.model_copy(update={"host_key": fingerprint}) if name == board else entry
        for name, entry in before.boards.items()
    }
    # Boards that jump through this one carry a copy of its key.
    changed = [
        name
        for name, entry in after.boards.items()
        if entry.model_dump(exclude={"jump"}) != expected[name].model_dump(exclude={"jump"})
    ]
    if changed or list(after.boards) != list(before.boards):
        raise HarnessError(
            f"the host key could not be written without changing {', '.join(changed) or 'boards'}",
            where=str(before.path),
            remedy=f"write it yourself into the entry of {board}: host_key: {fingerprint}",
        )
