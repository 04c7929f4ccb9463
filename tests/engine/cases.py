"""Small blocks, and the comparison with plain training, that the tests of the engine share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import actmem
from actmem import Full, Report, Rule, Rules
from actmem.engine.replay import replaying

RECOMPUTE = Full()
SAVE_MATMUL = Rules([Rule("save", op="matmul"), Rule("save", op="batched_matmul"), Rule("recompute")])
MODES = {"R": RECOMPUTE, "S": SAVE_MATMUL}

Body = Callable[[Any, Tensor], Any]
Step = Callable[[nn.Module, Tensor], Tensor]


class Program(nn.Module):
    """A block whose forward is a matmul, a tanh, and then any function of the block and the result."""

    def __init__(self, body: Body, width: int = 8, parts: dict[str, nn.Module] | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.v = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.parts = nn.ModuleDict(parts or {})
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, torch.tanh(x @ self.w))


class AddFirst(nn.Module):
    """Plain training does not save the block's input, only its sum with 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(8) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return ((x + 1) @ self.w).sin()


class Checkpointed(nn.Module):
    """The same block under torch's checkpoint."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)


def stack(
    body: Body, *, num_blocks: int = 2, width: int = 8, parts: Callable[[], dict[str, nn.Module]] = dict
) -> nn.Module:
    """Build blocks in a row from a seed of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(*[Program(body, width, parts()) for _ in range(num_blocks)])


def batch(rows: int = 6, width: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(rows, width, generator=generator).requires_grad_()


def total(out: Any) -> Tensor:
    """A loss that gives each element of each output a gradient of its own."""
    loss = torch.zeros(())
    for t in tensors(out):
        if t.is_complex():
            t = torch.view_as_real(t.resolve_conj())
        if t.is_floating_point() and t.requires_grad:
            t = t.float()
            loss = loss + (t * torch.linspace(-1, 1, t.numel()).reshape(t.shape)).sum() + t.square().mean()
    return loss


def tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from tensors(y)
    elif isinstance(x, dict):
        for y in x.values():
            yield from tensors(y)
    elif hasattr(x, "__dataclass_fields__"):
        for name in x.__dataclass_fields__:
            yield from tensors(getattr(x, name))


def simple_step(model: nn.Module, x: Tensor) -> Tensor:
    loss = total(model(x))
    loss.backward()
    return loss.detach()


def outcome(model: nn.Module, x: Tensor, step: Step, seed: int = 3) -> dict[str, Tensor | None]:
    """Run one step, and return everything that plain training would have given."""
    model.zero_grad()
    x.grad = None
    torch.manual_seed(seed)
    found: dict[str, Tensor | None] = {"loss": step(model, x).clone()}
    found["x.grad"] = None if x.grad is None else x.grad.clone()
    found |= {f"{n}.grad": None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    found |= {n: p.detach().clone() for n, p in model.named_parameters()}
    found |= {n: b.clone() for n, b in model.named_buffers()}
    found["generator"] = torch.get_rng_state()
    return found


def assert_same_bits(plain: dict[str, Tensor | None], managed: dict[str, Tensor | None]) -> None:
    assert plain.keys() == managed.keys()
    for name, a in plain.items():
        b = managed[name]
        if a is None or b is None:
            assert a is b, name
            continue
        assert a.dtype == b.dtype and a.shape == b.shape, name
        if not torch.equal(a, b):
            a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a, b))
            same = torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
            assert same, f"{name}: off by {float((a.double() - b.double()).abs().max())}"


def compare(
    build: Callable[[], nn.Module],
    mode: Any,
    *,
    x: Callable[[], Tensor] = batch,
    step: Step = simple_step,
    num_steps: int = 2,
    blocks: str | None = None,
    replays: Iterable[str] = (),
    opaque: Any = "hold",
) -> Report:
    """Train a plain model and an applied one side by side; the second step runs without the self-check.

    Args:
        build: makes the model; the same one each time.
        mode: what to apply.
        x: makes the batch; the same one each time.
        step: runs forward and backward, and returns the loss.
        num_steps: how often.
        blocks: as for `actmem.apply`.
        replays: operators, as "aten.mul", of which at least one call must have been replayed.
        opaque: as for `actmem.apply`.
    """
    plain, managed = build(), build()
    x_plain, x_managed = x(), x()
    with actmem.apply(managed, mode, blocks=blocks, opaque=opaque) as applied:
        for n in range(num_steps):
            expected = outcome(plain, x_plain, step, seed=3 + n)
            assert_same_bits(expected, outcome(managed, x_managed, step, seed=3 + n))
        report = applied.report()
    assert any(g is not None and g.any() for name, g in expected.items() if name.endswith(".grad"))
    assert report.num_replayed > 0
    counts = replayed(report)
    for op in replays:
        assert any(f"{name}.".startswith(f"{op}.") for name in counts), f"{op} was not replayed: {dict(counts)}"
    return report


def replayed(report: Report) -> Counter[str]:
    """Count the values that the observed step replayed, by operator."""
    found: Counter[str] = Counter()
    for kind in report.kinds:
        for row in kind.rows:
            if row.replayed:
                found[row.op] += row.replayed * kind.num_blocks
    return found


def never(report: Report) -> dict[str, str]:
    """Return the operators whose results are held because they are never replayed, with the reason."""
    return {row.op: row.why for kind in report.kinds for row in kind.rows if row.decision == "never"}


class Operators(TorchDispatchMode):
    """Count the operators that run, replayed ones apart."""

    def __init__(self) -> None:
        super().__init__()
        self.replayed: Counter[str] = Counter()
        self.others: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (self.replayed if replaying() else self.others)[str(func)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def modes_unchanged() -> Iterator[None]:
    """Assert that no dispatch mode and no saved-tensor hook is left behind."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    before = list(_get_current_dispatch_mode_stack())
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    yield
    assert list(_get_current_dispatch_mode_stack()) == before
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is hooks
