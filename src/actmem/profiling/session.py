"""One step in progress: the blocks are wrapped, every operator is logged, and a profile comes out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from actmem.collector import uncollected
from actmem.engine import record_compiled_regions, storages_of, tensors
from actmem.errors import UnsupportedError
from actmem.log_entries import Entered, Left, PhaseBegan, StorageDied
from actmem.measuring import watching_resizes
from actmem.profiles import COPY, Call, Cost, Layer, Profile, Value
from actmem.profiling.chronicle import Accumulated, BackwardBegan, BackwardEnded, Chronicle, changes, settled
from actmem.profiling.complaints import for_real
from actmem.profiling.equal_blocks import Skipped, Template, expand, numbers_of, signature, skip
from actmem.profiling.examples import loss_of
from actmem.profiling.phantom import Recorded, record
from actmem.profiling.pipeline_actions import actions_in
from actmem.profiling.reads import Reads, noted
from actmem.structure import Block, buffers_of, find_roles, layer_type, named_modules, parameters_of

__all__ = ["Session"]


class _NotAloneError(RuntimeError):
    """A block would have to be run that another one has represented until now."""


class Session:
    """One step in progress."""

    def __init__(
        self,
        model: nn.Module,
        found: Sequence[Block],
        device: torch.device,
        *,
        accumulates: bool,
        least_seconds: dict[Hashable, float] | None = None,
        finds_workspaces: bool = False,
        identities: dict[str, Any] | None = None,
        original: nn.Module | None = None,
        chronicle: Chronicle | None = None,
    ) -> None:
        """Prepare a step.

        Args:
            model: the model that is run; equal blocks may be the same module.
            found: its blocks.
            device: the device it claims to be on.
            accumulates: whether gradients exist from the start.
            least_seconds: where to record how long operators take, if they are timed.
            finds_workspaces: whether to find out what kernels allocate for themselves, where that can be seen.
            identities: path -> a key that is equal for blocks that do the same, if they need not all be run.
            original: the model itself, if another one is run in its place.
            chronicle: what keeps the log, if it should record more than operators.
        """
        record_compiled_regions()
        self._model, self._found, self._device = model, found, device
        self._original = original or model
        self._queues: dict[int, list[Block]] = {}
        """The blocks that a module stands for, in the order in which they are called."""
        for block in found:
            self._queues.setdefault(id(block.module), []).append(block)
        self._num_calls: dict[int, int] = {}
        self._accumulates = accumulates
        self._chronicle = (
            Chronicle(device, least_seconds=least_seconds, finds_workspaces=finds_workspaces)
            if chronicle is None
            else chronicle
        )
        self._blocks: list[Block] = []
        """The block of each call."""
        self._calls: dict[int, tuple[Any, Any, Any, int, Any, Recorded]] = {}
        """What each call that was run made, and the bytes and shapes of its arguments."""
        self._state = frozenset(storages_of([*model.parameters(), *model.buffers()]))
        self._gradients = 0
        self._base: list[tuple[int, int, str]] = []
        """Its storages: number, bytes and role."""
        self._carried: tuple[tuple[int, int], ...] = ()
        self._stock: dict[str, int] = {}
        """Bytes alive when a step of the user's own loop begins, by role."""
        self.unused: frozenset[str] = frozenset()
        """Names of the parameters that could have received a gradient but did not: an optimizer has no state for them.
        A parameter inside a block that no operator has read is not among them: the next batch may be routed to it."""
        self._templates: dict[Any, list[Template]] = {}
        self._skipped: list[Skipped] = []
        self._stale: set[str] = set()
        """Blocks that would have changed something in themselves if they had been run."""
        self._identities = identities or {}
        self._owners: dict[int, tuple[int, str]] = {}
        """id of a parameter -> the block call whose module has it, -1 for none, and its name there."""

    def run(self, example: Any, loss: Callable[[Any], Tensor] | None) -> None:
        """Run forward and backward."""
        ledger = self._chronicle.ledger
        for p in self._model.parameters():
            ledger.add_base(p, "parameters")
        for b in self._model.buffers():
            ledger.add_base(b, "buffers")
        before = [(p, p.grad) for p in self._model.parameters()]
        for p, _ in before:
            p.grad = torch.zeros_like(p) if self._accumulates and p.requires_grad else None
            if p.grad is not None:
                ledger.add_base(p.grad, "gradients")
        ledger.main.live_bytes += self._uncopied_bytes()
        ledger.begin()
        used: set[int] = set()

        def use(p: Tensor) -> None:
            used.add(id(p))
            self._note_accumulated(p)

        hooks: list[Any] = [
            p.register_post_accumulate_grad_hook(use)  # pyright: ignore[reportUnknownMemberType]
            for p in self._model.parameters()
            if p.requires_grad
        ]
        try:
            with self._watching():
                out: Any = self._model(**example) if isinstance(example, dict) else self._model(*example)
                value = loss_of(out, loss)
                self._chronicle.note(PhaseBegan("backward", self._chronicle.live_bytes))
                value.backward()  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
                self._chronicle.note(PhaseBegan("end", self._chronicle.live_bytes))
                del out, value
            inside = {id(p) for m in {id(b.module): b.module for b in self._found}.values() for p in parameters_of(m)}
            self.unused = frozenset(
                name
                for name, p in self._model.named_parameters()
                if p.requires_grad and id(p) not in used and (id(p) not in inside or self._chronicle.has_read(p))
            )
            self._gradients = sum(p.grad.nbytes for p in self._model.parameters() if p.grad is not None)
        finally:
            for hook in hooks:
                hook.remove()
            for p, grad in before:
                p.grad = grad

    def _note_accumulated(self, p: Tensor) -> None:
        """Note that the gradient of a parameter is complete."""
        if not self._owners:
            for name, parameter in self._model.named_parameters():
                self._owners[id(parameter)] = -1, name
            shared: set[int] = set()
            for layer in self._calls:
                for name, parameter in self._blocks[layer].module.named_parameters():
                    known = self._owners[id(parameter)][0]
                    if known >= 0 and self._blocks[known].module is not self._blocks[layer].module:
                        shared.add(id(parameter))
                    elif known < 0 and id(parameter) not in shared:
                        self._owners[id(parameter)] = layer, name
            for name, parameter in self._model.named_parameters():
                if id(parameter) in shared:
                    self._owners[id(parameter)] = -1, name
        layer, name = self._owners[id(p)]
        numbers = self._chronicle.ledger.numbers_of([(p.grad, "")] if p.grad is not None else [])
        for storage in numbers.get("", ()):
            self._chronicle.note(Accumulated(layer, name, storage, self._chronicle.live_bytes))

    def run_step(self, step: Callable[[], object], holdings: Callable[[], Iterable[tuple[Tensor, str]]]) -> None:
        """Run a step of the user's own loop.

        Args:
            step: the step.
            holdings: returns the counted tensors that there are, each with its role.
        """
        ledger = self._chronicle.ledger
        for tensor, role in holdings():
            before_bytes = ledger.main.live_bytes
            ledger.add_base(tensor, role)
            self._stock[role] = self._stock.get(role, 0) + ledger.main.live_bytes - before_bytes
            del tensor  # the step may replace it, and the last one would live on here
        self._base = ledger.stock()
        ledger.begin()
        before = ledger.numbers_of(holdings())
        with self._watching():
            step()
            after = ledger.numbers_of(holdings())
        self._carried = tuple(
            pair
            for role, numbers in before.items()
            if len(numbers) == len(after.get(role, ()))
            for pair in zip(numbers, after[role], strict=True)
            if pair[0] != pair[1]
        )

    @contextlib.contextmanager
    def _watching(self) -> Generator[None]:
        """Log what runs, and what the blocks do."""
        own = {id(b.module): vars(b.module).get("forward") for b in self._found}
        for queue in self._queues.values():
            self._wrap(queue)
        try:
            with watching_resizes(self._chronicle.ledger.resized), self._chronicle:
                yield
            self._chronicle.ledger.ends = True
        finally:
            for block in self._found:
                vars(block.module).pop("forward", None)
                if own[id(block.module)] is not None:
                    vars(block.module)["forward"] = own[id(block.module)]
        if not self._blocks:
            raise UnsupportedError(
                f"none of the {len(self._found)} blocks, {self._found[0].path} and so on, ran in the profiled "
                "step. Either the model does not call them, or its forward was replaced by a function that holds "
                "the original model. In the first case, name the blocks that it calls: blocks='...'; in the "
                f"second, profile a real step: {for_real()}."
            )

    @property
    def has_skipped(self) -> bool:
        """Whether a block was not run, or could not be."""
        return bool(self._skipped) or any(len(queue) > 1 for queue in self._queues.values())

    def mark(self, kind: type[BackwardBegan | BackwardEnded], layer: int) -> None:
        """Note that the gradient of a block's output, or of its input, is complete.

        One tensor may be both, and then the block that received it ends before the block that returned it begins.
        """
        self._chronicle.note(kind(layer, self._chronicle.live_bytes))
        log = self._chronicle.log
        if kind is BackwardEnded and len(log) > 1 and isinstance(log[-2], BackwardBegan):
            log[-2:] = log[-1], log[-2]

    def _uncopied_bytes(self) -> int:
        """Return the bytes of the original that the copy does not have, because equal blocks share a module."""
        if self._original is self._model:
            return 0
        parameters, buffers = self._originals
        whole = sum(t.nbytes for t in (*parameters, *buffers))
        copied = sum(t.nbytes for t in (*parameters_of(self._model), *buffers_of(self._model)))
        if self._accumulates:
            whole += sum(p.nbytes for p in parameters if p.requires_grad)
            copied += sum(p.nbytes for p in self._model.parameters() if p.requires_grad)
        return whole - copied

    @cached_property
    def _originals(self) -> tuple[list[nn.Parameter], list[Tensor]]:
        """The parameters and buffers of the model itself: a large one has thousands."""
        return parameters_of(self._original), buffers_of(self._original)

    def _wrap(self, queue: list[Block]) -> None:
        module, plain = queue[0].module, queue[0].module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            layer, nth = len(self._blocks), self._num_calls.get(id(module), 0)
            self._num_calls[id(module)] = nth + 1
            block = queue[nth % len(queue)]
            self._blocks.append(block)
            key = self._key(block, args, kwargs)
            # Asked only then: for the answer, torch may have to make the backward step of a view.
            histories = () if key is None else (t for t in tensors(args, kwargs) if t.requires_grad and t.grad_fn)
            given = next(iter(histories), None)
            key = None if given is None else key
            again = nth >= len(queue)
            if again:
                self._call_again(block)
            template = None if key is None or again else self._template(block, key, args, kwargs)
            self._chronicle.note(Entered(layer, self._chronicle.live_bytes))
            if template is not None:
                out, skipped = skip(layer, template, args, kwargs, self._chronicle)
                self._skipped.append(skipped)
                if template.changes:
                    self._stale.add(block.path)
            elif block.path in self._stale or (nth and len(queue) > 1):
                raise _NotAloneError
            elif key is None:
                out = self._run_block(block, plain, layer, args, kwargs)
            else:
                numbers, begin = numbers_of(args, kwargs), len(self._chronicle.log)
                with noted(reads := Reads(module)):
                    out = self._run_block(block, plain, layer, args, kwargs)
                reads.close()
                made = {v.storage for v in self._calls[layer][1] if v.kind == "made"}
                dead = {e.storage for e in self._chronicle.log[begin:] if isinstance(e, StorageDied)}
                self._templates.setdefault(key, []).append(
                    Template(
                        layer,
                        self._original.get_submodule(block.path),
                        args,
                        kwargs,
                        out,
                        reads=reads,
                        numbers=numbers,
                        alive=made - dead,
                        chronicle=self._chronicle,
                    )
                )
            self._chronicle.note(Left(layer, self._chronicle.live_bytes))
            if given is not None:
                first = next((t for t in tensors(out) if t.requires_grad), None)
                if first is not None:
                    for tensor, kind in ((first, BackwardBegan), (given, BackwardEnded)):
                        tensor.register_hook(_Marker(self, kind, layer))  # pyright: ignore[reportUnknownMemberType]
            return out

        vars(module)["forward"] = forward

    def _call_again(self, block: Block) -> None:
        """Never let a call of a block that is called several times stand for others: its gradients are added up."""
        original = self._original.get_submodule(block.path)
        if any(s.template.is_of(original) for s in self._skipped):
            raise _NotAloneError
        for key, templates in self._templates.items():
            self._templates[key] = [t for t in templates if not t.is_of(original)]

    def _template(self, block: Block, key: Any, args: Any, kwargs: Any) -> Template | None:
        """Find a call that stands for this one."""
        original = self._original.get_submodule(block.path)
        copied = block.module if len(self._queues[id(block.module)]) == 1 else None
        for template in self._templates.get(key, ()):
            if template.stands_for(original, args, kwargs, copied=copied):
                return template
        return None

    def _key(self, block: Block, args: Any, kwargs: Any) -> Any:
        known = self._identities.get(block.path)
        shapes = None if known is None else signature(args, kwargs)
        return None if shapes is None else (known, shapes)

    def _run_block(self, block: Block, plain: Any, layer: int, args: Any, kwargs: Any) -> Any:
        inputs = list(tensors(args, kwargs))
        recorded = Recorded(self._state, layer, self._chronicle)
        size = sum(t.nbytes for t in inputs if not t.is_nested)
        out = record(
            block.module,
            plain,
            args,
            kwargs,
            recorded=recorded,
            chronicle=self._chronicle,
            inputs=inputs,
            trainable=lambda: frozenset(storages_of([p for p in block.module.parameters() if p.requires_grad])),
            device=self._device,
        )
        shapes = tuple(tuple(t.shape) for t in inputs if not t.is_nested)
        self._calls[layer] = (*recorded.finish(), size, shapes, recorded)
        return out

    @uncollected()
    def profile(self, **facts: Any) -> Profile | None:
        """Return what was observed, as data; None if blocks were skipped that should have been run."""
        ran = {self._blocks[n].path: self._blocks[n] for n in self._calls}
        roles = dict(zip(ran, find_roles(self._model, list(ran.values())), strict=True))
        layers: dict[int, Layer] = {}
        kinds: dict[Any, int] = {}
        for number, (calls, values, handles, size, shapes, recorded) in self._calls.items():
            block = self._blocks[number]
            by_function = tuple(sorted(recorded.by_function))
            key = _alike(calls, values), handles, by_function, shapes
            layers[number] = Layer(
                path=block.path,
                kind=kinds.setdefault(key, len(kinds)),
                layer_type=layer_type(block.module),
                modules=tuple(name for name, _ in named_modules(block.module)),
                roles=roles[block.path],
                calls=calls,
                values=values,
                handles=handles,
                inputs_bytes=size,
                shapes=shapes,
                by_function=by_function,
                parameters_bytes=sum(p.nbytes for p in block.module.parameters()),
                gradients_bytes=sum(p.nbytes for p in block.module.parameters() if p.requires_grad),
            )
        ledger = self._chronicle.ledger
        sizes = dict(ledger.sizes)
        expanded = expand(settled(self._chronicle.log), layers, self._skipped, sizes)
        if expanded is None:
            return None
        unmarked, actions = actions_in(expanded[0])
        log, memory, accumulated = changes(unmarked)
        layers = expanded[1]
        for s in self._skipped:
            layers[s.layer] = replace(layers[s.layer], path=self._blocks[s.layer].path)
        trained = {
            id(m): sum(p.nbytes for p in parameters_of(m) if p.requires_grad)
            for m in {id(b.module): b.module for b in self._blocks}.values()
        }
        skipped_bytes = sum(trained[id(self._blocks[s.layer].module)] for s in self._skipped)
        shared = len(self._queues) < len(self._found)
        gradients = self._gradients + (skipped_bytes if shared or not self._accumulates else 0)
        parameters, buffers = (sum(t.nbytes for t in tensors_there) for tensors_there in self._originals)
        base = parameters + buffers + (gradients if self._accumulates else 0)
        if self._stock:
            parameters, buffers = self._stock.get("parameters", 0), self._stock.get("buffers", 0)
            base = sum(self._stock.values())
        found: dict[str, Any] = {
            "parameters_bytes": parameters,
            "buffers_bytes": buffers,
            "gradients_bytes": gradients,
            "base_bytes": base,
            "optimizer_bytes": self._stock.get("optimizer_state", 0),
            "costs": _with_copy(self._chronicle.costs),
            "layers": tuple(layers[i] for i in range(len(layers))),
            "log": tuple(log),
            "storages": sizes,
            "memory": tuple(memory),
            "stock": self._stock_of(sizes),
            "carried": self._carried,
            "actions": actions,
            "accumulated": tuple((at, rise, e.storage, self._full_name(e)) for at, rise, e in accumulated),
        }
        return Profile(**(found | facts))

    def _full_name(self, entry: Accumulated) -> str:
        path = "" if entry.layer < 0 else self._blocks[entry.layer].path
        return f"{path}.{entry.name}" if path else entry.name

    def _stock_of(self, sizes: dict[int, int]) -> tuple[tuple[int, int, str], ...]:
        """Return number, bytes and role of what is there when the step begins, the caller's tensors included."""
        external = self._chronicle.ledger.external_stock()
        if self._stock:
            return (*self._base, *external)
        parameters, buffers = self._originals
        found: list[tuple[int, int, str]] = []
        for role, tensors_there in (("parameters", parameters), ("buffers", buffers)):
            for tensor in tensors_there:
                found.append((len(sizes) + len(found), tensor.nbytes, role))
        if self._accumulates:
            trained = [p for p in parameters if p.requires_grad]
            found += [(len(sizes) + len(found) + n, p.nbytes, "gradients") for n, p in enumerate(trained)]
        sizes |= {number: num_bytes for number, num_bytes, _ in found}
        return (*found, *external)


def _with_copy(costs: tuple[Cost, ...]) -> tuple[Cost, ...]:
    """Add the cost of a copy, if the step itself makes none."""
    if any(cost.op == COPY for cost in costs):
        return costs
    is_timed = any(cost.seconds is not None for cost in costs)
    return (*costs, Cost(COPY, 0, 0, "", 0.0 if is_timed else None))


def _alike(calls: tuple[Call, ...], values: tuple[Value, ...]) -> Any:
    """Return a key that is equal for block calls that did the same, except for their storages and times."""
    did = tuple(replace(c, cost=0, writes=tuple(replace(w, storage=0) for w in c.writes)) for c in calls)
    return did, tuple(replace(v, storage=0) for v in values)


class _Marker:
    """Logs that a gradient is complete."""

    def __init__(self, step: Session, kind: type[BackwardBegan | BackwardEnded], layer: int) -> None:
        self._step, self._kind, self._layer = step, kind, layer

    def __call__(self, _: Tensor) -> None:
        self._step.mark(self._kind, self._layer)
