"""The bytes of an optimizer's state are those of the real optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actmem.errors import ModeError
from actmem.profiling.optimizer_state import optimizer_bytes


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    shapes = [(64, 32), (32,), (64, 32), (), (8, 8)]
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def real_state(kind: Any, trained: list[nn.Parameter]) -> int:
    optimizer = kind(trained, foreach=False)
    for p in trained:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "kind"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)]
)
def test_the_state_is_that_of_the_real_optimizer(name: str, kind: Any, dtype: torch.dtype) -> None:
    assert optimizer_bytes(parameters(dtype), name)[0] == real_state(kind, parameters(dtype))


def test_a_frozen_parameter_has_no_state() -> None:
    trained, frozen = parameters(), parameters()
    for p in frozen:
        p.requires_grad_(False)
    assert optimizer_bytes([*trained, *frozen], "adamw") == optimizer_bytes(trained, "adamw")


def test_a_step_on_all_parameters_at_once_needs_more_for_a_moment() -> None:
    state, one_by_one = optimizer_bytes(parameters(), "adamw")
    same, together = optimizer_bytes(parameters(), "adamw", together=True)
    assert state == same + 4 * len(parameters())  # on an accelerator the counters of steps are on the CPU
    assert 0 < one_by_one < together


def test_no_optimizer_takes_nothing() -> None:
    assert optimizer_bytes(parameters(), None) == (0, 0)


def test_another_optimizer_is_refused() -> None:
    with pytest.raises(ModeError, match="optimizer = 'lion' is not known"):
        optimizer_bytes(parameters(), "lion")
