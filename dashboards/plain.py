"""Text from boards made safe to look at: nothing in it moves, hides or reorders what is read.

Escaping of HTML is Jinja's; this is about characters that a browser would obey or hide. Terminal
escapes, control characters and direction overrides are shown as what they are.
"""

from __future__ import annotations

import re

# C0 controls (not tab, newline), DEL, C1 controls, zero-width and direction characters, separators
# that break lines, tag characters, lone surrogates (which cannot be encoded).
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)


def _name(match: re.Match[str]) -> str:
    code = ord(match[0])
    return "\u27e8ESC\u27e9" if code == 0x1B else f"\u27e8U+{code:04X}\u27e9"


def visible(text: str) -> str:
    """`text` with every character that would hide, move or reorder something replaced by a sign.

    A carriage return before a newline is dropped; tabs and newlines stay.
    """
    return _HIDDEN.sub(_name, text.replace("\r\n", "\n"))


def slug(text: str) -> str:
    """A file name part of lower-case letters, digits, dots and dashes; never empty, never `..`."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:60] or "x"


def number(value: object, digits: int = 3) -> str:
    """`value` to `digits` significant digits, without an exponent between 1e-4 and 1e7.

    Thousands are set apart by a thin space. None and what is not finite give a dash.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "–" if value is None else str(value)
    if value != value or value in (float("inf"), float("-inf")):
        return "–"
    if value == 0:
        return "0"
    magnitude = abs(value)
    if 0.99 < magnitude < 1:  # 0.9998 must not read as 1
        return cosine(value).replace("-", "\u2212")
    if magnitude < 1e-4 or magnitude >= 1e7:
        mantissa, exponent = f"{value:.{max(digits - 1, 0)}e}".split("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "\u2212")
    if isinstance(value, int) or magnitude >= 10**digits:
        text = f"{value:,.0f}".replace(",", "\u202f")
    else:
        rounded = float(f"{value:.{digits}g}")
        text = f"{rounded:.{digits}g}" if abs(rounded) < 1e4 else f"{rounded:,.0f}"
        if "e" in text:
            text = f"{rounded:f}".rstrip("0").rstrip(".")
    return text.replace("-", "\u2212")


def cosine(value: float | None) -> str:
    """A cosine with as many nines as it has: 0.99987, not 1.00."""
    if value is None or value != value:
        return "–"
    for digits in (3, 4, 5, 6, 7, 8):
        text = f"{value:.{digits}f}"
        if not text.lstrip("-").startswith("1.0"):
            return text
    return "1" if value > 0 else "-1"


def mebibytes(count: float | None) -> str:
    """`count` MiB as people read them: 812 MiB, 1.62 GiB."""
    if count is None:
        return "–"
    return f"{number(count / 1024)} GiB" if count >= 1000 else f"{number(count)} MiB"


def seconds(value: float | None) -> str:
    """A duration: 0.42 s, 38 s, 4 min 10 s, 1 h 02 min."""
    if value is None or value < 0:
        return "–"
    if value < 0.1:
        return "under 0.1 s" if value > 0 else "0 s"
    if value < 60:
        return f"{number(value, 2)} s"
    whole = round(value)
    if whole < 3600:
        minutes, rest = divmod(whole, 60)
        return f"{minutes} min {rest:02d} s" if rest else f"{minutes} min"
    hours, rest = divmod(whole, 3600)
    return f"{hours} h {rest // 60:02d} min"
