from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from actmem.engine import replay as replay_depth
from actmem.measuring import measure

X = torch.ones(4, 4)


def phases(fn) -> list[tuple[str, str]]:
    return [(s.op.split(".")[1], s.phase) for s in measure(fn).timeline]


def test_work_inside_a_replay_is_replay_in_this_thread_only() -> None:
    def step() -> None:
        replay_depth.enter()
        try:
            X @ X
        finally:
            replay_depth.leave()
        X @ X

    m = measure(step)
    assert [s.phase for s in m.timeline] == ["replay", "forward"]
    assert (m.replayed_flops, m.forward_flops) == (128, 128)
    assert (m.num_ops, m.num_replayed_ops) == (2, 1)
    seen: list[bool] = []
    replay_depth.enter()
    thread = threading.Thread(target=lambda: seen.append(replay_depth.replaying()))
    thread.start()
    thread.join()
    assert replay_depth.replaying()
    replay_depth.leave()
    assert seen == [False]
    assert not replay_depth.replaying()


def test_replays_nest() -> None:
    replay_depth.enter()
    replay_depth.enter()
    replay_depth.leave()
    assert replay_depth.replaying()
    replay_depth.leave()
    assert not replay_depth.replaying()


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_that_are_the_first_thing_in_backward_are_replay(reentrant: bool, retain: bool) -> None:
    def step() -> None:
        x = torch.ones(4, requires_grad=True)
        y = checkpoint(lambda t: t.sin().exp(), x, use_reentrant=reentrant)
        y.backward(torch.ones(4), retain_graph=retain)

    seen = phases(step)
    assert ("sin", "replay") in seen
    assert ("exp", "replay") in seen
    assert ("cos", "backward") in seen
    assert ("mul", "backward") in seen
    assert ("mul", "replay") not in seen


def test_hooks_inside_a_checkpoint_do_not_hide_the_recomputation() -> None:
    def region(t: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            t = t.sin()
        return t.exp()

    def step() -> None:
        x = torch.ones(4, requires_grad=True)
        checkpoint(region, x, use_reentrant=False).sum().backward()

    seen = phases(step)
    assert ("sin", "replay") in seen
    assert ("exp", "replay") in seen


def test_a_hand_written_recomputation_is_replay() -> None:
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                y = x.sin()
            return torch.autograd.grad(y, x, grad)[0]

    seen = phases(lambda: Again.apply(torch.ones(4, requires_grad=True)).sum().backward())
    assert [phase for op, phase in seen if op == "sin"] == ["forward", "replay"]
    assert [phase for op, phase in seen if op == "cos"] == ["backward"]


def test_double_backward_is_backward_not_replay() -> None:
    def step() -> None:
        x = torch.ones(4, requires_grad=True)
        (grad,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
        grad.sum().backward()

    m = measure(step)
    assert m.num_replayed_ops == 0
    assert [s.phase for s in m.timeline if s.op == "aten.cos.default"] == ["backward"]


def test_an_optimizers_step_is_a_phase_of_its_own() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def step() -> None:
        model(X).sum().backward()
        optimizer.step()
        torch.ones(1)

    m = measure(step, model=model)
    assert [s.phase for s in m.timeline][-1] == "forward"
    assert {s.op.split(".")[1] for s in m.timeline if s.phase == "optimizer"} == {"add_"}
    assert m.optimizer_seconds > 0


def test_an_optimizer_inside_backward_is_told_from_backward() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def update(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    handle = model.weight.register_post_accumulate_grad_hook(update)
    m = measure(lambda: model(X).sum().backward(), model=model)
    handle.remove()
    assert [s.phase for s in m.timeline if s.op == "aten.add_.Tensor"] == ["optimizer"]
    assert m.by_category["gradients"] == 64, "seen although it was gone when backward ended"
    assert m.backward_flops == 128


def test_an_optimizer_with_a_closure_runs_forward_and_backward() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(X).square().sum()
        loss.backward()
        return loss

    m = measure(lambda: optimizer.step(closure), model=model)
    assert m.forward_flops == 128
    assert m.backward_flops == 128
    assert m.saved_bytes > 0


def test_seconds_of_the_phases_add_up_to_less_than_the_whole() -> None:
    from time import perf_counter

    model = nn.Linear(64, 64)
    start = perf_counter()
    m = measure(lambda: model(torch.ones(64, 64)).sum().backward())
    whole = perf_counter() - start
    assert 0 < m.forward_seconds + m.backward_seconds < whole
    assert min(m.forward_seconds, m.backward_seconds) > 0
