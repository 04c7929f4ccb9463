"""The only place that changes a model: a mode becomes a plan, and the plan an engine on every block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from actmem.applying.applied_block import BlockRunner, SharedState, applied_runner, install, uninstall
from actmem.applying.broken_blocks import broken_notes
from actmem.applying.optimizer_choice import OptimizerChoice, choose_optimizer, run_optimizer
from actmem.applying.rule_checks import check_rules
from actmem.compilercompat import keep_graph_order
from actmem.decisions import Decision
from actmem.engine import BlockFamily, Compilation, UnseenFunctions, Verdicts, record_compiled_regions, resolve
from actmem.errors import ApplyError, ModeError, PlanError, StructureError
from actmem.job_plan import JobPlan
from actmem.modes import Budget, FromPlan, Mode, Selective
from actmem.offloading import Offloader, make_offloader
from actmem.plan import Plan
from actmem.reporting import Report, Trace, compiled_graphs, gather, paths_of, summarise
from actmem.settings import Offload, OptimizerState, Split, StepInBackward, check_split
from actmem.splitting import SplitModel
from actmem.structure import Block, check_module, find_blocks, find_roles, fingerprint, layer_type
from actmem.torchcompat import named_modules

__all__ = [
    "Applied",
    "apply",
    "check_offload",
    "device_of",
    "refuse_blocks",
    "refuse_host_on_cpu",
    "refuse_state",
]

_MODES: tuple[type, ...] = get_args(Mode)
Engine = Literal["auto", "tape", "checkpoint"]
Collectives = Literal["save", "recompute"]
Opaque = Literal["hold", "replay"]


class Applied:
    """A model under a plan. Made by `apply`; `remove()` undoes it. Also a context manager, which removes on leaving."""

    def __init__(
        self,
        plan: Plan,
        blocks: tuple[Block, ...],
        runners: tuple[BlockRunner, ...],
        compilation: Compilation,
        offloader: Offloader | None = None,
        undo: Sequence[Callable[[], None]] = (),
        opaque: UnseenFunctions | None = None,
        split: SplitModel | None = None,
    ) -> None:
        self.plan = plan
        """The resolved decision: print it, save it, read it back."""
        self._blocks = blocks
        self._runners = runners
        self._compilation = compilation
        self._offloader = offloader
        self._undo = list(undo)
        self._opaque = opaque
        self._split = split

    def report(self) -> Report:
        """Report which engine ran, and what the latest observed step saved, recomputed, and could not replay. Print it.

        A block's first training call is observed; `check_replay` has later ones observed too. For a compiled graph it
        says what the plan asked for, and what the compiler's partitioner made of it.
        """
        return summarise(
            self.plan,
            [
                (b.path, b.kind, s.observation)
                for b, s in zip(self._blocks, self._runners, strict=True)
                if s.observation is not None or not (self._compilation.graphs and s.verdicts.keeps_everything)
            ],
            matched=set[int]().union(*(s.verdicts.matched for s in self._runners)),
            notes=[*self._notes(), *self.trace().subsumed],
            compiled=compiled_graphs(self._compilation.graphs, self._compilation.asked, self._families()),
            moved=None if self._offloader is None else self._offloader.ledger,
            checkpointed=[s.path for s in self._runners if s.engine == "checkpoint" and s.decisions is not None],
        )

    def trace(self) -> Trace:
        """List what the plan said at every operator of the latest observed step, and by which rule. Print it.

        The same is logged once for each operator, by the logger `actmem.decisions` at level DEBUG.
        """
        rows = [(s.path, s.engine, s.decisions) for s in self._runners if s.decisions is not None]
        rows += [(path, "compiled", decisions) for path, decisions in self._compilation.asked.items()]
        return gather(self.plan.rules, rows)

    def _families(self) -> list[tuple[str, ...]]:
        """List the blocks that share a compiled graph."""
        families: dict[BlockFamily, list[str]] = {}
        for runner in self._runners:
            families.setdefault(runner.family, []).append(runner.path)
        return [tuple(paths) for paths in families.values()]

    def _notes(self) -> list[str]:
        notes: list[str] = []
        idle = sum(s.num_idle_calls for s in self._runners)
        if idle:
            notes.append(
                f"{idle} block calls ran in eval mode with gradients on, and were left alone: call model.train()."
            )
        if self.plan.offload is not None and self.plan.offload.pin and not torch.accelerator.is_available():
            notes.append("pin = True has no meaning here: there is no accelerator, and so no page-locked memory.")
        notes += broken_notes(self._runners)
        notes += [] if self._opaque is None else self._opaque.notes()
        notes += [] if self._split is None else self._split.notes()
        skipped = [s.path for s in self._runners if s.num_without_gradient and s.decisions is None]
        if skipped:
            notes.append(f"skipped, because no gradient flows through: {paths_of(tuple(skipped))}.")
        if not record_compiled_regions():
            notes.append(
                f"this torch ({torch.__version__}) does not say when it has compiled a function, so what compiled "
                "functions inside blocks save is held. actmem knows the compiler of torch 2.13."
            )
        return notes

    def check_replay(self, num_calls: int = 1) -> None:
        """Observe the next calls of every block, and compare each replayed value with a checksum of the dropped one."""
        for runner in self._runners:
            runner.num_checked, runner.idle = num_calls, False

    @property
    def is_on(self) -> bool:
        """Whether the model is still under the plan: True until `remove`."""
        return any(runner.active for runner in self._runners)

    def remove(self) -> None:
        """Change the model back into what it was. Graphs that were recorded before stay valid. May be called twice."""
        for block, runner in zip(self._blocks, self._runners, strict=True):
            uninstall(block.module, runner)
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
    opaque: Opaque = "hold",
    split: Split | None = None,
    example: Any = None,
    examples: Sequence[Any] = (),
    step: Callable[[], object] | None = None,
    loss: Callable[[Any], Any] | None = None,
    fake: bool = True,
    optimizer: Optimizer | None = None,
    step_in_backward: StepInBackward | None = None,
    optimizer_state: OptimizerState | None = None,
) -> Applied:
    """Change a model so that training holds only what a mode lets it hold. In place, reversible, names unchanged.

    Args:
        model: any module; its repeating blocks are found.
        mode: a mode such as `Full()` or `Selective(save=[...])`, or a `Plan`. There is no default.
        blocks: where the blocks are, as a glob over module paths or a list of them, for models in which they cannot
            be found.
        scope: the towers whose blocks to take, out of "language", "vision" and "audio". Default: the language model
            where there is one.
        engine: "auto" takes the tape in eager, which records operators and replays them, and torch's checkpoint as an
            operator of the graph under torch.compile. "tape" keeps the blocks out of compiled graphs. "checkpoint"
            takes torch's checkpoint in eager too, which runs the blocks' Python code twice. The plan is the same.
        collectives: "save" never runs a collective twice. "recompute" treats the all-gathers, all-reduces,
            reduce-scatters and broadcasts of tensor and sequence parallel as the mode treats other operators, which
            frees their bytes and communicates again in the backward pass. Every rank must run the same operators. A
            plan says itself what it was made for, and "save" leaves that as it is.
        opaque: "hold" holds what kernels make that torch cannot see (Triton, CUDA and C++ extensions), unless the
            autograd Function that launches them was declared, by `replayable` or by actmem's table of known libraries.
            "replay" runs every such Function again, as one operator, if it gives the same bits twice in the first
            steps; the report lists which did, and which did not and are held.
        split: what to compute in pieces of tokens: `Split(loss=16)` computes logits and loss in chunks, so that the
            logits are never there as a whole; `Split(parts={"mlp": 8})` runs each MLP on an eighth of the tokens at a
            time, forward and backward. Sums over tokens are added in another order: `plan.bitwise` is False.
        example: a batch, for `Budget`, which profiles the model: a dict for `model(**example)`, or a tuple.
        examples: several of them; the plan holds for each.
        step: in place of an example, a function that runs one whole training step of your own loop, as for `profile`.
        loss: a function of the output, for the same; by default `output.loss`.
        fake: profile on tensors without bytes, for the same. Otherwise real steps are run.
        optimizer: your optimizer, for a `Budget` that counts it, and for a plan or the next two that change its steps.
        step_in_backward: step each parameter as soon as its gradient is complete, and drop the gradient.
        optimizer_state: where to keep the optimizer's state: `OptimizerState(to="disk")`.

    Returns:
        The handle to print what was done, and to undo it.

    Raises:
        ModeError: the mode names something that does not exist, or matches nothing.
        StructureError: the blocks were not found, or are ambiguous.
        ApplyError: the model already has a plan applied, or recomputes by other means.

    >>> import torch, actmem
    >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
    >>> applied = actmem.apply(model, actmem.Full())
    >>> model(torch.randn(2, 8)).sum().backward()
    >>> applied.report().recomputed_bytes
    192
    >>> applied.remove()
    """
    profiled = _Profiled(example, step, loss, fake, tuple(examples))
    _validate(model, mode, engine, collectives, opaque, profiled)
    counted = optimizer
    told = optimizer, step_in_backward, optimizer_state
    choice = None if told == (None, None, None) else choose_optimizer(mode, *told)
    more: dict[str, Any] = {"split": split, **({} if choice is None else choice.settings)}
    if split is not None:
        check_split(split, with_plan=isinstance(mode, (Plan, FromPlan)))
    if isinstance(mode, Budget):
        mode = mode if choice is None else replace(mode, optimizer=choice.counted)
        counted = mode.optimizer
        asked = replace(mode, compiled=False) if engine == "tape" else mode
        mode = _fitted(model, asked, profiled, blocks, scope, more)
        blocks = scope = None  # the plan names its blocks, and says the rest itself
    resolved = _resolve(model, mode, engine, blocks, scope, more)
    if collectives == "recompute":
        resolved = resolved._replace(plan=replace(resolved.plan, collectives=collectives))
    _refuse_reissued(resolved.plan, engine)
    return _install(model, resolved, engine, opaque, loss, choice, counted)


# ---------------------------------------------------------------- validate: refuse what cannot be


class _Profiled(NamedTuple):
    """What a Budget profiles, and how."""

    example: Any
    step: Callable[[], object] | None
    loss: Callable[[Any], Any] | None
    fake: bool
    examples: tuple[Any, ...]


def _validate(
    model: nn.Module, mode: Mode | Plan, engine: Engine, collectives: Collectives, opaque: Opaque, profiled: _Profiled
) -> None:
    check_module(model)
    _refuse_unknown(mode, engine, collectives, opaque)
    _refuse_profiled(mode, profiled)
    _refuse_combined(mode, engine, opaque)
    refuse_state(model)


def _refuse_unknown(mode: Mode | Plan, engine: Engine, collectives: Collectives, opaque: Opaque) -> None:
    if isinstance(mode, JobPlan):  # pyright: ignore[reportUnnecessaryIsInstance] # callers may not check
        raise ModeError("a JobPlan has a plan for each rank. Write actmem.apply(model, job.for_rank(rank)).")
    if not isinstance(mode, (*_MODES, Plan)):  # pyright: ignore[reportUnnecessaryIsInstance] # callers may not check
        names = ", ".join(m.__name__ for m in _MODES)
        raise ModeError(
            f"mode = {mode!r} is not a mode. Expected one of {names}, or a Plan, as in "
            "actmem.apply(model, actmem.Full())."
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
    if opaque not in ("hold", "replay"):
        raise ModeError(
            f"opaque = {opaque!r} is not known. Expected 'hold' (what unseen kernels make is held, unless declared) or "
            "'replay' (autograd Functions that launch them run again, if they give the same bits twice)."
        )


def _refuse_profiled(mode: Mode | Plan, profiled: _Profiled) -> None:
    """Refuse a Budget without a batch, and a batch without a Budget."""
    given = profiled.example is not None or profiled.examples or profiled.loss is not None
    if given and not isinstance(mode, (Budget, Plan)):
        raise ModeError(
            f"example and loss are for a Budget, which profiles the model; {type(mode).__name__} does not. Leave them "
            "out."
        )
    if profiled.step is not None and not isinstance(mode, Budget):
        raise ModeError(f"step is for a Budget, which profiles it; {type(mode).__name__} does not. Leave it out.")
    if not profiled.fake and not isinstance(mode, Budget):
        raise ModeError(
            f"fake = False is for a Budget, which profiles the model; {type(mode).__name__} does not. Leave it out."
        )
    if isinstance(mode, Budget) and profiled.example is None and not profiled.examples and profiled.step is None:
        raise ModeError(f"{mode!r} needs a batch to plan for. Write actmem.apply(model, {mode!r}, example=batch).")


def _refuse_combined(mode: Mode | Plan, engine: Engine, opaque: Opaque) -> None:
    if isinstance(mode, Budget) and opaque == "replay":
        raise ModeError(
            "opaque = 'replay' finds out during the first steps what may run again, and a Budget is planned before "
            "them. Leave it out, and declare the functions that are pure: actmem.replayable(fn)."
        )
    if engine == "checkpoint" and opaque == "replay":
        raise ModeError(
            "opaque = 'replay' is about the tape, and engine = 'checkpoint' is torch's own, which runs all code of the "
            "blocks again. Leave one of them out."
        )
    if isinstance(mode, Budget) and engine == "checkpoint":
        raise ModeError(
            "engine = 'checkpoint' runs whole blocks twice, and its peak is not the planned one. Leave it out: a "
            "Budget is kept by the tape."
        )


def _refuse_reissued(plan: Plan, engine: Engine) -> None:
    if plan.collectives == "recompute" and engine == "checkpoint":
        raise ModeError(
            "collectives = 'recompute' cannot be combined with engine = 'checkpoint', which never runs a collective "
            "twice. Leave one of them out."
        )


def refuse_state(model: nn.Module) -> None:
    """Refuse a model that already has a plan applied, or that recomputes by other means."""
    for path, module in named_modules(model):
        if (runner := applied_runner(module)) is not None:
            raise ApplyError(
                f"a plan is applied to this model already, at {runner.path or 'the model itself'} and others. "
                "Remove it first: applied.remove(), on what actmem.apply returned."
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ApplyError(
                f"{path or 'the model'}.gradient_checkpointing = True: Hugging Face gradient checkpointing is on, "
                "and would run the forward code twice. "
                "Switch it off first: model.gradient_checkpointing_disable()."
            )
        if hasattr(module, "_checkpoint_wrapped_module"):
            raise ApplyError(
                f"{path or 'the model'} is wrapped by torch's checkpoint_wrapper, which does its own recomputation. "
                "Build the model without that wrapper, and let actmem decide."
            )


# ---------------------------------------------------------------- resolve: the plan, its blocks, what it says to each


class _Resolved(NamedTuple):
    """A plan and what it means for a model. The lists have an entry for each block."""

    plan: Plan
    blocks: tuple[Block, ...]
    roles: Sequence[dict[str, tuple[str, ...]]]
    verdicts: Sequence[Verdicts]


def _fitted(
    model: nn.Module,
    mode: Budget,
    profiled: _Profiled,
    blocks: str | Sequence[str] | None,
    scope: Sequence[str] | None,
    more: dict[str, Any],
) -> Plan:
    from actmem.planner import fit  # its solver takes a while to import
    from actmem.profiling import called_as

    what = "example=batch" if profiled.step is None else "step=step"
    with called_as(f"actmem.apply(model, actmem.Budget({mode.amount!r}, ...), {what}, fake=False)"):
        return fit(
            model,
            profiled.example,
            examples=profiled.examples,
            budget=mode.amount,
            step=profiled.step,
            loss=profiled.loss,
            device=mode.device,
            offload=mode.offload,
            optimizer=mode.optimizer,
            microbatches=mode.microbatches,
            compiled=mode.compiled,
            allocator=mode.allocator,
            blocks=blocks,
            scope=scope,
            fake=profiled.fake,
            allow=mode.allow,
            **more,
        )


def _resolve(
    model: nn.Module,
    mode: Mode | Plan,
    engine: Engine,
    blocks: str | Sequence[str] | None,
    scope: Sequence[str] | None,
    more: dict[str, Any],
) -> _Resolved:
    if isinstance(mode, FromPlan):
        mode = Plan.load(mode.path)
    if isinstance(mode, Plan):
        plan, found = mode, _blocks_of(model, mode, blocks, scope)
    else:
        found = find_blocks(model, blocks, scope)
        paths, offload = tuple(b.path for b in found), getattr(mode, "offload", None)
        plan = Plan(mode.rules(), paths, fingerprint(model, found), repr(mode), offload, **more)
    refuse_blocks(found)
    roles, layer_types = find_roles(model, found), [layer_type(b.module) for b in found]
    if isinstance(mode, Selective):
        plan = _without_absent(plan, {name for its_roles in roles for name in its_roles})
    if any(rule.selectors for rule in plan.rules):
        check_rules(plan.rules, found, roles, layer_types, model)
    check_offload(plan, model, engine)
    verdicts = [
        resolve(
            plan.rules,
            layer=block.index,
            num_layers=len(found),
            modules={path: f"{block.path}.{path}".strip(".") for path, _ in named_modules(block.module)},
            roles=its_roles,
            layer_type=its_type,
        )
        for block, its_roles, its_type in zip(found, roles, layer_types, strict=True)
    ]
    return _Resolved(plan, found, roles, verdicts)


def _without_absent(plan: Plan, present: set[str]) -> Plan:
    """Leave out what `Selective` says about parts that this model does not have, such as the gates of routers."""
    return replace(plan, rules=tuple(r for r in plan.rules if not (r.target and r.op) or r.target in present))


def _blocks_of(
    model: nn.Module, plan: Plan, blocks: str | Sequence[str] | None, scope: Sequence[str] | None
) -> tuple[Block, ...]:
    for name, value in (("blocks", blocks), ("scope", scope)):
        if value is not None:
            raise ModeError(
                f"{name} = {value!r} cannot be combined with a plan, which names its own blocks. Leave {name} out."
            )
    try:
        found = find_blocks(model, ",".join(p or "." for p in plan.blocks))
    except StructureError as error:
        raise PlanError(
            f"the plan was made for another model: {type(model).__name__} does not have the blocks that it names, "
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


def refuse_blocks(blocks: tuple[Block, ...]) -> None:
    """Refuse blocks whose forward actmem could not reach."""
    for block in blocks:
        if "forward" in vars(block.module):
            raise ApplyError(
                f"{block.path or 'the model'} has a forward of its own in the instance (accelerate's hooks put "
                "one there), which would bypass actmem. "
                "Apply actmem before the library that sets it."
            )


def check_offload(plan: Plan, model: nn.Module, engine: str) -> None:
    """Refuse to offload where nothing says where to, or where it would do nothing."""
    asked = next((rule for rule in plan.rules if rule.decision is Decision.OFFLOAD), None)
    if asked is None and plan.offload is None:
        return
    if asked is None:
        raise ModeError(f"{plan.offload!r} is given, but no rule offloads. Leave it out, or add Rule('offload', ...).")
    if plan.offload is None:
        raise ModeError(
            f"{asked!r} offloads, but nothing says where to. Write Rules([...], offload=Offload(to='disk'))."
        )
    if engine == "checkpoint":
        raise ModeError(
            f"{asked!r} offloads, which the tape does, and engine = 'checkpoint' is torch's own. Leave engine out."
        )
    refuse_host_on_cpu(plan.offload, model)


def refuse_host_on_cpu(offload: Offload, model: nn.Module) -> None:
    """Refuse to send what is in host memory already to host memory."""
    if device_of(model).type == "cpu" and not offload.takes_from("cpu"):
        raise ModeError(
            "to = 'host', but the model is on the CPU: its activations are in host memory already. Write to='disk', "
            "move the model to an accelerator first, or, for a test, say copy_cpu=True."
        )


def device_of(model: nn.Module) -> torch.device:
    """Return the device that the model's parameters are on; an accelerator's where they are on several."""
    devices = {p.device for p in model.parameters()}
    return next((d for d in devices if d.type not in ("cpu", "meta")), next(iter(devices), torch.device("cpu")))


# ---------------------------------------------------------------- install: a runner for every block


def _install(
    model: nn.Module,
    resolved: _Resolved,
    engine: Engine,
    opaque: Opaque,
    loss: Callable[[Any], Any] | None,
    choice: OptimizerChoice | None,
    counted: Any,
) -> Applied:
    plan, blocks = resolved.plan, resolved.blocks
    steps = plan.step_in_backward is not None or plan.optimizer_state is not None
    stepping = run_optimizer(plan, choice, model, device_of(model)) if steps else None
    try:
        split = None if plan.split is None else SplitModel(model, plan.split, blocks)
        offloader = None if plan.offload is None else make_offloader(plan.offload, device_of(model))
    except BaseException:
        if stepping is not None:
            stepping.remove()
        raise
    shared = SharedState(plan, model)
    unseen = UnseenFunctions(replay=opaque == "replay")
    compilation = Compilation({b.path: b.module for b in blocks}, shared.log)
    shared.runners = _runners(resolved, engine, shared, compilation, offloader, unseen)
    undo: list[Callable[[], None]] = []
    if engine == "checkpoint":
        undo.append(keep_graph_order())
    classes: dict[Any, type] = {}
    for block, runner in zip(blocks, shared.runners, strict=True):
        install(block.module, runner, classes)
    if plan.predicted is not None:
        from actmem.planner import Guard

        guard = Guard(model, plan, loss, counted)
        undo.append(model.register_forward_pre_hook(guard, with_kwargs=True).remove)
    if split is not None:
        undo.append(split.remove)
    if stepping is not None:
        undo.append(stepping.remove)
    return Applied(plan, blocks, shared.runners, compilation, offloader, undo, unseen, split)


def _runners(
    resolved: _Resolved,
    engine: Engine,
    shared: SharedState,
    compilation: Compilation,
    offloader: Offloader | None,
    unseen: UnseenFunctions,
) -> tuple[BlockRunner, ...]:
    """Make a runner for each block. Blocks of one class for which the plan says the same are one family."""
    plan = resolved.plan
    families: dict[Any, BlockFamily] = {}
    cuts: dict[Any, Any] = {}
    programs: dict[Any, Any] = {}
    runners: list[BlockRunner] = []
    for block, roles, verdicts in zip(resolved.blocks, resolved.roles, resolved.verdicts, strict=True):
        key = type(block.module), block.kind, verdicts.key
        if key not in families:
            families[key] = BlockFamily(verdicts, compilation, traceable=engine != "tape", plan=plan)
        families[key].needs_answers |= "router" in roles
        runners.append(
            BlockRunner(
                block.path,
                families[key],
                engine="tape" if engine == "auto" else engine,
                cuts=cuts,
                observed=shared.called,
                state=shared.state,
                reissue=plan.collectives == "recompute",
                offloader=offloader,
                offload=plan.offload,
                exact=plan.exact,
                opaque=unseen,
                programs=programs,
            )
        )
    return tuple(runners)
