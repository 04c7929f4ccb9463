"""Name what the modules inside a block are for.

The first half of this file is data: the names that model authors give. The second half reads a block by them. A role is
read from class names, attribute names and what a module holds, never from the weights or a run. Where a model says
itself what its modules are for, it is believed: NOTE [ actmem_targets ].

Wrappers inside a block (torch.compile, FSDP) and adapters (PEFT) are looked through: a module has the role of what it
wraps, at its own path.
"""

import re
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from actmem.plan import OWN
from actmem.structure.declared import Targets, check_every_glob_matches, declarations, declared_on, matching
from actmem.structure.identity import Placed, named_modules, plain_path, unwrapped

ROLES: dict[str, str] = {
    "norm": "normalisation layers of any kind",
    "attention": "softmax attention, with its projections",
    "attn_proj": "attention modules, and output projections beside them; the engine leaves the attention kernel out",
    "mla_up_proj": "up-projections of multi-head latent attention",
    "linear_attn": "Mamba, gated delta nets and other token mixers that are linear in the sequence",
    "mlp": "dense feed-forward layers",
    "routed_experts": "the experts of a mixture of experts that a router chooses among",
    "moe_act": "the same modules as routed_experts; the engine takes their pointwise operators only",
    "shared_experts": "the experts of a mixture of experts that every token passes",
    "router": "what chooses the experts of a token",
}
"""Every role that `roles` can find, and its meaning."""

# Class names, then attribute names. An attribute name is the last part of a path.
_NORM_CLASS = re.compile(r"norm", re.IGNORECASE)
# Upper case matters where a short name is part of longer words: GptOssMLP is no SSM.
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
# Beside routed experts this is a shared expert, alone it is the dense part.
_SHARED_MLP_NAME = "shared_mlp"
_ROUTER_NAMES = frozenset({"gate", "router"})
_MLA_UP_NAMES = frozenset(
    {"q_b_proj", "kv_b_proj", "k_b_proj", "v_b_proj", "wq_b", "wkv_b", "q_up_proj", "kv_up_proj"}
    | {"linear_q_up_proj", "linear_kv_up_proj"}
)

# Attentions that keep their output projection beside themselves, by its path seen from their parent.
_PROJECTION_BESIDE = "output.dense"
# Blocks without a module for the dense part: the parts themselves, by their paths in the block, and their activations.
_MLP_PARTS = (
    ("intermediate", "output.dense"),
    ("intermediate_query", "output_query.dense"),
    ("linear1", "linear2"),
    ("fc1", "fc2"),
    ("ffn", "ffn_output"),
)
_ACTIVATION_PARTS = ("activation", "activation_fn")
# What parametrizations keep is about weights, not about activations, whatever it is called.
_WEIGHTS_ONLY = "parametrizations"
# PEFT keeps the module that it adapts as a child of one of these names.
_ADAPTED = ("base_layer", "original_module")

_Modules = dict[str, nn.Module]


def roles(block: nn.Module, *, declared: Targets | None = None) -> dict[str, tuple[str, ...]]:
    """Find what the modules of a block are for, by structure and names, or as the block declares it.

    Args:
        block: one block of a model.
        declared: target -> globs, as in `actmem_targets`, from a module that holds the block. The block's own attribute
            comes before it. `find_roles` gives it.

    Returns:
        For each role that the block has (see `ROLES`), and each declared `own:NAME`, the module paths inside the block,
        in order. A path covers everything below it. The empty path is the block itself.

    Raises:
        StructureError: the block's attribute `actmem_targets` is not what it should be.

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
    """Return the roles in each block of a model, with what the model declares.

    Raises:
        StructureError: an attribute `actmem_targets` is not what it should be, or names modules that no block has.

    >>> from actmem.structure import find_blocks
    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2)])
    >>> model.actmem_targets = {"own:squash": ("1",)}
    >>> find_roles(model, find_blocks(model))
    [{'own:squash': ('1',)}, {'own:squash': ('1',)}]
    """
    check_every_glob_matches(model, blocks)
    found: list[dict[str, tuple[str, ...]]] = []
    for block in blocks:
        declared = {t: globs for outer in declarations(model, block.path) for t, globs in outer.targets.items()}
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
    """Return modules by plain path, without wrappers and what is inside adapters; and the real path of all modules."""
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
    children = dict(inner.named_children())
    for name in _ADAPTED:
        if name in children:
            return _core(children[name])
    return inner


def _is_norm(path: str, module: nn.Module) -> bool:
    return bool(path) and _is_named(module, _NORM_CLASS)


def _is_attention(path: str, module: nn.Module) -> bool:
    named = _is_named(module, _ATTENTION_CLASS) or _name(path) in _ATTENTION_NAMES
    return named and not _is_linear_attn(path, module) and _owns_projections(module)


def _is_linear_attn(path: str, module: nn.Module) -> bool:
    if _name(path) in _LINEAR_ATTN_NAMES:
        return _owns_projections(module)
    # The latent attention of a model that calls itself linear is not, and Rwkv's feed-forward mixes no tokens.
    other = _is_named(module, _MLP_CLASS) or not _MLA_UP_NAMES.isdisjoint(dict(module.named_children()))
    # A short convolution or a scan is a part of such a mixer: the whole projects in and out.
    whole = sum(_is_projection(_core(child)) for child in module.children()) > 1
    return _is_named(module, _LINEAR_ATTN_CLASS) and whole and not other


def _is_experts(path: str, module: nn.Module) -> bool:
    named = _name(path) in _EXPERTS_NAMES or type(module).__name__.endswith("Experts")
    return named and _name(path) not in _SHARED_EXPERTS_NAMES


def _shared_experts(modules: _Modules, experts: list[str]) -> list[str]:
    names = _SHARED_EXPERTS_NAMES | ({_SHARED_MLP_NAME} if experts else frozenset[str]())
    return [path for path in modules if _name(path) in names]


def _is_router(modules: _Modules, path: str) -> bool:
    beside_experts = any(_sibling(path, name) in modules for name in _EXPERTS_NAMES)
    return _name(path) in _ROUTER_NAMES and (beside_experts or _is_named(modules[path], _ROUTER_CLASS))


def _mla_up(modules: _Modules, attention: list[str]) -> list[str]:
    return [path for path in modules if _name(path) in _MLA_UP_NAMES and path.rpartition(".")[0] in attention]


def _dense(modules: _Modules, apart: list[str]) -> list[str]:
    named = _not_in(_those(modules, lambda path, _: _is_mlp(modules, path)), apart)
    whole = [path for path in _outermost(named) if not any(_is_inside(other, path) for other in apart)]
    return whole or _mlp_parts(modules)


def _is_mlp(modules: _Modules, path: str) -> bool:
    named = _is_named(modules[path], _MLP_CLASS) or _name(path) in _MLP_NAMES
    inside = (part for other, part in modules.items() if other == path or _is_inside(other, path))
    return named and sum(map(_is_projection, inside)) > 1


def _mlp_parts(modules: _Modules) -> list[str]:
    halves = {part for pair in _MLP_PARTS if all(part in modules for part in pair) for part in pair}
    return [path for path in modules if path in halves or (halves and path in _ACTIVATION_PARTS)]


def _attention_and_beside(modules: _Modules, attention: Iterable[str]) -> list[str]:
    found: list[str] = []
    for path in attention:
        beside = _sibling(path, _PROJECTION_BESIDE)
        # In the block itself `output.dense` is the second half of the dense part.
        found += [path, beside] if "." in path and beside in modules else [path]
    return found


def _owns_projections(module: nn.Module) -> bool:
    """Tell whether a module multiplies by weights itself, and does not only hold modules that do."""
    own = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    return own or any(_is_projection(_core(child)) for child in module.children())


def _is_projection(module: nn.Module) -> bool:
    if _is_named(module, _NO_PROJECTION_CLASS):
        return False
    # Not by `module.weight`: a parametrised weight is computed when it is read, and spectral norm iterates then.
    own = dict(module.named_parameters(recurse=False))
    parametrised = dict(module.named_parameters(prefix="")).get("parametrizations.weight.original")
    weight = own.get("weight", parametrised)
    return (weight is not None and weight.dim() > 1) or _is_named(module, _LINEAR_CLASS)


def _those(modules: _Modules, wanted: Callable[[str, nn.Module], bool]) -> list[str]:
    return [path for path, module in modules.items() if wanted(path, module)]


def _inner(paths: list[str]) -> list[str]:
    """Leave the block itself out where something inside it is meant."""
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
    return pattern.search(type(module).__name__) is not None


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _sibling(path: str, name: str) -> str:
    parent = path.rpartition(".")[0]
    return f"{parent}.{name}" if parent else name
