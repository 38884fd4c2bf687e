"""The optimisations that an engine runs with, as a list of options that can be switched off.

With none of them the engine is as plain as it can be: numpy, op by op, in floats, one thread. With
all of them it runs as it was asked to. Options come in an order in which each stands behind those
it needs, so that every prefix of the list can be run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from engine.options import EngineOptions

PLAIN_UNIT, PLAIN_LAYOUT, PLAIN_KERNELS = "packed", "blocked", "generic"


@dataclasses.dataclass(frozen=True)
class Option:
    """One optimisation. `needs` are names of options without which it cannot be, or does nothing.

    `words` say what it changes: "kv f32 → f16".
    """

    name: str
    words: str
    needs: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Setting:
    """How the engine is run: its options, the cores (None: all), the layout of its weights."""

    engine: EngineOptions
    pin: tuple[int, ...] | None
    layout: str

    def words(self) -> list[str]:
        """As words of a command line: what differs from the plainest engine."""
        plain = EngineOptions(unit=self.engine.unit)
        found = [f"--unit {self.engine.unit}"]
        for name, value in self.engine.to_mapping().items():
            if name == "unit" or value == plain.to_mapping()[name] or value is None:
                continue
            text = ",".join(value) if isinstance(value, list) else str(value).lower()
            found.append(f"--engine-option {name}={text}")
        return found


class Space:
    """The options of a full setting, and the setting of any set of them."""

    def __init__(
        self,
        full: Setting,
        layers: Sequence[str],
        passes: Sequence[str],
        plain_layout: str = PLAIN_LAYOUT,
    ) -> None:
        """`layers` are those with quantised weights (`L00`, `head`), `passes` the fusion passes,
        both in the order of the program. `plain_layout` is that of weights that nobody arranged."""
        self.plain_layout = plain_layout
        self.full, self._layers, self._passes = full, tuple(layers), tuple(passes)
        self.options = tuple(self._options())
        self.names = tuple(option.name for option in self.options)
        self._by_name = {option.name: option for option in self.options}

    def _options(self) -> Iterable[Option]:
        full, engine = self.full, self.full.engine
        native = engine.unit == "native"
        unit = ("unit",) if native else ()
        if engine.unit != PLAIN_UNIT:
            yield Option("unit", f"unit {PLAIN_UNIT} → {engine.unit}")
        if full.layout != self.plain_layout:
            yield Option("weights", f"weights {self.plain_layout} → {full.layout}")
        if native and engine.kernels != PLAIN_KERNELS:
            best = engine.kernels or "the board's best"
            yield Option("kernels", f"kernels {PLAIN_KERNELS} → {best}", unit)
        if engine.threads != 1:
            yield Option("threads", f"threads 1 → {engine.threads or 'all cores'}")
        if full.pin is not None:
            yield Option("pinning", f"any core → cores {','.join(map(str, full.pin))}")
        if engine.huge_pages:
            yield Option("huge_pages", "weights in huge pages", unit)
        if engine.kv_layout != "numpy":
            yield Option("kv_layout", f"cache layout numpy → {engine.kv_layout}")
        if engine.kv != "f32":
            yield Option("kv", f"keys and values f32 → {engine.kv}", ("kv_layout",))
        applied = [name for name in self._passes if name not in engine.passes_off]
        for name in applied if engine.fused else ():
            needs = ("fusion.gate_up",) if name == "activation" and "gate_up" in applied else ()
            yield Option(f"fusion.{name}", f"fusion pass {name}", needs)
        if engine.activations == "int8":
            for layer in self._layers:
                if layer not in engine.float_layers:
                    yield Option(f"int8.{layer}", f"activations of {layer} float → int8")
        if engine.executor != "sync":
            needs = unit if engine.executor == "compiled" else ()
            yield Option("executor", f"executor sync → {engine.executor}", needs)

    def __len__(self) -> int:
        return len(self.options)

    def words(self, name: str) -> str:
        return self._by_name[name].words

    def closed(self, names: Collection[str]) -> frozenset[str]:
        """`names` with everything that they need. Raises KeyError for an unknown one."""
        found: set[str] = set()
        pending = list(names)
        while pending:
            name = pending.pop()
            if name not in found:
                found.add(name)
                pending += [need for need in self._by_name[name].needs if need in self._by_name]
        return frozenset(found)

    def without(self, names: Collection[str]) -> frozenset[str]:
        """All options but `names` and those that need one of them."""
        gone = set(names)
        for option in self.options:  # in an order in which needs come first
            if gone & set(option.needs):
                gone.add(option.name)
        return frozenset(self.names) - gone

    def setting(self, names: Collection[str]) -> Setting:
        """How the engine runs with these options and no others.

        Raises ValueError for options that do not go together.
        """
        on, full = frozenset(names), self.full.engine
        unit = full.unit if "unit" in on or full.unit == PLAIN_UNIT else PLAIN_UNIT
        native = unit == "native"
        passes = [name for name in self._passes if f"fusion.{name}" in on]
        layers = [layer for layer in self._layers if f"int8.{layer}" in on]
        engine = EngineOptions(
            unit=unit,
            executor=full.executor if "executor" in on else "sync",
            activations="int8" if layers else "float",
            float_layers=tuple(x for x in self._layers if x not in layers) if layers else (),
            fused=bool(passes),
            passes_off=tuple(x for x in self._passes if x not in passes) if passes else (),
            kv=full.kv if "kv" in on else "f32",
            kv_layout=full.kv_layout if "kv_layout" in on else "numpy",
            threads=full.threads if "threads" in on else 1,
            huge_pages="huge_pages" in on,
            keep=full.keep,
            kernels=full.kernels if "kernels" in on or not native else PLAIN_KERNELS,
        )
        if "kernels" in on and not native:
            raise ValueError("kernels are the native unit's, which is not on")
        pin = self.full.pin if "pinning" in on else None
        return Setting(engine, pin, self.full.layout if "weights" in on else self.plain_layout)
