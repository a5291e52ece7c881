"""The models that e2e.py runs, as data: class, sizes and inputs of each family, at the true size with random weights.

There is no Hub on a benchmark host, so the numbers of each config.json stand here; what is not named is the default of
the class. A model is made where and as it is used, in the benchmark's dtype.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

#: (config, randn, sizes) -> (arguments of the forward, [batch, tokens, width]). randn(*shape) is on the device.
Inputs = Callable[[object, Callable[..., Tensor], dict], tuple[dict, list[int]]]


@dataclass(frozen=True)
class Family:
    op: str  # the name in the results
    title: str
    source: str  # of `config`
    cls: str  # library.Class; one of transformers takes a config of the same name
    config: dict
    tiny: dict  # instead, where only the code is tested
    sizes: dict  # of the inputs; `frames` may be several
    tiny_sizes: dict
    parts: tuple[str, ...] = ("step", "split", "accuracy")
    inputs: Inputs | None = None
    depth: tuple[str, ...] = ()  # entries of `config` that count blocks
    blocks: tuple[str, ...] = field(default=())  # classes to compile, where the model's class does not name them

    def blocks_of(self, config: dict) -> int:
        return sum(config[entry] for entry in self.depth)

    def configured(self, tiny: bool, depth: int | None) -> tuple[dict, str]:
        """(the config, "" or how many blocks of how many): `depth` blocks in all, each kind keeping its share."""
        config = {**self.config, **(self.tiny if tiny else {})}
        if depth is not None and not self.depth:
            raise SystemExit(f"{self.title} has no depth to choose")
        whole = self.blocks_of(config)
        if depth is None or depth >= whole:
            return config, ""
        config |= {entry: max(1, round(config[entry] * depth / whole)) for entry in self.depth}
        return config, f"[{self.blocks_of(config)} of {whole} blocks]"

    def build(self, config: dict, device: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
        library, _, name = self.cls.partition(".")
        module = importlib.import_module(library)
        torch.manual_seed(seed)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # as `from_pretrained(torch_dtype=...)` does
        try:
            with torch.device(device):
                if library == "transformers":
                    made = getattr(module, name.replace("ForCausalLM", "Config"))(**config)
                    model = getattr(module, name)(made)
                else:
                    model = getattr(module, name)(**config)
        finally:
            torch.set_default_dtype(default)
        keep = set(getattr(model, "_keep_in_fp32_modules", None) or ())
        for path, parameter in model.named_parameters():
            if keep & set(path.split(".")):
                parameter.data = parameter.data.float()
        return model.eval()


def text_mask(used: list[int], length: int, like: Tensor) -> Tensor:
    """[B, length], 1 for the words of each prompt: the tail is padding."""
    return (torch.arange(length) < torch.tensor(used)[:, None]).to(like.device)


def timesteps(batch: int, like: Tensor, value: float = 500.0) -> Tensor:
    return torch.full((batch,), value, device=like.device)


def ltx_video(config, randn, sizes):
    grid = ((sizes["frames"] - 1) // 8 + 1, sizes["height"] // 32, sizes["width"] // 32)
    tokens, text = grid[0] * grid[1] * grid[2], sizes["text"]
    hidden_states = randn(2, tokens, config.in_channels)
    inputs = {
        "hidden_states": hidden_states,
        "encoder_hidden_states": randn(2, text, config.caption_channels),
        "encoder_attention_mask": text_mask([text // 8, text // 3], text, hidden_states),
        "timestep": timesteps(2, hidden_states),
        **dict(zip(("num_frames", "height", "width"), grid)),
        "rope_interpolation_scale": (8 / 24, 32, 32),
    }
    return inputs, [2, tokens, config.num_attention_heads * config.attention_head_dim]


def flux(config, randn, sizes):
    height, width = sizes["height"] // 16, sizes["width"] // 16
    hidden_states = randn(1, height * width, config.in_channels)
    device = hidden_states.device
    ids = torch.zeros(height, width, 3, device=device)
    ids[..., 1] += torch.arange(height, device=device)[:, None]
    ids[..., 2] += torch.arange(width, device=device)
    inputs = {
        "hidden_states": hidden_states,
        "encoder_hidden_states": randn(1, sizes["text"], config.joint_attention_dim),
        "pooled_projections": randn(1, config.pooled_projection_dim),
        "timestep": timesteps(1, hidden_states, 0.5).to(hidden_states.dtype),
        "guidance": timesteps(
            1, hidden_states, 4.0
        ),  # times 1000 exact in bf16: else the accuracy is that of a rounding
        "img_ids": ids.flatten(0, 1),
        "txt_ids": torch.zeros(sizes["text"], 3, device=device),
    }
    return inputs, [1, height * width, config.num_attention_heads * config.attention_head_dim]


def sdxl(config, randn, sizes):
    height, width = sizes["height"] // 8, sizes["width"] // 8
    sample = randn(2, config.in_channels, height, width)
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    original = [sizes["height"], sizes["width"], 0, 0, sizes["height"], sizes["width"]]
    inputs = {
        "sample": sample,
        "timestep": torch.tensor(500.0, device=sample.device),
        "encoder_hidden_states": randn(2, sizes["text"], config.cross_attention_dim),
        "added_cond_kwargs": {
            "text_embeds": randn(2, pooled),
            "time_ids": torch.tensor([original] * 2, device=sample.device).to(sample.dtype),
        },
    }
    return inputs, [2, height * width, config.block_out_channels[0]]


def sd3(config, randn, sizes):
    height, width = sizes["height"] // 8, sizes["width"] // 8
    hidden_states = randn(2, config.in_channels, height, width)
    inputs = {
        "hidden_states": hidden_states,
        "encoder_hidden_states": randn(2, sizes["text"], config.joint_attention_dim),
        "pooled_projections": randn(2, config.pooled_projection_dim),
        "timestep": timesteps(2, hidden_states),
    }
    return inputs, [2, height * width // 4, config.num_attention_heads * config.attention_head_dim]


def wan(config, randn, sizes):
    grid = ((sizes["frames"] - 1) // 4 + 1, sizes["height"] // 8, sizes["width"] // 8)
    hidden_states = randn(1, config.in_channels, *grid)
    inputs = {
        "hidden_states": hidden_states,
        "timestep": timesteps(1, hidden_states),
        "encoder_hidden_states": randn(1, sizes["text"], config.text_dim),
    }
    return inputs, [1, grid[0] * grid[1] * grid[2] // 4, config.num_attention_heads * config.attention_head_dim]


def hunyuan_video(config, randn, sizes):
    grid = ((sizes["frames"] - 1) // 4 + 1, sizes["height"] // 8, sizes["width"] // 8)
    hidden_states = randn(1, config.in_channels, *grid)
    text = sizes["text"]
    inputs = {
        "hidden_states": hidden_states,
        "timestep": timesteps(1, hidden_states).long(),
        "encoder_hidden_states": randn(1, text, config.text_embed_dim),
        "encoder_attention_mask": text_mask([text // 4], text, hidden_states),
        "pooled_projections": randn(1, config.pooled_projection_dim),
        "guidance": timesteps(1, hidden_states, 6000.0).to(hidden_states.dtype),
    }
    return inputs, [1, grid[0] * grid[1] * grid[2] // 4, config.num_attention_heads * config.attention_head_dim]


def cogvideox(config, randn, sizes):
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    frames, height, width = (sizes["frames"] - 1) // 4 + 1, sizes["height"] // 8, sizes["width"] // 8
    hidden_states = randn(2, frames, config.in_channels, height, width)
    patches = (height // 2, width // 2)
    rotary = get_3d_rotary_pos_embed(
        config.attention_head_dim, ((0, 0), patches), patches, frames, device=hidden_states.device
    )
    inputs = {
        "hidden_states": hidden_states,
        "encoder_hidden_states": randn(2, sizes["text"], config.text_embed_dim),
        "timestep": timesteps(2, hidden_states),
        "image_rotary_emb": rotary,
    }
    tokens = frames * patches[0] * patches[1]
    return inputs, [2, tokens, config.num_attention_heads * config.attention_head_dim]


def qwen_image(config, randn, sizes):
    height, width = sizes["height"] // 16, sizes["width"] // 16
    hidden_states = randn(1, height * width, config.in_channels)
    inputs = {
        "hidden_states": hidden_states,
        "encoder_hidden_states": randn(1, sizes["text"], config.joint_attention_dim),
        "encoder_hidden_states_mask": None,  # a whole prompt: the pipeline passes no mask then
        "timestep": timesteps(1, hidden_states, 0.5).to(hidden_states.dtype),
        "img_shapes": [[(1, height, width)]],
    }
    return inputs, [1, height * width, config.num_attention_heads * config.attention_head_dim]


SMALL_HEADS = {"num_attention_heads": 2, "attention_head_dim": 32}
SMALL_VIDEO = {"frames": (9,), "height": 64, "width": 96, "text": 8}
SMALL_IMAGE = {"frames": (1,), "height": 64, "width": 96, "text": 8}
LTX = {
    "cls": "diffusers.LTXVideoTransformer3DModel",
    "tiny": {**SMALL_HEADS, "num_layers": 2, "cross_attention_dim": 64, "caption_channels": 32},
    "tiny_sizes": SMALL_VIDEO,
    "parts": ("step", "split", "vae", "pipeline", "accuracy"),
    "inputs": ltx_video,
    "depth": ("num_layers",),
}
LANGUAGE = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
    },
    # The prompt before the tokens that are timed, and the batch of prompts of a prefill.
    "sizes": {"prompt": 128, "tokens": 16, "batch": 8, "length": 2048},
    "tiny_sizes": {"prompt": 6, "tokens": 3, "batch": 2, "length": 12},
    "parts": ("prefill", "decode", "split", "accuracy"),
    "depth": ("num_hidden_layers",),
}

FAMILIES = {
    "ltx-2b": Family(
        "ltx_video_2b",
        "LTX-Video 2B",
        "Lightricks/LTX-Video, transformer/config.json: the defaults of the class",
        config={"num_layers": 28},
        sizes={"frames": (49, 161), "height": 512, "width": 768, "text": 128},
        **LTX,
    ),
    "ltx-13b": Family(
        "ltx_video_13b",
        "LTX-Video 13B",
        "Lightricks/LTX-Video-0.9.7-dev, transformer/config.json",
        config={"num_layers": 48, "num_attention_heads": 32, "attention_head_dim": 128, "cross_attention_dim": 4096},
        sizes={"frames": (49,), "height": 512, "width": 768, "text": 128},
        **LTX,
    ),
    "flux": Family(
        "flux_1",
        "FLUX.1-dev",
        "black-forest-labs/FLUX.1-dev, transformer/config.json: the defaults of the class with guidance",
        "diffusers.FluxTransformer2DModel",
        config={"num_layers": 19, "num_single_layers": 38, "guidance_embeds": True},
        tiny={
            **SMALL_HEADS,
            **{"num_layers": 1, "num_single_layers": 2, "joint_attention_dim": 32, "pooled_projection_dim": 16},
            **{"axes_dims_rope": (8, 12, 12), "in_channels": 16},
        },
        sizes={"frames": (1,), "height": 1024, "width": 1024, "text": 512},
        tiny_sizes=SMALL_IMAGE,
        inputs=flux,
        depth=("num_layers", "num_single_layers"),
    ),
    "sdxl": Family(
        "sdxl",
        "Stable Diffusion XL",
        "stabilityai/stable-diffusion-xl-base-1.0, unet/config.json",
        "diffusers.UNet2DConditionModel",
        config={
            "sample_size": 128,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "block_out_channels": (320, 640, 1280),
            "attention_head_dim": (5, 10, 20),
            "cross_attention_dim": 2048,
            "transformer_layers_per_block": (1, 2, 10),
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        tiny={
            **{"block_out_channels": (32, 64, 64), "attention_head_dim": (1, 2, 2), "cross_attention_dim": 32},
            **{"transformer_layers_per_block": (1, 1, 1), "layers_per_block": 1},
            **{"addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 64},
        },
        sizes={"frames": (1,), "height": 1024, "width": 1024, "text": 77},
        tiny_sizes=SMALL_IMAGE,
        inputs=sdxl,
    ),
    "sd35-large": Family(
        "sd3_5_large",
        "Stable Diffusion 3.5 large",
        "stabilityai/stable-diffusion-3.5-large, transformer/config.json",
        "diffusers.SD3Transformer2DModel",
        config={
            **{"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "qk_norm": "rms_norm"},
            **{"pos_embed_max_size": 192},
        },
        tiny={
            **SMALL_HEADS,
            **{"num_layers": 2, "caption_projection_dim": 64, "joint_attention_dim": 32, "pooled_projection_dim": 16},
            **{"pos_embed_max_size": 16, "sample_size": 16},
        },
        sizes={"frames": (1,), "height": 1024, "width": 1024, "text": 333},  # CLIP's 77 and T5's 256
        tiny_sizes=SMALL_IMAGE,
        inputs=sd3,
        depth=("num_layers",),
        blocks=("JointTransformerBlock",),
    ),
    "wan-1.3b": Family(
        "wan_2_1_1_3b",
        "Wan 2.1 1.3B",
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers, transformer/config.json",
        "diffusers.WanTransformer3DModel",
        config={"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960},
        tiny={**SMALL_HEADS, "num_layers": 2, "ffn_dim": 96, "text_dim": 32, "freq_dim": 32},
        sizes={"frames": (81,), "height": 480, "width": 832, "text": 512},
        tiny_sizes=SMALL_VIDEO,
        inputs=wan,
        depth=("num_layers",),
    ),
    "hunyuan-video": Family(
        "hunyuan_video",
        "HunyuanVideo",
        "hunyuanvideo-community/HunyuanVideo, transformer/config.json: the defaults of the class; the video's size is "
        "that of diffusers' own example",
        "diffusers.HunyuanVideoTransformer3DModel",
        config={"num_layers": 20, "num_single_layers": 40},
        tiny={
            **SMALL_HEADS,
            **{"num_layers": 1, "num_single_layers": 2, "num_refiner_layers": 1, "rope_axes_dim": (8, 12, 12)},
            **{"text_embed_dim": 32, "pooled_projection_dim": 16},
        },
        sizes={"frames": (61,), "height": 320, "width": 512, "text": 256},
        tiny_sizes=SMALL_VIDEO,
        inputs=hunyuan_video,
        depth=("num_layers", "num_single_layers"),
    ),
    "cogvideox-5b": Family(
        "cogvideox_5b",
        "CogVideoX-5B",
        "THUDM/CogVideoX-5b, transformer/config.json",
        "diffusers.CogVideoXTransformer3DModel",
        config={"num_layers": 42, "num_attention_heads": 48, "use_rotary_positional_embeddings": True},
        tiny={
            **SMALL_HEADS,
            **{"num_layers": 2, "text_embed_dim": 32, "time_embed_dim": 32, "max_text_seq_length": 8},
            **{"sample_width": 12, "sample_height": 8, "sample_frames": 9},
        },
        sizes={"frames": (49,), "height": 480, "width": 720, "text": 226},
        tiny_sizes=SMALL_VIDEO,
        inputs=cogvideox,
        depth=("num_layers",),
        blocks=("CogVideoXBlock",),
    ),
    "qwen-image": Family(
        "qwen_image",
        "Qwen-Image",
        "Qwen/Qwen-Image, transformer/config.json: the defaults of the class",
        "diffusers.QwenImageTransformer2DModel",
        config={"num_layers": 60},
        tiny={
            **SMALL_HEADS,
            "num_layers": 2,
            "joint_attention_dim": 32,
            "axes_dims_rope": (8, 12, 12),
            "in_channels": 16,
        },
        sizes={"frames": (1,), "height": 1024, "width": 1024, "text": 128},
        tiny_sizes=SMALL_IMAGE,
        inputs=qwen_image,
        depth=("num_layers",),
    ),
    "llama-3-8b": Family(
        "llama_3_8b",
        "LLaMA 3 8B",
        "meta-llama/Meta-Llama-3-8B, config.json",
        "transformers.LlamaForCausalLM",
        config={
            **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        **LANGUAGE,
    ),
    "qwen3-8b": Family(
        "qwen3_8b",
        "Qwen3 8B",
        "Qwen/Qwen3-8B, config.json",
        "transformers.Qwen3ForCausalLM",
        config={
            **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        **LANGUAGE,
    ),
}
