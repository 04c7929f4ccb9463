"""What a `Split` does to a model: to its head, and to the parts of its blocks."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from torch import nn

from actmem.compilercompat import replaced_call
from actmem.settings import Split
from actmem.splitting.head_split import SplitHead, split_head
from actmem.splitting.module_calls import SplitCall
from actmem.splitting.token_parts import SplitPart, split_parts
from actmem.structure import Block
from actmem.torchcompat import named_modules

__all__ = ["SplitModel", "carry_split", "split_for_now"]


class SplitModel:
    """A model that computes in pieces of tokens what a `Split` says, until `remove`.

    Raises:
        ModeError: it names something that the model does not have, or that cannot be split.
    """

    def __init__(self, model: nn.Module, split: Split, blocks: Sequence[Block]) -> None:
        self._parts: list[SplitPart] = split_parts(model, split, blocks)
        self._head: SplitHead | None = None
        try:
            self._head = None if split.loss is None else split_head(model, split)
        except BaseException:
            self.remove()
            raise

    def notes(self) -> list[str]:
        """Say what ran in pieces, in sentences for a report."""
        return [*([] if self._head is None else self._head.notes()), *_notes(self._parts)]

    def remove(self) -> None:
        """Let the model compute everything as a whole again."""
        for call in (*self._parts, *([] if self._head is None else [self._head])):
            call.remove()


def _notes(parts: Sequence[SplitPart]) -> list[str]:
    ran = [part for part in parts if part.num_calls]
    lines: list[str] = []
    for num in sorted({part.num_pieces for part in ran}):
        paths = [part.path for part in ran if part.num_pieces == num]
        more = "" if len(paths) == 1 else f" and {len(paths) - 1} more"
        lines.append(f"{paths[0]}{more}: forward and backward in {num} pieces of tokens.")
    reasons: dict[str, list[str]] = {}
    for part in parts:
        if (why := part.why_whole()) is not None:
            reasons.setdefault(why, []).append(part.path)
    for why, paths in reasons.items():
        more = "" if len(paths) == 1 else f" and {len(paths) - 1} more"
        lines.append(f"{paths[0]}{more} did not run in pieces: {why}.")
    return lines


def carry_split(original: nn.Module, copied: nn.Module) -> None:
    """Split a copy of a model as the original is split: copies do not carry it over."""
    copies = dict(named_modules(copied))
    for path, module in named_modules(original):
        found = replaced_call(module)
        if isinstance(found, SplitCall) and path in copies:  # equal blocks may be one module in a copy
            found.copied_to(copies[path])


@contextmanager
def split_for_now(model: nn.Module, split: Split | None, blocks: Sequence[Block]) -> Generator[None]:
    """Split a model while this is entered, to see what a step then does."""
    done = None if split is None else SplitModel(model, split, blocks)
    try:
        yield
    finally:
        if done is not None:
            done.remove()
