"""What demo.py and generate_video.py share: the package, an LTX-Video pipeline with random weights, a timed run."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

REPO_ID, VERSION = "org/ltx-kernels", 1
PROJECT = Path(__file__).resolve().parent.parent.parent


def load_kernels():
    """The package from this checkout's build/ if there is one, else from the Hub."""
    if (PROJECT / "build").is_dir():
        os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={PROJECT}")  # before `kernels` is imported
    from kernels import get_kernel

    return get_kernel(REPO_ID, version=VERSION)


@dataclass(frozen=True)
class Size:
    """The sizes of the models; every number not given is the class's default, which is LTX-Video 2B."""

    name: str
    transformer: dict = field(default_factory=dict)
    vae: dict = field(default_factory=dict)
    caption_channels: int = 4096


SIZES = {
    "2b": Size("LTX-Video 2B"),
    "13b": Size(
        "LTX-Video 13B",
        transformer={
            "num_attention_heads": 32,
            "attention_head_dim": 128,
            "num_layers": 48,
            "cross_attention_dim": 4096,
        },
    ),
    "small": Size(
        "a small LTX-Video (8 heads of 32, 4 layers)",
        transformer={
            "in_channels": 128,
            "num_attention_heads": 8,
            "attention_head_dim": 32,
            "num_layers": 4,
            "cross_attention_dim": 256,
            "caption_channels": 64,
        },
        vae={
            "block_out_channels": (16, 16, 16, 16),
            "decoder_block_out_channels": (16, 16, 16, 16),
            "layers_per_block": (1, 1, 1, 1, 1),
            "decoder_layers_per_block": (1, 1, 1, 1, 1),
        },
        caption_channels=64,
    ),
    "tiny": Size(
        "a tiny LTX-Video (4 heads of 16, 2 layers)",
        transformer={
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "num_layers": 2,
            "cross_attention_dim": 64,
            "caption_channels": 32,
        },
        vae={
            "block_out_channels": (8, 8, 8, 8),
            "decoder_block_out_channels": (8, 8, 8, 8),
            "layers_per_block": (1, 1, 1, 1, 1),
            "decoder_layers_per_block": (1, 1, 1, 1, 1),
        },
        caption_channels=32,
    ),
}


def random_pipeline(size: Size, device: str, dtype: torch.dtype, vae: bool = True, seed: int = 0):
    """An LTXPipeline of the real classes with random weights and without text encoder: it takes prompt_embeds."""
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # made where and as they are used: no second copy, no seconds on the CPU
    try:
        with torch.device(device):
            transformer = LTXVideoTransformer3DModel(**size.transformer).eval()
            decoder = AutoencoderKLLTXVideo(**size.vae).eval() if vae else None
    finally:
        torch.set_default_dtype(default)
    if vae:  # freshly made it decodes to grey; scaled, to the contrast of a picture
        with torch.no_grad():
            latents = torch.randn(1, decoder.config.latent_channels, 2, 4, 4, device=device, dtype=dtype)
            decoder.decoder.conv_out.conv.weight.mul_(0.5 / decoder.decode(latents, return_dict=False)[0].std())
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return LTXPipeline(scheduler=scheduler, vae=decoder, text_encoder=None, tokenizer=None, transformer=transformer)


def random_prompt(
    size: Size, device: str, dtype: torch.dtype, batch: int = 1, length: int = 128, seed: int = 0
) -> dict:
    """Prompt embeddings as a text encoder would give them: the tail of each row is padding."""
    generator = torch.Generator().manual_seed(seed)
    arguments = {}
    for name, used in (("prompt", length // 3), ("negative_prompt", length // 8)):
        arguments[f"{name}_embeds"] = torch.randn(batch, length, size.caption_channels, generator=generator).to(
            device, dtype
        )
        arguments[f"{name}_attention_mask"] = (torch.arange(length) < used).expand(batch, -1).to(device)
    return arguments


def synchronize(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def timed_run(pipe, device: str, title: str, **arguments):
    """(the pipeline's frames, seconds of each step but the first, seconds after the last step)."""
    stamps = []

    def on_step_end(_pipe, _step, _timestep, kwargs):
        stamps.append(synchronize(device))
        return kwargs

    pipe.set_progress_bar_config(desc=title, leave=True)
    frames = pipe(**arguments, callback_on_step_end=on_step_end).frames
    rest = synchronize(device) - stamps[-1]
    return frames, [after - before for before, after in zip(stamps, stamps[1:])], rest


def table(rows: list[tuple[str, object]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name.ljust(width)}  {value}" for name, value in rows)
