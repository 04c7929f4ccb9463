"""What NeMo Automodel reads and changes in models and configs, under its own names. Imported from `compat.nemo`."""

# pyright: reportUnusedFunction=false
# The names with an underscore are NeMo's; compat.nemo hands them on.

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, cast

from torch import nn

from actmem.errors import ModeError, StructureError
from actmem.modes import Rules
from actmem.ops import did_you_mean
from actmem.plan import Rule
from actmem.structure import find_blocks
from actmem.torchcompat import named_modules

TOWERS = ("language", "vision", "audio")
_SCOPES = ("all", *TOWERS, "multimodal")

_PARTS = (
    *(("mlp", "feed_forward", "ffn"), ("mlp_moe_gen",), ("self_attn", "attention", "attn", "linear_attn")),
    *(("input_layernorm", "attention_norm", "layer_norm1", "norm1"), ("input_layernorm_moe_gen",)),
    *(("post_attention_layernorm", "ffn_norm", "layer_norm2", "norm2"), ("post_attention_layernorm_moe_gen",)),
)
"""What sub-module checkpointing covers: of each row the first attribute that a layer has."""


def detect_kv_sharing_and_maybe_disable_cache(model: nn.Module) -> bool:
    """Tell whether layers share keys and values; if not, set `use_cache` to False in the config and its sub-configs.

    actmem itself needs no cache switched off. The config is changed because callers rely on it.
    """
    config: Any = getattr(model, "config", None)
    text = getattr(config, "text_config", None) or config
    if (getattr(text, "num_kv_shared_layers", 0) or 0) > 0:
        return True
    kind = cast(Any, type(config))
    parts = [getattr(config, name, None) for name in getattr(kind, "sub_configs", None) or ("text_config",)]
    for part in [config] * (config is not None) + [p for p in parts if hasattr(p, "use_cache")]:
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # a config that cannot be written stays
            part.use_cache = False
    return False


def is_selective_activation_checkpointing(activation_checkpointing: object) -> bool:
    """Tell whether a config value is the text "selective", in any case; a bool and None are not."""
    value = activation_checkpointing
    return isinstance(value, str) and value.lower().replace("-", "_") == "selective"


def unwrap_checkpoint_wrapper(module: nn.Module) -> nn.Module:
    """Return what torch's checkpoint_wrapper wraps; the module itself where nothing does, as with actmem."""
    return getattr(module, "_checkpoint_wrapped_module", module)


def _replace_child_module(root: nn.Module, target: nn.Module, replacement: nn.Module) -> bool:
    """Put a module in the place of another below `root`; False where that is not found. Not used here."""
    for parent in root.modules():
        for name, child in parent.named_children():
            if child is target:
                parent.register_module(name, replacement)
                return True
    return False


def parts_mode(layer: nn.Module) -> Rules | None:
    """Return the mode that recomputes what `_PARTS` names in a layer; None where it has nothing of that."""
    path_of = {id(module): path for path, module in named_modules(layer)}
    found = [next((c for n in row if isinstance(c := getattr(layer, n, None), nn.Module)), None) for row in _PARTS]
    paths = dict.fromkeys(path_of[id(child)] for child in found if id(child) in path_of)  # two names may be one module
    return Rules([*(Rule("recompute", module=path) for path in paths), Rule("save")]) if paths else None


def normalize_activation_checkpointing_scope(value: object) -> tuple[str, ...]:
    """Return a scope as a tuple of its parts, from a text such as "vision, audio", a list, or None for all.

    >>> normalize_activation_checkpointing_scope("Language+vision"), normalize_activation_checkpointing_scope(None)
    (('language', 'vision'), ('all',))

    Raises:
        ModeError: a part is not known, or "all" is not alone.
    """
    given = list(cast("Sequence[object]", value)) if isinstance(value, (list, tuple, set)) else [value or "all"]
    if not all(isinstance(item, str) for item in given):
        raise ModeError(f"activation_checkpointing_scope = {value!r} is not a text or a list of texts.")
    texts = ",".join(str(item) for item in given).lower().replace("-", "_").replace("+", ",").split(",")
    parts = [{"default": "all", "auto": "all"}.get(part, part) for text in texts if (part := text.strip())]
    for part in parts:
        if part not in _SCOPES:
            raise ModeError(
                f"activation_checkpointing_scope names {part!r}. Permitted: {', '.join(_SCOPES)}."
                f"{did_you_mean(part, _SCOPES)}"
            )
    scope = tuple(dict.fromkeys(parts)) or ("all",)
    if "all" in scope and len(scope) > 1:
        raise ModeError(f"activation_checkpointing_scope = {value!r}: 'all' cannot be combined with others.")
    return scope


def layers_in_scope(model: nn.Module, scope: tuple[str, ...]) -> list[nn.Module]:
    """List the layers of the towers in a scope. Layers that are frozen as a whole are left out, as there."""
    wanted = {t for part in scope for t in {"all": TOWERS, "multimodal": TOWERS[1:]}.get(part, (part,))}
    found: list[nn.Module] = []
    for tower in TOWERS:
        with contextlib.suppress(StructureError):  # this model has none of that
            found += [block.module for block in find_blocks(model, scope=[tower])] if tower in wanted else []
    return [layer for layer in found if any(p.requires_grad for p in layer.parameters())]
