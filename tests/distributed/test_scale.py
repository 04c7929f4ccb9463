"""Profiling a rank does not take longer the more ranks there are, and leaves out only what changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import actmem
from actmem import Layout, distributedcompat
from actmem.catalogue import build, example, tiny
from actmem.distributedcompat import UnpinningFakeMode
from actmem.parallelism import layout_profile
from actmem.simulation import groups_of, outside_torch

CONFIG = replace(tiny("llama-3.1-8b"), num_layers=2)
EVERYTHING = Layout(pp=2, tp=2, dp_shard=4, sequence_parallel=True, microbatches=4)


def profiled(layout: Layout, rank: int = 0, optimizer: str | None = "adamw") -> actmem.Profile:
    model, batch = build(CONFIG, dtype=torch.float32), example(CONFIG, sequence=16)
    return actmem.profile_layout(model, batch, layout, rank=rank, optimizer=optimizer, together=True)


@pytest.mark.parametrize("rank", [0, 8])
def test_a_short_first_step_leaves_behind_what_a_whole_one_does(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    short = profiled(EVERYTHING, rank)
    plain = layout_profile.build_job

    def whole(*args: Any, **settings: Any) -> Any:
        return plain(*args, **(settings | {"shortens_first": False}))

    monkeypatch.setattr(layout_profile, "build_job", whole)
    assert profiled(EVERYTHING, rank) == short


def test_a_cached_fake_step_is_the_step_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = profiled(EVERYTHING)
    monkeypatch.setattr(UnpinningFakeMode, "_cached_dispatch_impl", UnpinningFakeMode._dispatch_impl)
    assert profiled(EVERYTHING) == cached


def test_the_cache_of_the_fake_mode_keeps_no_storage_alive() -> None:
    with UnpinningFakeMode() as mode:
        of_others = set(type(mode).cache)
        storage = torch.empty(5).untyped_storage()
        torch.empty(0).set_(storage, 0, (5,), (1,))
        keys = [str(key.key) for key in type(mode).cache if key not in of_others]
    assert not any("UntypedStorage" in key for key in keys)


@pytest.mark.parametrize("size", [1, 5, 8, 12])
@pytest.mark.parametrize("num_chunks", [1, 3, 8, 20])
def test_a_chunk_is_the_one_that_torch_cuts(size: int, num_chunks: int) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

    tensor = torch.arange(2.0 * size).reshape(size, 2)
    wanted, found = _chunk_with_empty(tensor, num_chunks, dim=0), distributedcompat._Chunks(tensor, num_chunks, dim=0)
    for n in range(num_chunks):
        assert found[n].shape == wanted[n].shape
        assert found[n].stride() == wanted[n].stride()
        assert torch.equal(found[n], wanted[n])


class _Counting(TorchDispatchMode):
    num_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _Counting.num_ops += 1
        return func(*args, **(kwargs or {}))


def _sharded() -> Iterator[int]:
    """Yield how many operators sharding and one step take, with few and with many ranks."""
    for world in (4, 4096):

        def make() -> Any:
            _Counting.num_ops = 0
            with _Counting():
                model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64)) for _ in range(2)])
                fully_shard(model)
            batch = torch.ones(2, 64)
            return model, lambda: model(batch).sum().backward()

        actmem.profile_rank(make, world=world)
        yield _Counting.num_ops


def test_sharding_over_more_ranks_takes_no_more_operators() -> None:
    few, many = _sharded()
    assert few == many > 0


def test_the_log_of_a_rank_does_not_grow_with_the_ranks() -> None:
    few, many = (profiled(Layout(tp=2, dp_shard=num, sequence_parallel=True)) for num in (4, 64))
    assert [type(e) for e in few.log] == [type(e) for e in many.log]
    assert len(few.memory) == len(many.memory)


def test_each_group_of_ranks_has_a_communicator_outside_torch() -> None:
    card = actmem.device("h100-80gb")
    seen = profiled(EVERYTHING)
    assert groups_of(seen) == (2, 2, 4)
    assert outside_torch(card, groups_of(seen)) - outside_torch(card) == 2 * 544_000_000 + 688_000_000
    assert groups_of(profiled(Layout(dp_shard=4))) == (4,)
    assert actmem.Profile.from_json(seen.to_json()) == seen


def test_gradients_of_divided_tensors_count_with_this_ranks_part() -> None:
    whole, half = (profiled(layout, optimizer=None) for layout in (Layout(), Layout(tp=2)))
    assert half.gradients_bytes < 0.6 * whole.gradients_bytes  # norms are not divided
