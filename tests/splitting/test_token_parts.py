"""Parts of blocks that run on pieces of tokens: less memory, as predicted; refused where tokens see one another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import actmem
from actmem.errors import ModeError, UnsupportedError

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 50,
}
IN_PIECES = actmem.Split(parts={"mlp": 8})


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL)).train()


def experts() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256)
    return Qwen3MoeForCausalLM(config).train()


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 50, (2, 256))
    return {"input_ids": ids, "labels": ids}


def peak(model: nn.Module) -> int:
    given = batch()

    def step() -> None:
        out = model(**given)  # held, as predicted
        out.loss.backward()

    step()
    model.zero_grad(set_to_none=True)
    found = actmem.measure(step, model=model).peak_bytes
    model.zero_grad(set_to_none=True)
    return found


MODES = [
    actmem.SaveEverything(),
    actmem.Full(),
    actmem.Selective(save=["matmul"]),
    actmem.Targets(["norm", "mlp"]),
    actmem.OffloadActivations(to="disk"),
]


@pytest.mark.parametrize("mode", MODES, ids=lambda m: type(m).__name__)
def test_with_every_mode_training_is_within_rounding_of_plain_training(mode: Any) -> None:
    found = actmem.verify(llama(), batch(), mode, split=IN_PIECES)
    assert found.ok, found
    note = "model.layers.0.mlp and 1 more: forward and backward in 8 pieces of tokens."
    assert note in found.report.notes


def test_in_bfloat16_it_is_no_further_from_the_truth_than_twice_as_far() -> None:
    found = actmem.verify(llama().bfloat16(), batch(), actmem.Full(), split=IN_PIECES)
    assert found.ok, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_predicted_peak_is_the_measured_one_and_a_third_of_that_without_pieces(dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    state = sum(p.nbytes for p in model.parameters()) * 2
    with actmem.apply(model, actmem.Full()):
        whole = peak(model)
    plan = actmem.fit(model, batch(), budget=whole // 2, optimizer=None, split=IN_PIECES)
    assert not plan.bitwise and actmem.Plan.from_json(plan.to_json()) == plan
    with actmem.apply(model, plan):
        assert abs(peak(model) - plan.predicted.peak_bytes) <= 64
    with actmem.apply(model, actmem.Full(), split=IN_PIECES):
        assert (peak(model) - state) * 3 <= whole - state


@pytest.mark.parametrize("mode", [actmem.SaveEverything(), actmem.Full(), actmem.Selective(save=["matmul"])], ids=repr)
def test_modes_are_predicted_as_they_are_measured(mode: Any) -> None:
    model = llama()
    with actmem.apply(model, mode, split=IN_PIECES):
        measured = peak(model)
    found = actmem.profile(model, batch(), optimizer=None, split=IN_PIECES)
    assert abs(actmem.predict(found, mode).tensor_bytes - measured) <= 64


def test_experts_run_in_pieces_too() -> None:
    split = actmem.Split(parts={"routed_experts": 4})
    with pytest.raises(UnsupportedError, match="cannot run in float64"):
        actmem.verify(experts(), batch(), actmem.Full(), split=split)
    model = experts()
    model.set_experts_implementation("batched_mm")
    found = actmem.verify(model, batch(), actmem.Full(), split=split)
    assert found.ok, found
    assert "model.layers.0.mlp.experts and 1 more: forward and backward in 4 pieces of tokens." in found.report.notes


def test_a_module_is_named_by_its_path_in_the_block_or_by_a_glob() -> None:
    for name in ("mlp", "*.mlp", "model.layers.1.mlp"):
        with actmem.apply(llama(), actmem.Full(), split=actmem.Split(parts={name: 4})) as applied:
            assert applied.plan.split == actmem.Split(parts={name: 4})
    with actmem.apply(model := llama(), actmem.Full(), split=actmem.Split(parts={"model.layers.1.mlp": 4})) as applied:
        model(**batch()).loss.backward()
        assert "model.layers.1.mlp: forward and backward in 4 pieces of tokens." in applied.report().notes


class Mixer(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(x)


class Before(nn.Module):
    """Each token sees the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


class Later(Before):
    """Each token sees the one after it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + torch.nn.functional.pad(x, (0, 0, 0, 1))[:, 1:])


class Places(Before):
    """Each token knows its place."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * torch.arange(x.shape[1])[:, None])


class Ranked(Before):
    """Only the largest tokens get through: no gradient shows it."""

    def forward(self, x: Tensor) -> Tensor:
        sizes = x.detach().abs().sum(-1, keepdim=True)
        return self.inner(x) * (sizes >= sizes.median())


class Counting(Before):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_tokens", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_tokens += x.shape[1]
        return self.inner(x)


class Pooled(Before):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).mean(1, keepdim=True)


class Normed(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(8, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def stack(part: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Mixer(part()) for _ in range(3)])


SEEN = "tokens see one another"
WRONG = [
    (Before, SEEN),
    (Later, SEEN),
    (Ranked, SEEN),
    (Normed, SEEN),
    (Places, "has other results alone"),
    (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), "draws random numbers"),
    (Counting, "writes to its buffers"),
    (Pooled, "does not have a row for each token"),
]


@pytest.mark.parametrize(("part", "why"), WRONG, ids=[p.__name__ for p, _ in WRONG])
def test_what_is_not_done_token_by_token_is_refused_with_the_reason(part: Any, why: str) -> None:
    model = stack(part)
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 32, 8)
    wanted = torch.get_rng_state()
    with actmem.apply(model, actmem.Full(), split=actmem.Split(parts={"part": 4})):
        with pytest.raises(UnsupportedError, match=f"0.part cannot run in pieces of tokens: .*{why}"):
            model(x)
        assert torch.equal(torch.get_rng_state(), wanted)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    model(x)  # as before


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"mpl": 8}, "no target and no module of a block is named so. Targets here: attention, attn_proj, mlp, norm"),
        ({"routed_experts": 8}, "no block of this model has that target"),
        ({"mlp": 0}, "how many pieces"),
        ({}, "splits nothing"),
        ([], "Expected names and numbers"),
    ],
)
def test_names_that_mean_nothing_are_refused(parts: Any, said: str) -> None:
    model = llama()
    with pytest.raises(ModeError, match=said):
        actmem.apply(model, actmem.Full(), split=actmem.Split(parts=parts))
    model(**batch()).loss.backward()


def test_hooks_and_evaluation_leave_the_part_whole_and_the_report_says_so() -> None:
    model, seen = llama(), []
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda m, a, out: seen.append(out.shape))
    with actmem.apply(model, actmem.Full(), split=IN_PIECES) as applied:
        model(**batch()).loss.backward()
        notes = applied.report().notes
    assert [tuple(shape) for shape in seen] == [(2, 256, 256)]
    assert any(n.startswith("model.layers.0.mlp did not run in pieces: not called in training mode") for n in notes)
    assert "model.layers.1.mlp: forward and backward in 8 pieces of tokens." in notes
