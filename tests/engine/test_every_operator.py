"""Every ATen operator against plain training, and what the engine says of it against what it does.

torch's own database has samples for 700 operators. Each is called in a block whose values are all recomputed: as a
function, in place, with `out=`, without gradient and in inference mode. Loss, gradients and generator must have the
bits of plain training, in steps with the self-check and without. What cannot be compared is listed with its reason, and
a reason that no longer holds fails the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import actmem
from actmem.engine import operators as described
from actmem.engine.operators import UNDECLARED_WRITES, UNINITIALISED, Operator
from actmem.errors import ActmemError
from actmem.torchcompat import is_composite
from tests.engine.samples import FORMS, Nothing, Sampled, Truth, difference, forms, operators, samples, trained

UNDER_A_MODE = {
    "norm_nuc": ("no_grad", "out"),
    "linalg_cond": ("no_grad", "out"),
    "linalg_eigvalsh": ("no_grad",),
    "linalg_svdvals": ("no_grad",),
}
"""torch itself gives other bits under a dispatch mode that does nothing: without gradient these ask whether a mode is
active, and compute vectors that nobody needs if one is."""

LEFT_UNWRITTEN = {"linalg_matrix_rank": ("out",), "linalg_matrix_rank_hermitian": ("out",)}
"""torch itself leaves `out` unwritten under a dispatch mode that does nothing."""

PLAIN_DIFFERS = {"linalg_lstsq": FORMS, "fft_ihfft2": ("out",), "fft_ihfftn": ("out",)}
"""Plain training differs from itself: the kernel reads memory that nothing was written to."""

NUM_PARTS = 8


def excused(operator: Any, form: str) -> bool:
    names = (UNDER_A_MODE, LEFT_UNWRITTEN, PLAIN_DIFFERS)
    return any(form in table.get(operator.formatted_name, ()) for table in names) or uninitialised(operator)


def uninitialised(operator: Any) -> bool:
    return operator.name in UNINITIALISED or operator.name == "resize_as_"


def block(operator: Any, form: str, sample: Any) -> tuple[nn.Module, dict[str, Any]] | None:
    """Return a model and what plain training gives; None where plain training raises.

    Not every operator is differentiable with respect to each of its tensors, but most are with respect to the first.
    """
    for most_trainable in (99, 1, 0):
        try:
            model = nn.Sequential(Sampled(operator, form, sample, most_trainable))
            return model, trained(model)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError):
            continue
    return None


def wrong(operator: Any, form: str, model: nn.Module, plain: dict[str, Any]) -> str:
    """Train with everything recomputed, and say what is not as in plain training."""
    with actmem.apply(model, actmem.Full(), blocks="*"):
        for step in range(3):
            try:
                found = difference(plain, trained(model))
            except (RuntimeError, NotImplementedError, ActmemError) as error:
                return f"step {step} raises {type(error).__name__}: {str(error)[:120]}"
            if found:
                return f"step {step}: other bits in {found}"
    return ""


def compared(chosen: list[Any], dtype: torch.dtype, most: int, wanted: tuple[str, ...]) -> tuple[int, list[str]]:
    """Return how many programs were compared, and what was wrong."""
    failed: list[str] = []
    tried = 0
    for operator in chosen:
        for i, sample in enumerate(samples(operator, dtype, most)):
            for form in forms(operator):
                if form not in wanted or excused(operator, form) or (made := block(operator, form, sample)) is None:
                    continue
                tried += 1
                what = wrong(operator, form, *made)
                if what:
                    failed.append(f"{operator.formatted_name} {form} (sample {i}): {what}")
    return tried, failed


def lies(chosen: list[Any], dtype: torch.dtype, most: int) -> tuple[set[str], set[str]]:
    """Return the operators that ran, and what is said of them and not true."""
    truth = Truth()
    for operator in chosen:
        for sample in samples(operator, dtype, most):
            for form in ("functional", "in place", "out"):
                if form in forms(operator) and (made := block(operator, form, sample)) is not None:
                    with truth, torch.no_grad():
                        made[0](torch.ones(3))
    return truth.seen, truth.lies


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    """Let samples warn: they are torch's, and try what is deprecated, sparse or not yet done."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -------------------------------------------------------------------- samples


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize(
    ("dtype", "most", "wanted", "least"),
    [
        (torch.float32, 2, FORMS, 500),
        (torch.complex64, 2, FORMS, 250),
        (torch.bfloat16, 1, ("functional", "in place", "inference"), 90),
    ],
    ids=["float32", "complex64", "bfloat16"],
)
def test_every_operator_is_as_in_plain_training(
    dtype: torch.dtype, most: int, wanted: tuple[str, ...], least: int, part: int
) -> None:
    tried, failed = compared(operators()[part::NUM_PARTS], dtype, most, wanted)
    assert not failed, "\n".join(failed)
    assert tried >= least


def test_a_sample_of_all_operators_is_as_in_plain_training() -> None:
    tried, failed = compared(operators()[::60], torch.float32, 1, FORMS)
    assert not failed, "\n".join(failed)
    assert tried >= 30


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=["float32", "complex64"])
def test_every_operator_writes_overwrites_and_draws_what_is_said_of_it(dtype: torch.dtype) -> None:
    seen, found = lies(operators(), dtype, 2)
    assert not found, "\n".join(sorted(found))
    assert len(seen) >= 400


def test_operators_that_write_besides_do_what_is_said_of_them() -> None:
    names = {"nn.functional.batch_norm", "nn.functional.rrelu", "nn.functional.instance_norm", "nn.functional.dropout"}
    names |= {"add", "copysign", "bernoulli", "linalg.pinv", "cumsum", "normal", "nn.functional.embedding_bag"}
    chosen = [o for o in operators() if o.name in names]
    assert {o.name for o in chosen} == names
    seen, found = lies(chosen, torch.float32, 6)
    assert not found and {"aten.native_batch_norm.default", "aten.rrelu_with_noise_.default"} <= seen


def by_name(name: str) -> Any:
    return next(o for o in operators() if o.formatted_name == name)


def under_nothing(name: str, form: str) -> Iterator[str]:
    """Yield what differs from plain training where a dispatch mode that does nothing is active, for each sample."""
    for dtype in (torch.float32, torch.complex64):
        for sample in samples(by_name(name), dtype, 4):
            if (made := block(by_name(name), form, sample)) is not None:
                with Nothing():
                    found = trained(made[0])
                yield difference(made[1], found)


@pytest.mark.parametrize(("name", "form"), [(n, f) for n, fs in UNDER_A_MODE.items() for f in fs])
def test_what_is_excused_as_torchs_doing_differs_without_actmem_too(name: str, form: str) -> None:
    assert any(under_nothing(name, form))


@pytest.mark.parametrize("name", LEFT_UNWRITTEN)
def test_torch_leaves_out_unwritten_under_any_mode_where_that_is_the_excuse(name: str) -> None:
    sample = samples(by_name(name), torch.float32, 1)[0]
    out = torch.full_like(by_name(name).op(sample.input, *sample.args, **sample.kwargs), 77)
    with Nothing():
        by_name(name).op(sample.input, *sample.args, **sample.kwargs, out=out)
    assert (out == 77).all()


def test_every_excused_operator_exists() -> None:
    names = {o.formatted_name for o in operators()}
    assert {*UNDER_A_MODE, *LEFT_UNWRITTEN, *PLAIN_DIFFERS} <= names


# -------------------------------------------------------------------- schemas


def overloads() -> list[Any]:
    """Return every overload of every ATen operator."""
    found: list[Any] = []
    dispatched = set(torch._C._dispatch_get_all_op_names())  # the others exist in TorchScript alone
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::"):
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"), None)
            overload = getattr(packet, schema.overload_name or "default", None)
            if isinstance(overload, torch._ops.OpOverload) and overload.name() in dispatched:
                found.append(overload)
    return found


def test_what_is_said_of_every_overload_follows_from_its_schema() -> None:
    every = [Operator(func) for func in overloads()]
    assert len(every) >= 3000
    for operator in every:
        schema = operator.func._schema
        written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        told = {name for _, name in operator.writes}
        positions = {i for i, _ in operator.writes}
        outs = {a.name for a in schema.arguments if a.is_out}
        name, base = operator.name, schema.name.removeprefix("aten::")
        assert operator.composite == (is_composite(operator.func) and base not in described._WHOLE), name
        if operator.view:
            assert not written or schema.name in ("aten::set_", "aten::detach_"), name
            continue
        assert told - written == set(UNDECLARED_WRITES.get(base, ())) - written, name
        assert written <= told, name
        assert outs <= operator.overwritten <= told | positions, name
        if torch.Tag.nondeterministic_seeded in operator.func.tags or any(
            a.name == "generator" for a in schema.arguments
        ):
            assert operator.random, name
        if written or operator.random or operator.composite:
            assert not operator.plain, name


def test_every_name_on_a_list_is_an_operator() -> None:
    bases = {func._schema.name.removeprefix("aten::") for func in overloads()}
    lists = vars(described)
    names = ["_CONSTANT", "_ROUTING", "_RECURRENT", "_ASKS_GRADIENT", "_UNREPEATABLE", "UNREPEATABLE_ON_ACCELERATOR"]
    names += ["_ACCUMULATING", "_OVERWRITES", "_FILLED", "_CONJUGATES", "_WHOLE", "UNINITIALISED", "UNDECLARED_WRITES"]
    unknown = {name for listed in names for name in lists[listed]} - bases
    assert not unknown
