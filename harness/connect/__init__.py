"""SSH to boards: pinned host keys, a deadline on every wait, verified transfer, a watchdog."""

from harness.connect.command import CommandResult
from harness.connect.dial import Limits, scan_host_key
from harness.connect.session import BoardSession, open_session
from harness.connect.watch import Watch

__all__ = ["BoardSession", "CommandResult", "Limits", "Watch", "open_session", "scan_host_key"]
