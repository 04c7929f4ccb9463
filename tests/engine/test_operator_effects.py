"""What an operator does besides returning a result: writing, drawing, asking. Each program once went wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actmem
from actmem.engine.operators import describe
from tests.engine.cases import (
    MODES,
    RECOMPUTE,
    Program,
    assert_same_bits,
    batch,
    compare,
    never,
    outcome,
    replayed,
    simple_step,
    stack,
)

aten = torch.ops.aten
both = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


# -------------------------------------------------------------------- what is written is read


def rrelu_in_place(block: Program, h: Tensor) -> Tensor:
    y = F.rrelu(h @ block.v, training=True, inplace=True)
    return (y * 1).sin()


def own_noise(block: Program, h: Tensor) -> Tensor:
    noise = h.detach() * 2
    y = aten.rrelu_with_noise(h @ block.v, noise, 0.1, 0.3, True)
    return (y * noise).sin()


def noise_left_alone(block: Program, h: Tensor) -> Tensor:
    noise = (h.detach() * 2).exp()
    y = aten.rrelu_with_noise(h @ block.v, noise, 0.1, 0.3, False)
    return (y * noise).sin()


def out_is_an_input(block: Program, h: Tensor) -> Tensor:
    with torch.no_grad():
        y = h.detach() * 2
        torch.add(y, 1, out=y)
        torch.cumsum(y, 0, out=y)
    return (h * y).sin() @ block.v


@both
@pytest.mark.parametrize("body", [rrelu_in_place, own_noise, noise_left_alone, out_is_an_input])
def test_an_operator_that_reads_what_it_writes_is_replayed_from_the_old_version(
    body: Callable[[Program, Tensor], Tensor], mode: Any
) -> None:
    compare(lambda: stack(body), mode, num_steps=4)


def test_only_the_argument_that_is_filled_counts_as_overwritten() -> None:
    functional, in_place = describe(aten.rrelu_with_noise.default), describe(aten.rrelu_with_noise_.default)
    assert [name for _, name in in_place.writes] == ["self", "noise"]
    assert functional.overwritten == in_place.overwritten == {1, "noise"}
    assert describe(aten.rrelu_with_noise.out).overwritten == {1, "noise", 6, "out"}
    assert describe(aten.copy_.default).overwritten == {0, "self"} and not describe(aten.add_.Tensor).overwritten
    assert describe(aten.add.out).overwritten == {3, "out"}


def test_what_a_training_flag_leaves_alone_is_not_written() -> None:
    x, s = torch.ones(2, 3), torch.ones(3)
    norm, rrelu = describe(aten.native_batch_norm.default), describe(aten.rrelu_with_noise_.default)
    assert [n for _, n in norm.written((x, s, s, s, s, True, 0.1, 1e-5), {})] == ["running_mean", "running_var"]
    assert norm.written((x, s, s, s, s, False, 0.1, 1e-5), {}) == ()
    assert [n for _, n in rrelu.written((x, x), {"training": False})] == ["self"]


# -------------------------------------------------------------------- composite operators that come whole


class Statistics(nn.Module):
    """Normalises without differentiating, and counts the batches."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.instance = kind == "instance"
        self.norm: Any = (nn.InstanceNorm1d if self.instance else nn.BatchNorm1d)(8, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.norm(x.t()[None])[0].t() if self.instance else self.norm(x)


def normalised(block: Program, h: Tensor) -> Tensor:
    scale = block.parts["norm"](h)
    return (h * scale.clone()).sin() @ block.v


@both
@pytest.mark.parametrize("kind", ["batch", "instance"])
def test_running_statistics_are_updated_once_in_inference_mode(kind: str, mode: Any) -> None:
    compare(lambda: stack(normalised, parts=lambda: {"norm": Statistics(kind)}), mode, num_steps=4)


def whole(name: str) -> Callable[[Program, Tensor], Tensor]:
    def body(block: Program, h: Tensor) -> Tensor:
        with torch.inference_mode():
            if name == "matmul":
                y = torch.matmul(h.expand(3, 6, 8), block.v)[0]
            elif name == "dropout":
                y = F.dropout(h, 0.4)
            elif name == "feature_alpha_dropout":
                y = F.feature_alpha_dropout(h, 0.4, training=True)
            elif name == "chunk":
                y = h.chunk(2)[0].repeat(2, 1)
            elif name == "reshape":
                y = h.t().reshape(6, 8)
            elif name == "lstm":
                y = torch.lstm(
                    h.view(1, 6, 8),
                    [h.new_zeros(1, 6, 2)] * 2,
                    [h.new_ones(8, 8), h.new_ones(8, 2)],
                    False,
                    1,
                    0.0,
                    True,
                    False,
                    False,
                )[0].repeat(1, 1, 4)[0]
            else:
                y = F.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None], dropout_p=0.3)[0, 0]
        return (h * y.clone()).sin() @ block.v

    return body


@pytest.mark.parametrize(
    "name", ["matmul", "dropout", "feature_alpha_dropout", "chunk", "reshape", "lstm", "attention"]
)
def test_a_composite_operator_in_inference_mode_is_recorded_as_its_parts(name: str) -> None:
    report = compare(lambda: stack(whole(name)), RECOMPUTE, num_steps=4)
    seen = {row.op for kind in report.kinds for row in kind.rows if row.op.startswith("aten.")}
    assert not {op for op in seen if describe(_overload(op)).composite}


def _overload(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


# -------------------------------------------------------------------- conj bits


def complex_matrix(block: Program, h: Tensor) -> Tensor:
    return torch.complex(h @ block.v, h.cos())


def pseudo_inverse(block: Program, h: Tensor) -> Tensor:
    return torch.view_as_real(torch.linalg.pinv(complex_matrix(block, h)).resolve_conj()).sin().sum() + h


def residuals(block: Program, h: Tensor) -> Tensor:
    z = complex_matrix(block, h).t()
    return torch.linalg.lstsq(z[:, :3], z[:, 3:], driver="gels").residuals.sin().sum() + h


@both
@pytest.mark.parametrize("body", [pseudo_inverse, residuals])
def test_kernels_that_conjugate_compute_what_they_compute_outside(
    body: Callable[[Program, Tensor], Tensor], mode: Any
) -> None:
    compare(lambda: stack(body), mode, num_steps=3)


def test_measuring_a_step_changes_no_bit_of_a_complex_pseudo_inverse() -> None:
    x = torch.randn(4, 4, dtype=torch.complex64)
    found: list[Tensor] = []
    actmem.measure(lambda: found.append(torch.linalg.pinv(x)))
    assert torch.equal(found[0], torch.linalg.pinv(x))


def test_torchs_checkpoint_in_eager_changes_no_bit_of_a_complex_pseudo_inverse() -> None:
    plain, managed = stack(pseudo_inverse), stack(pseudo_inverse)
    with actmem.apply(managed, MODES["S"], engine="checkpoint"):
        assert_same_bits(outcome(plain, batch(), simple_step), outcome(managed, batch(), simple_step))


# -------------------------------------------------------------------- lists


def written_views(h: Tensor) -> Tensor:
    y = h * 2
    a, b = y[:3], y[3:]
    torch._foreach_tanh_([a, b])
    return torch.cat([a.sin() * b, b.exp()])


def views_in_a_list(block: Program, h: Tensor) -> Tensor:
    return written_views(h @ block.v)


@both
def test_views_in_a_list_that_is_written_are_differentiated_through_the_write(mode: Any) -> None:
    compare(lambda: stack(views_in_a_list), mode, num_steps=3)


@both
def test_a_pure_function_is_differentiated_through_a_write_to_a_list_of_views(mode: Any) -> None:
    pure = actmem.replayable(written_views)
    compare(lambda: stack(lambda block, h: pure(h @ block.v)), mode, num_steps=3)


def test_torchs_checkpoint_in_eager_differentiates_through_a_write_to_a_list_of_views() -> None:
    plain, managed = stack(views_in_a_list), stack(views_in_a_list)
    with actmem.apply(managed, MODES["S"], engine="checkpoint"):
        assert_same_bits(outcome(plain, batch(), simple_step), outcome(managed, batch(), simple_step))


def test_measuring_a_step_changes_no_gradient_of_a_write_to_a_list_of_views() -> None:
    model, found = stack(views_in_a_list), []
    actmem.measure(lambda: found.append(outcome(model, batch(), simple_step)), model=model)
    assert_same_bits(outcome(stack(views_in_a_list), batch(), simple_step), found[0])


# -------------------------------------------------------------------- sparse

beta = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")


def reduced(block: Program, h: Tensor) -> Tensor:
    at = torch.eye(6).to_sparse_csr()
    return torch.sparse.mm(at, h @ block.v, "amin").sin()


@beta
def test_a_kernel_that_asks_what_requires_grad_is_never_replayed() -> None:
    report = compare(lambda: stack(reduced), RECOMPUTE, num_steps=3)
    assert "requires grad" in never(report)["aten._sparse_mm_reduce_impl.default"]
    assert replayed(report)["aten.sin.default"] == 0


def sparse_buffer(block: Program, h: Tensor) -> Tensor:
    with torch.no_grad():
        at = torch.eye(6).to_sparse_csr()
        y = torch.sparse.sampled_addmm(at, h, h.t(), out=torch.empty_like(at)).to_dense()
    return (y @ h @ block.v).sin()


@beta
def test_a_sparse_tensor_may_be_born_uninitialised() -> None:
    compare(lambda: stack(sparse_buffer), RECOMPUTE, num_steps=3)
