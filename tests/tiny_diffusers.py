"""Tiny random models of diffusers' families and the inputs of one call: `FAMILIES[name].build()`, `.inputs()`."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import tiny_models
import torch
from torch import nn


class Noise:
    """The same numbers in each call."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)


def mask(batch: int, text: int) -> torch.Tensor:
    mask = torch.ones(batch, text, dtype=torch.bool)
    mask[0, -2:] = False
    return mask


TIMES = torch.tensor([0.3, 0.7])


def unet(added: bool) -> Callable[[Noise], dict]:
    def inputs(noise: Noise) -> dict:
        inputs = {"sample": noise(2, 4, 8, 8), "timestep": 500 * TIMES, "encoder_hidden_states": noise(2, 5, 24)}
        if added:
            inputs["added_cond_kwargs"] = {"text_embeds": noise(2, 32), "time_ids": torch.arange(12.0).view(2, 6)}
        return inputs

    return inputs


def sd3(noise: Noise) -> dict:
    return {
        "hidden_states": noise(2, 8, 8, 8),
        "encoder_hidden_states": noise(2, 5, 24),
        "pooled_projections": noise(2, 20),
        "timestep": 1000 * TIMES,
    }


def ids(axes: int, *grid: int) -> torch.Tensor:
    """Positions of a grid, in the last axes."""
    axis = [torch.arange(float(n)) for n in grid]
    grid = torch.stack(torch.meshgrid(*axis, indexing="ij"), -1).flatten(0, -2)
    return torch.cat([torch.zeros(len(grid), axes - grid.shape[1]), grid], 1)


def flux(noise: Noise) -> dict:
    return {
        "hidden_states": noise(2, 12, 8),
        "encoder_hidden_states": noise(2, 5, 24),
        "pooled_projections": noise(2, 20),
        "timestep": TIMES,
        "guidance": torch.tensor([3.0, 4.0]),
        "img_ids": ids(3, 3, 4),
        "txt_ids": ids(3, 1, 1).repeat(5, 1),
    }


def flux2(noise: Noise) -> dict:
    inputs = {**flux(noise), "img_ids": ids(4, 3, 4), "txt_ids": ids(4, 5)}
    del inputs["pooled_projections"]
    return inputs


def dit(noise: Noise) -> dict:
    return {
        "hidden_states": noise(2, 4, 8, 8),
        "timestep": torch.tensor([300, 700]),
        "class_labels": torch.tensor([3, 5]),
    }


def pixart(noise: Noise) -> dict:
    return {
        "hidden_states": noise(2, 4, 8, 8),
        "timestep": torch.tensor([300, 700]),
        "encoder_hidden_states": noise(2, 5, 24),
        "encoder_attention_mask": mask(2, 5),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def wan(per_token: bool = False, image: bool = False) -> Callable[[Noise], dict]:
    def inputs(noise: Noise) -> dict:
        inputs = {
            "hidden_states": noise(2, 8, 2, 6, 8),
            "timestep": torch.arange(48.0).view(2, 24) if per_token else 1000 * TIMES,
            "encoder_hidden_states": noise(2, 512 if image else 5, 24),
        }
        if image:
            inputs["encoder_hidden_states_image"] = noise(2, 4, 20)
        return inputs

    return inputs


def hunyuan_video(noise: Noise) -> dict:
    return {
        "hidden_states": noise(2, 8, 2, 6, 8),
        "timestep": 1000 * TIMES,
        "encoder_hidden_states": noise(2, 5, 24),
        "encoder_attention_mask": mask(2, 5),
        "pooled_projections": noise(2, 20),
        "guidance": torch.tensor([3000.0, 4000.0]),
    }


def cogvideox(noise: Noise) -> dict:
    angles = noise(24, 8).repeat_interleave(2, dim=1)
    return {
        "hidden_states": noise(2, 2, 8, 6, 8),
        "encoder_hidden_states": noise(2, 5, 24),
        "timestep": torch.tensor([300, 700]),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def mochi(noise: Noise) -> dict:
    return {
        "hidden_states": noise(2, 8, 2, 6, 8),
        "encoder_hidden_states": noise(2, 5, 24),
        "timestep": 1000 * TIMES,
        "encoder_attention_mask": mask(2, 5),
    }


def qwen_image(images: int = 1) -> Callable[[Noise], dict]:
    def inputs(noise: Noise) -> dict:
        return {
            "hidden_states": noise(2, 12 * images, 8),
            "encoder_hidden_states": noise(2, 5, 24),
            "encoder_hidden_states_mask": mask(2, 5),
            "timestep": TIMES,
            "img_shapes": [[(1, 3, 4)] * images] * 2,
        }

    return inputs


def lumina2(noise: Noise) -> dict:
    return {
        "hidden_states": noise(2, 4, 8, 8),
        "timestep": TIMES,
        "encoder_hidden_states": noise(2, 5, 24),
        "encoder_attention_mask": mask(2, 5),
    }


def z_image(noise: Noise) -> dict:
    return {"x": [noise(4, 1, 8, 8), noise(4, 1, 8, 8)], "t": TIMES, "cap_feats": [noise(5, 24), noise(7, 24)]}


class Family(NamedTuple):
    model: str
    config: dict
    make_inputs: Callable[[Noise], dict]
    #: ops of this package in one call
    ops: dict[str, int]

    def build(self, **config: Any) -> nn.Module:
        import diffusers

        torch.manual_seed(0)
        return tiny_models.randomize(getattr(diffusers, self.model)(**{**self.config, **config}))

    def inputs(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict:
        def move(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(move(item) for item in value)
            if isinstance(value, dict):
                return {name: move(item) for name, item in value.items()}
            if torch.is_tensor(value):
                # rotary tables, masks and times keep their dtype, as pipelines give them
                return value.to(device, dtype if value.is_floating_point() and value.dim() > 1 else None)
            return value

        inputs = {name: move(value) for name, value in self.make_inputs(Noise()).items()}
        if "image_rotary_emb" in inputs:
            inputs["image_rotary_emb"] = tuple(
                t.float().to(device) for t in self.make_inputs(Noise())["image_rotary_emb"]
            )
        return {**inputs, "return_dict": False}


HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}
UNET = {
    "sample_size": 8,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "cross_attention_dim": 24,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (2, 4),
}
SD3 = {
    **HEADS,
    "sample_size": 8,
    "in_channels": 8,
    "num_layers": 2,
    "joint_attention_dim": 24,
    "caption_projection_dim": 64,
    "pooled_projection_dim": 20,
    "out_channels": 8,
    "pos_embed_max_size": 8,
}
FLUX = {
    **HEADS,
    "patch_size": 1,
    "in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 2,
    "joint_attention_dim": 24,
    "guidance_embeds": True,
    "axes_dims_rope": (4, 4, 8),
}
PIXART = {**HEADS, "sample_size": 8, "num_layers": 2, "cross_attention_dim": 64, "caption_channels": 24}
WAN = {
    **HEADS,
    "in_channels": 8,
    "out_channels": 8,
    "text_dim": 24,
    "freq_dim": 32,
    "ffn_dim": 96,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
HUNYUAN_VIDEO = {
    **HEADS,
    "in_channels": 8,
    "out_channels": 8,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 24,
    "pooled_projection_dim": 20,
    "rope_axes_dim": (4, 4, 8),
}
COGVIDEOX = {
    **HEADS,
    "in_channels": 8,
    "out_channels": 8,
    "time_embed_dim": 32,
    "text_embed_dim": 24,
    "num_layers": 2,
    "sample_width": 8,
    "sample_height": 6,
    "sample_frames": 5,
    "max_text_seq_length": 5,
    "use_rotary_positional_embeddings": True,
}
QWEN_IMAGE = {
    **HEADS,
    "in_channels": 8,
    "out_channels": 8,
    "num_layers": 2,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 4, 8),
}

FAMILIES = {
    "sd1.5": Family("UNet2DConditionModel", UNET, unet(False), {"residual_ada_norm": 8, "activate": 4}),
    "sdxl": Family(
        "UNet2DConditionModel",
        {
            **UNET,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 80,
            "transformer_layers_per_block": (1, 2),
        },
        unet(True),
        {"residual_ada_norm": 16, "activate": 8},
    ),
    "sd3": Family("SD3Transformer2DModel", SD3, sd3, {"ada_norm": 5, "residual_ada_norm": 3, "gated_residual": 3}),
    "sd3.5": Family(
        "SD3Transformer2DModel",
        {**SD3, "qk_norm": "rms_norm", "dual_attention_layers": (0,)},
        sd3,
        {"ada_norm": 6, "residual_ada_norm": 3, "gated_residual": 4, "qk_norm_rope": 5},
    ),
    "flux": Family(
        "FluxTransformer2DModel",
        {**FLUX, "pooled_projection_dim": 20},
        flux,
        {"ada_norm": 7, "residual_ada_norm": 4, "gated_residual": 6, "qk_norm_rope": 6},
    ),
    "flux2": Family(
        "Flux2Transformer2DModel",
        {**FLUX, "timestep_guidance_channels": 32, "axes_dims_rope": (4, 4, 4, 4)},
        flux2,
        {"ada_norm": 7, "residual_ada_norm": 4, "gated_residual": 6, "qk_norm_rope": 6, "activate": 6},
    ),
    "dit": Family(
        "DiTTransformer2DModel",
        {**HEADS, "num_layers": 2, "sample_size": 8},
        dit,
        {"ada_norm": 2, "residual_ada_norm": 2, "gated_residual": 2},
    ),
    "pixart": Family(
        "PixArtTransformer2DModel", PIXART, pixart, {"ada_norm": 2, "residual_ada_norm": 2, "gated_residual": 4}
    ),
    "wan2.1": Family(
        "WanTransformer3DModel",
        WAN,
        wan(),
        {"ada_norm": 2, "residual_ada_norm": 4, "gated_residual": 2, "qk_norm_rope": 4, "layer_norm": 1},
    ),
    "wan2.1_i2v": Family(
        "WanTransformer3DModel",
        {**WAN, "image_dim": 20, "added_kv_proj_dim": 64},
        wan(image=True),
        {
            "ada_norm": 2,
            "residual_ada_norm": 4,
            "gated_residual": 2,
            "qk_norm_rope": 4,
            "q_norm_rope": 2,
            "layer_norm": 3,
        },
    ),
    "wan2.2_ti2v": Family(
        "WanTransformer3DModel",
        WAN,
        wan(per_token=True),
        {"ada_norm": 2, "residual_ada_norm": 4, "gated_residual": 2, "qk_norm_rope": 4, "layer_norm": 1},
    ),
    "hunyuan_video": Family(
        "HunyuanVideoTransformer3DModel",
        HUNYUAN_VIDEO,
        hunyuan_video,
        {"ada_norm": 7, "residual_ada_norm": 5, "gated_residual": 7, "qk_norm_rope": 6},
    ),
    "hunyuan_video_i2v": Family(
        "HunyuanVideoTransformer3DModel",
        {**HUNYUAN_VIDEO, "image_condition_type": "token_replace"},
        hunyuan_video,
        {"ada_norm": 15, "residual_ada_norm": 3, "gated_residual": 11, "qk_norm_rope": 6},
    ),
    "cogvideox": Family(
        "CogVideoXTransformer3DModel",
        COGVIDEOX,
        cogvideox,
        {"ada_norm": 5, "residual_ada_norm": 4, "gated_residual": 4, "qk_norm_rope": 2},
    ),
    "mochi": Family(
        "MochiTransformer3DModel",
        {
            **HEADS,
            "num_layers": 2,
            "pooled_projection_dim": 32,
            "in_channels": 8,
            "text_embed_dim": 24,
            "time_embed_dim": 16,
            "max_sequence_length": 5,
        },
        mochi,
        {"ada_norm": 5, "residual_ada_norm": 3, "gated_residual": 3, "qk_norm_rope": 4, "activate": 3, "rms_norm": 6},
    ),
    "qwen_image": Family(
        "QwenImageTransformer2DModel",
        QWEN_IMAGE,
        qwen_image(),
        {"ada_norm": 5, "residual_ada_norm": 4, "gated_residual": 4, "qk_norm_rope": 4, "rms_norm": 1},
    ),
    "qwen_image_edit": Family(
        "QwenImageTransformer2DModel",
        {**QWEN_IMAGE, "zero_cond_t": True},
        qwen_image(2),
        {"ada_norm": 5, "residual_ada_norm": 4, "gated_residual": 4, "qk_norm_rope": 4, "rms_norm": 1},
    ),
    "lumina2": Family(
        "Lumina2Transformer2DModel",
        {
            "sample_size": 8,
            "in_channels": 4,
            "hidden_size": 96,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "multiple_of": 16,
            "axes_dim_rope": (8, 8, 8),
            "axes_lens": (16, 8, 8),
            "cap_feat_dim": 24,
        },
        lumina2,
        {"ada_norm": 4, "residual_ada_norm": 4, "gated_residual": 3, "qk_norm_rope": 4, "activate": 4, "rms_norm": 10},
    ),
    "z_image": Family(
        "ZImageTransformer2DModel",
        {
            "in_channels": 4,
            "dim": 96,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 4,
            "n_kv_heads": 4,
            "cap_feat_dim": 24,
            "axes_dims": [8, 8, 8],
            "axes_lens": [64, 16, 16],
        },
        z_image,
        {"ada_norm": 4, "residual_ada_norm": 4, "gated_residual": 3, "qk_norm_rope": 4, "activate": 4, "rms_norm": 10},
    ),
}


def run(model: nn.Module, inputs: dict) -> torch.Tensor:
    with torch.no_grad():
        result = model(**inputs)[0]
    return torch.stack(result) if isinstance(result, list) else result


def blocks_of(k, model: nn.Module) -> list[nn.Module]:
    """The blocks that are fused, of an injected model."""
    report = k.inject_optimized_kernels(model)
    names = [entry.name for entry in report.injected if entry.kind == "transformer_block"]
    return [model.get_submodule(name) for name in names]
