"""The operators that the newest prime-rl saves by default, and its syntax for others. Imported from `compat.prime_rl`.

prime-rl always saves a few others too (`topk`, DeepEP's exchange, copies to the host); the tape never replays those.
"""

from __future__ import annotations

from collections.abc import Sequence

from actmem.errors import ModeError
from actmem.torchcompat import all_operator_names

__all__ = [
    "DEFAULT_SELECTIVE_SAVE_NAMESPACES",
    "DEFAULT_SELECTIVE_SAVE_OPERATIONS",
    "DEFAULT_SELECTIVE_TARGETS",
    "operators_to_save",
]

_SDPA = ("attention_math", "cudnn_attention", "efficient_attention", "flash_attention", "flash_attention_for_cpu")
DEFAULT_SELECTIVE_SAVE_NAMESPACES = frozenset(
    {"_c10d_functional", "flash_attn", "flash_attn_3", "prime_rl_collectives", "prime_rl_ring"}
)
DEFAULT_SELECTIVE_SAVE_OPERATIONS = frozenset(
    {
        *(f"aten::_scaled_dot_product_{kind}" for kind in (*_SDPA, "fused_attention_overrideable")),
        *("aten::_efficient_attention_forward", "aten::_flash_attention_forward", "aten::convolution"),
        *(f"aten::{name}" for name in ("mm", "addmm", "bmm", "linear", "_scaled_mm", "_scaled_mm_v2")),
        *("aten::_grouped_mm", "aten::_scaled_grouped_mm"),
        *("prime_rl::fp8_blockwise_mm", "prime_rl::grouped_fp8_gemm", "prime_rl::sparse_mla"),
    }
)
DEFAULT_SELECTIVE_TARGETS = DEFAULT_SELECTIVE_SAVE_NAMESPACES | DEFAULT_SELECTIVE_SAVE_OPERATIONS


def operators_to_save(targets: Sequence[str] | None) -> list[str] | None:
    """Translate targets that name operators or namespaces to selectors; None if they name parts of a layer.

    >>> operators_to_save(["aten::mm", "_c10d_functional"]), operators_to_save(["norm"])
    (['_c10d_functional.*', 'aten.mm'], None)

    Raises:
        ModeError: operators and parts of a layer are mixed, or one of the operators is not known to torch.
    """
    installed = all_operator_names()
    namespaces = {name.split(".")[0] for name in installed}
    given = DEFAULT_SELECTIVE_TARGETS if targets is None else set(targets)
    named = {target for target in given if "::" in target or target in namespaces | DEFAULT_SELECTIVE_SAVE_NAMESPACES}
    if not named:
        return None
    if mixed := sorted(given - named):
        raise ModeError(
            f"targets {', '.join(mixed)} are parts of a layer to recompute, and {', '.join(sorted(named))} are "
            "operators to save. Use only one kind."
        )
    selectors = {target: f"{target}.*" if "::" not in target else target.replace("::", ".") for target in named}
    known = {t: s for t, s in selectors.items() if s in installed or (s.endswith(".*") and t in namespaces)}
    if targets is not None and (lost := sorted(named - set(known))):
        raise ModeError(
            f"targets {', '.join(lost)}: torch has no such operator or namespace here. First import what registers "
            "them, or leave them out."
        )
    return sorted(known.values())
