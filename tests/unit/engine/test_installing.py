"""An applied block stays what its class makes it: registered, copied, pickled and parametrized as a plain one."""

from __future__ import annotations

import abc
import copy
import copyreg
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import actmem
from actmem import Full
from actmem.applying.applied_block import applied_runner
from tests.engine.cases import assert_same_bits, batch, outcome, simple_step


class Plain(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.lin = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(x))


class Registered(Plain):
    """Keeps a registry of its subclasses, as plugin systems do."""

    registry: ClassVar[list[type]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Registered.registry.append(cls)


class Keyword(Plain):
    """Cannot be subclassed without a keyword."""

    def __init_subclass__(cls, *, role: str) -> None:
        cls.role = role


class Decoder(Keyword, role="decoder"):
    pass


class _Registry(type):
    made: ClassVar[list[str]] = []

    def __new__(mcs, name: str, bases: Any, names: Any, *, tag: str) -> Any:
        _Registry.made.append(tag)
        return super().__new__(mcs, name, bases, names)

    def __init__(cls, name: str, bases: Any, names: Any, *, tag: str) -> None:
        super().__init__(name, bases, names)


class MetaRegistered(Plain, metaclass=_Registry, tag="first"):
    pass


class Abstract(Plain, abc.ABC):
    pass


class Slotted(Plain):
    __slots__ = ("extra",)


class Reducing(Plain):
    """Is made again by a call of its class."""

    def __reduce__(self) -> Any:
        return type(self), (self.width,), {**self.__getstate__(), "reduced": "by hand"}


class ReducingEx(Plain):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _again, (self.__class__, type(self), self.width, self.state_dict())


def _again(kind: Any, same: Any, width: int, state: Any) -> Any:
    assert kind is same
    made = kind(width)
    made.load_state_dict(state)
    made.reduced = "by hand"
    return made


class Copying(Plain):
    """Copies itself in its own way."""

    def __deepcopy__(self, memo: Any) -> Any:
        other = type(self)(self.width)
        other.load_state_dict(self.state_dict())
        other.copied = True
        return other

    def __copy__(self) -> Any:
        other = self.__class__.__new__(type(self))
        other.__dict__.update(self.__dict__, copied=True)
        return other


class Dispatched(Plain):
    """Is pickled by a function in copyreg's table."""


class Guarded(Plain):
    """Refuses attributes that it does not know."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise AttributeError("not here")
        super().__setattr__(name, value)


def stacked(make: Callable[[], nn.Module], num_blocks: int = 3) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(*[make() for _ in range(num_blocks)])


def assert_trains_as(plain: dict[str, Any], model: nn.Module) -> None:
    assert_same_bits(plain, outcome(model, batch(), simple_step))


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    copyreg.pickle(Dispatched, lambda m: (_again, (Dispatched, Dispatched, m.width, m.state_dict())))  # type: ignore[arg-type]
    yield
    copyreg.dispatch_table.pop(Dispatched)


CLASSES = [Plain, Registered, Decoder, MetaRegistered, Abstract, Slotted, Reducing, ReducingEx, Copying, Dispatched]


# -------------------------------------------------------------------- making the class


@pytest.mark.parametrize("kind", [*CLASSES, Guarded])
def test_blocks_of_any_class_are_applied_and_removed(kind: type[Plain]) -> None:
    model = stacked(kind)
    plain = outcome(model, batch(), simple_step)
    with actmem.apply(model, Full()) as applied:
        assert_trains_as(plain, model)
        assert applied.report().num_replayed > 0
    assert [type(m) for m in model] == [kind] * 3
    assert_trains_as(plain, model)


def test_no_registry_sees_the_class_that_is_made() -> None:
    before = list(Registered.registry), list(_Registry.made)
    for kind in (Registered, MetaRegistered):
        with actmem.apply(stacked(kind), Full()):
            assert (Registered.registry, _Registry.made) == before


def test_a_question_to_the_class_of_an_applied_abstract_block_leaves_the_answers_of_the_original_alone() -> None:
    model = stacked(Abstract)
    with actmem.apply(model, Full()):
        assert not isinstance(Abstract(), type(model[0]))  # an ABC remembers such answers
        assert isinstance(Abstract(), Abstract) and isinstance(model[0], Abstract)


def test_a_dropped_model_leaves_no_class_behind() -> None:
    class Local(Plain):
        pass

    model = stacked(Local)
    actmem.apply(model, Full()).remove()
    gc.collect()
    assert Local.__subclasses__() == []


# -------------------------------------------------------------------- copies and pickles


def saved(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


@pytest.mark.parametrize("kind", CLASSES)
def test_a_pickle_of_an_applied_model_is_that_of_the_plain_one_to_the_byte(kind: type[Plain]) -> None:
    model = stacked(kind)
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        expected = pickle.dumps(model, protocol)
        with actmem.apply(model, Full()):
            assert pickle.dumps(model, protocol) == expected


@pytest.mark.parametrize("kind", CLASSES)
def test_a_copy_of_an_applied_model_is_the_one_that_its_class_makes(kind: type[Plain]) -> None:
    model = stacked(kind)
    plain = outcome(model, batch(), simple_step)
    expected = copy.deepcopy(model)[0], pickle.loads(pickle.dumps(model))[0], copy.copy(model[0])
    with actmem.apply(model, Full()):
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), nn.Sequential(*map(copy.copy, model))
        for other, made in zip(copies, expected, strict=True):
            assert [type(m) for m in other] == [kind] * 3
            assert vars(other[0]).keys() == vars(made).keys()
            assert all(applied_runner(m) is None for m in other)
            with actmem.apply(other, Full()):
                assert_trains_as(plain, other)
        assert all(applied_runner(m) is not None for m in model)
        assert_trains_as(plain, model)


def test_a_saved_applied_model_loads_with_weights_only() -> None:
    model = stacked(Plain)
    permitted = [nn.Sequential, Plain, nn.Linear]
    with actmem.apply(model, Full()), torch.serialization.safe_globals(permitted):
        loaded = torch.load(io.BytesIO(saved(model)), weights_only=True)
    assert [type(m) for m in loaded] == [Plain] * 3
    assert_same_bits(dict(model.state_dict()), dict(loaded.state_dict()))


def test_a_module_that_an_applied_block_makes_of_its_own_class_runs_plain() -> None:
    model = stacked(Plain)
    with actmem.apply(model, Full()) as applied:
        other: Any = type(model[0])(8)
        x = batch()
        held: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
            other(x).sum().backward()
        assert held and applied_runner(other) is None
        assert applied.report().unobserved == tuple(applied.plan.blocks)


def test_a_copy_or_a_pickle_that_fails_leaves_the_block_applied() -> None:
    class Failing:
        def __reduce__(self) -> Any:
            raise ValueError("not copied")

    class Refusing(Plain):
        def __deepcopy__(self, memo: Any) -> Any:
            raise ValueError("not copied")

    plain = stacked(Plain)
    plain[0].failing = plain[1].lin.failing = Failing()  # type: ignore[assignment]
    for model in (plain, stacked(Refusing)):
        with actmem.apply(model, Full()):
            for how in (copy.deepcopy, pickle.dumps, pickle._dumps):  # type: ignore[attr-defined]
                with pytest.raises((ValueError, AttributeError, pickle.PicklingError), match=r"not copied|Can't"):
                    how(model)
                assert all(applied_runner(m) is not None for m in model)


def test_a_block_is_applied_again_as_soon_as_a_pickle_is_made() -> None:
    model = stacked(Plain)
    with actmem.apply(model, Full()):
        for make in (pickle.dumps, pickle._dumps, saved):  # type: ignore[attr-defined]
            make(model)
            assert all(applied_runner(m) is not None for m in model)


# -------------------------------------------------------------------- graph modules


class Traceable(Plain):
    def forward(self, x):  # type: ignore[no-untyped-def]  # the graph would keep an annotation as text
        return x + torch.tanh(self.lin(x))


def traced() -> nn.Module:
    return torch.fx.symbolic_trace(Traceable())


def test_graph_modules_are_pickled_and_copied_as_plain_ones() -> None:
    model = stacked(traced)
    plain = outcome(model, batch(), simple_step)
    expected = pickle.dumps(model)
    with actmem.apply(model, Full(), blocks="0,1,2"):
        assert_trains_as(plain, model)
        assert pickle.dumps(model) == expected
        for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), nn.Sequential(*map(copy.copy, model))):
            assert all(type(m).__mro__[1] is torch.fx.GraphModule for m in other)
            assert all(applied_runner(m) is None for m in other)
            assert_trains_as(plain, other)


def test_a_graph_that_is_edited_and_recompiled_while_applied_is_the_one_that_runs_then_and_after_removing() -> None:
    model, twin = stacked(traced), stacked(traced)
    with actmem.apply(model, Full(), blocks="0,1,2") as applied:
        outcome(model, batch(), simple_step)
        for block in (model[1], twin[1]):
            graph: Any = block.graph
            node = next(n for n in graph.nodes if n.target is torch.tanh)
            node.target = torch.sigmoid
            block.recompile()
        plain = outcome(twin, batch(), simple_step)
        applied.check_replay()
        assert_trains_as(plain, model)
        assert "aten.sigmoid" in str(applied.trace())
    assert_trains_as(plain, model)


# -------------------------------------------------------------------- whoever else exchanges the class


def _parametrized() -> nn.Module:
    made = Plain()
    parametrizations.weight_norm(made.lin)
    return made


class _Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def block_with_parametrization() -> nn.Module:
    made = nn.Linear(8, 8)
    parametrize.register_parametrization(made, "weight", _Double())
    return made


def test_a_parametrization_of_an_applied_block_is_removed_as_of_a_plain_one() -> None:
    model, twin = stacked(block_with_parametrization), stacked(block_with_parametrization)
    applied = actmem.apply(model, Full(), blocks="0,1,2")
    assert_trains_as(outcome(twin, batch(), simple_step), model)
    for block in (*model, *twin):
        parametrize.remove_parametrizations(block, "weight")
    assert list(model.state_dict()) == list(twin.state_dict())
    assert_trains_as(outcome(twin, batch(), simple_step), model)
    assert all(applied_runner(m) is not None for m in model)
    applied.remove()
    assert [type(m) for m in model] == [nn.Linear] * 3
    assert_trains_as(outcome(twin, batch(), simple_step), model)


def test_a_parametrization_is_registered_on_an_applied_block_and_stays_when_the_plan_is_removed() -> None:
    model, twin = stacked(lambda: nn.Linear(8, 8)), stacked(lambda: nn.Linear(8, 8))
    applied = actmem.apply(model, Full(), blocks="0,1,2")
    for block in (*model, *twin):
        parametrize.register_parametrization(block, "weight", _Double())
    plain = outcome(twin, batch(), simple_step)
    assert_trains_as(plain, model)
    assert all(applied_runner(m) is not None for m in model)
    assert [parametrize.type_before_parametrizations(m) for m in model] == [nn.Linear] * 3
    applied.remove()
    assert [type(m).__mro__[1] for m in model] == [nn.Linear] * 3
    assert all(parametrize.is_parametrized(m, "weight") for m in model)
    assert_trains_as(plain, model)
    for block in model:
        parametrize.remove_parametrizations(block, "weight")
    assert [type(m) for m in model] == [nn.Linear] * 3


def test_an_applied_block_whose_parts_are_parametrized_is_copied_as_a_plain_one() -> None:
    model = stacked(_parametrized)
    plain = outcome(model, batch(), simple_step)
    with actmem.apply(model, Full()):
        other = copy.deepcopy(model)
        assert [type(m) for m in other] == [Plain] * 3
        assert_trains_as(plain, other)
        with pytest.raises(RuntimeError, match="Serialization of parametrized modules"):
            pickle.dumps(model)


def test_a_lazy_block_stays_applied_when_it_becomes_what_it_is() -> None:
    model = stacked(lambda: nn.LazyLinear(8))
    with actmem.apply(model, Full(), blocks="0,1,2") as applied:
        model(batch()).sum().backward()
        assert all(applied_runner(m) is not None for m in model)
        assert not applied.report().unobserved
    assert [type(m) for m in model] == [nn.Linear] * 3


def test_a_class_that_another_library_assigns_takes_effect_and_the_block_stays_applied() -> None:
    class Negated(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return -super().forward(x)

    model, twin = stacked(Plain), stacked(Plain)
    applied = actmem.apply(model, Full())
    before = outcome(twin, batch(), simple_step)
    for block in (*model, *twin):
        block.__class__ = Negated
    plain = outcome(twin, batch(), simple_step)
    assert_trains_as(plain, model)
    assert [type(m).__mro__[1] for m in model] == [Negated] * 3
    assert all(applied_runner(m) is not None for m in model)
    assert type(model[0]) is type(model[1])  # equal blocks still share a class, and so a compiled graph
    for block in model:
        block.__class__ = Plain  # and back
    assert_trains_as(before, model)
    applied.remove()
    assert [type(m) for m in model] == [Plain] * 3


def test_a_forward_that_is_replaced_on_the_class_while_applied_is_the_one_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, twin = stacked(Plain), stacked(Plain)
    with actmem.apply(model, Full()):
        outcome(model, batch(), simple_step)
        monkeypatch.setattr(Plain, "forward", lambda self, x: x - torch.tanh(self.lin(x)))
        assert_trains_as(outcome(twin, batch(), simple_step), model)
