"""LTX-Video through diffusers, stock against injected: `make demo`.

Random weights, so no download: the 2B model in bf16 on a GPU, a small one of the same classes in fp32 without. It shows
the time of a step and how far the results differ. It makes no video; generate_video.py does.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from ltx_video import SIZES, load_kernels, random_pipeline, random_prompt, table, timed_run


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--model", choices=SIZES, default="2b" if cuda else "small")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16" if cuda else "float32"
    )
    parser.add_argument("--num-frames", type=int, default=49 if cuda else 25)
    parser.add_argument("--height", type=int, default=512 if cuda else 256)
    parser.add_argument("--width", type=int, default=768 if cuda else 384)
    parser.add_argument("--steps", type=int, default=20 if cuda else 10)
    args = parser.parse_args()

    dtype, size = getattr(torch, args.dtype), SIZES[args.model]
    kernels = load_kernels()
    pipe = random_pipeline(size, args.device, dtype, vae=False)
    arguments = {
        **random_prompt(size, args.device, dtype),
        "num_frames": args.num_frames,
        "height": args.height,
        "width": args.width,
        "output_type": "latent",
    }

    def run(title: str):
        timed_run(pipe, args.device, f"{title} (warm-up)", num_inference_steps=2, **arguments)
        generator = torch.Generator().manual_seed(0)
        latents, steps, _ = timed_run(
            pipe, args.device, title.ljust(18), num_inference_steps=args.steps, generator=generator, **arguments
        )
        return latents.double(), statistics.median(steps)

    stock, stock_time = run("stock")
    report = kernels.inject_optimized_kernels(pipe)
    injected, injected_time = run("injected")

    difference = (injected - stock).abs().max().item()
    relative = ((injected - stock).pow(2).mean() / stock.pow(2).mean()).sqrt().item()
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    print(f"\n{report}\n")
    rows = [
        ("device", f"{name}, the package's {kernels.backend} variant"),
        ("model", f"{size.name}, random weights, {args.dtype}"),
        ("video", f"{args.num_frames} frames of {args.height}x{args.width}, {stock.shape[1]} tokens, guidance batch 2"),
        ("step, stock", f"{1e3 * stock_time:.1f} ms"),
        ("step, injected", f"{1e3 * injected_time:.1f} ms"),
        ("speed-up", f"{stock_time / injected_time:.2f}x"),
        ("largest difference", f"{difference:.2e} of latents up to {stock.abs().max().item():.1f}"),
        ("relative difference", f"{relative:.2e} (RMS, after {args.steps} steps)"),
        ("injected", ", ".join(f"{number} {kind}" for kind, number in report.counts.items()) or "nothing"),
    ]
    print(table(rows))


if __name__ == "__main__":
    main()
