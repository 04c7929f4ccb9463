"""Messages that torch really gives, each made by the smallest program that runs into it."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

DIM = 8
MATMUL = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def given() -> Tensor:
    return torch.linspace(-1, 1, 4 * DIM).view(4, DIM).requires_grad_()


def run(function: Callable[[Tensor], Tensor], **options: Any) -> None:
    """Checkpoint a function, and go back through it."""
    checkpoint(function, given(), **{"use_reentrant": False, **options}).sum().backward()


def selectively(function: Callable[[Tensor], Tensor], *ops: Any) -> None:
    run(function, context_fn=lambda: create_selective_checkpoint_contexts([*MATMUL, *ops]))


# ---------------------------------------------------------------- other tensors the second time


def a_cache_that_grows() -> None:
    project = nn.Linear(DIM, DIM)
    keys: list[Tensor] = []

    def attend(x: Tensor) -> Tensor:
        keys.append(project(x).view(1, 2, 4, DIM // 2))
        return torch.softmax(x.view(1, 2, 4, DIM // 2) @ torch.cat(keys, 2).mT, -1) @ torch.cat(keys, 2)

    run(attend)


def a_parameter_that_is_partitioned() -> None:
    """Do as ZeRO-3 does: give the memory of a parameter back after each forward of its module."""
    norm = nn.LayerNorm(DIM)
    full = norm.weight.requires_grad_(False).detach().clone()

    def gather(*_: Any) -> None:
        norm.weight.data = full

    def partition(*_: Any) -> None:
        norm.weight.data = torch.empty(0)

    norm.register_forward_pre_hook(gather)
    norm.register_forward_hook(partition)
    inner = nn.Linear(DIM, DIM)

    def block(x: Tensor) -> Tensor:
        return inner(norm(x)).tanh()

    loss = checkpoint(block, given(), use_reentrant=False).sum()
    loss.backward()


def a_router_that_changes_its_mind() -> None:
    weight = nn.Linear(DIM, DIM)
    bound = iter([0.5, 0.52])
    tokens = torch.linspace(0, 1, 200).unsqueeze(1).expand(200, DIM)

    def route(x: Tensor) -> Tensor:
        rows = tokens[tokens[:, 0] > next(bound)]
        return weight(rows * x[0]).tanh()

    run(route)


def a_cast_that_is_skipped() -> None:
    """Do as FSDP2 did before torch 2.13: cast the input in the first forward only."""
    cast = iter([torch.bfloat16, torch.float32])
    run(lambda x: x.to(next(cast)).sin().exp())


def a_value_that_is_not_saved_again() -> None:
    calls: list[int] = []

    def block(x: Tensor) -> Tensor:
        calls.append(1)
        sizes = (2, 3, 4, 5, 6)
        saved = [x[:, :size].exp() for size in (sizes if len(calls) == 1 else sizes[1:] + sizes[:1])]
        return sum((s.sum() for s in saved), torch.zeros(()))

    run(block)


def an_attention_kernel_of_a_context() -> None:
    project = nn.Linear(DIM, 3 * DIM)

    def attend(x: Tensor) -> Tensor:
        q, k, v = (t.reshape(1, 2, 4, DIM // 2) for t in project(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v)

    with sdpa_kernel(SDPBackend.MATH):
        loss = checkpoint(attend, given(), use_reentrant=False).sum()
    loss.backward()


def a_shape_of_no_known_kind() -> None:
    wide = iter([3, 7])
    run(lambda x: torch.cat([x] * next(wide), 1).exp())


def _branching(calls: list[int]) -> Callable[[Tensor], Tensor]:
    def branch(x: Tensor) -> Tensor:
        calls.append(1)
        return x.exp() if len(calls) > 1 else x.sin().exp().tanh()

    return branch


def a_branch_on_state() -> None:
    run(_branching([]))


def a_branch_on_state_with_debug() -> None:
    # torch logs operators in a form that only its own handler can print.
    logger = logging.getLogger("LoggingTensor")
    logger.propagate = False
    try:
        run(_branching([]), debug=True)
    finally:
        logger.propagate = True


# ---------------------------------------------------------------- selective


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0] + grad * ctx.saved_tensors[0]


def a_function_that_reads_twice() -> None:
    run(ReadsTwice.apply)


def a_second_backward() -> None:
    weight = nn.Linear(DIM, DIM)

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(MATMUL)

    loss = checkpoint(lambda x: weight(x).tanh(), given(), use_reentrant=False, context_fn=contexts).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def a_cast_that_is_cached() -> None:
    weight = nn.Linear(DIM, DIM)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = given()
        for _ in range(2):
            loss = checkpoint(
                lambda x: weight(x).tanh(),
                loss,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts([*MATMUL, torch.ops.aten._to_copy.default]),
            )
    loss.sum().backward()


def a_state_that_appears() -> None:
    load: list[Tensor] = []

    def count(x: Tensor) -> Tensor:
        if load:
            load[0].add_(x.detach().sum())
        else:
            load.append(x.detach().sum())
        return (x.exp() * load[0].detach()).sin()

    selectively(count, torch.ops.aten.add_.Tensor)


def a_branch_under_a_policy() -> None:
    calls: list[int] = []
    weight = nn.Linear(DIM, DIM, bias=False)

    def branch(x: Tensor) -> Tensor:
        calls.append(1)
        return (weight(x) if len(calls) > 1 else x.sin()).exp()

    selectively(branch)


def a_result_that_is_overwritten() -> None:
    weight = nn.Linear(DIM, DIM)
    selectively(lambda x: weight(x).tanh_().sin())


def a_packet_in_the_policy() -> None:
    create_selective_checkpoint_contexts([torch.ops.aten.mm])


# ---------------------------------------------------------------- reentrant, and backward itself


def a_graph_that_is_freed() -> None:
    loss = given().exp().sum()
    loss.backward()
    loss.backward()


def inputs_without_gradient() -> None:
    weight = nn.Linear(DIM, DIM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(weight, given().detach(), use_reentrant=True)


def a_loss_without_a_graph() -> None:
    weight = nn.Linear(DIM, DIM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint(weight, given().detach(), use_reentrant=True).sum().backward()


def a_frozen_region() -> None:
    run(lambda x: x.detach() + 1, use_reentrant=True)


def a_parameter_that_is_ready_twice(folder: Path) -> None:
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(self.weight, x, use_reentrant=True)
            return x

    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Shared(), find_unused_parameters=True)
        model(given()).sum().backward()
    finally:
        dist.destroy_process_group()


def a_call_without_use_reentrant() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(torch.sin, given())


def keyword_arguments() -> None:
    run(lambda x, max_seqlen: x, use_reentrant=True, max_seqlen=4)


def a_backward_of_some_inputs() -> None:
    x = given()
    weight = nn.Linear(DIM, DIM)
    torch.autograd.grad(checkpoint(weight, x * 1, use_reentrant=True).sum(), x)


def a_policy_with_reentrant() -> None:
    run(torch.sin, use_reentrant=True, debug=True)


def an_argument_in_the_wrong_place() -> None:
    def checkpointed(function: Any, preserve_rng_state: Any, *args: Any) -> None:
        if preserve_rng_state:
            function(*args)

    checkpointed(torch.sin, given(), True)


# ---------------------------------------------------------------- around


def an_import_of_what_is_too_new() -> None:
    import sys
    from types import ModuleType

    old = ModuleType("old_checkpoint")
    sys.modules["old_checkpoint"] = old
    try:
        from old_checkpoint import CheckpointPolicy  # noqa: F401
    finally:
        del sys.modules["old_checkpoint"]


def an_inference_tensor() -> None:
    with torch.inference_mode():
        buffer = torch.zeros(2)
    buffer.add_(1)


def a_device_that_is_not_there() -> None:
    torch.empty(1, device="cuda")


def an_attribute_of_megatron() -> None:
    _ = given().main_grad


def more_memory_than_there_is() -> None:
    torch.empty(2**60, dtype=torch.uint8)


REAL: dict[str, tuple[Callable[[], None], str]] = {
    function.__name__: (function, name)
    for function, name in (
        (a_parameter_that_is_partitioned, "zero3-partitioned"),
        (a_cache_that_grows, "cache-grew"),
        (a_router_that_changes_its_mind, "routing-flipped"),
        (a_cast_that_is_skipped, "precision-lost"),
        (a_value_that_is_not_saved_again, "autocast-cache"),
        (an_attention_kernel_of_a_context, "context-lost"),
        (a_shape_of_no_known_kind, "recomputation-differs"),
        (a_branch_on_state, "other-operators"),
        (a_branch_on_state_with_debug, "other-operators"),
        (a_function_that_reads_twice, "saved-tensors-read-twice"),
        (a_second_backward, "second-backward-selective"),
        (a_cast_that_is_cached, "shared-weight-under-autocast"),
        (a_state_that_appears, "state-took-another-path"),
        (a_branch_under_a_policy, "not-in-storage"),
        (a_result_that_is_overwritten, "saved-result-overwritten"),
        (a_packet_in_the_policy, "packet-in-list"),
        (a_graph_that_is_freed, "graph-kept"),
        (inputs_without_gradient, "inputs-without-gradient"),
        (a_loss_without_a_graph, "loss-without-graph"),
        (a_frozen_region, "frozen-region"),
        (a_call_without_use_reentrant, "reentrant-not-said"),
        (keyword_arguments, "keywords-refused"),
        (a_backward_of_some_inputs, "inputs-of-backward"),
        (a_policy_with_reentrant, "policy-needs-non-reentrant"),
        (an_argument_in_the_wrong_place, "arguments-out-of-order"),
        (an_import_of_what_is_too_new, "torch-too-old"),
        (an_inference_tensor, "inference-tensor-written"),
        (a_device_that_is_not_there, "no-cuda-here"),
        (an_attribute_of_megatron, "fp8-outside-context"),
        (more_memory_than_there_is, "out-of-memory"),
    )
}
"""A program, and the cause that must be named first."""
