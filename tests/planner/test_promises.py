"""Programs on which predictions once went wrong: each keeps its budget, or is predicted to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

import actmem
from actmem.errors import BudgetError, ModeError, UnsupportedError
from tests.planner.steps import DEVICE, Training, peaks, rows, stack, tokens
from tests.zoo import generator


def mean(out: Tensor) -> Tensor:
    return out.square().mean()


def check_budget(training: Training, budget: int, **options: Any) -> actmem.Plan:
    """Make sure that a plan takes what is predicted of it, and no more than it may."""
    plan = training.fit(budget, **options)
    assert plan.predicted is not None
    profile = training.profile(**{name: value for name, value in options.items() if name in ("fake", "routing")})
    assert training.measured(plan).peak_bytes == actmem.predict(profile, plan, DEVICE).tensor_bytes
    assert plan.predicted.peak_bytes <= budget
    return plan


class Dropped(nn.Module):
    """Many dropouts, and the peak of the forward behind them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(6))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for linear in self.inner:
            x = x + F.dropout(linear(x), 0.1)
        with torch.no_grad():
            scale = x.repeat(1, 24).abs().amax()
        return x / scale


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
def test_the_input_of_a_dropout_is_not_held_for_the_shape_of_its_mask(fake: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Dropped(64) for _ in range(3)])
    training = Training(model, rows(256, 64), mean)
    full, plain = peaks(training.profile(fake=fake))
    for part in (0.5, 0.7, 0.9):
        check_budget(training, int(full + part * (plain - full)), fake=fake)


class Net(nn.Module):
    """Nothing repeats: only the whole of it can be a block."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256))
        self.b = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512))
        self.c = nn.Linear(512, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x))).mean()


def test_a_model_that_is_one_block_is_planned_for_a_budget() -> None:
    torch.manual_seed(0)
    training = Training(Net(), rows(1000, 64), lambda out: out, blocks=".")
    _, plain = peaks(training.profile())
    for part in (0.95, 0.85, 0.75):
        plan = check_budget(training, int(part * plain))
        assert {rule.decision for rule in plan.rules} == {"save", "recompute"}
    assert "1 block: the model itself" in str(plan)
    assert "in the model itself" in str(plan)


def test_a_budget_for_a_model_that_is_one_block_is_applied_and_guarded() -> None:
    training = Training(Net(), rows(1000, 64), lambda out: out, blocks=".")
    _, plain = peaks(training.profile())
    mode = actmem.Budget(int(0.9 * plain), device=DEVICE, optimizer=None)
    with actmem.apply(training.model, mode, example=training.batch, blocks="."):
        assert training.measured().peak_bytes <= 0.9 * plain
        with pytest.raises(BudgetError, match="its predicted peak is"):
            training.model(*rows(4000, 64))


# -------------------------------------------------------------------- what the optimizer keeps


class Pooled(nn.Module):
    """Two heads, of which a batch uses one or none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)])
        self.pooler = nn.Linear(32, 32)
        self.other = nn.Linear(32, 32)

    def forward(self, x: Tensor, head: str = "") -> Tensor:
        x = self.layers(x)
        return getattr(self, head)(x) if head else x


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
@pytest.mark.parametrize("num_batches", [1, 2])
@pytest.mark.parametrize("head", ["", "pooler"])
def test_a_parameter_without_a_gradient_has_no_optimizer_state(head: str, num_batches: int, fake: bool) -> None:
    torch.manual_seed(0)
    model = Pooled()
    optimizer = torch.optim.AdamW(model.parameters())
    training = Training(model, (*rows(64), head), mean, optimizer=optimizer, num_batches=num_batches)
    profile = training.profile(fake=fake, microbatches=num_batches)
    measured = training.measured()
    assert profile.optimizer_bytes == sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    assert actmem.predict(profile, actmem.SaveEverything(), DEVICE).tensor_bytes == measured.peak_bytes


def test_what_any_of_several_batches_trains_has_optimizer_state() -> None:
    torch.manual_seed(0)
    model = Pooled()
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [(*rows(64), head) for head in ("pooler", "other")]
    plan = actmem.fit(model, examples=batches, loss=mean, budget="1MiB", device=DEVICE, headroom=0)
    assert plan.predicted is not None
    training = Training(model, batches[0], mean, optimizer=optimizer)
    with actmem.apply(model, plan):
        training.measured()
        training.batch = batches[1]
        assert training.measured().peak_bytes == plan.predicted.peak_bytes


class Expert(nn.Module):
    """A block in which a batch need not come by every parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.always(x).tanh()


def test_what_a_block_did_not_train_in_this_batch_is_counted_for_the_next_may() -> None:
    profile = actmem.profile(nn.Sequential(Expert(), Expert()), rows(4, 16), loss=mean)
    assert profile.optimizer_bytes >= 2 * profile.parameters_bytes


# -------------------------------------------------------------------- what cannot be trained


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
def test_a_frozen_model_is_refused(fake: bool) -> None:
    model = stack().requires_grad_(False)
    with pytest.raises(ModeError, match=r"Sequential is frozen: .*model\.requires_grad_\(True\)"):
        actmem.profile(model, rows(4), loss=mean, fake=fake)
    actmem.profile(model, (rows(4)[0].requires_grad_(),), loss=mean, fake=fake, optimizer=None)


LOSSES: dict[str, tuple[Any, str]] = {
    "float": (lambda _: 0.5, r"what loss= returned is a float.* without \.item\(\)"),
    "none": (lambda _: None, "what loss= returned is a NoneType"),
    "rows": (lambda out: out, r"has the shape \[4, 32\], .* one number"),
    "detached": (lambda out: out.detach().mean(), "depends on nothing that is trained"),
}


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_no_backward_pass_starts_from_is_refused_with_what_it_is(name: str, fake: bool) -> None:
    loss, message = LOSSES[name]
    with pytest.raises(ModeError, match=message):
        actmem.fit(stack(), rows(4), budget="1MiB", loss=loss, device=DEVICE, fake=fake)


def test_a_loss_that_ends_in_a_number_is_told_from_a_model_that_looks_at_numbers() -> None:
    with pytest.raises(UnsupportedError, match="return the tensor itself"):
        actmem.profile(stack(), rows(4), loss=lambda out: out.mean().item())


# -------------------------------------------------------------------- how fake results lie


class Normed(nn.Module):
    """Batch norm over channels that come last: its result lies in order, whatever the fake one does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.up(self.norm(x.transpose(1, 2)).transpose(1, 2)))


def test_batch_norm_of_a_transposed_input_keeps_its_budget() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Normed(32) for _ in range(4)])
    training = Training(model, (torch.randn(8, 32, 32, generator=generator()),), mean)
    check_budget(training, sum(peaks(training.profile())) // 2)


# -------------------------------------------------------------------- what is filled piece by piece


def sparse_attention() -> nn.Module:
    """Return a model whose indexer fills a tensor by pieces, beside a choice that is never made again."""
    config = DeepseekV32Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=8,
        first_k_dense_replace=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return DeepseekV32ForCausalLM(config).train()


@pytest.mark.parametrize("mode", [actmem.Full(), actmem.Selective(save=["attention", actmem.every_second("matmul")])])
def test_the_smallest_cut_knows_what_was_filled_piece_by_piece(mode: Any) -> None:
    training = Training(sparse_attention(), {**tokens(2, 32), "use_cache": False})
    found, measured = actmem.predict(training.profile(), mode, DEVICE), training.measured(mode)
    assert found.tensor_bytes == measured.peak_bytes
    assert abs(found.saved_bytes - measured.saved_bytes) <= 8


# -------------------------------------------------------------------- what the loop holds


def test_a_loop_that_keeps_the_output_until_the_step_is_over_is_the_one_that_is_predicted() -> None:
    training = Training(stack(), rows(256), mean)
    found = actmem.predict(training.profile(), actmem.Full(), DEVICE)
    assert found.tensor_bytes == training.measured(actmem.Full()).peak_bytes


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
def test_a_loop_that_lets_go_of_the_output_is_predicted_without_it(fake: bool) -> None:
    training = Training(stack(), rows(256), mean)
    model, (x,) = training.model, training.batch
    found = actmem.profile(model, step=lambda: mean(model(x)).backward(), fake=fake)
    with actmem.apply(model, actmem.Full()):
        for _ in range(2):
            mean(model(x)).backward()
        measured = actmem.measure(lambda: mean(model(x)).backward(), model=model)
    assert actmem.predict(found, actmem.Full(), DEVICE).tensor_bytes == measured.tensor_bytes
