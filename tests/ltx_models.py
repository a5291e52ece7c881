"""Tiny models of LTX-Video and LTX-2, each with its inputs, and what the tests of their injection ask of them."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from tiny_models import count, relative

RELEASED = {"gated_attn": True, "audio_gated_attn": True, "cross_attn_mod": True, "audio_cross_attn_mod": True}
MODELS = {
    "ltx_video": lambda: (tiny_models.ltx_video(), tiny_models.ltx_video_inputs()),
    "ltx_video_per_token": lambda: (tiny_models.ltx_video(), tiny_models.ltx_video_inputs(per_token=True)),
    "ltx_video_long_prompt": lambda: (tiny_models.ltx_video(), tiny_models.ltx_video_inputs(text=40)),
    "ltx_video_affine": lambda: (
        tiny_models.ltx_video(norm_elementwise_affine=True),
        tiny_models.ltx_video_inputs(),
    ),
    "ltx_video_coords": lambda: (tiny_models.ltx_video(), with_coords(tiny_models.ltx_video_inputs(per_token=True))),
    "ltx2": lambda: with_inputs(tiny_models.ltx2()),
    "ltx2_per_token": lambda: with_inputs(tiny_models.ltx2(), per_token=True),
    "ltx2_isolated": lambda: with_inputs(tiny_models.ltx2(), isolate_modalities=True),
    "ltx2_interleaved": lambda: with_inputs(tiny_models.ltx2(rope_type="interleaved")),
    "ltx2.3": lambda: with_inputs(tiny_models.ltx2(**RELEASED, perturbed_attn=True, use_prompt_embeddings=False)),
    "ltx2.5": lambda: with_inputs(tiny_models.ltx2(**RELEASED, use_prompt_adaln_single=False, ff_bias=False)),
    "ltx2_perturbed": lambda: with_inputs(
        tiny_models.ltx2(**RELEASED, perturbed_attn=True),
        spatio_temporal_guidance_blocks=[0],
        perturbation_mask=torch.tensor([0.0, 1.0]),
    ),
}


def with_inputs(model, **arguments):
    return model, tiny_models.ltx2_inputs(model, **arguments)


def with_coords(inputs: dict) -> dict:
    """As the condition pipeline calls the model: coordinates given, one timestep a token."""
    generator = torch.Generator().manual_seed(5)
    tokens = inputs["hidden_states"].shape[1]
    inputs["video_coords"] = 20 * torch.rand(inputs["hidden_states"].shape[0], 3, tokens, generator=generator)
    inputs["rope_interpolation_scale"] = None
    return inputs


def to(inputs: dict, device: str) -> dict:
    return {k: v.to(device) if torch.is_tensor(v) else v for k, v in inputs.items()}


def run(model, inputs) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(model(**inputs))


def differences(results, references) -> float:
    return max(relative(a, b) for a, b in zip(results, references))


def blocks(model) -> int:
    return len(model.transformer_blocks)


def fused(k, model, inputs) -> bool:
    """Do all blocks run fused?"""
    calls = count(model, **inputs)
    norms = calls["ada_norm"] + calls["residual_ada_norm"]
    return norms >= 2 * blocks(model) and calls["residual_ada_norm"] >= blocks(model)


def lora(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_v", "to_out.0", "net.0.proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model.add_adapter(config, "test")
