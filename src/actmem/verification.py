"""Prove that a mode changes nothing but memory: loss, gradients, buffers, names and modules are bitwise the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from actmem.applying import apply
from actmem.errors import ModeError, UnsupportedError
from actmem.modes import Mode
from actmem.plan import Plan
from actmem.profiling import Restored, generator_states, inputs_of, loss_of
from actmem.reporting import Report
from actmem.settings import Split
from actmem.structure import check_module
from actmem.torchcompat import named_modules

__all__ = ["Rounding", "Verification", "verify"]


SPLIT_FACTOR = 2.0
"""How much further from a float64 reference a split step may be than the plain one, for `Verification.ok`."""


@dataclass(frozen=True)
class Rounding:
    """How far a step whose sums are added in another order is from plain training, and both are from the truth.

    The truth is the same step of a copy of the model in float64. Distances are those of the tensor that is worst,
    relative to its largest element, or to a thousandth of the largest of all gradients where that is more.
    """

    largest_ulps: float
    """The largest difference between the two, in units of the last place of the largest element of its tensor."""
    where: str
    """The loss or gradient that it is in."""
    plain_error: float
    """The distance of the plain step from the reference."""
    split_error: float
    """The distance of the split step from it."""

    @property
    def ok(self) -> bool:
        """Whether the split step is at most twice as far from the reference as the plain one."""
        return self.split_error <= SPLIT_FACTOR * self.plain_error

    def __str__(self) -> str:
        verdict = "no further" if self.ok else "further"
        return (
            f"at most {self.largest_ulps:.3g} ulps from plain training, in {self.where}; from a float64 reference "
            f"{self.split_error:.3g}, plain training {self.plain_error:.3g}: {verdict} than {SPLIT_FACTOR:g} times as "
            "far"
        )


@dataclass(frozen=True)
class Verification:
    """The outcome of `verify`."""

    difference: str | None
    """The first thing that the mode changes, by name, or None."""
    report: Report = field(repr=False)
    """What the mode did in the compared step."""
    irreproducible: tuple[str, ...] = ()
    """What already differs between two plain runs, by name; about these nothing can be said."""
    notes: tuple[str, ...] = ()
    """What to know before trusting the outcome: plain training that is not reproducible, blocks that did nothing."""
    rounding: Rounding | None = None
    """For a split, which adds sums over tokens in another order: how far losses and gradients are from the truth."""

    @property
    def ok(self) -> bool:
        """Whether the mode changes nothing; of a split, nothing but the rounding of sums."""
        return self.difference is None and (self.rounding is None or self.rounding.ok)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.difference is not None:
            verdict = f"differs from plain training: {self.difference}"
        elif self.rounding is not None:
            verdict = str(self.rounding)
        else:
            verdict = "bitwise equal to plain training"
        return "\n".join([verdict, *(f"note: {note}" for note in self.notes)])


@dataclass(frozen=True)
class _Outcome:
    loss: dict[str, Tensor | None]
    gradient: dict[str, Tensor | None]
    input: dict[str, Tensor | None]
    buffer: dict[str, Tensor | None]
    tree: dict[str, str]
    random: dict[str, Any]


Batch = dict[str, Any] | tuple[Any, ...]


def verify(
    model: nn.Module,
    batch: Batch | list[Batch],
    mode: Mode | Plan,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    blocks: str | Sequence[str] | None = None,
    split: Split | None = None,
    seed: int = 0,
    forwards: int = 1,
) -> Verification:
    """Run a step plain and under `mode` from the same state and seed, compare them bitwise, restore the model.

    The plain step runs twice: whatever already differs there (a clock, a counter outside the model, a nondeterministic
    operator) does not count against the mode, and is listed in `irreproducible`. Each run starts from the same
    parameters, buffers, random generators and Python attributes of the modules.

    Args:
        model: the model, with no mode applied.
        batch: a dict for `model(**batch)`, or a tuple for `model(*batch)`. A list of these is a step with gradient
            accumulation: one backward pass for each.
        mode: what to compare with plain training.
        loss: a function of the output; by default `output.loss`, or the output itself if it is a scalar.
        blocks: as for `apply`.
        split: as for `apply`. Losses and gradients are then compared with those of a copy of the model in float64: they
            must not be more than twice as far from these as plain training's are. All else must be bitwise equal; with
            `exact=True`, they must be too.
        seed: seed of the random generators in every run.
        forwards: how many forward passes of a batch run before its backward pass, which starts from the sum of their
            losses.

    Returns:
        The outcome: print it, or check `.ok`.

    >>> import actmem
    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3)])
    >>> actmem.verify(model, (torch.randn(2, 8),), actmem.Full(), loss=torch.sum).ok
    True
    """
    check_module(model)
    if type(forwards) is not int or forwards < 1:
        raise ModeError(f"forwards = {forwards!r} is not permitted. Expected an int of 1 or more.")
    batches = _batches(batch)
    several = batches is batch
    inputs = {f"{i}.{name}" if several else name: t for i, b in enumerate(batches) for name, t in inputs_of(b).items()}

    def step() -> _Outcome:
        return _step(model, batches, inputs, loss, seed, forwards)

    with Restored(model, inputs):
        with Restored(model, inputs):
            plain = step()
        with Restored(model, inputs):
            again = step()
        with Restored(model, inputs), apply(model, mode, blocks=blocks, split=split) as applied:
            managed = step()
            report = applied.report()
            split = applied.plan.split
            idle = not any(model.get_submodule(path).training for path in applied.plan.blocks)
    after = _tree(model)
    unsteady = _differences(plain, again, "in the first plain run, {} in the second")
    found = _differences(plain, managed, "plain, {} under the mode")
    rounding = None
    if split is not None and not split.exact:
        with Restored(model, inputs):
            rounding = _rounding(plain, managed, _reference(model, batches, inputs, loss, seed, forwards))
        found = {name: text for name, text in found.items() if not name.startswith(("loss", "gradient", "input"))}
    difference = next((text for name, text in found.items() if name not in unsteady), None)
    if difference is None and after != plain.tree:
        difference = "the module tree after remove()"
    notes: list[str] = []
    if idle:
        notes.append(
            "the blocks are in eval mode, where a mode has no effect: plain was compared with plain. Call "
            "model.train() first."
        )
    if unsteady:
        first, *others = unsteady.values()
        more = f" (and {len(others)} more)" if others else ""
        notes.append(
            f"plain training itself is not reproducible: two plain runs from the same state and seed differ in {first}"
            f"{more}. These were excluded from the comparison. Look for a clock, a counter outside the "
            "model's modules, or an operator that torch.use_deterministic_algorithms(True) refuses."
        )
    return Verification(difference, report, tuple(unsteady), tuple(notes), rounding)


def _reference(
    model: nn.Module,
    batches: list[Any],
    inputs: dict[str, Tensor],
    loss: Callable[[Any], Tensor] | None,
    seed: int,
    forwards: int,
) -> _Outcome:
    """Run the plain step on a copy of the model in float64."""
    model = copy.deepcopy(model).double()
    wide = {id(t): t.detach().double().requires_grad_(t.requires_grad) for t in inputs.values()}

    def doubled(x: Any) -> Any:
        if id(x) in wide:
            return wide[id(x)]
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    kind = next(model.parameters()).device.type
    given, named = tree_map(doubled, batches), {n: wide[id(t)] for n, t in inputs.items()}
    with torch.autocast(kind, enabled=False):
        try:
            return _step(model, given, named, loss, seed, forwards)
        except RuntimeError as error:
            raise UnsupportedError(
                f"a split step is compared with the same step of a copy in float64, and this model cannot run in "
                f"float64: {str(error).splitlines()[0]}. Choose other kernels for the comparison, such as "
                "model.set_experts_implementation('batched_mm') in transformers."
            ) from error


def _rounding(plain: _Outcome, split: _Outcome, truth: _Outcome) -> Rounding:
    most, where, errors = 0.0, "nothing", [0.0, 0.0]
    for what in ("loss", "gradient", "input"):
        values: dict[str, Tensor | None] = getattr(plain, what)
        truths: dict[str, Tensor | None] = getattr(truth, what)
        least = 1e-3 * max((float(z.abs().max()) for z in truths.values() if z is not None and z.numel()), default=0.0)
        for name, x in values.items():
            y, z = getattr(split, what)[name], getattr(truth, what)[name]
            if x is None or y is None or z is None:
                continue
            largest = max(float(z.abs().max()), least) or 1.0  # a gradient that is 0 in truth is all rounding
            ulps = float((x.double() - y.double()).abs().max()) / (largest * torch.finfo(x.dtype).eps)
            if ulps > most:
                most, where = ulps, f"{what} of {name}" if name else what
            for i, each in enumerate((x, y)):
                errors[i] = max(errors[i], float((each.double() - z).abs().max()) / largest)
    return Rounding(most, where, *errors)


def _batches(given: Any) -> list[Any]:
    """Return the batches of a step: the list itself if several were passed."""
    if isinstance(given, list) and all(isinstance(one, (dict, tuple)) for one in cast("list[Any]", given)):
        if not given:
            raise ModeError("batch = [] is empty. Expected a dict, a tuple, or a list with at least one of these.")
        return cast("list[Any]", given)
    return [cast(object, given)]


def _step(
    model: nn.Module,
    batches: list[Any],
    inputs: dict[str, Tensor],
    loss: Callable[[Any], Tensor] | None,
    seed: int,
    forwards: int,
) -> _Outcome:
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
    torch.clear_autocast_cache()  # otherwise, under autocast, the second step would find the casts of the first
    for t in (*model.parameters(), *inputs.values()):
        t.grad = None
    tree = _tree(model)
    losses: dict[str, Tensor | None] = {}
    for i, batch in enumerate(batches):
        values: list[Tensor] = []
        for n in range(forwards):
            out: Any = model(**batch) if isinstance(batch, dict) else model(*batch)
            values.append(loss_of(out, loss))
            place = [f"batch {i}"] * (len(batches) > 1) + [f"forward {n}"] * (forwards > 1)
            losses[", ".join(place)] = values[-1].detach().clone()
        total = values[0] if forwards == 1 else torch.stack(values).sum()
        total.backward()  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
    return _Outcome(
        losses,
        {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        {n: None if t.grad is None else t.grad.clone() for n, t in inputs.items()},
        {n: b.clone() for n, b in model.named_buffers()},
        tree,
        generator_states(model),
    )


def _tree(model: nn.Module) -> dict[str, str]:
    modules = {n: type(m).__qualname__ for n, m in named_modules(model)}
    parameters = {n: f"parameter {tuple(p.shape)}" for n, p in model.named_parameters(remove_duplicate=False)}
    return modules | parameters | {f"state {k}": "key" for k in model.state_dict()}


def _differences(one: _Outcome, other: _Outcome, how: str) -> dict[str, str]:
    """Return everything that differs, as name -> description."""
    found: dict[str, str] = {}
    for what in ("loss", "gradient", "input", "buffer"):
        a: dict[str, Tensor | None] = getattr(one, what)
        b: dict[str, Tensor | None] = getattr(other, what)
        for name in a | b:
            x, y = a.get(name), b.get(name)
            if _same(x, y):
                continue
            of = f"{what} of {name}" if name else what
            if what == "loss" and x is not None and y is not None:
                found[of] = f"{of}: {x.item()!r} {how.format(repr(y.item()))}"
            elif x is None or y is None or x.shape != y.shape:
                found[of] = of
            else:
                found[of] = f"{of}, largest difference {float((x.double() - y.double()).abs().max())!r}"
    for name in one.tree | other.tree:
        if one.tree.get(name) != other.tree.get(name):
            found[f"module tree at {name}"] = f"module tree at {name}"
    for name in one.random | other.random:
        if not _same_state(one.random.get(name), other.random.get(name)):
            kind = "the random generator" if name == "cpu" else f"the random generator of {name}"
            found[f"generator {name}"] = f"the state of {kind} after the step"
    return found


def _same_state(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        pairs = zip(cast("tuple[Any, ...]", one), cast("tuple[Any, ...]", other), strict=True)
        return all(_same_state(a, b) for a, b in pairs)
    equal: Any = one == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


def _same(x: Tensor | None, y: Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return torch.equal(x, y) or torch.equal(_bits(x), _bits(y))


def _bits(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
