"""The minimal integration: load the kernels, put them into LTX-Video, check, time, take them out again.

python ltx_kernel_injection_example.py                                random weights: 2B's sizes on a GPU, else tiny
python ltx_kernel_injection_example.py --model Lightricks/LTX-Video   real weights
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch

# Without this line the kernels come from the Hub.
if (Path(__file__).resolve().parent.parent / "build").is_dir():
    os.environ.setdefault("LOCAL_KERNELS", f"org/ltx-kernels={Path(__file__).resolve().parent.parent}")

from diffusers import LTXVideoTransformer3DModel  # noqa: E402
from kernels import get_kernel  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TINY = {"num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 4, "cross_attention_dim": 128}


def load_transformer(model: str | None) -> LTXVideoTransformer3DModel:
    if model is not None:
        return LTXVideoTransformer3DModel.from_pretrained(model, subfolder="transformer", torch_dtype=DTYPE).to(DEVICE)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return LTXVideoTransformer3DModel(**({} if DEVICE == "cuda" else TINY)).to(DTYPE).eval()


def inputs_of(transformer: LTXVideoTransformer3DModel, frames: int, height: int, width: int) -> dict:
    """What the pipeline passes in a step with guidance: a batch of two, latents of 1/8 the frames and 1/32 the size."""
    grid = ((frames - 1) // 8 + 1, height // 32, width // 32)
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, DTYPE)

    return {
        "hidden_states": noise(2, grid[0] * grid[1] * grid[2], transformer.config.in_channels),
        "encoder_hidden_states": noise(2, 128, transformer.config.caption_channels),
        "encoder_attention_mask": torch.ones(2, 128, device=DEVICE),
        "timestep": torch.full((2,), 500.0, device=DEVICE),
        "num_frames": grid[0],
        "height": grid[1],
        "width": grid[2],
        "rope_interpolation_scale": (8 / 24, 32, 32),
        "return_dict": False,
    }


@torch.no_grad()
def step(transformer: LTXVideoTransformer3DModel, inputs: dict, repeats: int = 10) -> tuple[torch.Tensor, float]:
    """(output, median milliseconds) of one denoising step."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        (output,) = transformer(**inputs)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return output, statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", help="a repository or folder with a transformer/ of LTX-Video")
    args = parser.parse_args()

    transformer = load_transformer(args.model)
    inputs = inputs_of(transformer, *((49, 512, 768) if DEVICE == "cuda" else (17, 128, 192)))
    expected, stock_ms = step(transformer, inputs)

    # The integration: two lines. A whole pipeline can be given in place of the transformer.
    kernels = get_kernel("org/ltx-kernels", version=1)
    report = kernels.inject_optimized_kernels(transformer)

    result, injected_ms = step(transformer, inputs)
    difference = ((result - expected).float().norm() / expected.float().norm()).item()
    print(report)
    print(f"\nstock {stock_ms:.1f} ms, injected {injected_ms:.1f} ms, {stock_ms / injected_ms:.2f}x")
    print(f"relative difference {difference:.1e}")
    # Each of the two rounds in its own places: in bfloat16 they differ by a few percent after 28 blocks of random
    #     weights.
    assert difference < (5e-2 if DTYPE is torch.bfloat16 else 1e-4)

    # Only the RMSNorms, and everything back as it was.
    kernels.remove_optimized_kernels(transformer)
    print(f"patch_rmsnorm alone: {kernels.patch_rmsnorm(transformer)} norms")
    kernels.remove_optimized_kernels(transformer)
    assert torch.equal(step(transformer, inputs, repeats=1)[0], expected) or DEVICE == "cuda"
    print("removed: the stock model again")


if __name__ == "__main__":
    main()
