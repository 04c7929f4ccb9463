"""Training under every mode is plain training to the bit, on every model of the zoo; and each mode did something."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem import Full, Report, SaveEverything, Selective, Targets, every_second
from actmem.modes import Mode
from tests.plain_first import skip_unless_plain_runs
from tests.zoo import ZOO, Case

MODES: dict[str, Callable[[Case], Mode]] = {
    "full": lambda case: Full(),
    "every_second_layer": lambda case: Full(every=2),
    "selective": lambda case: Selective(save=["attention", every_second(case.selective or "matmul")]),
    "norm": lambda case: Targets(["norm"]),
}
# The usual way has only the forward pass under autocast. "around" has the backward pass, and so the replays, in it too.
PRECISIONS = ["fp32", "bf16", "around"]


def cells() -> Iterator[Any]:
    """List every model with every mode and precision; of those around the backward pass, one a model is not slow."""
    for place, name in enumerate(ZOO):
        for turn, mode in enumerate(MODES):
            for precision in PRECISIONS:
                slow = precision == "around" and turn != place % len(MODES)
                yield pytest.param(name, mode, precision, marks=[pytest.mark.slow] if slow else [])


class Autocast(nn.Module):
    """Run a model's forward pass, and nothing else, under bf16 autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(*args, **kwargs)


def around(precision: str) -> AbstractContextManager[Any]:
    # Without its cache, which would hand the casts of one step's weights to the next step in the same context.
    if precision == "around":
        return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
    return nullcontext()


def built(case: Case, precision: str) -> tuple[nn.Module, Any]:
    model = case.build()
    batch = case.batch(model)
    return (Autocast(model) if precision == "bf16" else model), batch


def skip_unless_plain_trains(name: str, precision: str) -> None:
    if precision == "fp32":
        return
    case = ZOO[name]
    model, batch = built(case, precision)
    with around(precision):
        skip_unless_plain_runs(lambda: case.step(model, batch).backward())


def assert_it_did_something(report: Report) -> None:
    assert not report.unobserved
    assert report.num_replayed > 0, "no value was replayed"
    assert report.recomputed_bytes > 0, "nothing was dropped"
    assert report.held_bytes < report.plain_bytes, "nothing was gained"


@pytest.mark.parametrize(("name", "mode", "precision"), list(cells()))
def test_loss_gradients_buffers_and_names_are_those_of_plain_training(name: str, mode: str, precision: str) -> None:
    skip_unless_plain_trains(name, precision)
    case = ZOO[name]
    model, batch = built(case, precision)
    with around(precision):
        result = actmem.verify(model, batch, MODES[mode](case), loss=case.loss)
    assert result.ok, f"{name} under {mode} in {precision}: {result.difference}"
    assert_it_did_something(result.report)


@pytest.mark.parametrize("name", ZOO)
def test_nothing_is_held_beyond_plain_training_and_the_inputs_of_the_blocks(name: str) -> None:
    case = ZOO[name]
    model, batch = built(case, "fp32")
    every_matmul = Selective(save=["matmul", "batched_matmul", "convolution", "attention"])
    for mode in (*(make(case) for make in MODES.values()), every_matmul, SaveEverything()):
        report = actmem.verify(model, batch, mode, loss=case.loss).report
        given = sum(kind.num_blocks * kind.bytes_of("input", by_autograd=False) for kind in report.kinds)
        assert report.held_bytes <= report.plain_bytes + given, mode
    assert report.num_replayed == report.recomputed_bytes == 0, "to save everything is to replay nothing"


def trained(case: Case, mode: Mode | None, precision: str, num_steps: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train anew; return the losses, and every parameter, buffer and moment of the optimizer at the end."""
    model, batch = built(case, precision)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    applied = None if mode is None else actmem.apply(model, mode)
    torch.manual_seed(3)
    losses: list[Tensor] = []
    for _ in range(num_steps):
        loss = case.step(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if applied is not None:
        assert_it_did_something(applied.report())
        applied.remove()
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for index, moments in enumerate(optimizer.state.values()):
        state |= {f"{key} of parameter {index}": value for key, value in moments.items()}
    return losses, {key: value.detach().clone() for key, value in state.items()}


# Only a first call is observed and checked. These are the calls after it, with weights that move, and random numbers
# that go on from one step to the next.
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", ["llama_lora", "gpt2_dropout", "t5", "mixtral", "qwen3_next", "gemma3n_shared_kv", "resnet", "moe_topk"]
)
def test_three_steps_of_an_optimizer_end_at_the_same_bits(name: str, mode: str, precision: str) -> None:
    case = ZOO[name]
    plain_losses, plain = trained(case, None, precision, num_steps=3)
    losses, managed = trained(case, MODES[mode](case), precision, num_steps=3)
    assert len(set(map(float, plain_losses))) == 3, "the weights moved"
    assert losses == plain_losses
    assert plain.keys() == managed.keys()
    assert [key for key in plain if not torch.equal(plain[key], managed[key])] == []
