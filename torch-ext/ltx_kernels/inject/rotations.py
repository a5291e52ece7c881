"""How the attentions of diffusers rotate query and key: the tables, and what each family says they are made of.

A convention says what it makes of the arguments behind x: (what makes the tables, of what, the dimension of tokens).
"""

from typing import Callable, NamedTuple, Optional

import torch
from torch import Tensor

from .norms import FLOATS


class Tables(NamedTuple):
    """Cosines and sines of all tokens that are rotated: [S, w], [B | 1, S, w] or [B | 1, S, 1 | H, w]."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = True

    def tokens(self) -> int:
        return self.cos.shape[0 if self.cos.dim() == 2 else 1]

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos, self.sin
        dim = 0 if cos.dim() == 2 else 1
        if start == 0 and stop == cos.shape[dim]:
            return cos, sin
        return cos.narrow(dim, start, stop - start), sin.narrow(dim, start, stop - start)


def _real(cos: Tensor, sin: Tensor) -> Optional[Tables]:
    is_table = isinstance(cos, Tensor) and cos.shape == sin.shape and cos.dtype in FLOATS and cos.dtype is sin.dtype
    return Tables(cos, sin) if is_table and cos.dim() in (2, 3, 4) else None


def _real_in_halves(cos: Tensor, sin: Tensor) -> Optional[Tables]:
    tables = _real(cos, sin)
    return tables and tables._replace(interleaved=False)


def _of_each_head(cos: Tensor, sin: Tensor) -> Optional[Tables]:
    return _real(cos[None], sin[None]) if cos.dim() == 3 else None  # [S, H, d / 2]


MADE = "_ltx_kernels_tables"


def _complex(freqs: Tensor) -> Optional[Tables]:
    """Of e**(i * angle), whose parts are no whole vectors: they are copied, and kept with the tensor for all layers.

    Not while a CUDA graph is captured: it must make what it reads itself, for `freqs` may be changed before a replay.
    """
    if not (isinstance(freqs, Tensor) and freqs.is_complex() and freqs.dim() in (2, 3)):
        return None
    may_keep = not torch.compiler.is_compiling() and not freqs.is_inference()
    may_keep = may_keep and not (freqs.is_cuda and torch.cuda.is_current_stream_capturing())
    version, tables = getattr(freqs, MADE, (None, None)) if may_keep else (None, None)
    if tables is None or version != freqs._version:
        tables = Tables(freqs.real.float().contiguous(), freqs.imag.float().contiguous())
        if may_keep:
            setattr(freqs, MADE, (freqs._version, tables))
    return tables


def _diffusers(freqs_cis, use_real=True, use_real_unbind_dim=-1, sequence_dim=2):
    if not use_real:
        return _complex, freqs_cis, 1
    make = {-1: _real, -2: _real_in_halves}.get(use_real_unbind_dim)
    return (make, freqs_cis, sequence_dim) if make and sequence_dim in (1, 2) else None


def _qwen(freqs_cis, use_real=True, use_real_unbind_dim=-1):
    return None if use_real else (_complex, freqs_cis, 1)


def _wan(freqs_cos, freqs_sin):
    return _real, (freqs_cos, freqs_sin), 1  # each value twice, as FLUX has them


def _mochi(freqs_cos, freqs_sin):
    return _of_each_head, (freqs_cos, freqs_sin), 1


def _z_image(freqs_cis):
    return _complex, freqs_cis, 1


#: functions that rotate, by module and name -> convention
ROPES = {
    ("diffusers.models.embeddings", "apply_rotary_emb"): _diffusers,
    ("diffusers.models.transformers.transformer_qwenimage", "apply_rotary_emb_qwen"): _qwen,
}

_MODELS = "diffusers.models."
_TRANSFORMERS = f"{_MODELS}transformers.transformer_"
_ATTENTION = f"{_MODELS}attention_processor"

#: (defining module, class) -> the convention of an apply_rotary_emb that it defines itself, or None
PROCESSORS: dict[tuple[str, str], Optional[Callable]] = {
    (_ATTENTION, "AttnProcessor2_0"): None,
    (_ATTENTION, "FusedAttnProcessor2_0"): None,
    (_ATTENTION, "JointAttnProcessor2_0"): None,
    (_ATTENTION, "FusedJointAttnProcessor2_0"): None,
    (_ATTENTION, "CogVideoXAttnProcessor2_0"): None,
    (_ATTENTION, "FusedCogVideoXAttnProcessor2_0"): None,
    (_ATTENTION, "MochiAttnProcessor2_0"): _mochi,
    (f"{_TRANSFORMERS}flux", "FluxAttnProcessor"): None,
    (f"{_TRANSFORMERS}flux2", "Flux2AttnProcessor"): None,
    (f"{_TRANSFORMERS}flux2", "Flux2KVAttnProcessor"): None,
    (f"{_TRANSFORMERS}flux2", "Flux2ParallelSelfAttnProcessor"): None,
    (f"{_TRANSFORMERS}flux2", "Flux2KVParallelSelfAttnProcessor"): None,
    (f"{_TRANSFORMERS}hunyuan_video", "HunyuanVideoAttnProcessor2_0"): None,
    (f"{_TRANSFORMERS}lumina2", "Lumina2AttnProcessor2_0"): None,
    (f"{_TRANSFORMERS}qwenimage", "QwenDoubleStreamAttnProcessor2_0"): None,
    (f"{_TRANSFORMERS}wan", "WanAttnProcessor"): _wan,
    (f"{_TRANSFORMERS}z_image", "ZSingleStreamAttnProcessor"): _z_image,
}
