"""Agreement with torch's own counters, to the byte and to the operation, on a small Llama-like model."""

from __future__ import annotations

import gc
from collections.abc import Generator
from functools import partial
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from actmem.measuring import measure


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        q, k, v = (
            t.view(b, s, self.heads, w // self.heads).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        a = nnf.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, s, w))
        y = self.norm2(x)
        return x + self.down(nnf.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, *, recompute: str = "none", width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(97, width)
        self.layers = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.head = nn.Linear(width, 97, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            if self.recompute == "none":
                x = block(x)
            elif self.recompute == "selective":
                contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant", preserve_rng_state=False)
        return nnf.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


RECOMPUTE = ["none", "full", "reentrant", "selective"]


def make(recompute: str):
    torch.manual_seed(0)
    model = Llama(recompute=recompute)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        tokens = torch.zeros(4, 32, dtype=torch.long)
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # so that the optimizer has its state
    gc.collect()
    return model, optimizer, step


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_peak_equals_mem_trackers_to_the_byte(recompute: str) -> None:
    model, optimizer, step = make(recompute)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
    theirs = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    ours = measure(step, model=model, optimizer=optimizer)
    assert ours.peak_bytes == theirs["Total"]
    kinds = {str(getattr(kind, "value", kind)): size for kind, size in theirs.items()}
    assert ours.by_category["parameters"] == kinds["Parameter"]
    assert ours.by_category["gradients"] == kinds["Gradient"]
    assert ours.by_category["optimizer_state"] == kinds["Optstate"]


@pytest.fixture
def one_rank() -> Generator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_peak_equals_mem_trackers_under_fsdp_which_resizes_storages_behind_our_back(
    recompute: str, one_rank: DeviceMesh
) -> None:
    model = Llama(recompute=recompute)
    policy = MixedPrecisionPolicy(param_dtype=torch.float64)  # so that a gathered parameter is a storage of its own
    for module in (*model.layers, model):
        fully_shard(module, mesh=one_rank, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        model(torch.zeros(4, 32, dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    ours = measure(step, model=model, optimizer=optimizer)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
    assert ours.peak_bytes == tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert any(sample.op == "storage.resize_" for sample in ours.timeline)
    assert ours.by_category["parameters"] == 4 * sum(parameter.numel() for parameter in model.parameters())
    assert ours.external_bytes == 0


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_peak_equals_the_profilers_memory_events(recompute: str) -> None:
    model, optimizer, step = make(recompute)
    ours = measure(step, model=model, optimizer=optimizer)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    levels = list(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    assert ours.step_bytes == max(levels)
    assert levels[-1] == 0, "the step leaves nothing behind"


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_flops_add_up_to_those_of_the_flop_counter(recompute: str) -> None:
    model, optimizer, step = make(recompute)
    m = measure(step, model=model, optimizer=optimizer)
    with FlopCounterMode(display=False) as counter:
        step()
    product = 2 * 4 * 4 * 32 * 32 * 16  # batch, heads, scores, width
    num_attentions = sum(s.op == "aten._scaled_dot_product_flash_attention_for_cpu.default" for s in m.timeline)
    attention = (2 * num_attentions + 5 * len(model.layers)) * product
    assert num_attentions >= len(model.layers)
    counts_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in flop_registry  # from torch 2.15 on
    ours = m.forward_flops + m.backward_flops + m.replayed_flops
    assert ours - (0 if counts_attention else attention) == counter.get_total_flops()
    assert m.optimizer_flops == 0


def test_recomputation_is_replay_and_neither_forward_nor_backward() -> None:
    plain = measure(make("none")[2])
    assert plain.replayed_flops == plain.num_replayed_ops == 0
    assert plain.replay_seconds == 0
    for recompute in ("full", "reentrant"):
        m = measure(make(recompute)[2])
        assert m.forward_flops == plain.forward_flops
        assert m.backward_flops == plain.backward_flops
        head = 2 * 4 * 32 * 64 * 97
        down = 3 * 2 * 4 * 32 * 64 * 192 if recompute == "full" else 0  # it stops before the last product of a block
        assert m.replayed_flops == plain.forward_flops - head - down
        assert m.replay_seconds > 0
        assert m.saved_bytes < plain.saved_bytes / 4
    selective = measure(make("selective")[2])
    attention = 3 * 2 * 2 * 4 * 4 * 32 * 32 * 16
    assert selective.replayed_flops == attention, "products are saved, attention is not"
    assert plain.saved_bytes > selective.saved_bytes > measure(make("full")[2]).saved_bytes


def test_fake_tensors_measure_like_real_ones() -> None:
    model, optimizer, step = make("none")
    real = measure(step, model=model, optimizer=optimizer)
    with FakeTensorMode():
        model, optimizer, step = make("none")
        fake = measure(step, model=model, optimizer=optimizer)
    assert fake.peak_bytes == real.peak_bytes
    assert fake.saved_bytes == real.saved_bytes
    assert fake.by_category == real.by_category
    assert fake.forward_flops == real.forward_flops


def test_measuring_changes_no_bit() -> None:
    model, _, _ = make("none")
    tokens = torch.arange(64).view(2, 32)
    model(tokens).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    measure(lambda: model(tokens).backward(), model=model)
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(model.parameters(), expected, strict=True))


def test_flops_of_products_follow_their_shapes() -> None:
    a, b = torch.ones(3, 4, 8), torch.ones(3, 8, 16)

    def flops(fn) -> int:
        return measure(fn).forward_flops

    assert flops(lambda: torch.bmm(a, b)) == 2 * 3 * 4 * 8 * 16
    assert flops(lambda: torch.baddbmm(torch.ones(3, 4, 16), a, b)) == 2 * 3 * 4 * 8 * 16
    assert flops(lambda: torch.addmm(torch.ones(16), a[0], b[0])) == 2 * 4 * 8 * 16
    assert flops(lambda: torch.mm(a[0], b[0], out=torch.empty(4, 16))) == 2 * 4 * 8 * 16
    assert flops(lambda: nnf.conv1d(torch.ones(2, 8, 10), torch.ones(16, 8, 3))) == 2 * 2 * 8 * 16 * 3 * 8

    def grouped() -> None:
        rows = torch.ones(6, 16, dtype=torch.bfloat16)
        experts = torch.ones(2, 16, 32, dtype=torch.bfloat16)
        torch._grouped_mm(rows, experts, offs=torch.tensor([2, 6], dtype=torch.int32))

    assert flops(grouped) == 2 * 6 * 16 * 32
    assert flops(lambda: torch.ones(4) + 1) == 0
