"""The late device itself: it computes what a CPU computes, late, and memory that is read out of order is garbage."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.late_device import late
from tests.late_device.stage import needs_compiler, on_late_device

pytestmark = needs_compiler
POISON = torch.full((4,), 0xA5, dtype=torch.uint8).view(torch.float32)


class Network(nn.Module):
    """One of each kind of operator that torch treats in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.conv, self.batch_norm = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 48)
        self.head = nn.Linear(16, 11)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        x = x + self.batch_norm(self.conv(x[:, None])).relu().amax(1)
        q, k, v = self.linear(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x + attended).flatten(0, 1), words.flatten())


def computes_as_a_cpu() -> None:
    torch.manual_seed(0)
    here = Network()
    there = copy.deepcopy(here).to("late")
    words = torch.randint(0, 11, (3, 7))
    late.waits()
    with late.held(late.DEFAULT), sdpa_kernel(SDPBackend.MATH):  # the CPU has a kernel of its own for attention
        for model, place in ((here, "cpu"), (there, "late")):
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                model(words.pin_memory().to(place, non_blocking=True)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        assert late.waits() == [], "the host waited for its device"
    want, got = here.state_dict(), there.state_dict()
    assert [name for name in want if not torch.equal(want[name], got[name].cpu())] == []
    x = torch.randn(33, 65)
    for fn in (torch.sum, torch.exp, torch.nonzero, F.gelu, lambda y: y[y > 0], lambda y: y @ y.mT):
        assert torch.equal(fn(x), fn(x.to("late")).cpu())


def is_late_and_poisons() -> None:
    x = torch.zeros(4, device="late")
    side = torch.Stream("late")
    result = torch.empty(4, device="late")
    late.synchronise()
    with late.held(late.SIDES):
        with side:
            result.copy_(x)
            event = side.record_event()
        assert not event.query()
        del x  # and the other stream reads it later, out of order
        torch.accelerator.current_stream().synchronize()
    late.synchronise()
    assert torch.equal(result.cpu(), POISON.expand(4)), "memory that was freed kept its bytes"

    x = torch.zeros(4, device="late")
    late.synchronise()
    before = late.held_bytes()
    with late.held(late.SIDES):
        with side:
            result.copy_(x)
        x.record_stream(side)
        del x
        torch.accelerator.current_stream().synchronize()
        assert late.held_bytes() == before, "memory in use by another stream is not free"
    late.synchronise()
    assert late.held_bytes() == before - 16
    assert torch.equal(result.cpu(), torch.zeros(4))


def draws_by_seed_and_offset() -> None:
    generator = torch.late.default_generators[0]
    torch.manual_seed(3)
    state = torch.late.get_rng_state()
    first = F.dropout(torch.ones(100, device="late"))
    second = F.dropout(torch.ones(100, device="late"))
    assert generator.get_offset() == 2
    torch.late.set_rng_state(state)
    assert torch.equal(first, F.dropout(torch.ones(100, device="late")))
    assert not torch.equal(first, second)
    own = torch.Generator("late").manual_seed(5)
    assert torch.equal(
        torch.randn(8, generator=own, device="late"), torch.randn(8, generator=own.manual_seed(5), device="late")
    )
    assert generator.get_offset() == 1


def has_two_devices() -> None:
    one, other = torch.ones(4, device="late:0"), torch.ones(4, device="late:1")
    with late.lag(late.DEFAULT, 2000):
        moved = (one + 1).to("late:1")
        assert torch.equal((moved + other).cpu(), torch.full((4,), 3.0))
    assert late.held_bytes(1) >= 32


def test_it_computes_as_a_cpu_but_late_and_unordered_readers_see_garbage() -> None:
    on_late_device(computes_as_a_cpu, is_late_and_poisons, draws_by_seed_and_offset, has_two_devices)
