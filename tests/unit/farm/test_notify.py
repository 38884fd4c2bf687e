"""Telling people of a night, to a real HTTP server on loopback."""

from __future__ import annotations

import http.server
import importlib.util
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.farm import notify


class Inbox(http.server.BaseHTTPRequestHandler):
    status = 200
    messages: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.messages.append(json.loads(body))
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return None


@pytest.fixture
def inbox() -> Iterator[tuple[type[Inbox], str]]:
    """A server's handler, with what it was told, and its address."""
    if importlib.util.find_spec("apprise") is None:
        pytest.skip("needs apprise")

    class Own(Inbox):
        messages: list[dict[str, Any]] = []  # noqa: RUF012 - of this server alone

    server = http.server.HTTPServer(("127.0.0.1", 0), Own)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield Own, f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_nobody_is_told_where_the_environment_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(notify.VARIABLE, raising=False)
    assert notify.send("night", "all well") == 0
    assert notify.trouble() is None


def test_every_target_gets_title_and_text_as_they_stand(
    inbox: tuple[type[Inbox], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, address = inbox
    monkeypatch.setenv(notify.VARIABLE, f"json://{address}/a json://{address}/b")
    assert notify.send("night", "rk-01 <b>tiny</b> *FAIL*\nsecond line") == 2
    told = [(item["title"], item["message"]) for item in handler.messages]
    assert told == [("night", "rk-01 <b>tiny</b> *FAIL*\nsecond line")] * 2


def test_a_target_that_takes_nothing_is_told_without_its_url(
    inbox: tuple[type[Inbox], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    handler, address = inbox
    handler.status = 500
    url = f"json://user:planted-secret@{address}"
    monkeypatch.setenv(notify.VARIABLE, f"{url} {url}")
    with pytest.raises(HarnessError, match="2 of 2 targets") as caught:
        notify.send("night", "text")
    said = str(caught.value) + caplog.text + "".join(capfd.readouterr())
    assert "planted-secret" not in said


def test_a_url_that_is_none_is_refused_without_being_repeated(
    inbox: tuple[type[Inbox], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(notify.VARIABLE, "nosuch://planted-secret")
    with pytest.raises(HarnessError, match="URL 1 of HARNESS_NOTIFY_URL") as caught:
        notify.send("night", "text")
    assert "planted-secret" not in str(caught.value) + caplog.text


def test_without_apprise_the_trouble_is_told_before_the_night(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv(notify.VARIABLE, "json://user:planted-secret@127.0.0.1")
    told = notify.trouble()
    assert told is not None
    assert "decode-harness[notify]" in told
    assert "planted-secret" not in told
    with pytest.raises(HarnessError, match="not installed"):
        notify.send("night", "text")
