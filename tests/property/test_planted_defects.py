"""Defects planted in the engine, one at a time: each must turn a small program wrong, or the suite sees nothing.

A defect is a change of the engine's own text: one function is compiled anew with a line of it changed.
"""

from __future__ import annotations
import __future__

import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actmem
from actmem.applying import applied_block
from actmem.engine import coverage, holdings, operators, replay, tape

Body = Callable[["_Block", Tensor], Tensor]


@pytest.fixture(autouse=True)
def _python_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defects are planted in the Python tape."""
    monkeypatch.setenv("ACTMEM_NATIVE", "0")


class _Block(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) * 0.5)
        self.register_buffer("mean", torch.randn(6))
        self.register_buffer("variance", torch.ones(6))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def outcome(body: Body, mode: Any, after: Callable[[Tensor], Any] | None = None) -> dict[str, Tensor]:
    """Run one step, and return all that it must not change."""
    torch.manual_seed(0)
    model = nn.Sequential(_Block(body))
    leaf = torch.randn(4, 6).requires_grad_()
    applied = None if mode is None else actmem.apply(model, mode, blocks="0")
    x = leaf * 1.0
    out = model(x)
    if after is not None:
        after(x)
    out.sum().backward()
    if applied is not None:
        assert applied.report().num_replayed > 0
    found = {
        "loss": out.detach(),
        "leaf": leaf.grad,
        "weight": model[0].weight.grad,
        "generator": torch.get_rng_state(),
    }
    return {name: t.clone() for name, t in found.items() if t is not None} | {
        n: b.clone() for n, b in model.named_buffers()
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def plant(patch: pytest.MonkeyPatch, owner: Any, name: str, *changes: tuple[str, str]) -> None:
    """Compile a function of the engine anew with pieces of its text changed."""
    original = inspect.getattr_static(owner, name)
    source = textwrap.dedent(inspect.getsource(original))
    for old, new in changes:
        assert old in source, f"{name} no longer contains {old!r}: plant this defect anew"
        source = source.replace(old, new)
    code = compile(source, f"<defective {name}>", "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)
    made: dict[str, Any] = {}
    exec(code, original.__globals__, made)
    patch.setattr(owner, name, made[name])


# ------------------------------------------------------------------ programs


def _overwritten(k: _Block, x: Tensor) -> Tensor:
    y = (x + 1).tanh()
    x.detach().mul_(3.0)
    return y @ k.weight


def _transposed(k: _Block, x: Tensor) -> Tensor:
    h = x @ k.weight
    return (h.t() @ h.sin()).tanh()


def _two_versions(k: _Block, x: Tensor) -> Tensor:
    d = x.detach() + 1
    e = d.sin()
    d.mul_(2)
    h = x @ k.weight
    return h * e + h * d


def _short_lives(k: _Block, x: Tensor) -> Tensor:
    h = x @ k.weight
    dead = [h + 0.1 for _ in range(200)]
    pointers = {t.untyped_storage()._cdata for t in dead}
    dead.clear()
    others = [h * 0.9]
    while others[-1].untyped_storage()._cdata not in pointers and len(others) < 1000:
        others.append(h * 0.9)
    return others[-1].sin().exp()


def _dropout(k: _Block, x: Tensor) -> Tensor:
    return F.dropout(F.dropout(x @ k.weight, 0.5).sin(), 0.5).exp()


def _conjugate(k: _Block, x: Tensor) -> Tensor:
    z = torch.view_as_complex((x @ k.weight).view(4, 3, 2))
    return torch.view_as_real(z.conj() @ z.mT).sin()


def _batch_norm(k: _Block, x: Tensor) -> Tensor:
    before = k.mean.sin()
    return F.batch_norm(x @ k.weight, k.mean, k.variance, training=True).tanh() * (x * before)


def _unsafe(k: _Block, x: Tensor) -> Tensor:
    h = x @ k.weight
    before = x * h.detach().cos()
    a, b = torch.unsafe_chunk(h, 2)
    a.mul_(0.5)
    return before + torch.cat([a.exp(), b.exp()])


def _input(k: _Block, x: Tensor) -> Tensor:
    return (x + 1).tanh() @ k.weight


def _extremes(k: _Block, x: Tensor) -> Tensor:
    low, high = torch.aminmax(x @ k.weight, dim=1)
    return x * (high.sin() - low.cos()).unsqueeze(1)


def _half_filled(k: _Block, x: Tensor) -> Tensor:
    h = x @ k.weight
    buffer = torch.empty(4, 6)
    buffer[:, :2] = h.detach()[:, :2]
    buffer.numpy()[:, 2:] = 3.0  # a kernel that torch cannot see
    return h * buffer.sin() + h.sin().exp()


def _constant(k: _Block, x: Tensor) -> Tensor:
    buffer = torch.zeros(4, 6)
    buffer.numpy()[:] = 2.0  # a kernel that torch cannot see
    h = x @ k.weight
    return h * buffer.sin() + h.sin().exp()


def _lists(k: _Block, x: Tensor) -> Tensor:
    h = x @ k.weight
    torch._foreach_mul_([h[:2], h[2:]], 0.5)
    return h.sin().exp()


def _bits(k: _Block, x: Tensor) -> Tensor:
    h = x @ k.weight
    return h * (h.detach().view(torch.int32) & 7).float()


# ------------------------------------------------------------------ defects


FULL = actmem.Full()
MATMULS = actmem.Selective(save=["matmul"])


@dataclasses.dataclass(frozen=True)
class Defect:
    body: Body
    planted: Callable[[pytest.MonkeyPatch], None]
    mode: Any = FULL
    after: Callable[[Tensor], Any] | None = None
    """Run between forward and backward."""
    refused: bool = False
    """A sound engine raises VersionError."""


def _uncopied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(holdings, "copied", lambda base: base)


def _wrong_stride(patch: pytest.MonkeyPatch) -> None:
    plant(patch, replay, "unpack", WRONG_STRIDE)
    patch.setattr(applied_block, "unpack", replay.unpack)


def _pointers_only(patch: pytest.MonkeyPatch) -> None:
    plant(
        patch,
        tape.Tape,
        "__torch_dispatch__",
        ("value is not None and value.storage() is storage", "value is not None"),
        ("v is None or v.storage() is not s or", "v is None or"),
    )
    plant(patch, tape.Tape, "pack", ("value is None or value.storage() is not storage", "value is None"))


def _describe_anew(patch: pytest.MonkeyPatch) -> None:
    for func in list(operators.DESCRIBED):
        patch.delitem(operators.DESCRIBED, func)


def _forgotten_writes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operators, "UNDECLARED_WRITES", {})
    _describe_anew(patch)


def _constants_replayed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operators, "_CONSTANT", frozenset())
    _describe_anew(patch)


def _always_full(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(coverage.Coverage, "full", property(lambda _: True))


def _aliases_new(patch: pytest.MonkeyPatch) -> None:
    plant(
        patch, tape.Tape, "_record_outputs", (" or self._lookup(t) is not None", ""), ("id(storage) in known", "False")
    )
    patch.setattr(tape, "preserve_elsewhere", lambda _: None)  # else a write copies for whoever was forgotten


WRONG_STRIDE = ("as_strided(size, stride, offset)", "as_strided(size, sorted(stride, reverse=True), offset)")


def _by(owner: Any, name: str, old: str, new: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: plant(patch, owner, name, (old, new))


DEFECTS = {
    "an old version is not copied before it is overwritten": Defect(_overwritten, _uncopied),
    "what autograd saved is seen with the wrong strides": Defect(_transposed, _wrong_stride),
    "what a replay reads is seen with the wrong strides": Defect(_transposed, _by(replay, "_run", *WRONG_STRIDE)),
    "a replayed write does not copy what others still read": Defect(
        _two_versions, _by(replay, "_writable", "if in_place[id(value)] else copied(_held(value))", "")
    ),
    "a storage is known by its pointer alone": Defect(_short_lives, _pointers_only),
    "the generator is not set before a replay": Defect(
        _dropout, _by(replay, "_draw", "generator.set_state(state)", "pass")
    ),
    "the generator is not restored after a replay": Defect(
        _dropout, _by(replay, "_draw", "generator.set_state(now)", "pass"), after=lambda _: torch.rand(1)
    ),
    "the conj bit of what an operator reads is dropped": Defect(
        _conjugate, _by(tape.Tape, "__torch_dispatch__", "geometry(a) if self._bits else view", "view")
    ),
    "writes that no schema declares are forgotten": Defect(_batch_norm, _forgotten_writes),
    "an undeclared alias counts as a new value": Defect(_unsafe, _aliases_new, mode=MATMULS),
    "versions are not compared": Defect(
        _input,
        _by(replay, "_held", "if base._version != value.version", "if False"),
        after=lambda x: x.detach().mul_(3.0),
        refused=True,
    ),
    "another output of the operator is taken": Defect(_extremes, _by(replay, "_run", "results[slot]", "results[0]")),
    "a half filled storage counts as full": Defect(_half_filled, _always_full),
    "constants are replayed": Defect(_constant, _constants_replayed),
    "two arguments on one storage are written apart": Defect(
        _lists, _by(replay, "_run", "base = copies[id(value)]", "base = copies[id(value)].clone()")
    ),
    "the dtype of a view is dropped": Defect(
        _bits, _by(replay, "_run", "offset, dtype, bits)", "offset, base.dtype, bits)")
    ),
}


@pytest.fixture
def _filled() -> Any:
    """Fill new memory with NaN, so that no program is right by the luck of finding its old bytes again."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_filled")
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    defect = DEFECTS[name]
    plain = outcome(defect.body, None, defect.after)

    def sound() -> bool:
        try:
            return same(plain, outcome(defect.body, defect.mode, defect.after)) and not defect.refused
        except actmem.VersionError:
            return defect.refused

    assert sound(), "the engine is wrong without the defect"
    with monkeypatch.context() as patch:
        defect.planted(patch)
        try:
            caught = not sound()
        except (actmem.ActmemError, RuntimeError):
            caught = True
    assert caught, "the defect goes unnoticed"
    assert sound(), "the defect was not taken out again"
