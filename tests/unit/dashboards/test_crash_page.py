"""The Crash page: one entry for a signature, whatever texts boards sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dashboards.site import build, build_site
from harness.store import Store
from harness.store.crashes import Crashes

HOSTILE = "</code><script>document.title='owned'</script>\x1b[31m\u202e"


def test_a_signature_stands_once_with_its_boards_evidence_and_commands(
    store: Store, sample: Any, tmp_path: Path
) -> None:
    book = sample.Recorder(store)
    book.campaign("harness", "bringup")
    first = book.run("rk-01", "curve", sample.crash_verdict("a" * 16))
    second = book.run("pi-02", "curve", sample.crash_verdict("a" * 16))
    book.run("pi-02", "stress", sample.crash_verdict("b" * 16))
    found = {
        "command": f"harness triage {first[:8]} --again 5",
        "rate": "5 of 5",
        "words": "1 token",
    }
    Crashes(store).keep_reproducer(first, found)
    build(store, tmp_path / "site")
    text = (tmp_path / "site" / "crashes.html").read_text()
    assert "2 crashes on 2 boards" in text
    assert text.count("a write beyond the heap") == 2  # one for each signature
    assert f"harness triage {first[:8]} --again 5" in text and "5 of 5" in text
    assert "linear+0x40" in text
    for run_id in (first, second):
        assert f'href="runs/{run_id}.html"' in text
    assert 'href="crashes.html"' in (tmp_path / "site" / "index.html").read_text()


def test_hostile_text_of_a_crash_is_text(store: Store, sample: Any, tmp_path: Path) -> None:
    book = sample.Recorder(store)
    book.campaign("harness", "bringup")
    book.run("rk-01", "curve", sample.crash_verdict("a" * 16, HOSTILE))
    build(store, tmp_path / "site")
    text = (tmp_path / "site" / "crashes.html").read_text()
    assert "<script>document" not in text
    assert "\x1b" not in text and "\u202e" not in text
    assert "&lt;script&gt;" in text


def test_without_a_crash_there_is_no_page(store: Store, sample: Any, tmp_path: Path) -> None:
    sample.record_passing(store)
    build_site(store, tmp_path / "site")
    assert not (tmp_path / "site" / "crashes.html").exists()
