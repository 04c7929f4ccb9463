"""Parts of a block that treat every token by itself, run on a piece of the tokens at a time.

NOTE [ Pieces of tokens ]

An MLP makes tensors several times as wide as its input, and all of them are alive at once: in the backward pass of a
long sequence, they are the peak, whatever is saved and recomputed. Where no token sees another, the part can run on a
piece of the tokens, then on the next. The results are put together by one `cat`, and the pieces come from one `split`,
so that the backward pass has one gradient of the input.

A piece is a call of the same module. The tape records the operators of all pieces, each decision of a plan holds for
each piece, and autograd runs the last piece backward first, from its recomputed values to its gradients, before it
begins with the one before. So all that is wide is as short as a piece, as long as the plan does not save it.

Weights get a gradient from each piece. autograd adds them up as they come: another order than that of one product, and
in the dtype of the weights.

That no token sees another is checked on the values of the first call (`token_check`).
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from actmem.compilercompat import has_hooks
from actmem.decision_rules import OWN, TARGETS
from actmem.errors import ModeError, UnsupportedError
from actmem.ops import did_you_mean
from actmem.settings import Split
from actmem.splitting.call_tokens import Tokens
from actmem.splitting.module_calls import SplitCall
from actmem.splitting.token_check import why_not_by_token
from actmem.structure import Block, find_roles
from actmem.torchcompat import FakeTensor, named_modules, without_dispatch_modes

__all__ = ["SplitPart", "split_parts"]


class SplitPart(SplitCall):
    """Runs a module on pieces of tokens. See NOTE [ Pieces of tokens ]."""

    def __init__(self, module: nn.Module, path: str, num_pieces: int, *, exact: bool = False) -> None:
        super().__init__(module, path)
        self.num_pieces = num_pieces
        self.exact = exact
        """Whether every sum keeps its order, and every token its bits."""
        self.num_calls = 0
        """How many calls ran in pieces."""
        self._checked = False

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module on one piece of its tokens after the other.

        Raises:
            UnsupportedError: tokens see one another, or what comes out is not a row for each of them.
        """
        tokens = Tokens.of(args, kwargs)
        if tokens is None or not self._needs_gradient(args, kwargs):
            return self.whole(args, kwargs)
        if self.exact and any(p.requires_grad for p in self.module.parameters()):
            self._refuse("exact = True, and its weights take gradients, which are sums over tokens")
        if not self._checked and all(_has_values(x) for x in (*tokens.tensors, *self.module.parameters())):
            with without_dispatch_modes(), torch.no_grad():
                why = why_not_by_token(self.module, tokens, args, kwargs, bitwise=self.exact)
            if why is not None:
                self._refuse(why)
            self._checked = True
        results = [self.whole(*piece) for piece in tokens.pieces(self.num_pieces, args, kwargs)]
        self.num_calls += 1
        return self._joined(tokens, results)

    def _joined(self, tokens: Tokens, results: list[Any]) -> Any:
        first = results[0]
        if isinstance(first, Tensor):
            if any(
                x.shape[: tokens.num_dims] != (*tokens.lead(), n) for x, n in zip(results, tokens.sizes, strict=True)
            ):
                self._refuse("what it returns does not have a row for each token")
            whole = torch.cat(results, dim=tokens.num_dims - 1)
            return whole.reshape(*tokens.shape, *whole.shape[tokens.num_dims :])
        if type(first) in (tuple, list):
            several = zip(*results, strict=True)
            return type(first)(self._joined(tokens, list(each)) for each in several)
        if any(x is not None for x in results):
            self._refuse(f"it returns a {type(first).__name__}")
        return None

    def _refuse(self, why: str) -> NoReturn:
        raise UnsupportedError(
            f"{self.path} cannot run in pieces of tokens: {why}. Leave it out of Split(parts=...), or name a part "
            "inside it that treats every token by itself."
        )

    def _needs_gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        return any(x.requires_grad for x in (*given, *self.module.parameters()))

    def copied_to(self, module: nn.Module) -> SplitPart:
        """Split a copy of the module in the same way."""
        return SplitPart(module, self.path, self.num_pieces, exact=self.exact)

    def is_hooked(self) -> bool:
        """Whether hooks run when the module or one inside it is called: a piece would not be what they expect."""
        return any(map(has_hooks, self.module.modules()))

    def why_whole(self) -> str | None:
        """Say why no call ran in pieces; None if some did."""
        if self.num_calls:
            return None
        if self.in_graphs:
            return "called inside a compiled graph"
        return "not called in training mode with more than one token, or with hooks on it or inside it"


def split_parts(model: nn.Module, split: Split, blocks: Sequence[Block]) -> list[SplitPart]:
    """Have parts of the blocks run in pieces of tokens.

    Raises:
        ModeError: a name is neither a target of these blocks nor a module in them.
    """
    found: dict[str, tuple[nn.Module, int]] = {}
    modules: dict[str, nn.Module] = {}
    for block in blocks:
        for path, module in named_modules(block.module):
            if path:
                modules[f"{block.path}.{path}".strip(".")] = module
    roles = find_roles(model, blocks)
    for name, num in split.parts.items():
        by_role = [
            f"{block.path}.{path}".strip(".")
            for block, its in zip(blocks, roles, strict=True)
            for path in its.get(name, ())
        ]
        paths = by_role or [p for p in modules if _is_called(name, p, blocks)]
        if not paths:
            present = sorted({role for its in roles for role in its})
            hint = did_you_mean(name, (*TARGETS, *present))
            known = name in TARGETS or name.startswith(OWN)
            what = (
                "no block of this model has that target" if known else "no target and no module of a block is named so"
            )
            raise ModeError(f"parts = {{{name!r}: {num}}}: {what}. Targets here: {', '.join(present) or 'none'}.{hint}")
        found.update({path: (modules[path], num) for path in paths if path in modules})
    made: dict[int, SplitPart] = {}
    for path, (module, num) in found.items():
        if id(module) not in made:
            made[id(module)] = SplitPart(module, path, num, exact=split.exact)
    return list(made.values())


def _is_called(name: str, path: str, blocks: Sequence[Block]) -> bool:
    """Whether a module's path is named: as a glob over whole paths, or as it is in its block."""
    return fnmatchcase(path, name) or any(path == f"{block.path}.{name}".strip(".") for block in blocks)


def _has_values(x: Tensor) -> bool:
    return x.device.type != "meta" and not isinstance(x, FakeTensor)
