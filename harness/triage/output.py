"""What an engine printed as it died: Python's faulthandler, sanitisers. Pure: text in, records out.

Formats: CPython's faulthandler.c and pylifecycle.c; compiler-rt's sanitizer_stacktrace_printer.cpp,
asan_errors.cpp and tsan_report.cpp (gcc's libsanitizer is the same code).
"""

from __future__ import annotations

import dataclasses
import re

CHARS_LIMIT = 4 << 20
FRAMES_LIMIT = 40

_FATAL = re.compile(r"^Fatal Python error: (?P<what>[^\n]{1,200})", re.MULTILINE)
_THREAD = re.compile(
    r"^(?P<current>Current thread|Thread) 0x(?P<id>[0-9a-f]{1,16})(?: \[[^\]\n]{0,40}\])? "
    r"\(most recent call first\):\n(?P<frames>(?:[ \t]+[^\n]*\n?)*)",
    re.MULTILINE,
)
_PYTHON_FRAME = re.compile(
    r'File "(?:[^"\n]*/)?(?P<file>[^"/\n]{1,200})", line (?P<line>\d{1,7}) in (?P<name>\S{1,200})'
)
_SANITIZER = re.compile(
    r"^(?:==\d{1,10}==(?:ERROR|WARNING): |WARNING: )(?P<tool>\w{1,20}Sanitizer): "
    r"(?P<what>[^\n]{1,200})",
    re.MULTILINE,
)
_ACCESS = re.compile(
    r"^ *(?P<previous>Previous )?(?:[Aa]tomic )?(?P<kind>READ|WRITE|[Rr]ead|[Ww]rite) "
    r"of size (?P<size>\d{1,10}) at 0x[0-9a-f]{1,16}",
    re.MULTILINE,
)
_FRAME = re.compile(
    r"^ *#(?P<number>\d{1,3}) (?:0x(?P<pc>[0-9a-f]{1,16}) (?:in )?)?(?P<name>[^\s(][^\s]{0,200})?"
    r"(?: (?P<place>[^\s()]{1,400}))?"
    r"(?: \((?P<module>[^()+\n]{1,400})\+0x(?P<offset>[0-9a-f]{1,16})\))?"
    r"(?: \(BuildId: (?P<build>[0-9a-f]{1,64})\))?",
    re.MULTILINE,
)
_REGION = re.compile(
    r"^0x[0-9a-f]{1,16} is located (?P<text>\d{1,12} bytes "
    r"(?:to the right of|to the left of|after|before|inside of) [^\n\[]{1,80}?region)",
    re.MULTILINE,
)
_UNDEFINED = re.compile(
    r"^(?P<place>[^\s:]{1,300}:\d{1,7}:\d{1,7}): runtime error: (?P<what>[^\n]{1,200})",
    re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class PythonFrame:
    file: str  # the name alone
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.name}"


@dataclasses.dataclass(frozen=True)
class PythonThread:
    """Frames from the innermost on. `current`: the one that the signal came to."""

    id: str
    current: bool
    frames: tuple[PythonFrame, ...]


@dataclasses.dataclass(frozen=True)
class FatalPython:
    what: str  # "Segmentation fault"
    threads: tuple[PythonThread, ...]


@dataclasses.dataclass(frozen=True)
class NativeFrame:
    """`place` is a source file with its line, where it is known."""

    name: str
    place: str = ""
    module: str = ""
    offset: int | None = None

    def __str__(self) -> str:
        if self.name:
            return f"{self.name} ({self.place})" if self.place else self.name
        return f"{self.module}+0x{self.offset or 0:x}"


@dataclasses.dataclass(frozen=True)
class Access:
    kind: str  # read | write
    size: int
    previous: bool
    frames: tuple[NativeFrame, ...]


@dataclasses.dataclass(frozen=True)
class SanitizerReport:
    """`tool`: address | thread | undefined | leak | memory; `what`: "heap-buffer-overflow"."""

    tool: str
    what: str
    accesses: tuple[Access, ...]
    frames: tuple[NativeFrame, ...]
    region: str = ""


def parse_threads(text: str) -> tuple[PythonThread, ...]:
    """The Python stacks in a text, as faulthandler prints them."""
    found = []
    for match in _THREAD.finditer(text[:CHARS_LIMIT]):
        frames = [
            PythonFrame(item["file"], int(item["line"]), item["name"])
            for item in _PYTHON_FRAME.finditer(match["frames"])
        ]
        current = match["current"] == "Current thread"
        found.append(PythonThread(match["id"], current, tuple(frames[:FRAMES_LIMIT])))
    return tuple(found)


def parse_fatal(text: str) -> FatalPython | None:
    """The last "Fatal Python error" of a log, with the stacks behind it."""
    found = list(_FATAL.finditer(text[:CHARS_LIMIT]))
    if not found:
        return None
    return FatalPython(found[-1]["what"].strip(), parse_threads(text[found[-1].start() :]))


def parse_sanitizer(text: str) -> SanitizerReport | None:
    """The first report of a sanitiser in a log."""
    text = text[:CHARS_LIMIT]
    match = _SANITIZER.search(text)
    if match is None:
        return _undefined(text)
    body = text[match.end() :]
    end = body.find("SUMMARY: ")
    body = body if end < 0 else body[:end]
    what = match["what"].strip()
    tool = match["tool"].removesuffix("Sanitizer").lower()
    starts = [item for item in _ACCESS.finditer(body)][:8]
    accesses = []
    for number, item in enumerate(starts):
        stop = starts[number + 1].start() if number + 1 < len(starts) else len(body)
        frames = _frames(body[item.end() : stop], first_only=True)
        accesses.append(
            Access(item["kind"].lower(), int(item["size"]), bool(item["previous"]), frames)
        )
    region = _REGION.search(body)
    return SanitizerReport(
        {"address": "address", "thread": "thread"}.get(tool, tool),
        what.split(" on ")[0].split(" (pid")[0].strip(),
        tuple(accesses),
        _frames(body, first_only=True),
        region["text"] if region else "",
    )


def _undefined(text: str) -> SanitizerReport | None:
    match = _UNDEFINED.search(text)
    if match is None:
        return None
    frames = _frames(text[match.end() :], first_only=True)
    return SanitizerReport(
        "undefined", match["what"].strip(), (), frames or (NativeFrame("", match["place"]),)
    )


def _frames(text: str, *, first_only: bool) -> tuple[NativeFrame, ...]:
    """The frames of the first stack in `text`."""
    found: list[NativeFrame] = []
    for match in _FRAME.finditer(text):
        if int(match["number"]) == 0 and found and first_only:
            break
        place, name = match["place"] or "", match["name"] or ""
        found.append(
            NativeFrame(
                name,
                place.rsplit("/", 1)[-1],
                (match["module"] or "").rsplit("/", 1)[-1],
                int(match["offset"], 16) if match["offset"] else None,
            )
        )
        if len(found) >= FRAMES_LIMIT:
            break
    return tuple(found)
