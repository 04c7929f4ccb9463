"""Random programs: what they are, how one is run, and how two runs are compared.

A program is a seed. Its instructions are drawn while it runs, from `operations`, with choices that depend on shapes
only: a plain run and a run under a mode do the same. Plain autograd refuses some programs (an in-place write to
something it saved): `settled` leaves out instructions that cannot run, and returns None where backward fails.
"""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import actmem
from tests.property.operations import ALL, STRICT
from tests.property.pool import COLS, ROWS, Pool, fitted

BLOCKS = "blocks.*"


@dataclasses.dataclass(frozen=True)
class Program:
    """One random program."""

    seed: int
    strict: bool = False
    """Only of operators that can be replayed, without dead branches."""
    num_steps: int = 10
    """Instructions a block."""
    skip: frozenset[tuple[int, int]] = frozenset()
    """Instructions that are left out, as (block, position)."""
    twice: bool = False
    """Run backward twice."""
    num_calls: int = 1
    """Training steps. From the second on, an engine knows the program."""
    again: bool = False
    """Each step runs the first block a second time before backward."""

    def describe(self) -> str:
        """Name the instructions, for whoever has to find out why a program fails."""
        lines = [repr(self)]
        names = sorted(STRICT if self.strict else ALL)
        for block in range(2):
            ran = [
                f"{i}:{_choices(self, block, i).choice(names)}"
                for i in range(self.num_steps)
                if (block, i) not in self.skip
            ]
            lines.append(f"  block {block}: {' '.join(ran)}")
        return "\n".join(lines)


def _choices(program: Program, block: int, position: int) -> Random:
    # A source of its own for every instruction: leaving one out does not change the others.
    return Random(program.seed * 1_000_003 + block * 1009 + position)


class Block(nn.Module):
    """Run the instructions of a program."""

    def __init__(self, program: Program, index: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(COLS, COLS) * 0.4)
        self.bias = nn.Parameter(torch.randn(COLS) * 0.4)
        self.gain = nn.Parameter(torch.randn(ROWS, COLS) * 0.4)
        self.spare = nn.Parameter(torch.randn(ROWS, COLS) * 0.4)
        self.register_buffer("mean", torch.zeros(COLS))
        self.register_buffer("variance", torch.ones(COLS))
        self.register_buffer("cache", torch.randn(ROWS, COLS))
        self.program, self.index, self.generator = program, index, generator
        self.tolerant = False
        self.failed: list[tuple[int, int]] = []

    def forward(self, x: Tensor, y: Tensor) -> Any:
        program = self.program
        steps = STRICT if program.strict else ALL
        names = sorted(steps)
        pool = Pool(self, [x, y], self.generator, strict=program.strict)
        pool.tensors.append(torch.nn.functional.linear(fitted(x), self.weight, self.bias))
        for position in range(program.num_steps):
            if (self.index, position) in program.skip:
                continue
            r = _choices(program, self.index, position)
            step = steps[r.choice(names)]
            try:
                pool.tensors += [t for t in step(pool, r) if isinstance(t, Tensor)]
            except (RuntimeError, IndexError):
                if not self.tolerant:
                    raise
                self.failed.append((self.index, position))
        return self._outputs(pool)

    def _outputs(self, pool: Pool) -> tuple[Tensor, Tensor]:
        r = _choices(self.program, self.index, -1)
        useful = [t for t in pool.tensors if t.requires_grad]
        if not self.program.strict:
            useful = r.sample(useful, min(len(useful), 4))
        total = torch.nn.functional.linear(pool.tensors[2], self.weight)
        for t in useful:
            total = total + fitted(t)
        last = pool.matrix(r)
        return total.tanh(), last if r.random() < 0.5 or self.program.strict else total.sigmoid()[:, 0:]


class Model(nn.Module):
    """Two blocks in a row, and inputs that may be aliases of each other."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.generator = torch.Generator().manual_seed(program.seed + 1)
        self.program = program
        self.blocks = nn.ModuleList(Block(program, i, self.generator) for i in range(2))
        self.leaf = torch.randn(ROWS, COLS).requires_grad_()
        self.other = torch.randn(ROWS, COLS).requires_grad_()
        self.num_input_bytes = 0
        self.wrote_parameters = False

    def forward(self) -> Tensor:
        r = Random(self.program.seed)
        x = self.leaf * 1.0
        y = r.choice([lambda: x, lambda: x[:2], x.t, x.detach, lambda: self.other * 1.0, lambda: self.other])()
        loss = torch.zeros(())
        blocks = [*self.blocks, self.blocks[0]] if self.program.again else self.blocks
        for block in blocks:
            self.num_input_bytes += sum(
                {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (x, y)}.values()
            )
            versions = [p._version for p in block.parameters()]
            x, y = block(x, y)
            self.wrote_parameters |= [p._version for p in block.parameters()] != versions
            loss = loss + (y * 0.5).sum()
        return loss + (x * x).sum()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Everything that a run must not change."""

    tensors: dict[str, Tensor | None]
    report: Any = None
    num_input_bytes: int = 0
    """Storages that the blocks were given."""
    wrote_parameters: bool = False
    """A block wrote on a parameter. Another call of it may need what was there, and then has to refuse."""

    def difference(self, other: Outcome) -> str | None:
        """Name the first tensor that is not the same to the bit, or return None."""
        for name, x in self.tensors.items():
            y = other.tensors[name]
            if x is None or y is None:
                if x is not y:
                    return f"{name}: {x} and {y}"
            elif not torch.equal(_bits(x), _bits(y)):
                return f"{name} differs by up to {(x.double() - y.double()).abs().max().item():.3g}"
        return None


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def run(program: Program, mode: Any = None, *, checked: bool = True) -> Outcome:
    """Run forward and backward of a program, plain or under a mode, from its own seed."""
    return _run(Model(program), mode, checked=checked)


def _run(model: Model, mode: Any, *, checked: bool) -> Outcome:
    applied = None if mode is None else actmem.apply(model, mode, blocks=BLOCKS)
    if applied is not None and not checked:
        applied.check_replay(0)
    torch.manual_seed(model.program.seed + 2)
    tensors: dict[str, Tensor | None] = {}
    for call in range(model.program.num_calls):
        model.num_input_bytes = 0
        loss = model()
        if model.program.twice:
            loss.backward(retain_graph=True)
            torch.rand(1)
        loss.backward()
        tensors[f"loss {call}"] = loss.detach()
    tensors |= {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
    tensors |= {"gradient of leaf": model.leaf.grad, "gradient of other": model.other.grad}
    tensors |= {f"parameter {n}": p for n, p in model.named_parameters()}
    tensors |= {f"buffer {n}": b for n, b in model.named_buffers()}
    tensors |= {"default generator": torch.get_rng_state(), "own generator": model.generator.get_state()}
    report = None
    if applied is not None:
        report = applied.report() if checked else None
        applied.remove()
    return Outcome(tensors, report, model.num_input_bytes, model.wrote_parameters)


def settled(program: Program) -> tuple[Program, Outcome] | None:
    """Leave out what plain autograd cannot run; return None if backward is refused all the same."""
    for _ in range(4):
        model = Model(program)
        for block in model.blocks:
            block.tolerant = True
        try:
            outcome = _run(model, None, checked=False)
        except RuntimeError:
            outcome = None
        failed = {f for block in model.blocks for f in block.failed}
        if not failed:
            return None if outcome is None else (program, outcome)
        program = dataclasses.replace(program, skip=program.skip | failed)
    return None


def reduced(program: Program, fails: Any) -> Program:
    """Leave out every instruction that a failure does not need."""
    for block in (1, 0):
        for position in reversed(range(program.num_steps)):
            smaller = dataclasses.replace(program, skip=program.skip | {(block, position)})
            if (block, position) not in program.skip and fails(smaller):
                program = smaller
    return program
