"""`engine="checkpoint"`: torch's own checkpoint in eager, driven by the same plan.

It runs the code of a block twice. So what the first run saw must be put back for the second: these tests look at what
the second run sees, not only at its result.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import actmem
from actmem import Full, Rule, Rules, Selective, Targets, UnsupportedError, VersionError, every_second
from actmem.modes import Mode
from tests.compile.blocks import Counting, assert_same_bits, attention, build, fresh_compiler, step
from tests.compile.compiling import differing, trained
from tests.zoo import ZOO

SELECTIVE = Selective(save=["attention", every_second("matmul")])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Model(nn.Module):
    """Blocks that run a function of the test's between two products."""

    def __init__(self, between: Callable[[Tensor], Tensor], num_blocks: int = 2) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Block(between) for _ in range(num_blocks))
        self.train()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(x)))


def batch() -> Tensor:
    return torch.ones(2, 6, 8).cumsum(1).sin()


def stepped(model: nn.Module, around_forward: AbstractContextManager[Any] | None = None) -> dict[str, Tensor]:
    """Train one step, with a context around the forward pass only."""
    model.zero_grad()
    torch.manual_seed(7)
    with around_forward or nullcontext():
        loss = model(batch()).square().mean()
    loss.backward()
    return gradients(model)


def checked(model: nn.Module, mode: Mode, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
    """Assert that two steps under a mode have the bits of plain training."""
    plain = stepped(model, around())
    with actmem.apply(model, mode, engine="checkpoint") as applied:
        for _ in range(2):
            assert differing(plain, stepped(model, around())) == []
        assert applied.report().checkpointed == ("layers.0", "layers.1")
        assert "run by torch's checkpoint, which runs their code twice: layers.0 ... layers.1 (2 blocks)" in str(
            applied.report()
        )


class Seen:
    """Note something at each run of a block: first the forward runs, then the second ones, last block first."""

    def __init__(self, look: Callable[[], Any]) -> None:
        self.look = look
        self.found: list[Any] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.found.append(self.look())
        return F.gelu(x)


# ---------------------------------------------------------------- the zoo


@pytest.mark.parametrize("name", ["mixtral", "llama_lora", "t5", "gemma3n_shared_kv", "resnet", "moe_topk", "lstm"])
def test_gradients_are_those_of_plain_training(name: str) -> None:
    case = ZOO[name]
    plain = trained(case, None, "eager")
    for mode in (
        Full(),
        Selective(save=["attention", every_second(case.selective or "matmul")]),
        Targets(["norm"]),
    ):
        managed = trained(case, mode, "eager", engine="checkpoint")
        assert torch.equal(plain.loss, managed.loss)
        assert differing(plain.gradients, managed.gradients) == [], mode
        assert managed.applied is not None
        assert len(managed.applied.report().checkpointed) == case.num_blocks
        assert managed.measure().num_replayed_ops > 0


def test_what_is_saved_is_not_computed_again() -> None:
    case = ZOO["torchtitan_like"]
    flops = {
        name: trained(case, mode, "eager", engine="checkpoint").measure().replayed_flops
        for name, mode in (
            ("full", Full()),
            ("every second", Selective(save=[every_second("matmul")])),
            ("all", Selective(save=["matmul", "attention"])),
        )
    }
    assert flops["full"] > flops["every second"] > flops["all"] == 0


# ---------------------------------------------------------------- what the second run sees


def test_the_second_run_sees_the_attention_backends_of_the_first() -> None:
    seen = Seen(torch.backends.cuda.flash_sdp_enabled)
    checked(Model(seen), SELECTIVE, lambda: sdpa_kernel(SDPBackend.MATH))
    assert seen.found == [False] * len(seen.found) and len(seen.found) == 2 + 2 * 4
    assert torch.backends.cuda.flash_sdp_enabled(), "and afterwards all is as it was"


def test_the_second_run_computes_attention_by_the_kernel_of_the_first() -> None:
    """The fused kernel rounds otherwise than the unfused one, which the context around forward asks for."""
    case = ZOO["torchtitan_like"]

    def run(mode: Mode | None) -> tuple[dict[str, Tensor], Counter[str]]:
        model = case.build()
        if mode is not None:
            actmem.apply(model, mode, engine="checkpoint")
        with sdpa_kernel(SDPBackend.MATH):
            loss = case.step(model)
        with Ops() as backward:
            loss.backward()
        return gradients(model), backward.counts

    plain, _ = run(None)
    managed, counts = run(Full())
    assert differing(plain, managed) == []
    assert counts["aten.bmm.default"] > 0
    assert not any("flash_attention" in op for op in counts)


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_the_second_run_sees_autocast_as_the_first_did() -> None:
    seen = Seen(lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
    checked(Model(seen), SELECTIVE, lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    assert set(seen.found) == {(True, torch.bfloat16)} and len(seen.found) == 2 + 2 * 4


def test_the_second_run_draws_the_random_numbers_of_the_first_and_later_ones_go_on() -> None:
    drawn: list[Tensor] = []

    def noisy(x: Tensor) -> Tensor:
        drawn.append(torch.rand(3))
        return F.dropout(x, 0.5)

    model = Model(noisy)
    plain = stepped(model)
    after = torch.rand(3)
    for mode in (Full(), SELECTIVE):
        drawn.clear()
        with actmem.apply(model, mode, engine="checkpoint"):
            assert differing(plain, stepped(model)) == []
        first, second, second_again, first_again = drawn
        assert torch.equal(first, first_again) and torch.equal(second, second_again)
        assert not torch.equal(first, second)
        assert torch.equal(after, torch.rand(3)), "the step took as many numbers as plain training does"


@pytest.mark.parametrize(
    ("read", "write", "values"),
    [
        (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, (True, False)),
        # torch's own test tools, which other tests load, forbid `torch.backends.mkldnn.enabled = ...`.
        (lambda: torch.backends.mkldnn.enabled, torch.backends.mkldnn.set_flags, (False, True)),
    ],
    ids=["deterministic algorithms", "oneDNN"],
)
def test_the_second_run_sees_the_numerics_flags_of_the_first(
    read: Callable[[], bool], write: Callable[[bool], None], values: tuple[bool, bool]
) -> None:
    seen, before = Seen(read), read()
    model = Model(seen)
    try:
        with actmem.apply(model, SELECTIVE, engine="checkpoint"):
            write(values[0])
            loss = model(batch()).sum()
            write(values[1])
            loss.backward()
            assert seen.found == [values[0]] * 4
            assert read() is values[1], "backward leaves the flag as it finds it"
    finally:
        write(before)


def test_the_profilers_marks_in_a_block_disturb_nothing() -> None:
    """Saved operators are found by their order: a mark that is there in one run only must not shift it."""
    runs = 0

    def marked(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        if runs % 2:
            with torch.profiler.record_function("only now"):
                return F.gelu(x)
        return F.gelu(x)

    model = Model(marked)
    plain = stepped(model)
    with actmem.apply(model, SELECTIVE, engine="checkpoint"):
        for _ in range(2):
            assert differing(plain, stepped(model)) == []
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert differing(plain, stepped(model)) == []
    assert any(event.key == "only now" for event in profile.key_averages())


# ---------------------------------------------------------------- writes, ties, graphs used twice


def test_probabilities_that_are_normalised_in_place_are_put_back_as_they_were() -> None:
    """As Mixtral does: what topk chose is divided in place, and the second run divides it again."""

    def routed(x: Tensor) -> Tensor:
        weights, chosen = x.softmax(-1).topk(4)
        weights /= weights.sum(-1, keepdim=True)
        return x + torch.zeros_like(x).scatter(-1, chosen, weights)

    for mode in (Full(), SELECTIVE, Selective(save=["routing"]), Selective(save=["aten._softmax"])):
        checked(Model(routed), mode)


def test_a_saved_value_that_the_block_itself_writes_on_is_copied_before() -> None:
    def scaled(x: Tensor) -> Tensor:
        h = x.sin()
        y = h * 2
        h.mul_(3)
        h[..., :4].add_(1)
        return y.tanh() + h.sigmoid()

    for save in ("aten.sin", "aten.mul", "aten.s*"):
        checked(Model(scaled), Selective(save=[save], force_recompute=[]))
    checked(Model(scaled), Rules([Rule("recompute", op="aten.tanh"), Rule("save")]))


def test_a_saved_value_that_is_written_on_after_the_block_is_named() -> None:
    kept: list[Tensor] = []

    def leaking(x: Tensor) -> Tensor:
        h = x.sin()
        kept.append(h.detach())
        return h.cos()

    model = Model(leaking)
    with actmem.apply(model, Selective(save=["aten.sin"]), engine="checkpoint"):
        loss = model(batch()).sum()
        kept[1].add_(1)
        with pytest.raises(VersionError) as error:
            loss.backward()
    assert str(error.value) == (
        "what aten.sin.default made is saved by the plan, but the program has written on it since, and torch's "
        "checkpoint can only put back what is there now. Leave engine='checkpoint' out: the tape copes. Or let it be "
        "recomputed: Rule('recompute', op='aten.sin')."
    )


def test_the_tape_copes_with_that_write() -> None:
    """What the message says."""
    kept: list[Tensor] = []

    def leaking(x: Tensor) -> Tensor:
        h = x.sin()
        kept.append(h.detach())
        return h.cos()

    model = Model(leaking)
    plain = stepped(model)
    kept.clear()
    model.zero_grad()
    with actmem.apply(model, Selective(save=["matmul"])):
        loss = model(batch()).square().mean()
        kept[1].add_(1)
        loss.backward()
    assert differing(plain, gradients(model)) == []


@pytest.mark.parametrize("mode", [Full(), SELECTIVE, Targets(["mlp"])], ids=repr)
def test_backward_may_run_twice_through_a_graph_that_is_kept(mode: Mode) -> None:
    def backward_twice(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(7)
        loss = model(batch()).square().mean()
        parameters = list(model.parameters())
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        return [*first, *torch.autograd.grad(loss, parameters)]

    model = Named(lambda x: F.dropout(F.gelu(x), 0.2))
    plain = backward_twice(model)
    with actmem.apply(model, mode, engine="checkpoint"):
        assert all(map(torch.equal, plain, backward_twice(model)))


class Named(Model):
    """The same, whose blocks say which part of them is the `mlp`."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__(between)
        self.actmem_targets = {"mlp": ("up", "down")}


class Tied(nn.Module):
    """A router to which all experts are equal, and which breaks the tie another way each time it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.turn += 1
        weights, chosen = torch.topk(x.detach() * 0 + torch.linspace(0, 1e-3, 16).roll(self.turn), 4)
        return weights + 1, chosen


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.router, self.down = nn.Linear(8, 16), Tied(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        weights, chosen = self.router(h)
        return x + self.down(torch.zeros_like(h).scatter(-1, chosen, weights) * h)


def test_ties_are_broken_in_the_second_run_as_in_the_first() -> None:
    model = Model(F.gelu)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.layers = nn.ModuleList(Routed() for _ in range(2))
    model.actmem_targets = {"router": ("router",)}

    def restarted() -> dict[str, Tensor]:
        for layer in model.layers:
            layer.router.turn = 0
        return stepped(model)

    plain = restarted()
    assert [layer.router.turn for layer in model.layers] == [1, 1]
    for mode in (Full(), SELECTIVE):
        with actmem.apply(model, mode, engine="checkpoint"):
            assert differing(plain, restarted()) == []
            assert [layer.router.turn for layer in model.layers] == [2, 2], "the router ran twice"
    forward = Routed.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Routed, "forward", lambda self, x: checkpoint(forward, self, x, use_reentrant=False))
        assert differing(plain, restarted()), "torch's checkpoint alone sends the tokens elsewhere"


# ---------------------------------------------------------------- refused


def test_a_live_cache_is_refused_by_name() -> None:
    case = ZOO["llama_use_cache"]
    model = case.build()
    with actmem.apply(model, Full(), engine="checkpoint"), pytest.raises(UnsupportedError) as error:
        case.step(model)
    assert str(error.value) == (
        "model.layers.0 is given past_key_values, a cache that its forward writes to, and torch's checkpoint would run "
        "that forward twice. Leave engine='checkpoint' out (the tape runs it once), or call the model with "
        "use_cache=False."
    )


# ---------------------------------------------------------------- a compiled function inside


@pytest.fixture
def fresh() -> Iterator[None]:
    with fresh_compiler():
        yield


@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore")  # the compiler's own, of many kinds
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_function_in_a_block_stays_compiled_and_its_inside_is_not_saved_wrongly(backend: str) -> None:
    """inductor writes products into buffers of its own: to put those back by a plan that saves products is wrong."""
    counting = Counting(backend)
    model = build(torch.compile(attention, backend=counting.backend, fullgraph=True), "dense")
    plain = step(model)
    assert counting.runs == {"forward": 2, "backward": 2}
    modes = (Full(), Selective(save=["matmul", "batched_matmul"]), Selective(save=["aten.*"], force_recompute=[]))
    for mode in modes:
        counting.runs.clear()
        with actmem.apply(model, mode, engine="checkpoint"):
            assert_same_bits(plain, step(model))
            assert_same_bits(plain, step(model))
        assert counting.runs["backward"] == 4
        assert counting.runs["forward"] == 8, "twice in each step: torch's checkpoint runs the code again"
    assert counting.graphs == {"forward": 1, "backward": 1}, "and finds the graph of the first run"
