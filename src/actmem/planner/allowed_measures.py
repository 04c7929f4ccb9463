"""What a plan may use beyond decisions about blocks: where it is asked to, or where it may and it pays.

NOTE [ Allowed measures ]
Each measure lowers bytes that no decision about blocks can lower, at a price: `step_in_backward` costs nothing, a
`split` adds sums in another order, `optimizer_state` copies the state twice in a step, `offload` copies activations.
They are tried in this order, one on top of the other. The first is none of them; where that fits without recomputing
anything, it is the plan. One that makes a plan fit, or makes it faster, stays. What turns out not to be needed is
dropped again. A measure that this step cannot have, such as a split without a head, is as if it had not been allowed.
A refusal is that of the variant with the smallest peak, and says what else would help if it were allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from actmem.devices import Device
from actmem.errors import BudgetError, ModeError
from actmem.modes import check_allowed
from actmem.plan import Plan
from actmem.profiles import Profile
from actmem.settings import Offload, OptimizerState, Place, Split, StepInBackward, check_split, check_stepping
from actmem.simulation import cost_seconds, is_accelerator, step_seconds, stepped

__all__ = ["AUTO", "Measures", "Variant", "best_variant", "check_asked", "stepping_profiles", "with_copies"]

AUTO = Split(loss="auto")
"""What a planner that may split does."""


@dataclass(frozen=True)
class Variant:
    """What a plan uses beyond decisions about blocks."""

    split: Split | None = None
    step_in_backward: StepInBackward | None = None
    optimizer_state: OptimizerState | None = None
    offload: str | Offload | None = None

    def written(self, plan: Plan) -> Plan:
        """Return a plan that says so."""
        return replace(
            plan,
            split=self.split,
            step_in_backward=self.step_in_backward,
            optimizer_state=self.optimizer_state,
        )


class Measures:
    """The measures, each as a change of a variant."""

    ORDER = ("step_in_backward", "split", "optimizer_state", "offload")

    def __init__(self, known: Device) -> None:
        self._place: Place = "host" if is_accelerator(known) else "disk"

    def added(self, variant: Variant, name: str) -> Variant:
        """Return a variant with a measure; itself if it has it."""
        if getattr(variant, name) is not None:
            return variant
        match name:
            case "split":
                return replace(variant, split=AUTO)
            case "step_in_backward":
                return replace(variant, step_in_backward=StepInBackward())
            case "optimizer_state":
                return replace(variant, optimizer_state=OptimizerState(to=self._place))
            case _:
                return replace(variant, offload=self._place)


def check_asked(variant: Variant, allow: Sequence[str], *, is_compiled: bool) -> None:
    """Refuse what cannot be asked of a planner.

    Raises:
        ModeError: a value that is not permitted, or two that exclude each other.
    """
    check_allowed(allow)
    check_stepping(variant.step_in_backward, variant.optimizer_state)
    if variant.split is not None:
        check_split(variant.split)
    for name in allow:
        if getattr(variant, name) is not None:
            raise ModeError(
                f"{name} and allow=[{name!r}] cannot be combined: the one says it, the other lets the planner choose."
            )
    asked = [name for name in Measures.ORDER[:3] if getattr(variant, name) is not None]
    if is_compiled and (asked or allow):
        raise ModeError(
            f"{' and '.join((*asked, *(['allow'] if allow else ())))} cannot be planned for compiled blocks yet: what "
            "is inside a compiled graph is not seen. Omit them, or plan with compiled=False."
        )


def best_variant(
    planned: Callable[[Variant], Plan], base: Variant, allow: Sequence[str], known: Device
) -> tuple[Plan, Variant]:
    """Return the fastest plan, with no more measures than it needs. See NOTE [ Allowed measures ].

    Args:
        planned: makes the plan of a variant.
        base: what was asked for.
        allow: which measures may be added.
        known: the device.

    Raises:
        BudgetError: no variant fits.
    """
    measures = Measures(known)
    found: tuple[Plan, Variant] | None = None
    refused: BudgetError | None = None
    used: list[str] = []
    for name in ("", *(name for name in Measures.ORDER if name in allow)):
        if found is not None and _ratio(found[0]) <= 1.0:
            break
        variant = _of(measures, base, [*used, name] if name else used)
        try:
            plan = planned(variant)
        except BudgetError as error:
            if refused is None or _least(error) <= _least(refused):
                refused = error
                used += [name] if name else []
        except ModeError:
            if not name:
                raise  # what was asked for itself
        else:
            if found is None or _ratio(plan) < _ratio(found[0]):
                found = plan, variant
                used += [name] if name else []
    if found is None:
        assert refused is not None
        raise refused
    for name in used[:-1]:  # what came last was needed
        fewer = _of(measures, base, [other for other in used if other != name])
        try:
            plan = planned(fewer)
        except (BudgetError, ModeError):
            continue
        if _ratio(plan) <= _ratio(found[0]):
            found, used = (plan, fewer), [other for other in used if other != name]
    return found


def _of(measures: Measures, base: Variant, names: Sequence[str]) -> Variant:
    for name in names:
        base = measures.added(base, name)
    return base


def _least(error: BudgetError) -> float:
    return float("inf") if error.smallest_bytes is None else error.smallest_bytes


def _ratio(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_time_ratio


def stepping_profiles(profiles: Sequence[Profile], variant: Variant) -> list[Profile]:
    """Return profiles whose optimizer steps as a variant says."""
    in_backward = variant.step_in_backward is not None
    return [stepped(p, in_backward=in_backward, state=variant.optimizer_state) for p in profiles]


def with_copies(plan: Plan, profile: Profile, variant: Variant, known: Device) -> Plan:
    """Add the time of the copies of the optimizer's state that nothing hides.

    Args:
        plan: a plan.
        profile: the step, with all of its state.
        variant: what the plan uses.
        known: the device.
    """
    state, told = variant.optimizer_state, plan.predicted
    if state is None or told is None:
        return plan
    moved = sum(n for step in profile.parameter_steps for n in step.state_bytes if n >= state.min_bytes)
    seconds = 2 * moved / known.offload_rate(state.to)
    whole = step_seconds(profile, cost_seconds(profile, known))
    if variant.step_in_backward is not None:  # the backward pass takes two thirds of the step
        seconds = max(0.0, seconds - whole * 2 / 3)
    extra = seconds / whole if whole else 0.0
    return replace(plan, predicted=replace(told, step_time_ratio=told.step_time_ratio + extra, gap=told.gap + extra))
