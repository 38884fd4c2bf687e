"""Model families, found by file name: each module here with `NAMES`, `read` and `program`."""

from engine.architectures.families import family_named, family_of
from engine.architectures.hyperparameters import Hyperparameters
from engine.architectures.layout import ModelLayout

__all__ = ["Hyperparameters", "ModelLayout", "family_named", "family_of"]
