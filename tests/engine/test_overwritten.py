"""Buffers that a later block call overwrites while an earlier one needs them: copied for it, counted, and only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm as spectral_norm_by_hook
from torch.nn.utils.parametrizations import spectral_norm

import actmem
from tests.engine.cases import MODES, RECOMPUTE, Operators, batch, compare, outcome, total

both = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
WIDTH = 32  # so that what is copied is more than a trifle


def discriminator(norm: Callable[[nn.Module], nn.Module] = spectral_norm) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(*[nn.Sequential(norm(nn.Linear(WIDTH, WIDTH)), nn.LeakyReLU(0.2)) for _ in range(3)])


class Updated(nn.Module):
    """Move a buffer on, and compute from where it was and where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(WIDTH) * 0.5)
        self.register_buffer("state", torch.linspace(-1, 1, 6 * WIDTH).view(6, WIDTH))
        self.state: Tensor

    def forward(self, x: Tensor) -> Tensor:
        before = ((x @ self.w).sin() + self.state).exp().tanh()
        with torch.no_grad():
            self.state.mul_(0.5).add_(before)
        return ((x @ self.w) + self.state).sin() * before


class Scratch(nn.Module):
    """Build what it needs in a buffer that all blocks use."""

    def __init__(self, scratch: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(WIDTH) * 0.5)
        self.scratch = scratch

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.mul(x, 2.0, out=self.scratch)
        return ((x @ self.w) + self.scratch).sin().exp().tanh()


def with_scratch() -> nn.Module:
    scratch = torch.empty(6, WIDTH)
    return nn.Sequential(*[Scratch(scratch) for _ in range(3)])


class Passed(nn.Module):
    """Make two tensors, the first of which the next block changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(WIDTH) * 0.5)

    def forward(self, x: Any) -> Any:
        x = x[0].mul_(2) + x[1] if isinstance(x, tuple) else x
        product = x @ self.w
        return product, (product + 1).sin()


def twice(model: nn.Module, x: Tensor) -> Tensor:
    loss = total(model(x)) - total(model(x * 0.5 + 1))
    loss.backward()
    return loss.detach()


def once(model: nn.Module, x: Tensor) -> Tensor:
    loss = total(model(x))
    loss.backward()
    return loss.detach()


def wide() -> Tensor:
    return batch(6, WIDTH)


@both
@pytest.mark.parametrize("norm", [spectral_norm, spectral_norm_by_hook], ids=["parametrization", "hook"])
def test_a_discriminator_with_spectral_norm_may_run_twice_before_backward(norm: Any, mode: Any) -> None:
    compare(lambda: discriminator(norm), mode, x=wide, step=twice, num_steps=3)


@both
def test_a_buffer_may_be_updated_and_read_by_a_block_that_runs_twice(mode: Any) -> None:
    compare(lambda: nn.Sequential(Updated(), Updated()), mode, x=wide, step=twice, num_steps=3, blocks="*")


@both
@pytest.mark.parametrize("step", [once, twice])
def test_blocks_may_share_a_scratch_buffer(step: Any, mode: Any) -> None:
    compare(with_scratch, mode, x=wide, step=step, num_steps=3, blocks="*")


@both
def test_a_block_may_change_in_place_what_the_block_before_it_holds(mode: Any) -> None:
    compare(lambda: nn.Sequential(Passed(), Passed()), mode, x=wide, num_steps=3, blocks="*")


class Halved(nn.Module):
    """Compute from a copy of what it is given, which autograd does not save; the last one halves the original."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(WIDTH) * 0.5)
        self.is_last = is_last

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        x = (x @ self.w + given.double().float()).sin().tanh()
        if self.is_last:
            with torch.no_grad():
                given.detach().mul_(0.5)
        return x


@both
def test_a_block_may_change_a_leaf_that_those_before_it_were_given(mode: Any) -> None:
    x, leaf = wide(), torch.linspace(-1, 1, 6 * WIDTH).view(6, WIDTH)

    def step(apply: bool) -> list[Tensor]:
        blocks = nn.ModuleList([Halved(n == 2) for n in range(3)])
        model, given = nn.ModuleDict({"blocks": blocks}), leaf.clone().requires_grad_()
        if apply:
            actmem.apply(model, mode, blocks="blocks.*")
        for _ in range(3):
            h = x
            for block in blocks:
                h = block(h, given)
            h.sum().backward()
        return [p.grad for p in (*model.parameters(), given) if p.grad is not None]

    for ours, theirs in zip(step(apply=True), step(apply=False), strict=True):
        assert torch.equal(ours, theirs)


@both
def test_hooks_around_the_model_that_keep_what_they_are_given_change_nothing(mode: Any) -> None:
    def hooked(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return twice(model, x)

    compare(lambda: nn.Sequential(Updated(), Updated()), mode, x=wide, step=hooked, blocks="*")


def test_copies_are_counted_and_named_in_the_report() -> None:
    model = nn.Sequential(Updated(), Updated())
    with actmem.apply(model, RECOMPUTE, blocks="*") as applied:
        outcome(model, wide(), twice)
        report = applied.report()
    copies = [row for kind in report.kinds for row in kind.rows if row.decision == "copy"]
    assert copies and all("overwritten" in row.why for row in copies)
    copied = sum(kind.num_blocks * kind.bytes_of("copy") for kind in report.kinds)
    assert copied == 2 * 2 * model[0].state.nbytes  # before and after the update, in both blocks
    assert report.held_bytes >= copied and "copy: overwritten" in str(report)


def clones(step: Callable[[nn.Module, Tensor], Any]) -> int:
    """Count the copies that the second step of a model with a buffer makes."""
    model, x = nn.Sequential(Updated(), Updated()), wide()
    with actmem.apply(model, RECOMPUTE, blocks="*"):
        step(model, x)
        step(model, x)
        with Operators() as operators:
            step(model, x)
    return operators.others["aten.clone.default"]


def test_nothing_is_copied_where_nobody_needs_it() -> None:
    def in_turn(model: nn.Module, x: Tensor) -> None:
        once(model, x)
        once(model, x)

    def without_backward(model: nn.Module, x: Tensor) -> None:
        model(x)
        model(x)

    # A block copies the state that it read before its own update. What else is copied, the other call needs.
    assert clones(once) == 2
    assert clones(in_turn) == 4
    assert clones(without_backward) == 4
    assert clones(twice) == 4 + 2


def test_a_copy_is_made_once_for_all_who_need_it_and_dies_with_their_graphs() -> None:
    model = with_scratch()
    shared = torch.randn(6, WIDTH)
    for block in model:
        block.scratch = shared

    def step() -> None:
        once(model, wide())

    with actmem.apply(model, RECOMPUTE, blocks="*"):
        step()
        step()
        for _ in range(40):
            step()
        holders = shared.untyped_storage()._actmem_holders
        assert len(holders.values) <= 8
        assert all(reference() is None for reference in holders.values)


def test_a_write_outside_every_block_is_refused() -> None:
    model = nn.Sequential(Updated(), Updated())

    def written_between(model: nn.Module, x: Tensor) -> Tensor:
        loss = total(model(x))
        with torch.no_grad():
            model[0].state.zero_()
        loss.backward()
        return loss

    with actmem.apply(model, RECOMPUTE, blocks="*"), pytest.raises(actmem.VersionError, match="changed in place"):
        outcome(model, wide(), written_between)
