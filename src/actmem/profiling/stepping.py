"""Profile one step of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from actmem.engine.calling import storages_of
from actmem.engine.trees import tensors
from actmem.errors import ActmemError, ModeError, UnsupportedError
from actmem.modes import check_optimizer
from actmem.profiles import Layer, Profile
from actmem.profiling.chronicle import Chronicle
from actmem.profiling.complaints import for_real, quiet, told
from actmem.profiling.faking import Assuming, fake_batch, fake_copy
from actmem.profiling.optimizing import optimizer_bytes
from actmem.profiling.phantom import Recorded, record
from actmem.profiling.reading import Reads, noted
from actmem.profiling.restoring import Restored
from actmem.profiling.sharding import sharded, with_optimizer, without_gradients
from actmem.profiling.skipping import Skipped, Template, expand, identity, numbers_of, signature, skip
from actmem.structure import Block, check_module, condition_digest, find_blocks, find_roles, fingerprint, layer_type
from actmem.torchcompat import FakeTensorMode, named_modules

__all__ = ["loss_of", "profile", "profiles", "shapes_of"]


def profile(
    model: nn.Module,
    example: dict[str, Any] | tuple[Any, ...],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    fake: bool = True,
    blocks: str | Sequence[str] | None = None,
    scope: Sequence[str] | None = None,
    routing: str = "balanced",
    optimizer: str | None = "adamw",
    optimizer_dtype: torch.dtype | None = None,
    microbatches: int = 1,
    shard: int = 1,
) -> Profile:
    """Find out what one training step of a model does, value by value.

    Args:
        model: the model, in training mode; on the meta device too, if `fake`.
        example: a batch: a dict for `model(**example)`, or a tuple for `model(*example)`.
        loss: a function of the output; by default `output.loss`, or the output itself if it is a scalar.
        fake: run on tensors without bytes, which takes no memory and computes nothing. Otherwise one step is run, and
            takes up to twice the memory of plain training.
        blocks: where the blocks are, as for `apply`.
        scope: the towers whose blocks are meant, as for `apply`.
        routing: what a fake step assumes of routers: "balanced", or "worst", where the same experts get every token.
        optimizer: the optimizer whose state and step are counted: "adamw", "adam", "sgd", or None for none.
        optimizer_dtype: the dtype of its state, if it is not that of the parameters.
        microbatches: how many batches a step accumulates gradients over. With more than one, they stay in between.
        shard: over how many ranks FSDP2 divides parameters, gradients and optimizer state.

    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])
    >>> found = profile(model, (torch.randn(2, 8),), loss=torch.sum)
    >>> len(found.layers), found.parameters_bytes
    (3, 864)
    """
    return profiles(
        model,
        [example],
        loss=loss,
        fake=fake,
        blocks=blocks,
        scope=scope,
        routing=routing,
        optimizer=optimizer,
        optimizer_dtype=optimizer_dtype,
        microbatches=microbatches,
        shard=shard,
    )[0]


def profiles(
    model: nn.Module,
    examples: Sequence[dict[str, Any] | tuple[Any, ...]],
    *,
    loss: Callable[[Any], Tensor] | None,
    fake: bool,
    blocks: str | Sequence[str] | None,
    scope: Sequence[str] | None,
    routing: str,
    optimizer: str | None,
    optimizer_dtype: torch.dtype | None,
    microbatches: int,
    shard: int,
) -> list[Profile]:
    """Profile a step of each example. The optimizer has state for what any of them trains. See `profile`."""
    _check(model, examples, routing=routing, microbatches=microbatches, shard=shard, fake=fake)
    check_optimizer(optimizer)
    found = find_blocks(model, blocks, scope)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    seen = [_seen(model, found, device, example, loss, routing, microbatches, fake=fake) for example in examples]
    unused = frozenset[str].intersection(*(its for _, its in seen))
    state, transient = optimizer_bytes(
        [p for name, p in model.named_parameters() if name not in unused],
        optimizer,
        dtype=optimizer_dtype,
        together=device.type not in ("cpu", "meta"),
    )
    absent = sum(p.nbytes for name, p in model.named_parameters() if name in unused)
    trained = sorted(
        {str(optimizer_dtype or p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}
    )
    called = "none" if optimizer is None else f"{optimizer}, {' and '.join(trained) or 'nothing to train'}"
    return [sharded(with_optimizer(without_gradients(p, absent), called, state, transient), shard) for p, _ in seen]


def _check(
    model: nn.Module, examples: Sequence[Any], *, routing: str, microbatches: int, shard: int, fake: bool
) -> None:
    """Refuse what cannot be profiled."""
    check_module(model)
    if not model.training:
        raise ModeError("the model is in eval mode, and a training step is profiled. Call model.train() first.")
    if not any(t.requires_grad for t in (*model.parameters(), *tensors(examples))):
        raise ModeError(
            f"{type(model).__name__} is frozen: none of its parameters requires a gradient, so no step trains anything "
            "and nothing is held for a backward pass. Unfreeze what is to be trained first, such as "
            "model.requires_grad_(True)."
        )
    if routing not in ("balanced", "worst"):
        raise ModeError(f"routing = {routing!r} is not known. Expected 'balanced' or 'worst'.")
    if not fake and any(p.is_meta for p in model.parameters()):
        raise ModeError(
            "fake = False runs a real step, and the model is on the meta device, where it has no numbers. Build it on "
            "a real device, or leave fake=False out."
        )
    _check_count("microbatches", microbatches)
    _check_count("shard", shard)
    if shard == 1 and any(hasattr(p, "device_mesh") for p in model.parameters()):
        raise ModeError(
            "the model is sharded already (its parameters are DTensors), and one rank's part of it cannot be profiled. "
            "Profile the model as it is before fully_shard(...), and say over how many ranks it will be: shard=N."
        )
    wrapper = type(model).__name__
    if fake and isinstance(model, (DataParallel, DistributedDataParallel)):
        raise ModeError(
            f"the model is wrapped in {wrapper}, which cannot be run on fake tensors. Profile and plan what it wraps, "
            "model.module, and apply the plan before it is wrapped."
        )


def _seen(
    model: nn.Module,
    found: Sequence[Block],
    device: torch.device,
    example: Any,
    loss: Callable[[Any], Tensor] | None,
    routing: str,
    microbatches: int,
    *,
    fake: bool,
) -> tuple[Profile, frozenset[str]]:
    """Run one step. Return what was seen, without an optimizer, and the parameters that got no gradient."""
    facts: dict[str, Any] = {
        "fingerprint": fingerprint(model, found),
        "modules": condition_digest(model),
        "blocks": tuple(b.path for b in found),
        "shapes": shapes_of(example),
        "fake": fake,
        "routing": "real",
        "microbatches": microbatches,
    }
    if not fake:
        step = _Step(model, found, device, timed=True, accumulates=microbatches > 1)
        with Restored(model, example):
            step.run(example, loss)
        seen = step.profile(**facts)
        assert seen is not None
        return seen, step.unused
    device = torch.device("cpu") if device.type == "meta" else device
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    example = fake_batch(example, mode, device)
    identities = [identity(b.module, b.kind) for b in found]
    for shares, skips in ((True, True), (False, True), (False, False)):
        copied = fake_copy(model, mode, device, _same(found, identities) if shares else ())
        blocks_copied = tuple(replace(b, module=copied.get_submodule(b.path)) for b in found)
        with contextlib.ExitStack() as stack:
            stack.enter_context(quiet())
            stack.enter_context(mode)
            stack.enter_context(assuming := Assuming(routing))
            step = _Step(
                copied,
                blocks_copied,
                device,
                timed=False,
                accumulates=microbatches > 1,
                identities=dict(zip((b.path for b in found), identities, strict=True)) if skips else {},
                original=model,
            )
            try:
                step.run(example, loss)
            except Exception as error:
                if step.has_skipped:
                    continue  # perhaps something misses what a skipped block would have left behind
                if isinstance(error, ActmemError):
                    raise
                raise told(error, facts["shapes"]) from error.__cause__
            seen = step.profile(**{**facts, "routing": routing if assuming.assumed else "none"})
            if seen is not None:
                return seen, step.unused
    raise AssertionError("a step without skipped blocks has a profile")


def _same(found: Sequence[Block], identities: Sequence[Any]) -> list[tuple[nn.Module, nn.Module]]:
    """List the pairs of equal blocks, with the first of each kind first."""
    firsts: dict[Any, Block] = {}
    pairs: list[tuple[nn.Module, nn.Module]] = []
    for block, its in zip(found, identities, strict=True):
        first = firsts.setdefault(its, block)
        if first is not block:
            pairs.append((first.module, block.module))
    return pairs


class _NotAloneError(RuntimeError):
    """A block would have to be run for which another one has stood until now."""


class _Step:
    """One step under way."""

    def __init__(
        self,
        model: nn.Module,
        found: Sequence[Block],
        device: torch.device,
        *,
        timed: bool,
        accumulates: bool,
        identities: dict[str, Any] | None = None,
        original: nn.Module | None = None,
    ) -> None:
        """Begin.

        Args:
            model: what is run; equal blocks may be one and the same module.
            found: its blocks.
            device: where it is said to be.
            timed: whether to measure seconds.
            accumulates: whether gradients are there from the beginning.
            identities: path -> what is equal for blocks that do the same, if they need not all be run.
            original: the model itself, if another one is run in its place.
        """
        self._model, self._found, self._device = model, found, device
        self._original = original or model
        self._queues: dict[int, list[Block]] = {}
        """The blocks that a module stands for, in the order in which they are called."""
        for block in found:
            self._queues.setdefault(id(block.module), []).append(block)
        self._num_calls: dict[int, int] = {}
        self._accumulates = accumulates
        self._chronicle = Chronicle(device, timed=timed)
        self._blocks: list[Block] = []
        """The block of each call."""
        self._calls: dict[int, tuple[Any, Any, Any, int]] = {}
        """What each call that was run made, and the bytes of its arguments."""
        self._state = frozenset(storages_of([*model.parameters(), *model.buffers()]))
        self._gradients = 0
        self.unused: frozenset[str] = frozenset()
        """Names of the parameters outside the blocks that could get a gradient, and got none: an optimizer has no state
        for them. Inside a block, the next batch may be routed otherwise."""
        self._templates: dict[Any, list[Template]] = {}
        self._skipped: list[Skipped] = []
        self._stale: set[str] = set()
        """Blocks that would have changed something in themselves if they had been run."""
        self._identities = identities or {}

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

        hooks: list[Any] = [
            p.register_post_accumulate_grad_hook(use)  # pyright: ignore[reportUnknownMemberType]
            for p in self._model.parameters()
            if p.requires_grad
        ]
        for queue in self._queues.values():
            self._wrap(queue)
        try:
            with self._chronicle:
                out: Any = self._model(**example) if isinstance(example, dict) else self._model(*example)
                value = loss_of(out, loss)
                self._note("phase", "backward")
                value.backward()  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
                self._note("phase", "end")
                del out, value
            if not self._blocks:
                raise UnsupportedError(
                    f"none of the {len(self._found)} blocks, {self._found[0].path} and so on, was run in the profiled "
                    "step. Either the model does not call them, or its forward was replaced by a function that holds "
                    "the original model. For the first, name the blocks that it calls: blocks='...'; for the second, "
                    f"profile for real: {for_real()}."
                )
            inside = {id(p) for block in self._found for p in block.module.parameters()}
            self.unused = frozenset(
                name
                for name, p in self._model.named_parameters()
                if p.requires_grad and id(p) not in used and id(p) not in inside
            )
            self._gradients = sum(p.grad.nbytes for p in self._model.parameters() if p.grad is not None)
        finally:
            for hook in hooks:
                hook.remove()
            for block in self._found:
                vars(block.module).pop("forward", None)
            for p, grad in before:
                p.grad = grad

    @property
    def has_skipped(self) -> bool:
        """Whether a block was not run, or could not be."""
        return bool(self._skipped) or any(len(queue) > 1 for queue in self._queues.values())

    def _note(self, *entry: Any) -> None:
        self._chronicle.note(*entry, self._chronicle.ledger.main.live_bytes)

    def mark(self, verb: str, layer: int) -> None:
        """Note that the gradient of a block's output, or of its input, is complete.

        One tensor may be both, and then the block that took it ends before the block that gave it begins.
        """
        self._note(verb, layer)
        log = self._chronicle.log
        if verb == "end" and len(log) > 1 and log[-2][0] == "back":
            log[-2:] = log[-1], log[-2]

    def _uncopied_bytes(self) -> int:
        """Return what the original takes and the copy does not, because equal blocks share a module."""
        whole, copied = (sum(t.nbytes for t in (*m.parameters(), *m.buffers())) for m in (self._original, self._model))
        if self._accumulates:
            whole += sum(p.nbytes for p in self._original.parameters() if p.requires_grad)
            copied += sum(p.nbytes for p in self._model.parameters() if p.requires_grad)
        return whole - copied

    def _wrap(self, queue: list[Block]) -> None:
        module, plain = queue[0].module, queue[0].module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            layer, nth = len(self._blocks), self._num_calls.get(id(module), 0)
            self._num_calls[id(module)] = nth + 1
            block = queue[nth % len(queue)]
            self._blocks.append(block)
            given = next((t for t in tensors(args, kwargs) if t.requires_grad and t.grad_fn is not None), None)
            key = self._key(block, args, kwargs) if given is not None else None
            template = None if key is None else self._template(block, key, args, kwargs, again=nth >= len(queue))
            self._note("enter", layer)
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
                dead = {e[1] for e in self._chronicle.log[begin:] if e[0] == "die"}
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
            self._note("leave", layer)
            if key is not None and given is not None:
                first = next((t for t in tensors(out) if t.requires_grad), None)
                if first is not None:
                    for tensor, verb in ((first, "back"), (given, "end")):
                        tensor.register_hook(_Marker(self, verb, layer))  # pyright: ignore[reportUnknownMemberType]
            return out

        vars(module)["forward"] = forward

    def _template(self, block: Block, key: Any, args: Any, kwargs: Any, *, again: bool) -> Template | None:
        """Find a call that stands for this one."""
        original = self._original.get_submodule(block.path)
        copied = block.module if len(self._queues[id(block.module)]) == 1 else None
        for template in self._templates.get(key, ()):
            if template.stands_for(original, args, kwargs, copied=copied, again=again):
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
        self._calls[layer] = (*recorded.finish(), size)
        return out

    def profile(self, **facts: Any) -> Profile | None:
        """Return what was seen, as data; None if blocks were skipped that should have been run."""
        ran = {self._blocks[n].path: self._blocks[n] for n in self._calls}
        roles = dict(zip(ran, find_roles(self._model, list(ran.values())), strict=True))
        layers: dict[int, Layer] = {}
        kinds: dict[Any, int] = {}
        for number, (calls, values, handles, size) in self._calls.items():
            block = self._blocks[number]
            did = tuple((c.op, c.module, c.makes) for c in calls)
            key = did, tuple((v.num_bytes, v.call, v.kind, v.why, v.reads, v.writes) for v in values), handles
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
                parameters_bytes=sum(p.nbytes for p in block.module.parameters()),
                gradients_bytes=sum(p.nbytes for p in block.module.parameters() if p.requires_grad),
            )
        ledger = self._chronicle.ledger
        sizes = dict(ledger.sizes)
        expanded = expand(self._chronicle.log, layers, self._skipped, sizes)
        if expanded is None:
            return None
        log, layers = expanded
        for s in self._skipped:
            layers[s.layer] = replace(layers[s.layer], path=self._blocks[s.layer].path)
        skipped = [p for s in self._skipped for p in self._blocks[s.layer].module.parameters() if p.requires_grad]
        shared = len(self._queues) < len(self._found)
        gradients = self._gradients + (sum(p.nbytes for p in skipped) if shared or not self._accumulates else 0)
        parameters = sum(p.nbytes for p in self._original.parameters())
        buffers = sum(b.nbytes for b in self._original.buffers())
        return Profile(
            parameters_bytes=parameters,
            buffers_bytes=buffers,
            gradients_bytes=gradients,
            base_bytes=parameters + buffers + (gradients if self._accumulates else 0),
            costs=tuple(self._chronicle.costs),
            layers=tuple(layers[i] for i in range(len(layers))),
            log=tuple(log),
            storages=sizes,
            **facts,
        )


class _Marker:
    """Note in the log that a gradient is complete."""

    def __init__(self, step: _Step, verb: str, layer: int) -> None:
        self._step, self._verb, self._layer = step, verb, layer

    def __call__(self, _: Tensor) -> None:
        self._step.mark(self._verb, self._layer)


def loss_of(out: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    """Return the loss of a model's output."""
    try:
        value: Any = getattr(out, "loss", None) if loss is None else loss(out)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{error} It ran in loss=: if that ends in .item() or float(), return the tensor itself."
        ) from error
    if loss is None and value is None and isinstance(out, Tensor) and out.dim() == 0:
        value = out
    if loss is None and value is None:
        kind = "Tensor" if isinstance(out, Tensor) else type(out).__name__
        how = 'out["loss"]' if isinstance(out, dict) and "loss" in out else "out.float().pow(2).mean()"
        raise ModeError(
            f"the model returned {kind}, which is neither a scalar nor has a .loss. Pass loss=, a function of the "
            f"output, such as loss=lambda out: {how}."
        )
    whose = "the .loss of the output" if loss is None else "what loss= returned"
    if not isinstance(value, Tensor):
        raise ModeError(
            f"{whose} is a {type(value).__name__}, and a backward pass starts from a tensor. Return the tensor, "
            "without .item() or float(), such as loss=lambda out: out.float().pow(2).mean()."
        )
    if value.numel() != 1:
        raise ModeError(
            f"{whose} has the shape {list(value.shape)}, and a backward pass starts from one number. Reduce it, "
            "such as loss=lambda out: out.mean()."
        )
    if not value.requires_grad:
        raise ModeError(
            f"{whose} leads back to nothing that is trained: it was detached (.detach(), .data, torch.no_grad()), or "
            "depends on no parameter that requires a gradient. Return the loss that you call .backward() on."
        )
    return value


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ModeError(f"{name} = {value!r} is not permitted. Expected an int of 1 or more.")


def shapes_of(batch: Any) -> tuple[str, ...]:
    """Describe the tensors of a batch."""
    named: Any = batch.items() if hasattr(batch, "items") else enumerate(batch)
    return tuple(
        f"{name} {str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for name, x in named if isinstance(x, Tensor)
    )
