"""`devices.yaml` → `Farm`: read, merged with `defaults`, checked, with the line of each mistake."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from harness.errors import HarnessError
from harness.inventory.entry import Entry
from harness.inventory.scalars import Refused, describe, is_secret_name
from harness.inventory.schema import Board, Jump
from harness.inventory.tree import Items, Table, Text, Value, find, line_of, parse_tree, plain

MERGED_BY_KEY = ("budget", "engine", "environment")  # a board's own keys are added to the defaults'
NOT_DEFAULTS = ("name", "host", "host_key", "virtual")  # they make one board what it is


@dataclasses.dataclass(frozen=True)
class Farm:
    path: Path
    boards: Mapping[str, Board]

    def select(self, names: Sequence[str] = (), tags: Sequence[str] = ()) -> list[Board]:
        """The boards that are named and carry every tag, in the file's order; all for neither.

        Raises HarnessError for an unknown name or tag (with near ones), and when none is left.
        """
        known_tags = sorted({tag for board in self.boards.values() for tag in board.tags})
        for what, wanted, known in (
            ("board", names, list(self.boards)),
            ("tag", tags, known_tags),
        ):
            for word in wanted:
                if word not in known:
                    raise HarnessError(
                        f"no {what} {word!r}",
                        where=str(self.path),
                        expected=_one_of(known) if known else f"a {what}, but the file has none",
                        remedy=_near(word, known),
                    )
        chosen = [
            board
            for board in self.boards.values()
            if (not names or board.name in names) and set(tags) <= set(board.tags)
        ]
        if not chosen:
            asked = f"tags {', '.join(tags)}" + (f" among {', '.join(names)}" if names else "")
            raise HarnessError(f"no board has {asked}", where=str(self.path), remedy="ask for less")
        return chosen


def load_farm(path: Path) -> Farm:
    """Raises HarnessError, whose message begins with `file:line:`, for anything but a good file."""
    shown = _shown(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise HarnessError(
            "no such file",
            where=shown,
            expected="a farm description",
            remedy="create devices.yaml here, or name another file with --farm FILE",
        ) from error
    except OSError as error:
        raise HarnessError(
            f"cannot be read: {error.strerror}",
            where=shown,
            expected="a readable file",
            remedy="check its permissions, or name another file with --farm FILE",
        ) from error
    root = parse_tree(raw, shown)
    if root is None:
        raise HarnessError(
            "the file is empty", where=f"{shown}:1", expected="'boards:' with at least one board"
        )
    return _Reader(path, shown).farm(root)


class _Reader:
    def __init__(self, path: Path, shown: str) -> None:
        self.path, self.shown = path, shown
        self.problems: list[tuple[int, HarnessError]] = []

    def problem(self, line: int, found: str, expected: str = "", remedy: str = "") -> HarnessError:
        error = HarnessError(found, where=f"{self.shown}:{line}", expected=expected, remedy=remedy)
        if not any(str(error) == str(known) for _, known in self.problems):
            self.problems.append((line, error))
        return error

    def farm(self, root: Value) -> Farm:
        if not isinstance(root, Table):
            raise self.problem(root.line, _kind(root), "'boards:' with at least one board")
        self.secrets(root)
        self.unknown(root, ("defaults", "boards"))
        defaults = self.table(root, "defaults") or Table(root.line)
        boards = self.table(root, "boards")
        if boards is None or not boards.values:
            line = root.key_lines.get("boards", root.line)
            self.problem(line, "no boards", "'boards:' with at least one board")
            raise self.first()
        for key in NOT_DEFAULTS:
            if key in defaults.values:
                self.problem(
                    defaults.key_lines[key], f"{key!r} in defaults", "it in a board's own entry"
                )
        self.defaults_alone(defaults)
        merged = {
            name: _merge(defaults, entry, boards.key_lines[name])
            for name, entry in boards.values.items()
            if self.is_table(entry, boards.key_lines[name], f"board {name!r}")
        }
        made: dict[str, Board | None] = {}
        for name in merged:
            self.board(name, merged, made, ())
        if self.problems:
            raise self.first()
        return Farm(self.path, {name: board for name, board in made.items() if board is not None})

    def first(self) -> HarnessError:
        """The first mistake in the file; the lines of the others follow."""
        ordered = sorted(self.problems, key=lambda item: item[0])
        where, first = ordered[0]
        lines = sorted({line for line, _ in ordered} - {where})
        if lines:
            more = f"also wrong: line {', '.join(map(str, lines[:8]))}"
            first.remedy = f"{first.remedy}; {more}" if first.remedy else more
        return first

    def table(self, root: Table, key: str) -> Table | None:
        value = root.values.get(key)
        if value is None or not self.is_table(value, root.key_lines[key], f"'{key}'"):
            return None
        return value if isinstance(value, Table) else None

    def is_table(self, value: Value, line: int, what: str) -> bool:
        if isinstance(value, Table):
            return True
        self.problem(line, f"{what} is {_kind(value)}", "a mapping of 'key: value'")
        return False

    def unknown(self, table: Table, known: Sequence[str]) -> None:
        for key in table.values:
            if key not in known:
                self.problem(
                    table.key_lines[key], f"unknown key {key!r}", _one_of(known), _near(key, known)
                )

    def secrets(self, value: Value) -> None:
        """No secret is kept in the file; their values never reach a message."""
        if isinstance(value, Table):
            for key, inner in value.values.items():
                if is_secret_name(key) and not isinstance(inner, Table):
                    raise self.problem(
                        value.key_lines[key],
                        f"the key {key!r}",
                        "no secrets in this file",
                        "use a key from the SSH agent or 'key_file', or set "
                        "HARNESS_SSH_PASSWORD_<BOARD> in the environment",
                    )
                self.secrets(inner)
        elif isinstance(value, Items):
            for item in value.items:
                self.secrets(item)

    def defaults_alone(self, defaults: Table) -> None:
        """A mistake in the defaults is told even when every board overrides the key."""
        probe = Table(
            defaults.line,
            {k: v for k, v in defaults.values.items() if k not in (*NOT_DEFAULTS, "jump")},
            defaults.key_lines,
        )
        self.validate({"name": "defaults", "host": "defaults", **plain(probe)}, probe)

    def board(
        self,
        name: str,
        tables: Mapping[str, Table],
        made: dict[str, Board | None],
        asking: tuple[str, ...],
    ) -> Board | None:
        """Makes the board `name`, and first those it jumps through."""
        if name in made:
            return made[name]
        table = tables[name]
        if "name" in table.values:
            self.problem(
                table.key_lines["name"], "unknown key 'name'", "the name as the entry's own key"
            )
        data: dict[str, Any] = {**plain(table), "name": name}
        jump = table.values.get("jump")
        if isinstance(jump, Text):
            data["jump"] = self.jump_board(name, jump, table, tables, made, asking)
        elif jump is not None:
            self.no_chain(jump)
        board = self.validate(data, table)
        made[name] = board
        return board

    def jump_board(
        self,
        name: str,
        jump: Text,
        table: Table,
        tables: Mapping[str, Table],
        made: dict[str, Board | None],
        asking: tuple[str, ...],
    ) -> Jump | None:
        line = table.key_lines["jump"]
        if jump.text not in tables:
            near = _near(jump.text, list(tables))
            self.problem(
                line,
                f"jump: {jump.text!r} is no board of this file",
                "a board's name, or a mapping with host, user and host_key",
                near,
            )
            return None
        if jump.text in (name, *asking):
            circle = " → ".join((*asking, name, jump.text))
            self.problem(line, f"the jumps form a circle: {circle}", "a way that ends here")
            return None
        through = self.board(jump.text, tables, made, (*asking, name))
        if through is None:
            return None
        if through.virtual is not None:
            self.problem(line, f"jump: {jump.text!r} is a virtual board", "a board with a 'host'")
            return None
        return Jump(
            name=through.name,
            host=_bracketed(through.host),
            port=through.port,
            user=through.user,
            host_key=through.host_key,
            key_file=through.key_file,
            via=through.jump,
        )

    def no_chain(self, jump: Value) -> None:
        for key in ("name", "via"):
            if isinstance(jump, Table) and key in jump.values:
                self.problem(
                    jump.key_lines[key],
                    f"unknown key {key!r}",
                    _one_of(("host", "port", "user", "host_key", "key_file")),
                    "name another board in 'jump' to pass through several hosts",
                )

    def validate(self, data: dict[str, Any], table: Table) -> Board | None:
        folder = self.path.absolute().parent
        try:
            return Board.model_validate(data, context={"folder": folder})
        except ValidationError as error:
            for detail in error.errors():
                self.explain(detail, table)
            return None

    def explain(self, detail: ErrorDetails, table: Table) -> None:
        path = tuple(detail["loc"])
        line = line_of(table, path)
        key, kind = (str(path[-1]) if path else ""), detail["type"]
        # Where pydantic tried members of a union, the path goes on below the file's own keys.
        written = find(table, path)
        where = f"{_dotted(path, table)}: " if path else ""
        cause = (detail.get("ctx") or {}).get("error")
        if isinstance(cause, Refused):
            self.problem(line, where + cause.found, cause.expected, cause.remedy)
        elif kind == "extra_forbidden":
            known = _keys_at(Board, path[:-1])
            found = f"unknown key {key!r}" + (f" in {path[-2]}" if len(path) > 1 else "")
            self.problem(line, found, _one_of(known), _near(key, known))
        elif kind == "missing":
            inside = f" in {path[-2]}" if len(path) > 1 else ""
            self.problem(line, f"the key {key!r} is missing{inside}", f"'{key}: …'")
        else:
            found = describe(plain(written)) if written else describe(detail["input"])
            self.problem(line, where + found, _expected(detail))


def _merge(defaults: Table, board: Value, line: int) -> Table:
    """The board's own keys over the defaults; each value keeps the line where it stands."""
    own = board if isinstance(board, Table) else Table(line)
    virtual = "virtual" in own.values
    inherited = [
        key
        for key in defaults.values
        # What says how to reach real boards does not concern a virtual one.
        if not (virtual and key in ("port", "key_file", "jump"))
    ]
    merged = Table(line)
    for key in [*inherited, *(key for key in own.values if key not in inherited)]:
        source = own if key in own.values else defaults
        value = source.values[key]
        base = defaults.values.get(key)
        if (
            key in MERGED_BY_KEY
            and isinstance(base, Table)
            and isinstance(value, Table)
            and not (key == "engine" and _names_another_unit(base, value))
        ):
            value = Table(
                value.line, {**base.values, **value.values}, {**base.key_lines, **value.key_lines}
            )
        merged.values[key], merged.key_lines[key] = value, source.key_lines[key]
    return merged


def _names_another_unit(defaults: Table, own: Table) -> bool:
    """What the defaults ask of one unit of the engine says nothing about another."""
    units = [plain(table).get("unit") for table in (defaults, own)]
    return units[1] is not None and units[0] != units[1]


def _keys_at(model: type[Entry], path: Sequence[int | str]) -> list[str]:
    """The keys that the model's part at `path` knows."""
    hidden = {"name", "via"}
    current: type[Entry] = model
    for step in path:
        field = current.model_fields.get(str(step))
        inner = _entry_in(field.annotation) if field else None
        if inner is None:
            break
        current = inner
    return [key for key in current.model_fields if key not in hidden]


def _entry_in(annotation: Any) -> type[Entry] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Entry):
            return candidate
    return None


def _expected(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx") or {}
    known = {
        "string_type": "text",
        "model_type": "a mapping of 'key: value'",
        "model_attributes_type": "a mapping of 'key: value'",
        "dict_type": "a mapping of 'key: value'",
        "tuple_type": "a list such as [a, b]",
        "list_type": "a list such as [a, b]",
    }
    if kind == "literal_error":
        return str(context.get("expected", ""))
    return known.get(kind, detail["msg"])


def _dotted(path: Sequence[int | str], table: Table) -> str:
    """The part of `path` that stands in the file."""
    steps = list(path)
    while len(steps) > 1 and find(table, tuple(steps)) is None:
        steps.pop()
    return ".".join(map(str, steps))


def _kind(value: Value) -> str:
    return {Text: "text", Items: "a list", Table: "a mapping"}[type(value)]


def _one_of(known: Sequence[str]) -> str:
    return "one of " + ", ".join(known)


def _near(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=2, cutoff=0.6)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _shown(path: Path) -> str:
    """The path as a user would type it here."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
