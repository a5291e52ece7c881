"""What micro.py measures: problems, an op of _cases.py at a shape and dtype, in sets.

SETS: what is asked for by name, `--set rmsnorm`; benchmarks/README.md says what each holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from _cases import OPS
from benchmark_rmsnorm import CLASSIC

BF16, FP16, FP32 = "bf16", "fp16", "fp32"
DTYPES = {BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32}
ALL = None  # every candidate


@dataclass(frozen=True)
class Problem:
    op: str
    shape: tuple[int, ...]
    dtype: str = BF16
    candidates: tuple[str, ...] | None = ALL  # beside the copy

    @property
    def base(self) -> str:
        """The op, a key of OPS; `rms_norm:host` is that of `rms_norm`."""
        return self.op.partition(":")[0]

    @property
    def variant(self) -> str:
        """What is measured: "" the device's time with a cold L2, "warm" with a warm one, "host" the host's time."""
        return self.op.partition(":")[2]

    def of(self, variant: str) -> Problem:
        return replace(self, op=f"{self.base}:{variant}")


FAST = ("ours", "torch", "liger", "quack", "flashinfer")  # all but eager and torch.compile, which cost seconds a shape
#: [rows, hidden]: LTX-Video 2B at 49 and 161 frames, the widths of FLUX, LLaMA 8B and 70B, and many rows.
MODEL_SIZES = [(5376, 2048), (16128, 2048), (16384, 3072), (16384, 4096), (4096, 8192), (65536, 2048)]


def rmsnorm() -> list[Problem]:
    """RMSNorm forward and backward: the sizes of models in all dtypes, small ones, per-head rows, very long rows."""
    small = [(1, 2048), (16, 2048), (256, 2048), (1024, 1024), (1024, 2048)]
    heads = [(total // n, n) for total in (1 << 20, 1 << 26) for n in (64, 128, 256)]
    long = [((1 << 26) // n, n) for n in (16384, 32768, 65536)]
    shapes = MODEL_SIZES + small + heads + long
    problems = [Problem("rms_norm", s, BF16, ALL if s in MODEL_SIZES[::3] else FAST) for s in shapes]
    for dtype in (FP16, FP32):
        problems += [Problem("rms_norm", s, dtype, FAST) for s in [*MODEL_SIZES, (1024, 2048)]]
    backward = MODEL_SIZES + [s for s in heads if s[0] * s[1] == 1 << 26]
    problems += [Problem("rms_norm_backward", s, BF16, ALL if s in MODEL_SIZES[::3] else FAST) for s in backward]
    return [*problems, host_of("rms_norm")]


def classic() -> list[Problem]:
    """The table of benchmark_rmsnorm.py."""
    return [Problem("rms_norm", shape) for shape in CLASSIC]


def ops() -> list[Problem]:
    """Every forward op at the sizes of LTX-Video 2B and 13B, batch 2."""
    problems = []
    for seq, hidden, heads, size in ((2688, 2048, 32, 64), (8064, 2048, 32, 64), (2688, 4096, 32, 128)):
        row = (2, seq, hidden)
        norms = ("ada_norm", "residual_ada_norm", "gated_residual", "add_rms_norm", "layer_norm")
        problems += [Problem(op, row) for op in norms]
        problems += [Problem(op, row, BF16, ("ours", "eager")) for op in ("ada_norm[layer]", "ada_norm[per token]")]
        problems.append(Problem("residual_ada_norm[layer]", row, BF16, ("ours", "eager")))
        head = (2, seq, heads, size)
        problems += [Problem(op, head) for op in ("qk_norm_rope[across heads]", "qk_norm_rope", "rope", "rope_3d")]
        problems.append(Problem("rope[half]", head, BF16, ("ours", "quack")))
        wide = (2, seq, 4 * hidden)
        problems += [Problem(op, wide) for op in ("geglu", "swiglu", "gelu")]
        problems.append(Problem("geglu[tanh]", wide, BF16, ("ours", "liger", "flashinfer")))
    for shape in (
        (1, 512, 13, 32, 48),
        (1, 256, 25, 64, 96),
        (1, 128, 49, 128, 192),
    ):  # the VAE decoder at 49 x 512 x 768
        problems += [Problem(op, shape) for op in ("pixel_norm_silu", "pixel_norm_silu[channels last]")]
    return problems + [host_of(op) for op in ("ada_norm", "residual_ada_norm", "add_rms_norm", "swiglu")]


def shape_of(op: str, rows: int, hidden: int) -> tuple[int, ...]:
    """The shape of an op's output of so many rows of so much: tokens of a hidden size, heads of 64, or pixels."""
    kind = OPS[op].needs
    if kind in ("rope", "qk_norm_rope", "rope_3d"):
        return 1, rows, hidden // 64, 64
    if kind == "pixel_norm_silu":
        return 1, hidden, 1, 1, rows
    return (rows, hidden) if kind in ("rms_norm", "layer_norm", "add_rms_norm") else (1, rows, hidden)


def sizes() -> list[Problem]:
    """Every op over rows and hidden sizes: 1 to 1M rows, 64 to 64K wide, outputs up to 1 GiB."""
    problems = []
    for op in OPS:
        for hidden in (64, 256, 1024, 2048, 4096, 8192, 16384, 65536):
            if OPS[op].needs == "pixel_norm_silu" and hidden > 8192:
                continue  # no VAE has that many channels
            for count in (1, 64, 1024, 16384, 131072, 1 << 20):
                if hidden * count <= 1 << 29:
                    problems.append(Problem(op, shape_of(op, count, hidden), BF16, FAST))
    return problems


def dtypes() -> list[Problem]:
    """Every op in every dtype, at [16384, 2048]: times, and errors against fp64 beside those of eager."""
    return [Problem(op, shape_of(op, 16384, 2048), dtype, (*FAST, "eager")) for op in OPS for dtype in DTYPES]


def warm() -> list[Problem]:
    """Small shapes with a warm L2, as behind the op that made the input; the cold ones are in the other sets."""
    problems = []
    for op in (
        "rms_norm",
        "rms_norm_backward",
        "layer_norm",
        "ada_norm",
        "residual_ada_norm",
        "add_rms_norm",
        "swiglu",
    ):
        for count, hidden in ((16, 2048), (1024, 2048), (2048, 3072), (1024, 4096)):
            problems.append(Problem(op, shape_of(op, count, hidden), BF16, FAST).of("warm"))
    return problems


#: A size that no device notices: [rows, hidden] of the host's time.
HOST_SIZE = (4, 256)


def host_of(op: str) -> Problem:
    return Problem(op, shape_of(op, *HOST_SIZE)).of("host")


def host() -> list[Problem]:
    """What a call of every op costs the host."""
    return [host_of(op) for op in OPS]


def models() -> list[Problem]:
    """FLUX (24 heads of 128, 4608 tokens) and LLaMA 8B (prefill of 4096 tokens, decode of 16)."""
    flux, head = (1, 4608, 3072), (1, 4608, 24, 128)
    problems = [Problem(op, flux) for op in ("ada_norm[layer]", "residual_ada_norm[layer]", "gated_residual")]
    problems += [Problem("qk_norm_rope", head), Problem("rope", head), Problem("gelu", (1, 4608, 12288))]
    for tokens in (16, 4096):
        problems += [Problem(op, (1, tokens, 4096)) for op in ("rms_norm", "add_rms_norm")]
        problems += [Problem("rope[half]", (1, tokens, 32, 128)), Problem("swiglu", (1, tokens, 14336))]
    return problems


def smoke() -> list[Problem]:
    """Every op once, small, and each way of measuring: minutes on a CPU."""
    shapes = {"rope": (2, 512, 4, 64), "qk_norm_rope": (2, 512, 4, 64), "pixel_norm_silu": (1, 32, 4, 16, 16)}
    problems = [Problem(op, shapes.get(OPS[op].needs.replace("_3d", ""), (2, 512, 2048))) for op in OPS]
    return [*problems, problems[0].of("warm"), host_of("rms_norm")]


SETS = {
    "rmsnorm": rmsnorm,
    "ops": ops,
    "models": models,
    "dtypes": dtypes,
    "sizes": sizes,
    "warm": warm,
    "classic": classic,
    "host": host,
    "smoke": smoke,
}
