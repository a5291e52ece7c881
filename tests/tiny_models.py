"""Tiny random models of the real classes, their inputs, and the tools to compare an injected model with a stock one."""

from __future__ import annotations

import copy
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OpCounter(TorchDispatchMode):
    """Counts the calls of this package's ops: `with OpCounter() as ops: ...; ops.total`."""

    def __init__(self):
        super().__init__()
        self.calls: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace.startswith("_ltx_kernels_"):
            self.calls[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(self.calls.values())


def count(function, *args, **kwargs) -> Counter:
    with torch.no_grad(), OpCounter() as ops:
        function(*args, **kwargs)
    return ops.calls


class Graphs:
    """A backend of torch.compile that keeps the graphs and runs them as they are."""

    def __init__(self):
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward

    def ops(self) -> list[str]:
        """This package's, in all graphs."""
        nodes = (str(node.target) for graph in self.graphs for node in graph.graph.nodes)
        return [name.split(".")[1] for name in nodes if name.startswith("_ltx_kernels_")]


def relative(result: torch.Tensor, reference: torch.Tensor) -> float:
    """RMS of the difference over the RMS of the reference."""
    result, reference = result.double(), reference.double()
    return ((result - reference).pow(2).mean().sqrt() / reference.pow(2).mean().sqrt()).item()


def randomize(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Weights that a wrong norm would show on: fresh models have norms of all ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.dim() == 1:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def in_dtype(model: torch.nn.Module, inputs: dict, dtype: torch.dtype) -> tuple[torch.nn.Module, dict]:
    """A copy of a model and of its inputs in another dtype."""
    cast = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
    return copy.deepcopy(model).to(dtype), cast


def llama(kind: str = "Llama", layers: int = 2, **config) -> torch.nn.Module:
    """A causal language model of transformers, by the name of its classes: LlamaConfig, LlamaForCausalLM."""
    import transformers

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **config})
    return randomize(getattr(transformers, f"{kind}ForCausalLM")(config))


def tokens(device: str = "cpu") -> dict:
    generator = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(1, 128, (2, 11), generator=generator).to(device)}


def ltx_video(layers: int = 2, heads: int = 4, head_dim: int = 16, **config) -> torch.nn.Module:
    from diffusers import LTXVideoTransformer3DModel

    torch.manual_seed(0)
    width = heads * head_dim
    sizes = {
        "in_channels": 8,
        "out_channels": 8,
        "num_attention_heads": heads,
        "attention_head_dim": head_dim,
        "cross_attention_dim": width,
        "num_layers": layers,
        "caption_channels": 24,
    }
    return randomize(LTXVideoTransformer3DModel(**{**sizes, **config}))


def ltx_video_inputs(
    device: str = "cpu",
    batch: int = 2,
    grid: tuple = (2, 3, 4),
    text: int = 5,
    per_token: bool = False,
    channels: int = 8,
) -> dict:
    """One call of the transformer: text to video, or with a timestep for each token (image to video)."""
    generator = torch.Generator().manual_seed(2)
    tokens = grid[0] * grid[1] * grid[2]
    mask = torch.ones(batch, text)
    mask[0, -2:] = 0
    timestep = torch.randint(1, 1000, (batch, tokens) if per_token else (batch,), generator=generator).float()
    inputs = {
        "hidden_states": torch.randn(batch, tokens, channels, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 24, generator=generator),
        "timestep": timestep,
        "encoder_attention_mask": mask,
        "num_frames": grid[0],
        "height": grid[1],
        "width": grid[2],
        "rope_interpolation_scale": (8 / 25, 32.0, 32.0),
        "return_dict": False,
    }
    return {k: v.to(device) if torch.is_tensor(v) else v for k, v in inputs.items()}


def ltx2(layers: int = 2, **config) -> torch.nn.Module:
    """LTX-2, by default as released (split rotary tables); gated_attn and cross_attn_mod make it 2.3."""
    from diffusers import LTX2VideoTransformer3DModel

    torch.manual_seed(0)
    sizes = {
        "in_channels": 8,
        "out_channels": 8,
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "cross_attention_dim": 128,
        "audio_in_channels": 6,
        "audio_out_channels": 6,
        "audio_num_attention_heads": 4,
        "audio_attention_head_dim": 16,
        "audio_cross_attention_dim": 64,
        "num_layers": layers,
        "caption_channels": 24,
        "rope_type": "split",
    }
    return randomize(LTX2VideoTransformer3DModel(**{**sizes, **config}))


def ltx2_inputs(model: torch.nn.Module, per_token: bool = False, **arguments) -> dict:
    generator = torch.Generator().manual_seed(2)
    batch, grid, text, audio = 2, (2, 3, 4), 5, 7
    tokens = grid[0] * grid[1] * grid[2]
    widths = (24, 24) if model.config.use_prompt_embeddings else (128, 64)
    mask = torch.ones(batch, text)
    mask[0, -2:] = 0

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "hidden_states": noise(batch, tokens, 8),
        "audio_hidden_states": noise(batch, audio, 6),
        "encoder_hidden_states": noise(batch, text, widths[0]),
        "audio_encoder_hidden_states": noise(batch, text, widths[1]),
        "timestep": 1000 * torch.rand(batch, tokens if per_token else 1, generator=generator),
        "audio_timestep": 1000 * torch.rand(batch, 1, generator=generator),
        "sigma": 1000 * torch.rand(batch, generator=generator),
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "num_frames": grid[0],
        "height": grid[1],
        "width": grid[2],
        "fps": 25.0,
        "audio_num_frames": audio,
        "return_dict": False,
        **arguments,
    }


def ltx_vae(**config) -> torch.nn.Module:
    """The VAE of LTX-Video; timestep conditioning and noise as in 0.9.1 and later with the arguments that say so."""
    from diffusers import AutoencoderKLLTXVideo

    torch.manual_seed(0)
    sizes = {
        "latent_channels": 8,
        "block_out_channels": (8, 16, 16, 16),
        "decoder_block_out_channels": (8, 16, 16, 16),
        "layers_per_block": (1, 1, 1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1, 1),
    }
    return randomize(AutoencoderKLLTXVideo(**{**sizes, **config}))


def ltx2_vae(**config) -> torch.nn.Module:
    from diffusers import AutoencoderKLLTX2Video

    torch.manual_seed(0)
    sizes = {
        "latent_channels": 8,
        "block_out_channels": (8, 16, 32, 64),
        "decoder_block_out_channels": (8, 16, 32),
        "layers_per_block": (1, 1, 1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1),
    }
    return randomize(AutoencoderKLLTX2Video(**{**sizes, **config}))
