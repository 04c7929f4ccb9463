"""The native core is built on request, refused where it was not, and used only if it does what the Python tape does."""

import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem.cli.demo import LlamaLike, Size
from actmem.decision_rules import Rule
from actmem.engine import Tape, resolve
from actmem.native import build, native_tape
from actmem.native.core_check import difference

pytestmark = pytest.mark.usefixtures("nothing_compiled")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def model() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])


@pytest.fixture(autouse=True)
def _default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACTMEM_NATIVE", raising=False)


def test_without_a_build_it_is_refused_with_the_command_that_builds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plain = model()
    with pytest.raises(actmem.UnsupportedError, match="actmem native build"):
        actmem.apply(plain, actmem.Full(), native=True)
    applied = actmem.apply(plain, actmem.Full(), native="auto")
    plain(torch.randn(2, 8)).sum().backward()
    assert any("the Python tape runs" in note for note in applied.report().notes)


def test_what_is_not_known_is_refused() -> None:
    wrong: Any = "yes"
    with pytest.raises(actmem.ModeError, match="native = 'yes' is not known"):
        actmem.apply(model(), actmem.Full(), native=wrong)


def test_without_a_compiler_the_build_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(actmem.UnsupportedError, match="no-such-compiler is not there"):
        build()


@needs_compiler
def test_a_built_core_runs_and_the_report_says_so() -> None:
    assert build().library.exists() and build().seconds == 0
    ran = model()
    applied = actmem.apply(ran, actmem.Full(), native="auto")
    x = torch.randn(2, 8)
    for _ in range(3):
        ran.zero_grad()
        ran(x).sum().backward()
    ours = [p.grad for p in ran.parameters()]
    assert any("the native tape runs" in note for note in applied.report().notes)
    applied.remove()
    ran.zero_grad()
    ran(x).sum().backward()
    plain = [p.grad for p in ran.parameters()]
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert native_tape(False).kind is None


class HoldsMore(Tape):
    def pack(self, tensor: Tensor) -> Any:
        handle = super().pack(tensor)
        if handle.value.held is None:
            self._hold_owed(handle.value, tensor)
        return handle


class ReplaysAnother(Tape):
    def pack(self, tensor: Tensor) -> Any:
        return super().pack(tensor if tensor.requires_grad else torch.zeros_like(tensor))


def test_the_check_finds_a_tape_that_differs() -> None:
    assert difference(Tape) is None
    assert "bytes held" in str(difference(HoldsMore))
    assert "other gradients" in str(difference(ReplaysAnother))


class Scratch(nn.Module):
    """Reuses one buffer by `out=`, as compiled functions do."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.randn(8, 8))
        self.buffer = torch.empty(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.v
        with torch.no_grad():
            torch.mm(x.detach(), self.v.detach(), out=self.buffer)
            first = self.buffer.sin() * 2
            torch.mm(first, self.v.detach(), out=self.buffer)
        return (y * first).tanh() * self.buffer.cos()


@needs_compiler
def test_a_buffer_that_is_reused_by_out_keeps_its_old_versions() -> None:
    build()
    grads: list[list[Tensor | None]] = []
    for native in (None, False, True):
        torch.default_generator.manual_seed(0)
        blocks = nn.Sequential(*[Scratch() for _ in range(3)])
        if native is not None:
            actmem.apply(blocks, actmem.Full(), native=native).check_replay(0)
        x = torch.randn(4, 8)
        for _ in range(3):
            blocks(x).sum().backward()
        grads.append([p.grad for p in blocks.parameters()])
    for other in grads[1:]:
        assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


def num_nodes(value: Any) -> int:
    """Count the recorded operators that lead to a value."""
    nodes: set[int] = set()
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        v = waiting.pop()
        if v is not None and id(v) not in seen:
            seen.add(id(v))
            if v.node is not None:
                nodes.add(id(v.node))
                waiting += [ref[2] for ref in v.node.refs]
    return len(nodes)


@needs_compiler
def test_a_recorded_operator_takes_less_than_400_bytes_of_python_objects() -> None:
    build()
    kind: Any = native_tape(True).kind
    size = Size(dim=32, num_layers=1, num_heads=4, num_kv_heads=2, ffn=64, vocab=64, batch=1, length=8)
    model = LlamaLike(size)
    calls: list[tuple[Any, Any]] = []
    block: Any = model.layers[0]
    hook = block.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    model(*size.tokens())
    hook.remove()
    args, kwargs = calls[0]
    verdicts = resolve((Rule("recompute"),), layer=0, num_layers=1, modules={"": ""}, roles={})
    for _ in range(2):  # the first call describes the operators
        tape = kind(verdicts, None, inputs=[args[0]], trainable=frozenset)
        tracemalloc.start()
        with torch.no_grad(), tape:
            out = block(*args, **kwargs)
        value = tape._lookup(out)
        tape.close()
        num_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    assert num_nodes(value) > 30
    assert num_bytes / num_nodes(value) < 400
