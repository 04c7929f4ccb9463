"""Tell what kind of token mixing a block does, in the words of transformers.

NOTE [ layer types ]

`full_attention`, `sliding_attention`, `chunked_attention`, `linear_attention` (Mamba and delta nets too), `hybrid`, ...
Asked in this order, and the first answer counts:

1. the block: its `attention_type`, `layer_type` or `block_type`;
2. its token mixers: the same names, then `is_sliding` and `sliding_window`;
3. the `layer_types` of their config, at their `layer_idx`;
4. the class names of the token mixers: what is linear, and what is both;
5. the rest of the config: a window that all layers have, or none.

A block whose mask comes from elsewhere, as in most models without such a config, has no answer.
"""

import re
from collections.abc import Iterator, Sequence
from typing import cast

from torch import nn

from actmem.structure.identity import unwrapped
from actmem.structure.targets import roles

_FULL, _SLIDING, _LINEAR, _BOTH = "full_attention", "sliding_attention", "linear_attention", "hybrid"
_NAMES = ("attention_type", "layer_type", "block_type")
# Words of older versions, and of models that have their own, in the words of today.
_OTHER_WORDS = {
    "mamba": _LINEAR,
    "mamba2": _LINEAR,
    "recurrent": _LINEAR,
    "attention": _FULL,
    "global": _FULL,
    "original_full": _FULL,
    "local": _SLIDING,
    "deepseek_sparse_attention": "indexed_attention",
}
_IS_SLIDING = ("is_sliding", "is_local_attention", "is_sliding_window")
# A config with such a field has layers of several kinds, without saying here which is which.
_MIXED = re.compile(r"window|fullatt|(local|global|sparse)_att|att\w*_chunk")


def layer_type(block: nn.Module) -> str | None:
    """Return what kind of token mixing a block does, as transformers spells it; None where it cannot be told.

    >>> class Block(nn.Module):
    ...     layer_type = "sliding_attention"
    >>> layer_type(Block()), layer_type(nn.Linear(2, 2))
    ('sliding_attention', None)
    """
    inner = unwrapped(block)
    found = roles(block)
    softmax = [unwrapped(block.get_submodule(path)) for path in found.get("attention", ())]
    linear = [unwrapped(block.get_submodule(path)) for path in found.get("linear_attn", ())]
    said = next(_said(inner, [*softmax, *linear]), None)
    if said is not None:
        return _OTHER_WORDS.get(said, said)
    if linear:
        return _BOTH if softmax else _LINEAR
    return _by_config(softmax[0]) if softmax else None


def _said(block: nn.Module, mixers: Sequence[nn.Module]) -> Iterator[str]:
    for module in (block, *mixers):
        yield from _words(module)
    for module in mixers:
        flags = [value for name in _IS_SLIDING if isinstance(value := getattr(module, name, None), bool)]
        window: object = getattr(module, "sliding_window", None)
        if True in flags or (isinstance(window, int) and window > 0 and not flags):
            yield _SLIDING
    for module in (block, *mixers):
        index: object = getattr(module, "layer_idx", None)
        types: object = getattr(getattr(module, "config", None), "layer_types", None)
        if isinstance(index, int) and isinstance(types, list | tuple):
            names = cast("Sequence[object]", types)
            if 0 <= index < len(names):
                yield str(names[index])


def _words(module: nn.Module) -> Iterator[str]:
    for name in _NAMES:
        value: object = getattr(module, name, None)
        if isinstance(value, str):
            yield value


def _by_config(attention: nn.Module) -> str | None:
    config: object = getattr(attention, "config", None)
    if config is None:
        return None
    fields = {name: value for name, value in vars(config).items() if value}
    if fields.get("sliding_window") and getattr(config, "use_sliding_window", True):
        return _SLIDING
    fields = {name: value for name, value in fields.items() if "sliding_window" not in name}
    return None if any(_MIXED.search(name) for name in fields) else _FULL
