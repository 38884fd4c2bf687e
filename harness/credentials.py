"""Secrets in addresses: a URL may hold a user, a password, or a token in its query.

Such text must not reach a message, a log, the store or a board.
"""

from __future__ import annotations

import re

_URL = re.compile(r"(?<=://)([^/?#\s]*@)?([^\s?#'\"<>]*)(\?[^\s'\"<>]*)?")
_PASSWORD = re.compile(r"://[^/?#\s:@]*:(?!\$[A-Za-z_{])[^/?#\s]+@")


def without_credentials(text: str) -> str:
    """`text` with user, password and query of every URL in it left out.

    >>> without_credentials("no answer from https://ann:hunter2@host/simple?token=1")
    'no answer from https://…@host/simple?…'
    """
    return _URL.sub(_bare, text)


def _bare(found: re.Match[str]) -> str:
    user, rest, query = found.groups()
    return f"{'…@' if user else ''}{rest}{'?…' if query else ''}"


def has_password(text: str) -> bool:
    """Whether a URL in `text` holds a password; `$NAME` in its place is none."""
    return _PASSWORD.search(text) is not None
