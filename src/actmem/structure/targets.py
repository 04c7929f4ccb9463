"""Name what the modules inside a block are for.

The first half of this file is data: the names that model authors give. The second half reads a block by them. A role is
read from class names, attribute names and what a module holds, never from the weights or a run.
"""

import re
from collections.abc import Callable, Iterable

from torch import nn

from actmem.structure.identity import named_modules

ROLES: dict[str, str] = {
    "norm": "normalisation layers of any kind",
    "attention": "softmax attention, with its projections",
    "attn_proj": "projections and norms that belong to an attention module",
    "mla_up_proj": "up-projections of multi-head latent attention",
    "linear_attn": "Mamba, gated delta nets and other token mixers that are linear in the sequence",
    "mlp": "dense feed-forward layers",
    "routed_experts": "the experts of a mixture of experts that a router chooses among",
    "shared_experts": "the experts of a mixture of experts that every token passes",
    "router": "what chooses the experts of a token",
}
"""Every role that `roles` can find, and its meaning."""

# Class names, then attribute names. An attribute name is the last part of a path.
_NORM_CLASS = re.compile(r"norm", re.IGNORECASE)
_ATTENTION_CLASS = re.compile(r"attention|attn", re.IGNORECASE)
# Upper case matters here: GptOssMLP is no SSM.
_LINEAR_ATTN_CLASS = re.compile(r"Mamba|DeltaNet|LinearAtt|LightningAtt|R(wkv|WKV)|Retention|SSM|RGLRU|RgLru")
_MLP_CLASS = re.compile(r"mlp|feed_?forward|ffn|dense(relu|gated|act)", re.IGNORECASE)
_ROUTER_CLASS = re.compile(r"router|gate$|gating", re.IGNORECASE)
_EMBEDDING_CLASS = re.compile(r"embedding", re.IGNORECASE)

_ATTENTION_NAMES = frozenset({"self_attn", "cross_attn", "encoder_attn", "attn", "attention", "self_attention"})
_LINEAR_ATTN_NAMES = frozenset({"linear_attn", "mamba", "ssm"})
_MLP_NAMES = frozenset({"mlp", "feed_forward", "feedforward", "ffn", "ff"})
_EXPERTS_NAMES = frozenset({"experts"})
_SHARED_EXPERTS_NAMES = frozenset({"shared_expert", "shared_experts"})
_ROUTER_NAMES = frozenset({"gate", "router"})
_MLA_UP_NAMES = frozenset({"q_b_proj", "kv_b_proj", "wq_b", "wkv_b"})

# Attentions that keep their output projection beside themselves, by its path seen from their parent.
_PROJECTION_BESIDE = "output.dense"
# Blocks without a module for the dense part: the parts themselves, by their paths in the block.
_MLP_PARTS = (("intermediate", "output.dense"), ("linear1", "linear2"), ("fc1", "fc2"), ("ffn", "ffn_output"))
# What parametrizations keep is about weights, not about activations, whatever it is called.
_WEIGHTS_ONLY = "parametrizations"

_Modules = dict[str, nn.Module]


def roles(block: nn.Module) -> dict[str, tuple[str, ...]]:
    """Find what the modules of a block are for, by structure and names.

    Returns:
        For each role that the block has (see `ROLES`), the module paths inside the block, in order. A path covers
        everything below it. The empty path is the block itself.

    >>> found = roles(nn.TransformerEncoderLayer(4, 2, 8))
    >>> found["norm"], found["attention"], found["mlp"]
    (('norm1', 'norm2'), ('self_attn',), ('linear1', 'linear2'))
    """
    modules = {path: module for path, module in named_modules(block) if _WEIGHTS_ONLY not in path.split(".")}
    norm = _innermost(_those(modules, lambda path, module: bool(path) and _is_named(module, _NORM_CLASS)))
    linear_attn = _innermost(_those(modules, _is_linear_attn))
    attention = _innermost(_not_below(_those(modules, _is_attention), linear_attn))
    experts = _outermost(_those(modules, _is_experts))
    shared = _outermost(_those(modules, lambda path, _: _name(path) in _SHARED_EXPERTS_NAMES))
    router = _outermost(_those(modules, lambda path, module: _is_router(modules, path, module)))
    apart = [*attention, *linear_attn, *experts, *shared, *router]
    mlp = _outermost(_not_below(_those(modules, _is_mlp), apart))
    found = {
        "norm": norm,
        "attention": attention,
        "attn_proj": _projections(modules, attention),
        "mla_up_proj": [path for path in modules if _name(path) in _MLA_UP_NAMES],
        "linear_attn": linear_attn,
        "mlp": [path for path in mlp if not any(_is_inside(other, path) for other in apart)] or _mlp_parts(modules),
        "routed_experts": experts,
        "shared_experts": shared,
        "router": router,
    }
    return {role: tuple(paths) for role, paths in found.items() if paths}


def _is_attention(path: str, module: nn.Module) -> bool:
    named = _is_named(module, _ATTENTION_CLASS) or _name(path) in _ATTENTION_NAMES
    return named and not _is_linear_attn(path, module) and _owns_projections(module)


def _is_linear_attn(path: str, module: nn.Module) -> bool:
    named = _is_named(module, _LINEAR_ATTN_CLASS) or _name(path) in _LINEAR_ATTN_NAMES
    return named and _owns_projections(module)


def _is_experts(path: str, module: nn.Module) -> bool:
    named = _name(path) in _EXPERTS_NAMES or type(module).__name__.endswith("Experts")
    return named and _name(path) not in _SHARED_EXPERTS_NAMES


def _is_router(modules: _Modules, path: str, module: nn.Module) -> bool:
    beside_experts = any(_sibling(path, name) in modules for name in _EXPERTS_NAMES)
    return _name(path) in _ROUTER_NAMES and (beside_experts or _is_named(module, _ROUTER_CLASS))


def _is_mlp(path: str, module: nn.Module) -> bool:
    named = _is_named(module, _MLP_CLASS) or _name(path) in _MLP_NAMES
    num_projections = sum(_is_projection(part) for part in module.modules())
    return named and num_projections > 1


def _mlp_parts(modules: _Modules) -> list[str]:
    for parts in _MLP_PARTS:
        if all(part in modules for part in parts):
            return list(parts)
    return []


def _projections(modules: _Modules, attention: Iterable[str]) -> list[str]:
    found: list[str] = []
    for path in attention:
        children = modules[path].named_children()
        found += [
            _join(path, name) for name, child in children if _is_projection(child) or _is_named(child, _NORM_CLASS)
        ]
        beside = _sibling(path, _PROJECTION_BESIDE)
        # In the block itself `output.dense` is the second half of the dense part.
        if "." in path and beside in modules:
            found.append(beside)
    return found


def _owns_projections(module: nn.Module) -> bool:
    """Tell whether a module multiplies by weights itself, and does not only hold modules that do."""
    own = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    return own or any(_is_projection(child) for child in module.children())


def _is_projection(module: nn.Module) -> bool:
    # An adapter (PEFT) keeps the projection that it adapts as `base_layer`.
    base = module.get_submodule("base_layer") if "base_layer" in dict(module.named_children()) else module
    # Not by `base.weight`: a parametrised weight is computed when it is read, and spectral norm iterates then.
    own = dict(base.named_parameters(recurse=False))
    parametrised = dict(base.named_parameters(prefix="")).get("parametrizations.weight.original")
    weight = own.get("weight", parametrised)
    is_matrix = weight is not None and weight.dim() > 1
    return is_matrix and not _is_named(base, _EMBEDDING_CLASS) and not _is_named(base, _NORM_CLASS)


def _those(modules: _Modules, wanted: Callable[[str, nn.Module], bool]) -> list[str]:
    return [path for path, module in modules.items() if wanted(path, module)]


def _innermost(paths: list[str]) -> list[str]:
    return [path for path in paths if not any(_is_inside(other, path) for other in paths)]


def _outermost(paths: list[str]) -> list[str]:
    return _not_below(paths, paths)


def _not_below(paths: list[str], tops: Iterable[str]) -> list[str]:
    tops = list(tops)
    return [path for path in paths if not any(_is_inside(path, top) for top in tops)]


def _is_inside(path: str, top: str) -> bool:
    return path != top and (not top or path.startswith(f"{top}."))


def _is_named(module: nn.Module, pattern: re.Pattern[str]) -> bool:
    return pattern.search(type(module).__name__) is not None


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _sibling(path: str, name: str) -> str:
    return _join(path.rpartition(".")[0], name)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
