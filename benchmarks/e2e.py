#!/usr/bin/env python3
"""LTX-Video end to end: a transformer step, its GPU time by kind of kernel, the VAE decoder, the accuracy.

    python benchmarks/e2e.py --out FILE                         2B, a step at 49 and 161 frames of 512x768
    python benchmarks/e2e.py --model 13b --frames 49            one size
    python benchmarks/e2e.py --parts step,split,vae,accuracy    all there is
    python benchmarks/e2e.py --skip gelu --skip ltx_vae.conv    what a kind of injection brings: measured without it

step      stock, injected, compiled (`compile_repeated_blocks(fullgraph=True)`) and both, with guidance (a batch of
two), in turns. split     GPU time of a step by kind of kernel (profiler): gemm, attention, ours, other; the sum of all
kernels is `gpu`.
vae       decoding: stock, norms fused, norms fused and convolutions with channels last.
accuracy  a model of true width and 4 layers in bf16 against fp32 without TF32, stock and injected.
Random weights. Without a GPU the models are small and the figures say nothing but that it works.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from _results import ROOT, TIMES, ResultFile, header, load_package
from _timing import spread

sys.path.insert(0, str(ROOT / "examples" / "ltx_video"))
from ltx_video import SIZES, random_pipeline, random_prompt, synchronize  # noqa: E402

KINDS = {
    "ours": r"ltx_kernels",
    "attention": r"flash|fmha|attention|sdpa",
    "gemm": r"gemm|cutlass|nvjet|xmma|splitk|cublas|wgmma",
}
Call = Callable[[], object]


def step_inputs(pipe, size, device: str, dtype: torch.dtype, frames: int, height: int, width: int) -> dict:
    grid = ((frames - 1) // 8 + 1, height // 32, width // 32)
    prompt = random_prompt(size, device, dtype)
    tokens = grid[0] * grid[1] * grid[2]
    channels = pipe.transformer.config.in_channels
    return {
        "hidden_states": torch.randn(2, tokens, channels, device=device).to(dtype),
        "encoder_hidden_states": torch.cat([prompt["negative_prompt_embeds"], prompt["prompt_embeds"]]),
        "encoder_attention_mask": torch.cat(
            [prompt["negative_prompt_attention_mask"], prompt["prompt_attention_mask"]]
        ),
        "timestep": torch.full((2,), 500.0, device=device),
        "num_frames": grid[0],
        "height": grid[1],
        "width": grid[2],
        "rope_interpolation_scale": (8 / 24, 32, 32),
        "return_dict": False,
    }


def times_of(calls: dict[str, Call], device: str, rounds: int, each: int) -> dict[str, tuple[float, float, float]]:
    """p10, median and p90 in us of each call, in turns; the first of a turn comes after another and does not count."""
    for call in calls.values():
        for _ in range(3):
            call()
    taken = defaultdict(list)
    names = list(calls)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            for i in range(each + 1):
                if device == "cuda":
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    calls[name]()
                    end.record()
                    torch.cuda.synchronize()
                    us = 1e3 * start.elapsed_time(end)
                else:
                    begin = synchronize(device)
                    calls[name]()
                    us = 1e6 * (synchronize(device) - begin)
                if i:
                    taken[name].append(us)
    return {name: spread(samples) for name, samples in taken.items()}


def row(op: str, shape: list[int], dtype: torch.dtype, candidate: str, times, error=None) -> dict:
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    values = {
        "op": op,
        "shape": shape,
        "dtype": name,
        "candidate": candidate,
        **dict(zip(TIMES, times or (None,) * 3)),
        "bytes": 0,
        "copy_us": None,
        "error_fp64": error,
    }
    return values if times else {**values, "reason": "an accuracy, not a time"}


def show(rows: list[dict]) -> None:
    for r in rows:
        value = f"error {r['error_fp64']:.3e}" if r["us_median"] is None else f"{r['us_median'] / 1e3:9.3f} ms"
        print(f"  {r['op']:28} {r['shape']!s:20} {r['candidate']:22} {value}")
    medians = {r["candidate"]: r["us_median"] for r in rows if r["us_median"]}
    for other in ("stock", "compiled"):
        ratios = [f"{n} {medians[other] / t:.3f}x" for n, t in medians.items() if other in medians and n != other]
        if ratios:
            print(f"  {other} / " + ", ".join(ratios))


def measure_steps(args, package, file: ResultFile, frames: int) -> None:
    size = SIZES[args.model]
    pipe = random_pipeline(size, args.device, args.dtype, vae=False)
    inputs = step_inputs(pipe, size, args.device, args.dtype, frames, args.height, args.width)
    stock = pipe.transformer
    tokens, width = inputs["hidden_states"].shape[1], stock.config.num_attention_heads * stock.config.attention_head_dim
    injected = copy.deepcopy(stock)
    print(package.inject_optimized_kernels(injected, skip=args.skip))
    models = {"stock": stock, "injected": injected}
    if not args.no_compile:
        # The weights are shared: what is timed in turns fits into memory once.
        for name, model in (("compiled", stock), ("injected_compiled", injected)):
            models[name] = copy.deepcopy(model, {id(p): p for p in model.parameters()})
            models[name].compile_repeated_blocks(fullgraph=True)

    def call(model):
        def run():
            with torch.no_grad():
                return model(**inputs)[0]

        return run

    calls = {name: call(model) for name, model in models.items()}
    op, shape = f"ltx_video_{args.model}", [2, tokens, width]
    reference = calls["stock"]().double()
    for name, run in calls.items():
        difference = (run().double() - reference).norm() / reference.norm()
        print(f"  {name}: relative difference to stock {difference:.2e}")
    if "step" in args.parts:
        times = times_of(calls, args.device, args.rounds, args.each)
        rows = [row(f"{op}:step", shape, args.dtype, name, times[name]) for name in calls]
        file.replace(rows)
        show(rows)
    if "split" in args.parts and args.device == "cuda":
        split = {name: gpu_split(run) for name, run in calls.items()}
        for kind in ("gpu", *KINDS, "other"):
            rows = [
                row(f"{op}:step:{kind}", shape, args.dtype, n, (s[kind],) * 3) for n, s in split.items() if s[kind] > 0
            ]
            if rows:
                file.replace(rows)
                show(rows)
        for name, s in split.items():
            print(f"  {name}: GPU time / (gemm + attention) = {s['gpu'] / (s['gemm'] + s['attention']):.3f}")


def gpu_split(run, steps: int = 3) -> dict[str, float]:
    """us a step by kind of kernel, and the ten largest kernels on the screen."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    split = dict.fromkeys(("gpu", *KINDS, "other"), 0.0)
    events = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
    for event in events:
        kind = next((k for k, pattern in KINDS.items() if re.search(pattern, event.key, re.IGNORECASE)), "other")
        split[kind] += event.self_device_time_total / steps
        split["gpu"] += event.self_device_time_total / steps
    for event in sorted(events, key=lambda e: -e.self_device_time_total)[:14]:
        print(f"    {event.self_device_time_total / steps:10.1f} us {event.count / steps:6.0f}x  {event.key[:110]}")
    return split


def measure_vae(args, package, file: ResultFile, frames: int) -> None:
    pipe = random_pipeline(SIZES[args.model], args.device, args.dtype)
    grid = ((frames - 1) // 8 + 1, args.height // 32, args.width // 32)
    latents = torch.randn(1, pipe.vae.config.latent_channels, *grid, device=args.device).to(args.dtype)
    variants = {"stock": pipe.vae}
    for name, skip in (("injected_no_format", "ltx_vae.conv"), ("injected", None)):
        variants[name] = copy.deepcopy(pipe.vae)
        package.inject_optimized_kernels(variants[name], skip=[*args.skip, *([skip] if skip else [])])

    def call(vae):
        def run():
            with torch.no_grad():
                return vae.decode(latents, return_dict=False)[0]

        return run

    calls = {name: call(vae) for name, vae in variants.items()}
    times = times_of(calls, args.device, args.rounds, max(1, args.each // 3))
    rows = [row("ltx_vae:decode", list(latents.shape), args.dtype, name, times[name]) for name in calls]
    file.replace(rows)
    show(rows)
    if args.device == "cuda":
        for name, run in calls.items():
            print(f"  {name}:")
            gpu_split(run, steps=1)


def measure_accuracy(args, package, file: ResultFile) -> None:
    """Of a step: RMS error over the RMS of the result, in the model's dtype against fp32 without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    size = SIZES[args.model]
    shallow = type(size)(size.name, {**size.transformer, "num_layers": 4}, size.vae, size.caption_channels)
    pipe = random_pipeline(shallow, args.device, args.dtype, vae=False)
    inputs = step_inputs(pipe, shallow, args.device, args.dtype, 25, args.height, args.width)
    exact = copy.deepcopy(pipe.transformer).float()
    cast = {n: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for n, v in inputs.items()}
    with torch.no_grad():
        reference = exact(**cast)[0]
        rows = []
        for name in ("stock", "injected"):
            if name == "injected":
                package.inject_optimized_kernels(pipe.transformer, skip=args.skip)
            error = (pipe.transformer(**inputs)[0].float() - reference).norm() / reference.norm()
            shape = list(inputs["hidden_states"].shape)
            rows.append(row(f"ltx_video_{args.model}:accuracy", shape, args.dtype, name, None, error.item()))
    file.replace(rows)
    show(rows)


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", choices=("2b", "13b", "small", "tiny"), default="2b" if cuda else "tiny")
    parser.add_argument("--frames", type=int, nargs="+", default=[49, 161] if cuda else [9])
    parser.add_argument("--height", type=int, default=512 if cuda else 64)
    parser.add_argument("--width", type=int, default=768 if cuda else 96)
    parser.add_argument("--parts", default="step,split", help="of step, split, vae, accuracy")
    parser.add_argument("--skip", action="append", default=[], help="a kind that is not injected")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--each", type=int, default=6)
    parser.add_argument("--out", type=Path, default=ROOT / ".build" / "e2e.json")
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    args.device, args.dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    package = load_package()
    file = ResultFile(args.out, header(package, args.device))
    for frames in args.frames:
        print(f"{SIZES[args.model].name}, {frames} frames of {args.height}x{args.width}")
        if {"step", "split"} & set(args.parts):
            measure_steps(args, package, file, frames)
        if "vae" in args.parts:
            measure_vae(args, package, file, frames)
    if "accuracy" in args.parts:
        measure_accuracy(args, package, file)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
