"""Whether a head's weights have been written since it was called.

torch counts the writes to a tensor, but not all of them: not those of fused optimizers, nor those of `foreach` ones to
a DTensor. So the steps of optimizers are counted too, from the first head that is split.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["WeightVersions"]

_NUMBERS = itertools.count(1)
_LAST: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""The number of each optimizer's last step, of all steps."""


class WeightVersions:
    """The weights as they are when this is made.

    Args:
        module: the head, whose parameters an optimizer may have.
        weights: what the logits are computed from.
    """

    def __init__(self, module: nn.Module, weights: Sequence[Tensor]) -> None:
        _count_steps()
        self._weights = (*weights, *module.parameters())
        self._versions = [w._version for w in self._weights]
        self._number = max(_LAST.values(), default=0)

    def are_written(self) -> bool:
        """Whether somebody has written on the weights since."""
        if self._versions != [w._version for w in self._weights]:
            return True
        known = {id(w) for w in self._weights}
        later = [optimizer for optimizer, number in _LAST.items() if number > self._number]
        return any(id(p) in known for optimizer in later for group in optimizer.param_groups for p in group["params"])


@functools.cache
def _count_steps() -> None:
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    del args, kwargs
    _LAST[optimizer] = next(_NUMBERS)
