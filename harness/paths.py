"""Where the harness keeps its state: results, caches, virtual boards."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def state_dir() -> Path:
    """`$HARNESS_HOME`, else `.harness/` in the current folder. Created on demand, mode 0700."""
    path = Path(os.environ.get("HARNESS_HOME") or ".harness").absolute()
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def cache_dir(name: str) -> Path:
    """A folder for what can be made again (models, wheels, reference outputs), shared by checkouts.

    `$HARNESS_CACHE`, else the user's cache folder.
    """
    root = os.environ.get("HARNESS_CACHE") or platformdirs.user_cache_dir("decode-harness")
    path = Path(root).absolute() / name
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path
