"""NeMo Automodel's names for layers, operators and contexts, over actmem's.

They are for torch's checkpoint, which runs code twice and must find the same state both times. The tape replays
operators, so attention uses the backend of the forward pass anyway, and these contexts change nothing there.

They are operator objects, as in NeMo. Operators that are not installed, for example those of DeepEP, are skipped.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint as torch_checkpoint

from actmem.compat._translation import resolved
from actmem.decision_rules import Rule
from actmem.errors import ModeError, StructureError
from actmem.modes import Rules
from actmem.ops import GROUPS, did_you_mean
from actmem.structure import find_blocks
from actmem.torchcompat import compute_intensive, named_modules

# pyright: reportUnusedFunction=false
# The names with an underscore are NeMo's; compat.nemo re-exports them.


TOWERS = ("language", "vision", "audio")
_SCOPES = ("all", *TOWERS, "multimodal")

_PARTS = (
    *(("mlp", "feed_forward", "ffn"), ("mlp_moe_gen",), ("self_attn", "attention", "attn", "linear_attn")),
    *(("input_layernorm", "attention_norm", "layer_norm1", "norm1"), ("input_layernorm_moe_gen",)),
    *(("post_attention_layernorm", "ffn_norm", "layer_norm2", "norm2"), ("post_attention_layernorm_moe_gen",)),
)
"""What sub-module checkpointing covers: in each row, the first attribute that a layer has."""


def detect_kv_sharing_and_maybe_disable_cache(model: nn.Module) -> bool:
    """Return whether layers share keys and values; if not, set `use_cache` to False in the config and its sub-configs.

    actmem itself does not need the cache to be off. The config is changed because callers rely on it.
    """
    config: Any = getattr(model, "config", None)
    text = getattr(config, "text_config", None) or config
    if (getattr(text, "num_kv_shared_layers", 0) or 0) > 0:
        return True
    kind = cast(Any, type(config))
    parts = [getattr(config, name, None) for name in getattr(kind, "sub_configs", None) or ("text_config",)]
    for part in [config] * (config is not None) + [p for p in parts if hasattr(p, "use_cache")]:
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # a read-only config stays as it is
            part.use_cache = False
    return False


def is_selective_activation_checkpointing(activation_checkpointing: object) -> bool:
    """Return whether a config value is the string "selective", ignoring case; a bool or None is not."""
    value = activation_checkpointing
    return isinstance(value, str) and value.lower().replace("-", "_") == "selective"


def unwrap_checkpoint_wrapper(module: nn.Module) -> nn.Module:
    """Return the module inside torch's checkpoint_wrapper; the module itself if it is not wrapped, as with actmem."""
    return getattr(module, "_checkpoint_wrapped_module", module)


def _replace_child_module(root: nn.Module, target: nn.Module, replacement: nn.Module) -> bool:
    """Replace a module below `root` by another; return False if it is not found. Not used here."""
    for parent in root.modules():
        for name, child in parent.named_children():
            if child is target:
                parent.register_module(name, replacement)
                return True
    return False


def named_parts(modules: Iterable[str]) -> list[str]:
    """Return what `parts_mode` would recompute in a layer with modules of these paths.

    >>> named_parts(["self_attn", "self_attn.q_proj", "mlp", "input_layernorm"])
    ['mlp', 'self_attn', 'input_layernorm']
    """
    names = set(modules)
    return [found for row in _PARTS if (found := next((name for name in row if name in names), None))]


def parts_mode(layer: nn.Module) -> Rules | None:
    """Return the mode that recomputes the `_PARTS` of a layer; None if it has none of them."""
    path_of = {id(module): path for path, module in named_modules(layer)}
    found = [next((c for n in row if isinstance(c := getattr(layer, n, None), nn.Module)), None) for row in _PARTS]
    paths = dict.fromkeys(path_of[id(child)] for child in found if id(child) in path_of)  # two names may be one module
    return Rules([*(Rule("recompute", module=path) for path in paths), Rule("save")]) if paths else None


def normalize_activation_checkpointing_scope(value: object) -> tuple[str, ...]:
    """Return a scope as a tuple of its parts, from a string such as "vision, audio", a list, or None for all.

    >>> normalize_activation_checkpointing_scope("Language+vision"), normalize_activation_checkpointing_scope(None)
    (('language', 'vision'), ('all',))

    Raises:
        ModeError: a part is not known, or "all" is not alone.
    """
    given = list(cast("Sequence[object]", value)) if isinstance(value, (list, tuple, set)) else [value or "all"]
    if not all(isinstance(item, str) for item in given):
        raise ModeError(f"activation_checkpointing_scope = {value!r} is not a string or a list of strings.")
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
    """Return the layers of the towers in a scope. Layers that are entirely frozen are skipped, as in NeMo."""
    wanted = {t for part in scope for t in {"all": TOWERS, "multimodal": TOWERS[1:]}.get(part, (part,))}
    found: list[nn.Module] = []
    for tower in TOWERS:
        with contextlib.suppress(StructureError):  # this model does not have that tower
            found += [block.module for block in find_blocks(model, scope=[tower])] if tower in wanted else []
    return [layer for layer in found if any(p.requires_grad for p in layer.parameters())]


# pyright: reportUnusedFunction=false


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
_TE_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
_FSDP_OPS = (
    *("fsdp.all_gather_copy_in", "fsdp.split_with_sizes_copy", "fsdp.chunk_cat", "fsdp.copy_", "c10d._allgather_base_"),
    *("aten.empty.memory_format", "aten.empty_like", "aten.view", "aten.split.Tensor", "aten.cat.out"),
)
"""Operators that FSDP2 runs to gather a unit's parameters, which may happen in only one of the two runs."""


@contextmanager
def _restored_sdpa(function: Any, backends: list[SDPBackend]) -> Generator[None]:
    now, functional.scaled_dot_product_attention = functional.scaled_dot_product_attention, function
    try:
        with sdpa_kernel(backends):
            yield
    finally:
        functional.scaled_dot_product_attention = now


def sdpa_backend_snapshot_context_fn() -> Contexts:
    """Return two contexts; the second restores the present state of SDPA: the function, and the enabled backends.

    >>> from torch.utils.checkpoint import checkpoint
    >>> x = torch.ones(1, 2, 4, requires_grad=True)
    >>> options = {"use_reentrant": False, "context_fn": sdpa_backend_snapshot_context_fn}
    >>> checkpoint(functional.scaled_dot_product_attention, x, x, x, **options).sum().backward()
    """
    cuda = torch.backends.cuda
    state = {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
    }
    return nullcontext(), _restored_sdpa(functional.scaled_dot_product_attention, [b for b, on in state.items() if on])


def _get_transformer_engine_attention_backend_cache() -> dict[Any, Any] | None:
    """Return Transformer Engine's cache of the attention backend it chose; None if it is not installed."""
    try:
        module = importlib.import_module(_TE_ATTENTION)
    except Exception:  # noqa: BLE001 - a broken installation counts as none
        return None
    cache = getattr(module, "_attention_backends", None)
    return cast("dict[Any, Any]", cache) if isinstance(cache, dict) else None


@contextmanager
def restored_cache(cache: dict[Any, Any], as_it_was: dict[Any, Any], inner: Any) -> Generator[None]:
    """Fill a cache with earlier contents, and restore its present contents on exit."""
    now = dict(cache)
    cache.clear()
    cache.update(as_it_was)
    try:
        with inner:
            yield
    finally:
        cache.clear()
        cache.update(now)


def ignore_sac_ops(ops: Iterable[object | None]) -> None:
    """Make torch's selective checkpointing ignore operators. None is accepted for one that does not exist."""
    ignored: set[Any] | None = getattr(torch_checkpoint, "SAC_IGNORED_OPS", None)
    if ignored is not None:
        ignored.update(op for op in ops if op is not None)


def ensure_profiler_ops_sac_ignored() -> None:
    """Make torch's selective checkpointing ignore the operators of `record_function`."""
    for name in ("_record_function_enter", "_record_function_enter_new", "_record_function_exit"):
        packet = resolved(torch.ops, f"profiler.{name}")
        if packet is not None:
            ignore_sac_ops([getattr(packet, overload) for overload in packet.overloads()])


def ensure_fsdp_ops_sac_ignored() -> None:
    """Make torch's selective checkpointing ignore the operators by which FSDP2 gathers parameters."""
    ignore_sac_ops(resolved(torch.ops, op if op.count(".") > 1 else f"{op}.default") for op in _FSDP_OPS)


def changes_nothing_here(context_fn: Callable[..., Any] | None) -> bool:
    """Return whether a context function only restores what a replay of operators restores anyway."""
    parts = [context_fn, getattr(context_fn, "func", None), *getattr(context_fn, "args", ())]
    known = {"sdpa_backend_snapshot_context_fn", "transformer_engine_attention_backend_snapshot_context_fn", "partial"}
    return all(getattr(part, "__name__", type(part).__name__) in known for part in parts if part is not None)


# pyright: reportUnusedFunction=false, reportPrivateUsage=false
# The names are NeMo's; compat.nemo re-exports them.


_ALTERNATING = ("mm", "linear", "_grouped_mm", "_scaled_grouped_mm")
_SAVED = (
    *("mm", "addmm", "bmm", "linear", "_scaled_mm", "topk", "max", "_flex_attention", "scaled_dot_product_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    "_scaled_dot_product_fused_attention_overrideable",
)
_SAVED_ELSEWHERE = (
    *("_c10d_functional.all_to_all_single", "_c10d_functional.reduce_scatter_tensor", "torch_attn._varlen_attn"),
    *("deepep.dispatch", "deepep.combine", "hybridep.dispatch", "hybridep.combine"),
)


def _resolve_op_attr(root: object, dotted_path: str) -> Any:
    """Follow a dotted path of attributes; return None if a part of it is missing."""
    return resolved(root, dotted_path)


def _resolve_torch_op(dotted_path: str, name: str | None = None, overload: str = "default") -> Any:
    """Return an operator of `torch.ops`, by a path such as `"aten.mm"` or `"aten.cat.out"`; None if absent.

    In older versions the parts were separate arguments.

    >>> _resolve_torch_op("aten.mm") is _resolve_torch_op("aten", "mm") is torch.ops.aten.mm.default
    True
    """
    path = dotted_path if name is None else f"{dotted_path}.{name}.{overload}"
    return resolved(torch.ops, f"{path}.default" if path.count(".") == 1 else path)


def _existing_ops(*ops: Any) -> frozenset[Any]:
    """Return the operators that are not None."""
    return frozenset(op for op in ops if op is not None)


def _default_compute_intensive_ops() -> tuple[Any, ...]:
    """Return torch's own list of expensive operators; if torch has none, actmem's copy of it (in NeMo: nothing)."""
    listed = compute_intensive() or GROUPS["compute_intensive"]
    return tuple(_existing_ops(*(_resolve_torch_op(*name.split(".")) for name in sorted(listed))))


def _ffpa_forward_ops() -> tuple[Any, ...]:
    """Return the operators of FFPA attention, which its import registers; none if it is not installed."""
    try:
        importlib.import_module("ffpa_attn.cute")
    except Exception:  # noqa: BLE001 - a broken installation counts as none
        return ()
    return tuple(_existing_ops(*map(_resolve_torch_op, ("ffpa_attn._fwd_cute", "ffpa_attn._varlen_fwd_cute"))))


def save_ops(more: Iterable[Any]) -> frozenset[Any]:
    """Return the operators whose results are saved, including those of a backend that must be imported first."""
    return _existing_ops(
        *_default_compute_intensive_ops(),
        *(_resolve_torch_op("aten", name) for name in _SAVED),
        *map(_resolve_torch_op, _SAVED_ELSEWHERE),
        *(_resolve_op_attr(torch, f"_higher_order_ops.{n}") for n in ("flex_attention", "inductor_compiled_code")),
        *more,
    )


_SELECTIVE_AC_MATMUL_OPS = _existing_ops(*(_resolve_torch_op("aten", name) for name in _ALTERNATING))
_SELECTIVE_AC_TO_COPY_OP = _resolve_torch_op("aten", "_to_copy")


def _is_cuda_to_cpu_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call copies from the accelerator to the host. The tape never replays such a copy."""
    target = kwargs.get("device")
    if func != _SELECTIVE_AC_TO_COPY_OP or not args or target is None:
        return False
    source = getattr(getattr(args[0], "device", None), "type", None)
    with contextlib.suppress(TypeError, RuntimeError):
        return source == "cuda" and torch.device(target).type == "cpu"
    return False
