"""A small model, every way to manage its activations, every way to be late; and one training of it, to compare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actmem
from actmem import Full, Offload, OffloadActivations, Rule, Rules, SaveEverything, Selective, Targets
from tests.flat_device import FLAT
from tests.late_device import late

Lag = Callable[[], AbstractContextManager[None]]
Trained = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.proj(self.dropout(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return x + self.dropout(self.mlp(x))


class Model(nn.Module):
    """Blocks, each of which may run on its own stream or its own device."""

    def __init__(self, num_blocks: int = 3, dim: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_blocks))
        self.head = nn.Linear(dim, 4)
        self.streams: list[torch.Stream] = []

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x.to(next(block.parameters()).device)
            if not self.streams:
                x = block(x)
                continue
            before, stream = torch.accelerator.current_stream(), self.streams[number % len(self.streams)]
            stream.wait_stream(before)
            with stream:
                made = block(x)
            x.record_stream(stream)
            before.wait_stream(stream)
            made.record_stream(before)
            x = made
        return self.head(x.to(self.head.weight.device)).float().pow(2).mean()


def model(**settings: Any) -> Model:
    torch.manual_seed(0)
    return Model(**settings).to("late")


def batch(rows: int = 32) -> Tensor:
    return torch.randn(2, rows, 32, generator=torch.Generator().manual_seed(1)).to("late")


# --- what is managed, and how late ------------------------------------------------------------------------------------


def _between(most: Any, least: Any) -> int:
    """Return a number of bytes between the predicted peaks of two modes."""
    found = actmem.profile(model(), (batch(),))
    return sum(actmem.predict(found, mode, FLAT).peak_bytes for mode in (most, least)) // 2


_MIXED = [Rule("offload", module="*.qkv"), Rule("save", module="*.mlp*"), Rule("recompute")]

MODES: dict[str, Callable[[], Any]] = {
    "save everything": SaveEverything,
    "full": Full,
    "every second": lambda: Full(every=2),
    "selective": lambda: Selective(save=["matmul"]),
    "targets": lambda: Targets(["norm", "mlp"]),
    "budget": lambda: actmem.Budget(_between(SaveEverything(), Full())),
}
"""What moves nothing."""


def lanes(folder: str) -> dict[str, Callable[[], Any]]:
    """Return every lane: to host memory and to disk, everything, inputs only, by rules, with little in flight."""
    host, disk = Offload(to="host", min_bytes=0), Offload(to="disk", min_bytes=0, directory=folder)
    return {
        "host": lambda: OffloadActivations(to="host", min_bytes=0),
        "host, one at a time": lambda: OffloadActivations(to="host", min_bytes=0, in_flight_bytes=1),
        "host, little": lambda: OffloadActivations(to="host", min_bytes=0, in_flight_bytes=20_000),
        "host, without streams": lambda: OffloadActivations(to="host", min_bytes=0, use_streams=False),
        "disk": lambda: OffloadActivations(to="disk", min_bytes=0, directory=folder),
        "disk, little": lambda: OffloadActivations(to="disk", min_bytes=0, directory=folder, in_flight_bytes=20_000),
        "inputs to host": lambda: Full(offload_inputs=host),
        "inputs to disk": lambda: Full(offload_inputs=disk),
        "mixed": lambda: Rules(_MIXED, offload=host),
        "selective": lambda: Selective(save=["matmul"], offload=host),
        "context, host": lambda: {"to": "host", "min_bytes": 0},
        "context, disk": lambda: {"to": "disk", "min_bytes": 0, "directory": folder},
    }


LAGS: dict[str, Lag] = {
    "prompt": contextlib.nullcontext,
    "kernels late": lambda: late.lag(late.DEFAULT, 100, 100),
    "copies late": lambda: late.lag(late.SIDES, 1000, 1000),
    "copies held": lambda: late.held(late.SIDES),
    "all held": lambda: late.held(late.DEFAULT + late.SIDES),
}


def random_lag(seed: int) -> Lag:
    """Return a lag of its own for every stream, drawn from a seed."""
    drawn = torch.randint(0, 2000, (4,), generator=torch.Generator().manual_seed(seed)).tolist()

    @contextlib.contextmanager
    def lags() -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(late.lag(late.DEFAULT, drawn[0] // 20, drawn[1] // 10, seed))
            stack.enter_context(late.lag(late.OUTS, drawn[2] // 2, drawn[3], seed + 1))
            stack.enter_context(late.lag(late.BACKS, drawn[3] // 2, drawn[2], seed + 2))
            if seed % 3 == 0:
                stack.enter_context(late.held((late.DEFAULT, late.OUTS, late.BACKS)[seed // 3 % 3]))
            yield

    return lags


# --- one training -----------------------------------------------------------------------------------------------------


def train(
    mode: Any = None,
    lag: Lag = contextlib.nullcontext,
    *,
    made: Model | None = None,
    steps: int = 3,
    autocast: bool = False,
) -> Trained:
    """Train for some steps; return losses, parameters and the state of the generator.

    Args:
        mode: a mode, the arguments of `actmem.offload`, or None for plain training.
        lag: how late the device is meanwhile.
        made: the model, if it is not the usual one.
        steps: the first ones check replays, which waits for the device.
        autocast: in bfloat16.
    """
    trained = model() if made is None else made
    x = batch()
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    example = {"example": (x,)} if isinstance(mode, actmem.Budget) else {}
    with contextlib.ExitStack() as stack:
        context: Any = contextlib.nullcontext()
        applied = None
        if isinstance(mode, dict):
            context = actmem.offload(trained, warn_if_no_head=False, **mode)
            stack.callback(context.close)
        elif mode is not None:
            applied = stack.enter_context(actmem.apply(trained, mode, **example))
        torch.manual_seed(7)
        losses: list[Tensor] = []
        stack.enter_context(lag())
        for _ in range(steps):
            with context, torch.autocast("late", torch.bfloat16, enabled=autocast):
                loss = trained(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        late.synchronise()
        moved = context.ledger if isinstance(mode, dict) else None if applied is None else applied.report().moved
        assert moved is None or moved.out_bytes == moved.back_bytes + moved.dropped_bytes > 0
    kept = {name: p.detach().cpu() for name, p in trained.named_parameters()}
    return kept | {"losses": torch.stack(losses).cpu(), "generator": torch.get_device_module("late").get_rng_state()}


def differences(want: Trained, got: Trained) -> list[str]:
    """Return the names of what differs, bitwise."""
    return [name for name in want if not torch.equal(want[name], got[name])]
