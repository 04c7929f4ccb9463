"""What a step would take under a plan: bytes and seconds, from a profile and without running anything.

- `tape_emulator.py` holds what a tape would hold, by the tape's own rules; `room.py` counts the bytes, `flight.py`
  those that are in flight; `simulator.py` walks the log of a profile with them, for all questions about a plan.
- `plan_effect.py` resolves a plan for every operator of a profile and says what its step takes; `step_cost.py` says for
  which device, and how long; `card_kernels.py` puts a card's operators in the place of the CPU's, and `card_usage.py`
  runs a step's allocations through torch's caching allocator, and says what a card must have. `predictor.py` puts
  them together.
- `job_clock.py` says when the ranks of a pipeline do what, and so how long a step of the whole job takes.
- `stepped_profile.py` lets the optimizer step in the backward pass, or keep its state elsewhere.
- `step_walk.py` and `peaks.py` divide the bytes of each moment by what they are for.
- `peak_moments.py` and `transfer_links.py` answer for thousands of plans, for the planner.

Nothing here chooses a plan: that is `actmem.planner`.
"""

from actmem.simulation.card_kernels import on_card, unknowns
from actmem.simulation.card_usage import CardMemory, card_memory, estimates, groups_of, outside_torch
from actmem.simulation.job_clock import Stretch, ends_of, in_flight, least_seconds, stretches
from actmem.simulation.peak_moments import NEVER, Effect, LayerFamily, Timeline
from actmem.simulation.peaks import lowering, peak_words
from actmem.simulation.plan_effect import decisions, follow, ruling
from actmem.simulation.predictor import Prediction, plan_of, predict, prediction
from actmem.simulation.simulator import Simulated, simulate
from actmem.simulation.step_cost import (
    cost_seconds,
    dtypes_of,
    is_accelerator,
    is_measured,
    link_seconds,
    may_communicate,
    resolved,
    step_seconds,
)
from actmem.simulation.step_walk import NAMES, Ground, Moments, walk
from actmem.simulation.stepped_profile import stepped, with_stepping
from actmem.simulation.transfer_links import Link, Traffic

__all__ = [
    "NAMES",
    "NEVER",
    "CardMemory",
    "Effect",
    "Ground",
    "LayerFamily",
    "Link",
    "Moments",
    "Prediction",
    "Simulated",
    "Stretch",
    "Timeline",
    "Traffic",
    "card_memory",
    "cost_seconds",
    "decisions",
    "dtypes_of",
    "ends_of",
    "estimates",
    "follow",
    "groups_of",
    "in_flight",
    "is_accelerator",
    "is_measured",
    "least_seconds",
    "link_seconds",
    "lowering",
    "may_communicate",
    "on_card",
    "outside_torch",
    "peak_words",
    "plan_of",
    "predict",
    "prediction",
    "resolved",
    "ruling",
    "simulate",
    "step_seconds",
    "stepped",
    "stretches",
    "unknowns",
    "walk",
    "with_stepping",
]
