"""The other engine: torch's own checkpoint, with the plan as its policy.

NOTE [ Under torch.compile ]
There is no eager tape in a compiled graph. `torch.utils.checkpoint` is a higher-order operator there: while the graph
is traced, a policy is asked about every operator of the block, and its answer is written on the node for the
partitioner. The policy here asks the same `Verdicts` as the tape does, at the same address, which it reads from the
module stack of the node. So the plan is the same, compiled or not.

The policy is asked again each time the graph is traced (`context_fn` without a cache key keeps such graphs out of
torch's cache on disk), so that a plan never runs a graph that was partitioned for another one.

Where a block cannot be traced whole (a graph break inside), Dynamo gives up on the frame and runs it as it is; then
`torch.compiler.is_compiling()` is False in it, and the tape takes the block. Nobody has to choose. What Dynamo makes of
the pieces of the block runs compiled, and the tape records it (NOTE [ Compiled regions ]). A plan that offloads has the
frame given up in the same way: only the tape sends values away.

In eager (`engine="checkpoint"`) the same answers drive torch's checkpoint, which runs the block's Python a second time,
with all that this entails. Whatever can be restored for that second run is restored: random state and autocast by
torch, the choice of attention backend and the numerics flags by this file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from actmem.compilercompat import saved_by_partitioner
from actmem.decisions import Decision, Reason
from actmem.engine.holding_rules import kept_by
from actmem.engine.observation import Places
from actmem.engine.operators import Operator, describe
from actmem.engine.second_forward import Keeping, Repeating
from actmem.engine.verdicts import Traced, Tracer, Verdicts
from actmem.plan import Plan
from actmem.torchcompat import (
    attention_backends,
    checkpoint,
    module_stack,
    named_modules,
    num_bytes,
    numerics,
    restore_numerics,
    selective_contexts,
    sizes,
    with_attention_backends,
)

__all__ = ["BlockFamily", "Compilation", "KeptValues", "run_checkpointed"]

SAVED_WHATEVER = frozenset({Reason.ROUTING, Reason.COLLECTIVE, Reason.TRANSFER, Reason.UNREPEATABLE})
"""Reasons for which the tape never replays an operator that hold here too: a second run could give another result, or
speak to other processes again."""

_ASKED = {
    CheckpointPolicy.MUST_SAVE: Decision.SAVE,
    CheckpointPolicy.PREFER_SAVE: Decision.SAVE,
    CheckpointPolicy.MUST_RECOMPUTE: Decision.RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: "either",
}

IGNORED_NAMESPACES = ("profiler.", "fsdp.")
"""Operators that are not part of the computation, or that must run again wherever it does."""


@dataclass(frozen=True)
class KeptValues:
    """One value that a compiled graph saves for its backward."""

    module: str
    """Path of the module inside its block; "" is the block's own forward, or outside the blocks."""
    op: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    asked: str
    """What the plan says: `save`, `recompute`, `either` (a view or a write, left to the compiler), or "" outside the
    blocks."""


class Compilation:
    """What was compiled for one applied model: what the plan asked for, and what the partitioner made of it."""

    def __init__(self, blocks: dict[str, nn.Module], traced: Callable[[list[Traced]], None] | None = None) -> None:
        self._traced = traced
        """Called with the decisions of each graph that was partitioned."""
        self._places = {
            str(id(module)): (path, inside) for path, block in blocks.items() for inside, module in named_modules(block)
        }
        """Identity of a module -> path of its block and its path in there, as the module stack of a node has it."""
        self.asked: dict[str, list[Traced]] = {}
        """Block path -> decisions, in the order of the traced graph."""
        self._asking: list[str] = []
        """Blocks that were asked about since the latest graph was partitioned."""
        self.graphs: list[tuple[tuple[str, ...], tuple[KeptValues, ...]]] = []
        """For each graph that was partitioned: its blocks, and what it saves."""

    def asks(self, block: str, decisions: list[Traced]) -> None:
        """Note that a block is being traced. Where it is traced again, only the latest decisions count."""
        self.asked[block] = decisions
        self._asking.append(block)

    def place(self, stack: dict[str, Any] | None) -> tuple[str, str]:
        """Find block and module of an operator from its module stack, innermost first."""
        for key in reversed(list(stack or ())):
            found = self._places.get(key.partition("@")[0])
            if found is not None:
                return found
        return "", ""

    def partitioned(self, nodes: list[Any]) -> None:
        """Note what a graph saves."""
        kept = [self._kept(n) for n in nodes if n.op == "call_function" and isinstance(n.meta.get("val"), torch.Tensor)]
        self.graphs.append((tuple(dict.fromkeys(self._asking)), tuple(kept)))
        if self._traced is not None:
            self._traced([row for block in dict.fromkeys(self._asking) for row in self.asked[block]])
        self._asking.clear()

    def _kept(self, node: Any) -> KeptValues:
        block, module = self.place(node.meta.get("nn_module_stack"))
        value, tag = node.meta["val"], node.meta.get("recompute")
        op = str(node.target)
        asked = _ASKED.get(tag, "")
        # Between two blocks the compiler itself changes the tag to save. What the plan said there is in the trace.
        said = {row.decision for row in self.asked.get(block, ()) if (row.module, row.op) == (module, op)}
        if len(said) == 1:
            (asked,) = said
        dtype = str(value.dtype).removeprefix("torch.")
        return KeptValues(module, op, sizes(value), dtype, num_bytes(value), asked)


class BlockFamily:
    """The blocks of one class for which the plan says the same: they share one class, and one compiled graph."""

    def __init__(
        self,
        verdicts: Verdicts,
        compilation: Compilation,
        *,
        traceable: bool,
        plan: Plan | None = None,
    ) -> None:
        self.verdicts = verdicts
        self.traceable = traceable
        """Whether a graph may include these blocks; otherwise they stay outside, and the tape runs them."""
        self.verdicts_keep_everything = verdicts.keeps_everything
        predicted = None if plan is None else plan.predicted
        in_graphs = predicted is not None and bool(predicted.compiled)
        self.refused = traceable and plan is not None and plan.exact and not in_graphs
        """Whether the plan is for a budget that is kept in eager, and not by compiled graphs."""
        self.in_graphs = in_graphs
        """Whether the plan is for a budget that is kept by compiled graphs, and not in eager."""
        self.offloads = verdicts.offloads
        """Whether values leave at the border of a graph: the tape runs the block, and its pieces are compiled."""
        self.names_parts = verdicts.looks_into_modules
        """Whether graphs inside a block must end where a module does that the plan names."""
        self.active = True
        self.compilation = compilation
        self.needs_answers = not verdicts.recomputes_everything
        """Whether something must be put back in a second run: it may be saved, or a router's choice."""

        last = verdicts.key[0][-1]
        self._rest = last.index if last.static and not last.ops else -1
        """The rule for all that no other rule names. Saving the rest means what it does without a plan: in a graph the
        partitioner may then recompute what is cheap, and forbidding it would hold more than compiled plain training."""

        def traced() -> tuple[Any, Any]:
            return self._traced()

        self.traced = traced
        """The `context_fn` for graphs. A closure, because Dynamo takes no bound method."""

    def _traced(self) -> tuple[Any, Any]:
        tracer, counts = Tracer(self.verdicts), self.verdicts.new_counts()
        owner = ""
        saved_by_partitioner(self.compilation.partitioned)

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            nonlocal owner
            block, module = self.compilation.place(module_stack())
            if block and not owner:
                owner = block
                self.compilation.asks(owner, tracer.rows)
            operator = describe(op)
            if operator.writes and not operator.name.startswith(IGNORED_NAMESPACES):
                # In a graph it writes to nothing, and its result can be held like any value.
                decision = tracer.decide(operator, module, counts, ctx.op_output)
                saves = decision is not Decision.RECOMPUTE
                return CheckpointPolicy.PREFER_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE
            why = _answer(operator, module, tracer, counts, ctx.op_output, args, kwargs)
            if why is Reason.SAVED and self.verdicts.latest == self._rest:
                return CheckpointPolicy.PREFER_SAVE
            if why is not None:
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE if operator.view else CheckpointPolicy.MUST_RECOMPUTE

        return selective_contexts(policy)


def run_checkpointed(
    family: BlockFamily,
    plain: Any,
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    decisions: list[Traced] | None,
) -> Any:
    """Run a block's forward in eager under torch's checkpoint, and append what was decided to `decisions`."""
    backends, flags = attention_backends(), numerics()

    def contexts() -> tuple[Any, Any]:
        def restored() -> Any:
            return _restored(backends, flags)

        if not family.needs_answers:
            return contextlib.nullcontext(), _Contexts(restored)
        places, counts = Places(block), family.verdicts.new_counts()
        deciding: Verdicts | Tracer = family.verdicts
        if decisions is not None:
            deciding = Tracer(family.verdicts)
            deciding.rows = decisions

        def answer(operator: Operator, args: Any, kwargs: Any, out: Any) -> Reason | None:
            return _answer(operator, places.now(), deciding, counts, out, args, kwargs)

        keeping = Keeping(answer)
        first = _Contexts(lambda: keeping)
        return first, _Contexts(restored, lambda: Repeating(keeping.kept))

    def forward(*args: Any) -> Any:
        return plain(block, *args, **kwargs)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts)


def _answer(
    operator: Operator, address: str, deciding: Verdicts | Tracer, counts: Any, out: Any, args: Any, kwargs: Any
) -> Reason | None:
    """Return why the result of an operator is kept; None to run it again, as what writes always is."""
    if operator.view or operator.writes or operator.name.startswith(IGNORED_NAMESPACES):
        return None
    decision = deciding.decide(operator, address, counts, out)
    first = out if isinstance(out, torch.Tensor) else None
    never = operator.forbids(args, kwargs, first)
    return never if never in SAVED_WHATEVER else kept_by(decision)


class _Contexts:
    """Enter freshly made contexts each time: a graph that is kept is run again more than once."""

    def __init__(self, *make: Callable[[], Any]) -> None:
        self._make = make
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            for make in self._make:
                stack.enter_context(make())
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


@contextlib.contextmanager
def _restored(backends: Any, flags: tuple[Any, ...]) -> Generator[None]:
    """Run code under the attention backends and numerics flags that were in force in the forward pass."""
    before = numerics()
    restore_numerics(flags)
    try:
        with with_attention_backends(backends):
            yield
    finally:
        restore_numerics(before)
