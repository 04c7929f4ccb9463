"""A compiled step under a plan, run on fake tensors or for real: what is alive, block by block.

NOTE [ The compiled step ]
In a compiled graph the partitioner decides what is saved, and the compiler when a buffer is made and freed. Both are
asked, not imitated: the model is compiled under the plan as training will compile it, and its graphs run on fake
tensors, operator by operator. inductor's graphs are Python code that allocates buffers, calls kernels and frees
buffers; that code runs too, with kernels that do nothing. So the bytes are those of the graphs that training runs.

A fake tensor does not show what a kernel takes for itself. Where the plan is for a CPU, each kernel is asked (NOTE
[ Workspaces on fakes ]). A real step shows it too: it is run on the model itself, and the bytes are read from the
allocator's own log.

Where each block is compiled by itself, a graph depends on what the plan says to its own block alone. So the step is cut
into sections: the forward and the backward of each block call, and what lies between them. Each section has the most
bytes above what is alive where it begins, and what it leaves. The sections of different runs can then be put together
into the step of a plan that never ran: see `planner/compiled_ladder.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx.node import map_arg  # pyright: ignore[reportUnknownVariableType]

from actmem.collector import uncollected
from actmem.compilercompat import Compiler, compile_with, many_graphs, on_partition, without_kernels
from actmem.engine import BlockFamily, Compilation, Verdicts, describe, resolve, tensors
from actmem.errors import UnsupportedError
from actmem.log_entries import OperatorEntry
from actmem.measuring import ByteLedger, flop_formula
from actmem.plan import Plan
from actmem.profiles import Cost
from actmem.profiling.chronicle import Chronicle
from actmem.profiling.complaints import quiet
from actmem.profiling.examples import loss_of
from actmem.profiling.fake_model import fake_batch, fake_copy
from actmem.profiling.kernel_workspaces import KernelWorkspaces
from actmem.profiling.restored_state import Restored
from actmem.structure import Block, find_roles, layer_type
from actmem.torchcompat import (
    FakeTensorMode,
    allocation_mark,
    checkpoint,
    log_allocations,
    logged_allocations,
    named_modules,
    never_compile,
    num_bytes,
)

__all__ = ["CompiledRun", "CompiledStep", "Section"]

OUTSIDE = -1
"""The layer of what runs outside the blocks."""


@dataclass(frozen=True)
class Section:
    """A part of a step: the forward or the backward of one block call, or what lies between two of them."""

    layer: int
    """Index of the block call; -1 outside."""
    top_bytes: int
    """The most that is alive in it, above what is alive where it begins."""
    net_bytes: int
    """What is alive where it ends, above the same."""
    peak_op: str
    """The operator at its top."""


@dataclass(frozen=True)
class CompiledRun:
    """What one step did."""

    start_bytes: int
    """Bytes alive when it begins: parameters, buffers, gradients that stay."""
    sections: tuple[Section, ...]
    costs: dict[str, Counter[Cost]]
    """Path of a block -> the operators of its graphs, and how often each runs. All of them under "" if the whole model
    is compiled."""
    joint: dict[str, Counter[Cost]]
    """The same of its joint graphs: every operator once, as if nothing were recomputed."""
    paths: tuple[str, ...]
    """The path of each block call."""

    @property
    def peak(self) -> tuple[int, str, int]:
        """The most bytes alive, the operator at which they are, and its layer."""
        live = most = self.start_bytes
        op, layer = "", OUTSIDE
        for section in self.sections:
            if live + section.top_bytes > most:
                most, op, layer = live + section.top_bytes, section.peak_op, section.layer
            live += section.net_bytes
        return most, op, layer


class CompiledStep:
    """The compiled step of a model, to be run under any plan. A context manager: the model is as before on leaving."""

    def __init__(
        self,
        model: nn.Module,
        found: Sequence[Block],
        example: Any,
        loss: Callable[[Any], Tensor] | None,
        compiler: Compiler,
        *,
        whole: bool,
        fake: bool,
        accumulates: bool,
        kernels: KernelWorkspaces | None = None,
    ) -> None:
        """Prepare a step.

        Args:
            model: the model.
            found: its blocks.
            example: a batch, as for `profile`.
            loss: a function of the output, as for `profile`.
            compiler: how it is compiled.
            whole: whether the model is one graph, and not each of its blocks.
            fake: run it on tensors without bytes, on a copy. Otherwise for real, on the model itself.
            accumulates: whether gradients exist from the start.
            kernels: what knows the workspaces of kernels in a fake step; without it, kernels take nothing.
        """
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._device = torch.device("cpu") if device.type == "meta" else device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
        self._model, self._batch = model, example
        self._blocks = tuple(found)
        if self._mode is not None:
            self._model = fake_copy(model, self._mode, self._device)
            self._batch = fake_batch(example, self._mode, self._device)
            self._blocks = tuple(replace(b, module=self._model.get_submodule(b.path)) for b in found)
        self._loss, self._compiler, self._whole, self._accumulates = loss, compiler, whole, accumulates
        self._kernels = kernels
        self._roles = find_roles(self._model, self._blocks)
        self._compilation = Compilation({b.path: b.module for b in self._blocks})
        self._originals = [type(b.module) for b in self._blocks]
        self._families: dict[Any, BlockFamily] = {}
        self._classes: dict[Any, type] = {}
        self._costs: dict[Any, tuple[Counter[Cost], Counter[Cost]]] = {}
        """What was partitioned, by who was being called: the class of a block, or all classes of the model."""
        self._caller: Any = None
        self._watch: _Watch | None = None
        self._call = compile_with(cast(FunctionType, _called), compiler)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> CompiledStep:
        enter = self._stack.enter_context
        if self._mode is not None:
            for context in (quiet(), uncollected(), self._mode, without_kernels()):
                enter(context)
        enter(many_graphs())
        enter(on_partition(self._partitioned))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, plan: Plan) -> CompiledRun:
        """Run the step under a plan: first to compile what is new, then to look.

        Raises:
            UnsupportedError: a block cannot be traced whole.
        """
        num_known = len(self._classes)
        classes = [self._class(n, v) for n, v in enumerate(self._verdicts(plan))]
        is_new = len(self._classes) > num_known or self._whole or self._mode is None
        with self._under(classes), contextlib.ExitStack() as stack:
            if self._mode is None:
                stack.enter_context(Restored(self._model, self._batch))
            parameters = [p for p in self._model.parameters() if p.requires_grad]
            before = [p.grad for p in parameters]
            try:
                if is_new:
                    self._give_gradients(parameters)
                    self._step()
                self._give_gradients(parameters)
                watch = _FakeWatch(self._device, self._kernels) if self._mode is not None else _RealWatch(self._device)
                for p in self._model.parameters():
                    watch.ledger.add_base(p, "parameters")
                    if p.grad is not None:
                        watch.ledger.add_base(p.grad, "gradients")
                for b in self._model.buffers():
                    watch.ledger.add_base(b, "buffers")
                watch.ledger.begin()
                self._watch = watch
                start_bytes = watch.ledger.main.live_bytes
                with watch.watching():
                    self._step()
            finally:
                self._watch = None
                for p, gradient in zip(parameters, before, strict=True):
                    p.grad = gradient
        callers = (
            {"": tuple(classes)} if self._whole else dict(zip((b.path for b in self._blocks), classes, strict=True))
        )
        costs = {path: self._costs.get(caller, (Counter[Cost](), Counter[Cost]())) for path, caller in callers.items()}
        return CompiledRun(
            start_bytes,
            tuple(watch.sections()),
            {path: both[0] for path, both in costs.items()},
            {path: both[1] for path, both in costs.items()},
            tuple(self._blocks[n].path for n in watch.called),
        )

    def _step(self) -> None:
        call: Any = self._model
        if self._whole:
            self._caller = tuple(type(b.module) for b in self._blocks)
            call = self._compiled_model
        batch = self._batch
        out: Any = call(**batch) if isinstance(batch, dict) else call(*batch)
        loss_of(out, self._loss).backward()  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped

    def _compiled_model(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._model, *args, **kwargs)

    def _give_gradients(self, parameters: Sequence[Tensor]) -> None:
        for p in parameters:
            p.grad = torch.zeros_like(p) if self._accumulates else None

    # ------------------------------------------------------------ blocks under a plan

    def _verdicts(self, plan: Plan) -> list[Verdicts]:
        return [
            resolve(
                plan.rules,
                layer=block.index,
                num_layers=len(self._blocks),
                modules={path: f"{block.path}.{path}".strip(".") for path, _ in named_modules(block.module)},
                roles=roles,
                layer_type=layer_type(block.module),
            )
            for block, roles in zip(self._blocks, self._roles, strict=True)
        ]

    def _class(self, n: int, verdicts: Verdicts) -> type:
        """Return the class of a block: one, and so one graph, for all blocks of a kind to which the plan says this."""
        rules, attention = verdicts.key
        said = tuple(replace(rule, index=0) for rule in rules), attention  # the same rules, wherever they are listed
        family = self._families.get(said)
        if family is None:
            family = self._families[said] = BlockFamily(verdicts, self._compilation, traceable=True)
        key = self._originals[n], self._blocks[n].kind, family
        if key not in self._classes:
            self._classes[key] = _planned(self._originals[n], family)
        return self._classes[key]

    @contextlib.contextmanager
    def _under(self, classes: Sequence[type]) -> Generator[None]:
        own = [vars(b.module).get("_compiled_call_impl") for b in self._blocks]
        try:
            for n, (block, kind) in enumerate(zip(self._blocks, classes, strict=True)):
                block.module.__class__ = kind
                if not self._whole:
                    vars(block.module)["_compiled_call_impl"] = self._called_block(n, block.module)
            yield
        finally:
            for block, kind, compiled in zip(self._blocks, self._originals, own, strict=True):
                block.module.__class__ = kind
                vars(block.module).pop("_compiled_call_impl", None)
                if compiled is not None:
                    vars(block.module)["_compiled_call_impl"] = compiled

    def _called_block(self, n: int, block: nn.Module) -> Callable[..., Any]:
        inner: Any = block

        @never_compile
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner._call_impl(*args, **kwargs)
            self._caller = type(block)
            watch = self._watch
            if watch is None:
                return self._call(block, *args, **kwargs)
            layer = len(watch.called)
            watch.called.append(n)
            watch.mark(layer)
            out = self._call(block, *args, **kwargs)
            watch.mark(OUTSIDE)
            first = next((t for t in tensors(out) if t.requires_grad), None)
            if first is not None:
                first.register_hook(functools.partial(_begin, watch, layer))  # pyright: ignore[reportUnknownMemberType]
            return out

        return call

    def _partitioned(self, joint: Any, forward: Any, backward: Any) -> None:
        both = self._costs.setdefault(self._caller, (Counter[Cost](), Counter[Cost]()))
        both[0].update([*_costs(forward), *_costs(backward)])
        both[1].update(_costs(joint))


def _begin(watch: _Watch, layer: int, _: Tensor) -> None:
    watch.mark(layer)


def _called(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a module past its own compiled form."""
    return module._call_impl(*args, **kwargs)


def _planned(original: Any, family: BlockFamily) -> type:
    """Return a subclass whose forward puts the plan's decisions into the graph, as that of an applied block does."""
    context, everything = family.traced, family.verdicts_keep_everything
    is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_grad_enabled():
            return original.forward(self, *args, **kwargs)
        if not is_compiling():
            return _refuse(original)
        if everything:
            return original.forward(self, *args, **kwargs)
        try:  # a graph break in here makes Dynamo give up the frame
            return checkpoint(original.forward, self, *args, use_reentrant=False, context_fn=context, **kwargs)
        finally:
            pass

    return type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})


@never_compile
def _refuse(original: type) -> None:
    raise UnsupportedError(
        f"the graph breaks inside {original.__name__}, and a budget is planned for blocks that are one graph each. "
        "TORCH_LOGS=graph_breaks shows where. Plan for eager blocks, and keep them out of graphs: "
        "plan = actmem.fit(..., compiled=False), actmem.apply(model, plan, engine='tape')."
    )


def _costs(graph: Any) -> Generator[Cost]:
    """List the operators of a graph that compute something."""
    nodes: Sequence[Any] = graph.graph.nodes
    for node in nodes:
        if node.op != "call_function" or not hasattr(node.target, "_schema"):
            continue
        operator = describe(node.target)
        if operator.view:
            continue
        args, kwargs = _values(node.args), _values(node.kwargs)
        out = node.meta.get("val")
        formula = flop_formula(node.target)
        seen = [*tensors(out), *tensors(args, kwargs)]
        moved = sum(map(num_bytes, seen))
        computes_in = next((str(t.dtype).removeprefix("torch.") for t in seen if t.is_floating_point()), "")
        flops = 0 if formula is None else int(formula(args, kwargs, out))
        yield Cost(operator.name, flops, moved, computes_in)


def _values(given: Any) -> Any:
    """Put the values that nodes stand for in their place."""
    found: Any = map_arg(given, _value)
    return found


def _value(node: Any) -> Any:
    return node.meta.get("val")


# ---------------------------------------------------------------- watching a step


class _Watch:
    """Sees how many bytes are alive, and where sections begin."""

    def __init__(self, ledger: ByteLedger) -> None:
        self.ledger = ledger
        self.called: list[int] = []
        """Which block each block call is of."""
        self._layers: list[int] = []
        """The layer of each section, from the second on."""
        self._start_bytes = 0

    def mark(self, layer: int) -> None:
        """Begin a section."""
        raise NotImplementedError

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Watch what runs within."""
        raise NotImplementedError

    def _moments(self) -> Generator[tuple[int, int, str] | int]:
        """Yield what is alive after each operator, the most while it ran and its name; at a section, what is alive."""
        raise NotImplementedError

    def sections(self) -> Generator[Section]:
        """Cut the step into sections."""
        layers = iter(self._layers)
        layer, begin = OUTSIDE, self._start_bytes
        now, top, op = begin, begin, ""
        for moment in self._moments():
            if isinstance(moment, tuple):
                now, most, its_op = moment
                if most > top:
                    top, op = most, its_op
                continue
            yield Section(layer, top - begin, moment - begin, op)
            layer, begin, top, now, op = next(layers), moment, moment, moment, ""
        yield Section(layer, top - begin, now - begin, op)


class _FakeWatch(_Watch):
    def __init__(self, device: torch.device, kernels: KernelWorkspaces | None) -> None:
        self._chronicle = Chronicle(device, kernels=kernels)
        super().__init__(self._chronicle.ledger)
        self._marks: list[tuple[int, int]] = []
        """Position in the log and bytes alive, where each section begins."""

    def mark(self, layer: int) -> None:
        self._layers.append(layer)
        self._marks.append((len(self._chronicle.log), self._chronicle.live_bytes))

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        self._start_bytes = self._chronicle.live_bytes
        with self._chronicle:
            yield

    def _moments(self) -> Generator[tuple[int, int, str] | int]:
        costs = self._chronicle.costs
        marks = iter([*self._marks, (-1, 0)])
        at, live_bytes = next(marks)
        for position, entry in enumerate(self._chronicle.log):
            while at == position:
                yield live_bytes
                at, live_bytes = next(marks)
            if isinstance(entry, OperatorEntry):
                yield entry.live_bytes, entry.live_bytes + entry.workspace_bytes, costs[entry.cost].op
        while at >= 0:
            yield live_bytes
            at, live_bytes = next(marks)


_SECTION = "actmem: a section begins"


class _RealWatch(_Watch):
    def __init__(self, device: torch.device) -> None:
        super().__init__(ByteLedger(device))
        self._device = device
        self._mark = allocation_mark(_SECTION)
        self._changes: list[int | str] = []

    def mark(self, layer: int) -> None:
        self._layers.append(layer)
        with self._mark:
            pass

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        self._start_bytes = self.ledger.main.live_bytes
        if self._device.type != "cpu" or not log_allocations():
            raise UnsupportedError(
                "fake = False reads the CPU allocator's log, which is not to be had here: the model is on another "
                "device, or another profiler runs. Leave fake=False out."
            )
        try:
            yield
        finally:
            self._changes = logged_allocations()

    def _moments(self) -> Generator[tuple[int, int, str] | int]:
        live_bytes = self._start_bytes
        for change in self._changes:
            if isinstance(change, str):
                yield live_bytes
            else:
                live_bytes += change
                yield live_bytes, live_bytes, "an allocation"
