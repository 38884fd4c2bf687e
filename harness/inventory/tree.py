"""YAML text as a tree of strings with line numbers; no YAML type guessing.

Every scalar stays the text that was written (`no`, `0755`, `1.10`, `4225e043`); the schema decides
what it means. The tree is built from the parser's events without recursion, and without what makes
YAML surprising or dangerous: anchors, aliases, merge keys, tags, several documents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import yaml

from harness.errors import HarnessError

MAX_BYTES = 1 << 20
MAX_DEPTH = 12


@dataclasses.dataclass(frozen=True)
class Text:
    line: int
    text: str


@dataclasses.dataclass(frozen=True)
class Items:
    line: int
    items: list[Value] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Table:
    """A mapping. `key_lines` says where each key stands; `values` keeps the order of the file."""

    line: int
    values: dict[str, Value] = dataclasses.field(default_factory=dict)
    key_lines: dict[str, int] = dataclasses.field(default_factory=dict)


Value = Text | Items | Table


def parse_tree(raw: bytes, name: str) -> Value | None:
    """The one document in `raw`, or None when it is empty. `name` leads the error messages.

    Raises HarnessError with `name:line` for anything that is not plain YAML.
    """
    if len(raw) > MAX_BYTES:
        raise HarnessError(
            f"the file has {len(raw)} bytes", where=name, expected=f"at most {MAX_BYTES}"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise HarnessError(
            f"byte 0x{raw[error.start]:02x} is not UTF-8",
            where=f"{name}:{line}",
            expected="UTF-8 text",
            remedy="save the file as UTF-8",
        ) from error
    try:
        return _Builder(name).build(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise HarnessError(
            f"control character U+{ord(text[error.position]):04X}",
            where=f"{name}:{line}",
            expected="printable text",
            remedy="remove it, or write it as an escape in double quotes",
        ) from error
    except yaml.MarkedYAMLError as error:
        raise _explain(error, text, name) from error


def plain(value: Value) -> Any:
    """The tree as dicts, lists and strings."""
    match value:
        case Text():
            return value.text
        case Items():
            return [plain(item) for item in value.items]
        case Table():
            return {key: plain(item) for key, item in value.values.items()}


def line_of(value: Value, path: tuple[int | str, ...]) -> int:
    """The line of the deepest part of `path` that the tree holds; a key's line for a key."""
    line = value.line
    for step in path:
        if isinstance(value, Table) and step in value.values:
            line, value = value.key_lines[str(step)], value.values[str(step)]
        elif isinstance(value, Items) and isinstance(step, int) and step < len(value.items):
            value = value.items[step]
            line = value.line
        else:
            break
    return line


def find(value: Value, path: tuple[int | str, ...]) -> Value | None:
    """The part of the tree at `path`, None when it is not there."""
    for step in path:
        if isinstance(value, Table) and step in value.values:
            value = value.values[str(step)]
        elif isinstance(value, Items) and isinstance(step, int) and step < len(value.items):
            value = value.items[step]
        else:
            return None
    return value


class _Builder:
    """Folds parser events into one tree; keeps its own stack, so depth costs no recursion."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.root: Value | None = None
        self.stack: list[Items | Table] = []
        self.keys: list[tuple[str, int] | None] = []  # per open container, a key without its value

    def refuse(self, event: yaml.Event, found: str, expected: str = "", remedy: str = "") -> None:
        where = f"{self.name}:{_line(event)}"
        raise HarnessError(found, where=where, expected=expected, remedy=remedy)

    def build(self, events: Iterator[yaml.Event]) -> Value | None:
        documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self.refuse(event, "a second YAML document", "one document without '---'")
            elif isinstance(event, yaml.NodeEvent):
                self.node(event)
            elif isinstance(event, yaml.CollectionEndEvent):
                self.stack.pop()
                self.keys.pop()
        return self.root

    def node(self, event: yaml.NodeEvent) -> None:
        if event.anchor is not None:
            self.refuse(
                event,
                f"the anchor or alias {event.anchor!r}",
                "plain values",
                "put what boards share under 'defaults:'",
            )
        tag = getattr(event, "tag", None)
        if tag is not None:
            self.refuse(event, f"the tag {tag!r}", "plain values", "remove the tag")
        line = _line(event)
        if self.stack and isinstance(self.stack[-1], Table) and self.keys[-1] is None:
            self.key(event, line, self.stack[-1])
            return
        if isinstance(event, yaml.ScalarEvent):
            value: Value = Text(line, self.text(event))
        else:
            value = Items(line) if isinstance(event, yaml.SequenceStartEvent) else Table(line)
        self.place(value)
        if not isinstance(value, Text):
            if len(self.stack) == MAX_DEPTH:
                self.refuse(event, f"more than {MAX_DEPTH} levels of nesting", "a flat list")
            self.stack.append(value)
            self.keys.append(None)

    def text(self, event: yaml.ScalarEvent) -> str:
        written = str(event.value)
        if not written and event.style is None and self.stack:
            key = self.keys[-1]
            what = f"the key {key[0]!r} has no value" if key else "an empty list item"
            if key:
                where = f"{self.name}:{key[1]}"
                raise HarnessError(what, where=where, expected="a value", remedy="or no such key")
            self.refuse(event, what, "a value", "remove the item")
        return written

    def key(self, event: yaml.NodeEvent, line: int, table: Table) -> None:
        if not isinstance(event, yaml.ScalarEvent):
            self.refuse(event, "a list or mapping as a key", "a plain name")
            return
        key = str(event.value)
        if key == "<<":
            self.refuse(
                event, "the merge key '<<'", "plain keys", "put what boards share under 'defaults:'"
            )
        if key in table.values:
            first = table.key_lines[key]
            self.refuse(
                event,
                f"the key {key!r} stands twice, first in line {first}",
                "each key once",
                "remove one of them",
            )
        self.keys[-1] = (key, line)

    def place(self, value: Value) -> None:
        if not self.stack:
            self.root = value
            return
        container = self.stack[-1]
        if isinstance(container, Items):
            container.items.append(value)
            return
        pending = self.keys[-1]
        if pending is None:
            raise AssertionError("a value in a mapping follows its key")
        key, line = pending
        container.values[key] = value
        container.key_lines[key] = line
        self.keys[-1] = None


def _line(event: yaml.Event) -> int:
    """Counted from 1. The parser sets every event's mark."""
    return event.start_mark.line + 1 if event.start_mark else 1


def _explain(error: yaml.MarkedYAMLError, text: str, name: str) -> HarnessError:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    written = text.splitlines()[line - 1] if mark and line <= len(text.splitlines()) else ""
    where = f"{name}:{line}"
    if mark and written[mark.column : mark.column + 1] == "\t":
        return HarnessError(
            "a tab used as indentation",
            where=where,
            expected="spaces",
            remedy="replace the tab by spaces",
        )
    found = f"not YAML: {error.problem or error.context}"
    if error.context and error.problem:
        found += f" ({error.context})"
    return HarnessError(
        found, where=where, expected="'key: value' lines", remedy="check indentation and quotes"
    )
