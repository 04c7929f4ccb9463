"""What one training step does, as plain data: which values it makes, what needs them, what each operator costs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from actmem.decisions import Reason
from actmem.errors import PlanError
from actmem.expert_loads import ExpertLoads
from actmem.log_entries import Entry, OperatorEntry, from_row
from actmem.shapes import TensorShape, read_shape, shapes_as_text

__all__ = [
    "COPY",
    "Action",
    "Call",
    "Cost",
    "Layer",
    "ParameterStep",
    "Place",
    "Profile",
    "Value",
    "Write",
    "with_collectives",
]

PROFILE_VERSION = 6
"""The version of profiles that this actmem reads and writes."""

COPY = "aten.clone.default"
"""The operator that copies a value before it is overwritten, or for a backward step that may write to it."""


@dataclass(frozen=True)
class Cost:
    """What one operator call takes."""

    op: str
    flops: int
    moved_bytes: int
    """Bytes of the tensors it reads and writes."""
    dtype: str
    """The dtype it computes in."""
    seconds: float | None = None
    """Measured seconds, if the profile was made from a real step."""
    workspace_bytes: int = 0
    """The most that its kernel allocates for itself while it runs, if the profile is of a real step on a CPU."""
    number_bytes: int = 0
    """What its Python numbers take, on a CPU, which torch turns into tensors, and autograd may hold until backward."""
    link_bytes: int = 0
    """Of a collective: bytes that pass the link of the rank, in one direction."""
    reach: int = 0
    """Of a collective: how far apart the ranks of its group are, from the first to the last."""


@dataclass(frozen=True)
class Value:
    """One storage in one version, as the tape knows it."""

    num_bytes: int
    storage: int
    """Which storage: several versions, and several layers, may share one."""
    call: int
    """The call of the layer that made it; -1 for values from outside."""
    kind: str
    """"made" by a call, an "input", or "state": a parameter or a buffer, which is alive anyway."""
    why: Reason | None
    """Why it is never replayed; None if it may be."""
    reads: tuple[int, ...]
    """The values that a replay of its call reads."""
    writes: int
    """The value whose storage its call wrote to, which lies under this one; -1 if the call allocated it."""
    overwritten: int
    """The call that overwrote it; -1 if none did."""
    constant: bool
    """Made from nothing: a constant, which the tape reserves as it does kept values."""
    copy_bytes: int = 0
    """Bytes of its storage, which a copy takes, where `num_bytes` leaves them out."""
    leaf: str = ""
    """"parameter" or another "leaf" that requires a gradient: held as the object itself, and never offloaded."""
    slot: int = 0
    """Which result of its call: 0, 1, ... what the call returned; -1, -2, ... what it wrote."""
    shown: int = -1
    """Which tensor shows it when it is born: a number for each tensor of the layer."""
    pieces: bool = False
    """Born uninitialised, and it can be known when it has been filled piece by piece."""

    def on_storage(self, storage: int) -> Value:
        """Return the same value on another storage. `dataclasses.replace` is slow, and a large model has many layers.

        >>> value = Value(8, 3, 0, "made", None, (), -1, -1, False)
        >>> value.on_storage(5) == replace(value, storage=5)
        True
        """
        found = object.__new__(Value)
        vars(found).update(vars(self), storage=storage)
        return found


@dataclass(frozen=True)
class Write:
    """One tensor that a call writes."""

    new: int
    """The value that the call leaves there; -1 if another of its writes lies on the same storage."""
    storage: int
    ref: int
    """Position among what the call refers to; -1 if it is not read again in a replay."""
    whole: bool
    """All of the storage is overwritten, and none of it read."""
    unread: bool
    """A replay leaves the argument out, as running statistics are."""
    piece: str = ""
    """"piece" if it goes on filling a storage that was born uninitialised, "last" if nothing is left after it."""
    early: tuple[int, ...] = ()
    """Handles that autograd was given before the call filled what they show."""


@dataclass(frozen=True)
class Call:
    """One operator of a block's forward that the tape records."""

    op: str
    module: str
    """Path of its module inside the block."""
    cost: int
    """Index into the costs of the profile."""
    makes: tuple[int, ...]
    refs: tuple[int, ...] = ()
    """The values that the tape refers to when it writes the call down, one for each tensor argument."""
    shown: tuple[int, ...] = ()
    """The tensor that shows each of them: the base, where the argument is a view."""
    writes: tuple[Write, ...] = ()
    never: Reason | None = None
    """Why it is never replayed, if it is not."""
    yields: bool = False
    """That reason yields where the plan keeps what the call makes."""
    fresh: bool = True
    """It may return a tensor that it did not merely write."""
    state_bytes: int = 0
    """What the state of the generator that it draws from takes, which a replay needs. On a CPU it is counted."""
    out_bytes: int = -1
    """Bytes of the tensors by which rules with `min_bytes` decide; -1 for those of its values."""
    again_refs: tuple[int, ...] = ()
    """Of a collective that may run again where a plan says so: `refs` in that case. See `with_collectives`."""
    again_shown: tuple[int, ...] = ()
    """And `shown`."""
    is_again: bool = False
    """A plan decides whether it runs again, as for any other call."""


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
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of those tensors."""
    by_function: tuple[int, ...] = ()
    """The handles that a Python autograd Function asks for."""
    parameters_bytes: int = 0
    gradients_bytes: int = 0
    """Bytes of the gradients of its parameters."""


@dataclass(frozen=True)
class Action:
    """What a pipeline's schedule does with one microbatch on one stage, and when."""

    kind: str
    """"forward", "backward", or where the backward pass is split "input" and "weight"."""
    stage: int
    microbatch: int
    begin: int
    """Position in the log before which it begins."""
    end: int
    """Position in the log before which it is over."""
    sent_bytes: int = 0
    """What goes from there to the stage after it, or before it in a backward pass, on another rank."""


@dataclass(frozen=True)
class Place:
    """Where a rank is in its job."""

    world: int
    """How many ranks the job has."""
    rank: int
    pipeline: tuple[int, ...] = ()
    """The ranks of its pipeline, itself among them; () if it has none."""
    num_stages: int = 0
    """How many stages that pipeline has."""
    groups: tuple[int, ...] = ()
    """How many ranks each of the groups has in which it communicates, its pipeline included."""


@dataclass(frozen=True)
class ParameterStep:
    """What an optimizer takes for one parameter, if that is stepped by itself."""

    name: str
    """Of the parameter."""
    state_bytes: tuple[int, ...]
    """Of each tensor of its state that can be kept elsewhere."""
    step_bytes: int
    """The most that its step needs in addition."""
    memory: tuple[tuple[int, int], ...] = ()
    """What its step allocates and frees on a card: a number and its bytes, or 0 where it is freed."""


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
    shapes: tuple[TensorShape, ...] = ()
    """The tensors of the example."""
    parameters_bytes: int = 0
    buffers_bytes: int = 0
    gradients_bytes: int = 0
    """Bytes of all gradients, once all exist."""
    base_bytes: int = 0
    """Bytes alive when the step begins: parameters, buffers, optimizer state, gradients that stay."""
    optimizer_bytes: int = 0
    """Bytes the optimizer keeps from step to step."""
    optimizer: str = "none"
    calls: tuple[tuple[TensorShape, ...], ...] = ()
    """The tensors of each different call of the model in a step of the user's own loop."""
    is_step: bool = False
    """It is a step of the user's own loop: the gradients, the optimizer's state and its step are part of the log."""
    microbatches: int = 1
    """If more than one, the gradients exist when the step begins: this is the last of several."""
    shard: int = 1
    """Over how many ranks parameters, gradients and optimizer state are divided."""
    fake: bool = True
    routing: str = "none"
    """How data-dependent routing was assumed: "balanced", "worst", "quantile 0.99", "measured"; "real" or "none"."""
    expert_loads: ExpertLoads | None = None
    """Of a rank that exchanges tokens with others: how many rows each of them receives."""
    costs: tuple[Cost, ...] = ()
    layers: tuple[Layer, ...] = ()
    log: tuple[Entry, ...] = ()
    """What happened, in chronological order. See NOTE [ The log ]."""
    storages: Mapping[int, int] = field(default_factory=dict[int, int])
    """Bytes of each storage."""
    stock: tuple[tuple[int, int, str], ...] = ()
    """What is there when the step begins: number, bytes and role of each storage. The role "batch" is the caller's."""
    memory: tuple[tuple[int, int, int], ...] = ()
    """What the program itself allocates and frees: the position in the log before which it does, a storage, and its
    bytes, or 0 where it is freed."""
    carried: tuple[tuple[int, int], ...] = ()
    """In a step of the user's own loop: what is there when the step begins, and the storage that is in its place when
    it is over."""
    optimizer_stock: tuple[int, ...] = ()
    """Bytes of each tensor of the optimizer's state on a card, in the order in which the first step makes them."""
    optimizer_memory: tuple[tuple[int, int], ...] = ()
    """What the optimizer's step on a card allocates and frees: a number and its bytes, or 0 where it is freed."""
    accumulated: tuple[tuple[int, int, int, str], ...] = ()
    """When the gradients are complete: the position in the log before which one is, how many more bytes are alive then
    than the entry before says, its storage, and the name of its parameter."""
    parameter_steps: tuple[ParameterStep, ...] = ()
    """What the optimizer takes for each parameter by itself, in the order in which it steps them."""
    actions: tuple[Action, ...] = ()
    """Of a rank that runs stages of a pipeline: what its schedule did, in chronological order."""
    place: Place | None = None
    """Which rank of a parallel job it is of; None if it is of no such job."""
    version: int = PROFILE_VERSION

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of a pipeline that the rank runs, in order.

        >>> Profile(actions=(Action("forward", 3, 0, 0, 5), Action("forward", 1, 0, 5, 9))).stages
        (1, 3)
        """
        return tuple(sorted({action.stage for action in self.actions}))

    @property
    def decides_collectives(self) -> bool:
        """Whether a plan decides which functional collectives run again. See `with_collectives`."""
        return any(call.is_again for layer in self.layers for call in layer.calls)

    @property
    def starting_gradients_bytes(self) -> int:
        """Bytes of the gradients that exist when the step begins."""
        if self.is_step:
            return self.base_bytes - self.parameters_bytes - self.buffers_bytes - self.optimizer_bytes
        return self.gradients_bytes // self.shard if self.microbatches > 1 else 0

    @property
    def numbers_bytes(self) -> int:
        """Upper bound on what Python numbers take that autograd holds as tensors. No part of a predicted peak."""
        return sum(self.costs[entry.cost].number_bytes for entry in self.log if isinstance(entry, OperatorEntry))

    def to_json(self) -> str:
        """Write the profile as JSON."""
        document = asdict(replace(self, log=())) | {"log": [entry.row() for entry in self.log]}
        return json.dumps({**document, **shapes_as_text(self.shapes, self.calls)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read a profile from JSON text.

        Raises:
            PlanError: if the text is not a profile of this version.
        """
        try:
            found = json.loads(text)
            if found.pop("version") != PROFILE_VERSION:
                raise PlanError("the profile has another version. Make it again with actmem.profile(...).")
            layers = tuple(_layer(layer) for layer in found.pop("layers"))
            costs = tuple(Cost(**cost) for cost in found.pop("costs"))
            log = tuple(from_row(row) for row in found.pop("log"))
            storages = {int(k): v for k, v in found.pop("storages").items()}
            found["optimizer_stock"] = tuple(found["optimizer_stock"])
            found["parameter_steps"] = tuple(_parameter_step(step) for step in found["parameter_steps"])
            for name in ("stock", "memory", "carried", "optimizer_memory", "accumulated"):
                found[name] = tuple(tuple(each) for each in found[name])
            found["blocks"] = tuple(found["blocks"])
            if loads := found.get("expert_loads"):
                found["expert_loads"] = ExpertLoads(tuple(loads["ranks"]), tuple(loads["rows"]), loads["rank"])
            found["actions"] = tuple(Action(**action) for action in found["actions"])
            if found["place"] is not None:
                found["place"] = Place(**_with_tuple(_with_tuple(found["place"], "pipeline"), "groups"))
            found["shapes"] = tuple(read_shape(text) for text in found["shapes"])
            found["calls"] = tuple(tuple(read_shape(text) for text in call) for call in found["calls"])
            return cls(layers=layers, costs=costs, log=log, storages=storages, **found)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PlanError(f"this is not a profile: {error}. Make one with actmem.profile(...).to_json().") from error


def with_collectives(profile: Profile, *, again: bool) -> Profile:
    """Return the profile of a step in which a plan decides whether functional collectives run again, or in which not.

    If not, what they return is held like the result of any operator that is never replayed.

    >>> gather = Call("all_gather", "", 0, (1,), never=Reason.COLLECTIVE, again_refs=(0,), again_shown=(0,))
    >>> value = Value(8, 1, 0, "made", Reason.COLLECTIVE, (), -1, -1, False)
    >>> layer = Layer("layers.0", 0, None, (), {}, (gather,), (replace(value, why=Reason.EXTERNAL), value), (), 0)
    >>> found = with_collectives(Profile(layers=(layer,)), again=True)
    >>> found.layers[0].calls[0].is_again, found.layers[0].values[1].reads
    (True, (0,))
    >>> with_collectives(found, again=False).layers == (layer,)
    True
    """
    if not any(call.again_refs and call.is_again is not again for layer in profile.layers for call in layer.calls):
        return profile
    return replace(profile, layers=tuple(_decided(layer, again=again) for layer in profile.layers))


def _decided(layer: Layer, *, again: bool) -> Layer:
    makers = {v: call for call in layer.calls if call.again_refs for v in call.makes}
    calls = tuple(
        replace(
            call,
            is_again=again,
            refs=call.again_refs if again else (),
            shown=call.again_shown if again else (),
        )
        if call.again_refs
        else call
        for call in layer.calls
    )
    values = tuple(
        replace(
            value,
            why=None if again else Reason.COLLECTIVE,
            reads=tuple(dict.fromkeys(makers[v].again_refs)) if again else (),
        )
        if v in makers
        else value
        for v, value in enumerate(layer.values)
    )
    return replace(layer, calls=calls, values=values)


def _layer(found: dict[str, Any]) -> Layer:
    calls = tuple(_call(call) for call in found.pop("calls"))
    values = tuple(_value(value) for value in found.pop("values"))
    roles = {name: tuple(paths) for name, paths in found.pop("roles").items()}
    tuples = {name: tuple(found.pop(name)) for name in ("modules", "handles", "by_function")}
    tuples["shapes"] = tuple(tuple(shape) for shape in found.pop("shapes"))
    return Layer(calls=calls, values=values, roles=roles, **tuples, **found)


def _value(found: dict[str, Any]) -> Value:
    return Value(why=_reason(found.pop("why")), **_with_tuple(found, "reads"))


def _call(found: dict[str, Any]) -> Call:
    writes = tuple(Write(**_with_tuple(write, "early")) for write in found.pop("writes"))
    tuples = {name: tuple(found.pop(name)) for name in ("makes", "refs", "shown", "again_refs", "again_shown")}
    return Call(writes=writes, never=_reason(found.pop("never", None)), **tuples, **found)


def _reason(found: str | None) -> Reason | None:
    return None if found is None else Reason(found)


def _with_tuple(found: dict[str, Any], name: str) -> dict[str, Any]:
    return {**found, name: tuple(found[name])}


def _parameter_step(found: dict[str, Any]) -> ParameterStep:
    memory = tuple((number, size) for number, size in found["memory"])
    return ParameterStep(found["name"], tuple(found["state_bytes"]), found["step_bytes"], memory)
