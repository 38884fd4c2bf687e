"""Frames as files that other tools read."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from harness.errors import HarnessError

FORMATS = ("csv", "json", "parquet")


def export_table(frame: pd.DataFrame, path: Path, format: str | None = None) -> int:
    """Writes `frame` to `path` and returns its number of rows.

    A file is written complete or not at all; what is there and no regular file (a pipe, a device,
    a link) is written to and never replaced. The path `-` is stdout, for csv and json only. JSON
    keeps nested values; in CSV and Parquet they are JSON texts, times ISO 8601 in UTC in JSON and
    CSV.
    Raises HarnessError for an unknown format, for Parquet without pyarrow or on stdout, and where
    the file cannot be written.
    """
    on_stdout = str(path) == "-"
    chosen = _format(path, format, on_stdout)
    content = _content(frame, chosen)
    if on_stdout:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    else:
        _write(content, path)
    return len(frame)


def _format(path: Path, format: str | None, on_stdout: bool) -> str:
    chosen = (format or path.suffix.removeprefix(".")).lower()
    if chosen not in FORMATS:
        name = "stdout" if on_stdout else path.name
        raise HarnessError(
            f"cannot export as {chosen!r}" if chosen else f"{name} has no ending",
            expected=", ".join(FORMATS),
            remedy="name the file results.csv, or give --format",
        )
    if chosen == "parquet" and on_stdout:
        raise HarnessError(
            "Parquet is no text and is not written to stdout",
            expected="--format csv or json, or a file",
        )
    if chosen == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise HarnessError(
            "Parquet files need pyarrow, which is not installed",
            remedy="run: pip install 'decode-harness[parquet]', or export csv or json",
        )
    return chosen


def _content(frame: pd.DataFrame, chosen: str) -> bytes:
    if chosen == "json":
        text = json.dumps(records(frame), ensure_ascii=False, indent=1, allow_nan=False)
        return (text + "\n").encode()
    if chosen == "csv":
        return flat(frame).to_csv(index=False, date_format="%Y-%m-%dT%H:%M:%S.%fZ").encode()
    buffer = io.BytesIO()
    flat(frame).to_parquet(buffer, index=False)
    return buffer.getvalue()


def _write(content: bytes, path: Path) -> None:
    if not path.parent.is_dir():
        raise HarnessError(
            "there is no such folder",
            where=str(path.parent),
            remedy=f"make it, or name another place for {path.name}",
        )
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            # Renaming a file over a pipe or /dev/stdout, which is a link even where the shell sends
            # it to a regular file, would take it away from everybody.
            path.write_bytes(content)
            return
        try:
            partial.write_bytes(content)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise HarnessError(
            f"cannot be written: {error.strerror or error}",
            where=str(path),
            remedy="name a file in a folder that you may write",
        ) from error


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as plain JSON: missing values are None, times are texts, nested values stay."""
    return [
        {str(key): _plain(value) for key, value in row.items()}
        for row in frame.astype(object).to_dict(orient="records")
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, (dict, list)):
        return value
    if value is None or pd.isna(value):
        return None
    if isinstance(value, pd.Timestamp):
        return value.isoformat()
    return value.item() if hasattr(value, "item") else value


def flat(frame: pd.DataFrame) -> pd.DataFrame:
    """Nested values as JSON texts."""
    result = frame.copy()
    for name in result.columns:
        column = result[name]
        if (
            column.dtype == object
            and column.map(lambda value: isinstance(value, (dict, list))).any()
        ):
            result[name] = column.map(
                lambda value: (
                    None if value is None else json.dumps(value, ensure_ascii=False, sort_keys=True)
                )
            )
    return result
