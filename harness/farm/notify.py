"""Tells people by apprise (the extra `notify`): mail, chats, anything that it has a URL for.

Where to is a secret more often than not: it comes from the environment alone, and no message, log
or result repeats it.
"""

from __future__ import annotations

import importlib.util
import logging
import os

from harness.errors import HarnessError

VARIABLE = "HARNESS_NOTIFY_URL"  # one or more URLs of apprise, separated by blanks
MOST_CHARACTERS = 20_000  # of a body; services cut or refuse far shorter ones themselves


def targets() -> list[str]:
    """The URLs that the environment names; empty when nobody is to be told."""
    return os.environ.get(VARIABLE, "").split()


def trouble() -> str | None:
    """Why nobody could be told, known before there is anything to tell; None where all is well."""
    if targets() and importlib.util.find_spec("apprise") is None:
        return (
            f"{VARIABLE} is set, but apprise is not installed; expected the extra `notify`; "
            "pip install 'decode-harness[notify]'"
        )
    return None


def send(title: str, body: str) -> int:
    """Tells every target; returns how many. Raises HarnessError, naming none of them."""
    urls = targets()
    if not urls:
        return 0
    missing = trouble()
    if missing:
        raise HarnessError(missing)
    import apprise

    # What it logs may hold a URL with its token.
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    failed = 0
    for number, url in enumerate(urls, 1):
        told = apprise.Apprise()
        if not told.add(url):
            raise HarnessError(
                f"URL {number} of {VARIABLE} is none that apprise knows",
                expected="such as mailto://…, slack://… or json://…",
                remedy="see apprise's list of services; the URL itself is not repeated here",
            )
        # Text as it stands: no service is to read markup from a board's words.
        body_format = apprise.NotifyFormat.TEXT
        failed += not told.notify(title=title, body=body[:MOST_CHARACTERS], body_format=body_format)
    if failed:
        raise HarnessError(
            f"{failed} of {len(urls)} targets of {VARIABLE} did not take the message",
            remedy="try the URL with apprise's own command",
        )
    return len(urls)
