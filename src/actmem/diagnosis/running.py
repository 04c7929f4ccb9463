"""Checks that run a few steps on an example, and put back what a step leaves behind."""

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
from actmem.causes import explain
from actmem.diagnosis.findings import Finding, NotMadeError, Severity, paths
from actmem.diagnosis.modelled import graph_kept
from actmem.diagnosis.regions import Case
from actmem.diagnosis.repeating import Call, Repeated, repeat
from actmem.errors import ActmemError
from actmem.measuring import measure
from actmem.modes import Budget, CompilerBudget, Mode
from actmem.plan import Plan
from actmem.profiling.restoring import Restored
from actmem.profiling.stepping import loss_of
from actmem.structure import Block
from actmem.verification import verify

__all__ = ["effect", "gradients", "graph_after_step", "growth", "repeatable", "same_training"]

_NUM_STEPS = 3
_END_OF_STEP: Any = torch.ops.aten.special_entr.default
"""Marks the end of a step in a timeline: hardly a model runs this operator."""
_SEED = 0
_FULL = "actmem.apply(model, actmem.Full())"
_NOTHING_TO_COMPARE = "no mode is given, and nothing recomputes in the model"


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
    """Run a step, and look for trained parameters without a gradient."""
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
            why = f"They will not be trained. {case.reentrant}: gradients are cut off where no input needs one."
            change = "use_reentrant=False, or model.enable_input_require_grads()."
        else:
            why = "Such a batch does not train them. Experts without tokens and unused heads are the harmless case."
            change = "Freeze what is not to be trained, or look for a detach() or no_grad on the way."
        yield Finding(
            check="gradients",
            severity="problem" if case.reentrant or len(missing) == len(trained) else "warning",
            found=found,
            why=why,
            change=change,
            actmem=f"Gradients are those of plain training: {_FULL}",
        )


def graph_after_step(case: Case) -> Iterator[Finding]:
    """Run a step, and look for modules that keep a tensor with its graph afterwards."""
    if any(graph_kept(case)):
        return  # one was there before: that check has said so
    with _after_step(case):
        found = [replace(finding, check="graph-after-step") for finding in graph_kept(case)]
    yield from found


def same_training(case: Case) -> Iterator[Finding]:
    """Compare a step with recomputation and one without: loss, gradients, buffers, names, to the bit."""
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
            yield _changed("same-training", repr(case.mode), verified.difference, "Please report it: this must not be.")


def effect(case: Case) -> Iterator[Finding]:
    """Compare what is held for backward with recomputation and without."""
    if case.regions:
        off, on = _both(case, lambda: _saved_bytes(case))
        what = case.checkpointing
    elif case.mode is None or isinstance(case.mode, CompilerBudget):
        raise NotMadeError(_NOTHING_TO_COMPARE if case.mode is None else f"{case.mode!r} is the compiler's affair")
    else:
        off, what = _runs(case), repr(case.mode)
        on = _saved_bytes_under(case)
    if on >= 0.99 * off:
        yield Finding(
            check="effect",
            severity="warning",
            found=f"{what} leaves {on:,} of {off:,} bytes held when backward begins",
            why="It is switched on and saves nothing: other modules than the large ones are treated, what they hold "
            "is held "
            "by something else too, or the model is in eval mode.",
            change="Look at what is held: actmem.apply(model, actmem.SaveEverything()), a step, "
            "print(applied.report()).",
            actmem="applied.report() lists every held value with its module, operator and bytes.",
        )


def growth(case: Case) -> Iterator[Finding]:
    """Run a few steps, and compare what is alive after each."""

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
            why="Something keeps tensors from step to step, until memory runs out: a list of losses with their "
            "graphs, a "
            "cache, a statistic that is not detached.",
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
    """Run a step, and leave the model as the step did until the end. Gives what it held for backward."""
    with _restored(case):
        try:
            held_bytes = _saved_bytes(case)
        except Exception as error:  # `gradients` has said what is wrong
            raise NotMadeError(f"a step raises: {_first_line(error)}") from error
        yield held_bytes


def _runs(case: Case) -> int:
    """Run a step of the model as it is, and return what it holds for backward; not made where it raises."""
    with _after_step(case) as held_bytes:
        return held_bytes


def _saved_bytes(case: Case) -> int:
    return measure(lambda: _step(case), model=case.the_model).saved_bytes


def _saved_bytes_under(case: Case) -> int:
    """Return what a step under the mode holds for backward."""
    with _restored(case):
        try:
            with _applied(case) as applied:
                rules = applied.plan.rules
                _step(case)  # the first step is watched, and holds sums besides
                on = _saved_bytes(case)
        except Exception as error:  # `same-training` has said what is wrong
            raise NotMadeError(f"a step under {case.mode!r} raises: {_first_line(error)}") from error
    if all(rule.decision == "save" for rule in rules):
        raise NotMadeError(f"{case.mode!r} saves everything in this model")
    return on


def _both(case: Case, run: Callable[[], Any]) -> tuple[Any, Any]:
    """Run something with what recomputes in the model switched off, and with it on."""
    results: list[Any] = []
    for switch in (case.without_regions(), nullcontext()):
        with _restored(case), switch:
            try:
                results.append(run())
            except Exception as error:  # `gradients` has said what is wrong
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
    """Return the mode, or the plan that a budget leads to."""
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
    """Run a forward, and note what the first block of each kind was called with."""
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
                warnings.simplefilter("ignore")  # without gradients, reentrant checkpointing warns that there are none
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
            why="It depends on something besides its input: state, a cache, Python's random numbers. torch's "
            "checkpoint "
            "raises a CheckpointError, or trains on something else.",
            change="Give it as an argument, or leave this block out of torch's checkpointing.",
            actmem=f"Forward runs once: {_FULL}",
        )
    if bits := [(path, r.bits) for path, r in seen.items() if r.bits is not None]:
        yield Finding(
            check="repeatable",
            severity="problem" if case.checkpointing else "warning",
            found=f"{paths([p for p, _ in bits])}, run again on the same input, gives other bits from {bits[0][1]} on",
            why="That operator is not repeatable, draws from a generator of its own, or reads state that has changed: "
            "gradients are those of another forward.",
            change="torch.use_deterministic_algorithms(True), or a seed for that generator.",
            actmem="Random operators are replayed with their state; the first step of every block compares each "
            "replay: "
            f"{_FULL}",
        )
    if state := [f"{path}.{name}" for path, r in seen.items() for name in r.state]:
        yield Finding(
            check="repeatable",
            severity=severity,
            found=f"each run of a block changes {paths(state)}",
            why="Under torch's checkpoint a block runs twice in a step, and this moves twice.",
            change="Update it outside the block, or leave this block out of torch's checkpointing.",
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
        why=best.what if best is not None else "The cause is not among the known ones.",
        change=best.fix if best is not None else "Run the step by itself, and look at the traceback.",
        actmem=best.actmem if best is not None else "Nothing known.",
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
