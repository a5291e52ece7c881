#!/usr/bin/env python3
"""Models end to end, at their true sizes with random weights: a step, its GPU time by kind of kernel, the accuracy.

    python benchmarks/e2e.py                                     LTX-Video 2B, a step at 49 and 161 frames of 512x768
    python benchmarks/e2e.py --model flux --parts step           one model, one part: a slice of a run
    python benchmarks/e2e.py --model qwen-image --depth 20       20 of its 60 blocks; the rows say so
    python benchmarks/e2e.py --model ltx-2b --parts vae,pipeline
    python benchmarks/e2e.py --model llama-3-8b --parts decode --configurations stock,injected
    python benchmarks/e2e.py --skip gelu --skip ltx_vae.conv     what a kind brings: without it; the rows say so

step      one call of the denoiser; prefill, decode: of a language model (the rows of decode are us a token at batch 1).
split     GPU time of each of these by kind of kernel (profiler): gemm (convolutions too), attention, ours, other; `gpu`
          is the sum of all. The floor is gemm + attention.
vae       decoding: stock, norms fused, norms fused and convolutions with channels last.
pipeline  the whole of LTXPipeline: all steps and the VAE.
accuracy  a model of true width and four blocks in bf16 against fp32 without TF32, stock and injected.

Configurations, in turns: stock, injected, compiled (`compile_repeated_blocks(fullgraph=True)`; a language model as a
whole, decoding with CUDA graphs), injected_compiled, and injected_graph, a CUDA graph of the injected model. One that
fails is a row with its reason. Each model has its JSON, written after each part, on Ctrl-C with what there is of one.
The same command goes on where it stopped. The last table is that of summary.py. Without a GPU the models are tiny.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from _models import FAMILIES, Family
from _results import (
    CPU_NOTE,
    INTERRUPTED,
    ROOT,
    TIMES,
    ResultFile,
    columned,
    count,
    default_out,
    end_with,
    header,
    load_package,
    short,
    shown_path,
)
from _timing import Bench, spread
from _workloads import (
    Run,
    Workload,
    compile_blocks,
    forward,
    in_a_row,
    randn_of,
    run_of,
    token_ids,
    twin,
    workloads,
)
from summary import summary
from torch import nn
from torch.utils._pytree import tree_map

sys.path.insert(0, str(ROOT / "examples" / "ltx_video"))
from ltx_video import SIZES, random_pipeline, random_prompt  # noqa: E402

KINDS = {
    "ours": r"ltx_kernels",
    "attention": r"flash|fmha|attention|sdpa",
    "gemm": r"gemm|gemv|cutlass|nvjet|xmma|splitk|cublas|wgmma|triton_tem|convolve",
}
#: Inductor names its pointwise kernels after the ops around them: triton_poi_fused__scaled_dot_product_attention_3.
POINTWISE = r"triton_(?!tem)"
CONFIGURATIONS = ("stock", "injected", "compiled", "injected_compiled", "injected_graph")
#: Of the rows of a problem; the VAE's convolutions may keep their memory format.
ORDER = ("stock", "injected_no_format", *CONFIGURATIONS[1:])
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
#: Two roundings of one model differ by some hundredths after its last block; more than this is another model.
WRONG = 0.5
#: Of the model whose accuracy is measured: its fp32 copy must fit beside it, and fp32 is slow.
ACCURATE_BLOCKS, ACCURATE_FRAMES = 4, 25
#: Calls that are profiled at most.
PROFILED = 4
#: How long a sample of several steps is to last.
ROW_MS = {"cuda": 200.0, "cpu": 20.0}


def row(op: str, shape: list[int], dtype: str, candidate: str, times=None, error=None, **notes: str) -> dict:
    values = {
        "op": op,
        "shape": shape,
        "dtype": dtype,
        "candidate": candidate,
        **dict(zip(TIMES, times or (None,) * 3)),
    }
    values |= {"bytes": 0, "copy_us": None, "error_fp64": error}
    return values | {key: text for key, text in notes.items() if text}


def show(rows: list[dict]) -> None:
    for r in rows:
        value = f"{r['us_median'] / 1e3:10.3f} ms (p10 {r['us_p10'] / 1e3:.3f})" if r["us_median"] else r["reason"]
        if r["us_median"] and ":decode[" in r["op"]:
            value += f"  {1e6 / r['us_median']:.1f} tokens/s"
        if r["error_fp64"] is not None:
            value = f"error {r['error_fp64']:.3e}"
        value += f"  {r['method']}" if "method" in r else ""
        print(f"  {r['op']:28} {r['shape']!s:20} {r['candidate']:22} {value}")
    medians = {r["candidate"]: r["us_median"] for r in rows if r["us_median"]}
    for other in ("stock", "compiled"):
        ratios = [f"{n} {medians[other] / t:.3f}x" for n, t in medians.items() if other in medians and n != other]
        if ratios:
            print(f"  {other} / " + ", ".join(ratios), flush=True)


# ---- configurations --------------------------------------------------------------------------------------


def configured(workload: Workload, name: str, stock: nn.Module, package, skip: list[str]) -> Run:
    """The Run of a configuration, on the weights of `stock`."""
    model = stock if name == "stock" else twin(stock)
    if name.startswith("injected"):
        report = package.inject_optimized_kernels(model, skip=skip)
        if name == "injected":
            print(report)
    if name.endswith("compiled"):
        workload.compile(model)
    return (workload.graph if name == "injected_graph" else workload.run)(model)


def known(args, file: ResultFile, op: str, shape: list[int]) -> set[str]:
    """The candidates of a problem that need not be measured."""
    rows = file.candidates(op, shape, args.dtype_name)
    return {name for name, row in rows.items() if not row.get("method", "").startswith(INTERRUPTED)}


def is_there(args, file: ResultFile, op: str, shape: list[int], names: Iterable[str]) -> bool:
    """Whether no candidate of a problem need be measured; says so."""
    there = set(names) <= known(args, file, op, shape)
    if there:
        print(f"  {op} {shape}: there already")
    return there


def time_runs(args, file: ResultFile, op: str, shape: list[int], runs: dict, reasons: dict, rounds: int) -> None:
    """Times the runs in turns, and writes p10, median and p90 in us a unit of each: of an interrupt's part as well."""
    bench = Bench(args.device, "step" if args.device == "cuda" else "clock", args.budget_ms, rounds)
    whole = False
    try:
        bench.run(
            {name: [run.call] for name, run in runs.items()},
            lambda name, error: reasons.__setitem__(name, short(error)),
            {name: run.before for name, run in runs.items()},
        )
        whole = True
    finally:
        rows = []
        for name, samples in bench.samples().items():
            units = runs[name].units
            method = f"{len(samples)} samples" + (f" of {units} in a row" if units > 1 else "")
            method = method if whole else INTERRUPTED + method
            times = tuple(us / units for us in spread(samples))
            rows.append(row(op, shape, args.dtype_name, name, times, method=method))
        write(args, file, rows, op, shape, reasons, whole)
        show(list(file.candidates(op, shape, args.dtype_name).values()))


def write(args, file: ResultFile, rows: list[dict], op: str, shape: list[int], reasons: dict, whole: bool) -> None:
    """The rows of one problem, those that failed too. A part of them replaces no whole that is there already."""
    timed = {r["candidate"] for r in rows}
    rows = rows + [
        row(op, shape, args.dtype_name, name, reason=reason) for name, reason in reasons.items() if name not in timed
    ]
    if rows and (whole or not known(args, file, op, shape)):
        file.replace(sorted(rows, key=lambda r: ORDER.index(r["candidate"])))


def split_table(splits: dict[str, dict[str, float]]) -> str:
    """GPU time in ms of each configuration by kind, and what it is in floors of its own."""
    lines = [["  GPU ms", *next(iter(splits.values())), "gpu/floor"]]
    for name, parts in splits.items():
        floor = parts["gemm"] + parts["attention"]
        cells = [f"{us / 1e3:.3f}" for us in parts.values()]
        lines.append([f"  {name}", *cells, f"{parts['gpu'] / floor:.3f}" if floor else "-"])
    return columned(lines, left=1)


def measure(args, package, file: ResultFile, workload: Workload, stock: nn.Module) -> None:
    """Times of a workload and its split, each a group of rows."""
    op, shape = workload.op, workload.shape
    wanted = set(args.configurations)
    timed, split = known(args, file, op, shape), known(args, file, f"{op}:gpu", shape)
    time_it = workload.part in args.parts and not wanted <= timed
    split_it = "split" in args.parts and args.device == "cuda" and not wanted <= split
    if not (time_it or split_it):
        print(f"  {op} {shape}: there already")
        return
    # What is compared is of one run: what is known is measured again beside what is new.
    names = [name for name in CONFIGURATIONS if name in wanted | timed | split]
    runs: dict[str, Run] = {}
    reasons: dict[str, str] = {}
    expected = None
    for name in names:
        start = time.perf_counter()
        try:
            if name == "injected_graph" and args.device == "cpu":
                raise RuntimeError("a CUDA graph needs a GPU")
            run = configured(workload, name, stock, package, args.skip)
            actual = run.check().double()
            expected = actual if expected is None else expected
            difference = ((actual - expected).norm() / expected.norm()).item()
            spent = time.perf_counter() - start
            print(f"  {name}: relative difference to {names[0]} {difference:.2e} ({spent:.1f} s)", flush=True)
            if expected.isfinite().all() and not difference < WRONG:
                raise RuntimeError(f"wrong: relative difference {difference:.1e} to {names[0]}")
            runs[name] = run
        except Exception as error:  # out of memory, a graph break: the others are worth their time
            reasons[name] = short(error)
            print(f"  {name}: {reasons[name]}", flush=True)
    if time_it:
        rows = in_a_row(runs, workload.in_a_row, ROW_MS[args.device])
        time_runs(args, file, op, shape, rows, reasons, args.rounds)
    if split_it:
        split_runs(args, file, op, shape, runs, reasons)
    torch._dynamo.reset()


def split_runs(args, file: ResultFile, op: str, shape: list[int], runs: dict, reasons: dict) -> None:
    """GPU time by kind of kernel, a problem each kind; those that there are when an interrupt comes are written."""
    splits: dict[str, dict[str, float]] = {}
    whole = False
    try:
        for name, run in runs.items():
            print(f"  {name}:", flush=True)
            try:
                splits[name] = gpu_split(run, args.budget_ms)
            except Exception as error:
                reasons[name] = short(error)
        whole = True
    finally:
        for kind in ("gpu", *KINDS, "other"):
            rows = [
                row(f"{op}:{kind}", shape, args.dtype_name, name, (parts[kind],) * 3)
                for name, parts in splits.items()
                if parts[kind] > 0
            ]
            write(args, file, rows, f"{op}:{kind}", shape, reasons if kind == "gpu" else {}, whole)
        if splits:
            print(split_table(splits), flush=True)


def gpu_split(run: Run, budget_ms: float) -> dict[str, float]:
    """us a unit by kind of kernel, and the largest kernels on the screen. The mean of up to four calls."""
    from torch.profiler import ProfilerActivity, profile

    seen: dict[str, list[float]] = {}  # us and launches
    start, calls = time.perf_counter(), 0
    while calls == 0 or calls < PROFILED and (time.perf_counter() - start) * 1e3 < budget_ms:
        calls += 1
        run.before()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run.call()
            torch.cuda.synchronize()
        for event in profiler.key_averages():
            if event.self_device_time_total > 0:
                kernel = seen.setdefault(event.key, [0.0, 0.0])
                kernel[0] += event.self_device_time_total
                kernel[1] += event.count
    split = dict.fromkeys(("gpu", *KINDS, "other"), 0.0)
    for i, (key, values) in enumerate(sorted(seen.items(), key=lambda item: -item[1][0])):
        us, launches = (value / calls / run.units for value in values)
        split[kind_of(key)] += us
        split["gpu"] += us
        if i < 14:
            print(f"    {us:10.1f} us {launches:6.0f}x  {key[:110]}")
    return split


def kind_of(kernel: str) -> str:
    if re.match(POINTWISE, kernel):
        return "other"
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")


# ---- the other parts -------------------------------------------------------------------------------------


def ltx_size(args):
    return SIZES["tiny" if args.tiny else args.model.removeprefix("ltx-")]


def time_calls(args, file: ResultFile, op: str, shape: list[int], make: dict[str, Callable], rounds: int) -> dict:
    """Measures and writes what each of `make` returns, a call without arguments; the runs that succeeded."""
    runs: dict[str, Run] = {}
    reasons: dict[str, str] = {}
    for name, maker in make.items():
        try:
            run = run_of(maker())
            run.check()  # compiles
            runs[name] = run
        except Exception as error:
            reasons[name] = short(error)
    time_runs(args, file, op, shape, runs, reasons, rounds)
    return {name: run for name, run in runs.items() if name not in reasons}


def measure_vae(args, package, file: ResultFile, frames: int) -> None:
    pipe = random_pipeline(ltx_size(args), args.device, args.dtype)
    grid = ((frames - 1) // 8 + 1, args.sizes["height"] // 32, args.sizes["width"] // 32)
    latents = randn_of(args)(1, pipe.vae.config.latent_channels, *grid)
    skips = {"stock": None, "injected_no_format": ["ltx_vae.conv"], "injected": []}
    op, shape = f"{args.prefix}ltx_vae{args.without}:decode", list(latents.shape)
    if is_there(args, file, op, shape, skips):
        return

    def decode(vae):
        with torch.no_grad():
            return vae.decode(latents, return_dict=False)[0]

    def configuration(skip: list[str] | None) -> Callable:
        vae = pipe.vae
        if skip is not None:
            vae = copy.deepcopy(vae)
            package.inject_optimized_kernels(vae, skip=[*args.skip, *skip])
        return partial(decode, vae)

    make = {name: partial(configuration, skip) for name, skip in skips.items()}
    runs = time_calls(args, file, op, shape, make, args.rounds)
    if args.device == "cuda" and runs:
        print(split_table({name: gpu_split(run, args.budget_ms) for name, run in runs.items()}))


def measure_pipeline(args, package, file: ResultFile, family: Family, frames: int) -> None:
    """All steps and the VAE, in one call of the pipeline."""
    sizes = args.sizes
    op = f"{args.prefix}{family.op}{args.without}:pipeline[{args.steps} steps]"
    shape = [frames, sizes["height"], sizes["width"]]
    names = [name for name in CONFIGURATIONS[:4] if name in args.configurations]
    if is_there(args, file, op, shape, names):
        return
    pipe = random_pipeline(ltx_size(args), args.device, args.dtype)
    prompt = random_prompt(ltx_size(args), args.device, args.dtype, length=sizes["text"])
    arguments = {**prompt, "num_frames": frames, "height": sizes["height"], "width": sizes["width"]}
    arguments |= {"num_inference_steps": args.steps, "output_type": "pt"}

    def configuration(name: str) -> Callable:
        parts = {**pipe.components}
        if name != "stock":
            parts |= {"transformer": twin(pipe.transformer), "vae": copy.deepcopy(pipe.vae)}
        one = type(pipe)(**parts)
        one.set_progress_bar_config(disable=True)
        if name.startswith("injected"):
            package.inject_optimized_kernels(one, skip=args.skip)
        if name.endswith("compiled"):
            compile_blocks(family, one.transformer)
        return lambda: one(**arguments, generator=torch.Generator().manual_seed(0)).frames

    time_calls(args, file, op, shape, {name: partial(configuration, name) for name in names}, rounds=3)


def measure_accuracy(args, package, file: ResultFile, family: Family) -> None:
    """RMS error over the RMS of the result, in the model's dtype against fp32 without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    config, _ = family.configured(args.tiny, ACCURATE_BLOCKS if family.depth else None)
    model = family.build(config, args.device, args.dtype)
    if family.inputs:
        frames = min(args.sizes["frames"][0], ACCURATE_FRAMES)
        inputs, shape = family.inputs(model.config, randn_of(args), {**args.sizes, "frames": frames})
    else:
        inputs = {"input_ids": token_ids(args, model.config, 1, min(512, args.sizes["length"]))}
        shape = [*inputs["input_ids"].shape, model.config.hidden_size]
    op = f"{args.prefix}{family.op}{args.without}:accuracy"
    if is_there(args, file, op, shape, ("stock", "injected")):
        return
    exact = copy.deepcopy(model).float()
    reference = forward(
        exact, tree_map(lambda v: v.float() if torch.is_tensor(v) and v.is_floating_point() else v, inputs)
    )
    del exact
    rows = []
    for name in ("stock", "injected"):
        if name == "injected":
            package.inject_optimized_kernels(model, skip=args.skip)
        error = (forward(model, inputs).float() - reference).norm() / reference.norm()
        values = {"error": error.item(), "reason": "an accuracy, not a time"}
        rows.append(row(op, shape, args.dtype_name, name, **values))
    file.replace(rows)
    show(rows)


# ---- what to run -----------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", choices=FAMILIES, default="ltx-2b")
    parser.add_argument(
        "--parts",
        help="a list of step, prefill, decode, split, vae, pipeline, accuracy (default: the timed ones and split)",
    )
    parser.add_argument("--configurations", default=",".join(CONFIGURATIONS if cuda else CONFIGURATIONS[:2]))
    parser.add_argument("--frames", type=count, nargs="+", help="of a video model")
    parser.add_argument("--height", type=count)
    parser.add_argument("--width", type=count)
    parser.add_argument("--depth", type=count, metavar="BLOCKS", help="fewer blocks; the rows say how many")
    parser.add_argument("--skip", action="append", default=[], help="a kind that is not injected")
    parser.add_argument("--steps", type=count, default=30 if cuda else 2, help="of the pipeline")
    parser.add_argument("--budget-ms", type=float, default=2500 if cuda else 20, help="for each configuration")
    parser.add_argument("--rounds", type=count, default=6 if cuda else 2)
    parser.add_argument("--tiny", action="store_true", default=not cuda, help="tiny models (default without a GPU)")
    parser.add_argument("--out", type=Path, help="the JSON (default: benchmarks/results/<chip>/e2e_<model>.json)")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    args = parser.parse_args(argv)
    family = FAMILIES[args.model]
    default = [part for part in ("step", "prefill", "decode", "split") if part in family.parts]
    args.parts = args.parts.split(",") if args.parts else default
    unknown = set(args.parts) - set(family.parts)
    if unknown:
        parser.error(f"{args.model} has no {', '.join(sorted(unknown))}; it has {', '.join(family.parts)}")
    args.configurations = args.configurations.split(",")
    if unknown := set(args.configurations) - set(CONFIGURATIONS):
        parser.error(f"no configuration is called {', '.join(sorted(unknown))}; there are {', '.join(CONFIGURATIONS)}")
    args.device, args.dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    args.dtype_name = NAMES[args.dtype]
    args.prefix = "tiny_" if args.tiny else ""
    args.without = f"[without {', '.join(sorted(args.skip))}]" if args.skip else ""
    args.sizes = dict(family.tiny_sizes if args.tiny else family.sizes)
    args.sizes |= {
        name: v for name in ("frames", "height", "width") if (v := getattr(args, name)) and name in args.sizes
    }
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    family = FAMILIES[args.model]
    package = load_package()
    out = args.out or default_out(args.device, f"e2e_{args.model}")
    file = ResultFile(out, header(package, args.device), args.fresh)
    config, depth = family.configured(args.tiny, args.depth)
    op = args.prefix + family.op + depth + args.without
    print(f"{family.title}{depth}, {'tiny' if args.tiny else 'as in ' + family.source}: {args.sizes}")
    if {"step", "prefill", "decode", "split"} & set(args.parts):
        stock = family.build(config, args.device, args.dtype)
        for workload in workloads(args, family, op, stock):
            measure(args, package, file, workload, stock)
        del stock
    for frames in args.sizes.get("frames", ()):
        if "vae" in args.parts:
            measure_vae(args, package, file, frames)
        if "pipeline" in args.parts:
            measure_pipeline(args, package, file, family, frames)
    if "accuracy" in args.parts:
        measure_accuracy(args, package, file, family)
    if args.device == "cpu":
        print(CPU_NOTE)
    print(f"wrote {shown_path(out)}")
    if text := summary([file.result]):
        print(text)
    return 0


if __name__ == "__main__":
    end_with(main)
