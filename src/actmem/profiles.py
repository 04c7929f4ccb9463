"""Hold what one training step does, as plain data: which values it makes, who needs them, what each operator costs.

NOTE [ The log ]
A profile is a log of one step in which autograd was given nothing to hold inside the blocks. So each storage dies when
the program itself lets go of it, and the log is the same whatever a plan decides: what a plan holds, replays and sends
away comes on top, and `planner.simulate` works it out. Entries, in the order of time:

    ("op", cost, live)             an operator ran; `live` is the bytes alive after it
    ("call", layer, call, cost, live)   the same, of a block's forward, where the tape records it as its n-th call
    ("enter", layer)  ("leave", layer)  a block's forward begins, ends
    ("pack", layer, handle)        autograd saves a value of a block
    ("unpack", layer, handle, live)     a backward step asks for it
    ("drop", layer, handle)        nobody has it any more
    ("die", storage)               the program let go of a storage that a block made or read
    ("phase", name, live)          "backward" begins, or its "end" is reached
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from actmem.errors import PlanError

__all__ = ["Call", "Cost", "Entry", "Layer", "Profile", "Value", "shifted"]

PROFILE_VERSION = 1
"""The version of profiles that this actmem reads and writes."""

Entry = tuple[Any, ...]
"""One entry of the log. See NOTE [ The log ]."""


@dataclass(frozen=True)
class Cost:
    """What one operator call takes."""

    op: str
    flops: int
    moved_bytes: int
    """Bytes of the tensors that it reads and writes."""
    dtype: str
    """What it computes in."""
    seconds: float | None = None
    """As measured, where the profile was made for real."""


@dataclass(frozen=True)
class Value:
    """One storage in one version, as the tape knows it."""

    num_bytes: int
    storage: int
    """Which storage: several versions, and several layers, may share one."""
    call: int
    """Which call of the layer made it; -1 for what comes from outside."""
    kind: str
    """"made" by a call, an "input", or "state": a parameter or a buffer, which is alive anyway."""
    why: str | None
    """Why it is never replayed; None if it may be."""
    reads: tuple[int, ...]
    """The values that a replay of its call reads."""
    writes: int
    """The value whose storage its call wrote on, which lies under this one; -1 if the call allocated it."""
    overwritten: int
    """Which call overwrote it; -1 if none did."""
    constant: bool
    """Made from nothing: a constant, which the tape reserves as it does kept values."""


@dataclass(frozen=True)
class Call:
    """One operator of a block's forward that the tape records."""

    op: str
    module: str
    """Path of its module inside the block."""
    cost: int
    """Index into the costs of the profile."""
    makes: tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """One block call."""

    path: str
    kind: int
    """Layers of one kind ran the same operators on the same shapes."""
    layer_type: str | None
    modules: tuple[str, ...]
    """Paths of the modules inside the block."""
    roles: Mapping[str, tuple[str, ...]]
    calls: tuple[Call, ...]
    values: tuple[Value, ...]
    handles: tuple[int, ...]
    """The value of each handle that autograd was given."""
    inputs_bytes: int
    """Bytes of the tensors that the block was called with."""
    parameters_bytes: int = 0
    gradients_bytes: int = 0
    """Bytes of the gradients of its parameters."""


@dataclass(frozen=True)
class Profile:
    """What one step does. Made by `actmem.profile`.

    >>> Profile.from_json(Profile().to_json()) == Profile()
    True
    """

    fingerprint: str = ""
    modules: str = ""
    """A digest of the classes of the modules and of which parameters are trained."""
    blocks: tuple[str, ...] = ()
    """Paths of the blocks."""
    shapes: tuple[str, ...] = ()
    """The tensors of the example, such as `input_ids int64 [1, 128]`."""
    parameters_bytes: int = 0
    buffers_bytes: int = 0
    gradients_bytes: int = 0
    """Bytes of all gradients, when all are there."""
    base_bytes: int = 0
    """What is alive when the step begins: parameters, buffers, what the optimizer holds, gradients that stay."""
    optimizer_bytes: int = 0
    """What the optimizer keeps from step to step."""
    optimizer: str = "none"
    microbatches: int = 1
    """If more than one, the gradients are there when the step begins: this is the last of several."""
    shard: int = 1
    """Over how many ranks parameters, gradients and optimizer state are divided."""
    fake: bool = True
    routing: str = "none"
    """How data-dependent routing was assumed: "balanced", "worst"; "real" or "none"."""
    costs: tuple[Cost, ...] = ()
    layers: tuple[Layer, ...] = ()
    log: tuple[Entry, ...] = ()
    storages: Mapping[int, int] = field(default_factory=dict[int, int])
    """Bytes of each storage that a block made or read."""
    version: int = PROFILE_VERSION

    def to_json(self) -> str:
        """Write the profile as JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read a profile from JSON text.

        Raises:
            PlanError: if the text is no profile of this version.
        """
        try:
            found = json.loads(text)
            if found.pop("version") != PROFILE_VERSION:
                raise PlanError("the profile has another version. Make it again with actmem.profile(...).")
            layers = tuple(_layer(layer) for layer in found.pop("layers"))
            costs = tuple(Cost(**cost) for cost in found.pop("costs"))
            log = tuple(tuple(entry) for entry in found.pop("log"))
            storages = {int(k): v for k, v in found.pop("storages").items()}
            texts = {name: tuple(found.pop(name)) for name in ("blocks", "shapes")}
            return cls(layers=layers, costs=costs, log=log, storages=storages, **texts, **found)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PlanError(f"this is no profile: {error}. Make one with actmem.profile(...).to_json().") from error


def shifted(entry: Entry, shift: int) -> Entry:
    """Return an entry of the log with so many bytes more alive.

    >>> shifted(("op", 3, 100), 20), shifted(("die", 7), 20)
    (('op', 3, 120), ('die', 7))
    """
    return entry if not shift or entry[0] in ("die", "pack", "drop") else (*entry[:-1], entry[-1] + shift)


def _layer(found: dict[str, Any]) -> Layer:
    calls = tuple(Call(**_with_tuple(call, "makes")) for call in found.pop("calls"))
    values = tuple(Value(**_with_tuple(value, "reads")) for value in found.pop("values"))
    roles = {name: tuple(paths) for name, paths in found.pop("roles").items()}
    tuples = {name: tuple(found.pop(name)) for name in ("modules", "handles")}
    return Layer(calls=calls, values=values, roles=roles, **tuples, **found)


def _with_tuple(found: dict[str, Any], name: str) -> dict[str, Any]:
    return {**found, name: tuple(found[name])}
