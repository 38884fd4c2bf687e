from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboards.reading import stamp
from dashboards.serve import Server, find, names_of, rebuild_when_changed, serving
from dashboards.site import POLICY, build
from harness.errors import HarnessError
from harness.store import Store


@pytest.fixture(scope="module")
def server(troubled_site: Path) -> Iterator[Server]:
    with serving(troubled_site, "127.0.0.1", 0) as running:
        yield running


def ask(
    server: Server, path: str, *, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def test_pages_are_served_with_the_policy_in_the_headers_too(
    server: Server, troubled_site: Path
) -> None:
    answer, body = ask(server, "/")
    assert answer.status == 200
    assert body == (troubled_site / "index.html").read_bytes()
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.headers["Content-Security-Policy"].startswith(POLICY)
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_an_unchanged_page_is_not_sent_again(server: Server) -> None:
    answer, _ = ask(server, "/index.html")
    again, body = ask(server, "/index.html", **{"If-None-Match": answer.headers["ETag"]})
    assert (again.status, body) == (304, b"")
    head, body = ask(server, "/index.html", method="HEAD")
    assert (head.headers["ETag"], body) == (answer.headers["ETag"], b"")


@pytest.mark.parametrize(
    "path",
    [
        "/.dashboard.json",
        "/../store/results.sqlite",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/static/..%2f..%2f..%2fetc/passwd",
        "//etc/passwd",
        "/index.html%00.txt",
        "/static",
        "/static/",
        "/none.html",
    ],
)
def test_nothing_but_files_of_the_site_is_served(server: Server, path: str) -> None:
    answer, body = ask(server, path)
    assert answer.status == 404
    assert b"root:" not in body


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    root = (tmp_path / "site").resolve()
    root.mkdir()
    (root / "way.txt").symlink_to(tmp_path / "secret.txt")
    assert find(root, "/way.txt") is None


def test_a_half_written_or_hidden_file_is_not_served(tmp_path: Path) -> None:
    for name in (".writing-x", "page.html"):
        (tmp_path / name).write_text("")
    assert find(tmp_path.resolve(), "/.writing-x") is None
    assert find(tmp_path.resolve(), "/page.html") == tmp_path.resolve() / "page.html"


def test_a_name_that_is_not_ours_gets_nothing(server: Server) -> None:
    assert ask(server, "/", Host="evil.example")[0].status == 421
    assert ask(server, "/", Host="localhost:8017")[0].status == 200
    assert ask(server, "/", method="POST")[0].status == 501


def test_a_server_answers_to_the_names_of_its_address() -> None:
    assert names_of("127.0.0.1") == {"127.0.0.1", "localhost"}
    assert names_of("192.168.1.20") == {"192.168.1.20"}
    assert names_of("lab-host") == {"lab-host"}
    assert names_of("0.0.0.0") == frozenset()


def test_a_port_in_use_is_one_clear_error(server: Server, troubled_site: Path) -> None:
    port = server.server_address[1]
    with (
        pytest.raises(HarnessError, match=r"cannot listen.*another --port"),
        serving(troubled_site, "127.0.0.1", port),
    ):
        pass


def test_the_site_is_rebuilt_when_results_arrive(store: Store, sample: Any, tmp_path: Path) -> None:
    out = tmp_path / "site"
    known = stamp(store)
    build(store, out)
    stop = threading.Event()
    said: list[str] = []
    thread = threading.Thread(
        target=rebuild_when_changed,
        args=(store, out, known, stop, said.append),
        kwargs={"period_s": 0.02},
    )
    thread.start()
    try:
        book = sample.Recorder(store)
        book.campaign("harness", "bringup")
        book.run("late-01", "tiny", sample.tiny_verdict())
        book.finish(sample.Outcome.PASS)
        for _ in range(300):
            if "The board passes every stage" in (out / "index.html").read_text():
                break
            stop.wait(0.1)
    finally:
        stop.set()
        thread.join()
    assert "late-01" in (out / "index.html").read_text()
    assert all(words.startswith("results arrived") for words in said)


def test_what_arrives_while_the_site_is_built_is_not_missed(
    store: Store, sample: Any, tmp_path: Path
) -> None:
    out = tmp_path / "site"
    known = stamp(store)
    build(store, out)
    sample.Recorder(store).campaign("harness", "bringup", "--board", "late-01")
    stop = threading.Event()
    rebuild_when_changed(store, out, known, stop, lambda _: stop.set(), period_s=0.01)
    assert "--board late-01" in (out / "index.html").read_text()


def test_trouble_while_rebuilding_is_told_and_tried_again(
    store: Store, sample: Any, tmp_path: Path
) -> None:
    out = tmp_path / "site"
    out.mkdir()
    (out / "other.txt").write_text("in the way")
    stop = threading.Event()
    said: list[str] = []

    def say(words: str) -> None:
        said.append(words)
        if len(said) == 1:
            (out / "other.txt").unlink()
        else:
            stop.set()

    known = stamp(store)
    sample.Recorder(store).campaign("harness", "bringup")
    rebuild_when_changed(store, out, known, stop, say, period_s=0.01)
    assert said[0].startswith("not rebuilt: ")
    assert said[1].startswith("results arrived")
