"""A profile is what a real step does, made without one; and the model is left as it was."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem import catalogue
from actmem.decisions import Decision
from actmem.errors import ModeError, PlanError, UnsupportedError
from actmem.log_entries import OperatorEntry
from actmem.profiles import PROFILE_VERSION, Profile
from actmem.profiling import session, step_profile
from actmem.simulation.simulator import simulate
from tests.planner.steps import DEVICE, Act, Training, rows, stack, tokens, zoo


def mean(out: Tensor) -> Tensor:
    return out.square().mean()


def simple(num_rows: int = 64, **rest: Any) -> Training:
    return Training(stack(), rows(num_rows), mean, **rest)


def seen(profile: Profile) -> list[Any]:
    """Return what a profile says of the blocks, without what only a real step shows: its time and its workspaces."""
    costs = [dataclasses.replace(c, seconds=None, workspace_bytes=0) for c in profile.costs]
    return [
        (x.path, [(c.op, c.module, costs[c.cost], c.makes) for c in x.calls], x.values, x.handles, x.parameters_bytes)
        for x in profile.layers
    ]


def bare(value: Any) -> Any:
    """Return a value of a block without the number of its storage, which depends on what else ran."""
    return dataclasses.replace(value, storage=0)


def ran(profile: Profile) -> list[OperatorEntry]:
    return [entry for entry in profile.log if isinstance(entry, OperatorEntry)]


@pytest.mark.parametrize("name", ["llama", "gpt2_dropout", "resnet", "unet"])
def test_a_fake_step_shows_the_calls_and_values_of_a_real_one(name: str) -> None:
    fake, real = (zoo(name).profile(fake=kind) for kind in (True, False))
    assert (fake.fake, real.fake) == (True, False)
    for a, b in zip(seen(fake), seen(real), strict=True):
        assert (a[0], a[1], a[3], a[4]) == (b[0], b[1], b[3], b[4])
        assert [bare(v) for v in a[2]] == [bare(v) for v in b[2]]
    assert [e.live_bytes for e in ran(fake)] == [e.live_bytes for e in ran(real)]
    assert (fake.base_bytes, fake.gradients_bytes) == (real.base_bytes, real.gradients_bytes)
    assert all(c.seconds is None for c in fake.costs)
    assert sum(c.seconds or 0 for c in real.costs) > 0


DECIDED: dict[str, Callable[[int], Decision]] = {
    "nothing": lambda _: Decision.RECOMPUTE,
    "everything": lambda _: Decision.SAVE,
    "every third": lambda n: Decision.RECOMPUTE if n % 3 else Decision.SAVE,
}


def check_skipping(model: nn.Module, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = {"loss": None}
    ran: list[str] = []
    plain = session.Session._run_block
    monkeypatch.setattr(session.Session, "_run_block", lambda s, b, *rest: (ran.append(b.path), plain(s, b, *rest))[1])
    skipped = actmem.profile(model, batch, **options)
    num_run = len(ran)
    monkeypatch.setattr(step_profile, "identity", lambda *_: object())  # no two blocks are equal
    whole = actmem.profile(model, batch, **options)
    assert num_run < len(ran) - num_run == len(whole.layers)
    for decide in DECIDED.values():
        a, b = (
            simulate(p, [[decide(n) for n in range(len(x.calls))] for x in p.layers], exact=True, timeline=True)
            for p in (skipped, whole)
        )
        assert [live for _, live in a.timeline] == [live for _, live in b.timeline]
        assert (a.peak_bytes, a.replayed, a.saved_bytes) == (b.peak_bytes, b.replayed, b.saved_bytes)
    assert skipped.gradients_bytes == whole.gradients_bytes


def catalogued(name: str, num_layers: int) -> tuple[nn.Module, Any]:
    config = catalogue.tiny(name)
    if name != "deepseek-v3":
        config = dataclasses.replace(config, num_layers=num_layers)
    shape: Any = {} if name == "vit-l" else {"sequence": 48}
    model = catalogue.build(config, device="cpu", dtype=torch.float32).train()
    return model, catalogue.example(config, **shape, device="cpu")


def test_blocks_that_are_equal_are_run_once_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    check_skipping(*catalogued("llama-3.1-8b", 5), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in catalogue.names() if n != "llama-3.1-8b"])
def test_so_it_is_for_every_shape_of_the_catalogue(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_skipping(*catalogued(name, 5), monkeypatch)


def test_a_profile_is_read_back_equal() -> None:
    for profile in (simple().profile(), zoo("moe_topk").profile(fake=False)):
        assert Profile.from_json(profile.to_json()) == profile


def test_a_real_step_leaves_no_gradient_on_a_leaf_that_a_module_holds() -> None:
    class Prompted(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*stack())
            self.prompt = torch.zeros(32, requires_grad=True)  # not a parameter
            self.held = torch.zeros(32, requires_grad=True)
            self.held.grad = torch.ones(32)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.prompt + self.held)

    model = Prompted()
    actmem.profile(model, rows(8), loss=mean, fake=False)
    assert model.prompt.grad is None
    assert model.held.grad is not None and torch.equal(model.held.grad, torch.ones(32))


def test_what_is_no_profile_is_refused() -> None:
    text = Profile().to_json()
    for wrong in ("", "[1, 2]", "{}", text[:-5], text.replace('"layers":[]', '"layers":[{}]')):
        with pytest.raises(PlanError, match="this is not a profile"):
            Profile.from_json(wrong)
    with pytest.raises(PlanError, match="another version"):
        Profile.from_json(text.replace(f'"version":{PROFILE_VERSION}', '"version":2'))


# -------------------------------------------------------------------- what cannot be seen


def test_a_model_in_eval_mode_is_refused() -> None:
    training = simple()
    training.model.eval()
    with pytest.raises(ModeError, match=r"eval mode.*model\.train\(\) first"):
        training.profile()


def test_a_fused_recurrent_layer_is_refused_on_fake_tensors_and_profiled_for_real() -> None:
    training = zoo("lstm")
    with pytest.raises(UnsupportedError, match=r"recurrent layer of torch\.nn.*fake=False"):
        training.profile()
    assert len(training.profile(fake=False).layers) == 3


class Looks(nn.Module):
    """A block that asks whether a number is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Act(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum().item() > 0 else x + self.inner(x)


class Selects(Looks):
    """A block whose shapes depend on numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x[x[:, 0] > 0]).sum(0)


@pytest.mark.parametrize(("kind", "op"), [(Looks, "aten._local_scalar_dense"), (Selects, "aten.index|aten.nonzero")])
def test_what_looks_at_numbers_is_refused_on_fake_tensors_with_the_line_that_works(kind: Any, op: str) -> None:
    training = Training(nn.Sequential(*[kind() for _ in range(2)]), rows(16, 8), mean)
    with pytest.raises(UnsupportedError, match=rf"({op}) looks at the numbers in a tensor.*fake=False\)"):
        training.profile()
    assert len(training.profile(fake=False).layers) == 2


def test_a_model_without_a_loss_says_which_argument_is_missing() -> None:
    with pytest.raises(ModeError, match="Pass loss="):
        actmem.profile(stack(), rows(4))


# -------------------------------------------------------------------- routing


def test_balanced_routing_is_the_default_and_the_worst_takes_more() -> None:
    batch = (torch.randn(2, 64, 32),)
    balanced, worst = (zoo("moe_topk", batch).profile(routing=r) for r in ("balanced", "worst"))
    assert (balanced.routing, worst.routing) == ("balanced", "worst")
    assert zoo("moe_topk", batch).profile() == balanced
    assert simple().profile().routing == "none"
    assert zoo("moe_topk", batch).profile(fake=False).routing == "real"

    def expert_rows(profile: Profile) -> list[int]:
        calls = [c for c in profile.layers[0].calls if c.module.endswith(".up") and c.op == "aten.addmm.default"]
        return [profile.layers[0].values[c.makes[0]].num_bytes // (64 * 4) for c in calls]

    # 128 tokens, two experts each, four experts: 64 each, and three standard deviations more at both ends
    assert expert_rows(balanced) == [81, 47, 47, 81]
    assert expert_rows(worst) == [128, 128, 0, 0]


def test_routing_that_is_not_known_is_refused() -> None:
    with pytest.raises(ModeError, match=r"routing = 'even' is not known\. Expected 'balanced' or 'worst'"):
        simple().profile(routing="even")


# -------------------------------------------------------------------- optimizers, microbatches, devices


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_of_an_optimizer_is_as_large_as_that_of_a_real_one(name: str, kind: Any, dtype: torch.dtype) -> None:
    model = stack(dtype=dtype)
    optimizer = kind(model.parameters())
    model(rows(4)[0].to(dtype)).sum().backward()
    optimizer.step()
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    profile = actmem.profile(model, (rows(4)[0].to(dtype),), loss=torch.sum, optimizer=name)
    assert profile.optimizer_bytes == state > 0
    assert profile.base_bytes == sum(p.nbytes for p in model.parameters()) + state
    assert profile.optimizer == f"{name}, {str(dtype).removeprefix('torch.')}"


def test_sgd_has_no_state_and_no_optimizer_takes_nothing() -> None:
    for name in ("sgd", None):
        profile = simple().profile(optimizer=name)
        assert profile.optimizer_bytes == 0
        assert profile.base_bytes == profile.parameters_bytes


def test_the_state_of_an_optimizer_may_have_a_dtype_of_its_own() -> None:
    model, batch = stack(dtype=torch.bfloat16), (rows(4)[0].bfloat16(),)
    same, wide = (actmem.profile(model, batch, loss=torch.sum, optimizer_dtype=d) for d in (None, torch.float32))
    moments = 2 * sum(p.numel() for p in model.parameters())
    assert wide.optimizer_bytes >= 4 * moments > same.optimizer_bytes
    assert wide.optimizer == "adamw, float32"


@pytest.mark.parametrize("mode", [actmem.SaveEverything(), actmem.Full()])
def test_gradients_that_stay_from_batch_to_batch_are_counted(mode: Any) -> None:
    one, two = simple(), simple(num_batches=2)
    once, twice = one.profile(), two.profile(microbatches=2)
    assert twice.base_bytes - once.base_bytes == once.gradients_bytes == once.parameters_bytes
    for training, profile in ((one, once), (two, twice)):
        assert actmem.predict(profile, mode, DEVICE).tensor_bytes == training.measured(mode).peak_bytes


def test_a_model_without_bytes_has_the_profile_of_one_on_the_cpu() -> None:
    there, here = (stack(device=where) for where in ("meta", "cpu"))
    assert all(p.is_meta for p in there.parameters())
    assert actmem.profile(there, rows(64), loss=mean) == actmem.profile(here, rows(64), loss=mean)


# -------------------------------------------------------------------- nothing is changed


def state(model: nn.Module) -> list[Any]:
    tensors = [(name, t.clone()) for name, t in model.state_dict().items()]
    hooks = [
        [len(getattr(m, name)) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")]
        for m in model.modules()
    ]
    return [tensors, hooks, [sorted(vars(m)) for m in model.modules()], [type(m) for m in model.modules()]]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
@pytest.mark.parametrize("name", ["resnet", "llama_lora"])
def test_the_model_is_left_as_it_was(name: str, fake: bool) -> None:
    training = zoo(name)
    training.step()
    kept = [None if p.grad is None else (p.grad, p.grad.clone()) for p in training.model.parameters()]
    before, random = state(training.model), torch.get_rng_state()
    training.profile(fake=fake)
    assert torch.equal(torch.get_rng_state(), random)
    assert same(state(training.model), before)
    for p, was in zip(training.model.parameters(), kept, strict=True):
        assert (p.grad is None) if was is None else p.grad is was[0] and torch.equal(p.grad, was[1])


def test_a_step_that_fails_leaves_the_model_as_it_was() -> None:
    training = zoo("llama", tokens(2, 8))
    before = state(training.model)
    for fake in (True, False):
        with pytest.raises(ZeroDivisionError):
            training.profile(fake=fake, loss=lambda out: out.loss / 0 if 1 // 0 else out.loss)
    assert same(state(training.model), before)
    assert all(p.grad is None for p in training.model.parameters())


# -------------------------------------------------------------------- functions put on a model, wrappers


def test_a_forward_that_was_put_on_the_model_and_holds_it_is_profiled_on_the_copy() -> None:
    training = simple()
    plain = training.profile()

    def put_on(model: nn.Module) -> None:
        held = model.forward

        def timed(*args: Any) -> Any:  # as libraries do to time, log or fuse
            return partial(held)(*args)

        model.forward = timed

    put_on(training.model)
    assert training.profile() == plain


_ELSEWHERE: dict[str, nn.Module] = {}


def test_a_model_whose_blocks_are_not_run_is_refused() -> None:
    training = simple()
    _ELSEWHERE["model"] = copy.deepcopy(training.model)

    def another(*args: Any) -> Any:
        return _ELSEWHERE["model"](*args)

    training.model.forward = another
    with pytest.raises(UnsupportedError, match=r"none of the \d+ blocks.*ran in the profiled step.*fake=False"):
        training.profile()


def test_a_model_in_a_wrapper_that_cannot_be_copied_is_refused_with_what_to_profile() -> None:
    with pytest.raises(ModeError, match=r"wrapped in DataParallel.*model\.module"):
        actmem.profile(nn.DataParallel(simple().model), (torch.randn(2, 8),))


class Frozen(nn.Module):
    """A frozen 16-bit table in front of trained 32-bit blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 16, dtype=torch.bfloat16), requires_grad=False)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x + self.table.float().sum(0)).sum()


def test_the_optimizer_is_named_with_the_dtype_of_what_is_trained() -> None:
    assert actmem.profile(Frozen(), (torch.randn(8, 16),), optimizer="adamw").optimizer == "adamw, float32"
