"""The four stages on every board of devices.yaml: `pytest -m device`.

The tests themselves ship with the harness, so that other repositories run the same ones.
"""

from harness.farm.stage_tests import test_stage

__all__ = ["test_stage"]
