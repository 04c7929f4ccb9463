"""Cases of tensor, sequence, context and expert parallel."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_single_autograd,
    all_reduce,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_to_all_single

import actmem
from actmem.compat import nemo, prime_rl, torchtitan
from tests.distributed.models import (
    WIDTH,
    GatheredAttention,
    ParallelMoe,
    RingAttention,
    stack,
    tensor_parallel,
    tokens,
)
from tests.distributed.ranks import MODES, NUM_RANKS, Collectives, assert_same, check_modes, train

GATHER, REDUCE_SCATTER, ALL_REDUCE = (
    f"_c10d_functional.{name}.default" for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
)


def parallel_model(*, sequence: bool) -> nn.Module:
    return tensor_parallel(stack(), init_device_mesh("cpu", (NUM_RANKS,)), sequence=sequence)


def part(rank: int) -> Tensor:
    """Return this rank's part of the sequence."""
    return tokens().chunk(NUM_RANKS, dim=1)[rank].contiguous()


# -------------------------------------------------------------------- tensor and sequence parallel


def tensor_parallel_communicates_once(rank: int) -> None:
    issued = check_modes(lambda: parallel_model(sequence=False), tokens())
    assert issued[ALL_REDUCE] > 0


def sequence_parallel_communicates_once(rank: int) -> None:
    issued = check_modes(lambda: parallel_model(sequence=True), part(rank))
    assert issued[GATHER] > 0
    assert issued[REDUCE_SCATTER] > 0


def reissue(
    rank: int, mode: Any, *, sequence: bool, batch: Tensor
) -> tuple[actmem.Report, actmem.Report, Counter[str]]:
    """Train with and without running collectives again. Return both reports, and what one step ran again."""
    plain_counts = Collectives()
    model = parallel_model(sequence=sequence)
    with plain_counts:
        plain = train(model, batch, 3)
    reports: list[actmem.Report] = []
    again: Counter[str] = Counter()
    for collectives in ("save", "recompute"):
        model = parallel_model(sequence=sequence)
        applied = actmem.apply(model, mode, collectives=collectives)
        counts = Collectives()
        with counts:
            managed = train(model, batch, 3)
        assert_same(plain, managed)
        assert counts.issued() == plain_counts.issued()
        again = Counter({name: n // 3 for name, n in counts.again().items()})
        assert again or collectives == "save"
        reports.append(applied.report())
        every: list[Any] = [None] * NUM_RANKS
        dist.all_gather_object(every, counts.again())
        assert every[0] == every[1]
    return reports[0], reports[1], again


def sequence_parallel_gathers_again_when_asked(rank: int) -> None:
    batch = part(rank)
    saved, recomputed, again = reissue(rank, MODES["Full"], sequence=True, batch=batch)
    # In each block: both gathers; of the two reduce-scatters only the one that something behind it needs.
    assert again == {GATHER: 4, REDUCE_SCATTER: 2}
    # Two gathered sequences and one reduced part for each block.
    assert saved.collective_bytes == {"never": 2 * (2 * 2 + 1) * batch.nbytes}
    assert sum(recomputed.collective_bytes.values()) == 2 * (2 * 2 + 1) * batch.nbytes
    assert recomputed.held_bytes == saved.held_bytes - 2 * (2 * 2 + 1) * batch.nbytes
    assert "communicated again in the backward pass" in str(recomputed)


def the_forms_of_other_systems_gather_again(rank: int) -> None:
    """Bitwise plain; what torchtitan's save list names, the reduce-scatter, runs once, and so it does where saved."""
    batch = part(rank)
    plain = train(parallel_model(sequence=True), batch, 3)
    every_layer: dict[str, tuple[Any, dict[str, int]]] = {
        "FullAC": (torchtitan.FullAC.Config().build().apply, {GATHER: 4, REDUCE_SCATTER: 2}),
        "SelectiveAC": (torchtitan.SelectiveAC.Config().build().apply, {GATHER: 4}),
        "nemo": (lambda m: nemo.apply_selective_checkpointing_to_layers(m, list(m), False), {GATHER: 4}),
        "prime_rl": (
            lambda m: prime_rl.apply_ac(m, prime_rl.ActivationCheckpointConfig()),
            {GATHER: 4, REDUCE_SCATTER: 2},
        ),
        "saved": (lambda m: torchtitan.FullAC.Config().build().apply(m, collectives="save"), {}),
    }
    for name, (change, again) in every_layer.items():
        change(model := parallel_model(sequence=True))
        with Collectives() as counts:
            assert_same(plain, train(model, batch, 3))
        assert {op: n // 3 for op, n in counts.again().items()} == again, name


def a_reduction_of_what_the_plan_saves_is_not_run_again(rank: int) -> None:
    # Its input is as large as its result, or larger: to hold that and communicate again would gain nothing.
    mode = actmem.Selective(save=["matmul"], force_recompute=())
    saved, recomputed, again = reissue(rank, mode, sequence=True, batch=part(rank))
    assert again == {GATHER: 4}
    assert recomputed.held_bytes < saved.held_bytes


def sequence_parallel_gathers_again_under_other_modes(rank: int) -> None:
    for name in ("Selective", "Targets"):
        saved, recomputed, again = reissue(rank, MODES[name], sequence=True, batch=part(rank))
        assert again[GATHER] == (4 if name == "Selective" else 2)
        assert recomputed.held_bytes < saved.held_bytes


class Summed(torch.autograd.Function):
    """Sum over the ranks, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return all_reduce(x, "sum", dist.group.WORLD) + 0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_reduce(grad, "sum", dist.group.WORLD) + 0


class Uneven(nn.Module):
    """What is saved last can be replayed from the best value of each row, or held: which is less differs by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("ones", torch.ones(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.mix(x))
        best = h.topk(1).values
        total = Summed.apply(h.sum(1)[:, :2])
        z = torch.addmm(total, best.flatten(1), self.ones[: x.size(1)]).mul(0.01)
        return x + (z.exp() + z.sigmoid()).sum(-1)[:, None, None] * h


def ranks_with_unequal_work_run_the_same_collectives_again(rank: int) -> None:
    batch = tokens(length=6 if rank else 1, num_rows=64)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Uneven(), Uneven())

    plain = train(build(), batch, 3)
    model = build()
    actmem.apply(model, actmem.Full(), collectives="recompute")
    counts = Collectives()
    with counts:
        assert_same(plain, train(model, batch, 3))
    every: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(every, counts.again())
    assert every[0] == every[1]


class Unawaited(nn.Module):
    """Autograd saves the gathered tensor while it is still on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        gathered = all_gather_single_autograd(torch.tanh(x), 0, dist.group.WORLD)
        return x + (gathered * self.scale).chunk(NUM_RANKS)[0]


def what_is_on_its_way_is_not_read_before_it_arrives(rank: int) -> None:
    batch = torch.linspace(-1, 1, 2**18).view(256, -1) * (rank + 1)

    def build() -> nn.Module:
        return nn.Sequential(Unawaited(), Unawaited())

    for around in (nullcontext, torch.autograd.graph.save_on_cpu):
        plain = train(build(), batch, 2, lambda _, around=around: around())
        for collectives in ("save", "recompute"):
            model = build()
            actmem.apply(model, actmem.Full(), collectives=collectives)
            counts = Collectives()
            with counts:
                assert_same(plain, train(model, batch, 2, lambda _, around=around: around()))
            assert counts.again() == ({GATHER: 2 * 2} if collectives == "recompute" else {})


def tensor_parallel_reduces_again_when_asked(rank: int) -> None:
    saved, recomputed, again = reissue(rank, MODES["Full"], sequence=False, batch=tokens())
    assert again == {ALL_REDUCE: 2}
    assert recomputed.held_bytes == saved.held_bytes - 2 * tokens().nbytes


def the_first_call_is_decided_as_every_other(rank: int) -> None:
    """Torch infers the shapes of a layer when it first meets them: those are operators that no rule may count."""
    reports: list[actmem.Report] = []
    for _ in range(2):
        model = parallel_model(sequence=True)
        applied = actmem.apply(model, actmem.Selective(save=[actmem.every_second("matmul")]))
        train(model, tokens(length=5), 1)  # sizes that no other case has, so that the first model meets them first
        reports.append(applied.report())
    assert reports[0].kinds == reports[1].kinds


def a_collective_that_the_plan_saves_is_not_run_again(rank: int) -> None:
    mode = actmem.Selective(save=["collective"])
    model = parallel_model(sequence=True)
    plain = train(parallel_model(sequence=True), part(rank), 3)
    with actmem.apply(model, mode, collectives="recompute") as applied:
        counts = Collectives()
        with counts:
            assert_same(plain, train(model, part(rank), 3))
        assert not counts.again()
        assert applied.report().num_replayed > 0


# -------------------------------------------------------------------- context parallel


def gathered_context_parallel_communicates_once(rank: int) -> None:
    kernel = GatheredAttention(rank, dist.group.WORLD)
    modes = {name: MODES[name] for name in ("Full", "Selective")}
    issued = check_modes(lambda: stack(kernel=kernel), part(rank), modes=modes)
    assert issued[GATHER] == 3 * 2 * 2


def ring_context_parallel_communicates_once(rank: int) -> None:
    kernel = RingAttention(rank, dist.group.WORLD)
    modes = {name: MODES[name] for name in ("Full", "Selective")}
    issued = check_modes(lambda: stack(kernel=kernel), part(rank), modes=modes)
    assert issued["_c10d_functional.all_to_all_single.default"] == 3 * 2 * 2


def gathered_context_parallel_gathers_again_when_asked(rank: int) -> None:
    kernel = GatheredAttention(rank, dist.group.WORLD)
    plain = train(stack(kernel=kernel), part(rank), 3)
    model = stack(kernel=kernel)
    actmem.apply(model, actmem.Full(), collectives="recompute")
    counts = Collectives()
    with counts:
        assert_same(plain, train(model, part(rank), 3))
    assert counts.again() == {GATHER: 3 * 2 * 2}


# -------------------------------------------------------------------- expert parallel


def functional_exchange(rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
    return all_to_all_single_autograd(rows, received, sent, dist.group.WORLD) + 0


def exchange_in_place(rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    if not rows.is_floating_point():
        dist.all_to_all_single(out, rows, received, sent)
        return out
    return all_to_all_single(out, rows, received, sent)


def experts_over_ranks(rank: int, exchange: Any) -> None:
    batch = tokens(seed=rank)  # routing, and with it every size, differs between the ranks

    def build() -> nn.Module:
        return stack(mlp=lambda: ParallelMoe(exchange), seed=rank)

    modes = {**MODES, "Targets": actmem.Targets(["routed_experts"])}
    issued = check_modes(build, batch, modes=modes)
    assert issued
    plain, managed = build(), build()
    train(plain, batch)
    for collectives in ("save", "recompute"):  # an exchange is not run again, whatever is asked
        with actmem.apply(managed, actmem.Full(), collectives=collectives):
            counts = Collectives()
            with counts:
                train(managed, batch)
        assert not counts.again()
        assert not any("topk" in name or "sort" in name for name in counts.replayed)
        for a, b in zip(plain, managed, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a.mlp.routed, b.mlp.routed, strict=True))
            b.mlp.routed.clear()


def functional_expert_parallel_sends_once(rank: int) -> None:
    experts_over_ranks(rank, functional_exchange)


def expert_parallel_in_place_sends_once(rank: int) -> None:
    experts_over_ranks(rank, exchange_in_place)


DEFAULT = (
    *(tensor_parallel_communicates_once, sequence_parallel_communicates_once),
    *(the_forms_of_other_systems_gather_again, the_first_call_is_decided_as_every_other),
    *(sequence_parallel_gathers_again_when_asked, ranks_with_unequal_work_run_the_same_collectives_again),
    *(gathered_context_parallel_communicates_once, functional_expert_parallel_sends_once),
)
SLOW = (
    a_reduction_of_what_the_plan_saves_is_not_run_again,
    what_is_on_its_way_is_not_read_before_it_arrives,
    *(sequence_parallel_gathers_again_under_other_modes, tensor_parallel_reduces_again_when_asked),
    *(a_collective_that_the_plan_saves_is_not_run_again, gathered_context_parallel_gathers_again_when_asked),
    *(ring_context_parallel_communicates_once, expert_parallel_in_place_sends_once),
)
