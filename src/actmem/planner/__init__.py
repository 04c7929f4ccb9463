"""Choosing a plan for a budget: what a plan costs, the best one, and how far from the proven optimum it is."""

from actmem.planner.batch_growth import Largest, check_sizes, largest
from actmem.planner.budget_bytes import Allowance, allowance
from actmem.planner.budget_fit import fit, fit_profile, fit_profiles
from actmem.planner.budget_guard import Guard
from actmem.planner.compiled_fit import compilation, fit_ladder, make_ladder
from actmem.planner.cost_frontier import NAMED, Frontier, Point, frontier
from actmem.planner.named_modes import named_keeps
from actmem.planner.rules_writer import slices

__all__ = [
    "NAMED",
    "Allowance",
    "Frontier",
    "Guard",
    "Largest",
    "Point",
    "allowance",
    "check_sizes",
    "compilation",
    "fit",
    "fit_ladder",
    "fit_profile",
    "fit_profiles",
    "frontier",
    "largest",
    "make_ladder",
    "named_keeps",
    "slices",
]
