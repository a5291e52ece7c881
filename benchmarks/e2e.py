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
fails is a row with its reason. Each model has its JSON, written after each part; the same command goes on where it
stopped. Without a GPU the models are tiny.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from _models import FAMILIES, Family
from _results import (
    CPU_NOTE,
    ROOT,
    TIMES,
    ResultFile,
    columned,
    count,
    default_out,
    header,
    load_package,
    short,
    shown_path,
)
from _timing import Bench, Times, capture, nothing
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
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
#: Two roundings of one model differ by some hundredths after its last block; more than this is another model.
WRONG = 0.5
#: Blocks of the model whose accuracy is measured: its fp32 copy must fit beside it.
ACCURATE_BLOCKS = 4


@dataclass
class Run:
    """What is timed of one configuration. `units` of it are in a call; `check` returns what must agree with stock's."""

    call: Callable[[], object]
    check: Callable[[], torch.Tensor]
    before: Callable[[], object] = nothing
    units: int = 1


@dataclass
class Workload:
    """`run` makes the Run of a model; `graph` that of a CUDA graph of it; `compile` compiles a copy of the model."""

    op: str
    part: str
    shape: list[int]
    run: Callable[[nn.Module], Run]
    compile: Callable[[nn.Module], None]
    graph: Callable[[nn.Module], Run]


def row(op: str, shape: list[int], dtype: str, candidate: str, times=None, error=None, reason: str = "") -> dict:
    values = {
        "op": op,
        "shape": shape,
        "dtype": dtype,
        "candidate": candidate,
        **dict(zip(TIMES, times or (None,) * 3)),
    }
    values |= {"bytes": 0, "copy_us": None, "error_fp64": error}
    return {**values, "reason": reason} if reason else values


def show(rows: list[dict]) -> None:
    for r in rows:
        value = f"{r['us_median'] / 1e3:10.3f} ms (p10 {r['us_p10'] / 1e3:.3f})" if r["us_median"] else r["reason"]
        if r["us_median"] and ":decode[" in r["op"]:
            value += f"  {1e6 / r['us_median']:.1f} tokens/s"
        if r["error_fp64"] is not None:
            value = f"error {r['error_fp64']:.3e}"
        print(f"  {r['op']:28} {r['shape']!s:20} {r['candidate']:22} {value}")
    medians = {r["candidate"]: r["us_median"] for r in rows if r["us_median"]}
    for other in ("stock", "compiled"):
        ratios = [f"{n} {medians[other] / t:.3f}x" for n, t in medians.items() if other in medians and n != other]
        if ratios:
            print(f"  {other} / " + ", ".join(ratios), flush=True)


# ---- configurations --------------------------------------------------------------------------------------


def twin(model: nn.Module) -> nn.Module:
    """A copy on the same weights: what is timed in turns fits into memory once."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def compile_blocks(family: Family, model: nn.Module) -> None:
    names = family.blocks or model._repeated_blocks
    for module in list(model.modules()):
        if type(module).__name__ in names:
            module.compile(fullgraph=True)


def graph_of(call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """(the replay of a CUDA graph of a call, its output)."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph, (output,) = capture([call], 1)
    torch.cuda.synchronize()
    return graph.replay, output


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


def times_of(args, runs: dict[str, Run], reasons: dict[str, str], rounds: int) -> dict[str, Times]:
    """p10, median and p90 in us a unit of each run; `reasons` grows by those that fail."""
    times = Bench(args.device, "step" if args.device == "cuda" else "clock", args.budget_ms, rounds).run(
        {name: [run.call] for name, run in runs.items()},
        lambda name, error: reasons.__setitem__(name, short(error)),
        {name: run.before for name, run in runs.items()},
    )
    return {name: tuple(us / runs[name].units for us in spread) for name, spread in times.items()}


def write(args, file: ResultFile, op: str, shape: list[int], names: list[str], times: dict, reasons: dict) -> None:
    """The rows of one problem: a time or a reason of each configuration that has either."""
    rows = [
        row(op, shape, args.dtype_name, name, times.get(name), reason="" if name in times else reasons[name])
        for name in names
        if name in times or name in reasons
    ]
    if rows:
        file.replace(rows)


def split_table(splits: dict[str, dict[str, float]]) -> str:
    """GPU time in ms of each configuration by kind, and what it is in floors of its own."""
    lines = [["  GPU ms", *next(iter(splits.values()), {}), "gpu/floor"]]
    for name, parts in splits.items():
        floor = parts["gemm"] + parts["attention"]
        cells = [f"{us / 1e3:.3f}" for us in parts.values()]
        lines.append([f"  {name}", *cells, f"{parts['gpu'] / floor:.3f}" if floor else "-"])
    return columned(lines, left=1)


def measure(args, package, file: ResultFile, workload: Workload, stock: nn.Module) -> None:
    """Times of a workload and its split, each a group of rows."""
    op, shape = workload.op, workload.shape
    wanted = set(args.configurations)
    known = file.candidates(op, shape, args.dtype_name).keys()
    split = file.candidates(f"{op}:gpu", shape, args.dtype_name).keys()
    time_it = workload.part in args.parts and not wanted <= known
    split_it = "split" in args.parts and args.device == "cuda" and not wanted <= split
    if not (time_it or split_it):
        print(f"  {op} {shape}: there already")
        return
    # What is compared is of one run: what is known is measured again beside what is new.
    names = [name for name in CONFIGURATIONS if name in wanted | known | split]
    runs: dict[str, Run] = {}
    reasons: dict[str, str] = {}
    expected = None
    for name in names:
        try:
            if name == "injected_graph" and args.device == "cpu":
                raise RuntimeError("a CUDA graph needs a GPU")
            run = configured(workload, name, stock, package, args.skip)
            actual = run.check().double()
            expected = actual if expected is None else expected
            difference = ((actual - expected).norm() / expected.norm()).item()
            print(f"  {name}: relative difference to {names[0]} {difference:.2e}", flush=True)
            if expected.isfinite().all() and not difference < WRONG:
                raise RuntimeError(f"wrong: relative difference {difference:.1e} to {names[0]}")
            runs[name] = run
        except Exception as error:  # out of memory, a graph break: the others are worth their time
            reasons[name] = short(error)
            print(f"  {name}: {reasons[name]}", flush=True)
    if time_it:
        times = times_of(args, runs, reasons, args.rounds)
        write(args, file, op, shape, names, times, reasons)
        show(list(file.candidates(op, shape, args.dtype_name).values()))
    if split_it:
        splits: dict[str, dict[str, float]] = {}
        for name, run in runs.items():
            print(f"  {name}:")
            try:
                splits[name] = gpu_split(run)
            except Exception as error:
                reasons[name] = short(error)
        for kind in ("gpu", *KINDS, "other"):
            times = {name: (parts[kind],) * 3 for name, parts in splits.items() if parts[kind] > 0}
            write(args, file, f"{op}:{kind}", shape, names, times, reasons if kind == "gpu" else {})
        print(split_table(splits), flush=True)
    torch._dynamo.reset()


def gpu_split(run: Run, calls: int = 2) -> dict[str, float]:
    """us a unit by kind of kernel, and the largest kernels on the screen."""
    from torch.profiler import ProfilerActivity, profile

    split = dict.fromkeys(("gpu", *KINDS, "other"), 0.0)
    largest: dict[str, list[float]] = {}
    for _ in range(calls):
        run.before()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run.call()
            torch.cuda.synchronize()
        for event in profiler.key_averages():
            us = event.self_device_time_total / calls / run.units
            if us > 0:
                split[kind_of(event.key)] += us
                split["gpu"] += us
                seen = largest.setdefault(event.key, [0.0, 0.0])
                seen[0] += us
                seen[1] += event.count / calls / run.units
    for key, (us, times) in sorted(largest.items(), key=lambda item: -item[1][0])[:14]:
        print(f"    {us:10.1f} us {times:6.0f}x  {key[:110]}")
    return split


def kind_of(kernel: str) -> str:
    if re.match(POINTWISE, kernel):
        return "other"
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")


# ---- workloads -------------------------------------------------------------------------------------------


def randn_of(args, seed: int = 0) -> Callable[..., torch.Tensor]:
    generator = torch.Generator(args.device).manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, device=args.device).to(args.dtype)


def forward(model: nn.Module, inputs: dict) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


def graph_run(call: Callable[[], torch.Tensor], repeated: int = 1) -> Run:
    replay, output = graph_of(call)

    def check() -> torch.Tensor:
        replay()
        return output

    return in_a_row(replay, repeated, check)


def in_a_row(call: Callable, repeated: int, check: Callable[[], torch.Tensor] | None = None) -> Run:
    """Calls that follow each other, as the steps of a denoising loop do: the host runs ahead of the GPU."""

    def calls() -> None:
        for _ in range(repeated):
            call()

    return Run(calls, check or call, units=repeated)


def step_workload(args, family: Family, op: str, model: nn.Module, frames: int) -> Workload:
    inputs, shape = family.inputs(model.config, randn_of(args), {**args.sizes, "frames": frames})
    repeated = 4 if args.device == "cuda" else 1

    def run(model: nn.Module) -> Run:
        return in_a_row(partial(forward, model, inputs), repeated)

    return Workload(
        f"{op}:step",
        "step",
        shape,
        run,
        partial(compile_blocks, family),
        lambda model: graph_run(partial(forward, model, inputs), repeated),
    )


def token_ids(args, config, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, config.vocab_size, shape, generator=generator).to(args.device)


def prefill_workload(args, op: str, model: nn.Module) -> Workload:
    sizes = args.sizes
    inputs = {"input_ids": token_ids(args, model.config, sizes["batch"], sizes["length"])}
    inputs |= {"use_cache": True, "logits_to_keep": 1}

    def run(model: nn.Module) -> Run:
        call = partial(forward, model, inputs)
        return Run(call, call)

    return Workload(
        f"{op}:prefill",
        "prefill",
        [sizes["batch"], sizes["length"], model.config.hidden_size],
        run,
        lambda model: model.compile(dynamic=False),
        lambda model: graph_run(partial(forward, model, inputs)),
    )


class Decoder:
    """Greedy decoding of `tokens` tokens at batch 1, behind a prompt that stock code has read."""

    def __init__(self, args, stock: nn.Module, model: nn.Module, cache: str):
        self.stock, self.model, self.kind = stock, model, cache
        self.length, self.tokens = args.sizes["prompt"], args.sizes["tokens"]
        self.ids = token_ids(args, model.config, 1, self.length)
        self.token = self.ids[:, -1:].clone()
        self.cache = None
        self.step = self.one_token

    def before(self) -> None:
        from transformers import DynamicCache, StaticCache

        if self.kind == "dynamic":
            self.cache = DynamicCache(config=self.model.config)
        elif self.cache is None:
            self.cache = StaticCache(config=self.model.config, max_cache_len=self.length + self.tokens + 8)
        else:
            self.cache.reset()
        with torch.no_grad():
            self.stock(self.ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.token.copy_(self.ids[:, -1:])

    def one_token(self) -> torch.Tensor:
        with torch.no_grad():
            # A no-op but where the compiled model runs in CUDA graphs, which would else keep its outputs alive.
            torch.compiler.cudagraph_mark_step_begin()
            logits = self.model(self.token, past_key_values=self.cache, use_cache=True).logits
            self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        return logits

    def call(self) -> None:
        for _ in range(self.tokens):
            self.step()

    def check(self) -> torch.Tensor:
        for _ in range(3):  # a compiled step captures its graph in the second
            self.before()
            logits = self.step()
        return logits.clone()

    def run(self) -> Run:
        return Run(self.call, self.check, self.before, self.tokens)

    def graphed(self) -> Run:
        if self.kind == "dynamic":
            raise RuntimeError("a dynamic cache grows: there is no graph of it")
        self.before()
        replay, logits = graph_of(self.one_token)

        def step() -> torch.Tensor:
            replay()
            return logits

        self.step = step
        return self.run()


def decode_workload(args, op: str, stock: nn.Module, cache: str) -> Workload:
    def compiled(model: nn.Module) -> None:
        if cache == "dynamic":
            raise RuntimeError("a dynamic cache grows: compiled models decode with a static one")
        model.compile(mode="reduce-overhead" if args.device == "cuda" else "default")

    return Workload(
        f"{op}:decode[{cache} cache]",
        "decode",
        [1, args.sizes["prompt"], stock.config.hidden_size],
        lambda model: Decoder(args, stock, model, cache).run(),
        compiled,
        lambda model: Decoder(args, stock, model, cache).graphed(),
    )


def workloads(args, family: Family, op: str, stock: nn.Module) -> list[Workload]:
    """Those of the wanted parts; `split` alone is that of all."""
    timed = {"step", "prefill", "decode"} & set(family.parts)
    wanted = timed & set(args.parts) or (timed if "split" in args.parts else set())
    made = []
    if "step" in wanted:
        made += [step_workload(args, family, op, stock, frames) for frames in args.sizes["frames"]]
    if "prefill" in wanted:
        made.append(prefill_workload(args, op, stock))
    if "decode" in wanted:
        made += [decode_workload(args, op, stock, cache) for cache in ("dynamic", "static")]
    return made


# ---- the other parts -------------------------------------------------------------------------------------


def ltx_size(args):
    return SIZES["tiny" if args.tiny else args.model.removeprefix("ltx-")]


def time_calls(args, file: ResultFile, op: str, shape: list[int], make: dict[str, Callable], rounds: int) -> dict:
    """Measures and writes what each of `make` returns, a call without arguments; the runs that succeeded."""
    runs: dict[str, Run] = {}
    reasons: dict[str, str] = {}
    for name, maker in make.items():
        try:
            call = maker()
            runs[name] = Run(call, call)
        except Exception as error:
            reasons[name] = short(error)
    times = times_of(args, runs, reasons, rounds)
    write(args, file, op, shape, list(make), times, reasons)
    show(list(file.candidates(op, shape, args.dtype_name).values()))
    return {name: runs[name] for name in times}


def measure_vae(args, package, file: ResultFile, frames: int) -> None:
    pipe = random_pipeline(ltx_size(args), args.device, args.dtype)
    grid = ((frames - 1) // 8 + 1, args.sizes["height"] // 32, args.sizes["width"] // 32)
    latents = randn_of(args)(1, pipe.vae.config.latent_channels, *grid)
    skips = {"stock": None, "injected_no_format": ["ltx_vae.conv"], "injected": []}
    op, shape = f"{args.prefix}ltx_vae{args.without}:decode", list(latents.shape)
    if skips.keys() <= file.candidates(op, shape, args.dtype_name).keys():
        print(f"  {op} {shape}: there already")
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
    if args.device == "cuda":
        print(split_table({name: gpu_split(run, calls=1) for name, run in runs.items()}))


def measure_pipeline(args, package, file: ResultFile, family: Family, frames: int) -> None:
    """All steps and the VAE, in one call of the pipeline."""
    sizes = args.sizes
    op = f"{args.prefix}{family.op}{args.without}:pipeline[{args.steps} steps]"
    shape = [frames, sizes["height"], sizes["width"]]
    names = [name for name in CONFIGURATIONS[:4] if name in args.configurations]
    if set(names) <= file.candidates(op, shape, args.dtype_name).keys():
        print(f"  {op} {shape}: there already")
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
        frames = min(args.sizes["frames"][0], 25)
        inputs, shape = family.inputs(model.config, randn_of(args), {**args.sizes, "frames": frames})
    else:
        inputs = {"input_ids": token_ids(args, model.config, 1, min(512, args.sizes["length"]))}
        shape = [*inputs["input_ids"].shape, model.config.hidden_size]
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
        known = {"error": error.item(), "reason": "an accuracy, not a time"}
        rows.append(row(f"{args.prefix}{family.op}{args.without}:accuracy", shape, args.dtype_name, name, **known))
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
