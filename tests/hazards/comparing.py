"""Run one training step three ways - plain, under torch.utils.checkpoint, under actmem - and say what differs."""

import functools
import math
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import actmem
from actmem.modes import Mode
from actmem.structure import find_blocks


@dataclass(frozen=True)
class Form:
    """One way to use torch.utils.checkpoint."""

    name: str
    put_on: Callable[[nn.Module], None]


def by_hand(name: str, **options: Any) -> Form:
    """Checkpoint the forward of every block that actmem would find, as a wrapper does."""

    def put_on(model: nn.Module) -> None:
        for block in find_blocks(model):
            block.module.forward = functools.partial(checkpoint, block.module.forward, **options)

    return Form(name, put_on)


def by_transformers(name: str, **options: Any) -> Form:
    """Use the switch of Hugging Face transformers."""

    def put_on(model: Any) -> None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)

    return Form(name, put_on)


NON_REENTRANT = by_hand("non-reentrant", use_reentrant=False)
REENTRANT = by_hand("reentrant", use_reentrant=True)
HF_REENTRANT = by_transformers("transformers' switch, reentrant", use_reentrant=True)
HF_NON_REENTRANT = by_transformers("transformers' switch, non-reentrant", use_reentrant=False)
OTHER_FORM = {
    NON_REENTRANT.name: REENTRANT,
    REENTRANT.name: NON_REENTRANT,
    HF_REENTRANT.name: HF_NON_REENTRANT,
    HF_NON_REENTRANT.name: HF_REENTRANT,
}
"""What people try next."""


# ---------------------------------------------------------------- what a run can show


@dataclass(frozen=True)
class Finding:
    """How one run of a step differs from plain training."""

    error: str | None = None
    """Type and message, if the step raised."""
    loss_off: float = 0.0
    gradients_off: float = 0.0
    """Norm of the difference over the norm of the plain gradients, over those that both have; infinite for NaN."""
    num_missing: int = 0
    """Gradients that plain training has and this run has not."""
    num_gradients: int = 0
    state_off: tuple[str, ...] = ()
    """What else a step leaves behind and is not the same to the bit: "name: plain -> this run" """
    warned: str | None = None
    held_fraction: float | None = None
    """Bytes held for backward, as a fraction of what plain training holds."""
    rerun_fraction: float | None = None
    """FLOPs run a second time, as a fraction of those of the forward pass."""

    @property
    def exact(self) -> bool:
        """Whether nothing differs from plain training, to the bit."""
        return not (self.error or self.loss_off or self.gradients_off or self.num_missing or self.state_off)

    @property
    def kind(self) -> Literal["exact", "wrong", "raises"]:
        return "raises" if self.error else "exact" if self.exact else "wrong"

    def __str__(self) -> str:
        said = f"warns “{self.warned}”; " if self.warned else ""
        if self.error is not None:
            kind, message = self.error.split(": ", 1)
            return f"{said}**raises** `{kind}`: “{first_words(message)}”"
        parts = [f"loss off by {share(self.loss_off)}"] if self.loss_off else []
        if self.gradients_off:
            off = math.isfinite(self.gradients_off)
            parts.append(f"gradients off by {share(self.gradients_off)}" if off else "gradients are NaN")
        if self.num_missing:
            parts.append(f"{self.num_missing} of {self.num_gradients} gradients are None")
        parts += self.state_off
        word = "wrong" if self.warned else "silently wrong"
        wrong = f"**{word}**: {', '.join(parts)}" if parts else "exact"
        if self.held_fraction is not None:
            wrong += f"; holds {share(self.held_fraction)} of plain's bytes"
        if self.rerun_fraction is not None:
            wrong += f"; runs {share(self.rerun_fraction)} of the forward FLOPs again"
        return said + wrong


def share(fraction: float) -> str:
    """Print a fraction in percent with two digits, or as a power of ten if it is tiny.

    >>> share(0.3324), share(2.0), share(1.23e-8)
    ('33 %', '200 %', '1e-08')
    """
    if 0 < fraction < 1e-3:
        return f"{fraction:.0e}"
    digits = 1 if 0 < fraction < 0.1 else 0
    return f"{100 * fraction:.{digits}f} %"


@dataclass(frozen=True)
class Raises:
    """Expect torch's checkpoint to raise."""

    error: str
    """A regular expression for type and first words."""

    def holds(self, found: Finding) -> bool:
        return found.error is not None and re.search(self.error, found.error, re.DOTALL) is not None


@dataclass(frozen=True)
class GoesWrong:
    """Expect torch's checkpoint to run to the end, and to be wrong by at least this much."""

    gradients_off: float = 0.0
    loss_off: float = 0.0
    num_missing: int = 0
    state_off: str | None = None
    """Part of the name of something that differs."""

    def holds(self, found: Finding) -> bool:
        return (
            found.error is None
            and not found.exact
            and found.gradients_off >= self.gradients_off
            and found.loss_off >= self.loss_off
            and found.num_missing >= self.num_missing
            and (self.state_off is None or any(self.state_off in s for s in found.state_off))
        )


@dataclass(frozen=True)
class Wastes:
    """Expect torch's checkpoint to be exact, and to cost at least this much."""

    held_fraction: float = 0.0
    rerun_fraction: float = 0.0

    def holds(self, found: Finding) -> bool:
        return (
            found.exact
            and (found.held_fraction or 0.0) >= self.held_fraction
            and (found.rerun_fraction or 0.0) >= self.rerun_fraction
        )


@dataclass(frozen=True)
class Row:
    torch: Finding
    other: Finding | None
    """Under the other form of torch's checkpoint, where there is one."""
    actmem: Finding
    num_replayed: int
    recomputed_bytes: int

    @property
    def actmem_text(self) -> str:
        if self.actmem.error is not None:
            return str(self.actmem)
        if not self.num_replayed:
            return f"{self.actmem}; `report()` says 0 B recomputed"
        return f"{self.actmem}; {self.num_replayed} values replayed"


@dataclass(frozen=True)
class Hazard:
    """A thing people do, what torch's checkpoint makes of it, and the promise that actmem is exact."""

    name: str
    """What a user of actmem may rely on, as a name for the test."""
    need: str
    """The class of failure, as numbered in docs/hazards.md."""
    does: str
    """What you do, for the table."""
    build: Callable[[], nn.Module]
    step: Callable[[Any], Tensor]
    """Forward and backward; returns the loss."""
    form: Form
    expected: Raises | GoesWrong | Wastes
    reported: tuple[str, ...] = ()
    """Addresses of public reports."""
    mode: Mode = field(default_factory=actmem.Full)
    state: Callable[[Any], dict[str, Any]] = field(default=lambda model: dict(model.named_buffers()))
    """What else a step leaves behind: compared to the bit."""
    refusal: str | None = None
    """A regular expression for actmem's error, where the right thing to do is to refuse."""
    at_most: Wastes | None = None
    """What the step may cost under actmem."""
    other: Literal["exact", "wrong", "raises"] | None = None
    """What the other form of torch's checkpoint comes to: reentrant for non-reentrant, and the other way round."""
    only_told: bool = False
    """actmem cannot do better here, and its report says that nothing was recomputed."""

    def check(self, row: Row) -> None:
        """Assert that torch's checkpoint fails as expected, and that actmem is exact and did something."""
        assert self.expected.holds(row.torch), f"torch.utils.checkpoint: {row.torch}, expected {self.expected}"
        if self.other is not None:
            assert row.other is not None and row.other.kind == self.other, f"the other form: {row.other}"
        if self.refusal is not None:
            assert row.actmem.error is not None and re.search(self.refusal, row.actmem.error, re.DOTALL), row.actmem
            return
        assert row.actmem.exact, f"actmem: {row.actmem}"
        did = row.num_replayed > 0 and row.recomputed_bytes > 0
        assert did is not self.only_told, f"{row.num_replayed} values replayed, {row.recomputed_bytes} bytes recomputed"
        if self.at_most is not None:
            assert row.actmem.held_fraction is not None and row.actmem.held_fraction <= self.at_most.held_fraction
            assert row.actmem.rerun_fraction is not None and row.actmem.rerun_fraction <= self.at_most.rerun_fraction


# ---------------------------------------------------------------- measuring


def measure_row(hazard: Hazard) -> Row:
    """Run the step of a hazard plain, under torch's checkpoint and under actmem, each from the same state and seeds."""
    plain = _run(hazard, lambda model: None)
    assert plain.error is None, f"plain training itself fails: {plain.error}"
    reports: list[actmem.Report] = []

    def apply(model: nn.Module) -> Callable[[], None]:
        applied = actmem.apply(model, hazard.mode)
        return lambda: reports.append(applied.report())

    theirs = _compare(plain, _run(hazard, hazard.form.put_on))
    other = _compare(plain, _run(hazard, OTHER_FORM[hazard.form.name].put_on)) if hazard.other else None
    ours = _compare(plain, _run(hazard, apply))
    report = reports[0] if reports else None
    return Row(theirs, other, ours, report.num_replayed if report else 0, report.recomputed_bytes if report else 0)


@dataclass
class _Outcome:
    error: str | None = None
    warned: str | None = None
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    cost: actmem.Measurement | None = None


def _run(hazard: Hazard, prepare: Callable[[nn.Module], Callable[[], None] | None]) -> _Outcome:
    out = _Outcome()
    model = hazard.build()
    costly = isinstance(hazard.expected, Wastes)
    random.seed(0)
    with warnings.catch_warnings(record=True) as caught, torch.random.fork_rng(devices=[]):
        warnings.simplefilter("always")
        torch.manual_seed(0)
        try:
            finish = prepare(model)
            if costly:
                losses: list[Tensor] = []
                out.cost = actmem.measure(lambda: losses.append(hazard.step(model)), model=model)
                out.loss = losses[0].detach()
            else:
                out.loss = hazard.step(model).detach()
            if finish is not None:
                finish()
        except (RuntimeError, ValueError) as error:  # what torch's checkpoint and actmem raise
            out.error = f"{type(error).__name__}: {error}"
    out.warned = next((first_words(str(w.message)) for w in caught if "checkpoint" in w.filename), None)
    out.gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    out.state = {n: s.detach().clone() if isinstance(s, Tensor) else s for n, s in hazard.state(model).items()}
    return out


def first_words(message: str, *, limit: int = 88) -> str:
    """Cut a message to its first sentence and at a word's end.

    >>> first_words("torch.utils.checkpoint: A different number of tensors was saved. More.")
    'A different number of tensors was saved'
    """
    text = " ".join(message.removeprefix("torch.utils.checkpoint: ").split())
    text = re.split(r"(?<=[a-z])\. |: tensor at", text)[0].rstrip(".")
    if len(text) > limit:
        text = text[:limit].rsplit(" ", 1)[0] + " ..."
    return text.replace("|", "/")


def _compare(plain: _Outcome, run: _Outcome) -> Finding:
    if run.error is not None:
        return Finding(error=run.error, warned=run.warned)
    pairs = [(a, run.gradients[n]) for n, a in plain.gradients.items() if a is not None]
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs if b is not None)
    norm = sum(float(a.double().square().sum()) for a, b in pairs if b is not None)
    loss, other = float(plain.loss), float(run.loss)
    return Finding(
        loss_off=abs(loss - other) / abs(loss),
        gradients_off=(apart / norm if math.isfinite(apart) else math.inf) ** 0.5 if norm else 0.0,
        num_missing=sum(b is None for _, b in pairs),
        num_gradients=len(pairs),
        state_off=_differing(plain.state, run.state),
        warned=run.warned,
        held_fraction=run.cost.saved_bytes / plain.cost.saved_bytes if run.cost and plain.cost else None,
        rerun_fraction=_rerun(plain.cost, run.cost) if run.cost and plain.cost else None,
    )


def _differing(plain: dict[str, Any], run: dict[str, Any]) -> tuple[str, ...]:
    lines: list[str] = []
    for name, a in plain.items():
        b = run[name]
        if isinstance(a, Tensor) and a.numel() > 1:
            if not torch.equal(a, b):
                off = float((a.double() - b.double()).norm() / a.double().norm())
                lines.append(f"`{name}` off by {share(off)}")
        elif a != b:
            lines.append(f"`{name}` {_short(b)} instead of {_short(a)}")
    return tuple(lines)


def _short(value: Any) -> str:
    value = value.item() if isinstance(value, Tensor) else value
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _rerun(plain: actmem.Measurement, run: actmem.Measurement) -> float:
    def total(m: actmem.Measurement) -> int:
        return m.forward_flops + m.backward_flops + m.replayed_flops

    return (total(run) - total(plain)) / plain.forward_flops
