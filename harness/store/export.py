"""Frames as files that other tools read."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pandas as pd

from harness.errors import HarnessError

FORMATS = ("csv", "json", "parquet")


def export_table(frame: pd.DataFrame, path: Path, format: str | None = None) -> int:
    """Writes `frame` to `path` (complete or not at all) and returns its number of rows.

    JSON keeps nested values; in CSV and Parquet they are JSON texts, times ISO 8601 in UTC in JSON
    and CSV. Raises HarnessError for an unknown format and for Parquet without pyarrow.
    """
    chosen = (format or path.suffix.removeprefix(".")).lower()
    if chosen not in FORMATS:
        raise HarnessError(
            f"cannot export as {chosen!r}" if chosen else f"{path.name} has no ending",
            expected=", ".join(FORMATS),
            remedy="name the file results.csv, or give --format",
        )
    if chosen == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise HarnessError(
            "Parquet files need pyarrow, which is not installed",
            remedy="run: pip install 'decode-harness[parquet]', or export csv or json",
        )
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if chosen == "json":
            text = json.dumps(records(frame), ensure_ascii=False, indent=1, allow_nan=False)
            partial.write_text(text + "\n", encoding="utf-8")
        elif chosen == "csv":
            flat(frame).to_csv(partial, index=False, date_format="%Y-%m-%dT%H:%M:%S.%fZ")
        else:
            flat(frame).to_parquet(partial, index=False)
        partial.replace(path)
    except OSError as error:
        raise HarnessError(
            f"cannot be written: {error.strerror or error}",
            where=str(path),
            remedy="name a file in a folder that you may write",
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return len(frame)


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
