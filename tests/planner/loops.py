"""Training loops as people write them: each returns what is profiled, one step of it, and what its optimizers hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import actmem
from tests.planner.steps import rows, stack


@dataclass
class Loop:
    """A loop."""

    model: nn.Module
    step: Callable[[], object]
    optimizers: tuple[Any, ...] = ()
    others: tuple[Any, ...] = ()
    """What else the step changes: modules, schedulers, lists."""
    options: dict[str, Any] = field(default_factory=dict)

    def measured(self, mode: Any) -> actmem.Measurement:
        """Measure the third step under a mode."""
        with actmem.apply(self.model, mode):
            for _ in range(2):
                self.step()
            held = SimpleNamespace(
                param_groups=[group for o in self.optimizers for group in o.param_groups],
                state={p: s for o in self.optimizers for p, s in o.state.items()},
            )
            found = actmem.measure(self.step, model=self.model, optimizer=held)  # type: ignore[arg-type]
            return replace(found, peak_bytes=found.tensor_bytes)


def mean(out: Tensor) -> Tensor:
    return out.square().mean()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def lets_go() -> Loop:
    model, (x,) = stack(), rows(256)
    return Loop(model, lambda: mean(model(x)).backward())


def usual() -> Loop:
    model, (x,) = stack(), rows(256)
    optimizer = adamw(model)
    seen: list[float] = []

    def step() -> None:
        optimizer.zero_grad()
        out = model(x)
        loss = mean(out)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())

    return Loop(model, step, (optimizer,), (seen,))


def accumulates() -> Loop:
    model = stack()
    optimizer = adamw(model)
    batches = [*rows(64), *rows(64), *rows(160)]

    def step() -> None:
        for x in batches:
            (mean(model(x)) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop(model, step, (optimizer,))


def clips() -> Loop:
    model, (x,) = stack(), rows(32)
    optimizer = adamw(model)
    norms: list[Any] = []

    def step() -> None:
        optimizer.zero_grad()
        mean(model(x)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()

    return Loop(model, step, (optimizer,), (norms,))


def gan() -> Loop:
    maker, judge = stack(3), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))
    (noise,), (real,) = rows(96), rows(96)
    first, second = adamw(maker), torch.optim.SGD(judge.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        second.zero_grad()
        made = maker(noise)
        (judge(real).mean() - judge(made.detach()).mean()).backward()
        second.step()
        first.zero_grad()
        judge(made).mean().backward()
        first.step()

    return Loop(maker, step, (first, second), (judge,))


def two_forwards() -> Loop:
    model, (x,), (y,) = stack(), rows(96), rows(48)
    optimizer = adamw(model)

    def step() -> None:
        optimizer.zero_grad()
        one, other = model(x), model(y)
        (mean(one) + mean(other)).backward()
        optimizer.step()

    return Loop(model, step, (optimizer,))


def in_backward() -> Loop:
    model, (x,) = stack(), rows(64)
    each = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}

    def hook(p: Tensor) -> None:
        each[p].step()
        each[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return Loop(model, lambda: mean(model(x)).backward(), tuple(each.values()))


def zeroes() -> Loop:
    model, (x,) = stack(), rows(32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        mean(model(x)).backward()
        optimizer.step()

    return Loop(model, step, (optimizer,))


def mixed() -> Loop:
    model, (x,) = stack(), rows(64)
    optimizer = adamw(model)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = mean(model(x).float())
        loss.backward()
        optimizer.step()

    return Loop(model, step, (optimizer,))


def scheduled() -> Loop:
    model, (x,) = stack(), rows(64)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    count = 0

    def step() -> int:
        nonlocal count
        optimizer.zero_grad()
        mean(nn.functional.dropout(model(x))).backward()
        optimizer.step()
        scheduler.step()
        count += 1
        return count

    return Loop(model, step, (optimizer,), (scheduler,))


def averages() -> Loop:
    model, (x,) = stack(), rows(64)
    optimizer = adamw(model)
    average = copy.deepcopy(model).requires_grad_(False)

    def step() -> None:
        optimizer.zero_grad()
        mean(model(x)).backward()
        optimizer.step()
        with torch.no_grad():
            for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                mine.mul_(0.9).add_(its, alpha=0.1)

    return Loop(model, step, (optimizer,), (average,))


def scales() -> Loop:
    model, (x,) = stack(), rows(64)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(mean(model(x))).backward()
        scaler.step(optimizer)
        scaler.update()

    return Loop(model, step, (optimizer,), (scaler,))


LOOPS = {
    loop.__name__: loop
    for loop in (
        *(lets_go, usual, accumulates, clips, gan, two_forwards, in_backward, zeroes, mixed, scheduled, averages),
        scales,
    )
}
