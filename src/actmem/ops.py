"""Name operators and groups of operators, without torch.

NOTE [ operator names ]
An operator is written `namespace.name` (a packet: `aten.mm`) or `namespace.name.overload` (`aten.mm.default`). The
spellings `aten::mm`, `aten::mm.default` and `torch.ops.aten.mm` mean the same. A *selector* is a group (`matmul`), such
a name, a glob over names (`aten.*mm`), or several of these joined by `|` and counted as one. `split_selector` splits
off a leading module, as in `*.mlp::matmul`.
"""

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


GROUPS: dict[str, frozenset[str]] = {
    "matmul": _aten("mm addmm linear _scaled_mm _scaled_mm_v2"),
    "batched_matmul": _aten("bmm baddbmm"),
    "grouped_matmul": _aten("_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2"),
    "convolution": _aten(
        "convolution _convolution _convolution_mode convolution_overrideable conv1d conv2d conv3d conv_tbc"
        " conv_transpose1d conv_transpose2d conv_transpose3d _conv_depthwise2d conv_depthwise3d"
        " _slow_conv2d_forward slow_conv3d slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d"
        " slow_conv_transpose2d slow_conv_transpose3d thnn_conv2d _nnpack_spatial_convolution"
        " cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu cudnn_convolution_transpose"
        " miopen_convolution miopen_convolution_relu miopen_convolution_add_relu miopen_convolution_transpose"
        " miopen_depthwise_convolution mkldnn_convolution _mps_convolution _mps_convolution_transpose"
    )
    | {
        "mkldnn._convolution_pointwise",
        "mkldnn._convolution_pointwise_",
        "mkldnn._convolution_transpose_pointwise",
    },
    "attention": _aten(
        "scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps"
        " _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention"
        " _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"
        " _scaled_dot_product_fused_attention_overrideable _cudnn_attention_forward _efficient_attention_forward"
        " _flash_attention_forward _flash_attention_forward_no_dropout_inplace _native_multi_head_attention"
        " _triton_multi_head_attention _triton_scaled_dot_attention"
    )
    | {"torch_attn._varlen_attn", "torch_attn._varlen_attn_out", "higher_order.flex_attention"},
    "collective": frozenset(
        {"c10d.*", "c10d_functional.*", "_c10d_functional.*", "_c10d_functional_autograd.*", "symm_mem.*"}
    ),
    "routing": _aten(
        "topk sort argsort msort kthvalue argmax argmin bincount histc searchsorted bucketize one_hot nonzero"
        " nonzero_static _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive"
    ),
    "low_precision_scale": _aten("max amax aminmax _amp_foreach_non_finite_check_and_unscale_"),
    "compiled": frozenset({"higher_order.inductor_compiled_code", "higher_order.invoke_subgraph"}),
    "compute_intensive": _aten(
        "mm addmm bmm convolution convolution_backward upsample_bilinear2d _scaled_mm"
        " _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention"
        " _flash_attention_forward _efficient_attention_forward"
    ),
    "pointwise": _aten(
        "add sub rsub mul div neg pow square sqrt rsqrt exp log1p reciprocal clamp clamp_min clamp_max where"
        " sigmoid tanh erf relu leaky_relu silu gelu mish elu selu celu hardswish hardsigmoid softplus glu logit"
        " log_sigmoid_forward threshold hardtanh prelu _prelu_kernel _to_copy"
        " add_ sub_ mul_ div_ neg_ pow_ square_ sqrt_ rsqrt_ exp_ reciprocal_ clamp_ clamp_min_ clamp_max_"
        " sigmoid_ tanh_ relu_ leaky_relu_ silu_ gelu_ mish_ elu_ hardswish_ hardsigmoid_ threshold_ hardtanh_"
    ),
}
"""Operator groups: group name -> the packets in it, as names or globs.

`compute_intensive` is a fallback: where torch's own list can be read, that list is used instead.
"""

INPUT = "input"
"""Selects the inputs of a block, and anything else that backward needs and no operator of the block produced."""

HIGHER_ORDER = frozenset(m for group in GROUPS.values() for m in group if m.startswith("higher_order."))
"""Operators that take functions. torch keeps no list of them."""

NAMESPACES = (
    *("aten", "prim", "prims", "rngprims", "higher_order", "torch_attn", "inductor", "mkl", "mkldnn", "onednn"),
    *("quantized", "fsdp", "symm_mem", "c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"),
)
"""Namespaces of torch's own operators: `aten::mm` is an operator, not `mm` in a module called `aten`."""

_GLOB_CHARACTERS = frozenset("*?[")


def is_glob(text: str) -> bool:
    """Return whether a text is a glob.

    >>> is_glob("aten.*mm"), is_glob("aten.mm")
    (True, False)
    """
    return not _GLOB_CHARACTERS.isdisjoint(text)


def packet_name(text: str) -> tuple[str, str | None]:
    """Normalise any spelling of an operator to (packet, overload); the overload is None if the text has none.

    >>> packet_name("aten::mm"), packet_name("torch.ops.aten.mm")
    (('aten.mm', None), ('aten.mm', None))
    >>> packet_name("aten.mm.default")
    ('aten.mm', 'default')

    Raises:
        ValueError: if the text does not have the form `namespace.name` or `namespace.name.overload`.
    """
    parts = _dotted(text).split(".")
    if len(parts) not in (2, 3) or not all(parts):
        raise ValueError(
            f"operator {text!r} is not in a known form. Expected namespace.name or namespace.name.overload, "
            "such as 'aten.mm', 'aten::mm' or 'aten.mm.default'."
        )
    return f"{parts[0]}.{parts[1]}", parts[2] if len(parts) == 3 else None


def matches(selector: str, packet: str, overload: str) -> bool:
    """Return whether a selector (a group, an operator, a glob, or several joined by `|`) covers an operator.

    A name or glob without an overload covers all overloads.

    >>> matches("matmul", "aten.mm", "default"), matches("aten::mm", "aten.mm", "out"), matches("aten.*mm", "aten.bmm", "default")
    (True, True, True)
    >>> matches("aten.mm.default", "aten.mm", "out")
    False
    """  # noqa: E501  # a doctest input does not wrap
    group = GROUPS.get(selector)
    if group is not None:
        return packet in group or any(is_glob(member) and fnmatchcase(packet, member) for member in group)
    if "|" in selector:
        return any(matches(part, packet, overload) for part in selector.split("|"))
    name = _dotted(selector)
    full = f"{packet}.{overload}"
    if is_glob(name):
        return fnmatchcase(packet, name) or fnmatchcase(full, name)
    return name in (packet, full)


def split_selector(text: str) -> tuple[str | None, str]:
    """Split `MODULE_GLOB::operator` into (module glob, operator); the module is None if the text has none.

    The part before `::` is a module if it contains a dot or a glob character, or if what follows is itself a group or
    one of torch's operators. Otherwise the whole text is an operator name.

    >>> split_selector("*.mlp::matmul"), split_selector("mlp::aten::mm")
    (('*.mlp', 'matmul'), ('mlp', 'aten::mm'))
    >>> split_selector("aten::mm"), split_selector("mylib::myop"), split_selector("aten.mm")
    ((None, 'aten::mm'), (None, 'mylib::myop'), (None, 'aten.mm'))
    """
    left, separator, right = text.partition("::")
    if not separator or left in NAMESPACES or left.startswith("torch.ops."):
        return None, text
    right_is_operator = right in GROUPS or "::" in right or right.partition(".")[0] in (*NAMESPACES, "torch")
    if "." in left or is_glob(left) or right_is_operator:
        return left, right
    return None, text


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three known names that are closest to a name, best first.

    A name without a dot is compared with the last part of the known names.

    >>> nearest("matmull", GROUPS)
    ['matmul']
    >>> nearest("mm", ["aten.add", "aten.mm"])
    ['aten.mm']
    """
    by_key: dict[str, list[str]] = {}
    for candidate in sorted(known):
        key = candidate if "." in name else candidate.rpartition(".")[2]
        by_key.setdefault(key.lower(), []).append(candidate)
    close = difflib.get_close_matches(name.lower(), by_key, n=3, cutoff=0.7)
    return [candidate for key in close for candidate in by_key[key]][:3]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the hint that ends an error message, or an empty string if no known name is close.

    >>> did_you_mean("nrom", ["norm", "mlp"])
    " Did you mean 'norm'?"
    >>> did_you_mean("zzz", ["norm", "mlp"])
    ''
    """
    near = nearest(name, known)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def _dotted(text: str) -> str:
    return text.removeprefix("torch.ops.").replace("::", ".")
