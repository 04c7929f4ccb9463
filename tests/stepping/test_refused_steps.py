"""What cannot be stepped in the backward pass, or have its state elsewhere, is noticed and refused with its reason."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import actmem
from actmem.errors import ModeError, UnsupportedError, VersionError
from tests.children import child, ended
from tests.stepping.trainings import DIM, Run, adamw, made, mean, sgd

IN_BACKWARD = {"step_in_backward": actmem.StepInBackward()}
ON_DISK = {"optimizer_state": actmem.OptimizerState(to="disk", min_bytes=1024)}


def backward(run: Run, scale: Callable[[Tensor], Tensor] = lambda loss: loss) -> None:
    scale(mean(run.model(torch.randn(8, DIM)))).backward()


def test_accumulation_is_noticed_in_the_second_backward_pass() -> None:
    run = Run(adamw, **IN_BACKWARD)
    backward(run)
    with pytest.raises(UnsupportedError, match="gradients are accumulated over several backward passes"):
        backward(run)


def test_gradients_from_before_are_noticed() -> None:
    run = Run(adamw)
    backward(run)
    with pytest.raises(ModeError, match="there are gradients already"):
        actmem.apply(run.model, actmem.Full(), blocks="layers.*", optimizer=run.optimizer, **IN_BACKWARD)
    run = Run(adamw, **IN_BACKWARD)
    run.model.embed.weight.grad = torch.zeros_like(run.model.embed.weight)
    with pytest.raises(UnsupportedError, match="there were gradients before this backward pass"):
        backward(run)


@pytest.mark.parametrize("clip", [clip_grad_norm_, torch.nn.utils.clip_grad_norm_, clip_grad_value_])
def test_clipping_is_noticed_by_whatever_name_it_is_called(clip: Any) -> None:
    gc.collect()  # trainings of other tests
    run, other = Run(adamw, **IN_BACKWARD), nn.Linear(2, 2)
    backward(run)
    with pytest.raises(UnsupportedError, match="gradients are clipped, but each was dropped"):
        clip(run.model.parameters(), 1.0)
    other(torch.ones(1, 2)).sum().backward()
    clip(other.parameters(), 1e-3)  # of another model, nothing is refused
    assert run.applied is not None
    run.applied.remove()
    backward(run)
    clip(run.model.parameters(), 1.0)


def test_a_gradient_scaler_is_noticed_before_the_backward_pass() -> None:
    run, scaler = Run(sgd, **IN_BACKWARD), torch.amp.GradScaler("cpu")
    before = run.model.embed.weight.detach().clone()
    with pytest.raises(UnsupportedError, match="a GradScaler scales the loss"):
        backward(run, scaler.scale)
    assert torch.equal(run.model.embed.weight, before)
    scaler.scale(nn.Linear(2, 2)(torch.ones(1, 2)).sum()).backward()
    backward(run, torch.amp.GradScaler("cpu", enabled=False).scale)


class Counting(torch.optim.SGD):
    """Counts steps in its group."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def test_an_optimizer_that_counts_by_group_is_noticed() -> None:
    run = Run(lambda model: Counting([{"params": [*model.parameters()], "count": 0}], lr=1e-3), **IN_BACKWARD)
    with pytest.raises(UnsupportedError, match="Counting changes 'count' of a parameter group in each step"):
        backward(run)
    with pytest.raises(UnsupportedError, match="LBFGS looks at all gradients at once"):
        Run(lambda model: torch.optim.LBFGS(model.parameters()), **IN_BACKWARD)


def test_tensors_by_the_place_of_a_parameter_are_noticed_before_any_step() -> None:
    class Listed(torch.optim.SGD):
        """Keeps a copy of each parameter, in order: one parameter alone would take the first's."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.copies = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    with pytest.raises(UnsupportedError, match="Listed keeps tensors in 'copies'"):
        Run(lambda model: Listed(model.parameters()), **IN_BACKWARD)


def test_a_closure_is_refused_where_the_state_is_elsewhere() -> None:
    run = Run(adamw, **ON_DISK)
    with pytest.raises(UnsupportedError, match="computes gradients inside of the step"):
        run.optimizer.step(lambda: torch.zeros(()))


class Peeking(nn.Module):
    """A block that reads its weight where nothing is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(DIM))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (self.weight * 2).tanh().sum(0)
        scaled = x * scale  # its backward step comes after that of the product, and so after the weight's
        return scaled + x @ self.weight


def test_a_replay_that_needs_a_stepped_parameter_is_refused() -> None:
    model = nn.Sequential(Peeking(), Peeking())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with actmem.apply(model, actmem.Full(), blocks="*", optimizer=optimizer, **IN_BACKWARD):
        loss = mean(model(torch.randn(8, DIM)))
        with pytest.raises(VersionError, match=r"Move the in-place change \(an optimizer step,"):
            loss.backward()


def test_what_is_missing_or_excluded_is_said() -> None:
    model = made()
    optimizer = adamw(model)
    with pytest.raises(ModeError, match=r"needs the optimizer: actmem\.apply"):
        actmem.apply(model, actmem.Full(), blocks="layers.*", **IN_BACKWARD)
    with pytest.raises(ModeError, match="has no parameter of the model"):
        actmem.apply(model, actmem.Full(), blocks="layers.*", optimizer=adamw(made()), **IN_BACKWARD)
    state = actmem.OptimizerState(to="host")
    with pytest.raises(ModeError, match="the state is in host memory already"):
        actmem.apply(model, actmem.Full(), blocks="layers.*", optimizer=optimizer, optimizer_state=state)
    with pytest.raises(ModeError, match="Full alone has no use for it"):
        actmem.apply(model, actmem.Full(), blocks="layers.*", optimizer=optimizer)
    with pytest.raises(ModeError, match=r"Write step_in_backward=actmem\.StepInBackward\(\)"):
        actmem.apply(model, actmem.Full(), blocks="layers.*", optimizer=optimizer, step_in_backward=True)
    with actmem.apply(model, actmem.Full(), blocks="layers.*", optimizer=optimizer, **IN_BACKWARD) as applied:
        plan = actmem.Plan.from_json(applied.plan.to_json())
        assert plan == applied.plan and "stepped in the backward pass" in str(plan)
    with pytest.raises(ModeError, match="cannot be combined with a plan"):
        actmem.apply(model, plan, optimizer=optimizer, **IN_BACKWARD)
    with pytest.raises(ModeError, match="needs the optimizer"):
        actmem.apply(model, plan)
    found = actmem.profile(model, (torch.randn(8, DIM),), loss=mean, blocks="layers.*", microbatches=2)
    with pytest.raises(ModeError, match="cannot be combined with microbatches = 2"):
        actmem.predict(found, plan, "h100-80gb")


# -------------------------------------------------------------------- killed in the middle

_CHILD = """
import os, signal, sys
import torch, actmem
from tests.stepping.trainings import Run, adamw
state = actmem.OptimizerState(to="disk", min_bytes=1024, directory=sys.argv[1])
run = Run(adamw, step_in_backward=actmem.StepInBackward(), optimizer_state=state)
run.train(0, 2)
run.save(sys.argv[2])
run.model.layers[1][1].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
run.train(2, 3)
"""


def test_nothing_of_a_killed_run_is_taken_for_good(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    with child("-c", _CHILD, str(folder), str(tmp_path / "checkpoint")) as process:
        ended(process)
    assert process.returncode == -signal.SIGKILL
    assert len([*folder.iterdir()]) == 1  # its file is still there
    state = actmem.OptimizerState(to="disk", min_bytes=1024, directory=str(folder))
    run = Run(adamw, step_in_backward=actmem.StepInBackward(), optimizer_state=state)
    assert len([*folder.iterdir()]) == 1  # only that of this run
    assert not run.optimizer.state
    run.load(tmp_path / "checkpoint")
    run.train(2, 4)
    plain = Run(adamw)
    plain.train(0, 4)
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), plain.model.parameters(), strict=True))
    assert run.applied is not None
    run.applied.remove()
    assert not [*folder.iterdir()]


def test_state_that_was_changed_on_disk_is_not_used(tmp_path: Path) -> None:
    state = actmem.OptimizerState(to="disk", min_bytes=1024, directory=str(tmp_path))
    run = Run(adamw, optimizer_state=state)
    run.train(0, 1)
    (file,) = tmp_path.glob("*/*")
    with file.open("r+b") as opened:
        opened.write(b"\xff" * 4096)
    with pytest.raises(actmem.OffloadError, match="the file was changed or the disk is faulty"):
        run.train(1, 2)
