"""What every test shares: its own state folder, and strict skips.

A tier that cannot run says so with `pytest.skip("needs …")`. With HARNESS_STRICT=1 (continuous
integration) such a skip is a failure: a green run then means that everything ran.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest

# Before anything imports numpy: many test processes side by side must not each start a thread per
# core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Tests send these to processes they start. Under nohup, or as a script's background job, they are
# ignored, and every child would inherit that.
for _signal, _usual in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _usual)

pytest_plugins = ["pytester"]

# How long an example takes is a matter of the machine, and of what else runs on it.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")

NEEDS = "needs "


def strict() -> bool:
    return os.environ.get("HARNESS_STRICT", "") not in ("", "0")


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The reason of a skipped report, "" for any other."""
    if not report.skipped or not isinstance(report.longrepr, tuple):
        return ""
    return str(report.longrepr[2]).removeprefix("Skipped: ")


def refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turns a skip for want of something into a failure when HARNESS_STRICT is set."""
    reason = skip_reason(report)
    if strict() and reason.startswith(NEEDS) and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"HARNESS_STRICT=1 and this was skipped: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    report = yield
    refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    report = yield
    refuse_skip(report)
    return report


@pytest.fixture(scope="session", autouse=True)
def harness_home(request: pytest.FixtureRequest) -> Iterator[Path | None]:
    """The state of this test session: results, leases and virtual boards of nobody else.

    Tests on the boards of devices.yaml are the exception: their results belong to the user. Not
    below pytest's own temporary folder, whose long name would not fit a Unix socket's path.
    Downloads and reference outputs stay in the user's cache: they are made again from hashes.
    """
    if all(item.get_closest_marker("device") for item in request.session.items):
        yield None
        return
    with (
        tempfile.TemporaryDirectory(prefix="harness-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("HARNESS_HOME", folder)
        yield Path(folder)


@pytest.fixture(scope="session")
def sample() -> ModuleType:
    """The recorder of sample campaigns (the folder tests/sample_campaigns)."""
    folder = Path(__file__).parent / "sample_campaigns"
    spec = importlib.util.spec_from_file_location("sample_campaigns", folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its modules import each other through it
    spec.loader.exec_module(module)
    return module
