"""What a family module hands to the packer, and a reader of configs that forgets no key."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.architectures.hyperparameters import Hyperparameters
from engine.formats.checkpoint import FormatError


@dataclasses.dataclass(frozen=True)
class ModelLayout:
    """How a checkpoint becomes a package.

    `unpermute_qk`: GGUF files of the llama family hold the rows of q and k so that RoPE rotates
    neighbours; ours rotates halves (as in the original checkpoints), so the packer puts the rows
    back. Moving whole rows keeps their quantised blocks as they are.
    """

    hyperparameters: Hyperparameters
    sources: Mapping[str, str]  # package tensor → tensor of the file
    inverse_frequencies: npt.NDArray[np.float64]  # (D/2,)
    notes: tuple[str, ...]
    unpermute_qk: bool

    def __post_init__(self) -> None:
        problem = self.hyperparameters.problem()
        if problem:
            raise ValueError(f"hyper-parameters: {problem}")


@dataclasses.dataclass
class ConfigReader:
    """Reads a config by key; each is required, defaulted or refused, and the rest is noted."""

    path: Path
    values: Mapping[str, Any]
    prefix: str
    seen: set[str] = dataclasses.field(default_factory=set)

    def _get(self, key: str) -> Any:
        self.seen.add(key)
        return self.values.get(self.prefix + key)

    def _error(self, key: str, value: object, expected: str) -> FormatError:
        found = "is missing" if value is None else f"is {value!r}"
        return FormatError(f"{self.path}: {self.prefix}{key} {found}, expected {expected}")

    def optional_integer(self, key: str) -> int | None:
        value = self._get(key)
        if value is None:
            return None
        if isinstance(value, (bool, str, bytes)) or not isinstance(value, (int, np.integer)):
            raise self._error(key, value, "one whole number")
        if not 0 <= int(value) < 2**31:
            raise self._error(key, value, "a number between 0 and 2^31")
        return int(value)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.optional_integer(key)
        if value is None:
            if default is None:
                raise self._error(key, None, "a whole number")
            return default
        return value

    def optional_number(self, key: str) -> float | None:
        value = self._get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
            raise self._error(key, value, "a number")
        if not math.isfinite(float(value)):
            raise self._error(key, value, "a finite number")
        return float(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.optional_number(key)
        if value is None:
            if default is None:
                raise self._error(key, None, "a number")
            return default
        return value

    def text(self, key: str, default: str) -> str:
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._error(key, value, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._error(key, value, "true or false")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._get(key)
        if value is None:
            return ()
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise self._error(key, value, "a list of texts")
        return tuple(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self._get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self._error(key, value, "an object")
        return value

    def refuse(self, key: str, *, unless: tuple[object, ...], why: str) -> None:
        """Raises FormatError when the key has a value that would change the result."""
        value = self._get(key)
        if value is not None and value not in unless:
            raise FormatError(
                f"{self.path}: {self.prefix}{key} is {value!r}; {why} cannot be run yet "
                f"(supported: {list(unless) if unless else 'models without this key'})"
            )

    def ignore(self, *keys: str) -> None:
        """Keys that do not change a decode step."""
        self.seen.update(keys)

    def notes(self) -> tuple[str, ...]:
        """One note for each key of the config that nobody asked for."""
        names = (key[len(self.prefix) :] for key in self.values if key.startswith(self.prefix))
        return tuple(
            f"config key {self.prefix}{name} is not known to this family and was not used"
            for name in sorted(set(names) - self.seen)
        )
