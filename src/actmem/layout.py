"""How a training job is spread over its ranks. Plain data, without torch."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, cast

from actmem.errors import ModeError
from actmem.ops import did_you_mean

__all__ = [
    "SCHEDULES",
    "Coordinates",
    "Layout",
    "Limits",
    "ScheduleKind",
    "checked_layout",
    "layers_of_stages",
    "nearest_layout",
]


@dataclass(frozen=True)
class ScheduleKind:
    """What must be known about a pipeline schedule before it is made."""

    least_virtual: int = 1
    most_virtual: int | None = None
    """None: any number of stages on a rank."""
    order: str = "loop"
    """`loop`: rank r has the stages r, r + pp, ...; `v`: the stages r and, on the way back, 2 pp - 1 - r."""
    needs_all: bool = False
    """Whether there must be a microbatch for each stage."""
    has_rounds: bool = False
    """Whether the microbatches are divided into rounds of about as many as there are ranks."""


SCHEDULES: dict[str, ScheduleKind] = {
    "GPipe": ScheduleKind(most_virtual=1),
    "1F1B": ScheduleKind(most_virtual=1, needs_all=True),
    "Interleaved1F1B": ScheduleKind(least_virtual=2, has_rounds=True),
    "LoopedBFS": ScheduleKind(least_virtual=2),
    "InterleavedZeroBubble": ScheduleKind(least_virtual=2, has_rounds=True),
    "ZBVZeroBubble": ScheduleKind(least_virtual=2, most_virtual=2, order="v"),
    "DualPipeV": ScheduleKind(least_virtual=2, most_virtual=2, order="v", needs_all=True),
}
"""The schedules of torch.distributed.pipelining, and what each demands."""


class Coordinates(NamedTuple):
    """Where a rank is in each dimension of a layout."""

    pp: int = 0
    dp_replicate: int = 0
    dp_shard: int = 0
    cp: int = 0
    tp: int = 0
    ep: int = 0
    """Among the ranks that divide the experts: they are the ranks of `dp_shard` and `cp`, counted again."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a model and its batch permit of a layout. None: no limit."""

    num_layers: int | None = None
    tp_divides: tuple[tuple[str, int], ...] = ()
    """What tensor parallel divides: names and numbers, such as ("key and value heads", 8)."""
    num_experts: int | None = None
    """0: there are none, and so no expert parallel."""
    sequence: int | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Layout:
    """How a training job is spread over its ranks.

    Ranks are numbered as by torchtitan: neighbours are in one group of `tp`, then of `cp`, `dp_shard`, `dp_replicate`
    and `pp`. Each rank of `dp_shard` and `dp_replicate` has sequences of its own. `ep` adds no ranks: it divides the
    experts over those of `dp_shard` and `cp`.

    >>> layout = Layout(pp=16, tp=8, dp_shard=128, sequence_parallel=True, schedule="Interleaved1F1B")
    >>> layout.world, layout.virtual, layout.microbatches
    (16384, 2, 32)
    >>> layout.rank_coordinates(1024 + 8 + 3)
    Coordinates(pp=1, dp_replicate=0, dp_shard=1, cp=0, tp=3, ep=0)
    >>> Layout.from_json(layout.to_json()) == layout
    True
    >>> Layout(pp=4, microbatches=2)
    Traceback (most recent call last):
    actmem.errors.ModeError: microbatches = 2 is not possible: schedule = '1F1B' needs one for each of the 4 stages.
    The nearest possible layout: Layout(pp=4)

    Raises:
        ModeError: the layout is not possible. The message has the nearest that is.
    """

    dp_shard: int = 1
    """Ranks over which FSDP2 divides parameters, gradients and optimizer state."""
    dp_replicate: int = 1
    """Copies of these: more than one is HSDP."""
    tp: int = 1
    """Ranks over which tensor parallel divides the matrices of each layer."""
    sequence_parallel: bool = False
    """Divide the sequence over the ranks of `tp` between these matrices."""
    cp: int = 1
    """Ranks over which context parallel divides the sequence."""
    ep: int = 1
    """Ranks over which expert parallel divides the experts."""
    pp: int = 1
    """Ranks over which a pipeline divides the layers."""
    schedule: str = ""
    """The pipeline's schedule, as torch names it. Default: 1F1B if there is a pipeline."""
    virtual: int = 0
    """Stages of the pipeline on each rank. Default: as few as the schedule permits, 1 or 2."""
    microbatches: int = 0
    """Batches of a step, one after the other. Default: one, or one for each stage of a pipeline."""
    reshard_after_forward: bool = True
    """Whether FSDP2 frees gathered parameters after the forward pass, and gathers them again for backward."""

    def __post_init__(self) -> None:
        given: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        _check_types(given)
        for name, value in _settled(given).items():
            object.__setattr__(self, name, value)
        _raise_first(asdict(self), Limits())

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(getattr(self, name) for name in _ORDER)

    @property
    def num_stages(self) -> int:
        """The number of stages of the pipeline, on all ranks."""
        return self.pp * self.virtual

    def rank_coordinates(self, rank: int) -> Coordinates:
        """Return where a rank is in each dimension.

        Raises:
            ModeError: there is no such rank.
        """
        if type(rank) is not int or not 0 <= rank < self.world:
            raise ModeError(f"rank = {rank!r} is not permitted. Expected a rank from 0 to {self.world - 1}.")
        found: dict[str, int] = {}
        for name in reversed(_ORDER):
            rank, found[name] = divmod(rank, getattr(self, name))
        return Coordinates(**found, ep=(found["dp_shard"] * self.cp + found["cp"]) % self.ep)

    def rank_of(self, *, pp: int = 0, dp_replicate: int = 0, dp_shard: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the rank with these coordinates.

        >>> Layout(pp=2, tp=4).rank_of(pp=1, tp=3)
        7
        """
        at = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
        rank = 0
        for name in _ORDER:
            rank = rank * getattr(self, name) + at[name]
        return rank

    def stages_of(self, pp: int) -> tuple[int, ...]:
        """Return the stages of the pipeline on its rank number `pp`.

        >>> Layout(pp=4, schedule="Interleaved1F1B").stages_of(1), Layout(pp=4, schedule="DualPipeV").stages_of(1)
        ((1, 5), (1, 6))
        """
        if self.schedule and SCHEDULES[self.schedule].order == "v":
            return (pp, self.num_stages - 1 - pp)
        return tuple(pp + n * self.pp for n in range(self.virtual))

    def to_json(self) -> str:
        """Write the layout as JSON: the same layout always gives the same text."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def to_toml(self) -> str:
        """Write the layout as TOML.

        >>> print(Layout(tp=8, sequence_parallel=True).to_toml().splitlines()[2:4])
        ['tp = 8', 'sequence_parallel = true']
        """
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in asdict(self).items())

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Read a layout from JSON text.

        Raises:
            ModeError: the text is not a layout, or not a possible one.
        """
        return _read(text, json.loads, "JSON")

    @classmethod
    def from_toml(cls, text: str) -> Layout:
        r"""Read a layout from TOML text.

        >>> Layout.from_toml("tp = 8\ndp_shard = 4")
        Layout(dp_shard=4, tp=8)

        Raises:
            ModeError: the text is not a layout, or not a possible one.
        """
        return _read(text, tomllib.loads, "TOML")

    def __repr__(self) -> str:
        return _written(asdict(self))


_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The dimensions that ranks are numbered by, from the slowest to the fastest."""
_COUNTS = (*_ORDER, "ep")


def checked_layout(layout: Layout, limits: Limits) -> Layout:
    """Return the layout if a model permits it.

    >>> checked_layout(Layout(tp=16, dp_shard=4), Limits(tp_divides=(("key and value heads", 8),)))
    Traceback (most recent call last):
    actmem.errors.ModeError: tp = 16 is not possible: the model has 8 key and value heads, which 16 does not divide.
    The nearest possible layout: Layout(dp_shard=8, tp=8)

    Raises:
        ModeError: it does not. The message has the nearest layout that is possible, of as many ranks if there is one.
    """
    _raise_first(asdict(layout), limits)
    return layout


def nearest_layout(layout: Layout, limits: Limits) -> Layout:
    """Return the nearest layout that a model permits: the layout itself if it does.

    >>> nearest_layout(Layout(tp=16), Limits(tp_divides=(("heads", 8),)))
    Layout(dp_shard=2, tp=8)
    """
    return Layout(**_nearest(asdict(layout), limits))


def layers_of_stages(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Divide the layers of a model over the stages of a pipeline; the embedding and the head count as one layer each.

    >>> layers_of_stages(126, 16)
    (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)
    >>> layers_of_stages(4, 4), layers_of_stages(5, 1)
    ((1, 1, 1, 1), (5,))
    """
    counts = _evenly(num_layers + 2, num_stages)
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts if min(counts) > 0 else _evenly(num_layers, num_stages))


def _evenly(count: int, parts: int) -> list[int]:
    each, left = divmod(count, parts)
    return [each + (n < left) for n in range(parts)]


# --- what is possible -------------------------------------------------------------------------------------------------


def _check_types(given: dict[str, Any]) -> None:
    for name in _COUNTS:
        if type(given[name]) is not int or given[name] < 1:
            raise ModeError(f"{name} = {given[name]!r} is not permitted. Expected an int of 1 or more.")
    for name in ("virtual", "microbatches"):
        if type(given[name]) is not int or given[name] < 0:
            raise ModeError(
                f"{name} = {given[name]!r} is not permitted. Expected an int of 1 or more, or 0 to omit it."
            )
    for name in ("sequence_parallel", "reshard_after_forward"):
        if type(given[name]) is not bool:
            raise ModeError(f"{name} = {given[name]!r} is not permitted. Write True or False.")
    schedule = given["schedule"]
    if schedule and schedule not in SCHEDULES:
        hint = did_you_mean(schedule, tuple(SCHEDULES)) if isinstance(schedule, str) else ""
        raise ModeError(f"schedule = {schedule!r} is not known. Permitted: {', '.join(SCHEDULES)}.{hint}")


def _settled(given: dict[str, Any]) -> dict[str, Any]:
    """Fill in what was omitted."""
    schedule = given["schedule"] or ("1F1B" if given["pp"] > 1 else "")
    virtual = given["virtual"] or (SCHEDULES[schedule].least_virtual if schedule else 1)
    num_stages = given["pp"] * virtual
    return {
        "schedule": schedule,
        "virtual": virtual,
        "microbatches": given["microbatches"] or (num_stages if given["pp"] > 1 else 1),
    }


class _Mistake(NamedTuple):
    text: str
    change: dict[str, Any]
    """What to write instead."""


def _raise_first(given: dict[str, Any], limits: Limits) -> None:
    first = next(_mistakes(given, limits), None)
    if first is not None:
        raise ModeError(f"{first.text}\nThe nearest possible layout: {_written(_nearest(given, limits))}")


def _nearest(given: dict[str, Any], limits: Limits) -> dict[str, Any]:
    nearest = dict(given)
    for _ in range(_MANY):
        found = next(_mistakes(nearest, limits), None)
        if found is None:
            return nearest
        nearest |= found.change
    raise AssertionError(f"no layout near {_written(given)} is possible")


_MANY = 50


def _mistakes(given: dict[str, Any], limits: Limits) -> Iterator[_Mistake]:
    yield from _pipeline_mistakes(given, limits)
    if given["sequence_parallel"] and given["tp"] == 1:
        text = "sequence_parallel = True is not possible with tp = 1: it divides the sequence over the ranks of tp."
        yield _Mistake(text, {"sequence_parallel": False})
    for what, number in limits.tp_divides:
        if number % given["tp"]:
            tp = given["tp"]
            text = f"tp = {tp} is not possible: the model has {number} {what}, which {tp} does not divide."
            yield _Mistake(text, _moved(given, "tp", math.gcd(number, tp)))
    yield from _sequence_mistakes(given, limits.sequence)
    if limits.num_experts == 0 and given["ep"] > 1:
        yield _Mistake(f"ep = {given['ep']} is not possible: the model has no experts.", {"ep": 1})
    elif limits.num_experts and limits.num_experts % given["ep"]:
        count, ep = limits.num_experts, given["ep"]
        text = f"ep = {ep} is not possible: the model has {count} experts, which {ep} does not divide."
        yield _Mistake(text, {"ep": math.gcd(count, ep)})
    ranks = given["dp_shard"] * given["cp"]
    if ranks % given["ep"]:
        text = (
            f"ep = {given['ep']} is not possible: the experts are divided over the ranks of dp_shard and cp, which are "
            f"{ranks}."
        )
        yield _Mistake(text, {"ep": math.gcd(ranks, given["ep"])})


def _sequence_mistakes(given: dict[str, Any], sequence: int | None) -> Iterator[_Mistake]:
    if sequence is None:
        return
    cp, tp = given["cp"], given["tp"]
    if cp > 1 and sequence % (2 * cp):
        text = (
            f"cp = {cp} is not possible: the sequence has {sequence} tokens, which {2 * cp} does not divide. Each rank "
            "has two pieces of it, one from the front and one from the end."
        )
        yield _Mistake(text, _moved(given, "cp", math.gcd(sequence // 2, cp) if sequence % 2 == 0 else 1))
    elif given["sequence_parallel"] and sequence // cp % tp:
        what = "the sequence" if cp == 1 else f"the part of the sequence that cp = {cp} leaves"
        length = sequence // cp
        text = f"tp = {tp} is not possible: {what} has {length} tokens, which {tp} does not divide."
        yield _Mistake(text, _moved(given, "tp", math.gcd(length, tp)))


def _pipeline_mistakes(given: dict[str, Any], limits: Limits) -> Iterator[_Mistake]:
    pp, schedule, virtual, count = given["pp"], given["schedule"], given["virtual"], given["microbatches"]
    if pp == 1:
        if schedule or virtual > 1:
            named = f"schedule = {schedule!r}" if schedule else f"virtual = {virtual}"
            text = f"{named} is not possible with pp = 1: there is no pipeline."
            yield _Mistake(text, {"schedule": "", "virtual": 1})
        return
    kind, num_stages = SCHEDULES[schedule], pp * virtual
    if virtual < kind.least_virtual or (kind.most_virtual is not None and virtual > kind.most_virtual):
        most = kind.most_virtual
        wanted = (
            f"{kind.least_virtual} or more stages" if most is None else "one stage" if most == 1 else f"{most} stages"
        )
        text = f"virtual = {virtual} is not possible: schedule = {schedule!r} has {wanted} on each rank."
        yield _Mistake(text, {"virtual": kind.least_virtual if virtual < kind.least_virtual else most})
        return
    if limits.num_layers is not None and num_stages > limits.num_layers:
        text = (
            f"pp = {pp} with {virtual} stage{'' if virtual == 1 else 's'} on each rank is not possible: the model has "
            f"{limits.num_layers} layers for {num_stages} stages."
        )
        most = max(1, limits.num_layers // virtual)
        yield _Mistake(text, _moved(given, "pp", max(n for n in range(1, most + 1) if pp % n == 0)))
        return
    if kind.needs_all and count < num_stages:
        text = (
            f"microbatches = {count} is not possible: schedule = {schedule!r} needs one for each of the {num_stages} "
            "stages."
        )
        yield _Mistake(text, {"microbatches": num_stages})
    rounds = max(1, count // pp)
    if kind.has_rounds and count % rounds:
        text = f"microbatches = {count} is not possible: schedule = {schedule!r} needs {rounds} equal rounds."
        even = [n for n in range(1, 2 * count) if n % max(1, n // pp) == 0]
        yield _Mistake(text, {"microbatches": min(even, key=lambda n: (abs(n - count), n))})


def _moved(given: dict[str, Any], name: str, value: int) -> dict[str, Any]:
    """Give a dimension another size, and its ranks to `dp_shard` if they are divided evenly."""
    before = given[name]
    return {name: value, "dp_shard": given["dp_shard"] * (before // value)} if before % value == 0 else {name: value}


# --- text -------------------------------------------------------------------------------------------------------------


def _written(values: dict[str, Any]) -> str:
    """Write a layout as a call, without what is the default."""
    usual: dict[str, Any] = {field.name: field.default for field in fields(Layout)}
    usual["schedule"] = _settled({**usual, "pp": values["pp"]})["schedule"]
    usual["virtual"] = _settled({**values, "virtual": 0})["virtual"]
    usual["microbatches"] = _settled({**values, "microbatches": 0})["microbatches"]
    given = [(name, value) for name, value in values.items() if value != usual[name]]
    return f"Layout({', '.join(f'{name}={value!r}' for name, value in given)})"


def _read(text: str, read: Callable[[str], object], form: str) -> Layout:
    try:
        found = read(text)
    except ValueError as error:  # the base class of both readers' errors
        raise ModeError(
            f"the layout cannot be read as {form}: {error}. Write it again: layout.to_{form.lower()}()."
        ) from None
    if not isinstance(found, dict):
        raise ModeError(f"this is not a layout: it holds a {type(found).__name__}, not a table such as tp = 8.")
    names = [field.name for field in fields(Layout)]
    table = cast("dict[str, Any]", found)
    for name in table:
        if name not in names:
            raise ModeError(
                f"{name} is not a known key of a layout. Permitted: {', '.join(names)}.{did_you_mean(name, names)}"
            )
    return Layout(**table)
