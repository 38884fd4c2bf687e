"""Boards that are simulated on this machine: real SSH, real processes, no hardware, no root."""

from harness.boards.virtual.manage import (
    Endpoint,
    board_folder,
    ensure_running,
    is_switched_off,
    provoke,
    running,
    started_here,
    stop,
    stop_all,
    switch_off,
    switch_on,
)

__all__ = [
    "Endpoint",
    "board_folder",
    "ensure_running",
    "is_switched_off",
    "provoke",
    "running",
    "started_here",
    "stop",
    "stop_all",
    "switch_off",
    "switch_on",
]
