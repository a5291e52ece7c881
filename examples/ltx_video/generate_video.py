"""Generate a video with LTX-Video through diffusers: with the kernels of this package, without, compiled, or compared.

    python generate_video.py --prompt "A woman in the snow"     real weights, from the Hub or its cache
    python generate_video.py --random-weights                   the 2B model's true sizes, no download
    python generate_video.py --tiny --compare                   minutes on a CPU: every path, a video of noise
    python generate_video.py --compare                          stock, injected, compiled, both: times and differences

Offline there is no tokenizer either: random and tiny models take random prompt embeddings and only show the prompt.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from ltx_video import SIZES, load_kernels, random_pipeline, random_prompt, synchronize, table, timed_run

MODEL_ID = "Lightricks/LTX-Video"


@dataclass
class Result:
    """One configuration's run."""

    name: str
    video: torch.Tensor  # [B, T, H, W, 3] in 0..1
    step: float  # seconds, median
    total: float  # seconds: all steps and the decoding
    decode: float
    memory: float  # GiB at the peak


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--model", default=MODEL_ID, help="repository or folder of the pipeline")
    weights.add_argument("--random-weights", action="store_true", help="true sizes (2B), random weights")
    weights.add_argument("--tiny", action="store_true", help="a tiny model with random weights")
    kernels = parser.add_mutually_exclusive_group()
    kernels.add_argument(
        "--use-optimized-kernels", action="store_true", default=None, help="fail where they cannot be loaded"
    )
    kernels.add_argument("--no-optimized-kernels", dest="use_optimized_kernels", action="store_false")
    parser.add_argument("--compile", action="store_true", help="torch.compile of the transformer's blocks")
    parser.add_argument("--compare", action="store_true", help="stock, injected, compiled, injected and compiled")
    parser.add_argument("--prompt", default="A woman with long brown hair walks through a snowy forest, close-up")
    parser.add_argument("--negative-prompt", default="worst quality, inconsistent motion, blurry, jittery, distorted")
    parser.add_argument("--guidance-scale", type=float, default=3.0)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--num-frames", type=int, default=None, help="161, or 9 with --tiny")
    parser.add_argument("--height", type=int, default=None, help="512, or 64 with --tiny")
    parser.add_argument("--width", type=int, default=None, help="768, or 96 with --tiny")
    parser.add_argument("--steps", type=int, default=None, help="50, or 4 with --tiny")
    parser.add_argument("--warmup-iterations", type=int, default=2)
    parser.add_argument("--fps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="bfloat16, float32 on a CPU")
    parser.add_argument("--output", type=Path, default=Path("ltx_video.mp4"))
    args = parser.parse_args()
    for name, full, tiny in (("num_frames", 161, 9), ("height", 512, 64), ("width", 768, 96), ("steps", 50, 4)):
        if getattr(args, name) is None:
            setattr(args, name, tiny if args.tiny else full)
    args.dtype = getattr(torch, args.dtype or ("float32" if args.device == "cpu" else "bfloat16"))
    return args


def optimized_kernels(wanted: bool | None):
    """The package; None where it is not wanted, or not to be had and not asked for."""
    if wanted is False:
        return None
    try:
        return load_kernels()
    except Exception as error:
        if wanted:
            raise
        print(f"The optimized kernels are not available, the stock model runs: {error}", file=sys.stderr)
        return None


def make_pipeline(args: argparse.Namespace):
    """(pipeline, its arguments that stand for the prompt)."""
    if args.random_weights or args.tiny:
        size = SIZES["tiny" if args.tiny else "2b"]
        pipe = random_pipeline(size, args.device, args.dtype)
        return pipe, random_prompt(size, args.device, args.dtype, batch=args.batch_size, seed=args.seed)
    from diffusers import LTXPipeline

    try:
        pipe = LTXPipeline.from_pretrained(args.model, torch_dtype=args.dtype)
    except OSError as error:
        sys.exit(f"{args.model} cannot be loaded ({error})\nWithout it: --random-weights (true sizes) or --tiny.")
    prompt = {"prompt": [args.prompt] * args.batch_size, "negative_prompt": [args.negative_prompt] * args.batch_size}
    return pipe.to(args.device), prompt


def peak_memory(device: str) -> float:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def generate(args: argparse.Namespace, pipe, prompt: dict, name: str) -> Result:
    call = {
        **prompt,
        "num_frames": args.num_frames,
        "height": args.height,
        "width": args.width,
        "guidance_scale": args.guidance_scale,
        "output_type": "pt",
    }
    if args.warmup_iterations:
        steps = {"num_inference_steps": args.warmup_iterations, "generator": torch.Generator().manual_seed(0)}
        timed_run(pipe, args.device, f"{name}, warm-up", **call, **steps)
    if args.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    steps = {"num_inference_steps": args.steps, "generator": torch.Generator().manual_seed(args.seed)}
    start = synchronize(args.device)
    video, times, decode = timed_run(pipe, args.device, name, **call, **steps)
    total = synchronize(args.device) - start
    video = video.float().movedim(2, -1).cpu()  # [B, T, 3, H, W]
    return Result(name, video, statistics.median(times or [total]), total, decode, peak_memory(args.device))


def set_compiled(pipe, compiled: bool) -> None:
    if compiled:
        pipe.transformer.compile_repeated_blocks(fullgraph=True)
    else:
        for block in pipe.transformer.transformer_blocks:
            block._compiled_call_impl = None


def write_video(video: torch.Tensor, path: Path, fps: int) -> None:
    from diffusers.utils import export_to_video

    path.parent.mkdir(parents=True, exist_ok=True)
    for i, frames in enumerate(video):
        name = path if i == 0 else path.with_name(f"{path.stem}_{i}{path.suffix}")
        export_to_video(list(frames.numpy()), str(name), fps=fps)
        print(f"wrote {name}")


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    error = (a - b).double().pow(2).mean().item()
    return float("inf") if error == 0 else -10 * torch.tensor(error).log10().item()


def write_picture(results: list[Result], path: Path) -> None:
    """The middle frame of each configuration, and ten times its difference from stock."""
    from PIL import Image, ImageDraw

    stock = results[0].video
    middle = stock.shape[1] // 2
    height, width = stock.shape[2:4]
    label = 32
    canvas = Image.new("RGB", (width * len(results), 2 * height + label), "white")
    for i, result in enumerate(results):
        frame = result.video[0, middle]
        difference = (10 * (frame - stock[0, middle]).abs()).clamp(0, 1)
        for row, pixels in enumerate((frame, difference)):
            picture = Image.fromarray((255 * pixels).round().byte().numpy())
            canvas.paste(picture, (i * width, label + row * height))
        text = f"{result.name}\n{1e3 * result.step:.1f} ms a step"
        ImageDraw.Draw(canvas).multiline_text((i * width + 4, 2), text, fill="black")
    canvas.save(path)
    print(f"wrote {path} (below: ten times the difference from stock)")


def compare(args: argparse.Namespace, pipe, prompt: dict, kernels) -> None:
    results = []
    for name, injected, compiled in (
        ("stock", False, False),
        ("injected", True, False),
        ("compiled", False, True),
        ("injected + compiled", True, True),
    ):
        (kernels.inject_optimized_kernels if injected else kernels.remove_optimized_kernels)(pipe)
        torch._dynamo.reset()
        set_compiled(pipe, compiled)
        results.append(generate(args, pipe, prompt, name))
    stock = results[0]
    lines = [
        "| configuration | ms a step | it/s | speed-up | decode s | total s | peak GiB | PSNR to stock, dB |",
        "|---" * 8 + "|",
    ]
    for r in results:
        cells = (
            f"{1e3 * r.step:.1f}",
            f"{1 / r.step:.2f}",
            f"{stock.step / r.step:.2f}x",
            f"{r.decode:.2f}",
            f"{r.total:.1f}",
        )
        same = "-" if r is stock else f"{psnr(r.video, stock.video):.1f}"
        lines.append(f"| {r.name} | {' | '.join(cells)} | {r.memory:.2f} | {same} |")
    text = "\n".join(lines)
    print(f"\n{describe(args, kernels)}\n\n{text}\n")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.with_suffix(".md").write_text(f"```\n{describe(args, kernels)}\n```\n\n{text}\n", encoding="utf-8")
    print(f"wrote {args.output.with_suffix('.md')}")
    write_picture(results, args.output.with_suffix(".png"))
    write_video(results[1].video, args.output, args.fps)
    for r in results:
        if r.video.std() < 0.02:
            sys.exit(f"{r.name}: the video is nearly constant (standard deviation {r.video.std():.4f})")
        if psnr(r.video, stock.video) < 25:
            sys.exit(f"{r.name}: the video is not stock's (PSNR {psnr(r.video, stock.video):.1f} dB)")


def describe(args: argparse.Namespace, kernels) -> str:
    cuda = args.device.startswith("cuda")
    weights = "random weights, 2B sizes" if args.random_weights else "a tiny model" if args.tiny else args.model
    return table(
        [
            ("device", torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"),
            ("kernels", "none" if kernels is None else f"ltx-kernels, {kernels.backend} variant"),
            ("weights", weights),
            ("precision", str(args.dtype).removeprefix("torch.")),
            ("resolution", f"{args.height}x{args.width}, {args.num_frames} frames, batch {args.batch_size}"),
            ("steps", f"{args.steps}, guidance {args.guidance_scale}"),
        ]
    )


def main() -> None:
    args = arguments()
    kernels = optimized_kernels(args.use_optimized_kernels)
    pipe, prompt = make_pipeline(args)
    if args.compare:
        if kernels is None:
            sys.exit("--compare needs the optimized kernels")
        compare(args, pipe, prompt, kernels)
        return
    baseline = None
    if kernels is not None:
        if args.warmup_iterations > 1:  # what the speed-up is measured against: the warm-up steps of the stock model
            steps = {"num_inference_steps": args.warmup_iterations + 1, "output_type": "latent"}
            sizes = {"num_frames": args.num_frames, "height": args.height, "width": args.width}
            baseline = statistics.median(
                timed_run(pipe, args.device, "stock, to compare", **prompt, **steps, **sizes)[1]
            )
        print(kernels.inject_optimized_kernels(pipe))
    set_compiled(pipe, args.compile)
    result = generate(args, pipe, prompt, "generating")
    write_video(result.video, args.output, args.fps)
    rows = [
        ("time", f"{result.total:.1f} s, of which decoding {result.decode:.2f} s"),
        ("speed", f"{1 / result.step:.2f} it/s ({1e3 * result.step:.1f} ms a step)"),
        ("peak memory", f"{result.memory:.2f} GiB"),
    ]
    if baseline is not None:
        how = " with torch.compile" if args.compile else ""
        rows.append(("speed-up", f"{baseline / result.step:.2f}x{how} (stock: {1e3 * baseline:.1f} ms a step)"))
    print(f"\n{describe(args, kernels)}\n{table(rows)}")


if __name__ == "__main__":
    main()
