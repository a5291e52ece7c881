"""Fused kernels for diffusion transformers and LLMs: norms, RoPE and gated activations at the speed of a memory copy."""

from . import _register  # noqa: F401
from ._ops import add_op_namespace_prefix
from .functional import ada_norm, add_rms_norm, gated_residual, layer_norm, residual_ada_norm, rms_norm, rmsnorm

#: "cuda" or "cpu": what this variant was built for. The CUDA variant serves CPU tensors too.
backend = "cuda" if add_op_namespace_prefix("").startswith("_ltx_kernels_cuda") else "cpu"

__all__ = [
    "ada_norm",
    "add_rms_norm",
    "backend",
    "gated_residual",
    "layer_norm",
    "residual_ada_norm",
    "rms_norm",
    "rmsnorm",
]
