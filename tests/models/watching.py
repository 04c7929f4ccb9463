"""Train beside plain training, to the bit, and see what a mode decided, dropped and ran again."""

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import actmem
from actmem import Report
from actmem.engine.replay import replaying
from actmem.engine.verdicts import Traced
from actmem.modes import Mode
from actmem.reporting import Trace
from tests.zoo import Batch, Case


class Replays(TorchDispatchMode):
    """Count the operators that run again, by packet."""

    def __init__(self) -> None:
        super().__init__()
        self.packets: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if replaying():
            self.packets[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Seen:
    """What a mode did in two steps, whose loss, gradients and buffers were those of plain training."""

    report: Report
    trace: Trace
    replayed: Counter[str]
    """Operators that ran again in the second step, such as `aten.mm`, and how often."""

    @property
    def rows(self) -> list[tuple[tuple[str, ...], Traced]]:
        """All decisions, each with the blocks in which it was taken."""
        return [(block.paths, row) for block in self.trace.blocks for row in block.rows]

    def decided(self, decision: str, *, op: str = "") -> set[tuple[str, str]]:
        """Return the (module, operator) pairs with this decision, of operators whose name starts so."""
        return {(r.module, r.op) for _, r in self.rows if r.decision == decision and r.op.startswith(op)}

    @property
    def replayed_products(self) -> set[str]:
        """Matrix products, convolutions and fused attention that ran again."""
        dear = ("matmul", "batched_matmul", "grouped_matmul", "convolution", "attention")
        return {op for op in self.replayed if any(actmem.ops.matches(group, op, "default") for group in dear)}

    def assert_it_did_something(self) -> None:
        assert self.report.recomputed_bytes > 0, "nothing was dropped"
        assert self.report.held_bytes < self.report.plain_bytes, "nothing was gained"
        assert self.replayed, "nothing ran again"


def watched(
    model: nn.Module,
    batch: Batch,
    mode: Mode,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    precision: str = "fp32",
    **options: Any,
) -> Seen:
    """Take two plain steps with a copy of the model and two under the mode, and demand the same bits of both."""
    plain = copy.deepcopy(model)
    expected = [_step(plain, batch, loss, precision) for _ in range(2)]
    with actmem.apply(model, mode, **options) as applied, Replays() as replays:
        for step, wanted in enumerate(expected):
            replays.packets.clear()
            found = _step(model, batch, loss, precision)
            assert found.keys() == wanted.keys()
            differ = [name for name in wanted if not torch.equal(wanted[name], found[name])]
            assert not differ, f"step {step} under {mode}: {differ[:3]} differ"
        return Seen(applied.report(), applied.trace(), replays.packets)


def watched_case(case: Case, mode: Mode, *, precision: str = "fp32", **options: Any) -> Seen:
    """Do the same with a model of the zoo."""
    model = case.build()
    return watched(model, case.batch(model), mode, loss=case.loss, precision=precision, **options)


def _step(model: nn.Module, batch: Batch, loss: Callable[[Any], Tensor] | None, precision: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext():
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        value = output.loss if loss is None else loss(output)
    value.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert gradients, "no parameter has a gradient"
    return {"loss": value.detach(), **gradients, **{name: b.clone() for name, b in model.named_buffers()}}
