"""The only place that changes a model: a mode becomes a plan, and the plan an engine on every block."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from actmem.checking import check_offload, check_rules, device_of, refuse_blocks, refuse_state
from actmem.engine.calling import Script, local, storages_of
from actmem.engine.checkpoint import Compilation, Family
from actmem.engine.deciding import resolve
from actmem.engine.installing import install, uninstall
from actmem.engine.tracing import log_once
from actmem.errors import ModeError, PlanError, StructureError
from actmem.modes import (
    Budget,
    CompilerBudget,
    FromPlan,
    Full,
    Mode,
    OffloadActivations,
    Rules,
    SaveEverything,
    Selective,
    Targets,
)
from actmem.offloading import Offloader, make_offloader
from actmem.plan import Plan
from actmem.report import Report, Trace, compiled_graphs, gather, paths_of, summarise
from actmem.structure import Block, check_module, find_blocks, find_roles, fingerprint, layer_type
from actmem.torchcompat import compiler_budget, keep_graph_order, named_modules

__all__ = ["Applied", "apply"]

_MODES = (SaveEverything, Full, Selective, Targets, Rules, OffloadActivations, CompilerBudget, Budget, FromPlan)
_FLEX = "higher_order.flex_attention"
Engine = Literal["auto", "tape", "checkpoint"]
Collectives = Literal["save", "recompute"]


class Applied:
    """A model under a plan. Made by `apply`; `remove()` undoes it. Also a context manager, which removes on leaving."""

    def __init__(
        self,
        plan: Plan,
        blocks: tuple[Block, ...],
        scripts: tuple[Script, ...],
        compilation: Compilation,
        offloader: Offloader | None = None,
        undo: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.plan = plan
        """The resolved decision: print it, save it, read it back."""
        self._blocks = blocks
        self._scripts = scripts
        self._compilation = compilation
        self._offloader = offloader
        self._undo = list(undo)

    def report(self) -> Report:
        """Say which engine ran, and what the latest observed step saved, recomputed, and could not replay. Print it.

        A block's first training call is observed; `check_replay` has later ones observed too. Of a compiled graph it
        says what the plan asked for, and what the compiler's partitioner made of it.
        """
        return summarise(
            self.plan,
            [
                (b.path, b.kind, s.observation)
                for b, s in zip(self._blocks, self._scripts, strict=True)
                if s.observation is not None or not (self._compilation.graphs and s.verdicts.keeps_everything)
            ],
            matched=set[int]().union(*(s.verdicts.matched for s in self._scripts)),
            notes=[*self._notes(), *self.trace().subsumed],
            compiled=compiled_graphs(self._compilation.graphs, self._compilation.asked, self._families()),
            moved=None if self._offloader is None else self._offloader.ledger,
            checkpointed=[s.path for s in self._scripts if s.engine == "checkpoint" and s.decisions is not None],
        )

    def trace(self) -> Trace:
        """List what the plan said at every operator of the latest observed step, and by which rule. Print it.

        The same is logged once for each operator, by the logger `actmem.decisions` at level DEBUG.
        """
        rows = [(s.path, s.engine, s.decisions) for s in self._scripts if s.decisions is not None]
        rows += [(path, "compiled", decisions) for path, decisions in self._compilation.asked.items()]
        return gather(self.plan.rules, rows)

    def _families(self) -> list[tuple[str, ...]]:
        """List the blocks that share a compiled graph."""
        families: dict[Family, list[str]] = {}
        for script in self._scripts:
            families.setdefault(script.family, []).append(script.path)
        return [tuple(paths) for paths in families.values()]

    def _notes(self) -> list[str]:
        notes: list[str] = []
        idle = sum(s.num_idle_calls for s in self._scripts)
        if idle:
            notes.append(
                f"{idle} block calls ran in eval mode with gradients on, and were left alone: call model.train()."
            )
        if self.plan.offload is not None and self.plan.offload.pin and not torch.accelerator.is_available():
            notes.append("pin = True has no meaning here: there is no accelerator, and so no page-locked memory.")
        given_up = tuple(s.path for s in self._scripts if s.given_up)
        if given_up:
            notes.append(
                f"run in eager although compiled, because torch.compile could not take in the whole block: "
                f"{paths_of(given_up)}. TORCH_LOGS=graph_breaks tells why; for a transformers model, "
                "use_cache=False is often all it needs."
            )
        skipped = [s.path for s in self._scripts if s.num_without_gradient and s.decisions is None]
        if skipped:
            notes.append(f"skipped, because no gradient flows through: {paths_of(tuple(skipped))}.")
        return notes

    def check_replay(self, num_calls: int = 1) -> None:
        """Observe the next calls of every block, and compare each replayed value with a checksum of the dropped one."""
        for script in self._scripts:
            script.num_checked, script.idle = num_calls, False

    @property
    def is_on(self) -> bool:
        """Whether the model is under the plan still: True until `remove`."""
        return bool(self._undo)

    def remove(self) -> None:
        """Change the model back into what it was. Graphs that were recorded before stay valid. May be called twice."""
        for block, script in zip(self._blocks, self._scripts, strict=True):
            uninstall(block.module, script)
        if self._offloader is not None:
            self._offloader.close()
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<Applied {self.plan.mode} on {len(self._blocks)} blocks>"


def apply(
    model: nn.Module,
    mode: Mode | Plan,
    *,
    blocks: str | Sequence[str] | None = None,
    scope: Sequence[str] | None = None,
    engine: Engine = "auto",
    collectives: Collectives = "save",
    example: Any = None,
    loss: Callable[[Any], Any] | None = None,
    fake: bool = True,
) -> Applied:
    """Change a model so that training holds only what a mode lets it hold. In place, reversible, names unchanged.

    Args:
        model: any module; its repeating blocks are found.
        mode: a mode such as `Full()` or `Selective(save=[...])`, or a `Plan`. There is no default.
        blocks: where the blocks are, as a glob over module paths or a list of them, for models in which they cannot
            be found.
        scope: the towers whose blocks are meant, out of "language", "vision" and "audio". Left out: the language model
            where there is one.
        engine: "auto" takes the tape in eager, which records operators and replays them, and torch's checkpoint as an
            operator of the graph under torch.compile. "tape" keeps the blocks out of compiled graphs. "checkpoint"
            takes torch's checkpoint in eager too, which runs the blocks' Python code twice. The plan is the same.
        collectives: "save" never runs a collective twice. "recompute" treats the all-gathers, all-reduces,
            reduce-scatters and broadcasts of tensor and sequence parallel as the mode treats other operators, which
            frees their bytes and communicates again in the backward pass. Every rank must run the same operators.
        example: a batch, for `Budget`, which profiles the model: a dict for `model(**example)`, or a tuple.
        loss: a function of the output, for the same; by default `output.loss`.
        fake: profile on tensors without bytes, for the same. Otherwise one real step is run.

    Returns:
        The handle to print what was done, and to undo it.

    Raises:
        ModeError: the mode names something that does not exist, or matches nothing.
        StructureError: the blocks were not found, or are ambiguous.
        ApplyError: the model is applied already, or recomputes by other means.

    >>> import torch, actmem
    >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
    >>> applied = actmem.apply(model, actmem.Full())
    >>> model(torch.randn(2, 8)).sum().backward()
    >>> applied.report().recomputed_bytes
    192
    >>> applied.remove()
    """
    check_module(model)
    if not isinstance(mode, (*_MODES, Plan)):  # pyright: ignore[reportUnnecessaryIsInstance] # callers may not check
        names = ", ".join(m.__name__ for m in _MODES)
        raise ModeError(
            f"mode = {mode!r} is no mode. Expected one of {names}, or a Plan, as in actmem.apply(model, actmem.Full())."
        )
    if engine not in ("auto", "tape", "checkpoint"):
        raise ModeError(
            f"engine = {engine!r} is not known. Expected 'auto', 'tape' (records and replays operators) or "
            "'checkpoint' (torch's own, which runs the code of the blocks twice)."
        )
    if collectives not in ("save", "recompute"):
        raise ModeError(
            f"collectives = {collectives!r} is not known. Expected 'save' (run once) or 'recompute' (run again in "
            "the backward pass, on every rank)."
        )
    if (example is not None or loss is not None) and not isinstance(mode, (Budget, Plan)):
        raise ModeError(
            f"example and loss are for a Budget, which profiles the model; {type(mode).__name__} does not. Leave them "
            "out."
        )
    if not fake and not isinstance(mode, Budget):
        raise ModeError(
            f"fake = False is for a Budget, which profiles the model; {type(mode).__name__} does not. Leave it out."
        )
    if isinstance(mode, Budget) and example is None:
        raise ModeError(f"{mode!r} needs a batch to plan for. Write actmem.apply(model, {mode!r}, example=batch).")
    if isinstance(mode, Budget) and engine == "checkpoint":
        raise ModeError(
            "engine = 'checkpoint' runs whole blocks twice, and its peak is not the planned one. Leave it out: a "
            "Budget is kept by the tape."
        )
    if collectives == "recompute" and engine == "checkpoint":
        raise ModeError(
            "collectives = 'recompute' stands beside engine = 'checkpoint', which never runs a collective twice. "
            "Leave one of them out."
        )
    refuse_state(model)
    if isinstance(mode, Budget):
        from actmem.planner import fit  # its solver takes a while to import
        from actmem.profiling.complaints import called_as

        with called_as(f"actmem.apply(model, actmem.Budget({mode.amount!r}, ...), example=batch, fake=False)"):
            mode = fit(
                model,
                example,
                budget=mode.amount,
                loss=loss,
                device=mode.device,
                offload=mode.offload,
                optimizer=mode.optimizer,
                microbatches=mode.microbatches,
                blocks=blocks,
                scope=scope,
                fake=fake,
            )
        blocks = scope = None  # the plan names its blocks
    if isinstance(mode, FromPlan):
        mode = Plan.load(mode.path)
    if isinstance(mode, Plan):
        plan, found = mode, _blocks_of(model, mode, blocks, scope)
    else:
        found = find_blocks(model, blocks, scope)
        offload = getattr(mode, "offload", None)
        plan = Plan(mode.rules(), tuple(b.path for b in found), fingerprint(model, found), repr(mode), offload)
    refuse_blocks(found)
    every_role, layer_types = find_roles(model, found), [layer_type(b.module) for b in found]
    if isinstance(mode, Selective):
        plan = _without_absent(plan, {name for its_roles in every_role for name in its_roles})
    check_rules(plan.rules, found, every_role, layer_types, model)
    check_offload(plan, model, engine)
    offloader = None if plan.offload is None else make_offloader(plan.offload, device_of(model))
    compilation = Compilation({b.path: b.module for b in found})
    roll = _Roll(plan, model)
    families: dict[Any, Family] = {}
    cuts: dict[Any, Any] = {}
    scripts: list[Script] = []
    for block, its_roles, its_type in zip(found, every_role, layer_types, strict=True):
        modules = {path: f"{block.path}.{path}".strip(".") for path, _ in named_modules(block.module)}
        verdicts = resolve(
            plan.rules,
            layer=block.index,
            num_layers=len(found),
            modules=modules,
            roles=its_roles,
            layer_type=its_type,
        )
        key = type(block.module), block.kind, verdicts.key
        if key not in families:
            families[key] = Family(verdicts, compilation, traceable=engine != "tape", exact=plan.exact)
        families[key].needs_answers |= "router" in its_roles
        scripts.append(
            Script(
                block.path,
                families[key],
                engine="none" if isinstance(mode, CompilerBudget) else "tape" if engine == "auto" else engine,
                cuts=cuts,
                observed=roll.called,
                state=roll.state,
                reissue=collectives == "recompute",
                offloader=offloader,
                offload=plan.offload,
                exact=plan.exact,
            )
        )
    roll.scripts = tuple(scripts)
    undo: list[Callable[[], None]] = []
    if isinstance(mode, CompilerBudget):
        undo.append(compiler_budget(mode.fraction))
    if engine == "checkpoint":
        undo.append(keep_graph_order())
    classes: dict[Any, type] = {}
    for block, script in zip(found, scripts, strict=True):
        install(block.module, script, classes)
    if plan.predicted is not None:
        from actmem.planner import Guard

        guard = Guard(model, plan, loss)
        undo.append(model.register_forward_pre_hook(guard, with_kwargs=True).remove)
    return Applied(plan, found, tuple(scripts), compilation, offloader, undo)


def _without_absent(plan: Plan, present: set[str]) -> Plan:
    """Leave out what `Selective` says of parts that this model does not have, such as the gates of routers."""
    return replace(plan, rules=tuple(r for r in plan.rules if not (r.target and r.op) or r.target in present))


class _Roll:
    """What the blocks of a model have in common: its state, and the plan, some of whose names must match."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._named = frozenset(i for i, r in enumerate(plan.rules) if r.op or r.module or r.target)
        self._plan = plan
        self._logged: set[tuple[str, str]] = set()
        self._warned = False
        self.scripts: tuple[Script, ...] = ()

    def state(self) -> frozenset[int]:
        """Return the storages of the model's parameters and buffers."""
        model = self._model()
        if model is None:
            return frozenset()
        return frozenset(storages_of([local(t) for t in (*model.parameters(), *model.buffers())]))

    def _warn_of_uncompiled(self) -> None:
        """Warn where FlexAttention was seen as an operator: a compiled one shows only its kernels."""
        bare = [s for s in self.scripts if any(row.op.startswith(_FLEX) for row in s.decisions or ())]
        if bare and not self._warned:
            self._warned = True
            lost = " since torch.compile could not take in the whole block" if bare[0].given_up else ""
            warnings.warn(
                f"FlexAttention runs without compilation in {paths_of(tuple(s.path for s in bare))}{lost}: it is slow, "
                "and holds all scores at once. Compile it by itself, and it stays compiled in any block: "
                "flex_attention = torch.compile(flex_attention).",
                stacklevel=2,
            )

    def called(self) -> None:
        """Log what was decided, and notice, when every block has run once, that none of the plan's names matched."""
        decisions = [row for s in self.scripts for row in s.decisions or ()]
        log_once(decisions, self._plan.rules, self._logged)
        self._warn_of_uncompiled()
        if not self._named or any(s.decisions is None for s in self.scripts):
            return
        if not self._named & set[int]().union(*(s.verdicts.matched for s in self.scripts)):
            seen = sorted({row.op for row in decisions})
            raise ModeError(
                f"{self._plan.mode} matches nothing: no operator that ran in the blocks of this model is among "
                "its names. "
                f"Operators that ran: {', '.join(seen[:24])}{', ...' if len(seen) > 24 else ''}. Name one of "
                "these, or a group they belong to."
            )


def _blocks_of(
    model: nn.Module, plan: Plan, blocks: str | Sequence[str] | None, scope: Sequence[str] | None
) -> tuple[Block, ...]:
    for name, value in (("blocks", blocks), ("scope", scope)):
        if value is not None:
            raise ModeError(f"{name} = {value!r} is given beside a plan, which names its own blocks. Leave {name} out.")
    if plan.mode.startswith(CompilerBudget.__name__):
        raise PlanError(
            f"the plan is of {plan.mode}, which is a setting of torch.compile and no list of rules: read from a plan "
            "it would do nothing. Give the mode itself: actmem.apply(model, actmem.CompilerBudget(0.5))."
        )
    try:
        found = find_blocks(model, ",".join(p or "." for p in plan.blocks))
    except StructureError as error:
        raise PlanError(
            f"the plan was made for another model: {type(model).__name__} has not the blocks that it names, "
            f"{', '.join(p or 'the model itself' for p in plan.blocks[:3])}{', ...' if len(plan.blocks) > 3 else ''}. "
            "Make a plan for this model: actmem.apply(model, mode).plan.save(path)."
        ) from error
    actual = fingerprint(model, found)
    if actual != plan.fingerprint:
        raise PlanError(
            f"the plan was made for another model: its fingerprint is {plan.fingerprint}, this model's is "
            f"{actual} (parameter names, shapes, dtypes "
            "and blocks count). Make a plan for this model: actmem.apply(model, mode).plan.save(path)."
        )
    return found
