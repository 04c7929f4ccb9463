"""Make a model's head return logits that are computed in chunks where they are used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from actmem.compilercompat import has_hooks
from actmem.distributedcompat import divides_tensors
from actmem.errors import ModeError, UnsupportedError
from actmem.ops import did_you_mean
from actmem.settings import Split
from actmem.splitting.class_shards import find_shards, is_plain_linear
from actmem.splitting.deferred_logits import Deferral, DeferredLogits, DividedLogits
from actmem.splitting.module_calls import SplitCall
from actmem.splitting.row_chunks import Head
from actmem.structure import find_head
from actmem.torchcompat import named_modules

__all__ = ["SplitHead", "split_head"]


class SplitHead(SplitCall):
    """Stands in for the call of a head: it returns deferred logits."""

    def __init__(
        self, module: nn.Module, path: str, num_chunks: int, *, gradients: str = "forward", exact: bool = False
    ) -> None:
        super().__init__(module, path)
        self.deferral = Deferral(num_chunks, gradients, exact)

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return deferred logits, if the head is called with hidden states alone and a gradient is wanted.

        Raises:
            UnsupportedError: the head is divided over ranks in a way that is not known; or sums are to keep their
                order, and its weights take a gradient.
        """
        hidden = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(hidden, Tensor):
            return self.whole(args, kwargs)
        deferral = self.deferral
        if hidden.numel() == 0 or not any(x.requires_grad for x in (hidden, *self.module.parameters())):
            return self.whole(args, kwargs)
        head, hidden = _head(self.module, hidden, self.path)
        num_rows = hidden.numel() // hidden.shape[-1]
        if num_rows < deferral.num_chunks:
            deferral.few_rows = num_rows
            return self.whole(args, kwargs) if head.shards is None else head.output(hidden)
        if deferral.exact and any(w.requires_grad for w in head.weights):
            raise UnsupportedError(
                f"exact = True: {self.path or 'the head'} takes a gradient, which is a sum over tokens, and in chunks "
                "it is added in another order. Freeze it (requires_grad_(False)), or leave exact=True out: then "
                "actmem.verify says how large the difference is."
            )
        deferral.num_deferred += 1
        hidden, head = _cast(hidden, head)
        kind = DividedLogits if head.shards is not None and head.shards.is_dtensor else DeferredLogits
        return kind(hidden, head, deferral, -(-num_rows // deferral.num_chunks), dtype=hidden.dtype)

    def is_hooked(self) -> bool:
        """Whether hooks run when the head is called, other than those with which torch divides it over ranks."""
        return has_hooks(self.module, besides=divides_tensors)

    def copied_to(self, module: nn.Module) -> SplitHead:
        """Split a copy of the head in the same way."""
        its = self.deferral
        return SplitHead(module, self.path, its.num_chunks, gradients=its.gradients, exact=its.exact)

    def notes(self) -> list[str]:
        """Say what became of the logits, in sentences for a report."""
        deferral, named = self.deferral, self.path or "the model itself"
        if self.in_graphs:
            return [f"the output of {named} was not split: it was called inside a compiled graph."]
        if not deferral.num_deferred and deferral.few_rows is not None:
            few = f"{deferral.few_rows} row{'' if deferral.few_rows == 1 else 's'}"
            return [f"the output of {named} was not split: it has {few}, fewer than {deferral.num_chunks} chunks."]
        if not deferral.num_deferred:
            why = (
                "it has not been called in training mode (some trainers compute the loss from its weight), or has hooks"
            )
            return [f"the output of {named} was not split: {why}."]
        lines = [f"{named}: logits in {deferral.num_chunks} chunks of tokens, for {_counted(deferral.in_chunks)}."]
        if not deferral.in_chunks:
            lines = []
        if deferral.made_real:
            lines.append(f"{named}: a whole tensor of logits was made for {_counted(deferral.made_real)}.")
        return lines


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(name if num == 1 else f"{name} ({num} times)" for name, num in counts.items())


def _cast(hidden: Tensor, head: Head) -> tuple[Tensor, Head]:
    """Cast as autocast would: once, and not again in each chunk."""
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind) or not head.is_linear:
        return hidden, head
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), replace(head, weights=tuple(w.to(dtype) for w in head.weights))


def _head(module: nn.Module, hidden: Tensor, path: str) -> tuple[Head, Tensor]:
    """Return how a head computes its output, and the hidden states that it does so with."""
    if any(hasattr(p, "device_mesh") for p in module.parameters()):
        shards, hidden = find_shards(module, hidden, path)
        parts: tuple[Any, ...] = tuple(module.parameters())
        return Head(module, tuple(p.to_local() for p in parts), is_linear=True, shards=shards), hidden
    if is_plain_linear(module):
        weights: list[Tensor | None] = [cast("nn.Linear", module).weight, cast("nn.Linear", module).bias]
        return Head(module, tuple(w for w in weights if w is not None), is_linear=True), hidden
    return Head(module, tuple(p for p in module.parameters() if p.requires_grad), is_linear=False), hidden


def split_head(model: nn.Module, split: Split) -> SplitHead:
    """Have the head of a model return deferred logits.

    Raises:
        ModeError: there is no head, or it is none that can be split.
    """
    modules = dict(named_modules(model))
    if split.head is not None and split.head not in modules:
        raise ModeError(
            f"head = {split.head!r}: there is no module {split.head!r}.{did_you_mean(split.head, tuple(modules))}"
        )
    module = modules[split.head] if split.head is not None else find_head(model)
    if module is None:
        raise ModeError(
            f"no output head was found in {type(model).__name__}, so there is no loss to split. Name it: "
            "Split(loss=16, head='path.of.the.head')."
        )
    path = next((path for path, m in modules.items() if m is module), "")
    classes, width = getattr(module, "out_features", None), getattr(module, "in_features", None)
    if not isinstance(classes, int) or not isinstance(width, int):
        raise ModeError(
            f"the head {path or 'of the model'} is a {type(module).__name__}, which is not a linear layer. Name the "
            "one that makes the logits: Split(loss=16, head='path.of.the.head')."
        )
    chunks = split.loss if isinstance(split.loss, int) else max(2, -(-classes // width))
    return SplitHead(module, path, chunks, gradients=split.gradients, exact=split.exact)
