"""Injected pipelines of diffusers as users call them: guidance, several steps, one size after the other.

Tiny random denoisers of the real classes; prompts come as embeddings and latents go out, so that no encoder is needed.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import pytest
import torch
from tiny_diffusers import FAMILIES
from tiny_models import OpCounter, relative

diffusers = pytest.importorskip("diffusers")


def embeds(pooled: int = 0, mask: str = "", text: int = 5) -> dict[str, torch.Tensor]:
    """Of the prompt and of the negative one, whose masks differ: `mask` is how the pipeline calls them."""
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for prompt, length in (("prompt", text), ("negative_prompt", text - 2)):
        inputs[f"{prompt}_embeds"] = torch.randn(1, text, 24, generator=generator)
        if pooled:
            inputs[prompt.replace("prompt", "pooled_prompt_embeds")] = torch.randn(1, pooled, generator=generator)
        if mask:
            inputs[mask.format(prompt)] = (torch.arange(text) < length)[None].long()
    return inputs


def positive(inputs: dict) -> dict:
    return {name: value for name, value in inputs.items() if not name.startswith("negative")}


class Pipeline(NamedTuple):
    family: str
    inputs: dict
    denoisers: tuple = ("transformer",)
    scheduler: str = "FlowMatchEulerDiscreteScheduler"
    components: dict = {}
    config: dict = {}

    def build(self, name: str) -> Any:
        cls = getattr(diffusers, name.split()[0])
        needed = (n for n, p in inspect.signature(cls).parameters.items() if p.default is p.empty)
        components = {**dict.fromkeys(needed), **self.components, "scheduler": getattr(diffusers, self.scheduler)()}
        components.update({denoiser: FAMILIES[self.family].build(**self.config) for denoiser in self.denoisers})
        pipe = cls(**components)
        pipe.set_progress_bar_config(disable=True)
        return pipe


ATTENTION_MASK = "{}_attention_mask"
FRAMES = {"num_frames": 5}
UNET = {"denoisers": ("unet",), "scheduler": "EulerDiscreteScheduler"}
NO_CHECKER = {"components": {"requires_safety_checker": False}}
PIPELINES = {
    "StableDiffusionPipeline": Pipeline("sd1.5", embeds(), **UNET, **NO_CHECKER),
    "StableDiffusionXLPipeline": Pipeline("sdxl", embeds(pooled=32), **UNET),
    "StableDiffusion3Pipeline": Pipeline("sd3.5", embeds(pooled=20)),
    "FluxPipeline": Pipeline("flux", {**embeds(pooled=20), "true_cfg_scale": 3.0}),
    "Flux2Pipeline": Pipeline("flux2", positive(embeds())),
    "PixArtSigmaPipeline": Pipeline(
        "pixart",
        {**embeds(mask=ATTENTION_MASK), "negative_prompt": None, "use_resolution_binning": False},
        scheduler="EulerDiscreteScheduler",
    ),
    "WanPipeline 2.1": Pipeline("wan2.1", {**embeds(), **FRAMES}),
    "WanPipeline 2.2 of two experts": Pipeline(
        "wan2.1",
        {**embeds(), **FRAMES},
        denoisers=("transformer", "transformer_2"),
        components={"boundary_ratio": 0.9},
    ),
    "WanPipeline 2.2 with a timestep a token": Pipeline(
        "wan2.2_ti2v", {**embeds(), **FRAMES}, components={"expand_timesteps": True}
    ),
    "HunyuanVideoPipeline": Pipeline(
        "hunyuan_video", {**positive(embeds(pooled=20, mask=ATTENTION_MASK, text=7)), **FRAMES}
    ),
    "CogVideoXPipeline": Pipeline(
        "cogvideox", {**embeds(), **FRAMES, "max_sequence_length": 5}, scheduler="CogVideoXDDIMScheduler"
    ),
    "MochiPipeline": Pipeline("mochi", {**embeds(mask=ATTENTION_MASK), **FRAMES, "max_sequence_length": 5}),
    "QwenImagePipeline": Pipeline(
        "qwen_image", {**embeds(mask="{}_embeds_mask"), "true_cfg_scale": 3.0}, config={"out_channels": 2}
    ),
    "Lumina2Pipeline": Pipeline("lumina2", embeds(mask=ATTENTION_MASK)),
    "ZImagePipeline": Pipeline("z_image", {name: [value[0]] for name, value in embeds().items()}),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipeline_keeps_its_output(k, name):
    pipe = PIPELINES[name].build(name)

    def latents(height: int, width: int) -> torch.Tensor:
        sizes = {"height": height, "width": width, "num_inference_steps": 2, "output_type": "latent"}
        generator = torch.Generator().manual_seed(1)
        return pipe(**PIPELINES[name].inputs, **sizes, generator=generator, return_dict=False)[0]

    sizes = ((64, 96), (96, 64), (64, 96))
    expected = [latents(*size) for size in sizes]
    report = k.inject_optimized_kernels(pipe)
    assert report.injected and not report.left_alone
    for size, stock in zip(sizes, expected):
        with OpCounter() as ops:
            result = latents(*size)
        assert relative(result, stock) < 1e-4 and ops.total
    assert k.remove_optimized_kernels(pipe) == len(report.injected)
    with OpCounter() as ops:
        assert torch.equal(latents(*sizes[0]), expected[0])
    assert not ops.total
