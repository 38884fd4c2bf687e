"""Boards that are simulated on this machine: real SSH, real processes, no hardware, no root."""

from harness.boards.virtual.manage import (
    Endpoint,
    board_folder,
    ensure_running,
    running,
    stop,
    stop_all,
    stop_all_started_here,
)

__all__ = [
    "Endpoint",
    "board_folder",
    "ensure_running",
    "running",
    "stop",
    "stop_all",
    "stop_all_started_here",
]
