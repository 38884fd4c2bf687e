"""`harness dashboard`: build the pages of stored results, or serve them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.output import console, emit, emit_json, guard, say
from harness.cli.results import open_existing

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)

OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FOLDER", help="Where the pages go; dashboard/ of the state folder."
    ),
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="PATH",
        help="Results database, or a PostgreSQL URL; results.sqlite of the state folder.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.callback()
def dashboard() -> None:
    """Build the pages of stored results, or serve them on this machine."""


@app.command("build")
@guard
def build_pages(
    out: OutOption = None,
    store_path: StoreOption = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Write every file, also those that did not change.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Build static pages of the stored results; they open from disk, without a network.

    Pages that did not change are left as they are, and stale ones are removed. A folder that
    holds anything else is refused.

    \b
    Examples
      harness dashboard build
      harness dashboard build --out public --json
      harness dashboard build --store /srv/lab/results.sqlite --out /srv/www/farm
    """
    from dashboards.site import as_json as report_json
    from dashboards.site import build, default_folder

    with open_existing(store_path) as store, console().status("reading the results") as status:

        def told(done: int, total: int) -> None:
            status.update(f"{done} of {total} parts of the site")

        report = build(store, out or default_folder(), incremental=not everything, told=told)
    if as_json:
        emit_json(report_json(report))
        return
    emit(str(report.index))
    say(
        f"{report.pages} pages; {report.written} files written, {report.unchanged} unchanged, "
        f"{report.removed} removed"
    )


@app.command("serve")
@guard
def serve_pages(
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback show results to all.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8017,
    out: OutOption = None,
    store_path: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build the pages and serve them; open pages follow as results arrive. Ctrl-C ends it.

    Only this machine can see them unless --host names another address.

    \b
    Examples
      harness dashboard serve
      harness dashboard serve --port 0 --json      a free port, told as JSON
      harness dashboard serve --host 192.168.1.20  for the lab's network
    """
    from dashboards.reading import stamp
    from dashboards.serve import rebuild_when_changed, serving
    from dashboards.site import build, default_folder

    folder = out or default_folder()
    try:
        with open_existing(store_path) as store:
            known = stamp(store)
            build(store, folder)
            with serving(folder, host, port) as server:
                name = f"[{host}]" if ":" in host else host
                url = f"http://{name}:{server.server_address[1]}/"
                if as_json:
                    emit_json({"url": url, "folder": str(folder)})
                else:
                    emit(url)
                say("Ctrl-C ends it")
                rebuild_when_changed(store, folder, known, threading.Event(), say)
    except KeyboardInterrupt:
        say("ended")
