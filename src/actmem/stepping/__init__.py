"""Step an optimizer parameter by parameter: in the backward pass, or with its state elsewhere."""

from actmem.stepping.away_state import AwayState, goes_away
from actmem.stepping.optimizer_runner import OptimizerRunner
from actmem.stepping.single_steps import check_groups, single_step

__all__ = ["AwayState", "OptimizerRunner", "check_groups", "goes_away", "single_step"]
