"""Python code that runs a second time and does not do the same: contexts, random numbers, state."""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations

import actmem
from tests.hazards.comparing import NON_REENTRANT, GoesWrong, Hazard, Raises, by_hand
from tests.hazards.stacks import DIM, loss_of, stack, train
from tests.zoo import ZOO


def issue(repository: str, number: int) -> str:
    return f"https://github.com/{repository}/issues/{number}"


def pytorch(*numbers: int) -> tuple[str, ...]:
    return tuple(issue("pytorch/pytorch", n) for n in numbers)


# ---------------------------------------------------------------- A1: recomputation takes another path


class Memory(nn.Module):
    """Attend to the previous call's input too, as Transformer-XL does; there is none in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(DIM, DIM)
        self.memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        seen = x if self.memory is None else torch.cat([self.memory, x], 1)
        self.memory = x.detach()
        return x + torch.softmax(self.mix(x) @ seen.mT, -1) @ seen


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


def math_attention(model: nn.Module) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        loss = loss_of(model)
    loss.backward()
    return loss


class TiedBlock(nn.Module):
    """A block whose weight other blocks share: under autocast it is cast once, and the result is cached."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.down = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(F.silu(self.up(x))))


def tied() -> nn.Module:
    model: Any = stack(TiedBlock)()
    for block in model.blocks:
        block.up.weight = model.blocks[0].up.weight
    return model


def autocast_step(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_of(model)
    loss.backward()
    return loss


class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.down = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.5:
            return x + torch.tanh(self.up(x))
        return x + self.down(torch.tanh(self.up(x)))


def saving(*ops: Any, **options: Any) -> Any:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return lambda: create_selective_checkpoint_contexts(list(ops), **options)


MATMUL = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
CAST = torch.ops.aten._to_copy.default

OTHER_PATH = (
    Hazard(
        "a_block_that_remembers_its_last_input_may_be_recomputed",
        "A1",
        "A block keeps a tensor from call to call; before the first call there is none (Transformer-XL memory)",
        stack(Memory),
        train,
        NON_REENTRANT,
        Raises("CheckpointError.*(different metadata|different number)"),
        (issue("NVlabs/LongLive", 16),),
        other="wrong",
    ),
    Hazard(
        "a_branch_on_a_random_number_is_taken_once",
        "A1",
        "A block chooses its path by Python's `random` (layer drop)",
        stack(LayerDrop),
        train,
        NON_REENTRANT,
        Raises("CheckpointError.*(different metadata|different number)"),
        other="wrong",
    ),
    Hazard(
        "an_attention_kernel_chosen_by_context_is_kept",
        "A1",
        "Forward runs under `sdpa_kernel(MATH)`, backward outside it",
        stack(SelfAttention),
        math_attention,
        NON_REENTRANT,
        Raises("CheckpointError.*(different metadata|different number)"),
        (issue("huggingface/trl", 4314), "https://github.com/NVIDIA-NeMo/Automodel/pull/2993"),
        other="wrong",
    ),
    Hazard(
        "a_weight_shared_under_autocast_may_be_recomputed",
        "A1",
        "Blocks share a weight under autocast; casts and matmuls are saved selectively",
        tied,
        autocast_step,
        by_hand("selective", use_reentrant=False, context_fn=saving(*MATMUL, CAST)),
        Raises("not found in storage"),
        pytorch(141896, 193338),
        mode=actmem.Selective(save=["matmul", "aten._to_copy"]),
    ),
)

# ---------------------------------------------------------------- A3: other random numbers


class RandomReLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.act = nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.up(x))


class PrivateNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x)) * torch.rand(x.shape, generator=self.own)


class PythonNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x) * random.uniform(0.5, 1.5))


def filled_step(model: nn.Module) -> Tensor:
    """Run one step with uninitialised memory filled by NaN, so that whoever reads it is found out every time."""
    torch.use_deterministic_algorithms(True)
    try:
        return train(model)
    finally:
        torch.use_deterministic_algorithms(False)


def gpt2_step(model: nn.Module) -> Tensor:
    loss = ZOO["gpt2_dropout"].step(model)
    loss.backward()
    return loss


RANDOM = (
    Hazard(
        "dropout_masks_are_the_same_in_backward",
        "A3",
        "GPT-2 with dropout 0.1 and `preserve_rng_state=False`, as some trainers set it for speed",
        ZOO["gpt2_dropout"].build,
        gpt2_step,
        by_hand("non-reentrant, preserve_rng_state=False", use_reentrant=False, preserve_rng_state=False),
        GoesWrong(gradients_off=0.01),
        ("https://github.com/allenai/OLMo-core/pull/828", "https://github.com/ankanbhunia/PIDM/pull/66"),
    ),
    Hazard(
        "rrelu_is_exact",
        "A3",
        "`nn.RReLU` in training, with uninitialised memory filled by NaN (deterministic algorithms on)",
        stack(RandomReLU),
        filled_step,
        NON_REENTRANT,
        GoesWrong(gradients_off=0.01),
        pytorch(193671),
        other="exact",
    ),
    Hazard(
        "noise_from_a_private_generator_is_the_same_in_backward",
        "A3",
        "A block draws from a `torch.Generator` of its own",
        stack(PrivateNoise),
        train,
        NON_REENTRANT,
        GoesWrong(gradients_off=0.01),
        other="wrong",
    ),
    Hazard(
        "noise_from_python_is_the_same_in_backward",
        "A3",
        "A block scales by a number from Python's `random`",
        stack(PythonNoise),
        train,
        NON_REENTRANT,
        GoesWrong(gradients_off=0.01),
        other="wrong",
    ),
)

# ---------------------------------------------------------------- A4: things that happen twice


def resnet_step(model: nn.Module) -> Tensor:
    loss = ZOO["resnet"].step(model)
    loss.backward()
    return loss


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.num_tokens = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_tokens += x.shape[0] * x.shape[1]
        return x + torch.tanh(self.up(x))


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.spectral_norm(nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x))


class ExpertLoad(nn.Module):
    """Count the tokens of each expert, in a buffer that the first call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 4)
        self.experts = nn.Parameter(torch.randn(4, DIM, DIM) / DIM**0.5)
        self.load: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        counts = F.one_hot(chosen, 4).sum((0, 1))
        self.load = counts if self.load is None else self.load.add_(counts)
        return x + torch.einsum("bsd,bsde->bse", x, self.experts[chosen]) * weight[..., None]


def tokens_of_first(model: Any) -> dict[str, Any]:
    return {"num_tokens": model.blocks[0].num_tokens}


TWICE = (
    Hazard(
        "batch_norm_statistics_are_updated_once",
        "A4",
        "A ResNet with batch norm",
        ZOO["resnet"].build,
        resnet_step,
        NON_REENTRANT,
        GoesWrong(state_off="running_mean"),
        pytorch(96136, 62471),
        state=lambda model: {
            name: buffer
            for name, buffer in model.named_buffers()
            if name in ("layer1.0.bn1.running_mean", "layer1.0.bn1.num_batches_tracked")
        },
        other="wrong",
    ),
    Hazard(
        "a_counter_in_forward_counts_once",
        "A4",
        "A block counts the tokens it has seen",
        stack(Counting),
        train,
        NON_REENTRANT,
        GoesWrong(state_off="num_tokens"),
        ("https://github.com/NVIDIA/Megatron-LM/pull/1433",),
        state=tokens_of_first,
        other="wrong",
    ),
    Hazard(
        "spectral_norm_iterates_once",
        "A4",
        "Spectral norm, whose power iteration moves on at every forward",
        stack(Spectral),
        train,
        NON_REENTRANT,
        GoesWrong(gradients_off=1e-3),
        state=lambda model: {"up._u": model.blocks[0].up.parametrizations.weight[0]._u},
        other="wrong",
    ),
    Hazard(
        "expert_load_is_counted_once",
        "A4",
        "A router counts tokens per expert",
        stack(ExpertLoad),
        train,
        NON_REENTRANT,
        GoesWrong(state_off="load"),
        ("https://github.com/NVIDIA-NeMo/Automodel/pull/3247",),
        state=lambda model: {"load": model.blocks[0].load},
        other="wrong",
    ),
)

HAZARDS = (*OTHER_PATH, *RANDOM, *TWICE)
