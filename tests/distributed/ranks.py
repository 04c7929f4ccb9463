"""Start two real ranks on gloo, run cases in them, and compare what they trained."""

from __future__ import annotations

import hashlib
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import actmem
from actmem.distributedcompat import forget_meshes
from tests.engine.cases import Operators
from tests.patience import PATIENCE_SECONDS

NUM_RANKS = 2
NUM_MEASURED = 6
_BREATH_SECONDS = 0.005
Case = Callable[[int], None]
Outcomes = dict[str, list[str]]

MODES = {
    "Full": actmem.Full(),
    "Selective": actmem.Selective(save=["attention", actmem.every_second("matmul")]),
    "Targets": actmem.Targets(["mlp"]),
}


# -------------------------------------------------------------------- starting


def run(cases: Sequence[Case], folder: Path) -> Outcomes:
    """Run every case on two ranks, each in a group of its own. Return what each rank reports: nothing, or its error."""
    torch.multiprocessing.spawn(_worker, args=(tuple(cases), str(folder)), nprocs=NUM_RANKS)
    return {c.__name__: [(folder / f"{c.__name__}.{rank}").read_text() for rank in range(NUM_RANKS)] for c in cases}


def _worker(rank: int, cases: tuple[Case, ...], folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch.distributed.nn is deprecated, and used
    for case in cases:
        name = case.__name__
        store = dist.FileStore(f"{folder}/{name}.store", NUM_RANKS)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=PATIENCE_SECONDS)
        )
        try:
            case(rank)
            text = ""
        except Exception:  # noqa: BLE001  # whatever it is, the test of this case shows it
            text = traceback.format_exc()
        Path(folder, f"{name}.{rank}").write_text(text)
        dist.destroy_process_group()
        forget_meshes()


# -------------------------------------------------------------------- training and comparing


def local(t: Any) -> Tensor:
    """Return this rank's part of a tensor."""
    return t.to_local() if hasattr(t, "to_local") else t


def bits(t: Any) -> str:
    """Return a digest of the bits of this rank's part of a tensor."""
    return hashlib.sha256(local(t).detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def step_bytes(step: Callable[[], Any], model: nn.Module, optimizer: Any) -> int:
    """Return the peak of a step in tensors.

    A thread of gloo's may let go of a buffer after the rank has gone on, the more often the busier the machine is. That
    only ever adds bytes, so the smallest of several steps is the step's own peak. Every rank runs equally many.
    """
    return min(actmem.measure(step, model=model, optimizer=optimizer).tensor_bytes for _ in range(NUM_MEASURED))


class _Patient(TorchDispatchMode):
    """Sleeps after each collective, so that gloo's threads let go of its buffers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.wait_tensor.default:
            time.sleep(_BREATH_SECONDS)
        return found


def patiently(step: Callable[[], Any]) -> Callable[[], None]:
    """Return a step that waits a little after each collective. With many of them, no step is free of late buffers."""

    def run_slowly() -> None:
        with _Patient():
            step()

    return run_slowly


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else local(p.grad).clone() for n, p in model.named_parameters()}


def train(
    model: nn.Module,
    batch: Tensor,
    num_steps: int = 2,
    before: Callable[[int], Any] = lambda _: nullcontext(),
) -> list[Any]:
    """Train a few steps. Return the loss and the gradients of each; those of two steps are added up."""
    found: list[Any] = []
    for n in range(num_steps):
        with before(n):
            loss = model(batch * (n + 1)).square().sum()
            loss.backward()
        found.append((loss.detach(), gradients(model)))
        if n % 2:
            model.zero_grad()
    return found


def assert_same(plain: list[Any], managed: list[Any]) -> None:
    """Assert that two trainings gave the same bits."""
    for (loss, grads), (other_loss, other_grads) in zip(plain, managed, strict=True):
        assert torch.equal(loss, other_loss)
        assert grads.keys() == other_grads.keys()
        assert any(g is not None and g.any() for g in grads.values())
        for name, grad in grads.items():
            other = other_grads[name]
            assert (grad is None and other is None) or torch.equal(grad, other), name


# -------------------------------------------------------------------- counting

_COMMUNICATES = ("c10d.", "_c10d_functional.", "c10d_functional.")
_WAITS = ("wait_tensor", "_wrap_tensor_autograd", "barrier")


class Collectives(Operators):
    """Count the collectives that run while entered, those that a replay issues apart."""

    def issued(self) -> Counter[str]:
        return _collectives(self.others)

    def again(self) -> Counter[str]:
        return _collectives(self.replayed)


def _collectives(counts: Counter[str]) -> Counter[str]:
    return Counter(
        {name: n for name, n in counts.items() if name.startswith(_COMMUNICATES) and not any(w in name for w in _WAITS)}
    )


def check_modes(
    build: Callable[[], nn.Module],
    batch: Tensor,
    *,
    modes: dict[str, Any] = MODES,
    finish: Callable[[nn.Module], nn.Module] = lambda model: model,
    num_steps: int = 3,
) -> Counter[str]:
    """Assert that under each mode a model trains as it does plain, and communicates as often. Return how often.

    Args:
        build: makes the model.
        batch: what this rank trains on.
        modes: what to apply, by name.
        finish: what is done to the model after `apply`: sharding, say.
        num_steps: how many steps to train.
    """
    plain_counts = Collectives()
    model = finish(build())
    with plain_counts:
        plain = train(model, batch, num_steps)
    assert plain_counts.issued(), "nothing was communicated"
    for name, mode in modes.items():
        model = build()
        applied = actmem.apply(model, mode)
        model = finish(model)
        counts = Collectives()
        with counts:
            managed = train(model, batch, num_steps)
        assert_same(plain, managed)
        assert counts.issued() == plain_counts.issued(), name
        assert not counts.again(), name
        assert applied.report().num_replayed > 0, name
        assert sum(counts.replayed.values()) > 0, name
        applied.remove()
    return plain_counts.issued()
