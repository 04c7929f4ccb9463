"""What may run again and what may not: every rule by name, and its effect on a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import actmem
from actmem import Full
from actmem.decision_rules import Rule
from actmem.engine.operators import REASONS, UNDECLARED_WRITES, Operator, describe
from actmem.engine.tape import Tape
from actmem.engine.verdicts import resolve
from tests.engine.cases import Program, batch, compare, never, simple_step, stack, tensors

aten = torch.ops.aten
Body = Callable[[Any, Tensor], Tensor]


def reasons(body: Body, **options: Any) -> dict[str, str]:
    """Train with the block and plainly, to the bit; return operator -> name of the reason why its result is held."""
    names = {text: name for name, text in REASONS.items()}
    compare(lambda: stack(body, **options), Full(), num_steps=3)
    report = compare(lambda: stack(body, **options), Full(), num_steps=1)
    assert report.never_replayed_bytes > 0
    return {op: names[why] for op, why in never(report).items()}


def forbidden(func: Any, *args: Any, **kwargs: Any) -> str | None:
    return describe(func).forbids(args, kwargs, next(tensors(args), None))


# -------------------------------------------------------------------- uninitialised, constant


@pytest.mark.parametrize(
    "func",
    [
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.empty_permuted.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.resize_.default,
    ],
    ids=str,
)
def test_tensors_born_uninitialised_are_never_replayed(func: Any) -> None:
    assert describe(func).never == "uninitialised" and not describe(func).plain


@pytest.mark.parametrize(
    "func",
    [
        aten.zeros.default,
        aten.zeros_like.default,
        aten.new_zeros.default,
        aten.ones.default,
        aten.ones_like.default,
        aten.new_ones.default,
        aten.full.default,
        aten.full_like.default,
        aten.new_full.default,
        aten.zero_.default,
        aten.fill_.Scalar,
        aten.scalar_tensor.default,
    ],
    ids=str,
)
def test_tensors_born_constant_are_never_replayed(func: Any) -> None:
    assert describe(func).never == "constant" and not describe(func).plain


def filled_by_numpy(new: Callable[[Tensor], Tensor]) -> Body:
    def body(block: Program, h: Tensor) -> Tensor:
        out = new(h.detach())
        out.numpy()[...] = h.detach().numpy() * 2
        return (h @ block.v).sin() * out

    return body


def test_a_block_holds_what_was_born_uninitialised() -> None:
    assert reasons(filled_by_numpy(torch.empty_like)) == {"aten.empty_like.default": "uninitialised"}


def test_a_block_holds_what_was_born_constant() -> None:
    assert reasons(filled_by_numpy(torch.zeros_like)) == {"aten.zeros_like.default": "constant"}


def test_what_recorded_operators_filled_is_not_uninitialised_any_more() -> None:
    def body(block: Program, h: Tensor) -> Tensor:
        out = torch.empty_like(h.detach())
        out[:, :3] = h.detach()[:, :3].exp()
        out[:, 3:] = h.detach()[:, 3:].sin()
        return (h @ block.v).sin() * out

    report = compare(lambda: stack(body), Full(), num_steps=3)
    assert report.never_replayed_bytes == 0


# -------------------------------------------------------------------- collective


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_collectives_are_never_replayed_and_write_every_tensor_they_are_given() -> None:
    reduce = Operator(torch.ops.c10d.allreduce_.default)
    assert reduce.never == "collective" and (0, "tensors") in reduce.writes
    gather = Operator(torch.ops.c10d._allgather_base_.default)
    assert gather.never == "collective"
    assert {name for _, name in gather.writes} == {"output_tensor", "input_tensor"}
    functional = Operator(torch.ops._c10d_functional.all_reduce.default)
    assert functional.never == "collective" and functional.writes == ()
    in_place = Operator(torch.ops._c10d_functional.all_reduce_.default)
    assert in_place.never == "collective" and in_place.writes == ((0, "input"),)


@pytest.mark.usefixtures("one_rank")
def test_a_block_holds_the_result_of_a_collective() -> None:
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]

    def body(block: Program, h: Tensor) -> Tensor:
        summed = torch.ops._c10d_functional.all_reduce(h.detach(), "sum", group)
        return (h @ block.v).sin() * torch.ops._c10d_functional.wait_tensor(summed)

    found = reasons(body)
    assert set(found.values()) == {"collective"} and all("_c10d_functional" in op for op in found)


@pytest.mark.usefixtures("one_rank")
def test_a_block_holds_what_a_collective_wrote_in_place() -> None:
    def body(block: Program, h: Tensor) -> Tensor:
        summed = h.detach() * 2
        dist.all_reduce(summed)
        return (h @ block.v).sin() * summed

    assert set(reasons(body).values()) == {"collective"}


# -------------------------------------------------------------------- routing


@pytest.mark.parametrize(
    "func",
    [
        aten.topk.default,
        aten.sort.default,
        aten.sort.stable,
        aten.argsort.default,
        aten.kthvalue.default,
        aten.mode.default,
        aten._unique2.default,
        aten.unique_consecutive.default,
        aten.unique_dim.default,
    ],
    ids=str,
)
def test_operators_that_decide_routing_are_never_replayed(func: Any) -> None:
    assert describe(func).never == "routing"


@pytest.mark.parametrize(
    ("indices", "op"),
    [(lambda h: h.topk(3).indices, "aten.topk.default"), (lambda h: h.sort().indices[:, :3], "aten.sort.default")],
    ids=["topk", "sort"],
)
def test_a_block_holds_where_tokens_are_routed(indices: Callable[[Tensor], Tensor], op: str) -> None:
    def body(block: Program, h: Tensor) -> Tensor:
        return torch.cat([(h @ block.v).gather(1, indices(h.detach())).sin(), h[:, 3:]], 1)

    assert reasons(body) == {op: "routing"}


# -------------------------------------------------------------------- opaque


@torch.library.custom_op("actmem_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2)


def test_custom_operators_are_never_replayed() -> None:
    twice(torch.ones(1))
    assert describe(torch.ops.actmem_tests.twice.default).never == "opaque"


def test_a_block_holds_the_result_of_a_custom_operator() -> None:
    found = reasons(lambda block, h: (h @ block.v).sin() * twice(h.detach()))
    assert found == {"actmem_tests.twice.default": "opaque"}


def test_higher_order_operators_are_never_replayed() -> None:
    for operator in (torch.ops.higher_order.cond, torch.ops.higher_order.flex_attention):
        described = describe(operator)
        assert described.never == "opaque" and described.name == f"higher_order.{operator.name()}"


@pytest.mark.filterwarnings("ignore")  # flex_attention warns that it is not compiled
def test_a_block_holds_the_result_of_a_higher_order_operator() -> None:
    def body(block: Program, h: Tensor) -> Tensor:
        q = h.detach().view(1, 1, 6, 8)
        return (h @ block.v).sin() * flex_attention(q, q * 2, q + 1).view(6, 8)

    found = reasons(body)
    assert found.get("higher_order.flex_attention") == "opaque", found


# -------------------------------------------------------------------- recurrent, unrepeatable


def test_fused_recurrent_operators_are_never_replayed() -> None:
    for func in (aten.mkldnn_rnn_layer.default, aten._cudnn_rnn.default, aten.lstm.input, aten.gru.input):
        assert Operator(func).never == "recurrent"


def test_a_block_holds_what_a_fused_recurrent_layer_made() -> None:
    def body(block: Program, h: Tensor) -> Tensor:
        return block.parts["rnn"](h.view(2, 3, 8))[0].sin().reshape(6, 8)

    found = reasons(body, parts=lambda: {"rnn": nn.LSTM(8, 8, batch_first=True)})
    assert found == {"aten.mkldnn_rnn_layer.default": "recurrent", "aten.zeros.default": "constant"}  # its first state


def test_accumulating_writes_are_never_replayed_and_plain_ones_are() -> None:
    x, at, values = torch.zeros(4), (torch.tensor([0, 0]),), torch.ones(2)
    assert forbidden(aten.index_put.default, x, at, values, True) == "unrepeatable"
    assert forbidden(aten.index_put_.default, x, at, values, accumulate=True) == "unrepeatable"
    assert forbidden(aten.put.default, x, at[0], values, True) == "unrepeatable"
    assert forbidden(aten.index_put.default, x, at, values, False) is None
    assert forbidden(aten.index_put_.default, x, at, values) is None
    assert describe(aten._ctc_loss.default).never == "unrepeatable"


def test_a_block_holds_what_was_accumulated_by_index() -> None:
    at = torch.tensor([0, 1, 0, 1, 0, 1])

    def body(block: Program, h: Tensor) -> Tensor:
        summed = torch.zeros_like(h).index_put((at,), h, accumulate=True)
        return (h @ block.v) * summed.sin()

    assert reasons(body)["aten.index_put.default"] == "unrepeatable"


# -------------------------------------------------------------------- unseen, external, parameter, generator


class FromNumpy(torch.autograd.Function):
    """A Function whose forward torch does not see."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return torch.from_numpy(h.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2


def test_a_block_holds_what_code_made_that_the_tape_did_not_see() -> None:
    def body(block: Program, h: Tensor) -> Tensor:
        made = FromNumpy.apply(h)
        return (made + h @ block.v).sin()

    assert reasons(body) == {"input": "unseen"}


def test_what_is_made_from_unseen_work_is_held_if_that_work_is_gone() -> None:
    assert reasons(lambda block, h: (FromNumpy.apply(h) + h @ block.v).sin()) == {"aten.add.Tensor": "barrier"}


class Counting(nn.Module):
    """A block that keeps a running value in a buffer, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(8) * 0.5)
        self.register_buffer("seen", torch.linspace(0, 1, 32))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.5).add_(1)
        return (x @ self.w).repeat(1, 4).sin() * self.seen


def test_a_block_holds_what_was_written_into_a_storage_from_outside() -> None:
    report = compare(lambda: nn.Sequential(Counting()), Full(), num_steps=1, blocks="0")
    assert never(report) == {"aten.add_.Tensor": REASONS["external"]}
    compare(lambda: nn.Sequential(Counting()), Full(), num_steps=3, blocks="0")


def of_a_detached_parameter(block: Program, h: Tensor) -> Tensor:
    return (h @ block.v.detach().exp()).sin() + h @ block.v


def of_a_detached_parameter_with_a_name(block: Program, h: Tensor) -> Tensor:
    w = block.v.detach()
    return (h @ w.exp()).sin() + h @ block.v


@pytest.mark.parametrize("body", [of_a_detached_parameter, of_a_detached_parameter_with_a_name])
@pytest.mark.parametrize("through_data", [False, True])
def test_an_optimizer_inside_backward_may_change_a_parameter_that_was_read_past_autograd(
    body: Body, through_data: bool
) -> None:
    def step_one(p: Tensor) -> None:
        with torch.no_grad():
            (p.data if through_data else p).add_(p.grad, alpha=-0.01)

    def stepping(model: nn.Module, x: Tensor) -> Tensor:
        hooks = [p.register_post_accumulate_grad_hook(step_one) for p in model.parameters()]
        loss = simple_step(model, x)
        for hook in hooks:
            hook.remove()
        return loss

    compare(lambda: stack(body), Full(), step=stepping, num_steps=3)


def test_a_parameter_read_past_autograd_is_named_so() -> None:
    model = stack(of_a_detached_parameter, num_blocks=1)
    with actmem.apply(model, Full(), blocks="0") as applied:
        simple_step(model, batch())
        observation = applied._runners[0].observation  # the report lists no parameters
    assert observation is not None
    found = [r for r in observation.rows if r.why == "parameter"]
    assert [(r.kind, r.shape) for r in found] == [("state", (8, 8))]
    assert [(r.op, r.why) for r in observation.rows if r.cause == "parameter"] == [("aten.exp.default", "barrier")]


class Sealed(torch.Generator):
    """A generator whose state cannot be read, as under CUDA graph capture."""

    def get_state(self) -> Tensor:
        raise RuntimeError("cannot read the state of a generator during capture")


def dropped(block: Program, h: Tensor) -> Tensor:
    return nn.functional.dropout(h @ block.v, 0.5).sin()


def test_a_block_holds_random_numbers_whose_generator_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(lambda: stack(dropped), Full()).never_replayed_bytes == 0
    monkeypatch.setattr(torch, "default_generator", Sealed())
    found = reasons(dropped)
    assert "generator" in found.values() and set(found.values()) <= {"generator", "barrier"}


# -------------------------------------------------------------------- barrier, cut, unit


def test_a_small_value_behind_a_large_opaque_one_is_held_in_its_place() -> None:
    found = reasons(lambda block, h: (h @ block.v + twice(h.detach().repeat(9, 1)).sum(0)).sin())
    assert found == {"aten.add.Tensor": "barrier"}


def test_from_the_second_step_on_the_smallest_cut_is_held() -> None:
    def body(block: Program, h: Tensor) -> Tensor:
        # 1728 bytes of opaque work, then 32 bytes from which everything is made that autograd saves
        row = twice(h.detach().repeat(9, 1)).sum(0)
        a, b = h @ block.v + row, h @ block.v * 2 - row
        return a.sin() * b.cos()

    first = compare(lambda: stack(body), Full(), num_steps=1)
    later = compare(lambda: stack(body), Full(), num_steps=3)
    assert set(never(first).values()) == {REASONS["barrier"]}
    assert never(later) == {"aten.sum.dim_IntList": REASONS["cut"]}
    assert later.never_replayed_bytes == 2 * 32 < first.never_replayed_bytes


def test_outputs_of_a_nested_unit_are_held_and_nothing_inside_it_is_replayed() -> None:
    verdicts = resolve((Rule("recompute"),), layer=0, num_layers=1, modules={"": "0"}, roles={})
    x = torch.linspace(0, 1, 16)
    tape = Tape(verdicts, None, inputs=[x], trainable=frozenset())
    with tape:
        inside = x * 2
        out = inside.sin()
        tape.keep_outputs({"out": [out]})
        after = out.exp()
    unit, recorded = tape.pack(out).value, tape.pack(after).value
    assert unit.why == "unit" and unit.node is None and torch.equal(unit.held, out)
    assert recorded.node is not None and recorded.held is None
    assert recorded.node.refs[0][2] is unit  # a replay starts here
    tape.close()


def test_every_reason_has_a_sentence() -> None:
    named = {"uninitialised", "constant", "collective", "routing", "opaque", "recurrent", "unrepeatable", "transfer"}
    named |= {"gradient"}
    named |= {"unseen", "external", "parameter", "generator", "barrier", "cut", "unit"}
    assert REASONS.keys() == named  # each has a test above or below


# -------------------------------------------------------------------- accelerators


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_: True)


ON_ACCELERATOR = [
    aten.index_add.default,
    aten.index_add_.default,
    aten.scatter_add.default,
    aten.scatter_add_.default,
    aten.scatter_reduce.two,
    aten.scatter.src,
    aten.index_copy.default,
    aten.cumsum.default,
    aten.histc.default,
    aten.bincount.default,
    aten.median.dim,
    aten.nanmedian.dim,
    aten.max_unpool2d.default,
    aten.max_unpool3d.default,
    aten._embedding_bag.default,
    aten.put_.default,
    aten.index_put_.default,
]


@pytest.mark.usefixtures("accelerated")
@pytest.mark.parametrize("func", ON_ACCELERATOR, ids=str)
def test_what_torch_documents_as_nondeterministic_is_never_replayed_on_an_accelerator(func: Any) -> None:
    operator = Operator(func)
    assert not operator.plain
    assert operator.forbids((), {}, torch.empty(2, device="meta")) == "unrepeatable"
    assert operator.forbids((), {}, torch.empty(2)) is None
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert operator.forbids((), {}, torch.empty(2, device="meta")) is None
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("accelerated")
def test_copies_from_an_accelerator_to_the_host_are_never_replayed() -> None:
    there, here = torch.empty(2, device="meta"), torch.empty(2)
    copy = Operator(aten.copy_.default)
    assert not copy.plain
    assert copy.forbids((here, there), {}, here) == "transfer"
    assert copy.forbids((here, here), {}, here) is None
    assert copy.forbids((there, here), {}, there) is None
    assert copy.forbids((there, there), {}, there) is None


@pytest.mark.usefixtures("accelerated")
def test_a_conversion_that_lands_on_the_host_is_never_replayed() -> None:
    # The tape asks before the call runs, so that the first tensor it can show is the source.
    there = torch.empty(2, device="meta")
    to = Operator(aten._to_copy.default)
    assert to.forbids((there,), {"device": torch.device("cpu")}, there) == "transfer"
    assert to.forbids((there,), {"dtype": torch.float16}, there) is None
    assert to.forbids((torch.empty(2),), {"dtype": torch.float16}, torch.empty(2)) is None


def test_without_an_accelerator_none_of_this_is_asked() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    assert Operator(aten.cumsum.default).plain and Operator(aten._to_copy.default).plain


# -------------------------------------------------------------------- what schemas say


def overloads() -> Iterator[Any]:
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = full.partition("::")
        base, _, overload = rest.partition(".")
        if namespace == "aten":
            yield getattr(getattr(torch.ops.aten, base), overload or "default")


def test_every_operator_with_a_generator_or_the_tag_is_random() -> None:
    missed: list[str] = []
    num_random = 0
    for func in overloads():
        takes = any("Generator" in str(a.type) for a in func._schema.arguments)
        if takes or torch.Tag.nondeterministic_seeded in func.tags:
            num_random += 1
            operator = Operator(func)
            seeded = operator.seeded is not None or not takes
            if not (operator.random and seeded) or operator.plain:
                missed.append(str(func))
    assert missed == [] and num_random > 100


def test_fused_attention_draws_only_with_dropout() -> None:
    operator = describe(aten._scaled_dot_product_flash_attention.default)
    q = torch.empty(1, 1, 2, 8)
    assert operator.random and operator.dropout is not None
    assert not operator.draws((q, q, q), {}) and not operator.draws((q, q, q, 0.0), {})
    assert operator.draws((q, q, q, 0.1), {}) and operator.draws((q, q, q), {"dropout_p": 0.1})
    assert describe(aten.bernoulli_.float).draws((q,), {}) and not describe(aten.sin.default).draws((q,), {})


def test_a_call_draws_from_the_generator_it_is_given() -> None:
    own = torch.Generator()
    operator = describe(aten.bernoulli_.float)
    cpu = torch.device("cpu")
    assert operator.generator((torch.empty(1), 0.5), {"generator": own}, cpu) is own
    assert operator.generator((torch.empty(1), 0.5), {}, cpu) is torch.default_generator


def test_every_operator_that_may_write_says_so_or_is_listed() -> None:
    for func in overloads():
        declared = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        operator = Operator(func)
        if declared and not operator.view:
            listed = set(UNDECLARED_WRITES.get(func._schema.name.partition("::")[2], ()))
            assert {name for _, name in operator.writes} >= declared | listed, func
            assert not operator.plain


def batch_norm(mean: Tensor, var: Tensor) -> Any:
    x = torch.linspace(-1, 2, 12).view(3, 4)
    return aten.native_batch_norm(x, None, None, mean, var, True, 0.1, 1e-5)


def update_stats(mean: Tensor, var: Tensor) -> Any:
    return aten.batch_norm_update_stats(torch.linspace(-1, 2, 12).view(3, 4), mean, var, 0.1)


@pytest.mark.parametrize(
    ("name", "call"), [("native_batch_norm", batch_norm), ("batch_norm_update_stats", update_stats)]
)
def test_undeclared_writes_are_real(name: str, call: Callable[[Tensor, Tensor], Any]) -> None:
    mean, var = torch.zeros(4), torch.ones(4)
    call(mean, var)
    assert UNDECLARED_WRITES[name] == ("running_mean", "running_var")
    assert mean.any() and not torch.equal(var, torch.ones(4))
    func = getattr(aten, name).default
    arguments = {a.name: a for a in func._schema.arguments}
    assert all(arguments[a].alias_info is None for a in UNDECLARED_WRITES[name])  # else the list need not have it
    assert {a for _, a in Operator(func).writes} == set(UNDECLARED_WRITES[name])


def test_every_listed_operator_has_the_arguments_that_the_list_names() -> None:
    for name, arguments in UNDECLARED_WRITES.items():
        known = {a.name for a in getattr(aten, name).default._schema.arguments}
        assert set(arguments) <= known, name


def test_statistics_are_left_out_of_a_replay_only_in_training() -> None:
    operator = describe(aten.native_batch_norm.default)
    x, mean, var = torch.ones(3, 4), torch.zeros(4), torch.ones(4)
    assert operator.unread((x, None, None, mean, var, True, 0.1, 1e-5), {}) == {3, 4}
    assert operator.unread((x, None, None, mean, var, False, 0.1, 1e-5), {}) == frozenset()


def test_views_compute_nothing() -> None:
    for func in (aten.view.default, aten.t.default, aten.slice.Tensor, aten.detach.default, aten.expand.default):
        assert describe(func).view is True
    assert describe(aten._conj.default).view == 2 and describe(aten._neg_view.default).view == 2
    for func in (aten.add.Tensor, aten.relu_.default, aten.clone.default, aten._to_copy.default):
        assert describe(func).view is False


def test_only_full_overwrites_are_called_so() -> None:
    for func in (aten.copy_.default, aten.fill_.Scalar, aten.bernoulli_.float, aten.add.out, aten.mm.out):
        assert Operator(func).overwritten, func
    for func in (aten.add_.Tensor, aten.relu_.default, aten.index_put_.default, aten.masked_fill_.Scalar):
        assert not Operator(func).overwritten, func


def test_an_operator_is_described_once() -> None:
    assert describe(aten.mm.default) is describe(aten.mm.default)
    assert repr(describe(aten.mm.default)) == "Operator(aten.mm.default)"
