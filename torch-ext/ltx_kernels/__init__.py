"""Fused kernels for diffusion transformers and LLMs: norms, RoPE and gated activations, as fast as a memory copy."""

from . import _register, layers  # noqa: F401
from ._ops import add_op_namespace_prefix
from .functional import (
    ada_norm,
    add_rms_norm,
    gated_residual,
    geglu,
    gelu,
    layer_norm,
    pixel_norm_silu,
    qk_norm_rope,
    residual_ada_norm,
    rms_norm,
    rmsnorm,
    rope,
    rope_3d,
    swiglu,
)
from .inject import InjectionReport, inject_optimized_kernels, patch_rmsnorm, remove_optimized_kernels

#: "cuda" or "cpu": what this variant was built for. The CUDA variant serves CPU tensors too.
backend = "cuda" if add_op_namespace_prefix("").startswith("_ltx_kernels_cuda") else "cpu"

__all__ = [
    "InjectionReport",
    "ada_norm",
    "add_rms_norm",
    "backend",
    "gated_residual",
    "geglu",
    "gelu",
    "inject_optimized_kernels",
    "layer_norm",
    "layers",
    "patch_rmsnorm",
    "pixel_norm_silu",
    "qk_norm_rope",
    "remove_optimized_kernels",
    "residual_ada_norm",
    "rms_norm",
    "rmsnorm",
    "rope",
    "rope_3d",
    "swiglu",
]
