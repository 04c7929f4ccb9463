"""Autograd Functions that launch kernels which torch cannot see: held by default, run again with opaque="replay"."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import actmem
from actmem import Full, Report
from actmem.engine.kernel_libraries import LIBRARIES, STATEFUL
from tests.engine.cases import Program, batch, compare, never, replayed, simple_step, stack


class Read(np.ndarray):
    """Numbers in the memory of a tensor, which they keep alive."""

    tensor: Tensor


def read(x: Tensor) -> np.ndarray:
    """Return the numbers of a contiguous tensor by its address, as a kernel reads them."""
    assert x.is_contiguous() and x.dtype is torch.float32
    numbers = np.ctypeslib.as_array((ctypes.c_float * x.numel()).from_address(x.data_ptr()))
    found = numbers.reshape(x.shape).view(Read)
    found.tensor = x
    return found


def launched(result: np.ndarray) -> Tensor:
    """Allocate a tensor and have it written by its address, as a kernel does."""
    packed = np.ascontiguousarray(result, dtype=np.float32)
    out = torch.empty(packed.shape)
    ctypes.memmove(out.data_ptr(), packed.ctypes.data, packed.nbytes)
    return out


class Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        scale = launched(1 / np.sqrt((read(x) ** 2).mean(-1, keepdims=True) + np.float32(eps)))
        ctx.save_for_backward(x, weight, scale)
        return launched(read(x) * read(scale) * read(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        normal, inner = x * scale, grad * weight
        dx = (inner - normal * (inner * normal).mean(-1, keepdim=True)) * scale
        return dx, (grad * normal).sum(tuple(range(grad.dim() - 1))), None


class SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return launched(read(gate) / (1 + np.exp(-read(gate))) * read(up))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        return grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu


class UnseenNorm(nn.Module):
    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return Norm.apply(x, self.weight, self.eps)


class UnseenMlp(nn.Module):
    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(SwiGLU.apply(self.gate_proj(x), self.up_proj(x)))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config).train()
    for layer in model.model.layers:
        for name in ("input_layernorm", "post_attention_layernorm"):
            norm = getattr(layer, name)
            setattr(layer, name, UnseenNorm(norm.weight, norm.variance_epsilon))
        layer.mlp = UnseenMlp(layer.mlp)
    return model


def llama_step(model: nn.Module) -> dict[str, Tensor]:
    tokens = torch.arange(2 * 64).reshape(2, 64) % 61
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


class ByCheckpoint(nn.Module):
    """A layer under torch's checkpoint, which keeps no generator state: nothing here is random."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.layer, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def after_forward(model: nn.Module) -> int:
    """Return the bytes that are alive between forward and backward."""
    found = actmem.measure(lambda: llama_step(model), model=model)
    first = next(i for i, s in enumerate(found.timeline) if s.phase == "backward")
    return found.timeline[first - 1].live_bytes


def test_a_llama_with_unseen_kernels_holds_what_torchs_checkpoint_holds() -> None:
    plain = llama_step(llama())
    by_checkpoint: Any = llama()
    by_checkpoint.model.layers = nn.ModuleList(ByCheckpoint(layer) for layer in by_checkpoint.model.layers)
    expected = after_forward(by_checkpoint)
    model = llama()
    with actmem.apply(model, Full()):
        held = [llama_step(model), after_forward(model)][1]
    model = llama()
    with actmem.apply(model, Full(), opaque="replay") as applied:
        for _ in range(3):
            step = llama_step(model)
            assert step.keys() == plain.keys() and all(torch.equal(plain[n], step[n]) for n in plain)
        assert after_forward(model) == expected - 64 * 8 < held  # it holds the positions, which no replay reads
        report = applied.report()
    assert report.never_replayed_bytes == 0
    assert {"replayable.Norm", "replayable.SwiGLU"} <= set(replayed(report))
    assert f'because of opaque="replay": {__name__}.Norm, {__name__}.SwiGLU.' in " ".join(str(report).split())


# -------------------------------------------------------------------- who is taken, and who is not


def made(forward: Callable[..., Any]) -> Any:
    """Make a Function whose gradient is 1 everywhere, from its forward."""

    class Made(Function):
        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0]

    Made.forward = staticmethod(forward)  # pyright: ignore[reportAttributeAccessIssue]
    return Made


def through(kind: Any) -> Callable[[], nn.Module]:
    return lambda: stack(lambda block, h: kind.apply((h @ block.v).contiguous()).sin() * h, num_blocks=3)


def taken(report: Report) -> bool:
    return any(op.startswith("replayable.") for op in replayed(report))


def held_because(report: Report, kind: Any) -> str:
    """Return why the report says that a Function is held; "" if it does not."""
    text = " ".join(str(report).split())
    _, _, found = text.partition(f"held, because {__name__}.{kind.__qualname__} may not run again: ")
    return found.partition(". ")[0].rstrip(". ")


def doubled(ctx: Any, x: Tensor) -> Tensor:
    return launched(read(x) * 2)


def test_by_default_nothing_is_taken() -> None:
    report = compare(through(made(doubled)), Full(), num_steps=3)
    assert not taken(report) and set(never(report)) == {"aten.empty.memory_format"}
    assert "replayed as one operator" not in str(report)


def test_a_function_that_launches_unseen_kernels_is_taken_with_what_it_saves() -> None:
    def saving(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(launched(read(x) + 1), x)
        return launched(read(x) * 2)

    kind = made(saving)
    plain, report = (compare(through(kind), Full(), num_steps=3, opaque=o) for o in ("hold", "replay"))
    assert not taken(plain) and taken(report) and report.never_replayed_bytes == 0
    assert report.held_bytes < plain.held_bytes


def test_a_taken_function_is_held_again_where_the_default_is_asked_for() -> None:
    kind = made(doubled)
    assert taken(compare(through(kind), Full(), num_steps=3, opaque="replay"))
    assert not taken(compare(through(kind), Full(), num_steps=3))


def test_a_function_with_a_setup_context_is_taken() -> None:
    class WithSetup(Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return launched(read(x) * 2)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0]

    report = compare(through(WithSetup), Full(), num_steps=3, opaque="replay")
    assert taken(report) and report.never_replayed_bytes == 0


def test_a_function_that_draws_random_numbers_gives_the_same_ones_again() -> None:
    def noisy(ctx: Any, x: Tensor) -> Tensor:
        return launched(read(x) * read(torch.rand_like(x)))

    report = compare(through(made(noisy)), Full(), num_steps=3, opaque="replay")
    assert taken(report) and report.never_replayed_bytes == 0


def test_a_function_that_multiplies_under_autocast_multiplies_so_again() -> None:
    weight = torch.randn(8, 8)

    def multiplied(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return launched(read((x @ w).float().contiguous()))

    class Multiplied(Function):
        forward = staticmethod(multiplied)  # pyright: ignore[reportAssignmentType]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad, None

    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().sum()
        loss.backward()
        return loss.detach()

    def build() -> nn.Module:
        return stack(lambda block, h: Multiplied.apply((h @ block.v).float(), weight).sin() * h, num_blocks=3)

    report = compare(build, Full(), step=step, num_steps=3, opaque="replay")
    assert taken(report) and "may not run again" not in str(report)


def test_a_function_that_is_not_deterministic_is_held_by_name() -> None:
    calls = [0]

    def counting(ctx: Any, x: Tensor) -> Tensor:
        calls[0] += 1
        return launched(read(x) + np.float32(calls[0] % 2))

    kind = made(counting)
    model = through(kind)()
    with actmem.apply(model, Full(), opaque="replay") as applied:
        for _ in range(3):
            simple_step(model, batch())
        report = applied.report()
    assert held_because(report, kind) == "two runs on the same arguments gave different bits"
    assert report.never_replayed_bytes > 0


def test_a_function_whose_results_are_partly_unwritten_is_held_or_right() -> None:
    def partly(ctx: Any, x: Tensor) -> Tensor:
        workspace = torch.empty(1 << 12)
        workspace[:3] = 1
        ctx.save_for_backward(workspace)
        return launched(read(x) * 2)

    compare(through(made(partly)), Full(), num_steps=3, opaque="replay")


def test_a_function_that_writes_into_its_argument_unseen_is_refused() -> None:
    def overwriting(ctx: Any, x: Tensor) -> Tensor:
        out = launched(read(x) * 2)
        read(x)[...] = 0
        return out

    model = through(made(overwriting))()
    with (
        actmem.apply(model, Full(), opaque="replay"),
        pytest.raises(actmem.SelfCheckError, match=r"Made wrote into its arguments"),
    ):
        simple_step(model, batch())


def test_a_function_that_marks_its_argument_dirty_is_held_by_name() -> None:
    def dirty(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(read(launched(np.full(1, 2.0)))[0])

    kind = made(dirty)

    def build() -> nn.Module:
        return stack(lambda block, h: kind.apply((h @ block.v).clone()).sin() * h, num_blocks=3)

    report = compare(build, Full(), num_steps=3, opaque="replay")
    assert not taken(report) and held_because(report, kind) == "it writes into its arguments (ctx.mark_dirty)"


def test_a_function_that_updates_a_buffer_is_held_by_name() -> None:
    state = torch.zeros(1)

    def updating(ctx: Any, x: Tensor) -> Tensor:
        state.add_(1)
        return launched(read(x) * 2)

    kind = made(updating)
    report = compare(through(kind), Full(), num_steps=3, opaque="replay")
    assert not taken(report) and held_because(report, kind) == "it writes into what it was given"
    assert state.item() == 2 * 3 * 3  # plain and applied: each of three blocks, once in each of three steps


def test_a_function_that_communicates_is_held() -> None:
    def reduced(ctx: Any, x: Tensor) -> Tensor:
        out = launched(read(x) * 2)
        dist.all_reduce(out)
        return out

    kind = made(reduced)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        report = compare(through(kind), Full(), num_steps=3, opaque="replay")
        assert not taken(report) and held_because(report, kind) == "it communicates with other ranks"
        declared = compare(through(actmem.replayable(made(reduced))), Full(), num_steps=3)
        assert declared.never_replayed_bytes > 0 and not taken(declared)
    finally:
        dist.destroy_process_group()


def test_a_function_that_runs_a_module_is_not_taken() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return launched(read(x) * 2)

    inner = Inner()
    report = compare(through(made(lambda ctx, x: inner(x))), Full(), num_steps=3, opaque="replay")
    assert not taken(report) and report.never_replayed_bytes > 0


def test_a_function_of_seen_operators_alone_is_left_as_it_is() -> None:
    def filled(ctx: Any, x: Tensor) -> Tensor:
        return torch.mul(x, 2, out=torch.empty_like(x))

    report = compare(through(made(filled)), Full(), num_steps=3, opaque="replay")
    assert not taken(report)


@torch.library.custom_op("actmem_tests::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    return launched(read(x) * 3)


def test_a_custom_operator_in_a_function_is_run_again() -> None:
    report = compare(through(made(lambda ctx, x: tripled(x))), Full(), num_steps=3, opaque="replay")
    assert taken(report) and report.never_replayed_bytes == 0


def test_the_users_own_declaration_needs_no_second_run() -> None:
    calls = [0]

    def counted(ctx: Any, x: Tensor) -> Tensor:
        calls[0] += 1
        return launched(read(x) * 2)

    model = through(actmem.replayable(made(counted)))()
    with actmem.apply(model, Full(), opaque="replay"):
        model(batch()).sum()
    assert calls[0] == 3


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, of any Function
def test_a_declared_function_can_be_compiled() -> None:
    class Squared(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2 * ctx.saved_tensors[0]

    x = torch.linspace(-1, 1, 6, requires_grad=True)
    compiled: Any = torch.compile(actmem.replayable(Squared).apply, backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * x.detach())


def test_a_declared_function_is_predicted_as_one_operator() -> None:
    """A model in which a declared Function takes the place of a multiplication has the same peaks, to the byte."""

    def peaks(doubling: Callable[[Tensor], Any]) -> tuple[int, int]:
        model = stack(lambda block, h: doubling((h @ block.v).contiguous()).sin() * h, num_blocks=3)
        x = batch(rows=512)

        def step() -> None:
            model.zero_grad()
            simple_step(model, x)

        profile = actmem.profile(model, step=step, fake=False)
        with actmem.apply(model, Full()):
            step()
            measured = actmem.measure(step, model=model)
        return actmem.predict(profile, Full()).tensor_bytes, measured.tensor_bytes

    assert peaks(actmem.replayable(made(doubled)).apply) == peaks(lambda x: x * 2)


# -------------------------------------------------------------------- the table


def test_every_entry_of_the_table_has_a_public_source_and_known_names() -> None:
    assert len({library.package for library in LIBRARIES}) == len(LIBRARIES)
    listed: set[str] = set()
    for library in LIBRARIES:
        assert library.source.startswith("https://github.com/")
        names = {name for _, name in library.names()}
        assert set(library.writes) | set(library.in_place) <= names
        assert all(module.partition(".")[0] == library.package for module, _ in library.names())
        listed |= {f"{module}.{name}" for module, name in library.names()}
    assert not listed & set(STATEFUL)


def test_the_page_lists_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    for library in LIBRARIES:
        names = ", ".join(f"`{name}`" for name in sorted({name for _, name in library.names()}))
        assert f"| [{library.package}]({library.source}) | {names} |" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"opaque": "guess"}, r"opaque = 'guess' is not known. Expected 'hold'"),
        ({"opaque": "replay", "engine": "checkpoint"}, r"opaque = 'replay' is about the tape"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(actmem.ModeError, match=message):
        actmem.apply(stack(lambda block, h: h), Full(), **arguments)


def test_a_budget_does_not_guess_what_may_run_again() -> None:
    with pytest.raises(actmem.ModeError, match=r"a Budget is planned before"):
        actmem.apply(stack(lambda block, h: h), actmem.Budget("1 GiB"), example=(batch(),), opaque="replay")


def test_the_program_of_a_block_may_change_after_functions_were_taken() -> None:
    """A second Function that comes later is found at the next observed call, and is right before that."""
    first, second = made(doubled), made(lambda ctx, x: launched(read(x) * 3))
    kinds = [first]

    def body(block: Program, h: Tensor) -> Tensor:
        return kinds[-1].apply((h @ block.v).contiguous()).sin() * h

    model, plain = stack(body, num_blocks=3), stack(body, num_blocks=3)
    with actmem.apply(model, Full(), opaque="replay") as applied:
        for n in range(5):
            if n == 2:
                kinds.append(second)
            if n == 3:
                applied.check_replay(2)
            model.zero_grad(), plain.zero_grad()
            assert torch.equal(simple_step(plain, batch()), simple_step(model, batch()))
            for a, b in zip(plain.parameters(), model.parameters(), strict=True):
                assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
        assert applied.report().never_replayed_bytes == 0
