"""The Hub's benchmark: every op, compared with its formula and timed by `kernels benchmark`.

    kernels benchmark org/ltx-kernels --version 1        what the Hub holds
    kernels benchmark .                                  this checkout's build/ (`make build`)

It stands alone: torch and kernels are all it imports. Sizes are those of LTX-Video 2B at 49 frames of 512x768 on a GPU,
small ones elsewhere. The runner compares `self.out` with what `verify_*` returns to 1e-2 absolute (and 1e-5 relative),
so inputs are small enough that a bfloat16 result within one rounding of the other passes. Its time of the reference is
that of one call: benchmarks/micro.py is what to quote.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from kernels import Benchmark

# Keeps all outputs below 2, where neighbouring bfloat16 numbers are 2**-7 apart.
SMALL = 0.125
EPS = 1e-6


def rms(x, weight=None, eps=EPS):
    """In fp32, as the kernels compute; the caller rounds."""
    x = x.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight.float()


def rotate(x, cos, sin, interleaved=True):
    """x [B, S, H, d], tables [S, 1 | H, d / 2], in fp32."""
    x = x.float()
    if interleaved:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class _Sizes:
    """Not a Benchmark, so that the runner does not look for its methods. The runner sets `device` before `setup`."""

    seed = 0

    @property
    def dtype(self):
        return torch.bfloat16 if self.on_gpu else torch.float32

    @property
    def on_gpu(self):
        return self.device == "cuda"

    @property
    def tokens(self):
        """(B, S, D)"""
        return (2, 2688, 2048) if self.on_gpu else (2, 96, 256)

    @property
    def heads(self):
        """(B, S, H, d)"""
        batch, seq, hidden = self.tokens
        return batch, seq, hidden // 64, 64

    @property
    def grid(self):
        """(T, Hh, W), S tokens in all."""
        return (7, 16, 24) if self.on_gpu else (2, 6, 8)

    def randn(self, *shape, scale=1.0):
        return (torch.randn(shape, device=self.device) * scale).to(self.dtype)

    def check_second(self, actual, expected):
        """The runner compares one tensor; this compares the other of an op with two."""
        if not torch.allclose(actual, expected.to(actual.dtype), atol=1e-2):
            raise RuntimeError("the second output differs from its reference")


class NormBenchmark(_Sizes, Benchmark):
    def setup(self):
        batch, _, hidden = self.tokens
        self.x, self.residual = self.randn(*self.tokens, scale=SMALL), self.randn(*self.tokens, scale=SMALL)
        self.weight, self.bias = self.randn(hidden, scale=SMALL / 2), self.randn(hidden, scale=SMALL / 2)
        # A batch of parameters as a model makes it, [B, 1, 3 * D]: the parts are views, read in place.
        values = self.randn(batch, 1, 3 * hidden, scale=SMALL)
        self.scale, self.shift, self.gate = values.chunk(3, -1)
        # A weight that keeps the modulated norm small as well.
        self.small = torch.full_like(self.weight, SMALL)

    def modulated(self, normed):
        return (normed * SMALL * (1 + self.scale.float()) + self.shift.float()).to(self.dtype)

    def gated(self):
        return (self.residual.float() + self.gate.float() * self.x.float()).to(self.dtype)

    def benchmark_rms_norm(self):
        self.out = self.kernel.rms_norm(self.x, self.weight, EPS)

    def verify_rms_norm(self):
        return rms(self.x, self.weight).to(self.dtype)

    def benchmark_layer_norm(self):
        self.out = self.kernel.layer_norm(self.x, self.weight, self.bias, EPS)

    def verify_layer_norm(self):
        shape = self.x.shape[-1:]
        return F.layer_norm(self.x.float(), shape, self.weight.float(), self.bias.float(), EPS).to(self.dtype)

    def benchmark_ada_norm(self):
        self.out = self.kernel.ada_norm(self.x, self.scale, self.shift, self.small, eps=EPS)

    def verify_ada_norm(self):
        return self.modulated(rms(self.x))

    def benchmark_ada_norm_layer(self):
        self.out = self.kernel.ada_norm(self.x, self.scale, self.shift, self.small, eps=EPS, norm="layer")

    def verify_ada_norm_layer(self):
        return self.modulated(F.layer_norm(self.x.float(), self.x.shape[-1:], eps=EPS))

    def benchmark_gated_residual(self):
        self.out = self.kernel.gated_residual(self.residual, self.x, self.gate)

    def verify_gated_residual(self):
        return self.gated()

    def benchmark_residual_ada_norm(self):
        self.out, self.new_residual = self.kernel.residual_ada_norm(
            self.residual, self.x, self.gate, self.scale, self.shift, self.small, eps=EPS
        )

    def verify_residual_ada_norm(self):
        self.check_second(self.new_residual, self.gated())
        return self.modulated(rms(self.gated()))

    def benchmark_add_rms_norm(self):
        self.out, self.new_residual = self.kernel.add_rms_norm(self.x, self.residual, self.weight, EPS)

    def verify_add_rms_norm(self):
        h = (self.residual.float() + self.x.float()).to(self.dtype)
        self.check_second(self.new_residual, h)
        return rms(h, self.weight).to(self.dtype)


class BackwardBenchmark(_Sizes, Benchmark):
    """Forward and backward: the gradients of x and of the weight."""

    def setup(self):
        self.x, self.weight = self.randn(*self.tokens).requires_grad_(), self.randn(self.tokens[-1]).requires_grad_()
        self.grad_y = self.randn(*self.tokens, scale=SMALL / 2)

    def gradients(self, y):
        return torch.autograd.grad(y, (self.x, self.weight), self.grad_y.to(y.dtype))

    def benchmark_rms_norm_backward(self):
        self.out, self.grad_weight = self.gradients(self.kernel.rms_norm(self.x, self.weight, EPS))

    def verify_rms_norm_backward(self):
        grad_x, grad_weight = self.gradients(rms(self.x, self.weight))
        # A sum over all rows: compared as a whole, as its elements are large.
        error = (self.grad_weight.float() - grad_weight.float()).norm() / grad_weight.float().norm()
        if not error < 1e-2:
            raise RuntimeError(f"the gradient of the weight differs by {error:.1e}")
        return grad_x


class RopeBenchmark(_Sizes, Benchmark):
    def setup(self):
        _, seq, heads, size = self.heads
        self.q, self.k = self.randn(*self.heads, scale=SMALL), self.randn(*self.heads, scale=SMALL)
        self.q_weight, self.k_weight = self.randn(size, scale=SMALL / 2), self.randn(size, scale=SMALL / 2)
        self.all_weight = self.randn(heads * size, scale=SMALL / 2)
        angles = torch.rand(seq, heads, size // 2, device=self.device) * 2 * math.pi
        self.cos_heads, self.sin_heads = angles.cos(), angles.sin()  # [S, H, d / 2]: a table for each head
        self.cos, self.sin = self.cos_heads[:, 0], self.sin_heads[:, 0]  # [S, d / 2]: one for all

    def rotated(self, x, interleaved=True):
        return rotate(x, self.cos[:, None], self.sin[:, None], interleaved).to(self.dtype)

    def benchmark_rope(self):
        self.out = self.kernel.rope(self.q, self.cos, self.sin)

    def verify_rope(self):
        return self.rotated(self.q)

    def benchmark_rope_half(self):
        self.out = self.kernel.rope(self.q, self.cos, self.sin, interleaved=False)

    def verify_rope_half(self):
        return self.rotated(self.q, interleaved=False)

    def benchmark_qk_norm_rope(self):
        self.out, self.out_k = self.kernel.qk_norm_rope(
            self.q, self.k, self.q_weight, self.k_weight, self.cos, self.sin, EPS
        )

    def verify_qk_norm_rope(self):
        self.check_second(self.out_k, self.rotated(rms(self.k, self.k_weight)))
        return self.rotated(rms(self.q, self.q_weight))

    def benchmark_qk_norm_rope_across_heads(self):
        self.out, self.out_k = self.kernel.qk_norm_rope(
            self.q,
            self.k,
            self.all_weight,
            self.all_weight,
            self.cos_heads[None],
            self.sin_heads[None],
            EPS,
            across_heads=True,
        )

    def verify_qk_norm_rope_across_heads(self):
        def one(x):
            normed = rms(x.flatten(2), self.all_weight).view(x.shape)
            return rotate(normed, self.cos_heads, self.sin_heads).to(self.dtype)

        self.check_second(self.out_k, one(self.k))
        return one(self.q)

    def benchmark_rope_3d(self):
        self.out, self.out_k = self.kernel.rope_3d(self.q, self.k, self.grid)

    def verify_rope_3d(self):
        size = self.heads[-1]
        side = 2 * (size // 6)
        angles = []
        for axis, dims in enumerate((size - 2 * side, side, side)):
            positions = torch.arange(self.grid[axis], dtype=torch.float64)
            frequencies = 10000.0 ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
            view = [1, 1, 1, -1]
            view[axis] = self.grid[axis]
            angles.append((positions[:, None] * frequencies).view(view).expand(*self.grid, -1))
        angles = torch.cat(angles, -1).flatten(0, 2)[:, None]  # [S, 1, d / 2]
        cos, sin = angles.cos().float().to(self.device), angles.sin().float().to(self.device)
        self.check_second(self.out_k, rotate(self.k, cos, sin))
        return rotate(self.q, cos, sin).to(self.dtype)


class ActivationBenchmark(_Sizes, Benchmark):
    def setup(self):
        batch, seq, hidden = self.tokens
        self.x = self.randn(batch, seq, 4 * hidden, scale=SMALL)
        self.packed = self.randn(batch, seq, 8 * hidden, scale=SMALL)
        self.first, self.second = self.packed.float().chunk(2, -1)

    def benchmark_geglu(self):
        self.out = self.kernel.geglu(self.packed)

    def verify_geglu(self):
        return (self.first * F.gelu(self.second)).to(self.dtype)

    def benchmark_geglu_tanh(self):
        self.out = self.kernel.geglu(self.packed, approximate="tanh")

    def verify_geglu_tanh(self):
        return (self.first * F.gelu(self.second, approximate="tanh")).to(self.dtype)

    def benchmark_swiglu(self):
        self.out = self.kernel.swiglu(self.packed)

    def verify_swiglu(self):
        return (F.silu(self.first) * self.second).to(self.dtype)

    def benchmark_gelu(self):
        self.out = self.kernel.gelu(self.x)

    def verify_gelu(self):
        return F.gelu(self.x.float(), approximate="tanh").to(self.dtype)


class PixelNormBenchmark(_Sizes, Benchmark):
    """A resnet block of the LTX-Video VAE."""

    def setup(self):
        shape = (1, 256, 25, 64, 96) if self.on_gpu else (1, 32, 3, 8, 12)
        self.x = self.randn(*shape, scale=SMALL)
        self.last = self.x.contiguous(memory_format=torch.channels_last_3d)
        # A factor 1 + scale around SMALL.
        self.scale = self.randn(*shape[:2], 1, 1, 1, scale=SMALL / 4) - (1 - SMALL)
        self.shift = self.randn(*shape[:2], 1, 1, 1, scale=SMALL)

    def benchmark_pixel_norm_silu(self):
        self.out = self.kernel.pixel_norm_silu(self.x, self.scale, self.shift)

    def verify_pixel_norm_silu(self):
        normed = rms(self.x.movedim(1, -1), eps=1e-8).movedim(-1, 1)
        return F.silu(normed * (1 + self.scale.float()) + self.shift.float()).to(self.dtype)

    def benchmark_pixel_norm_silu_channels_last(self):
        self.out = self.kernel.pixel_norm_silu(self.last, self.scale, self.shift)

    verify_pixel_norm_silu_channels_last = verify_pixel_norm_silu
