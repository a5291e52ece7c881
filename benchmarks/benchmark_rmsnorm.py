#!/usr/bin/env python3
"""The classic table of RMSNorm: this kernel beside PyTorch's formula, and beside the baselines of today.

    python benchmarks/benchmark_rmsnorm.py                     [1x1024x2048] ... [4x4096x3072] in bf16
    python benchmarks/benchmark_rmsnorm.py --dtype fp16
    python benchmarks/benchmark_rmsnorm.py --peer torch        only F.rms_norm beside ours and PyTorch's formula

`PyTorch` is the formula in separate operations, as models spell it; F.rms_norm, torch.compile, Liger, quack and
flashinfer are what to beat now. Bandwidth: each input read once and the output written once, over the time; beside a
copy of as many bytes in the same run, and beside what the chip's data sheet promises. The timing and the options are
micro.py's; the op and the set are given.

`kernels benchmark .` loads each script here that is called benchmark*, with nothing else of the folder on the path, and
wants a class of the Hub's in it: RmsNormBenchmark has the same shapes.
"""

from __future__ import annotations

import torch
from kernels import Benchmark

CLASSIC = ((1, 1024, 2048), (2, 1024, 2048), (4, 1024, 2048), (2, 4096, 3072), (4, 4096, 3072))


class RmsNormBenchmark(Benchmark):
    """The runner calls `setup`, then times each `benchmark_*` and compares `self.out` with what `verify_*` returns."""

    seed = 0

    def setup(self):
        on_gpu = self.device == "cuda"
        shapes = CLASSIC if on_gpu else [(batch, 64, hidden) for batch, _, hidden in CLASSIC]
        options = {"device": self.device, "dtype": torch.bfloat16 if on_gpu else torch.float32}
        # Small, so that a bfloat16 result within one rounding of the other passes the runner's 1e-2.
        self.inputs = [torch.randn(shape, **options).clamp_(-4, 4) for shape in shapes]
        self.weights = [torch.full(shape[-1:], 0.125, **options) for shape in shapes]

    def compute(self, number):
        self.out = self.kernel.rms_norm(self.inputs[number], self.weights[number], 1e-6)

    def verify(self, number):
        x = self.inputs[number].float()
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weights[number].float()
        return y.to(self.inputs[number].dtype)


for number, shape in enumerate(CLASSIC):
    name = "x".join(map(str, shape))
    setattr(RmsNormBenchmark, f"benchmark_{name}", lambda self, number=number: self.compute(number))
    setattr(RmsNormBenchmark, f"verify_{name}", lambda self, number=number: self.verify(number))

#: GB/s of the memory in NVIDIA's data sheets, by what the device's name holds.
NOMINAL = {
    "H200": 4800,
    "H100 NVL": 3900,
    "H100 PCIe": 2000,
    "H100": 3350,  # SXM5
    "A100-SXM4-80GB": 2039,
    "A100 80GB PCIe": 1935,
    "A100": 1555,  # 40 GB
    "T4": 320,
}


def nominal_gbps(device: str) -> int | None:
    return next((gbps for name, gbps in NOMINAL.items() if name in device), None)


def classic_table(rows: list[dict], device: str) -> str:
    """A line a shape: ms of ours and of the formula, their ratio, the bandwidth; the time of the others over ours."""
    import micro
    from _results import by_problem, columned

    nominal = nominal_gbps(device)
    groups = by_problem(rows)
    others = [n for n in micro.PEERS if n not in ("ours", "eager") and any(n in group for group in groups.values())]
    lines = [["shape", "dtype", "custom ms", "PyTorch ms", "speed-up", "GB/s", "of copy", "of nominal"]]
    lines[0] += [f"{name}/custom" for name in others]
    for (_, shape, dtype), group in groups.items():
        us = {name: row["us_median"] for name, row in group.items()}
        ours, eager, copy = us.get("ours"), us.get("eager"), us.get("copy")
        gbps = group["ours"]["bytes"] / ours / 1e3 if ours else None
        cells = [f"[{'x'.join(map(str, shape))}]", dtype]
        cells += [f"{value / 1e3:.4f}" if value else "-" for value in (ours, eager)]
        cells.append(f"{eager / ours:.2f}x" if ours and eager else "-")
        cells.append(f"{gbps:.0f}" if gbps else "-")
        cells.append(f"{copy / ours:.1%}" if ours and copy else "-")
        cells.append(f"{gbps / nominal:.1%}" if gbps and nominal else "-")
        cells += [f"{us[name] / ours:.2f}" if ours and us.get(name) else "-" for name in others]
        lines.append(cells)
    return columned(lines, left=2)


def main(argv: list[str] | None = None) -> int:
    import micro
    from _results import CPU_NOTE, device_name

    args = micro.arguments(argv)
    args.set, args.op, args.name = ["classic"], ["rms_norm"], "classic"
    if args.peer:
        args.peer.append("eager")
    if args.device == "cpu" and not args.shape:
        args.shape = [(1, 64, 2048), (2, 64, 2048)]
    device = device_name(args.device)
    print(classic_table(micro.measure(args), device))
    nominal = nominal_gbps(device)
    print(f"{device}, " + (f"{nominal} GB/s nominal" if nominal else "no nominal bandwidth known"))
    if args.device == "cpu":
        print(CPU_NOTE)
    return 0


if __name__ == "__main__":
    from _results import end_with

    end_with(main)
