"""One block is traced for many only where what it read of itself shows that the others would do the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem.profiling import session
from actmem.profiling.reads import Reads, noted
from tests.planner.steps import DEVICE, rows

NUM_BLOCKS = 6
SPECIAL = 2


def mean(out: Tensor) -> Tensor:
    return out.square().mean()


def widen(h: Tensor) -> Tensor:
    return torch.stack([h, h.sin(), h.cos(), h.exp()]).logsumexp(0)


class Block(nn.Module):
    """A block that takes more where `asks` says so."""

    def __init__(self, index: int, asks: Callable[[Any], bool], **held: Any) -> None:
        super().__init__()
        self.layer_idx = index
        self.w = nn.Parameter(torch.randn(16, 16) / 4)
        self._asks = asks
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = x @ self.w
        return x + (widen(h) if self._asks((self, mask)) else h).tanh()


def by_index(given: Any) -> bool:
    return given[0].layer_idx == SPECIAL


def by_config(given: Any) -> bool:
    return given[0].config.types[given[0].layer_idx] == "wide"


def by_own_config(given: Any) -> bool:
    return given[0].config.wide


def by_function(given: Any) -> bool:
    return given[0].function()


def by_list(given: Any) -> bool:
    return given[0].widths[1] > 1


def by_dict(given: Any) -> bool:
    return vars(given[0])["layer_idx"] == SPECIAL


def by_state(given: Any) -> bool:
    return given[0].state.current == SPECIAL


def by_counter(given: Any) -> bool:
    state = given[0].state
    state.current += 1
    return state.current == SPECIAL


def by_flag(given: Any) -> bool:
    return given[0].flag


def by_tensor(given: Any) -> bool:
    return bool(given[0].threshold > 1)


def by_mask(given: Any) -> bool:
    return bool(given[1].all())


class Loop(nn.Module):
    """Calls blocks one after the other, and may tell them something first."""

    def __init__(self, blocks: list[nn.Module], tell: Callable[[nn.Module, int], None] | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.layers = nn.ModuleList(blocks)
        self._tell = tell

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.layers):
            if self._tell is not None:
                self._tell(block, i)
            x = block(x)
        return x


class Masked(Loop):
    """Gives each block a mask of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.layers):
            x = block(x, torch.full((4,), i == SPECIAL))
        return x


def closed_over(wide: bool) -> Callable[[], bool]:
    return lambda: wide


def answer(wide: bool) -> bool:
    return wide


def _set_state(block: Any, i: int) -> None:
    block.state.current = i


def _set_flag(block: Any, i: int) -> None:
    block.flag = i == SPECIAL


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    n = range(NUM_BLOCKS)
    shared = SimpleNamespace(types=["wide" if i == SPECIAL else "narrow" for i in n])
    state = SimpleNamespace(current=-1)
    wide = [i == SPECIAL for i in n]
    kinds: dict[str, Callable[[], nn.Module]] = {
        "index": lambda: Loop([Block(i, by_index) for i in n]),
        "index in a shared config": lambda: Loop([Block(i, by_config, config=shared) for i in n]),
        "a config of its own": lambda: Loop([Block(i, by_own_config, config=SimpleNamespace(wide=wide[i])) for i in n]),
        "partial": lambda: Loop([Block(i, by_function, function=functools.partial(answer, wide[i])) for i in n]),
        "closure": lambda: Loop([Block(i, by_function, function=closed_over(wide[i])) for i in n]),
        "list": lambda: Loop([Block(i, by_list, widths=[1, 4 if wide[i] else 1]) for i in n]),
        "vars": lambda: Loop([Block(i, by_dict) for i in n]),
        "tensor": lambda: Loop([Block(i, by_tensor, threshold=torch.tensor([float(4 * wide[i])])) for i in n]),
        "what the loop says": lambda: Loop([Block(i, by_state, state=state) for i in n], _set_state),
        "what the loop sets": lambda: Loop([Block(i, by_flag, flag=False) for i in n], _set_flag),
        "a shared counter": lambda: Loop([Block(i, by_counter, state=state) for i in n]),
        "numbers of an argument": lambda: Masked([Block(i, by_mask) for i in n]),
    }
    return kinds[name]()


NAMES = (
    "index",
    "index in a shared config",
    "a config of its own",
    "partial",
    "closure",
    "list",
    "vars",
    "tensor",
    "what the loop says",
    "what the loop sets",
    "a shared counter",
    "numbers of an argument",
)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the blocks that are run."""
    found: list[str] = []
    plain = session.Session._run_block
    monkeypatch.setattr(
        session.Session, "_run_block", lambda s, b, *rest: (found.append(b.path), plain(s, b, *rest))[1]
    )
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_block_that_does_something_else_is_found_out(name: str) -> None:
    fake, real = (actmem.profile(made(name), rows(256, 16), loss=mean, fake=fake) for fake in (True, False))
    expected = [i == SPECIAL for i in range(NUM_BLOCKS)]
    for profile in (fake, real):
        assert [any("logsumexp" in c.op or "amax" in c.op for c in layer.calls) for layer in profile.layers] == expected
    for mode in (actmem.SaveEverything(), actmem.Full()):
        a, b = (actmem.predict(profile, mode, DEVICE).peak_bytes for profile in (fake, real))
        assert a == b


def test_a_budget_is_kept_where_one_block_is_unlike_the_others() -> None:
    profile = actmem.profile(made("index"), rows(256, 16), loss=mean, optimizer=None)
    full, plain = (actmem.predict(profile, m, DEVICE).peak_bytes for m in (actmem.Full(), actmem.SaveEverything()))
    budget = (full + plain) // 2
    model = made("index")
    plan = actmem.fit(model, rows(256, 16), loss=mean, optimizer=None, budget=budget, device=DEVICE, headroom=0)
    with actmem.apply(model, plan, loss=mean):
        for _ in range(2):
            mean(model(*rows(256, 16))).backward()
            model.zero_grad()
        assert actmem.measure(lambda: mean(model(*rows(256, 16))).backward(), model=model).tensor_bytes <= budget


def test_what_was_never_read_may_differ(ran: list[str]) -> None:
    actmem.profile(
        Loop([Block(i, lambda _: False, function=closed_over(bool(i))) for i in range(4)]), rows(8, 16), loss=mean
    )
    assert ran == ["layers.0"]


def test_what_was_read_and_is_the_same_in_all_is_enough(ran: list[str]) -> None:
    blocks: list[nn.Module] = [
        Block(
            i, lambda given: given[0].function(), function=functools.partial(answer, True), config=SimpleNamespace(a=1)
        )
        for i in range(4)
    ]
    actmem.profile(Loop(blocks), rows(8, 16), loss=mean)
    assert ran == ["layers.0"]


def test_blocks_of_two_kinds_are_run_once_each_where_they_say_so(ran: list[str]) -> None:
    blocks: list[nn.Module] = [Block(i, by_flag, flag=bool(i % 2)) for i in range(6)]
    actmem.profile(Loop(blocks), rows(8, 16), loss=mean)
    assert ran == ["layers.0", "layers.1"]


class Turning(nn.Module):
    """A block that does something else each time."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16) / 4)
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        h = x @ self.w
        return x + (widen(h) if self.turn == 2 else h).tanh()


class Again(nn.Module):
    """Calls all blocks twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.layers = nn.ModuleList([Turning() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in (*self.layers, *self.layers):
            x = block(x)
        return x


def test_a_block_that_counts_its_calls_is_not_taken_for_what_it_was() -> None:
    profile = actmem.profile(Again(), rows(8, 16), loss=mean)
    wide = [any("amax" in call.op or "logsumexp" in call.op for call in layer.calls) for layer in profile.layers]
    assert wide == [False] * 3 + [True] * 3


def test_nothing_is_left_on_torch_modules_when_a_block_fails() -> None:
    class Failing(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - its name in torch
            raise RuntimeError(self.in_features)

    with pytest.raises(RuntimeError):
        actmem.profile(nn.Sequential(Failing(16, 16), Failing(16, 16)), rows(8, 16), loss=mean)
    assert "__getattribute__" not in vars(nn.Module)


def test_reads_are_those_of_the_block_alone() -> None:
    block, other = Block(3, by_index), Block(3, by_index)
    with noted(reads := Reads(block)):
        other.layer_idx += 1
        block(rows(4, 16)[0])
    reads.close()
    assert not reads.changed
    assert reads.hold_for(block, Block(3, by_index))
    assert not reads.hold_for(block, Block(4, by_index))
