"""Exchange the class of a block, so that its forward runs under an engine.

NOTE [ How a block is applied ]
The block's real class is replaced by a subclass of itself, whose `forward` asks the block's `BlockRunner` what to do.
Nothing is written to the instance: names, hooks, `state_dict` and the module tree stay as they are. `forward` runs
inside the module's hooks, so that what FSDP gathers before and frees after it stays outside.

The subclass exists only to run the forward. In everything else the block is still what it was:

- To copy or pickle it, the original class is put back for as long as its own `__reduce_ex__`, `__deepcopy__` or
  `__copy__` runs: the result is byte for byte that of a plain block. A pickler looks at the class once
  more after `__reduce_ex__`, and then goes through the list items that it returned: these end the swap.
- Assigning to `block.__class__` replaces the class *below* the subclass: the block stays applied, and keeps the new
  class when the plan is removed. The parts of torch that make a new class from the old one (parametrizations, FSDP2,
  `replicate`) are shown the original: they write to it, and compare it with those that they made. All others see the
  real class: Dynamo looks up methods by `__class__`, and guards on it.
- The subclass is made without telling the original: no `__init_subclass__` runs, and no code of a metaclass. Only
  `original.__subclasses__()` shows it, until it is collected.

Why not something on the instance? `nn.Module.compile()` keeps an attribute that `__call__` asks, but outside the hooks;
an instance's own `forward` would be copied and pickled with it, as hooks are. Dynamo would ask both for their identity,
and compile each block by itself. And changing `forward` in the original class would reach every instance of it.

Blocks of one class for which the plan says the same (a `BlockFamily`) get the same subclass. So Dynamo, which asks for
the class of a module before it uses a graph again, compiles one graph for all of them, as it does for the plain model.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import sys
import warnings
import weakref
from abc import ABCMeta
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from actmem import ops
from actmem.applying.class_exchange import Exchanged, set_class
from actmem.compilercompat import break_graph, graph_breaks, has_compiled
from actmem.engine import (
    DESCRIBED,
    IMPORTED,
    Away,
    BlockFamily,
    Cut,
    ModulePieces,
    Observation,
    Places,
    Tape,
    Traced,
    Tracer,
    UnseenFunctions,
    declare_libraries,
    learn,
    log_once,
    record_compiled_regions,
    recording,
    run_checkpointed,
    running_function,
    smallest_cut,
    storages_of,
    tensors,
    unpack,
)
from actmem.errors import ModeError, UnsupportedError
from actmem.offloading import Offloader
from actmem.plan import Plan
from actmem.reporting import paths_of
from actmem.settings import Offload
from actmem.structure import buffers_of, parameters_of
from actmem.torchcompat import (
    active_compiler,
    apart_from_graphs,
    checkpoint,
    compiling,
    functorch_transform,
    hand_out_parameters,
    is_compiler_new,
    never_compile,
    outer_hooks,
    storage_key,
)

__all__ = ["BlockRunner", "SharedState", "applied_runner", "install", "local", "uninstall"]

Classes = dict[tuple[type, BlockFamily], type]

_MAKES_CLASSES = ("torch.nn.utils.parametrize", "torch.distributed.")
"""Modules that make a new class from a module's class, and assign it."""

_FLEX = "higher_order.flex_attention"

_CHECKED = (vars(copyreg)["__newobj__"], vars(copyreg)["__newobj_ex__"])
"""What `__reduce_ex__` returns where a pickler checks that it is given the class of the object."""


def install(block: nn.Module, runner: BlockRunner, classes: Classes) -> None:
    """Change the class of `block` so that its forward asks `runner`. See NOTE [ How a block is applied ].

    Args:
        block: the module.
        runner: what to do when it is called.
        classes: the subclasses made so far for this model, by original class and family.
    """
    key: tuple[type, BlockFamily] = type(block), runner.family
    if key not in classes:
        classes[key] = _subclass(*key, classes)
    vars(classes[key])["_actmem_runners"][id(block)] = runner
    set_class(block, classes[key])


def _subclass(original: Any, family: BlockFamily, classes: Classes) -> type:
    """Make the class of the applied blocks of one family: the forward, and what hides it."""
    runners: dict[int, BlockRunner] = {}
    forward = _forward(original, family, runners)
    forward.__doc__ = original.forward.__doc__
    forward.__wrapped__ = original.forward  # inspect.signature follows it

    def get_class(self: nn.Module) -> type:
        asked_by: str = sys._getframe(1).f_globals.get("__name__", "")  # pyright: ignore[reportPrivateUsage]
        return original if type(self) is managed and asked_by.startswith(_MAKES_CLASSES) else type(self)

    def assign_class(self: nn.Module, kind: type) -> None:
        before = type(self)
        set_class(self, kind)
        if before is managed and id(self) in runners and not hasattr(kind, "_actmem_runners"):
            install(self, runners[id(self)], classes)  # kept here too: a call may be in progress
            names: dict[str, Any] = {**vars(managed)}
            for name, value in names.items():  # notes that others left on the class
                if name not in vars(type(self)):
                    setattr(type(self), name, value)

    def reduce(self: Any, protocol: Any) -> Any:
        exchanged = Exchanged(self, original)
        with exchanged.unless_kept():
            registered: Any = copyreg.dispatch_table.get(original)
            found: Any = self.__reduce_ex__(protocol) if registered is None else registered(self)  # may be a name
            return exchanged.kept_by_items(*found) if found[0] in _CHECKED else found

    def hidden(method: Any) -> Any:
        def run(self: Any, *args: Any) -> Any:
            with Exchanged(self, original).unless_kept():
                return method(self, *args)

        return run

    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__class__": property(get_class, assign_class),
        "__reduce_ex__": reduce,
        "__deepcopy__": hidden(copy.deepcopy),
        "__copy__": hidden(copy.copy),
        "forward": forward,
        "_actmem_runners": runners,
        "_actmem_original": original,
    }
    # type.__new__ by name: else a metaclass of the user's would be called. An ABC needs a cache of its own.
    kind: Any = original.__class__
    if issubclass(original, GraphModule):  # writes the forward of the graph to its own class
        names["recompile"] = hidden(original.recompile)
    make: Any = ABCMeta.__new__ if issubclass(kind, ABCMeta) else type.__new__
    managed: Any = make(kind, original.__name__, (_Untold, original), names)
    managed.__bases__ = (original,)
    return managed


class _Untold:
    """The first base while a class is made: it keeps `__init_subclass__` of the others from running."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def _forward(original: Any, family: BlockFamily, runners: dict[int, BlockRunner]) -> Any:
    """Return the forward of applied blocks. It looks up the original one each time, because that may be replaced."""
    context = family.traced
    is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled

    @never_compile
    def run(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: Any = None) -> Any:
        runner = runners.get(id(self))
        if runner is None:
            # A replica, as DataParallel makes them, has no runner of its own; other instances of the class run plain.
            if not hasattr(self, "_is_replica"):
                return original.forward(self, *args, **kwargs)
            runner = next(iter(runners.values()))
        pieces = compiler if family.traceable else None
        if pieces is not None and family.names_parts:
            pieces = ModulePieces(pieces, family.verdicts)
        return runner.run(self, compiling(original.forward, pieces), args, kwargs)

    @never_compile
    def given_up(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: Any) -> Any:
        if (runner := runners.get(id(self))) is not None:
            runner.given_up = True
        if is_grad_enabled():
            return run(self, args, kwargs, compiler)
        return compiling(original.forward, compiler)(self, *args, **kwargs)

    @apart_from_graphs
    def refuse(self: nn.Module) -> Any:
        raise UnsupportedError(
            f"{runners[id(self)].path} is compiled, and its plan keeps a budget in eager, which no compiled graph "
            "would. Plan for compiled blocks: actmem.fit(..., compiled=True). Or keep the block out of graphs: "
            "actmem.apply(..., engine='tape')."
        )

    apart = apart_from_graphs(run)

    def traced(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_compiling():
            return given_up(self, args, kwargs, active_compiler())  # see NOTE [ Under torch.compile ]
        if not (self.training and is_grad_enabled() and family.active) or family.verdicts_keep_everything:
            return original.forward(self, *args, **kwargs)
        if family.refused:
            return refuse(self)
        if not family.traceable:
            return apart(self, args, kwargs)
        # A graph break inside a `try` makes Dynamo give up this frame, and only then can the tape have it.
        try:
            if family.offloads:
                break_graph()
            return checkpoint(original.forward, self, *args, use_reentrant=False, context_fn=context, **kwargs)
        finally:
            pass

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return traced(self, args, kwargs)
        if is_grad_enabled():
            return run(self, args, kwargs, active_compiler())
        return original.forward(self, *args, **kwargs)

    return forward


def applied_runner(block: nn.Module) -> BlockRunner | None:
    """Return the runner of an applied block, or None."""
    runners: dict[int, BlockRunner] = getattr(type(block), "_actmem_runners", {})
    runner = runners.get(id(block))
    return runner if runner is not None and runner.active else None


def uninstall(block: nn.Module, runner: BlockRunner) -> None:
    """Change the class of `block` back.

    Where another library has subclassed the subclass itself since, what was added is disabled instead.
    """
    runner.active = runner.family.active = False
    if vars(type(block)).get("_actmem_runners", {}).get(id(block)) is runner:
        set_class(block, vars(type(block))["_actmem_original"])


class BlockRunner:
    """What happens when one applied block is called."""

    def __init__(
        self,
        path: str,
        family: BlockFamily,
        *,
        engine: str,
        cuts: dict[Any, Cut | None],
        observed: Callable[[BlockRunner], None],
        state: Callable[[nn.Module], frozenset[int]],
        reissue: bool = False,
        offloader: Offloader | None = None,
        offload: Offload | None = None,
        exact: bool = False,
        opaque: UnseenFunctions | None = None,
        native: type[Tape] | None = None,
    ) -> None:
        self.path = path
        self.family = family
        self.verdicts = family.verdicts
        self.engine = engine
        """Which engine runs in eager: "tape" or "checkpoint"."""
        self.num_checked = 1
        """How many of the next calls are observed, with each replay checked against a checksum."""
        self.idle = False
        """Nothing is left to do: the plan saves everything here, and the report has seen it."""
        self.num_idle_calls = 0
        """Calls with gradients on that were left alone because the block was in eval mode."""
        self.num_without_gradient = 0
        """Calls through which no gradient flows: neither an argument nor a parameter requires one."""
        self.observation: Observation | None = None
        """The latest call of the tape that was observed."""
        self.decisions: list[Traced] | None = None
        """What the plan said at every operator of the latest call that was observed."""
        self.given_up = False
        """Dynamo could not trace the block whole, so it runs in pieces although it is compiled."""
        self.breaks: list[str] = []
        """Why, in torch's words: the graph breaks that were met when the block was observed."""
        self.active = True
        self._observed = observed
        """Called after each observed forward."""
        self._state = state
        """Returns the storages of the model's parameters and buffers."""
        self._cuts = cuts
        """The smallest cuts of the programs seen so far, shared by all blocks."""
        self._offloader = offloader
        """Offloads values, for all blocks of the model."""
        self._offload = offload
        self._state_storages: frozenset[int] = frozenset()
        self._exact = exact
        """The plan is followed to the letter. See NOTE [ Barriers ]."""
        self._opaque = opaque
        """What is known of autograd Functions that launch unseen kernels, for all blocks of the model."""
        self._native = native
        """The tape with a native core; None: the Python tape runs."""
        self._reissue = reissue
        """Functional collectives may run again."""
        self._cut: Cut | None = None
        self._cut_shapes: Any = None
        """The argument shapes for which the cut is the smallest: for others it may hold more than plain training."""
        self._nested: frozenset[int] = frozenset()
        hand_out_parameters()

    @never_compile
    def run(self, block: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block's own forward, under an engine if this call needs one."""
        if not self.active or self.idle:
            return forward(block, *args, **kwargs)
        if not block.training:
            self.num_idle_calls += 1
            return forward(block, *args, **kwargs)
        inputs: list[Tensor] = []
        for a in (*args, *kwargs.values()):
            inputs += (a,) if isinstance(a, Tensor) else tensors(a)
        if not any(t.requires_grad for t in inputs) and not any(p.requires_grad for p in block.parameters()):
            self.num_without_gradient += 1
            return forward(block, *args, **kwargs)
        self._refuse(kwargs)
        if self.family.in_graphs:
            why = "the graph breaks inside it" if self.given_up else "it is not compiled"
            raise UnsupportedError(
                f"the plan keeps its budget in compiled blocks, and {self.path} runs in eager: {why}. Compile it as it "
                "was planned, or plan for blocks in eager: actmem.fit(..., compiled=False)."
            )
        if is_compiler_new():
            record_compiled_regions()
        if self.engine == "checkpoint":
            return self._run_twice(block, forward, args, kwargs)
        if not self.num_checked:
            return self._record(block, forward, args, kwargs, inputs, None)
        self.num_checked -= 1
        self.given_up |= getattr(block, "_compiled_call_impl", None) is not None
        self.idle = not self.num_checked and self.verdicts.keeps_everything
        self._nested = _fsdp_units(block)
        self._state_storages = self._state(block)
        if not sys.modules.keys().isdisjoint(IMPORTED):
            declare_libraries()
        opaque = self._opaque if self._opaque is not None and self._opaque.replay else None
        self.observation = Observation(self._state_storages, None if opaque is None else running_function)
        before = graph_breaks() if self.given_up else None
        out = self._record(block, forward, args, kwargs, inputs, self.observation)
        if before is not None:
            self.breaks += [reason for reason, count in graph_breaks().items() if count > before.get(reason, 0)]
        if opaque is not None and learn(opaque, self.observation):
            self.num_checked = max(self.num_checked, 1)  # the next call runs them as one operator each
        else:
            self._cut_program(self.observation, inputs)
        self._observed(self)
        return out

    def _record(
        self,
        block: nn.Module,
        forward: Any,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
        observation: Observation | None,
    ) -> Any:
        tracer = None if observation is None else Tracer(self.verdicts, reissue=self._reissue)
        if tracer is not None:
            self.decisions = tracer.rows
        # Where anything is compiled, compiled functions may run inside the block.
        kind: Any = Tape if self._native is None or has_compiled() else self._native
        tape = kind(
            tracer or self.verdicts,
            observation,
            inputs=inputs,
            trainable=lambda: _trainable_storages(block),
            cut=self._cut if self._cut is not None and self._cut_fits(inputs) else None,
            reissue=self._reissue,
            away=self._away(),
            exact=self._exact,
            places=Places(block) if observation is not None or self.verdicts.follows_modules else None,
            opaque=self._opaque,
        )
        try:
            with torch.autograd.graph.saved_tensors_hooks(tape.pack, unpack if kind is Tape else kind.unpack):
                if self._nested:
                    with _keeping_outputs(tape, block, self._nested), tape:
                        return forward(block, *args, **kwargs)
                with tape:
                    return forward(block, *args, **kwargs)
        except RuntimeError as error:
            if "don't yet support saved tensor hooks" in str(error):
                raise UnsupportedError(_functorch_message(self.path, "inside")) from error
            raise
        finally:
            tape.close()

    def _away(self) -> Away | None:
        if self._offloader is None or self._offload is None or not self.verdicts.offloads:
            return None
        return Away(
            self._offloader,
            min_bytes=self._offload.min_bytes,
            inputs=self.verdicts.offloads_inputs,
            state=self._state_storages,
            takes_from=self._offload.takes_from,
        )

    def _run_twice(self, block: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run under torch's checkpoint, which runs the forward a second time in the backward pass."""
        if self.verdicts.keeps_everything:
            return forward(block, *args, **kwargs)
        observed = self.num_checked > 0
        if observed:
            self.num_checked, self.decisions = self.num_checked - 1, []
        out = run_checkpointed(self.family, forward, block, args, kwargs, self.decisions if observed else None)
        if observed:
            self._observed(self)
        return out

    def _cut_program(self, observation: Observation, inputs: list[Tensor]) -> None:
        """Find the smallest cut of what ran. If there is one, the next call is observed too: it will hold less."""
        by_bytes = not self.verdicts.offloads and not (self._reissue and _communicates(observation.funcs))
        if self._cut is None and by_bytes and not self._exact:
            self._cut_shapes = _shapes(inputs)
            key = observation.signature()
            if key not in self._cuts:
                self._cuts[key] = smallest_cut(observation.rows, observation.funcs)
            self._cut = self._cuts[key]
            if self._cut is not None:
                self.num_checked = max(self.num_checked, 1)
        observation.forget_program()

    def _cut_fits(self, inputs: list[Tensor]) -> bool:
        # A checkpoint around the block counts what is saved, and wants the same number when it runs the block again.
        return self._cut_shapes == _shapes(inputs) and outer_hooks() is None

    def _refuse(self, kwargs: dict[str, Any]) -> None:
        if functorch_transform() == "Grad":
            raise UnsupportedError(_functorch_message(self.path, "around"))
        if self.engine == "checkpoint":
            for name in ("past_key_values", "past_key_value", "cache_params"):
                if kwargs.get(name) is not None:
                    raise UnsupportedError(
                        f"{self.path} is given {name}, a cache that its forward writes to, and torch's checkpoint "
                        "would run that forward twice. Leave engine='checkpoint' out (the tape runs it once), or call "
                        "the model with use_cache=False."
                    )


class SharedState:
    """What the blocks of a model have in common: its state, and the plan, some of whose names must match."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._named = frozenset(i for i, r in enumerate(plan.rules) if r.op or r.module or r.target)
        self._plan = plan
        self._logged: set[tuple[str, str]] = set()
        self._warned = False
        self._storages: dict[int, weakref.ref[Any]] = {}
        """The storages of the model's parameters and buffers, as they were when the first of `_asked` ran."""
        self._asked: set[int] = set()
        """The blocks that were observed since."""
        self.runners: tuple[BlockRunner, ...] = ()

    def state(self, block: nn.Module) -> frozenset[int]:
        """Return the storages of the model's parameters and buffers, for a block that is about to be observed.

        The whole model is read once for all blocks of a step, and the block itself each time: a library that shards a
        model may gather its parameters block by block, in new storages.
        """
        model = self._model()
        if model is None:
            return frozenset()
        if not self._asked or id(block) in self._asked:
            self._asked.clear()
            self._storages = _state_storages(model)
        self._asked.add(id(block))
        alive = {key for key, storage in self._storages.items() if storage() is not None}
        return frozenset(alive.union(_state_storages(block)))

    def _warn_of_uncompiled(self, runner: BlockRunner) -> None:
        """Warn where FlexAttention was seen as an operator: a compiled one shows only its kernels."""
        if not self._warned and any(row.op.startswith(_FLEX) for row in runner.decisions or ()):
            self._warned = True
            lost = " since torch.compile could not take in the whole block" if runner.given_up else ""
            warnings.warn(
                f"FlexAttention runs without compilation in {paths_of((runner.path,))}{lost}: it is slow, "
                "and holds all scores at once. Compile it by itself, and it stays compiled in any block: "
                "flex_attention = torch.compile(flex_attention).",
                stacklevel=2,
            )

    def log(self, decisions: list[Traced]) -> None:
        """Log what was decided, each operator and decision once."""
        log_once(decisions, self._plan.rules, self._logged)

    def called(self, runner: BlockRunner) -> None:
        """Log what was decided, and notice, when every block has run once, that none of the plan's names matched."""
        self.log(runner.decisions or [])
        self._warn_of_uncompiled(runner)
        if not self._named or any(s.decisions is None for s in self.runners):
            return
        if any(not self._named.isdisjoint(s.verdicts.matched) for s in self.runners):
            return
        seen = sorted({row.op for s in self.runners for row in s.decisions or ()})
        if not any(op in ops.GROUPS["compiled"] for op in seen):  # the report lists the rules that matched nothing
            raise ModeError(
                f"{self._plan.mode} matches nothing: no operator that ran in the blocks of this model is among "
                "its names. "
                f"Operators that ran: {', '.join(seen[:24])}{', ...' if len(seen) > 24 else ''}. Name one of "
                "these, or a group they belong to."
            )


def _state_storages(module: nn.Module) -> dict[int, weakref.ref[Any]]:
    """Return the storages of the parameters and buffers of a module."""
    found: dict[int, weakref.ref[Any]] = {}
    for tensor in (*parameters_of(module), *buffers_of(module)):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # as in `storages_of`
            storage = local(tensor).untyped_storage()
            found[storage_key(storage)] = weakref.ref(storage)
    return found


def _communicates(funcs: list[Any]) -> bool:
    """Return whether a program runs a collective that a replay may issue again."""
    found = (DESCRIBED.get(id(f)) for f in funcs)
    return any(operator is not None and operator.reissued for operator in found)


def _trainable_storages(block: nn.Module) -> frozenset[int]:
    return frozenset(storages_of([p for p in block.parameters() if p.requires_grad]))


def _shapes(inputs: list[Tensor]) -> list[Any]:
    return [t.shape for t in inputs if not t.is_nested]


def _functorch_message(path: str, where: str) -> str:
    return (
        f"torch.func.grad runs {where} {path}, and functorch does not let anything see what autograd saves there "
        "(torch.utils.checkpoint fails in the same place). Use torch.autograd.grad instead, or leave this block out: "
        "blocks='...'."
    )


def _fsdp_units(block: nn.Module) -> frozenset[int]:
    """Return the modules inside the block that FSDP shards on their own."""
    fsdp: Any = getattr(torch.distributed, "fsdp", None)
    if fsdp is None:
        return frozenset()
    kinds = tuple(
        k for k in (getattr(fsdp, "FSDPModule", None), getattr(fsdp, "FullyShardedDataParallel", None)) if k is not None
    )
    return frozenset(id(m) for m in block.modules() if m is not block and isinstance(m, kinds))


@contextlib.contextmanager
def _keeping_outputs(tape: Tape, block: nn.Module, units: frozenset[int]) -> Generator[None]:
    """Have a tape hold what these modules return. See `Tape.keep_outputs`."""

    def keep(_: nn.Module, __: Any, out: Any) -> None:
        if recording() is tape:  # other threads run modules too
            tape.keep_outputs(out)

    handles = [m.register_forward_hook(keep, prepend=True) for m in block.modules() if id(m) in units]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def local(tensor: Tensor) -> Tensor:
    """Return the part of a distributed tensor that lies on this rank, or the tensor itself if it is not distributed."""
    return getattr(tensor, "_local_tensor", tensor)
