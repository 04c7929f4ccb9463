"""Checks that run a few steps on an example and restore what the steps change."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from actmem.applying import Applied, apply
from actmem.decisions import Decision
from actmem.diagnosis import explain
from actmem.diagnosis.findings import Finding, NotMadeError, Severity, paths
from actmem.diagnosis.modelled import graph_kept
from actmem.diagnosis.regions import Case
from actmem.diagnosis.repeated_step import Call, Repeated, repeat
from actmem.errors import ActmemError
from actmem.measuring import measure
from actmem.modes import Budget, Mode
from actmem.plan import Plan
from actmem.profiling import Restored, loss_of
from actmem.structure import Block
from actmem.verification import verify

__all__ = ["effect", "gradients", "graph_after_step", "growth", "repeatable", "same_training"]

_NUM_STEPS = 3
_END_OF_STEP: Any = torch.ops.aten.special_entr.default
"""Marks the end of a step in a timeline: hardly any model runs this operator."""
_SEED = 0
_FULL = "actmem.apply(model, actmem.Full())"
_NOTHING_TO_COMPARE = "no mode was given, and nothing in the model recomputes"


def repeatable(case: Case) -> Iterator[Finding]:
    """Run one block of each kind twice, as torch's checkpoint would."""
    seen: dict[str, Repeated] = {}
    for call in _calls(case):
        with _restored(case):
            try:
                seen[call.path] = repeat(call)
            except Exception as error:
                raise NotMadeError(f"{call.path} cannot be run alone: {_first_line(error)}") from error
    yield from _told(case, seen)


def gradients(case: Case) -> Iterator[Finding]:
    """Run a step and look for trained parameters without a gradient."""
    with _restored(case):
        try:
            _step(case)
        except Exception as error:  # noqa: BLE001  # whatever the model raises is explained
            yield _failed("gradients", "a step", error)
            return
        trained = [(n, p) for n, p in case.the_model.named_parameters() if p.requires_grad]
        missing = [name for name, p in trained if p.grad is None]
    if missing:
        found = f"{len(missing)} of {len(trained)} trained parameters have no gradient after a step: {paths(missing)}"
        if case.reentrant:
            why = f"They will not be trained. {case.reentrant}: gradients are cut off where no input requires one."
            change = "use_reentrant=False, or model.enable_input_require_grads()."
        else:
            why = "Such a batch does not train them. Experts without tokens and unused heads are harmless cases."
            change = "Freeze what should not be trained, or look for a detach() or no_grad in between."
        yield Finding(
            check="gradients",
            severity="problem" if case.reentrant or len(missing) == len(trained) else "warning",
            found=found,
            why=why,
            change=change,
            actmem=f"Gradients are those of plain training: {_FULL}",
        )


def graph_after_step(case: Case) -> Iterator[Finding]:
    """Run a step and look for modules that store a tensor with its graph afterwards."""
    if any(graph_kept(case)):
        return  # one was there before the step: `graph-kept` reports it
    with _after_step(case):
        found = [replace(finding, check="graph-after-step") for finding in graph_kept(case)]
    yield from found


def same_training(case: Case) -> Iterator[Finding]:
    """Compare a step with recomputation and one without, bit for bit: loss, gradients, buffers, names."""
    if case.mode is None and not case.regions:
        raise NotMadeError(_NOTHING_TO_COMPARE)
    if case.regions:
        off, on = _both(case, lambda: _outcome(case))
        difference = next((name for name in off if not _same(off[name], on.get(name))), None)
        if difference is not None:
            yield _changed("same-training", case.checkpointing or "checkpointing", difference, _FULL)
    elif case.mode is not None:
        _runs(case)
        try:
            mode = _resolved(case)
            pattern = None if isinstance(mode, Plan) else case.pattern
            verified = verify(case.the_model, case.example, mode, loss=case.loss, blocks=pattern, seed=_SEED)
        except Exception as error:  # noqa: BLE001  # whatever the model or the mode raises is explained
            yield _failed("same-training", repr(case.mode), error)
            return
        if verified.difference is not None:
            yield _changed("same-training", repr(case.mode), verified.difference, "This is a defect: please report it.")


def effect(case: Case) -> Iterator[Finding]:
    """Compare the bytes held for backward with and without recomputation."""
    if case.regions:
        off, on = _both(case, lambda: _saved_bytes(case))
        what = case.checkpointing
    elif case.mode is None:
        raise NotMadeError(_NOTHING_TO_COMPARE)
    else:
        off, what = _runs(case), repr(case.mode)
        on = _saved_bytes_under(case)
    if on >= 0.99 * off:
        yield Finding(
            check="effect",
            severity="warning",
            found=f"{what} leaves {on:,} of {off:,} bytes held when backward begins",
            why="It is enabled but saves nothing: it does not reach the large modules, something else holds the same "
            "tensors, or the model is in eval mode.",
            change="See what is held: actmem.apply(model, actmem.SaveEverything()), a step, print(applied.report()).",
            actmem="applied.report() lists every held value with its module, operator and bytes.",
        )


def growth(case: Case) -> Iterator[Finding]:
    """Run a few steps and compare the bytes alive after each."""

    def steps() -> None:
        for _ in range(_NUM_STEPS):
            _step(case)
            for parameter in case.the_model.parameters():
                parameter.grad = None
            _END_OF_STEP(torch.zeros(1))

    _runs(case)
    with _restored(case):
        measured = measure(steps, model=case.the_model)
    alive = [sample.live_bytes for sample in measured.timeline if sample.op == str(_END_OF_STEP)]
    if alive[-1] > alive[-2] > alive[-3]:
        yield Finding(
            check="growth",
            severity="problem",
            found=f"{alive[-1] - alive[-2]:,} bytes more are alive after each step",
            why="Something keeps tensors from step to step until memory runs out: a list of losses with their graphs, "
            "a cache, a statistic that is not detached.",
            change="loss.detach() (or .item()) for what is kept; clear caches between steps.",
            actmem="actmem keeps nothing from step to step, and does not change this.",
        )


# ---------------------------------------------------------------- steps


def _step(case: Case) -> Tensor:
    torch.manual_seed(_SEED)  # pyright: ignore[reportUnknownMemberType]  # torch leaves it untyped
    model, batch = case.the_model, case.example
    out: Any = model(**batch) if isinstance(batch, dict) else model(*batch)
    value = loss_of(out, case.loss)
    value.backward()  # pyright: ignore[reportUnknownMemberType]  # torch leaves it untyped
    return value.detach()


@contextmanager
def _restored(case: Case) -> Generator[None]:
    if any(p.is_meta for p in case.the_model.parameters()):
        raise NotMadeError("the model is on the meta device, so no step can be run")
    with Restored(case.the_model, case.example):
        for parameter in case.the_model.parameters():
            parameter.grad = None
        yield


@contextmanager
def _after_step(case: Case) -> Generator[int]:
    """Run a step and keep the model's state after it inside the `with` block. Yields the bytes held for backward."""
    with _restored(case):
        try:
            held_bytes = _saved_bytes(case)
        except Exception as error:  # `gradients` reports the error
            raise NotMadeError(f"a step raises: {_first_line(error)}") from error
        yield held_bytes


def _runs(case: Case) -> int:
    """Run a step of the model as it is and return the bytes held for backward; skip the check if it raises."""
    with _after_step(case) as held_bytes:
        return held_bytes


def _saved_bytes(case: Case) -> int:
    return measure(lambda: _step(case), model=case.the_model).saved_bytes


def _saved_bytes_under(case: Case) -> int:
    """Return the bytes that a step under the mode holds for backward."""
    with _restored(case):
        try:
            with _applied(case) as applied:
                rules = applied.plan.rules
                _step(case)  # the first step is observed, and also holds checksums
                on = _saved_bytes(case)
        except Exception as error:  # `same-training` reports the error
            raise NotMadeError(f"a step under {case.mode!r} raises: {_first_line(error)}") from error
    if all(rule.decision is Decision.SAVE for rule in rules):
        raise NotMadeError(f"{case.mode!r} saves everything in this model")
    return on


def _both(case: Case, run: Callable[[], Any]) -> tuple[Any, Any]:
    """Call a function with the model's own recomputation turned off, then with it on; return both results."""
    results: list[Any] = []
    for switch in (case.without_regions(), nullcontext()):
        with _restored(case), switch:
            try:
                results.append(run())
            except Exception as error:  # `gradients` reports the error
                raise NotMadeError(f"a step raises: {_first_line(error)}") from error
    return results[0], results[1]


def _outcome(case: Case) -> dict[str, Any]:
    torch.clear_autocast_cache()
    model = case.the_model
    loss = _step(case)
    return (
        {"loss": loss}
        | {f"gradient of {n}": None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        | {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
    )


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right if left is None or right is None else torch.equal(left, right)


def _resolved(case: Case) -> Mode | Plan:
    """Return the mode; for a budget, the plan found for it."""
    assert case.mode is not None
    if not isinstance(case.mode, Budget):
        return case.mode
    with _applied(case) as applied:
        return applied.plan


def _applied(case: Case) -> Applied:
    assert case.mode is not None
    planned: dict[str, Any] = {"example": case.example, "loss": case.loss} if isinstance(case.mode, Budget) else {}
    return apply(case.the_model, case.mode, blocks=None if isinstance(case.mode, Plan) else case.pattern, **planned)


def _calls(case: Case) -> list[Call]:
    """Run a forward pass and record the arguments of the first block of each kind."""
    kinds: dict[str, Block] = {}
    for block in case.blocks:
        kinds.setdefault(block.kind, block)
    noted: dict[str, tuple[Any, Any]] = {}

    def note(path: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if path not in noted:
                noted[path] = deepcopy((args, kwargs))

        return hook

    with _restored(case):
        handles = [b.module.register_forward_pre_hook(note(b.path), with_kwargs=True) for b in kinds.values()]
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # reentrant checkpointing warns that there are no gradients
                batch = case.example
                case.the_model(**batch) if isinstance(batch, dict) else case.the_model(*batch)
        except Exception as error:  # whatever the model raises
            raise NotMadeError(f"a forward raises: {_first_line(error)}") from error
        finally:
            for handle in handles:
                handle.remove()
    return [Call(b.path, b.module, *noted[b.path]) for b in kinds.values() if b.path in noted]


# ---------------------------------------------------------------- findings


def _told(case: Case, seen: dict[str, Repeated]) -> Iterator[Finding]:
    severity: Severity = "problem" if case.checkpointing else "note"
    if other := [(path, r.operator) for path, r in seen.items() if r.operator is not None]:
        yield Finding(
            check="repeatable",
            severity=severity,
            found=f"{paths([p for p, _ in other])}, run again on the same input, runs {other[0][1]}",
            why="It depends on something other than its input: state, a cache, Python's random numbers. torch's "
            "checkpoint raises a CheckpointError, or trains on something else.",
            change="Pass it as an argument, or exclude this block from torch's checkpointing.",
            actmem=f"Forward runs once: {_FULL}",
        )
    if bits := [(path, r.bits) for path, r in seen.items() if r.bits is not None]:
        yield Finding(
            check="repeatable",
            severity="problem" if case.checkpointing else "warning",
            found=f"{paths([p for p, _ in bits])}, run again on the same input, differs bitwise from {bits[0][1]} on",
            why="That operator is not deterministic, draws from its own generator, or reads state that has changed: "
            "gradients are those of another forward pass.",
            change="torch.use_deterministic_algorithms(True), or a seed for that generator.",
            actmem="Random operators are replayed with their generator state; the first step of every block checks "
            f"each replay: {_FULL}",
        )
    if state := [f"{path}.{name}" for path, r in seen.items() for name in r.state]:
        yield Finding(
            check="repeatable",
            severity=severity,
            found=f"each run of a block changes {paths(state)}",
            why="Under torch's checkpoint a block runs twice in a step, so this is updated twice.",
            change="Update it outside the block, or exclude this block from torch's checkpointing.",
            actmem=f"Forward runs once: {_FULL}",
        )


def _changed(check: str, what: str, difference: str, actmem: str) -> Finding:
    return Finding(
        check=check,
        severity="problem",
        found=f"with {what} a step differs from plain training: {difference}",
        why="Recomputation must change memory and nothing else.",
        change="The other findings name likely causes.",
        actmem=actmem,
    )


def _failed(check: str, what: str, error: Exception) -> Finding:
    best = explain(error).best
    own = isinstance(error, ActmemError) or best is None
    return Finding(
        check=check,
        severity="problem",
        found=f"{what} raises {type(error).__name__}: {error if own else _first_line(error)}",
        why=best.what if best is not None else "The cause is not a known one.",
        change=best.fix if best is not None else "Run the step on its own and read the traceback.",
        actmem=best.actmem if best is not None else "Nothing known.",
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
