"""Predicted against measured cost of plans: step time relative to plain training, on this machine.

Five models are profiled for real, so that operators have the times that were measured here. Each gets eight plans: the
named modes, and plans fitted to budgets between the smallest peak and the plain one. Steps of plain training and of all
plans alternate, on one thread; a ratio is the median over rounds. Seconds are CPU time, so that other load on the
machine counts less. For comparison, the predictions of this machine's roofline for the same plans are listed too.

A prediction includes the operators that run again, and nothing else. It does not include the tape's own bookkeeping:
recording an operator in the forward pass and finding its inputs again in the backward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

import actmem
from actmem.devices import THIS_MACHINE
from actmem.planner.named_modes import named_keeps
from actmem.planner.profile_fit import fit_profile
from actmem.planner.solver import smallest_peak
from actmem.simulation.predictor import plan_of
from actmem.simulation.step_cost import dtypes_of, resolved
from benchmarks.outcome import Bound, Outcome
from benchmarks.plan import Case, Scale, cases

NUM_REPETITIONS = 9
LIMIT = 0.10
"""Of |predicted / measured - 1|, the median over all plans of all models."""
NAMED = {
    "full": actmem.Full(),
    "full, every second block": actmem.Full(every=2),
    "products saved": actmem.Selective(save=["matmul|grouped_matmul|convolution"]),
}
PARTS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Budgets, between the smallest peak and that of plain training."""


def run(scale: Scale | None = None, *, num_repetitions: int = NUM_REPETITIONS, only: Sequence[str] = ()) -> Outcome:
    """Predict and time every plan.

    Args:
        scale: the size of the models.
        num_repetitions: how often each step is timed.
        only: the names of the models; none for all.
    """
    scale = scale or Scale()
    outcome = Outcome("times", {**dataclasses.asdict(scale), "num_repetitions": num_repetitions})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for case in cases(scale):
            if case.timed and (not only or case.name in only):
                _compare(outcome, case, num_repetitions)
    finally:
        torch.set_num_threads(threads)
    rows = [figures for figures in outcome.measured.values() if "error" in figures]
    errors, by_roofline = (median(abs(row[kind]) for row in rows) for kind in ("error", "roofline_error"))
    outcome.measured["all plans, median"] = {"of_measured_times": errors, "of_the_roofline": by_roofline}
    outcome.bounds.append(Bound("|predicted / measured - 1|, median of all plans", errors, LIMIT, exact=False))
    return outcome


def _compare(outcome: Outcome, case: Case, num_repetitions: int) -> None:
    """Time plain training and eight plans of one model in turn."""
    model = case.make()
    timed = actmem.profile(model, case.batch, fake=False, optimizer=None)
    untimed = actmem.profile(model, case.batch, optimizer=None)
    plans = _plans(timed)
    models = {"plain": model}
    for name, plan in plans.items():
        models[name] = case.make()
        actmem.apply(models[name], plan)
    for _ in range(2):  # the first step is observed, and the second knows what to hold
        for each in models.values():
            _seconds(each, case.batch)
    taken: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(num_repetitions):
        for name, each in models.items():
            taken[name].append(_seconds(each, case.batch))
    predicted = actmem.predict(timed, actmem.SaveEverything(), THIS_MACHINE).step_seconds
    outcome.measured[f"{case.name}: plain"] = {"step_seconds": median(taken["plain"]), "predicted_seconds": predicted}
    for name, plan in plans.items():
        ratio = median(a / b for a, b in zip(taken[name], taken["plain"], strict=True))
        found, roofline = (actmem.predict(p, plan, THIS_MACHINE).step_time_ratio for p in (timed, untimed))
        outcome.measured[f"{case.name}: {name}"] = {
            "measured": ratio,
            "predicted": found,
            "error": found / ratio - 1,
            "roofline": roofline,
            "roofline_error": roofline / ratio - 1,
        }


def _plans(profile: actmem.Profile) -> dict[str, actmem.Plan]:
    """Return the named modes, and plans fitted to budgets."""
    here = resolved(THIS_MACHINE, dtypes_of(profile))
    found = {name: plan_of(profile, mode) for name, mode in NAMED.items()}
    least = smallest_peak(profile)[0]
    most = actmem.predict(profile, actmem.SaveEverything(), here).peak_bytes
    named = named_keeps(profile)
    for part in PARTS:
        budget = least + int(part * (most - least))
        found[f"fitted, {part}"] = fit_profile([profile], budget, here, named=lambda _: named)
    return found


def _seconds(model: nn.Module, batch: tuple[Tensor, ...]) -> float:
    model.zero_grad()
    started = process_time()
    loss: Any = model(*batch)
    loss.backward()
    return process_time() - started
