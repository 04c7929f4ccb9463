"""`actmem demo`: train a small Llama-like model three ways; show what changed, and what did not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import actmem
from actmem.cli.commands import Demo
from actmem.cli.failures import ANSWER_IS_NO
from actmem.cli.schema import Document
from actmem.cli.screen import Screen

__all__ = ["EXAMPLE", "LlamaLike", "Row", "Size", "compare", "for_readers", "run"]

EXAMPLE = """\
import actmem

applied = actmem.apply(model, actmem.Budget("20GiB"), example=batches[0])
# or by name: actmem.apply(model, actmem.Full())

for ids, labels in batches:  # train as before
    model(ids, labels).backward()
    optimizer.step()
    optimizer.zero_grad()

print(applied.report())  # what was saved and recomputed
applied.remove()  # the model is as it was
"""
"""The code that a user writes."""


# -------------------------------------------------------------------- the model: plain PyTorch, knows nothing of actmem


@dataclass(frozen=True)
class Size:
    """Sizes of the model and its batch."""

    dim: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 2
    ffn: int = 704
    vocab: int = 1000
    batch: int = 4
    length: int = 256
    dropout: float = 0.0

    def tokens(self, seed: int = 1) -> tuple[Tensor, Tensor]:
        """Return a random batch: token ids, and the same ids shifted by one as labels."""
        drawn = torch.Generator().manual_seed(seed)
        ids = torch.randint(self.vocab, (self.batch, self.length + 1), generator=drawn)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Attention(nn.Module):
    """Causal grouped-query attention with rotary position embeddings."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.dim // size.num_heads
        self.dropout = size.dropout
        self.q_proj = nn.Linear(size.dim, size.dim, bias=False)
        self.k_proj = nn.Linear(size.dim, size.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(size.dim, size.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(size.dim, size.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend from every position to itself and the positions before it."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """The gated feed-forward network."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.dim, size.ffn, bias=False)
        self.up_proj = nn.Linear(size.dim, size.ffn, bias=False)
        self.down_proj = nn.Linear(size.ffn, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Project up, apply the gate, project down."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.dim)
        self.attention = Attention(size)
        self.mlp_norm = nn.RMSNorm(size.dim)
        self.mlp = FeedForward(size)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply attention, then the feed-forward network, each with a residual connection."""
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class LlamaLike(nn.Module):
    """A Llama-like decoder with seeded weights. Called with token ids and labels, it returns the loss."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]  # torch leaves it untyped
            _seed(0)
            self.embed = nn.Embedding(size.vocab, size.dim)
            self.layers = nn.ModuleList([Layer(size) for _ in range(size.num_layers)])
            self.norm = nn.RMSNorm(size.dim)
            self.head = nn.Linear(size.dim, size.vocab, bias=False)
        half = size.dim // size.num_heads // 2
        angles = torch.outer(torch.arange(size.length), 10000.0 ** (-torch.arange(half) / half)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of predicting `labels`."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


# -------------------------------------------------------------------- the comparison


@dataclass
class Row:
    """The cost of training under one mode, and whether the results equal those of plain training."""

    name: str
    peak_bytes: int = 0
    saved_bytes: int = 0
    replayed_flops: int = 0
    forward_flops: int = 0
    num_replayed: int = 0
    """Operators that were replayed in one step."""
    seconds: list[float] = field(default_factory=list[float])
    """Time of each timed step."""
    time_ratio: float = 1.0
    """Median ratio of step times to plain training's."""
    loss: float = 0.0
    gradients_equal: bool = True
    """Whether every gradient of every step is bitwise equal to plain training's."""
    loss_equal: bool = True
    """Whether the loss of every step is bitwise equal to plain training's."""


@dataclass
class _Run:
    """One model being trained."""

    row: Row
    model: LlamaLike
    optimizer: torch.optim.Optimizer
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.optimizer.zero_grad()
        loss = self.model(*batch)
        loss.backward()
        self.optimizer.step()  # pyright: ignore[reportUnknownMemberType]  # torch leaves it untyped
        self.loss = loss.detach()


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def compare(size: Size, num_steps: int = 6) -> list[Row]:
    """Train the same model plain, under `Full` and under `Selective`, one step of each in turn; compare all gradients.

    The first step under a mode also observes and checks itself, so it is not timed. The last step is measured.
    """
    modes = {
        "plain": None,
        "full": actmem.Full(),
        "selective": actmem.Selective(save=["attention", actmem.every_second("matmul")]),
    }
    runs: list[_Run] = []
    for name, mode in modes.items():
        model = LlamaLike(size)
        if mode is not None:
            actmem.apply(model, mode)
        runs.append(_Run(Row(name), model, torch.optim.AdamW(model.parameters(), lr=1e-3)))
    plain = runs[0]
    for index in range(num_steps):
        batch = size.tokens(seed=index)
        for run in runs:
            _seed(index)
            started = perf_counter()
            run.step(batch)
            if index > 0:
                run.row.seconds.append(perf_counter() - started)
        _note_equality(runs, plain)
    for run in runs:
        _seed(num_steps)
        batch = size.tokens(seed=num_steps)
        step: Callable[[], None] = lambda run=run, batch=batch: run.step(batch)  # noqa: E731
        measured = actmem.measure(step, model=run.model, optimizer=run.optimizer)
        row = run.row
        row.peak_bytes, row.saved_bytes = measured.peak_bytes, measured.saved_bytes
        row.forward_flops, row.replayed_flops = measured.forward_flops, measured.replayed_flops
        row.num_replayed = measured.num_replayed_ops
        row.loss = run.loss.item()
        row.time_ratio = median(a / b for a, b in zip(row.seconds, plain.row.seconds, strict=True))
    _note_equality(runs, plain)
    return [run.row for run in runs]


def _note_equality(runs: Sequence[_Run], plain: _Run) -> None:
    for run in runs:
        pairs = zip(plain.model.parameters(), run.model.parameters(), strict=True)
        run.row.gradients_equal &= all(_same_bits(p.grad, q.grad) for p, q in pairs)
        run.row.loss_equal &= _same_bits(plain.loss, run.loss)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]  # torch leaves it untyped


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors are bitwise equal, so 0.0 differs from -0.0; a missing gradient equals nothing."""
    if a is None or b is None:
        return False
    return a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="The same training, three ways", box=SIMPLE_HEAD)
    table.add_column("mode")
    headings = "peak\nMiB", "saved\nMiB", "replayed\nGFLOP", "of\nforward", "time", "gradients\nequal", "loss\nequal"
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.peak_bytes / 2**20:.1f}",
            f"{row.saved_bytes / 2**20:.1f}",
            f"{row.replayed_flops / 1e9:.2f}",
            f"{row.replayed_flops / row.forward_flops:.0%}",
            f"{row.time_ratio:.2f}x",
            "yes" if row.gradients_equal else "NO",
            "yes" if row.loss_equal else "NO",
        )
    return table


# -------------------------------------------------------------------- a budget


@dataclass(frozen=True)
class Kept:
    """A budget, its plan, and the measured peak under that plan."""

    plan: actmem.Plan
    budget_bytes: int
    plain_bytes: int
    measured_bytes: int
    equal: bool
    """Whether the step is bitwise equal to one of plain training."""


def keep_budget(size: Size, fraction: float = 0.5) -> Kept:
    """Fit the small model into a fraction of its plain peak, verify and apply the plan, and measure a step."""
    model, batch = LlamaLike(size), size.tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = _Run(Row("budget"), model, optimizer)
    run.step(batch)
    optimizer.zero_grad()
    plain = actmem.measure(lambda: run.step(batch), model=model, optimizer=optimizer)
    optimizer.zero_grad()
    budget_bytes = int(plain.tensor_bytes * fraction)
    plan = actmem.fit(model, batch, budget=budget_bytes, optimizer="adamw")
    equal = actmem.verify(model, batch, plan).ok
    with actmem.apply(model, plan):
        run.step(batch)
        optimizer.zero_grad()
        measured = actmem.measure(lambda: run.step(batch), model=model, optimizer=optimizer)
    return Kept(plan, budget_bytes, plain.tensor_bytes, measured.tensor_bytes, equal)


def plan_large(name: str = "llama-3.1-8b", device: str = "h100-80gb") -> tuple[actmem.Frontier, actmem.Plan]:
    """Plan for a large model from its published sizes, for a device that need not be present. Nothing is computed."""
    from actmem import catalogue

    model, batch = catalogue.build(name).train(), catalogue.example(name, sequence=8192)
    plan = actmem.fit(model, batch, budget=1.0, device=device, optimizer="adamw_fused")
    found = actmem.frontier(actmem.profile(model, batch, optimizer="adamw_fused"), device, num_points=2)
    return found, plan


def _budget_table(found: actmem.Frontier, plan: actmem.Plan, name: str) -> Table:
    assert plan.predicted is not None
    table = Table(title=name, box=SIMPLE_HEAD)
    table.add_column("mode")
    for heading in ("predicted\npeak GiB", "fits", "predicted\nstep", "replayed\nTFLOP"):
        table.add_column(heading, justify="right")
    p = plan.predicted
    fitted = ("fitted plan", p.peak_bytes, p.step_time_ratio, p.replayed_flops)
    rows = [*((m.name, m.peak_bytes, m.step_time_ratio, m.replayed_flops) for m in found.modes), fitted]
    beside = 0 if p.reserved_bytes is None else p.reserved_bytes + p.outside_bytes - p.peak_bytes
    for mode, peak, ratio, flops in rows:
        fits = "yes" if peak + beside <= p.budget_bytes else "no"
        table.add_row(mode, f"{peak / 2**30:.1f}", fits, f"{ratio:.3f}x", f"{flops / 1e12:.1f}")
    return table


def _show_budgets(console: Any) -> bool:
    """Print what a budget does. Return whether it was kept and the training was unchanged."""
    size = Size(batch=8)
    kept = keep_budget(size)
    assert kept.plan.predicted is not None
    console.print(
        f"A budget: half of the plain peak of {kept.plain_bytes / 2**20:.1f} MiB (batch {size.batch}).\n"
        f"  budget    {kept.budget_bytes / 2**20:8.1f} MiB\n"
        f"  predicted {kept.plan.predicted.peak_bytes / 2**20:8.1f} MiB\n"
        f"  measured  {kept.measured_bytes / 2**20:8.1f} MiB\n"
        f"  gradients and loss bitwise equal to plain training: {'yes' if kept.equal else 'NO'}\n"
        f"  predicted step {kept.plan.predicted.step_time_ratio:.3f}x of plain; no plan in this budget is below "
        f"{kept.plan.predicted.bound:.3f}x\n"
    )
    found, plan = plan_large()
    assert plan.predicted is not None
    console.print(
        _budget_table(
            found, plan, "Llama-3.1-8B, bf16, fused AdamW, 8192 tokens, one H100 80 GB (its roofline, not a run)"
        )
    )
    console.print(
        f"the budget is all of the card's memory, {plan.predicted.budget_bytes / 2**30:.1f} GiB, of which "
        f"{plan.predicted.outside_bytes / 2**30:.1f} GiB lie outside torch; no plan in it is below "
        f"{plan.predicted.bound:.3f}x\n"
    )
    return kept.equal and kept.measured_bytes <= kept.budget_bytes


def for_readers() -> int:
    """Run the demo. Return 1 if any mode had no effect or changed the training, else 0."""
    console: Any = _Console()
    size = Size()
    num_steps = 6
    num_parameters = sum(p.numel() for p in LlamaLike(size).parameters())
    console.print(
        f"A Llama-like model: {num_parameters / 1e6:.1f} million parameters, {size.num_layers} layers, "
        f"batch {size.batch} x {size.length}.\n{num_steps + 1} steps of AdamW on the CPU, each under every mode.\n"
    )
    rows = compare(size, num_steps)
    console.print(_table(rows))
    console.print(
        "peak: all live tensor bytes, including parameters, gradients and optimizer state\n"
        "saved: what forward leaves for backward; replayed: what backward runs again\n"
        "time: median ratio to plain; equal: bit for bit, in every step\n"
    )
    budget_kept = _show_budgets(console)
    console.print("What you would write:\n")
    console.print(EXAMPLE, markup=False, highlight=False)
    changed = [r.name for r in rows if not (r.gradients_equal and r.loss_equal)]
    idle = [r.name for r in rows[1:] if not r.num_replayed or r.peak_bytes >= rows[0].peak_bytes]
    if changed:
        print(f"error: gradients or loss differ from plain training under {', '.join(changed)}", file=sys.stderr)
    if idle:
        print(f"error: nothing was replayed, or no memory was freed, under {', '.join(idle)}", file=sys.stderr)
    if not budget_kept:
        print("error: the budget was not kept, or the plan changed the training", file=sys.stderr)
    return 1 if changed or idle or not budget_kept else 0


@dataclass(frozen=True, kw_only=True)
class DemoShown(Document):
    """Output of `actmem demo`."""

    command: Literal["demo"] = "demo"
    ok: bool
    rows: tuple[Row, ...]
    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    budget_equal: bool
    """Whether the step under the budget is bitwise equal to one of plain training."""


def run(_: Demo, screen: Screen) -> tuple[DemoShown, int]:
    """Train the small model and return only the figures."""
    with screen.progress("training under three modes"):
        rows = compare(Size())
    with screen.progress("keeping a budget"):
        kept = keep_budget(Size(batch=8))
    assert kept.plan.predicted is not None
    equal = all(row.gradients_equal and row.loss_equal for row in rows)
    works = all(row.num_replayed and row.peak_bytes < rows[0].peak_bytes for row in rows[1:])
    ok = equal and works and kept.equal and kept.measured_bytes <= kept.budget_bytes
    shown = DemoShown(
        ok=ok,
        rows=tuple(rows),
        budget_bytes=kept.budget_bytes,
        predicted_bytes=kept.plan.predicted.peak_bytes,
        measured_bytes=kept.measured_bytes,
        budget_equal=kept.equal,
    )
    return shown, 0 if ok else ANSWER_IS_NO
