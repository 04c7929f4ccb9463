"""torch.compile's own memory budget. Imported from `compat.torchtitan`, where `MemoryBudgetAC` stands for it."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

import torch
from torch import nn

from actmem.compilercompat import set_compiler_budget
from actmem.errors import ModeError, UnsupportedError
from actmem.structure import check_module

__all__ = ["AppliedBudget", "CompilerBudget"]


@dataclass(frozen=True)
class CompilerBudget:
    """Leave the choice to torch.compile's own budget: a fraction of what its graphs would save. Not actmem's engine.

    It affects every graph that is compiled while it is applied, works under torch.compile only, and has defects of its
    own: a smaller budget can mean a higher peak, because the compiler's knapsack does not see what a recomputation must
    hold, and below 1.0 it has been seen to recompute random operators with different numbers. It is included for
    comparison. docs/compile.md has the figures.

    >>> CompilerBudget(0.5)
    CompilerBudget(fraction=0.5)

    Raises:
        ModeError: if the fraction is not between 0 and 1.
    """

    fraction: float
    """0 recomputes everything that the compiler can recompute, 1 is the compiler's default."""

    def __post_init__(self) -> None:
        if type(self.fraction) not in (int, float) or not 0 <= self.fraction <= 1:
            raise ModeError(
                f"fraction = {self.fraction!r} is not permitted. Expected a number from 0 to 1: CompilerBudget(0.5)."
            )

    def apply(self, model: nn.Module) -> AppliedBudget:
        """Set the budget. The model is refused where it then trains without being compiled."""
        check_module(model)
        return AppliedBudget(self, model)


class AppliedBudget:
    """The compiler's budget while it is set; `remove()` restores it. Also a context manager, which removes on leaving.

    Where several are applied, the latest one still applied is in force, whatever the order in which they are removed.
    """

    def __init__(self, budget: CompilerBudget, model: nn.Module) -> None:
        self.budget = budget
        self._before = set_compiler_budget(budget.fraction)
        self._hook = model.register_forward_pre_hook(_refuse_eager)
        _APPLIED.append(self)

    def remove(self) -> None:
        """Restore the compiler's setting. May be called twice."""
        if self not in _APPLIED:
            return
        later = _APPLIED[_APPLIED.index(self) + 1 :]
        if later:
            later[0]._before = self._before
        else:
            set_compiler_budget(self._before)
        _APPLIED.remove(self)
        self._hook.remove()

    def __enter__(self) -> AppliedBudget:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


_APPLIED: list[AppliedBudget] = []


def _refuse_eager(model: nn.Module, _args: object) -> None:
    if torch.compiler.is_compiling() or not model.training or not torch.is_grad_enabled():
        return
    compiled = ("_compiled_call_impl", "_orig_mod")  # set by module.compile(), and by torch.compile(module)
    if not any(getattr(module, name, None) is not None for module in model.modules() for name in compiled):
        raise UnsupportedError(
            f"{type(model).__name__} runs in eager, and CompilerBudget is a setting of torch.compile that does nothing "
            "there. Compile the model: model.compile(), or choose a mode of actmem's own, such as actmem.Full()."
        )
