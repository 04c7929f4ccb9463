"""What transformers and peft do around their layers: caches, adapters, keyword arguments, shared keys and values."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hazards.comparing import (
    HF_NON_REENTRANT,
    HF_REENTRANT,
    NON_REENTRANT,
    REENTRANT,
    Form,
    GoesWrong,
    Hazard,
    Raises,
    by_hand,
)
from tests.hazards.running_twice import MATMUL, issue, pytorch, saving
from tests.hazards.stacks import DIM, Stack, inputs, stack
from tests.zoo import VOCAB, ZOO, Batch, awakened, cached_tokens, generator, tokens

LLAMA = ZOO["llama"].build
KV_CACHE_REPORTS = (issue("huggingface/transformers", 34928), issue("NVIDIA-NeMo/Automodel", 3677))


class Trained:
    """A step that keeps the length of the returned cache on the model."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __call__(self, model: Any) -> Tensor:
        out = model(**self.batch(model))
        out.loss.backward()
        model.cache_length = out.past_key_values.get_seq_length() if out.past_key_values is not None else 0
        return out.loss


def unpadded(model: nn.Module) -> Batch:
    return {**tokens(model), "use_cache": True}


def cache_length(model: Any) -> dict[str, Any]:
    return {"cache length": getattr(model, "cache_length", None)}


def in_two_chunks(model: Any) -> Tensor:
    """Train on a text in two chunks, the second one reading the keys and values of the first."""
    ids = torch.randint(3, VOCAB, (2, 12), generator=generator())
    first = model(input_ids=ids[:, :6], labels=ids[:, :6], use_cache=True)
    second = model(input_ids=ids[:, 6:], labels=ids[:, 6:], past_key_values=first.past_key_values, use_cache=True)
    loss = first.loss + second.loss
    loss.backward()
    return loss


CACHES = (
    Hazard(
        "a_kv_cache_with_padding_may_be_on",
        "C2",
        "Llama with `use_cache=True` (its default) and a padded batch; layers wrapped, as FSDP's wrapper does",
        LLAMA,
        Trained(cached_tokens),
        NON_REENTRANT,
        Raises("size of tensor a"),
        KV_CACHE_REPORTS,
        state=cache_length,
        other="raises",
    ),
    Hazard(
        "a_kv_cache_is_filled_once",
        "C2",
        "The same without padding",
        LLAMA,
        Trained(unpadded),
        NON_REENTRANT,
        GoesWrong(state_off="cache length"),
        KV_CACHE_REPORTS,
        state=cache_length,
        other="raises",
    ),
    Hazard(
        "a_kv_cache_may_be_on_while_matmuls_are_saved",
        "C2",
        "The same, matmuls saved selectively",
        LLAMA,
        Trained(cached_tokens),
        by_hand("selective", use_reentrant=False, context_fn=saving(*MATMUL)),
        Raises("not found in storage|size of tensor a"),
        KV_CACHE_REPORTS,
        state=cache_length,
    ),
    Hazard(
        "a_text_may_be_trained_in_chunks_through_the_cache",
        "C2",
        "Llama reads the second half of a text through the cache of the first (transformers logs that it drops it)",
        LLAMA,
        in_two_chunks,
        HF_NON_REENTRANT,
        GoesWrong(loss_off=1e-4, gradients_off=0.01),
        (issue("huggingface/trl", 3683), issue("huggingface/transformers", 28056)),
        other="wrong",
    ),
)

# ---------------------------------------------------------------- C1: frozen inputs


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x))


def with_lora(**config: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = get_peft_model(stack(Feed)(), LoraConfig(r=4, target_modules=["up"], **config)).train()
        return awakened(model)


def frozen_first() -> nn.Module:
    model: Any = stack(Feed)()
    model.first.requires_grad_(False)
    return model


def plain_step(model: nn.Module) -> Tensor:
    loss = model(inputs()).square().mean()
    loss.backward()
    return loss


FROZEN = (
    Hazard(
        "adapters_on_a_frozen_model_get_their_gradients",
        "C1",
        "PEFT LoRA in the blocks, all else frozen",
        with_lora,
        plain_step,
        REENTRANT,
        Raises("does not require grad"),
        (issue("huggingface/transformers", 42489), issue("huggingface/transformers", 26377)),
        other="exact",
    ),
    Hazard(
        "adapters_get_their_gradients_beside_a_trained_head",
        "C1",
        "The same with a trainable head, so that the loss still has a gradient",
        functools.partial(with_lora, modules_to_save=["head"]),
        plain_step,
        REENTRANT,
        GoesWrong(num_missing=6),
        (issue("microsoft/LoRA", 120), issue("cloneofsimo/lora", 26)),
        other="exact",
    ),
    Hazard(
        "blocks_behind_a_frozen_prefix_get_their_gradients",
        "C1",
        "Trainable blocks behind a frozen projection",
        frozen_first,
        plain_step,
        REENTRANT,
        GoesWrong(num_missing=6),
        (*pytorch(7617), "https://github.com/modelscope/ms-swift/pull/10142"),
        other="exact",
    ),
)

# ---------------------------------------------------------------- C3: arguments


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x)) * mask


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, condition: dict[str, list[Tensor]]) -> Tensor:
        return x + F.silu(self.up(x) * condition["scale"][0])


class ConditionedStack(Stack):
    def __init__(self) -> None:
        super().__init__(Conditioned)
        self.condition = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, {"scale": [torch.exp(self.condition(x))]})


def conditioned() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ConditionedStack().train()


def masked_step(model: nn.Module) -> Tensor:
    loss = model(inputs(), mask=(inputs() > 0).float()).square().mean()
    loss.backward()
    return loss


ARGUMENTS = (
    Hazard(
        "keyword_arguments_reach_the_block",
        "C3",
        "A block takes a tensor by keyword",
        stack(Masked),
        masked_step,
        REENTRANT,
        Raises("Unexpected keyword arguments"),
        ("https://github.com/unslothai/unsloth-zoo/pull/1038", issue("huggingface/transformers", 35509)),
        other="exact",
    ),
    Hazard(
        "tensors_in_nested_arguments_get_their_gradients",
        "C3",
        "A block takes tensors that need a gradient in a dict of lists",
        conditioned,
        plain_step,
        REENTRANT,
        Raises("second time"),
        pytorch(124725),
        other="exact",
    ),
)

# ---------------------------------------------------------------- E2: layers that share keys and values


def shared_kv(name: str, model: str, form: Form, expected: Raises | GoesWrong, does: str, *reported: str) -> Hazard:
    case = ZOO[model]

    def step(model: nn.Module) -> Tensor:
        loss = case.step(model)
        loss.backward()
        return loss

    other = "exact" if form is HF_REENTRANT else "raises"
    return Hazard(name, "E2", does, case.build, step, form, expected, reported, other=other)


SHARED_KV = (
    shared_kv(
        "gemma3n_may_share_keys_and_values",
        "gemma3n_shared_kv",
        HF_REENTRANT,
        GoesWrong(gradients_off=0.01),
        "Gemma-3n, whose last layers read the keys and values of earlier ones",
        "https://github.com/huggingface/transformers/pull/46572",
        "https://github.com/unslothai/unsloth-zoo/pull/1275",
    ),
    shared_kv(
        "gemma4_may_share_keys_and_values",
        "gemma4_shared_kv",
        HF_REENTRANT,
        GoesWrong(gradients_off=0.01),
        "Gemma-4 with `num_kv_shared_layers=2`",
        issue("NVIDIA-NeMo/Automodel", 1705),
        "https://github.com/unslothai/unsloth-zoo/pull/813",
    ),
    shared_kv(
        "gemma4_may_share_keys_and_values_with_its_cache_on",
        "gemma4_shared_kv",
        NON_REENTRANT,
        Raises("size of tensor a"),
        "The same with its cache on (the default); layers wrapped",
        issue("NVIDIA-NeMo/Automodel", 3677),
    ),
)

HAZARDS = (*CACHES, *FROZEN, *ARGUMENTS, *SHARED_KV)
