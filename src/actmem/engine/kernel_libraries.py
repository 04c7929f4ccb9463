"""Libraries whose autograd Functions launch kernels that torch cannot see. Only data.

Each Function that is listed computes its results, and what it saves for backward, from its arguments and torch's
generators alone, without atomic additions: its source is public, at the address that is given. Functions that write
into an argument say into which.

What is not listed, on purpose: losses, whose forward overwrites the logits with their gradient; Functions that keep
state; those that add atomically in forward. `apply(..., opaque="replay")` finds the rest by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["LIBRARIES", "STATEFUL", "KernelLibrary"]


@dataclass(frozen=True)
class KernelLibrary:
    """One library, and those of its Functions that may run again."""

    package: str
    """Its name in `import`."""
    source: str
    """Where its source can be read."""
    functions: Mapping[str, str]
    """Module -> names of Functions. Modules of several releases stand side by side."""
    writes: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """Name of a Function -> positions of the arguments that it overwrites, not counting `ctx`."""
    in_place: Mapping[str, int] = field(default_factory=dict[str, int])
    """Name of a Function -> position of a flag: if it is set, the first argument is overwritten."""

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield the module and the name of each Function."""
        for module, names in self.functions.items():
            for name in names.split():
                yield module, name


LIBRARIES: tuple[KernelLibrary, ...] = (
    KernelLibrary(
        "liger_kernel",
        "https://github.com/linkedin/Liger-Kernel/tree/main/src/liger_kernel/ops",
        {
            "liger_kernel.ops.dyt": "LigerDyTFunction",
            "liger_kernel.ops.fused_add_rms_norm": "LigerFusedAddRMSNormFunction",
            "liger_kernel.ops.geglu": "LigerGELUMulFunction",
            "liger_kernel.ops.group_norm": "LigerGroupNormFunction",
            "liger_kernel.ops.layer_norm": "LigerLayerNormFunction",
            "liger_kernel.ops.poly_norm": "LigerPolyNormFunction",
            "liger_kernel.ops.qwen2vl_mrope": "LigerQwen2VLMRopeFunction",
            "liger_kernel.ops.relu_squared": "LigerReLUSquaredFunction",
            "liger_kernel.ops.rms_norm": "LigerRMSNormFunction",
            "liger_kernel.ops.rope": "LigerRopeFunction",
            "liger_kernel.ops.softmax": "LigerSoftmaxFunction",
            "liger_kernel.ops.swiglu": "LigerSiLUMulFunction",
        },
        writes={"LigerRopeFunction": (0, 1), "LigerQwen2VLMRopeFunction": (0, 1)},
    ),
    KernelLibrary(
        "unsloth",
        "https://github.com/unslothai/unsloth/tree/main/unsloth/kernels",
        {
            "unsloth.kernels.layernorm": "Fast_Layernorm",
            "unsloth.kernels.rms_layernorm": "Fast_RMS_Layernorm",
            "unsloth.kernels.rope_embedding": "Fast_RoPE_Embedding Fast_RoPE_Embedding_QK",
        },
        writes={"Fast_RoPE_Embedding": (0,), "Fast_RoPE_Embedding_QK": (0, 1)},
    ),
    KernelLibrary(
        "fla",
        "https://github.com/fla-org/flash-linear-attention/tree/main/fla",
        {
            "fla.modules.activations": "SwiGLUFunction SwiGLULinearFunction SwishFunction",
            "fla.modules.activations.ops": "SwiGLUFunction SwiGLULinearFunction SwishFunction",
            "fla.modules.causal_conv1d.ops": "CausalConv1dFunction",
            "fla.modules.convolution": "CausalConv1dFunction",
            "fla.modules.fused_norm_gate": "LayerNormGatedFunction LayerNormGatedLinearFunction",
            "fla.modules.l2norm": "L2NormFunction",
            "fla.modules.layernorm": "LayerNormFunction LayerNormLinearFunction",
            "fla.modules.norm.fused_norm_gate": "LayerNormGatedFunction LayerNormGatedLinearFunction",
            "fla.modules.norm.l2norm": "L2NormFunction",
            "fla.modules.norm.layernorm": "LayerNormFunction LayerNormLinearFunction",
            "fla.modules.rotary": "RotaryEmbeddingFunction",
            "fla.modules.rotary.ops": "RotaryEmbeddingFunction",
            "fla.ops.delta_rule.chunk": "ChunkDeltaRuleFunction",
            "fla.ops.gated_delta_rule.chunk": "ChunkGatedDeltaRuleFunction",
            "fla.ops.gla.chunk": "ChunkGLAFunction",
            "fla.ops.kda.chunk": "ChunkKDAFunction",
            "fla.ops.simple_gla.chunk": "ChunkSimpleGLAFunction",
        },
        in_place={"RotaryEmbeddingFunction": 4},
    ),
    KernelLibrary(
        "mamba_ssm",
        "https://github.com/state-spaces/mamba/tree/main/mamba_ssm/ops",
        {
            "mamba_ssm.ops.selective_scan_interface": "MambaInnerFn SelectiveScanFn",
            "mamba_ssm.ops.triton.layer_norm": "LayerNormFn",
            "mamba_ssm.ops.triton.layernorm_gated": "LayerNormFn",
            "mamba_ssm.ops.triton.ssd_combined": "MambaChunkScanCombinedFn MambaSplitConv1dScanCombinedFn",
        },
    ),
    KernelLibrary(
        "causal_conv1d",
        "https://github.com/Dao-AILab/causal-conv1d/blob/main/causal_conv1d/causal_conv1d_interface.py",
        {"causal_conv1d.causal_conv1d_interface": "CausalConv1dFn"},
        writes={"CausalConv1dFn": (6,)},
    ),
    KernelLibrary(
        "flash_attn",
        "https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/flash_attn_interface.py",
        {
            "flash_attn.flash_attn_interface": "FlashAttnFunc FlashAttnKVPackedFunc FlashAttnQKVPackedFunc "
            "FlashAttnVarlenFunc FlashAttnVarlenKVPackedFunc FlashAttnVarlenQKVPackedFunc",
            "flash_attn.layers.rotary": "ApplyRotaryEmb",
            "flash_attn.ops.triton.layer_norm": "LayerNormFn",
        },
        in_place={"ApplyRotaryEmb": 4},
    ),
    KernelLibrary(
        "transformer_engine",
        "https://github.com/NVIDIA/TransformerEngine/tree/main/transformer_engine/pytorch",
        {
            "transformer_engine.pytorch.module.layernorm": "_LayerNorm",
            "transformer_engine.pytorch.module.rmsnorm": "_RMSNorm",
        },
    ),
    KernelLibrary(
        "apex",
        "https://github.com/NVIDIA/apex/blob/master/apex/normalization/fused_layer_norm.py",
        {
            "apex.normalization.fused_layer_norm": "FusedLayerNormAffineFunction "
            "FusedLayerNormAffineMixedDtypesFunction FusedLayerNormFunction FusedRMSNormAffineFunction "
            "FusedRMSNormAffineMixedDtypesFunction FusedRMSNormFunction",
            "apex.transformer.functional.fused_rope": "FusedRoPEFunc",
        },
    ),
    KernelLibrary(
        "xformers",
        "https://github.com/facebookresearch/xformers/blob/main/xformers/ops/fmha/__init__.py",
        {"xformers.ops.fmha": "_fMHA"},
    ),
)

_SCALES = "in FP8 it updates the scaling factors of its module, and would update them twice"
_LOGITS = "its forward overwrites the logits with their gradient"

STATEFUL: dict[str, str] = {
    "transformer_engine.pytorch.module.grouped_linear._GroupedLinear": _SCALES,
    "transformer_engine.pytorch.module.layernorm_linear._LayerNormLinear": _SCALES,
    "transformer_engine.pytorch.module.layernorm_mlp._LayerNormMLP": _SCALES,
    "transformer_engine.pytorch.module.linear._Linear": _SCALES,
    "liger_kernel.ops.cross_entropy.LigerCrossEntropyFunction": _LOGITS,
    "unsloth.kernels.cross_entropy_loss.Fast_CrossEntropyLoss": _LOGITS,
}
"""Functions that `opaque="replay"` does not take: name -> why."""
