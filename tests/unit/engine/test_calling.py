"""Which way an applied block's forward goes, and that nothing but its forward changes."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem import Full, SaveEverything
from actmem.applying.applied_block import applied_runner
from actmem.engine.tape import Tape
from actmem.engine.values import storages_of
from actmem.torchcompat import storage_key
from tests.engine.cases import assert_same_bits, batch, modes_unchanged, outcome, simple_step, total


class Block(nn.Module):
    """A block with a signature worth keeping."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor, scale: float = 1.0, *, mask: Tensor | None = None, **others: Any) -> Tensor:
        """Multiply twice."""
        h = self.down(torch.tanh(self.up(x))) * scale
        return x + (h if mask is None else h * mask)


def stacked(num_blocks: int = 2) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(*[Block() for _ in range(num_blocks)])


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    """Every tape that is entered."""
    entered: list[Tape] = []
    plain: Callable[[Tape], Any] = Tape.__enter__

    def enter(self: Tape) -> Any:
        entered.append(self)
        return plain(self)

    monkeypatch.setattr(Tape, "__enter__", enter)
    return entered


# -------------------------------------------------------------------- the class exchange


def test_the_exchanged_class_looks_like_the_original() -> None:
    model = stacked()
    with actmem.apply(model, Full()):
        for block in model:
            kind = type(block)
            assert kind is not Block and kind.__mro__[1] is Block
            assert (kind.__name__, kind.__qualname__, kind.__module__) == (
                Block.__name__,
                Block.__qualname__,
                Block.__module__,
            )
            assert kind.__doc__ == Block.__doc__ and isinstance(block, Block)
            assert inspect.signature(block.forward) == inspect.signature(Block().forward)
            assert inspect.signature(kind.forward) == inspect.signature(Block.forward)
            assert block.forward.__doc__ == "Multiply twice."
        assert type(model[0]) is type(model[1])  # the plan says the same for both
    with actmem.apply(model, Full(every=2)):
        assert type(model[0]) is not type(model[1])
    assert all(type(block) is Block for block in model)


def test_nothing_is_written_to_the_instance() -> None:
    model = stacked()
    before = [dict(vars(block)) for block in model]
    text, keys = repr(model), list(model.state_dict())
    with actmem.apply(model, Full()):
        simple_step(model, batch())
        assert [list(vars(block)) for block in model] == [list(b) for b in before]
        assert repr(model) == text and list(model.state_dict()) == keys


def test_a_copy_and_a_pickle_are_plain() -> None:
    model = stacked()
    with actmem.apply(model, Full()):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model[0])):
            assert all(type(m) in (nn.Sequential, Block, nn.Linear) for m in other.modules())
            assert all(applied_runner(m) is None for m in other.modules())
        clone = copy.deepcopy(model)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        assert clone(batch()).ne(model(batch())).any()  # it runs its own weights


def test_keyword_arguments_and_defaults_reach_the_forward() -> None:
    model, x, mask = stacked(1), batch(), torch.ones(6, 8) / 2
    expected = model[0](x, 2.0, mask=mask, unused=1)
    with actmem.apply(model, Full(), blocks="0"):
        assert torch.equal(model[0](x, 2.0, mask=mask, unused=1), expected)
        assert torch.equal(model[0](x=x, mask=mask, scale=2.0), expected)


def test_hooks_run_once_and_in_their_order() -> None:
    def run(applied: bool) -> tuple[list[str], dict[str, Any]]:
        model, events = stacked(), list[str]()
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: events.append(f"before {name}"))
            module.register_forward_hook(lambda *_, name=name: events.append(f"after {name}"))
            module.register_full_backward_hook(lambda *_, name=name: events.append(f"backward {name}"))
        if applied:
            actmem.apply(model, Full())
        found = [outcome(model, batch(), simple_step) for _ in range(2)][-1]
        return events, found

    (plain, expected), (managed, found) = run(False), run(True)
    assert plain == managed and len(plain) == 2 * 3 * 7
    assert_same_bits(expected, found)


def test_hooks_lie_outside_the_tape(tapes: list[Tape]) -> None:
    model = stacked(1)
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    seen: list[int] = []
    model[0].register_forward_pre_hook(lambda *_: seen.append(len(_get_current_dispatch_mode_stack())))
    model[0].register_forward_hook(lambda *_: seen.append(len(_get_current_dispatch_mode_stack())))
    with actmem.apply(model, Full(), blocks="0"):
        model(batch())
    assert seen == [0, 0] and len(tapes) == 1


def test_removing_under_a_later_subclass_leaves_the_block_inert(tapes: list[Tape]) -> None:
    model = stacked()
    plain = outcome(model, batch(), simple_step)
    applied = actmem.apply(model, Full())
    for block in model:  # as FSDP2 does it
        block.__class__ = type("Sharded" + type(block).__name__, (type(block),), {})
    assert_same_bits(plain, outcome(model, batch(), simple_step))
    assert len(tapes) == 2
    applied.remove()
    assert [type(block).__name__ for block in model] == ["ShardedBlock"] * 2  # not ours to change
    assert all(applied_runner(block) is None for block in model)
    assert_same_bits(plain, outcome(model, batch(), simple_step))
    assert len(tapes) == 2
    applied.remove()  # twice is once


def test_a_model_may_be_applied_again_after_removing(tapes: list[Tape]) -> None:
    model = stacked()
    plain = outcome(model, batch(), simple_step)
    first = actmem.apply(model, Full())
    first.remove()
    with actmem.apply(model, Full()):
        first.remove()  # of an older plan: leaves the new one alone
        assert_same_bits(plain, outcome(model, batch(), simple_step))
    assert len(tapes) == 2 and all(type(block) is Block for block in model)


def test_a_graph_that_was_recorded_before_removing_stays_valid() -> None:
    model, x = stacked(), batch()
    plain = outcome(model, x, simple_step)
    applied = actmem.apply(model, Full())
    model.zero_grad()
    x.grad = None
    loss = total(model(x))
    applied.remove()
    loss.backward()
    assert plain["x.grad"] is not None and torch.equal(plain["x.grad"], x.grad)


# -------------------------------------------------------------------- when no tape is entered


def test_each_training_call_of_a_block_is_under_a_tape_of_its_own(tapes: list[Tape]) -> None:
    model = stacked(3)
    with actmem.apply(model, Full()), modes_unchanged():
        simple_step(model, batch())
        simple_step(model, batch())
    assert len(tapes) == len(set(map(id, tapes))) == 6


def test_no_tape_without_gradients(tapes: list[Tape]) -> None:
    model = stacked()
    with actmem.apply(model, Full()) as applied:
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                model(batch())
        assert tapes == [] and applied.report().unobserved == ("0", "1") and applied.report().notes == ()


def test_eval_mode_is_idle_and_the_report_says_so(tapes: list[Tape]) -> None:
    model = stacked()
    plain = outcome(model, batch(), simple_step)
    with actmem.apply(model, Full()) as applied:
        model.eval()
        assert_same_bits(plain, outcome(model, batch(), simple_step))
        assert tapes == []
        assert len(applied.report().notes) == 1
        assert applied.report().notes[0].startswith("2 block calls ran in eval mode with gradients on")
        model.train()
        simple_step(model, batch())
        assert len(tapes) == 2


def test_a_frozen_block_whose_input_needs_no_gradient_runs_plain(tapes: list[Tape]) -> None:
    model = stacked(3)
    model[0].requires_grad_(False)
    plain = outcome(model, batch().detach(), simple_step)
    with actmem.apply(model, Full()) as applied:
        assert_same_bits(plain, outcome(model, batch().detach(), simple_step))
        assert len(tapes) == 2 and applied.report().unobserved == ("0",)
        model.requires_grad_(False)
        x = batch()
        total(model(x)).backward()  # frozen throughout, but the input wants its gradient
        assert len(tapes) == 5 and x.grad is not None


def test_saving_everything_enters_a_tape_in_the_observed_step_only(tapes: list[Tape]) -> None:
    model = stacked()
    plain = outcome(model, batch(), simple_step)
    with actmem.apply(model, SaveEverything()) as applied:
        for _ in range(3):
            assert_same_bits(plain, outcome(model, batch(), simple_step))
        assert len(tapes) == 2
        report = applied.report()
        assert report.recomputed_bytes == 0 and report.num_replayed == 0
        applied.check_replay()
        simple_step(model, batch())
        assert len(tapes) == 4


def test_layers_that_a_plan_saves_are_idle_after_the_observed_step(tapes: list[Tape]) -> None:
    model = stacked(4)
    with actmem.apply(model, Full(every=2)):
        simple_step(model, batch())
        assert len(tapes) == 4
        simple_step(model, batch())
        assert len(tapes) == 6


def test_calls_are_checked_as_often_as_asked() -> None:
    model = stacked(1)
    with actmem.apply(model, Full(), blocks="0") as applied:
        script = applied._runners[0]
        assert script.num_checked == 1
        simple_step(model, batch())
        assert script.num_checked == 0
        applied.check_replay(3)
        seen = [script.observation]
        for _ in range(4):
            simple_step(model, batch())
            seen.append(script.observation)
        assert script.num_checked == 0
        assert [a is b for a, b in itertools.pairwise(seen)] == [False, False, False, True]


# -------------------------------------------------------------------- failures


class Failing(Block):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        super().forward(x)
        raise ValueError("on purpose")


def test_an_error_in_the_forward_leaves_no_mode_and_no_hook_behind() -> None:
    from torch.nn.modules import module as hooks

    model = nn.Sequential(Failing())
    with actmem.apply(model, Full(), blocks="0"):
        before = len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)
        for _ in range(2):
            with modes_unchanged(), pytest.raises(ValueError, match="on purpose"):
                model(batch())
        assert (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)) == before


def test_functorch_around_a_block_is_refused_by_name() -> None:
    model = stacked(1)
    with actmem.apply(model, Full(), blocks="0"), pytest.raises(actmem.UnsupportedError, match=r"torch.func.grad"):
        torch.func.grad(lambda x: model(x).sum())(batch().detach())


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_block_that_must_be_compiled_whole_is(tapes: list[Tape]) -> None:
    model = stacked(1)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain = outcome(model, batch(), lambda _, x: simple_step(compiled, x))
    with actmem.apply(model, Full(), blocks="0") as applied:
        assert_same_bits(plain, outcome(model, batch(), lambda _, x: simple_step(compiled, x)))
        assert not tapes and [graph.blocks for graph in applied.report().compiled] == [("0",)]
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_model_whose_block_breaks_the_graph_runs_it_under_a_tape(tapes: list[Tape]) -> None:
    model = stacked(1)
    model[0].register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    model[0].up.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    plain = outcome(model, batch(), simple_step)
    torch._dynamo.reset()
    with actmem.apply(model, Full(), blocks="0") as applied:
        compiled = torch.compile(model, backend="aot_eager")
        assert_same_bits(plain, outcome(model, batch(), lambda _, x: simple_step(compiled, x)))
        assert len(tapes) == 1 and applied.report().num_replayed > 0
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_the_tape_keeps_blocks_out_of_graphs_where_it_is_asked_for_by_name(tapes: list[Tape]) -> None:
    model = stacked(1)
    plain = outcome(model, batch(), simple_step)
    torch._dynamo.reset()
    with actmem.apply(model, Full(), blocks="0", engine="tape") as applied:
        compiled = torch.compile(model, backend="aot_eager")
        assert_same_bits(plain, outcome(model, batch(), lambda _, x: simple_step(compiled, x)))
        assert len(tapes) == 1 and not applied.report().compiled
    torch._dynamo.reset()


# -------------------------------------------------------------------- storages


def test_storages_of_counts_each_once_and_skips_what_has_none() -> None:
    x = torch.ones(4)
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=False)
    assert storages_of([x, x[1:], sparse]) == {storage_key(x.untyped_storage())}
