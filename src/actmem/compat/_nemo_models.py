"""What NeMo Automodel reads and changes in models and configs, under its own names. Imported from `compat.nemo`."""

# pyright: reportUnusedFunction=false
# The names with an underscore are NeMo's; compat.nemo hands them on.

from __future__ import annotations

import contextlib
from typing import Any, cast

from torch import nn

from actmem.errors import ModeError
from actmem.modes import Mode, Rules
from actmem.plan import Rule
from actmem.torchcompat import keep_graph_order, named_modules

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


def _disable_dynamo_lru_cache() -> None:
    """Have Dynamo try graphs in the order in which they were made, from now on."""
    keep_graph_order()


def _replace_child_module(root: nn.Module, target: nn.Module, replacement: nn.Module) -> bool:
    """Put a module in the place of another below `root`; False where that is not found. Not used here."""
    for parent in root.modules():
        for name, child in parent.named_children():
            if child is target:
                parent.register_module(name, replacement)
                return True
    return False


def parts_mode(layer: nn.Module) -> Mode:
    """Return the mode that recomputes what `_PARTS` names in a layer.

    Raises:
        ModeError: the layer has none of them.
    """
    path_of = {id(module): path for path, module in named_modules(layer)}
    found = [next((c for n in row if isinstance(c := getattr(layer, n, None), nn.Module)), None) for row in _PARTS]
    rules = [Rule("recompute", module=path_of[id(child)]) for child in found if id(child) in path_of]
    if not rules:
        names = ", ".join(name for row in _PARTS for name in row)
        raise ModeError(f"{type(layer).__name__} has no sub-module of these names: {names}. Apply to whole layers.")
    return Rules([*rules, Rule("save")])
