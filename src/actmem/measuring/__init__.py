"""Exact bytes, FLOPs and time of one training step.

What lives here only watches: it changes no model, keeps no tensor alive and decides nothing. `measure` is the way in.
"""

from actmem.measuring.measurement import CATEGORIES, PHASES, Measurement, PeakOp, Sample
from actmem.measuring.meter import measure

__all__ = ["CATEGORIES", "PHASES", "Measurement", "PeakOp", "Sample", "measure"]
