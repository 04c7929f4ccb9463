"""Tell the language model of a multimodal model from its vision and audio towers.

NOTE [ which tower a stack belongs to ]

Names are asked from the blocks outwards, and the first that says something decides: the class of the blocks, then each
module that holds them: its attribute name, and what transformers calls its `input_modalities`, unless these are mixed.
A connector (Q-Former, projector) belongs to the tower that it connects. What nothing speaks of is language.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Literal, cast

from torch import nn

from actmem.errors import StructureError
from actmem.ops import did_you_mean
from actmem.structure.stacks import Stack

Tower = Literal["language", "vision", "audio"]
TOWERS: tuple[Tower, ...] = ("language", "vision", "audio")
"""The towers that a scope can name."""

# Parts of attribute names and class names.
_WORDS = {
    "language": re.compile(r"language|(^|_)(text|lm|llm)(_|$)"),
    "vision": re.compile(r"vision|visual|image|video"),
    "audio": re.compile(r"audio|speech|sound|acoustic|conformer"),
    "connector": re.compile(r"qformer|perceiver|resampler|projector|connector"),
}
# The modalities of transformers, by the tower that reads them.
_MODALITIES: dict[str, Tower] = {"text": "language", "image": "vision", "video": "vision", "audio": "audio"}


def towers_of(model: nn.Module, stacks: Sequence[Stack]) -> list[Tower]:
    """Return the tower of each stack."""
    said = [next(_said_of(model, stack), "language") for stack in stacks]
    connected: Tower = "audio" if "audio" in said and "vision" not in said else "vision"
    return [connected if word == "connector" else cast(Tower, word) for word in said]


def checked_scope(scope: object) -> tuple[Tower, ...]:
    """Return a scope, or raise if it is not a list of towers."""
    permitted = f"Permitted: a list out of {', '.join(TOWERS)}"
    if not isinstance(scope, list | tuple):
        instead = scope if scope in TOWERS else "language"
        raise StructureError(f'scope = {scope!r} is no list. {permitted}, as in scope=["{instead}"].')
    names = cast("Sequence[object]", scope)
    for name in names:
        if name not in TOWERS:
            hint = did_you_mean(name, TOWERS) if isinstance(name, str) else ""
            raise StructureError(f'scope names {name!r}. {permitted}, as in scope=["language", "vision"].{hint}')
    if not names:
        raise StructureError(f'scope = {scope!r} names no tower. {permitted}, as in scope=["language"].')
    return cast("tuple[Tower, ...]", tuple(names))


def _said_of(model: nn.Module, stack: Stack) -> Iterator[str]:
    """List what the names say, from the blocks outwards."""
    yield from _in_words(stack.label)
    names = stack.path.split(".") if stack.path else []
    for depth in range(len(names), -1, -1):
        if depth:
            yield from _in_words(names[depth - 1])
        modalities: object = getattr(model.get_submodule(".".join(names[:depth])), "input_modalities", None)
        # A mere "text" is what a model has that does not say.
        listed = [modalities] if isinstance(modalities, str) and modalities != "text" else modalities
        if isinstance(listed, list | tuple):
            read = {_MODALITIES.get(str(modality)) for modality in cast("Sequence[object]", listed)}
            yield from (tower for tower in read if tower and len(read) == 1)


def _in_words(name: str) -> list[str]:
    return [tower for tower, pattern in _WORDS.items() if pattern.search(name.lower())]
