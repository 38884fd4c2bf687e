"""Readers of model files. `open_checkpoint` picks one; all of them return a `Checkpoint`."""

from engine.formats.checkpoint import Checkpoint, FormatError, TensorInfo
from engine.formats.opening import open_checkpoint
from engine.formats.synthetic import SyntheticCheckpoint

__all__ = ["Checkpoint", "FormatError", "SyntheticCheckpoint", "TensorInfo", "open_checkpoint"]
