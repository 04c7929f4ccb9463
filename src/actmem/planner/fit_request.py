"""What `fit` was asked, and the plans for it: with any of the measures that may be used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from actmem.allocator import AllocatorSettings
from actmem.devices import Device
from actmem.errors import BudgetError, ModeError
from actmem.plan import Plan
from actmem.planner.allowed_measures import Measures, Variant, best_variant, stepping_profiles, with_copies
from actmem.planner.budget_allowance import Allowance
from actmem.planner.card_fit import check_allocator
from actmem.planner.further_measures import Reached, lower_peaks, offered, reached
from actmem.planner.profile_fit import fit_profiles
from actmem.planner.solver import TIME_LIMIT
from actmem.profiles import Profile
from actmem.settings import Split
from actmem.simulation import follow, on_card

__all__ = ["FitRequest"]

_OF_THE_OPTIMIZER = ("step_in_backward", "optimizer_state")
"""The measures whose effect on a plan is known without another profile."""


@dataclass(frozen=True)
class FitRequest:
    """What `fit` was asked."""

    profiled: Callable[[Split | None], Sequence[Profile]]
    """Returns the profiles for a split, one for each example; made once for each split."""
    allowed: Allowance
    known: Device
    asked: Variant
    """What the plan is to use beyond decisions about blocks."""
    fixed: bool = False
    """Whether the profiles are given: there is no model to profile with another split."""
    compiled: Callable[[], Plan] | None = None
    """Makes the plan for compiled blocks, if it is for such."""
    time_limit: float = TIME_LIMIT
    allocator: str | AllocatorSettings = ""

    def plan(self, allow: Sequence[str]) -> Plan:
        """Find the plan. See NOTE [ Allowed measures ].

        Args:
            allow: the measures that it may use.

        Raises:
            BudgetError: no plan fits. The message says which further measures would help.
        """
        if self.compiled is not None:
            return self.compiled()
        refused: dict[Variant, BudgetError] = {}

        def planned(variant: Variant) -> Plan:
            try:
                return self._planned(variant, allow)
            except BudgetError as error:
                refused[variant] = error
                raise

        try:
            plan, variant = best_variant(planned, self.asked, allow, self.known)
        except BudgetError as error:
            variant = next((v for v, its in refused.items() if its is error), self.asked)
            said = offered(error, variant, allow, self._further(variant, allow), self._added, self._reached)
            raise error.with_lines(said) from error.__cause__
        assert plan.predicted is not None
        names = [name for name in self._further(variant, allow) if name in _OF_THE_OPTIMIZER]
        further = lower_peaks(plan, variant, allow, names, self._added, lambda v: self._peak(v, plan))
        *first, last = plan.predicted.peak_words or ("",)
        words = tuple(sentence for sentence in (*first, further, last) if sentence)
        return replace(plan, predicted=replace(plan.predicted, peak_words=words))

    def plan_with(self, allow: Sequence[str]) -> Plan:
        """Find a plan that uses all of some measures that this step can have, and say nothing about its peak.

        Raises:
            BudgetError: there is none.
        """
        return self.compiled() if self.compiled is not None else self._planned(self._with(allow), allow, words=False)

    def reach(self, allow: Sequence[str]) -> Reached | None:
        """Predict the smallest peak that is known to be reached with all of some measures.

        Nothing is searched for: the peak is that of recomputing every block. None for compiled blocks.
        """
        return None if self.compiled is not None else self._reached(self._with(allow))

    def _with(self, allow: Sequence[str]) -> Variant:
        variant = self.asked
        for name in allow:
            variant = self._added(variant, name) or variant
        return variant

    def _planned(self, variant: Variant, allow: Sequence[str], *, words: bool = True) -> Plan:
        found = self.profiled(variant.split)
        plan = fit_profiles(
            stepping_profiles(found, variant),
            self.allowed,
            self.known,
            offload=variant.offload,
            time_limit=self.time_limit,
            allocator=self.allocator,
            words="measured" if words else "none",
            used=[*allow, *(name for name in Measures.ORDER if getattr(variant, name) is not None)],
        )
        return variant.written(with_copies(plan, found[0], variant, self.known))

    def _profiles(self, variant: Variant) -> list[Profile]:
        """Return the profiles of the step as a variant has it.

        Raises:
            ModeError: this step cannot have one of its measures.
        """
        return [on_card(p, self.known) for p in stepping_profiles(self.profiled(variant.split), variant)]

    def _reached(self, variant: Variant, decided: Sequence[Sequence[str]] | None = None) -> Reached:
        settings = check_allocator(self.allocator, self.known)
        return reached(self._profiles(variant), variant, self.allowed, self.known, settings, decided)

    def _added(self, variant: Variant, name: str) -> Variant | None:
        """Return the variant with one more measure; None if this step cannot have it."""
        if name == "split" and self.fixed:
            return None
        more = Measures(self.known).added(variant, name)
        try:
            self._profiles(more)
        except ModeError:
            return None
        return more

    def _further(self, variant: Variant, allow: Sequence[str]) -> list[str]:
        """Return the measures that were neither asked for nor allowed."""
        return [name for name in Measures.ORDER if name not in allow and getattr(variant, name) is None]

    def _peak(self, variant: Variant, plan: Plan) -> int:
        return max(follow(p, plan).peak_bytes for p in self._profiles(variant))
