"""The parts of torch that its public API does not offer: that they do what the engine relies on."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actmem import torchcompat
from actmem.torchcompat import (
    TorchDispatchMode,
    alias,
    alias_in_handler,
    all_operator_names,
    below_autograd,
    counting_versions,
    functorch_transform,
    named_buffers,
    named_modules,
    never_compile,
    numerics,
    outer_hooks,
    restore_numerics,
    storage_key,
    without_autocast,
)


def test_every_name_that_is_promised_is_there() -> None:
    assert all(hasattr(torchcompat, name) for name in torchcompat.__all__)


# -------------------------------------------------------------------- versions


def check_alias(a: Tensor, of: Tensor) -> None:
    assert a is not of and a.grad_fn is None and not a.requires_grad
    assert a.untyped_storage() is of.untyped_storage()
    assert a._version == of._version
    before = a._version
    with torch.no_grad():
        of.mul_(2)
    assert a._version == of._version == before + 1
    a.add_(1)
    assert a._version == of._version == before + 2


@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_alias_shares_storage_and_version_counter(requires_grad: bool) -> None:
    leaf = torch.ones(4, requires_grad=requires_grad)
    check_alias(alias(leaf), leaf)
    made = leaf * 1
    check_alias(alias(made), made)


class Aliasing(TorchDispatchMode):
    """Take an alias of the first argument of every operator, inside the handler."""

    def __init__(self, take: Any) -> None:
        super().__init__()
        self.take = take
        self.taken: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sin.default:
            self.taken.append((self.take(args[0]), args[0]))
        return func(*args, **(kwargs or {}))


def test_an_alias_in_a_handler_shares_storage_and_version_counter() -> None:
    x = torch.ones(4)
    with Aliasing(alias_in_handler) as mode:
        x.sin()
    ((taken, of),) = mode.taken
    assert of is x
    check_alias(taken, x)


def test_a_plain_detach_in_a_handler_would_not_do() -> None:
    x = torch.ones(4)
    with Aliasing(torch.Tensor.detach) as mode:
        x.sin()
    taken = mode.taken[0][0]
    x.mul_(2)
    assert taken._version != x._version  # the trap for which alias_in_handler is there


def test_no_dispatch_mode_sees_an_alias_being_made() -> None:
    seen: list[Any] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(4)
    with Watching():
        alias(x)
    assert seen == []


def test_writes_in_a_handler_move_the_counter_only_when_versions_are_counted() -> None:
    moved: dict[bool, int] = {}

    class Writing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            target = torch.zeros(2)
            target.add_(1)
            moved[False] = target._version
            with counting_versions():
                target.add_(1)
                moved[True] = target._version
            return out

    with Writing():
        torch.ones(2).sin()
    assert moved == {False: 0, True: 1}


# -------------------------------------------------------------------- flags

CHANGES = {
    "mkldnn": lambda: torch._C._set_mkldnn_enabled(not torch._C._get_mkldnn_enabled()),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "cudnn": lambda: torch._C._set_cudnn_enabled(not torch._C._get_cudnn_enabled()),
    "tf32": lambda: torch._C._set_cudnn_allow_tf32(not torch._C._get_cudnn_allow_tf32()),
    "benchmark": lambda: torch._C._set_cudnn_benchmark(not torch._C._get_cudnn_benchmark()),
    "cudnn deterministic": lambda: torch._C._set_cudnn_deterministic(not torch._C._get_cudnn_deterministic()),
}


@pytest.fixture
def flags() -> Iterator[tuple[Any, ...]]:
    before, warn_only = numerics(), torch._C._get_deterministic_algorithms_warn_only()
    yield before
    torch._C._set_deterministic_algorithms(False, warn_only=warn_only)
    restore_numerics(before)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_numerics_flags_go_round(change: Any, flags: tuple[Any, ...]) -> None:
    change()
    changed = numerics()
    assert changed != flags
    restore_numerics(flags)
    assert numerics() == flags
    restore_numerics(changed)
    assert numerics() == changed


def test_restoring_flags_keeps_warn_only(flags: tuple[Any, ...]) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    restore_numerics(numerics())
    assert torch.is_deterministic_algorithms_warn_only_enabled()


# -------------------------------------------------------------------- the rest


def test_below_autograd_nothing_is_differentiated_and_modes_still_see() -> None:
    x = torch.ones(2, requires_grad=True)
    with below_autograd():
        assert not (x * 2).requires_grad
        with Aliasing(lambda t: t) as mode:
            x.sin()
    assert len(mode.taken) == 1 and (x * 2).requires_grad


def test_without_autocast_products_keep_their_dtype() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with without_autocast():
            assert (x @ x).dtype is torch.float32


def test_outer_hooks_are_those_in_force() -> None:
    assert outer_hooks() is None

    def pack(t: Tensor) -> Tensor:
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert outer_hooks() == (pack, pack)
    assert outer_hooks() is None


def test_functorch_transforms_are_named() -> None:
    assert functorch_transform() is None
    names: list[str | None] = []

    def f(x: Tensor) -> Tensor:
        names.append(functorch_transform())
        return x.sum()

    torch.func.grad(f)(torch.ones(2))
    torch.func.vmap(f)(torch.ones(2, 2))
    assert names == ["Grad", "Vmap"] and functorch_transform() is None


def test_operator_names_are_packets() -> None:
    names = all_operator_names()
    assert {"aten.mm", "aten.add", "aten.bernoulli_"} <= names and not any("::" in n for n in names)


def test_a_storage_key_is_one_per_living_storage() -> None:
    x, y = torch.ones(4), torch.ones(4)
    assert storage_key(x.untyped_storage()) == storage_key(x[1:].untyped_storage())
    assert storage_key(x.untyped_storage()) != storage_key(y.untyped_storage())
    reference = weakref.ref(x.untyped_storage())
    assert reference() is x.untyped_storage()  # torch keeps one Python object per storage
    del x
    assert reference() is None


def test_modules_and_buffers_are_listed_with_their_places() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    assert [name for name, _ in named_modules(model)] == ["", "0", "1"]
    place, name, buffer = named_buffers(model)[0]
    assert name == "running_mean" and buffer is model[0].running_mean
    place[name] = other = torch.ones(2)
    assert model[0].running_mean is other


def test_a_function_that_is_never_compiled_runs_and_is_itself() -> None:
    def f(x: int) -> int:
        return x + 1

    assert never_compile(f) is f and f(1) == 2


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_dynamo_does_not_look_into_a_function_that_is_never_compiled() -> None:
    compiling: list[bool] = []

    def inner(x: Tensor) -> Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x * 2

    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(never_compile(inner), backend=backend)(torch.ones(2))
    assert compiling == [False] and graphs == []
    torch._dynamo.reset()
