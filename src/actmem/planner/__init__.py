"""Choosing a plan for a budget: what a plan costs, the best one, and how far from the proven optimum it is."""

from actmem.planner.batch_growth import Growth, Largest, check_sizes, largest
from actmem.planner.budget_allowance import Allowance, allowance
from actmem.planner.budget_fit import fit, requested
from actmem.planner.budget_guard import Guard
from actmem.planner.card_fit import check_allocator
from actmem.planner.compiled_fit import compilation, fit_ladder, make_ladder
from actmem.planner.cost_frontier import NAMED, Frontier, Point, frontier
from actmem.planner.job_fit import fit_job, job_seconds
from actmem.planner.named_modes import named_keeps
from actmem.planner.profile_fit import fit_profile, fit_profiles
from actmem.planner.rank_search import RankOption, Ranks, planned_stages, ranks
from actmem.planner.rules_writer import slices
from actmem.planner.stage_fit import fit_stages

__all__ = [
    "NAMED",
    "Allowance",
    "Frontier",
    "Growth",
    "Guard",
    "Largest",
    "Point",
    "RankOption",
    "Ranks",
    "allowance",
    "check_allocator",
    "check_sizes",
    "compilation",
    "fit",
    "fit_job",
    "fit_ladder",
    "fit_profile",
    "fit_profiles",
    "fit_stages",
    "frontier",
    "job_seconds",
    "largest",
    "make_ladder",
    "named_keeps",
    "planned_stages",
    "ranks",
    "requested",
    "slices",
]
