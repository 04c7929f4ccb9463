"""Name what the modules inside a block are for, and which type a layer has.

The first half of this file is data: the names that model authors use. The second half reads a block by them. A role is
inferred from class names, attribute names and submodules, never from the weights or a run. What a model declares about
its own modules takes precedence: NOTE [ actmem_targets ].

Wrappers inside a block (torch.compile, FSDP) and adapters (PEFT) are looked through: a wrapper has the role of the
module it wraps, at its own path.

NOTE [ layer types ]

`full_attention`, `sliding_attention`, `chunked_attention`, `linear_attention` (Mamba and delta nets too), `hybrid`, ...
These are consulted in order, and the first answer counts:

1. the block: its `attention_type`, `layer_type` or `block_type`;
2. its token mixers: the same names, then `is_sliding` and `sliding_window`;
3. the `layer_types` of their config, at their `layer_idx`;
4. the class names of the token mixers: linear ones, and hybrids;
5. the rest of the config: a window that all layers have, or none.

If the mask comes from elsewhere, as in most models without such a config, there is no answer.

NOTE [ actmem_targets ]

A class or an instance of a block, or of any module that contains blocks, may have an attribute

    actmem_targets = {"norm": ("ln_*",), "own:adapter": ("down", "up")}

It maps a target to globs over module paths inside a block, and replaces what would be found for that target there. The
nearest attribute wins, target by target: first the block's own, then that of the module containing it, and so on
outwards. As in `Rule(module=...)`, a glob is matched against whole paths and `*` also matches dots. `.` is the block
itself. An empty tuple means that the block does not have the target. A custom target is named `own:` and an identifier.
"""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import cast

from torch import nn

from actmem.decision_rules import OWN, check_target
from actmem.errors import ModeError, StructureError
from actmem.ops import did_you_mean
from actmem.structure.identity import Placed, named_modules, plain_path, unwrapped

Targets = Mapping[str, Sequence[str]]

_ATTRIBUTE = "actmem_targets"
_EXAMPLE = f'{_ATTRIBUTE} = {{"norm": ("ln_*",)}}'
_MAX_LISTED = 12


@dataclass(frozen=True)
class Declaration:
    """One attribute, and where it is."""

    owner: str
    """The class that has it, for messages."""
    path: str
    """The path of the module that has it."""
    targets: Targets
    """Its contents, checked except for whether the globs match."""


def declared_on(module: nn.Module) -> Targets:
    """Return the targets that a module declares, checked; empty if it has no such attribute."""
    inner = unwrapped(module)
    # Wrappers such as PEFT's forward every attribute of the module they wrap. Read it only from the module itself.
    if inspect.getattr_static(inner, _ATTRIBUTE, None) is None:
        return {}
    return _checked(getattr(inner, _ATTRIBUTE), type(inner).__name__)


def declarations(model: nn.Module, block_path: str) -> list[Declaration]:
    """Return the attributes that apply to a block, outermost first; the block's own comes last."""
    found: list[Declaration] = []
    for path in _outwards(block_path):
        module = model.get_submodule(path)
        targets = declared_on(module)
        if targets:
            found.append(Declaration(type(unwrapped(module)).__name__, path, targets))
    return found[::-1]


def matching(paths: Sequence[str], globs: Sequence[str]) -> list[str]:
    """Return the paths that a glob matches, in order, without paths below another: a path covers what is below it."""
    named = [path for path in paths if any(_matches(path, glob) for glob in globs)]
    return [path for path in named if not any(path != top and _below(path, top) for top in named)]


def check_every_glob_matches(
    model: nn.Module, blocks: Sequence[Placed], applying: Sequence[Sequence[Declaration]]
) -> None:
    """Raise if a declared glob matches no module in any block that it applies to.

    Args:
        model: the model.
        blocks: its blocks.
        applying: what `declarations` returned for each of them.
    """
    unmatched: dict[tuple[str, str, str], Declaration] = {}
    matched: set[tuple[str, str, str]] = set()
    for block, its_own in zip(blocks, applying, strict=True):
        paths = paths_in(model.get_submodule(block.path)) if its_own else []
        for declaration in its_own:
            for target, globs in declaration.targets.items():
                for glob in globs:
                    # A block's own attribute usually comes from its class: one matching block is enough.
                    place = declaration.owner if declaration.path == block.path else declaration.path
                    key = (place, target, glob)
                    if any(_matches(path, glob) for path in paths):
                        matched.add(key)
                    unmatched.setdefault(key, declaration)
    for (place, target, glob), declaration in unmatched.items():
        if (place, target, glob) not in matched:
            inside = [b for b in blocks if not declaration.path or _below(b.path, declaration.path)] or list(blocks)
            raise StructureError(_nothing_matched(model, inside[0], declaration, target, glob))


def paths_in(block: nn.Module) -> list[str]:
    """Return the module paths inside a block, without prefixes of wrappers. The empty path is the block itself."""
    return list(dict.fromkeys(plain_path(block, path) for path, _ in named_modules(block)))


def _checked(value: object, owner: str) -> Targets:
    found = f"{owner}.{_ATTRIBUTE}"
    if not isinstance(value, Mapping):
        raise StructureError(
            f"{found} = {value!r} is not a dict. Expected target -> tuple of globs over module paths inside a block: "
            f"{_EXAMPLE}"
        )
    for target, globs in cast("Mapping[object, object]", value).items():
        try:
            check_target(str(target))
        except ModeError as error:
            raise StructureError(f"{found}: {error} Write, for example: {_EXAMPLE}") from None
        every = cast("Sequence[object]", globs)
        if not isinstance(globs, tuple | list) or not all(isinstance(glob, str) and glob for glob in every):
            line = f'{_ATTRIBUTE} = {{"{target}": ({globs!r},)}}' if isinstance(globs, str) and globs else _EXAMPLE
            raise StructureError(
                f"{found}[{target!r}] = {globs!r} is not a tuple of globs over module paths inside a block. "
                f"Write: {line}"
            )
    return cast("Targets", value)


def _nothing_matched(model: nn.Module, block: Placed, declaration: Declaration, target: str, glob: str) -> str:
    paths = [path for path in paths_in(model.get_submodule(block.path)) if path]
    listed = f"{', '.join(paths[:_MAX_LISTED])}{', ...' if len(paths) > _MAX_LISTED else ''}"
    near = difflib.get_close_matches(glob, paths, n=1)
    example = near[0] if near else next(iter(paths), ".")
    return (
        f"{declaration.owner}.{_ATTRIBUTE}[{target!r}] names {glob!r}, which matches no module in any block that it "
        f"applies to.{did_you_mean(glob, paths)} Module paths inside {block.path or 'the block'}: {listed or 'none'}. "
        f'Remove it, or name one of these: {_ATTRIBUTE} = {{"{target}": ("{example}",)}}'
    )


def _outwards(path: str) -> Iterator[str]:
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _matches(path: str, glob: str) -> bool:
    return fnmatchcase(path, glob) if path else glob == "."


def _below(path: str, top: str) -> bool:
    return not top or path == top or path.startswith(f"{top}.")


ROLES: dict[str, str] = {
    "norm": "normalisation layers of any kind",
    "attention": "softmax attention, with its projections",
    "attn_proj": "attention modules, and output projections next to them; the engine skips the attention kernel",
    "mla_up_proj": "up-projections of multi-head latent attention",
    "linear_attn": "Mamba, gated delta nets and other token mixers that are linear in the sequence",
    "mlp": "dense feed-forward layers",
    "routed_experts": "the experts of a mixture of experts that a router chooses from",
    "moe_act": "the same modules as routed_experts; the engine selects only their pointwise operators",
    "shared_experts": "the experts of a mixture of experts that every token passes through",
    "router": "the module that chooses the experts for a token",
}
"""Every role that `roles` can find, and its meaning."""

# Class names, then attribute names. An attribute name is the last part of a path.
_NORM_CLASS = re.compile(r"norm", re.IGNORECASE)
# Case matters where a short name is part of longer words: GptOssMLP is not an SSM.
_ATTENTION_CLASS = re.compile(r"(?i:attention|attn)|MLA$")
_LINEAR_ATTN_CLASS = re.compile(
    r"Mamba|Delta(Net|Att|Rule)|LinearAtt|LightningAtt|R(wkv|WKV)|Retention|SSM|R(GLRU|glru|gLru)|RecurrentBlock"
    r"|ShortConv|[msx]LSTMLayer"
)
_MLP_CLASS = re.compile(r"mlp|feed_?forward|ffn|dense(relu|gated|act)", re.IGNORECASE)
_ROUTER_CLASS = re.compile(r"router|gate$|gating", re.IGNORECASE)
_LINEAR_CLASS = re.compile(r"Linear\w*$")
_NO_PROJECTION_CLASS = re.compile(r"embedding|norm", re.IGNORECASE)

_ATTENTION_NAMES = frozenset({"self_attn", "cross_attn", "encoder_attn", "attn", "attention", "self_attention"})
_LINEAR_ATTN_NAMES = frozenset({"linear_attn", "mamba", "ssm"})
_MLP_NAMES = frozenset({"mlp", "feed_forward", "feedforward", "ffn", "ff"})
_EXPERTS_NAMES = frozenset({"experts"})
_SHARED_EXPERTS_NAMES = frozenset({"shared_expert", "shared_experts"})
# Next to routed experts this is a shared expert; on its own it is the dense part.
_SHARED_MLP_NAME = "shared_mlp"
_ROUTER_NAMES = frozenset({"gate", "router"})
_MLA_UP_NAMES = frozenset(
    {"q_b_proj", "kv_b_proj", "k_b_proj", "v_b_proj", "wq_b", "wkv_b", "q_up_proj", "kv_up_proj"}
    | {"linear_q_up_proj", "linear_kv_up_proj"}
)

# Attention modules with the output projection next to them: its path relative to their parent.
_PROJECTION_BESIDE = "output.dense"
# Blocks without a module for the dense part: its layers, by their paths in the block, and their activation functions.
_MLP_PARTS = (
    ("intermediate", "output.dense"),
    ("intermediate_query", "output_query.dense"),
    ("linear1", "linear2"),
    ("fc1", "fc2"),
    ("ffn", "ffn_output"),
)
_ACTIVATION_PARTS = ("activation", "activation_fn")
# Modules inside parametrizations act on weights, not on activations, whatever they are called.
_WEIGHTS_ONLY = "parametrizations"
# PEFT keeps the module that it adapts as a child with one of these names.
_ADAPTED = ("base_layer", "original_module")

_Modules = dict[str, nn.Module]


def roles(block: nn.Module, *, declared: Targets | None = None) -> dict[str, tuple[str, ...]]:
    """Find the roles of the modules of a block, by structure and names, or as the block declares them.

    Args:
        block: one block of a model.
        declared: target -> globs, as in `actmem_targets`, from a module that holds the block. The block's own attribute
            takes precedence. `find_roles` passes it.

    Returns:
        For each role that the block has (see `ROLES`), and each declared `own:NAME`, the module paths inside the block,
        in order. A path covers everything below it. The empty path is the block itself.

    Raises:
        StructureError: the block's attribute `actmem_targets` is malformed.

    >>> found = roles(nn.TransformerEncoderLayer(4, 2, 8))
    >>> found["norm"], found["attention"], found["mlp"]
    (('norm1', 'norm2'), ('self_attn',), ('linear1', 'linear2'))
    >>> roles(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), declared={"own:squash": ("1",)})
    {'own:squash': ('1',)}
    """
    modules, places = _read(block)
    asked = {**(declared or {}), **declared_on(block)}
    said = {target: matching(list(places), globs) for target, globs in asked.items()}
    found = {**_found(modules, said), **{target: paths for target, paths in said.items() if target.startswith(OWN)}}
    return {role: tuple(places[path] for path in paths) for role, paths in found.items() if paths}


def find_roles(model: nn.Module, blocks: Sequence[Placed]) -> list[dict[str, tuple[str, ...]]]:
    """Return the roles in each block of a model, including those that the model declares.

    Raises:
        StructureError: an attribute `actmem_targets` is malformed, or names modules that no block has.

    >>> from actmem.structure import find_blocks
    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2)])
    >>> model.actmem_targets = {"own:squash": ("1",)}
    >>> find_roles(model, find_blocks(model))
    [{'own:squash': ('1',)}, {'own:squash': ('1',)}]
    """
    applying = [declarations(model, block.path) for block in blocks]
    check_every_glob_matches(model, blocks, applying)
    found: list[dict[str, tuple[str, ...]]] = []
    for block, its_own in zip(blocks, applying, strict=True):
        declared = {t: globs for outer in its_own for t, globs in outer.targets.items()}
        found.append(roles(model.get_submodule(block.path), declared=declared))
    return found


def _found(modules: _Modules, said: dict[str, list[str]]) -> dict[str, list[str]]:
    def either(role: str, find: Callable[[], list[str]]) -> list[str]:
        return said[role] if role in said else find()

    linear_attn = either("linear_attn", lambda: _outermost(_inner(_those(modules, _is_linear_attn))))
    attention = either("attention", lambda: _innermost(_not_in(_those(modules, _is_attention), linear_attn)))
    experts = either("routed_experts", lambda: _outermost(_those(modules, _is_experts)))
    shared = either("shared_experts", lambda: _outermost(_shared_experts(modules, experts)))
    router = either("router", lambda: _outermost(_those(modules, lambda path, _: _is_router(modules, path))))
    apart = [*attention, *linear_attn, *experts, *shared, *router]
    return {
        "norm": either("norm", lambda: _innermost(_those(modules, _is_norm))),
        "attention": attention,
        "attn_proj": either("attn_proj", lambda: _attention_and_beside(modules, attention)),
        "mla_up_proj": either("mla_up_proj", lambda: _mla_up(modules, attention)),
        "linear_attn": linear_attn,
        "mlp": either("mlp", lambda: _dense(modules, apart)),
        "routed_experts": experts,
        "moe_act": either("moe_act", lambda: experts),
        "shared_experts": shared,
        "router": router,
    }


def _read(block: nn.Module) -> tuple[_Modules, dict[str, str]]:
    """Return modules by plain path, without wrappers and the insides of adapters; and the real path of every module."""
    modules: _Modules = {}
    places: dict[str, str] = {}
    sealed: set[str] = set()
    for path, module in named_modules(block):
        plain = plain_path(block, path)
        parent = plain.rpartition(".")[0]
        if plain in places:
            continue
        places[plain] = path
        if (plain and parent in sealed) or _name(plain) == _WEIGHTS_ONLY:
            sealed.add(plain)
            continue
        modules[plain] = _core(module)
        if modules[plain] is not unwrapped(module):
            sealed.add(plain)
    return modules, places


def _core(module: nn.Module) -> nn.Module:
    inner = unwrapped(module)
    children: dict[str, nn.Module | None] = vars(inner)["_modules"]
    for name in _ADAPTED:
        if (adapted := children.get(name)) is not None:
            return _core(adapted)
    return inner


def _is_norm(path: str, module: nn.Module) -> bool:
    return bool(path) and _is_named(module, _NORM_CLASS)


def _is_attention(path: str, module: nn.Module) -> bool:
    named = _name(path) in _ATTENTION_NAMES or _is_named(module, _ATTENTION_CLASS)
    return named and not _is_linear_attn(path, module) and _owns_projections(module)


def _is_linear_attn(path: str, module: nn.Module) -> bool:
    if _name(path) in _LINEAR_ATTN_NAMES:
        return _owns_projections(module)
    if not _is_named(module, _LINEAR_ATTN_CLASS):
        return False
    # The latent attention of a model that calls itself linear is not linear, and Rwkv's feed-forward mixes no tokens.
    other = _is_named(module, _MLP_CLASS) or not _MLA_UP_NAMES.isdisjoint(dict(module.named_children()))
    # A short convolution or a scan is only a part of such a mixer: the mixer itself projects in and out.
    return not other and sum(_is_projection(_core(child)) for child in module.children()) > 1


def _is_experts(path: str, module: nn.Module) -> bool:
    named = _name(path) in _EXPERTS_NAMES or type(module).__name__.endswith("Experts")
    return named and _name(path) not in _SHARED_EXPERTS_NAMES


def _shared_experts(modules: _Modules, experts: list[str]) -> list[str]:
    names = _SHARED_EXPERTS_NAMES | ({_SHARED_MLP_NAME} if experts else frozenset[str]())
    return [path for path in modules if _name(path) in names]


def _is_router(modules: _Modules, path: str) -> bool:
    if _name(path) not in _ROUTER_NAMES:
        return False
    beside_experts = any(_sibling(path, name) in modules for name in _EXPERTS_NAMES)
    return beside_experts or _is_named(modules[path], _ROUTER_CLASS)


def _mla_up(modules: _Modules, attention: list[str]) -> list[str]:
    return [path for path in modules if _name(path) in _MLA_UP_NAMES and path.rpartition(".")[0] in attention]


def _dense(modules: _Modules, apart: list[str]) -> list[str]:
    named = _not_in(_those(modules, lambda path, _: _is_mlp(modules, path)), apart)
    whole = [path for path in _outermost(named) if not any(_is_inside(other, path) for other in apart)]
    return whole or _mlp_parts(modules)


def _is_mlp(modules: _Modules, path: str) -> bool:
    named = _name(path) in _MLP_NAMES or _is_named(modules[path], _MLP_CLASS)
    inside = (part for other, part in modules.items() if other == path or _is_inside(other, path))
    return named and sum(map(_is_projection, inside)) > 1


def _mlp_parts(modules: _Modules) -> list[str]:
    halves = {part for pair in _MLP_PARTS if all(part in modules for part in pair) for part in pair}
    return [path for path in modules if path in halves or (halves and path in _ACTIVATION_PARTS)]


def _attention_and_beside(modules: _Modules, attention: Iterable[str]) -> list[str]:
    found: list[str] = []
    for path in attention:
        beside = _sibling(path, _PROJECTION_BESIDE)
        # Directly in the block, `output.dense` is the second half of the dense part.
        found += [path, beside] if "." in path and beside in modules else [path]
    return found


def _owns_projections(module: nn.Module) -> bool:
    """Return whether a module multiplies by weights itself, rather than only containing modules that do."""
    own = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    return own or any(_is_projection(_core(child)) for child in module.children())


def _is_projection(module: nn.Module) -> bool:
    if _is_named(module, _NO_PROJECTION_CLASS):
        return False
    # Not through `module.weight`: reading a parametrised weight computes it, and spectral norm iterates each time.
    if _is_named(module, _LINEAR_CLASS):
        return True
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None:
        parametrised = (part for name, part in module.named_children() if name == "parametrizations")
        weight = next((dict(part.named_parameters()).get("weight.original") for part in parametrised), None)
    return weight is not None and weight.dim() > 1


def _those(modules: _Modules, wanted: Callable[[str, nn.Module], bool]) -> list[str]:
    return [path for path, module in modules.items() if wanted(path, module)]


def _inner(paths: list[str]) -> list[str]:
    """Drop the block itself if something inside it is meant."""
    return [path for path in paths if path] or paths


def _innermost(paths: list[str]) -> list[str]:
    return [path for path in paths if not any(_is_inside(other, path) for other in paths)]


def _outermost(paths: list[str]) -> list[str]:
    return [path for path in paths if not any(_is_inside(path, top) for top in paths)]


def _not_in(paths: list[str], tops: list[str]) -> list[str]:
    return [path for path in paths if not any(path == top or _is_inside(path, top) for top in tops)]


def _is_inside(path: str, top: str) -> bool:
    return path != top and (not top or path.startswith(f"{top}."))


def _is_named(module: nn.Module, pattern: re.Pattern[str]) -> bool:
    return _matches_pattern(type(module).__name__, pattern)


@functools.cache
def _matches_pattern(name: str, pattern: re.Pattern[str]) -> bool:
    return pattern.search(name) is not None


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _sibling(path: str, name: str) -> str:
    parent = path.rpartition(".")[0]
    return f"{parent}.{name}" if parent else name


_FULL, _SLIDING, _LINEAR, _BOTH = "full_attention", "sliding_attention", "linear_attention", "hybrid"
_NAMES = ("attention_type", "layer_type", "block_type")
# Names from older versions, and from models with names of their own, mapped to the current ones.
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
# A config with such a field has layers of several kinds, but does not say here which is which.
_MIXED = re.compile(r"window|fullatt|(local|global|sparse)_att|att\w*_chunk")


def layer_type(block: nn.Module) -> str | None:
    """Return what kind of token mixing a block does, as transformers spells it; None if that is unknown.

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
