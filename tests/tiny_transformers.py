"""Tiny random language models of transformers' real classes, and which ops a forward of each runs."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import tiny_models
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

LAYERS = 2
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
GEMMA_3N = {
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    "laurel_rank": 4,
}
FALCON = {name: size for name, size in SIZES.items() if name != "head_dim"}


class Family(NamedTuple):
    norms: int  # RMSNorms in a layer that are not fused with a sum or a rotation
    sums: int = 1  # sums in a layer that are fused with a norm
    gated: int = 1  # gated MLPs in a layer, or experts
    left_alone: tuple = ()
    classes: str = ""  # LlamaForCausalLM: Llama
    config: dict = {}
    sizes: dict = SIZES
    rope: dict = {"qk_norm_rope": 1}  # ops in a layer
    other_norms: int = 1  # RMSNorms that are in no layer
    layer_norms: int = 0  # LayerNorms in a layer that are not fused with a sum; one more is in no layer


FAMILIES = {
    "llama": Family(1, classes="Llama"),
    "mistral": Family(1, classes="Mistral", config={"sliding_window": 5}),
    "qwen2": Family(1, classes="Qwen2"),
    "qwen3": Family(1, classes="Qwen3"),
    "gemma": Family(1, classes="Gemma"),
    "gemma2": Family(3, classes="Gemma2", config={"sliding_window": 5}),
    "gemma3": Family(5, classes="Gemma3", config={"sliding_window": 5}),
    "gemma3n": Family(
        11,
        0,
        0,
        ("Gemma3nTextDecoderLayer", "Gemma3nTextMLP"),
        "Gemma3n",
        GEMMA_3N,
        rope={"q_norm_rope": 2},
        other_norms=2,
    ),
    "gemma4": Family(7, classes="Gemma4", config=GEMMA_3N, rope={"q_norm_rope": 2}, other_norms=2),
    "phi3": Family(1, classes="Phi3"),
    "phi3_partial": Family(1, classes="Phi3", config={"partial_rotary_factor": 0.5}),
    "gpt_neox": Family(0, 0, 0, ("GPTNeoXLayer", "GPTNeoXMLP"), "GPTNeoX", {"rotary_pct": 0.5}, layer_norms=2),
    "gpt_neox_sequential": Family(0, 1, 0, ("GPTNeoXMLP",), "GPTNeoX", {"use_parallel_residual": False}, layer_norms=1),
    "falcon": Family(0, 0, 0, ("FalconDecoderLayer", "FalconMLP"), "Falcon", {}, FALCON, layer_norms=1),
    "falcon_new": Family(
        0,
        0,
        0,
        ("FalconDecoderLayer", "FalconMLP"),
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        FALCON,
        layer_norms=2,
    ),
    "mixtral": Family(1, 1, 4, (), "Mixtral", EXPERTS),
    "qwen2_moe": Family(1, 1, 5, (), "Qwen2Moe", EXPERTS),
    "qwen3_moe": Family(1, 1, 4, (), "Qwen3Moe", EXPERTS),
    "gpt_oss": Family(1, 1, 0, ("GptOssExperts", "GptOssMLP"), "GptOss", EXPERTS),
}


def build(name: str, **config) -> nn.Module:
    family = FAMILIES[name]
    torch.manual_seed(0)
    config_class = f"{family.classes}{'Text' * (name in ('gemma3', 'gemma3n', 'gemma4'))}Config"
    config = getattr(transformers, config_class)(**{**family.sizes, **family.config, **config})
    config._experts_implementation = "eager"  # the others take no float64
    return tiny_models.randomize(getattr(transformers, f"{family.classes}ForCausalLM")(config))


def tokens(device="cpu", batch=2, length=11, seed=1) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(3, 128, (batch, length), generator=generator).to(device)}


@torch.no_grad()
def logits(model: nn.Module, **inputs) -> torch.Tensor:
    return model(**inputs).logits
