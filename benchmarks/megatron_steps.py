"""Training steps of Megatron-LM's functional tests, as the last rank runs them: the one whose peak they publish.

A row of the table tells most of a step. The rest is in the configuration of its case, which the name of the case tells,
and in the program's defaults: dropout of 0.1, the vocabulary of GPT-2 or BERT, parameters in half precision, with a
copy, moments and (for bfloat16) gradients in float32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh

import actmem
from actmem.devices import Device, device
from benchmarks.megatron_models import T5, BertStage, GptStage, LayerFacts, padded_vocabulary

__all__ = [
    "MegatronStep",
    "default_dtype",
    "further_bytes",
    "megatron_card",
    "megatron_profile",
    "megatron_step",
    "schedule",
]

WORKSPACE_BYTES = 8 * 4096 * 1024
"""CUBLAS_WORKSPACE_CONFIG=:4096:8, in the configuration of every case but those of releases."""

WORDS = {"gpt": 50_257, "bert": 30_522, "t5": 28_996 + 2 + 100}
"""Of GPT-2, BERT (uncased), and BERT (cased) with T5's marks and sentinels."""


@dataclass(frozen=True)
class MegatronStep:
    """What one rank does in a step, as far as it matters for memory."""

    family: str
    stages: tuple[int, ...]
    """The number of layers of each of the rank's stages."""
    width: int
    inner: int
    num_heads: int
    sequence: int
    batch: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batches: int = 1
    group: int = 1
    """How many micro-batches in a row go through a virtual stage."""
    distributed: bool = False
    """Whether the state of the optimizer is divided among the copies of the model."""
    half: bool = False
    """float16, with gradients in float16, and no bfloat16."""
    own: bool = False
    fused_softmax: bool = True
    bias: bool = True
    gated: bool = False
    rotary: bool = False
    tied: bool = True
    pairs: bool = True
    deferred: int = 0
    """For how many micro-batches the gradient of the output layer's weight is put off."""


def megatron_step(row: Mapping[str, str]) -> MegatronStep:
    """Return the step of a row.

    >>> row = {"case": "gpt/gpt3_mcore_te_tp1_pp4_vp1_decoupled_lr", "layers": "12", "hidden": "512", "heads": "8"}
    >>> row |= {"seq": "1024", "micro_batch": "4", "global_batch": "32", "tp": "1", "pp": "4", "bf16": "True"}
    >>> step = megatron_step(row | {"virtual_pp_or_layers_per_stage": "1"})
    >>> step.stages, step.micro_batches
    ((1, 1, 1), 4)
    """
    family, name = row["case"].split("/")
    tp, pp = int(row["tp"]), int(row["pp"])
    world = 64 if name.startswith("bert_release") else 4 if name.endswith("_1node") else 8
    dp = max(1, world // (tp * pp))
    width, batch = int(row["hidden"]), int(row["micro_batch"])
    gated = "_swiglu" in name
    inner = int(row.get("ffn") or 0) or (int(8 * width / 3 / 64) * 64 if gated else 4 * width)
    stages = _stages(family, name, row)
    group = 5 if "_tunable_overlap" in name else pp
    micro_batches = int(row["global_batch"]) // (batch * dp)
    deferred = 2 if "_defer_embedding_wgrad" in name else 0
    own = row.get("attention_backend") == "local" or ("_te_" not in name and row.get("attention_backend") != "unfused")
    return MegatronStep(
        family,
        stages,
        width,
        inner,
        int(row["heads"]),
        512 if family == "t5" else int(row["seq"]),
        batch,
        tp=tp,
        pp=pp,
        dp=dp if row.get("distributed_optimizer") else 1,  # copies of all of it are no matter
        micro_batches=min(micro_batches, 2 * group if len(stages) > 1 else deferred + 2),  # the others are the same
        group=group if len(stages) > 1 else 1,
        distributed=bool(row.get("distributed_optimizer")),
        half=not row.get("bf16"),
        own=own,
        fused_softmax="_uninstall_te" not in name,
        bias="_disable_bias_linear" not in name,
        gated=gated,
        rotary="_rope_" in name,
        tied=not any(each in name for each in ("_untie", "_uneven_", "_account_for_")),
        pairs=not name.startswith("bert_release"),
        deferred=deferred,
    )


def _stages(family: str, name: str, row: Mapping[str, str]) -> tuple[int, ...]:
    """Return how many layers each stage of the last rank has, in the order of the model."""
    if family == "t5":
        return (12,)
    if "_uneven_" in name:
        return (2,)
    if "_account_for_" in name:
        return (1, 0)  # embedding and loss count as layers: each of eight virtual stages has one
    layers, pp, each = int(row["layers"]), int(row["pp"]), int(row.get("virtual_pp_or_layers_per_stage") or 0)
    return (each,) * (layers // pp // each) if each else (layers // pp,)


def schedule(num_stages: int, micro_batches: int, group: int) -> Iterator[tuple[str, int]]:
    """Yield what the last rank of a pipeline does, in order: ("forward" or "backward", number of its stage).

    Without virtual stages, forward and backward take turns. With them, it first runs a group of micro-batches through
    all stages but the last (pipeline_parallel/schedules.py).

    >>> "".join(kind[0] + str(stage) for kind, stage in schedule(1, 2, 1))
    'f0b0f0b0'
    >>> "".join(kind[0] + str(stage) for kind, stage in schedule(2, 2, 2))
    'f0f0f1b1f1b1b0b0'
    """
    groups = [range(begin, min(begin + group, micro_batches)) for begin in range(0, micro_batches, group)]
    forward = [stage for batches in groups for stage in range(num_stages) for _ in batches]
    warm_up = (num_stages - 1) * group
    yield from (("forward", stage) for stage in forward[:warm_up])
    for nth in range(len(forward)):
        if warm_up + nth < len(forward):
            yield "forward", forward[warm_up + nth]
        yield "backward", num_stages - 1 - forward[nth]


# --------------------------------------------------------------------------------------- one step


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    """Make parameters in another dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _InPlaceAdam(torch.optim.Optimizer):
    """Adam in fused kernels: its state is made in the first step, and nothing else is allocated."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # noqa: ARG002
        """Update every parameter."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(p)
                    state[name].mul_(0.9)
                p.data.addcdiv_(state["exp_avg"], state["exp_avg_sq"])


class _MainParameters:
    """The optimizer's part (optimizer/optimizer.py, distrib_optimizer.py): the gradients, and what it steps."""

    def __init__(self, model: nn.Module, step: MegatronStep) -> None:
        self.model, self.step_facts = model, step
        self.trained = list(dict.fromkeys(model.parameters()))
        num = sum(p.numel() for p in self.trained)
        gradients = torch.zeros(num, dtype=torch.float16 if step.half else torch.float32)
        model.register_buffer("grad_data", gradients, persistent=False)
        if step.distributed:
            self.main = [nn.Parameter(torch.zeros(-(-num // step.dp)))]
        else:
            self.main = [nn.Parameter(p.detach().float()) for p in self.trained]
        self.optimizer = _InPlaceAdam(self.main)
        for p in self.trained:
            p.register_post_accumulate_grad_hook(_added_to_main)

    def zero(self) -> None:
        """Forget the last step's gradients."""
        self.model.get_buffer("grad_data").zero_()

    def step(self) -> None:
        """Update the model. Gradients in float16 are raised to float32, and freed before the next forward pass."""
        raised = [torch.zeros_like(p) for p in self.main] if self.step_facts.half else []
        self.optimizer.step()
        raised.clear()
        if not self.step_facts.distributed:
            for p, master in zip(self.trained, self.main, strict=True):
                p.data.copy_(master.data)


def _added_to_main(p: Tensor) -> None:
    p.grad = None


Built = tuple[nn.Module, Callable[[], object]]


def _facts(step: MegatronStep) -> LayerFacts:
    mesh = init_device_mesh("cpu", (step.dp, step.pp, step.tp), mesh_dim_names=("dp", "pp", "tp"))
    return LayerFacts(
        step.width,
        step.inner,
        step.num_heads,
        tp=step.tp,
        group=mesh.get_group("tp") if step.tp > 1 else None,
        own=step.own,
        fused_softmax=step.fused_softmax,
        padded=step.family != "gpt",
        bias=step.bias,
        gated=step.gated,
        rotary=step.rotary,
    )


def _build(step: MegatronStep) -> Built:
    dtype = torch.float16 if step.half else torch.bfloat16
    vocab = padded_vocabulary(WORDS[step.family], step.tp)
    facts = _facts(step)
    last = len(step.stages) - 1
    with default_dtype(dtype):
        if step.family == "t5":
            model = nn.ModuleList([T5(facts, step.stages[0], vocab, step.sequence)])
        elif step.family == "gpt":
            model = nn.ModuleList(
                GptStage(
                    facts,
                    n,
                    vocab,
                    step.sequence,
                    first=step.pp == 1,
                    last=i == last,
                    tied=step.tied,
                    put_off=step.deferred,
                )
                for i, n in enumerate(step.stages)
            )
        else:
            model = nn.ModuleList(
                BertStage(facts, n, vocab, step.sequence, first=step.pp == 1, last=i == last, pairs=step.pairs)
                for i, n in enumerate(step.stages)
            )
    main = _MainParameters(model, step)
    tokens, targets = (torch.zeros(step.batch, step.sequence, dtype=torch.long) for _ in range(2))
    decoder_tokens, decoder_targets = (torch.zeros(step.batch, 128, dtype=torch.long) for _ in range(2))
    shape = (step.sequence, step.batch, step.width)

    def forward(number: int) -> tuple[Tensor | None, Tensor | GradientEdge]:
        stage = model[number]
        if step.family == "t5":
            return None, stage(tokens, decoder_tokens, decoder_targets).float().sum()
        x = None if step.pp == 1 else torch.empty(shape, dtype=dtype, requires_grad=True)  # received
        out = stage(tokens, targets, x)
        return x, out.float().sum() if number == last else get_gradient_edge(
            out
        )  # what the next rank receives is freed here

    def backward(number: int, out: Tensor | GradientEdge) -> None:
        received = None if number == last else torch.empty(shape, dtype=dtype)
        torch.autograd.backward((out,), (received,))

    def train() -> None:
        main.zero()
        pending: list[list[tuple[Tensor | None, Tensor | GradientEdge]]] = [[] for _ in step.stages]
        for kind, number in schedule(len(step.stages), step.micro_batches, step.group):
            if kind == "forward":
                pending[number].append(forward(number))
            else:
                backward(number, pending[number].pop(0)[1])
        for stage in model:
            if isinstance(stage, GptStage):
                stage.finish()
        main.step()

    return model, train


@functools.cache
def megatron_profile(step: MegatronStep) -> actmem.Profile:
    """Profile a step of the last rank, on tensors without bytes."""
    world = step.dp * step.pp * step.tp
    return actmem.profile_rank(lambda: _build(step), world=world, rank=world - 1)


def megatron_card(row: Mapping[str, str]) -> Device:
    """Return the card of a row. Nothing but the workspaces of matrix products depends on it."""
    card = device("h100-80gb" if _is_recent(row) else "a100-80gb")
    return card if "_release" in row["case"] else replace(card, blas_workspace_bytes=WORKSPACE_BYTES)


def further_bytes(step: MegatronStep, row: Mapping[str, str]) -> tuple[int, ...]:
    """Return what the program has on the card besides: a buffer of attention, or Transformer Engine's workspace."""
    if step.own:  # what `baddbmm` is given to add to, times 0 (transformer/dot_product_attention.py)
        return (step.batch * step.num_heads // step.tp * step.sequence * step.sequence * 2,)
    return (32 * 2**20 if _is_recent(row) else 4 * 2**20,)


def _is_recent(row: Mapping[str, str]) -> bool:
    return "h100" in row["gpu"] or "gb200" in row["gpu"]
