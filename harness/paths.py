"""Where the harness keeps its state: results, caches, virtual boards."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from harness.errors import HarnessError


def state_dir() -> Path:
    """`$HARNESS_HOME`, else `.harness/` in the current folder. Created on demand, mode 0700.

    Raises HarnessError where it cannot be made.
    """
    return made_folder(existing_state_dir(), "HARNESS_HOME")


def existing_state_dir() -> Path:
    """The same folder for those who only look: it is not created, so it may not be there."""
    return Path(os.environ.get("HARNESS_HOME") or ".harness").absolute()


def cache_dir(name: str) -> Path:
    """A folder for what can be made again (models, wheels, reference outputs), shared by checkouts.

    `$HARNESS_CACHE`, else the user's cache folder. Raises HarnessError where it cannot be made.
    """
    root = os.environ.get("HARNESS_CACHE") or platformdirs.user_cache_dir("decode-harness")
    return made_folder(Path(root).absolute() / name, "HARNESS_CACHE")


def made_folder(path: Path, variable: str) -> Path:
    """`path`, created with mode 0700 where it is not there.

    Raises HarnessError where it cannot be made; `variable` is how the user names another place.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise HarnessError(
            f"cannot be made: {error.strerror or error}",
            where=str(path),
            remedy=f"set {variable} to a folder that you may write",
        ) from error
    return path
