"""Run a user's own optimizer on tensors without bytes, to see what state it makes and what its step allocates.

NOTE [ An optimizer without bytes ]
Nothing about an optimizer is assumed: it steps, on stand-ins for the parameters that got a gradient, and what it then
holds is its state: everything in `optimizer.state`, and the tensors in its own attributes, such as a list of master
weights. An instance is exchanged in place while it steps, as the objects of a loop are (NOTE [ What a step reaches ]),
and restored. A factory is called with the stand-ins themselves.

The first step makes the state. The second is measured, as it runs on a CPU. A third is logged as it runs on a card,
where torch's own optimizers work on all parameters at once unless they are told otherwise. A number that the step asks
for (`norm.item()`) is 1.0, and may be compared: optimizers scale and clip by such numbers. The truth of a tensor is not
known.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from actmem.errors import ActmemError, ModeError, UnsupportedError
from actmem.measuring import measure, state_tensors, storages_of
from actmem.profiling.chronicle import Allocated, Chronicle, Freed
from actmem.profiling.complaints import for_real, quiet
from actmem.profiling.fake_model import StandIns
from actmem.profiling.numbers import Numbers
from actmem.profiling.reach import Reach
from actmem.torchcompat import FakeTensor, FakeTensorMode

__all__ = ["Factory", "OptimizerTrial", "refuse_fakes", "try_optimizer"]

Factory = Callable[[list[nn.Parameter]], Optimizer]

_COUNTER_BYTES = 8
"""What so few bytes hold is a number, which stays on the host."""


@dataclass(frozen=True)
class OptimizerTrial:
    """What an optimizer takes."""

    name: str
    """Its class, and the dtypes of its state."""
    state_bytes: int
    step_bytes: int
    """The most that its step needs in addition."""
    stock: tuple[int, ...] = ()
    """On a card: bytes of each tensor of its state."""
    memory: tuple[tuple[int, int], ...] = ()
    """On a card: what a step allocates and frees: a number and its bytes, or 0 where it is freed."""


def try_optimizer(
    optimizer: Optimizer | Factory,
    parameters: Mapping[str, Tensor],
    unused: Iterable[str] = (),
    *,
    together: bool = False,
) -> OptimizerTrial:
    """Step an optimizer on tensors without bytes. See NOTE [ An optimizer without bytes ].

    Args:
        optimizer: an optimizer of these parameters, or what makes one of a list of them.
        parameters: those of the model, by their names.
        unused: names of the parameters that get no gradient.
        together: the model is on an accelerator: its counters are not.

    Raises:
        ModeError: it is not an optimizer of these parameters.
        UnsupportedError: its step needs numbers, which such tensors do not have.

    >>> layer = nn.Linear(4, 4)
    >>> found = try_optimizer(torch.optim.SGD(layer.parameters(), momentum=0.9), dict(layer.named_parameters()))
    >>> found.name, found.state_bytes
    ('SGD, float32', 80)
    """
    left_out = set(unused)
    trained = [p for name, p in parameters.items() if p.requires_grad and name not in left_out]
    with _faked(optimizer, [*parameters.values()], trained) as stepped:
        try:
            _step(stepped)
            trial = _seen(stepped, together=together)
        except ActmemError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"{type(stepped).__name__} cannot step on tensors without bytes: "
                f"{type(error).__name__}: {' '.join(str(error).split())[:300]}. Profile a step of your loop, for real: "
                "actmem.profile(model, step=step, fake=False)."
            ) from error
    return trial


def _seen(optimizer: Optimizer, *, together: bool) -> OptimizerTrial:
    step_bytes = measure(lambda: _step(optimizer), optimizer=optimizer).step_bytes
    state = [t for t in state_tensors(optimizer) if not (together and _is_counter(t))]
    kinds = sorted({str(t.dtype).removeprefix("torch.") for t in state if not _is_counter(t)})
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    chronicle = Chronicle(torch.device("cpu"))
    for tensor in (*_parameters(optimizer), *state_tensors(optimizer)):
        chronicle.ledger.add_base(tensor, "parameters")
    chronicle.ledger.begin()
    with chronicle:
        _step(optimizer)
    names: dict[int, int] = {}
    memory: list[tuple[int, int]] = []
    for e in chronicle.log:
        if isinstance(e, Allocated) and e.num_bytes > _COUNTER_BYTES:
            memory.append((names.setdefault(e.storage, len(names)), e.num_bytes))
        elif isinstance(e, Freed) and e.storage in names:
            memory.append((names[e.storage], 0))
    return OptimizerTrial(
        f"{name}, {' and '.join(kinds) or 'no state'}",
        sum(_sizes(state)),
        step_bytes,
        tuple(_sizes([t for t in state if not _is_counter(t)])),
        tuple(memory),
    )


@contextlib.contextmanager
def _faked(
    optimizer: Optimizer | Factory, parameters: Sequence[Tensor], trained: Sequence[Tensor]
) -> Generator[Optimizer]:
    """Yield an optimizer of stand-ins that have gradients; and put everything back."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    stand_ins = StandIns(mode)
    reach = Reach()
    try:
        if isinstance(optimizer, Optimizer):
            _check_parameters(optimizer, parameters)
            reach.add(optimizer)
            reach.exchange(stand_ins)  # outside the mode: numbers such as counts of steps stay known
        fakes, with_gradient = ([stand_ins(p) for p in several] for several in (parameters, trained))
        with quiet(), mode, Numbers(comparable=True):
            _give_gradients(fakes, with_gradient)
            if isinstance(optimizer, Optimizer):
                stepped = optimizer
            else:
                stepped = _made(optimizer, [p for p in fakes if p.requires_grad])
            del fakes, with_gradient
            yield stepped
    finally:
        reach.restore()
    if isinstance(optimizer, Optimizer):
        del stepped, stand_ins, reach
        refuse_fakes(mode)


def _give_gradients(parameters: list[Tensor], trained: list[Tensor]) -> None:
    """Give some of the parameters a gradient."""
    for p in parameters:
        p.grad = None
    for p in trained:
        p.grad = torch.empty_like(p)


def _made(factory: Factory, fakes: Any) -> Optimizer:
    try:
        found: Any = factory(fakes)
    except Exception as error:
        raise ModeError(
            f"optimizer = {factory!r} could not make an optimizer of a list of parameters: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}. Expected a function such as "
            "lambda parameters: torch.optim.AdamW(parameters, lr=1e-4), or the optimizer itself."
        ) from error
    if not isinstance(found, Optimizer):
        raise ModeError(
            f"optimizer = {factory!r} returned a {type(found).__name__}. Expected a torch.optim.Optimizer of the "
            "parameters that it is called with."
        )
    return found


def _check_parameters(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    own = {id(p) for p in parameters}
    foreign = sum(id(p) not in own for p in _parameters(optimizer))
    if foreign:
        raise ModeError(
            f"{foreign} of the parameters of {type(optimizer).__name__} are not parameters of the model: it was made "
            "for another one, or steps on copies of its own. Make it of model.parameters(), or profile a step of your "
            "loop, which says what it does: actmem.profile(model, step=step)."
        )


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _step(optimizer: Optimizer) -> None:
    """Step as the class does: hooks and schedulers of the instance are not part of it."""
    type(optimizer).step(optimizer)  # pyright: ignore[reportUnknownMemberType]  # torch leaves it untyped


def _is_counter(tensor: Tensor) -> bool:
    return tensor.numel() == 1 and tensor.nbytes <= _COUNTER_BYTES


def _sizes(tensors: Iterable[Tensor]) -> list[int]:
    """Return the bytes of the tensors' storages, each once."""
    return [s.nbytes() for s in {id(s): s for t in tensors for s in storages_of(t)}.values()]


def refuse_fakes(mode: Any) -> None:
    """Make sure that no tensor without bytes is left where training would find it.

    Raises:
        UnsupportedError: there is one.
    """
    gc.collect()
    left = [t for t in gc.get_objects() if type(t) is FakeTensor and t.fake_mode is mode]
    if left:
        keepers = sorted({type(k).__name__ for k in gc.get_referrers(left[0]) if k is not left})
        raise UnsupportedError(
            f"the step left {len(left)} tensors without bytes behind, one of shape {list(left[0].shape)} in a "
            f"{', '.join(keepers) or 'place that cannot be followed'}: what keeps them cannot be restored. Empty it "
            f"before training, and profile a real step: {for_real()}."
        )
