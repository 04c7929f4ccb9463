"""Choosing a plan for a budget: what a plan costs, the best one, and how far from the proven optimum it is."""

from actmem.planner.fitting import fit
from actmem.planner.frontier import Frontier, frontier
from actmem.planner.guarding import Guard
from actmem.planner.largest import Largest, largest
from actmem.planner.predicting import Prediction, predict

__all__ = ["Frontier", "Guard", "Largest", "Prediction", "fit", "frontier", "largest", "predict"]
