"""The ops that are measured: their inputs, their formula, and who computes it.

One formula an op serves three times: as the eager composition that a model runs, under torch.compile, and in fp64 as
the reference of all candidates. Only in fp32 where a stock model computes in fp32, so that eager is what users have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6
Inputs = dict[str, object]


@dataclass(frozen=True)
class Candidate:
    """`prepare` runs outside the timing: inputs in the form that this candidate needs."""

    call: Callable[[Inputs], object]
    prepare: Callable[[Inputs], Inputs] = lambda inputs: inputs


@dataclass(frozen=True)
class Op:
    make: Callable[[tuple, torch.dtype, str], Inputs]
    formula: Callable[[Inputs], object]
    ours: Callable[[object, Inputs], object]
    needs: str  # what the package must export
    peers: dict[str, Callable[[], Candidate]] = field(default_factory=dict)  # each imports its package when called
    unread: tuple[str, ...] = ()  # inputs that the op itself has no need of
    gradient: bool = False  # the backward of formula and ours with respect to `wrt`
    wrt: tuple[str, ...] = ("x", "weight")

    def candidates(self, package) -> dict[str, Callable[[], Candidate]]:
        forward = {
            "ours": lambda: Candidate(lambda inputs: self.ours(package, inputs)),
            "eager": lambda: Candidate(self.formula),
            "compile": lambda: Candidate(torch.compile(self.formula, dynamic=False, fullgraph=True)),
            **self.peers,
        }
        if not self.gradient:
            return forward
        return {name: (lambda factory=factory: backward_of(factory(), self.wrt)) for name, factory in forward.items()}

    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        inputs = {n: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for n, v in inputs.items()}
        candidate = Candidate(self.formula)
        candidate = backward_of(candidate, self.wrt) if self.gradient else candidate
        return outputs_of(candidate.call(candidate.prepare(inputs)))

    def bytes(self, inputs: Inputs, outputs: tuple[Tensor, ...]) -> int:
        """Each input read once, each output written once."""
        read = [v for n, v in inputs.items() if torch.is_tensor(v) and n not in self.unread]
        return sum(t.numel() * t.element_size() for t in [*read, *outputs])


def outputs_of(result) -> tuple[Tensor, ...]:
    return (result,) if torch.is_tensor(result) else tuple(t for t in result if t is not None)


def backward_of(candidate: Candidate, wrt: tuple[str, ...]) -> Candidate:
    """The gradients of a candidate, through autograd; its forward runs outside the timing."""

    def prepare(inputs: Inputs) -> Inputs:
        inputs = candidate.prepare({n: v.detach().requires_grad_() if n in wrt else v for n, v in inputs.items()})
        with torch.enable_grad():
            (y,) = outputs_of(candidate.call(inputs))
        return {"y": y, "wrt": [inputs[name] for name in wrt], "grad_y": inputs["grad_y"]}

    def call(inputs: Inputs):
        return torch.autograd.grad(inputs["y"], inputs["wrt"], inputs["grad_y"], retain_graph=True)

    return Candidate(call, prepare)


def up(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def randn(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=device) * scale).to(dtype)


# ---- formulas --------------------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    y = up(x) * torch.rsqrt(up(x).square().mean(-1, keepdim=True) + EPS)
    return (y if weight is None else y * up(weight)).to(x.dtype)


def layer(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    y = up(x) - up(x).mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)
    return (y if weight is None else y * up(weight) + up(bias)).to(x.dtype)


def ada(norm: Callable) -> Callable:
    return lambda i: norm(i["x"]) * (1 + i["scale"]) + i["shift"]


def residual_ada(norm: Callable) -> Callable:
    def formula(i):
        h = i["residual"] + i["gate"] * i["x"]
        return norm(h) * (1 + i["scale"]) + i["shift"], h

    return formula


def add_rms(i):
    h = i["residual"] + i["x"]
    return rms(h, i["weight"]), h


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [B, S, H, d]; tables compact, [S, 1, d/2] or [S, H, d/2]."""
    if interleaved:
        a, b = up(x).unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)
    a, b = up(x).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def qk_norm_rope(across_heads: bool) -> Callable:
    def one(x, weight, i):
        normed = rms(x.flatten(2), weight).view(x.shape) if across_heads else rms(x, weight)
        return rotate(normed, i["cos"], i["sin"], True)

    return lambda i: (one(i["q"], i["q_weight"], i), one(i["k"], i["k_weight"], i))


def pixel_norm_silu(i):
    x = i["x"] * torch.rsqrt((i["x"] * i["x"]).mean(1, keepdim=True) + 1e-8)
    return F.silu(x * (1 + i["scale"]) + i["shift"])


# ---- inputs: shape is that of the output ------------------------------------------------------------------


def make_norm(*names: str) -> Callable:
    """x, residual and grad_y of the shape, weight and bias [D], modulations [B, 1, D]; `name/token` is [B, S, D]."""

    def make(shape, dtype, device):
        inputs = {}
        for name in names:
            name, _, kind = name.partition("/")
            if name in ("weight", "bias"):
                of = shape[-1:]
            elif name in ("x", "residual", "grad_y") or kind == "token":
                of = shape
            else:
                of = (shape[0], 1, shape[-1])
            inputs[name] = randn(*of, dtype=dtype, device=device)
        return inputs

    return make


def tables(seq: int, heads: int, half: int, device: str) -> dict[str, Tensor]:
    angles = torch.rand(seq, heads, half, device=device) * 2 * math.pi
    return {"cos": angles.cos(), "sin": angles.sin()}


def make_rope(shape, dtype, device):
    batch, seq, heads, size = shape
    return {"x": randn(*shape, dtype=dtype, device=device), **tables(seq, 1, size // 2, device)}


def make_qk(across_heads: bool) -> Callable:
    def make(shape, dtype, device):
        batch, seq, heads, size = shape
        inputs = {name: randn(*shape, dtype=dtype, device=device) for name in ("q", "k")}
        width = heads * size if across_heads else size
        inputs |= {f"{name}_weight": randn(width, dtype=dtype, device=device) for name in ("q", "k")}
        return inputs | tables(seq, heads if across_heads else 1, size // 2, device)

    return make


def make_rope_3d(shape, dtype, device):
    """A grid as in video, about four times as many rows and columns as frames."""
    batch, seq, heads, size = shape
    frames = max((t for t in range(1, math.isqrt(seq) + 1) if seq % t == 0 and 16 * t * t <= seq), default=1)
    height = max(h for h in range(1, seq // frames + 1) if seq // frames % h == 0 and h * h <= seq // frames)
    grid = (frames, height, seq // frames // height)
    each = 2 * (size // 6)
    angles = []
    for axis, dims in enumerate((size - 2 * each, each, each)):
        frequency = 10000.0 ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
        view = [1, 1, 1, -1]
        view[axis] = grid[axis]
        axis_angles = (torch.arange(grid[axis], dtype=torch.float64)[:, None] * frequency).view(*view[:3], -1)
        angles.append(axis_angles.expand(*grid, -1))
    angles = torch.cat(angles, -1).view(seq, 1, size // 2)
    inputs = {name: randn(*shape, dtype=dtype, device=device) for name in ("q", "k")}
    return inputs | {"grid": grid, "cos": angles.cos().float().to(device), "sin": angles.sin().float().to(device)}


def make_packed(shape, dtype, device):
    return {"x": randn(*shape[:-1], 2 * shape[-1], dtype=dtype, device=device)}


def make_pixel(channels_last: bool) -> Callable:
    def make(shape, dtype, device):
        x = randn(*shape, dtype=dtype, device=device)
        if channels_last:
            x = x.contiguous(memory_format=torch.channels_last_3d if len(shape) == 5 else torch.channels_last)
        per_channel = (shape[0], shape[1]) + (1,) * (len(shape) - 2)
        return {"x": x, **{name: randn(*per_channel, dtype=dtype, device=device) for name in ("scale", "shift")}}

    return make


# ---- peers -----------------------------------------------------------------------------------------------


def rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def liger_rms_norm() -> Candidate:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # in_place would overwrite the gradient that the next launch reads.
    return Candidate(lambda i: LigerRMSNormFunction.apply(i["x"], i["weight"], EPS, 0.0, "llama", False))


def liger_layer_norm() -> Candidate:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return Candidate(lambda i: LigerLayerNormFunction.apply(i["x"], i["weight"], i["bias"], EPS))


def liger_add_rms_norm() -> Candidate:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return Candidate(
        lambda i: LigerFusedAddRMSNormFunction.apply(i["x"], i["residual"], i["weight"], EPS, 0.0, "llama", False)
    )


def halves(inputs: Inputs) -> Inputs:
    """Gate and up apart and contiguous: Liger would copy the views."""
    first, second = inputs["x"].chunk(2, -1)
    return {"first": first.contiguous(), "second": second.contiguous()}


def liger_geglu_tanh() -> Candidate:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return Candidate(lambda i: LigerGELUMulFunction.apply(i["second"], i["first"]), halves)


def liger_swiglu() -> Candidate:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return Candidate(lambda i: LigerSiLUMulFunction.apply(i["first"], i["second"]), halves)


def quack_rms_norm() -> Candidate:
    from quack.rmsnorm import rmsnorm_fwd

    return Candidate(lambda i: rmsnorm_fwd(rows(i["x"]), i["weight"], eps=EPS)[0].view(i["x"].shape))


def quack_rms_norm_autograd() -> Candidate:
    from quack import rmsnorm

    return Candidate(lambda i: rmsnorm(i["x"], i["weight"], eps=EPS))


def quack_layer_norm() -> Candidate:
    from quack.rmsnorm import layernorm_fwd

    def prepare(inputs):  # it takes fp32 parameters only
        return {**inputs, "weight": inputs["weight"].float(), "bias": inputs["bias"].float()}

    return Candidate(lambda i: layernorm_fwd(rows(i["x"]), i["weight"], i["bias"], EPS).view(i["x"].shape), prepare)


def quack_add_rms_norm() -> Candidate:
    from quack.rmsnorm import rmsnorm_fwd

    def call(i):
        y, h, _ = rmsnorm_fwd(rows(i["x"]), i["weight"], residual=rows(i["residual"]), eps=EPS)
        return y.view(i["x"].shape), h.view(i["x"].shape)

    return Candidate(call)


def quack_rope(interleaved: bool) -> Callable[[], Candidate]:
    def factory():
        from quack.rotary import apply_rotary

        def prepare(i):
            return {**i, "cos": i["cos"].squeeze(1).contiguous(), "sin": i["sin"].squeeze(1).contiguous()}

        return Candidate(lambda i: apply_rotary(i["x"], i["cos"], i["sin"], interleaved=interleaved), prepare)

    return factory


def flashinfer_rms_norm() -> Candidate:
    from flashinfer.norm import rmsnorm

    return Candidate(lambda i: rmsnorm(rows(i["x"]), i["weight"], EPS).view(i["x"].shape))


def flashinfer_add_rms_norm() -> Candidate:
    from flashinfer.norm import fused_add_rmsnorm

    def call(i):  # in place
        fused_add_rmsnorm(rows(i["x"]), rows(i["residual"]), i["weight"], EPS)
        return i["x"], i["residual"]

    return Candidate(call, lambda i: {**i, "x": i["x"].clone(), "residual": i["residual"].clone()})


def flashinfer_swiglu() -> Candidate:
    from flashinfer.activation import silu_and_mul

    return Candidate(lambda i: silu_and_mul(i["x"]))


def flashinfer_geglu(name: str) -> Callable[[], Candidate]:
    def factory():
        import flashinfer.activation

        function = getattr(flashinfer.activation, name)

        def prepare(i):  # it takes the gate first
            return {"x": torch.cat(i["x"].chunk(2, -1)[::-1], -1)}

        return Candidate(lambda i: function(i["x"]), prepare)

    return factory


def plain(function: Callable[[Inputs], object]) -> Callable[[], Candidate]:
    return lambda: Candidate(function)


def geglu(approximate: str) -> Callable[[Inputs], Tensor]:
    def formula(i):
        hidden_states, gate = i["x"].chunk(2, -1)
        return hidden_states * F.gelu(gate, approximate=approximate)

    return formula


def swiglu(i):
    gate, hidden_states = i["x"].chunk(2, -1)
    return F.silu(gate) * hidden_states


MODULATED = ("x", "scale", "shift")
RESIDUAL = ("residual", "x", "gate", "scale", "shift")

OPS: dict[str, Op] = {
    "rms_norm": Op(
        make_norm("x", "weight"),
        lambda i: rms(i["x"], i["weight"]),
        lambda k, i: k.rms_norm(i["x"], i["weight"], EPS),
        "rms_norm",
        {
            "torch": plain(lambda i: F.rms_norm(i["x"], i["x"].shape[-1:], i["weight"], EPS)),
            "liger": liger_rms_norm,
            "quack": quack_rms_norm,
            "flashinfer": flashinfer_rms_norm,
        },
    ),
    "rms_norm_backward": Op(
        make_norm("x", "weight", "grad_y"),
        lambda i: rms(i["x"], i["weight"]),
        lambda k, i: k.rms_norm(i["x"], i["weight"], EPS),
        "rms_norm",
        {
            "torch": plain(lambda i: F.rms_norm(i["x"], i["x"].shape[-1:], i["weight"], EPS)),
            "liger": liger_rms_norm,
            "quack": quack_rms_norm_autograd,
        },
        gradient=True,
    ),
    "layer_norm": Op(
        make_norm("x", "weight", "bias"),
        lambda i: layer(i["x"], i["weight"], i["bias"]),
        lambda k, i: k.layer_norm(i["x"], i["weight"], i["bias"], EPS),
        "layer_norm",
        {
            "torch": plain(lambda i: F.layer_norm(i["x"], i["x"].shape[-1:], i["weight"], i["bias"], EPS)),
            "liger": liger_layer_norm,
            "quack": quack_layer_norm,
        },
    ),
    "ada_norm": Op(
        make_norm(*MODULATED),
        ada(rms),
        lambda k, i: k.ada_norm(i["x"], i["scale"], i["shift"], eps=EPS),
        "ada_norm",
    ),
    "ada_norm[layer]": Op(
        make_norm(*MODULATED),
        ada(layer),
        lambda k, i: k.ada_norm(i["x"], i["scale"], i["shift"], eps=EPS, norm="layer"),
        "ada_norm",
    ),
    "ada_norm[per token]": Op(
        make_norm("x", "scale/token", "shift/token"),
        ada(rms),
        lambda k, i: k.ada_norm(i["x"], i["scale"], i["shift"], eps=EPS),
        "ada_norm",
    ),
    "gated_residual": Op(
        make_norm("residual", "x", "gate"),
        lambda i: i["residual"] + i["gate"] * i["x"],
        lambda k, i: k.gated_residual(i["residual"], i["x"], i["gate"]),
        "gated_residual",
    ),
    "residual_ada_norm": Op(
        make_norm(*RESIDUAL),
        residual_ada(rms),
        lambda k, i: k.residual_ada_norm(i["residual"], i["x"], i["gate"], i["scale"], i["shift"], eps=EPS),
        "residual_ada_norm",
    ),
    "residual_ada_norm[layer]": Op(
        make_norm(*RESIDUAL),
        residual_ada(layer),
        lambda k, i: k.residual_ada_norm(
            i["residual"], i["x"], i["gate"], i["scale"], i["shift"], eps=EPS, norm="layer"
        ),
        "residual_ada_norm",
    ),
    "add_rms_norm": Op(
        make_norm("x", "residual", "weight"),
        add_rms,
        lambda k, i: k.add_rms_norm(i["x"], i["residual"], i["weight"], EPS),
        "add_rms_norm",
        {"liger": liger_add_rms_norm, "quack": quack_add_rms_norm, "flashinfer": flashinfer_add_rms_norm},
    ),
    "rope": Op(
        make_rope,
        lambda i: rotate(i["x"], i["cos"], i["sin"], True),
        lambda k, i: k.rope(i["x"], i["cos"].squeeze(1), i["sin"].squeeze(1)),
        "rope",
        {"quack": quack_rope(True)},
    ),
    "rope[half]": Op(
        make_rope,
        lambda i: rotate(i["x"], i["cos"], i["sin"], False),
        lambda k, i: k.rope(i["x"], i["cos"].squeeze(1), i["sin"].squeeze(1), interleaved=False),
        "rope",
        {"quack": quack_rope(False)},
    ),
    "qk_norm_rope[across heads]": Op(
        make_qk(True),
        qk_norm_rope(True),
        lambda k, i: k.qk_norm_rope(
            i["q"], i["k"], i["q_weight"], i["k_weight"], i["cos"][None], i["sin"][None], EPS, across_heads=True
        ),
        "qk_norm_rope",
    ),
    "qk_norm_rope": Op(
        make_qk(False),
        qk_norm_rope(False),
        lambda k, i: k.qk_norm_rope(
            i["q"], i["k"], i["q_weight"], i["k_weight"], i["cos"].squeeze(1), i["sin"].squeeze(1), EPS
        ),
        "qk_norm_rope",
    ),
    "rope_3d": Op(
        make_rope_3d,
        lambda i: tuple(rotate(i[name], i["cos"], i["sin"], True) for name in ("q", "k")),
        lambda k, i: k.rope_3d(i["q"], i["k"], i["grid"]),
        "rope_3d",
        unread=("cos", "sin"),
    ),
    "geglu": Op(
        make_packed,
        geglu("none"),
        lambda k, i: k.geglu(i["x"]),
        "geglu",
        {"flashinfer": flashinfer_geglu("gelu_and_mul")},
    ),
    "geglu[tanh]": Op(
        make_packed,
        geglu("tanh"),
        lambda k, i: k.geglu(i["x"], approximate="tanh"),
        "geglu",
        {"liger": liger_geglu_tanh, "flashinfer": flashinfer_geglu("gelu_tanh_and_mul")},
    ),
    "swiglu": Op(
        make_packed,
        swiglu,
        lambda k, i: k.swiglu(i["x"]),
        "swiglu",
        {"liger": liger_swiglu, "flashinfer": flashinfer_swiglu},
    ),
    "gelu": Op(
        make_norm("x"),
        lambda i: F.gelu(i["x"], approximate="tanh"),
        lambda k, i: k.gelu(i["x"]),
        "gelu",
    ),
    "pixel_norm_silu": Op(
        make_pixel(False),
        pixel_norm_silu,
        lambda k, i: k.pixel_norm_silu(i["x"], i["scale"], i["shift"]),
        "pixel_norm_silu",
    ),
    "pixel_norm_silu[channels last]": Op(
        make_pixel(True),
        pixel_norm_silu,
        lambda k, i: k.pixel_norm_silu(i["x"], i["scale"], i["shift"]),
        "pixel_norm_silu",
    ),
}
