"""Small models and settings: each sick in one way, beside one that is not."""

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from actmem import Full, OffloadActivations
from actmem.compat.torchtitan import CompilerBudget
from actmem.diagnosis import Diagnosis, doctor
from tests.diagnosis.messages import ReadsTwice

DIM = 8
ON = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}


class Block(nn.Module):
    """A block that has nothing in it that could go wrong, beside what it is given."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.parts(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = Block, **config: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([make() for _ in range(3)])
        if config:
            self.config = SimpleNamespace(**config)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def batch() -> tuple[Tensor]:
    return (torch.linspace(-1, 1, 4 * DIM).view(4, DIM),)


def wrapped(model: Stack, **options: Any) -> Stack:
    """Put torch's own wrapper round each block."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block, **options)
    return model


def every(n: int) -> dict[str, Any]:
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": n}}


def offloading(model: Stack) -> Stack:
    """Put torch's wrapper that offloads round each block."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = offload_wrapper(block)
    return model


def asleep(model: Any, part: str) -> Any:
    model.get_submodule(part).eval()
    return model


def switched_on(model: Stack) -> Stack:
    """Do as transformers' switch does."""
    model.gradient_checkpointing = True
    model._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    return model


class ReadsOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if not ctx.needs_input_grad[0]:
            return grad * ctx.saved_tensors[0].zero_()
        (x,) = ctx.saved_tensors
        return 2 * grad * x


def square(x: Tensor, twice: bool) -> Tensor:
    return ReadsTwice.apply(x) if twice else x


class Kernel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ReadsOnce.apply(x)


class BadKernel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return square(x, True)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 2)
        self.experts = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.gate(x).softmax(-1).topk(1, -1)
        return sum((e(x) * (chosen == i) * scores for i, e in enumerate(self.experts)), torch.zeros(()))


class Remembering(nn.Module):
    """Keep the last result, with or without its graph."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.detached = detached
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        self.last = y.detach() if self.detached else y
        return y


def remembering(detached: bool) -> Stack:
    model = Stack(lambda: Block(Remembering(detached)))
    model(*batch())
    return model


def tied() -> Stack:
    model = Stack()
    for block in model.blocks:
        block.up.weight = model.blocks[0].up.weight
    return model


def frozen(model: Any, part: str) -> Any:
    for parameter in model.get_submodule(part).parameters():
        parameter.requires_grad_(False)
    return model


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = Stack()
        self.language_model = Stack(lambda: Block(nn.Linear(DIM, DIM)))

    def forward(self, x: Tensor) -> Tensor:
        return self.language_model(x + self.vision_tower(x))


def adapted(**frozen_parts: bool) -> Stack:
    model = Stack()
    model.peft_config = {"default": None}
    return frozen(model, "embed")


def saving(*ops: Any) -> Any:
    return partial(create_selective_checkpoint_contexts, list(ops))


def closing_over(*ops: Any) -> Any:
    listed = set(ops)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return op in listed

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy), listed

    return contexts


DROPOUT = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False, "preserve_rng_state": False},
}
KEEPING = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False, "preserve_rng_state": True},
}
DS_BLOCK = {"activation_checkpointing": {"partition_activations": True}, "zero_optimization": {"stage": 2}}
NOW = {"torch": "2.13.0"}
ZERO3 = {"zero_optimization": {"stage": 3}}
FSDP = {"fsdp": "full_shard", "fsdp_config": {"activation_checkpointing": True}}
SENDING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}}
FSDP_SENDING = {
    "distributed_type": "FSDP",
    "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing_offload": True},
}
DS_COMPILE = {"zero_optimization": {"stage": 3}, "compile": {"deepcompile": True, "offload_activation": True}}
DS_CPU = {"zero_optimization": {"stage": 2}, "activation_checkpointing": {"cpu_checkpointing": True}}
BARE, FULL_NAME = torch.ops.aten.mm, torch.ops.aten.mm.default

Visit = Callable[[], Diagnosis]
PATIENTS: dict[str, tuple[str, str, Visit, Visit]] = {
    "fsdp_and_trainer_both_recompute": (
        "recomputing-twice",
        "problem",
        lambda: doctor(Stack(), trainer_args={**ON, **FSDP}),
        lambda: doctor(Stack(), trainer_args={**ON, "fsdp": "full_shard"}),
    ),
    "fsdp_asks_for_it_and_the_models_switch_is_on": (
        "recomputing-twice",
        "problem",
        lambda: doctor(switched_on(Stack()), trainer_args=FSDP),
        lambda: doctor(switched_on(Stack()), trainer_args=ON),
    ),
    "a_mode_beside_checkpointing": (
        "recomputing-twice",
        "problem",
        lambda: doctor(wrapped(Stack()), mode=Full()),
        lambda: doctor(Stack(), mode=Full()),
    ),
    "two_settings_that_offload": (
        "stacked-offloaders",
        "problem",
        lambda: doctor(Stack(), trainer_args={**SENDING, "activation_offloading": True}),
        lambda: doctor(Stack(), trainer_args=SENDING),
    ),
    "accelerates_offload_and_a_mode_that_offloads": (
        "stacked-offloaders",
        "problem",
        lambda: doctor(Stack(), accelerate=FSDP_SENDING, mode=OffloadActivations(to="host")),
        lambda: doctor(Stack(), accelerate=FSDP_SENDING, mode=Full()),
    ),
    "deepspeeds_compiler_offloads_and_trl_too": (
        "stacked-offloaders",
        "problem",
        lambda: doctor(Stack(), trainer_args={"activation_offloading": True, "deepspeed": DS_COMPILE}),
        lambda: doctor(Stack(), trainer_args={"activation_offloading": False, "deepspeed": DS_COMPILE}),
    ),
    "torchs_offload_wrapper_and_deepspeeds_own": (
        "stacked-offloaders",
        "problem",
        lambda: doctor(offloading(Stack()), deepspeed=DS_CPU),
        lambda: doctor(offloading(Stack()), trainer_args={"deepspeed": DS_CPU}),  # which transformers does not read
    ),
    "only_some_layers_by_settings": (
        "every-nth-layer",
        "note",
        lambda: doctor(
            Stack(),
            trainer_args={"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}},
        ),
        lambda: doctor(
            Stack(),
            trainer_args={"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 1}},
        ),
    ),
    "a_slip_of_the_pen": (
        "unknown-keys",
        "warning",
        lambda: doctor(None, trainer_args={"gradient_checkpoint": True, "max_steps": 3, "learning_rate": 1e-3}),
        lambda: doctor(None, trainer_args={"gradient_checkpointing": True, "max_steps": 3, "max_length": 64}),
    ),
    "a_slip_in_the_options": (
        "unknown-keys",
        "warning",
        lambda: doctor(
            None, trainer_args={"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"reentrant": False}}
        ),
        lambda: doctor(None, trainer_args=ON),
    ),
    "a_slip_in_deepspeeds_block": (
        "unknown-keys",
        "warning",
        lambda: doctor(None, deepspeed={"activation_checkpointing": {"partitioned_activations": True}}),
        lambda: doctor(None, deepspeed=DS_BLOCK),
    ),
    "everything_is_frozen": (
        "nothing-trained",
        "problem",
        lambda: doctor(frozen(Stack(), "")),
        lambda: doctor(frozen(Stack(), "embed")),
    ),
    "the_model_is_in_eval_mode": (
        "evaluating",
        "warning",
        lambda: doctor(Stack().eval()),
        lambda: doctor(Stack()),
    ),
    "a_trainer_will_switch_to_training": (
        "evaluating",
        "note",
        lambda: doctor(Stack().eval(), trainer_args=ON),
        lambda: doctor(Stack(), trainer_args=ON),
    ),
    "one_block_is_in_eval_mode": (
        "evaluating",
        "warning",
        lambda: doctor(asleep(Stack(), "blocks.1")),
        lambda: doctor(asleep(frozen(Stack(), "blocks.1"), "blocks.1")),
    ),
    "the_reentrant_form": (
        "reentrant",
        "warning",
        lambda: doctor(Stack(), trainer_args=REENTRANT),
        lambda: doctor(Stack(), trainer_args=ON),
    ),
    "the_reentrant_form_of_a_wrapper": (
        "reentrant",
        "warning",
        lambda: doctor(wrapped(Stack(), checkpoint_impl=CheckpointImpl.REENTRANT)),
        lambda: doctor(wrapped(Stack())),
    ),
    "deepspeeds_block_with_a_trainer": (
        "inert-block",
        "problem",
        lambda: doctor(Stack(), trainer_args={"deepspeed": DS_BLOCK}),
        lambda: doctor(Stack(), trainer_args={"deepspeed": {"zero_optimization": {"stage": 2}}}),
    ),
    "ddp_with_unused_parameters": (
        "ddp-reentrant",
        "problem",
        lambda: doctor(Stack(), trainer_args={**REENTRANT, "ddp_find_unused_parameters": True}),
        lambda: doctor(Stack(), trainer_args={**ON, "ddp_find_unused_parameters": True}),
    ),
    "ddp_of_accelerate": (
        "ddp-reentrant",
        "warning",
        lambda: doctor(Stack(), trainer_args=REENTRANT, accelerate={"distributed_type": "MULTI_GPU"}),
        lambda: doctor(Stack(), trainer_args=REENTRANT, accelerate={"distributed_type": "NO"}),
    ),
    "options_that_leave_the_form_out": (
        "ddp-reentrant",
        "problem",
        lambda: doctor(
            tied(), trainer_args={**REENTRANT, "gradient_checkpointing_kwargs": {}, "ddp_find_unused_parameters": False}
        ),
        lambda: doctor(tied(), trainer_args={"gradient_checkpointing": True, "ddp_find_unused_parameters": False}),
    ),
    "adapters_on_a_frozen_model": (
        "adapters-reentrant",
        "problem",
        lambda: doctor(adapted(), trainer_args=REENTRANT),
        lambda: doctor(adapted(), trainer_args=ON),
    ),
    "cuda_graphs_and_recomputation": (
        "cuda-graphs",
        "problem",
        lambda: doctor(Stack(), trainer_args={**ON, "torch_compile_mode": "reduce-overhead"}),
        lambda: doctor(Stack(), trainer_args={**ON, "torch_compile": True}),
    ),
    "zero3_with_adapters": (
        "zero3-frozen",
        "problem",
        lambda: doctor(adapted(), trainer_args=ON, deepspeed=ZERO3, versions={"deepspeed": "0.19.2"}),
        lambda: doctor(Stack(), trainer_args=ON, deepspeed=ZERO3, versions={"deepspeed": "0.19.2"}),
    ),
    "zero3_with_a_newer_deepspeed": (
        "zero3-frozen",
        "warning",
        lambda: doctor(adapted(), trainer_args=ON, deepspeed=ZERO3, versions={"deepspeed": "0.20.0"}),
        lambda: doctor(adapted(), trainer_args=ON, deepspeed={"zero_optimization": {"stage": 2}}),
    ),
    "fsdp_before_torch_2_13": (
        "known-bugs",
        "problem",
        lambda: doctor(Stack(), trainer_args=FSDP, versions={"torch": "2.12.1"}),
        lambda: doctor(Stack(), trainer_args=FSDP, versions={"torch": "2.13.0+cu130"}),
    ),
    "rrelu": (
        "known-bugs",
        "problem",
        lambda: doctor(Stack(lambda: Block(nn.RReLU())), trainer_args=ON, versions=NOW),
        lambda: doctor(Stack(lambda: Block(nn.ReLU())), trainer_args=ON),
    ),
    "dropout_under_the_compilers_budget": (
        "known-bugs",
        "problem",
        lambda: under_the_compilers_budget(Stack(lambda: Block(nn.Dropout(0.1))), versions=NOW),
        lambda: under_the_compilers_budget(Stack(lambda: Block(nn.Dropout(0.0)))),
    ),
    "dropout_without_the_generators_state": (
        "random-numbers",
        "problem",
        lambda: doctor(Stack(lambda: Block(nn.Dropout(0.1))), trainer_args=DROPOUT),
        lambda: doctor(Stack(lambda: Block(nn.Dropout(0.1))), trainer_args=KEEPING),
    ),
    "dropout_in_a_wrapper_without_it": (
        "random-numbers",
        "problem",
        lambda: doctor(wrapped(Stack(lambda: Block(nn.Dropout(0.1))), preserve_rng_state=False)),
        lambda: doctor(wrapped(Stack(lambda: Block(nn.Dropout(0.0))), preserve_rng_state=False)),
    ),
    "batch_norm_that_is_recomputed": (
        "batch-norm",
        "problem",
        lambda: doctor(Stack(lambda: Block(nn.BatchNorm1d(DIM))), trainer_args=ON),
        lambda: doctor(Stack(lambda: Block(nn.BatchNorm1d(DIM, track_running_stats=False))), trainer_args=ON),
    ),
    "batch_norm_in_plain_training": (
        "batch-norm",
        "note",
        lambda: doctor(Stack(lambda: Block(nn.BatchNorm1d(DIM)))),
        lambda: doctor(Stack(lambda: Block(nn.LayerNorm(DIM)))),
    ),
    "layers_that_share_keys_and_values": (
        "shared-keys-values",
        "problem",
        lambda: doctor(Stack(num_kv_shared_layers=2), trainer_args=ON),
        lambda: doctor(Stack(num_kv_shared_layers=0), trainer_args=ON),
    ),
    "experts_whose_routing_is_not_kept": (
        "routing",
        "warning",
        lambda: doctor(Stack(lambda: Block(Router())), trainer_args=ON, policy=[torch.ops.aten.mm.default]),
        lambda: doctor(Stack(lambda: Block(Router())), trainer_args=ON, policy=[torch.ops.aten.topk.default]),
    ),
    "a_packet_in_a_policy": (
        "packets",
        "problem",
        lambda: doctor(Stack(), policy=[BARE]),
        lambda: doctor(Stack(), policy=[FULL_NAME]),
    ),
    "a_packet_in_the_policy_of_a_wrapper": (
        "packets",
        "problem",
        lambda: doctor(wrapped(Stack(), context_fn=saving(BARE))),
        lambda: doctor(wrapped(Stack(), context_fn=saving(FULL_NAME))),
    ),
    "a_packet_that_a_policy_closes_over": (
        "packets",
        "problem",
        lambda: doctor(wrapped(Stack(), context_fn=closing_over(BARE))),
        lambda: doctor(wrapped(Stack(), context_fn=closing_over(FULL_NAME))),
    ),
    "a_shared_weight_under_autocast": (
        "autocast-shared",
        "problem",
        lambda: doctor(tied(), trainer_args={**ON, "bf16": True}),
        lambda: doctor(tied(), trainer_args=ON),
    ),
    "a_function_that_reads_its_saved_tensors_twice": (
        "saved-tensors-twice",
        "problem",
        lambda: doctor(Stack(lambda: Block(BadKernel())), trainer_args=ON),
        lambda: doctor(Stack(lambda: Block(Kernel())), trainer_args=ON),
    ),
    "a_frozen_tower_that_is_checkpointed": (
        "towers",
        "warning",
        lambda: doctor(frozen(_with_wrapped_tower(), "vision_tower")),
        lambda: doctor(Towers()),
    ),
    "a_trained_tower_that_a_mode_leaves_out": (
        "towers",
        "warning",
        lambda: doctor(Towers(), mode=Full()),
        lambda: doctor(Stack(), mode=Full()),
    ),
    "a_module_that_keeps_a_graph": (
        "graph-kept",
        "warning",
        lambda: doctor(remembering(detached=False)),
        lambda: doctor(remembering(detached=True)),
    ),
    "a_cache_that_is_left_on": (
        "cache-on",
        "warning",
        lambda: doctor(Stack(use_cache=True), trainer_args=ON),
        lambda: doctor(Stack(use_cache=True), trainer_args={**ON, "use_cache": False}),
    ),
    "a_wrapper_that_renames_parameters": (
        "renamed",
        "warning",
        lambda: doctor(wrapped(Stack())),
        lambda: doctor(Stack()),
    ),
}
"""What to check, how bad it is, a visit with it and a visit without."""


def under_the_compilers_budget(model: nn.Module, **options: Any) -> Diagnosis:
    with CompilerBudget(0.5).apply(model):
        return doctor(model, **options)


def _with_wrapped_tower() -> Towers:
    model = Towers()
    wrapped(model.vision_tower)
    return model


# ---------------------------------------------------------------- what only a step shows


class Flipping(nn.Module):
    """Take another path each time."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = False

    def forward(self, x: Tensor) -> Tensor:
        self.odd = not self.odd
        return x.sin() if self.odd else x.cos()


class Noisy(nn.Module):
    """Draw from Python, which no generator of torch knows of."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_seen += x.shape[0]
        return x


class CutOff(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight(x).detach()


class Hoarding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach() * 1)
        return x
