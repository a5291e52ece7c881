"""What e2e.py times of a model: a step, a prefill, decoding; each as it is, compiled, and as a CUDA graph."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from _models import Family
from _timing import capture, nothing
from torch import nn


@dataclass
class Run:
    """What is timed of one configuration. `units` of it are in a call; `check` returns what must agree with stock's."""

    call: Callable[[], object]
    check: Callable[[], torch.Tensor]
    before: Callable[[], object] = nothing
    units: int = 1


@dataclass
class Workload:
    """`run` makes the Run of a model; `graph` that of a CUDA graph of it; `compile` compiles a copy of the model.

    In a loop `in_a_row` of its calls follow each other, so that the host runs ahead of the GPU.
    """

    op: str
    part: str
    shape: list[int]
    run: Callable[[nn.Module], Run]
    compile: Callable[[nn.Module], None]
    graph: Callable[[nn.Module], Run]
    in_a_row: int = 1


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


# ---- inputs and calls -------------------------------------------------------------------------------------


def randn_of(args, seed: int = 0) -> Callable[..., torch.Tensor]:
    generator = torch.Generator(args.device).manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, device=args.device).to(args.dtype)


def forward(model: nn.Module, inputs: dict) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


def run_of(call: Callable[[], torch.Tensor]) -> Run:
    return Run(call, call)


def graph_run(call: Callable[[], torch.Tensor]) -> Run:
    replay, output = graph_of(call)

    def check() -> torch.Tensor:
        replay()
        return output

    return Run(replay, check)


def in_a_row(runs: dict[str, Run], most: int, row_ms: float) -> dict[str, Run]:
    """Each with as many calls behind each other as last `row_ms` by the first run's time, at most `most`."""
    if most == 1 or not runs:
        return runs
    ms = call_ms(next(iter(runs.values())))
    calls = min(most, math.ceil(row_ms / ms))

    def row(run: Run) -> Run:
        def call() -> None:
            for _ in range(calls):
                run.call()

        return Run(call, run.check, run.before, calls * run.units)

    return {name: row(run) for name, run in runs.items()}


def call_ms(run: Run) -> float:
    run.before()
    start = time.perf_counter()
    run.call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def step_workload(args, family: Family, op: str, model: nn.Module, frames: int) -> Workload:
    inputs, shape = family.inputs(model.config, randn_of(args), {**args.sizes, "frames": frames})
    return Workload(
        f"{op}:step",
        "step",
        shape,
        lambda model: run_of(partial(forward, model, inputs)),
        partial(compile_blocks, family),
        lambda model: graph_run(partial(forward, model, inputs)),
        in_a_row=4,
    )


def token_ids(args, config, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, config.vocab_size, shape, generator=generator).to(args.device)


def prefill_workload(args, op: str, model: nn.Module) -> Workload:
    sizes = args.sizes
    inputs = {"input_ids": token_ids(args, model.config, sizes["batch"], sizes["length"])}
    inputs |= {"use_cache": True, "logits_to_keep": 1}

    return Workload(
        f"{op}:prefill",
        "prefill",
        [sizes["batch"], sizes["length"], model.config.hidden_size],
        lambda model: run_of(partial(forward, model, inputs)),
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
