"""LTX-Video and LTX-2: a transformer block is one forward of fused kernels around its projections and its attention.

Attention goes through diffusers' `dispatch_attention_fn`, projections and feed-forward are called as the modules they
are. Where an attention module, its processor or its norms are not what the class made them (another processor, a hook
on a norm), that attention is called as a module, and where the block's own norms are not, the block's own code runs.
"""

import functools
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import Tensor, nn

from .. import functional
from . import deferred
from .blocks import ResidualStream, call_plain, modulations, packing, project, runs_stock
from .norms import FLOATS
from .patching import Recipe, is_plain, own_forward

Rope = Optional[tuple[Tensor, Tensor]]

# ---- rotary tables

# LTX-Video's tables hold each value twice ([B, S, D], fp32) and are the same for every element of a batch. They are
# kept across steps, with their half [1, S, D / 2] beside them: a quarter of the bytes at a guidance batch of two. The
# half travels as an attribute of the tensor, so that the tables remain what everybody else expects; where they are
# split, copied or written to on the way, the full ones are read. The version of a tensor tells (not to compiled code,
# which cannot ask for it); tables that were written to are made anew for the next step.
HALF, VERSION = "_ltx_kernels_half", "_ltx_kernels_version"


class _Kept(NamedTuple):
    key: tuple
    coords: Any  # weak reference to the coordinates they were made from, or None
    tables: tuple[Tensor, Tensor]


_kept: "weakref.WeakKeyDictionary[nn.Module, _Kept]" = weakref.WeakKeyDictionary()


def _halves(tables: tuple[Tensor, Tensor], batch: int) -> tuple[Tensor, Tensor]:
    full = tuple(t.expand(batch, -1, -1) if t.shape[0] != batch else t for t in tables)
    for table, expanded in zip(tables, full):
        setattr(expanded, HALF, table[..., ::2].contiguous())
        setattr(expanded, VERSION, expanded._version)
    return full


def _is_unchanged(table: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return True
    return not table.is_inference() and table._version == getattr(table, VERSION)


def _is_traced() -> bool:
    """While torch.compile traces or fake tensors are about, tables are neither made here nor kept."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _forget(rope: nn.Module) -> None:
    _kept.pop(rope, None)


@own_forward("ltx_video.rope")
def _ltx_video_rope(
    self,
    hidden_states,
    num_frames=None,
    height=None,
    width=None,
    rope_interpolation_scale=None,
    video_coords=None,
):
    stock = type(self).forward
    x, scale, coords = hidden_states, rope_interpolation_scale, video_coords
    known = coords is not None or scale is None or all(isinstance(s, (int, float)) for s in scale)
    if _is_traced() or not known or self.dim % 2:
        return stock(self, x, num_frames, height, width, scale, coords)
    if coords is None:
        key = (x.shape[0], num_frames, height, width, None if scale is None else tuple(scale), x.device)
    else:  # changes of an inference tensor cannot be seen
        key = None if coords.is_inference() else (tuple(coords.shape), coords._version, x.device)
    if key is not None:  # theta, the base sizes: somebody may set them
        key += tuple(value for value in vars(self).values() if isinstance(value, (int, float)))
    # A CUDA graph must own what it reads: tables that are kept may be replaced while it lives.
    may_keep = key is not None and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    kept = _kept.get(self) if may_keep else None
    is_same = kept is not None and kept.key == key and (kept.coords is None or kept.coords() is coords)
    if is_same and all(map(_is_unchanged, kept.tables)):
        return kept.tables
    # Normal tensors even in inference mode: a later call may want gradients through them.
    with torch.inference_mode(False), torch.no_grad():
        one = x if coords is not None else x[:1]  # without coordinates every element of a batch has the same
        tables = _halves(stock(self, one, num_frames, height, width, scale, coords), x.shape[0])
    if may_keep:
        _kept[self] = _Kept(key, None if coords is None else weakref.ref(coords), tables)
    return tables


# ---- attention


class _Names(NamedTuple):
    """What the recipes need of the module that defines a block, under one set of names."""

    attention: type
    processors: tuple[type, ...]
    norm: type
    source: ModuleType  # its dispatch_attention_fn is looked up in each call, as stock does


def _attend(
    names: _Names,
    attn: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Optional[Tensor],
    query_rope: Rope,
    key_rope: Rope,  # None: query_rope
    interleaved: bool,
) -> Tensor:
    """Norm and rotate, attend: projections [B, S, H * d] to [B, S, H * d]."""
    heads = attn.heads
    if mask is not None:
        batch, tokens = key.shape[:2]
        if mask.shape == (batch, 1, tokens):  # what prepare_attention_mask gives, but without a copy for each head
            mask = mask.unsqueeze(1).expand(-1, heads, -1, -1)
        else:
            mask = attn.prepare_attention_mask(mask, tokens, batch)
            mask = mask.view(batch, heads, -1, mask.shape[-1])
    query, key, value = (t.unflatten(2, (heads, -1)) for t in (query, key, value))  # [B, S, H, d]
    cos, sin = query_rope or (None, None)
    k_cos, k_sin = key_rope or (None, None)
    query, key = functional.qk_norm_rope(
        query,
        key,
        attn.norm_q.weight,
        attn.norm_k.weight,
        cos,
        sin,
        attn.norm_q.eps,
        across_heads=True,
        interleaved=interleaved,
        k_cos=k_cos,
        k_sin=k_sin,
    )
    out = names.source.dispatch_attention_fn(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=0.0,
        is_causal=False,
        backend=attn.processor._attention_backend,
        parallel_config=attn.processor._parallel_config,
    )
    return out.flatten(2, 3).to(query.dtype)


def _is_stock_attention(names: _Names, attn: nn.Module) -> bool:
    norms = (attn.norm_q, attn.norm_k)
    return (
        is_plain(attn, names.attention)
        and type(attn.processor) in names.processors
        and all(is_plain(norm, nn.RMSNorm) and norm.weight is not None for norm in norms)
        and attn.norm_q.eps is not None
        and attn.norm_q.eps == attn.norm_k.eps
    )


def _project_qkv(attn: nn.Module, x: Tensor, context: Optional[Tensor]) -> list[Tensor]:
    if context is None:
        return project(x, [attn.to_q, attn.to_k, attn.to_v])
    return [attn.to_q(x), *project(context, [attn.to_k, attn.to_v])]


def _out(attn: nn.Module, x: Tensor) -> Tensor:
    return call_plain(attn.to_out[1], call_plain(attn.to_out[0], x))


def _heads_of(rope: Rope, heads: int) -> Rope:
    """Interleaved tables [B, S, D] as [B, S, H, d], in half where the half is there ([1, S, H, d / 2])."""
    if rope is None:
        return None
    if all(hasattr(table, HALF) and _is_unchanged(table) for table in rope):
        rope = tuple(getattr(table, HALF) for table in rope)
    cos, sin = rope
    return cos.unflatten(2, (heads, -1)), sin.unflatten(2, (heads, -1))


# ---- LTX-Video


def _ltx_video_attention(
    names: _Names, attn: nn.Module, x: Tensor, context: Optional[Tensor], mask: Optional[Tensor], rope: Rope
) -> Tensor:
    # Tables of float64, or pairs that reach over from one head to the next, are stock's.
    known_rope = rope is None or (all(t.dtype in FLOATS for t in rope) and rope[0].shape[-1] % (2 * attn.heads) == 0)
    if not known_rope or not _is_stock_attention(names, attn):
        return attn(x, encoder_hidden_states=context, attention_mask=mask, image_rotary_emb=rope)
    query, key, value = _project_qkv(attn, x, context)
    rope = _heads_of(rope, attn.heads)
    return _out(attn, _attend(names, attn, query, key, value, mask, rope, None, interleaved=True))


def _ltx_video_block(names: _Names) -> Callable:
    def inner(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, encoder_attention_mask=None):
        """Takes the stream of the block before, where that is one of these too, and returns its own."""
        table = self.scale_shift_table
        x = ResidualStream(hidden_states)
        if runs_stock(x.residual, temb, table, encoder_hidden_states) or not all(
            is_plain(norm, names.norm) and norm.bias is None for norm in (self.norm1, self.norm2)
        ):
            return type(self).forward(
                self, x.value(), encoder_hidden_states, temb, image_rotary_emb, encoder_attention_mask
            )
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulations(table, temb)
        normed = x.norm(self.norm1, scale_msa, shift_msa)
        x.add(_ltx_video_attention(names, self.attn1, normed, None, None, image_rotary_emb), gate_msa)
        x.add(_ltx_video_attention(names, self.attn2, x.value(), encoder_hidden_states, encoder_attention_mask, None))
        x.add(self.ff(x.norm(self.norm2, scale_mlp, shift_mlp)), gate_mlp)
        return x

    @own_forward("ltx_video.block")
    def forward(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, encoder_attention_mask=None):
        return deferred.value(
            inner(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb, encoder_attention_mask)
        )

    setattr(forward, deferred.INNER, (names.source.LTXVideoTransformerBlock.forward, inner))
    return forward


# ---- LTX-2


def _ltx2_attention(
    names: _Names,
    attn: nn.Module,
    x: Tensor,
    context: Optional[Tensor] = None,
    mask: Optional[Tensor] = None,
    query_rope: Rope = None,
    key_rope: Rope = None,
    **perturbation: Any,
) -> Tensor:
    split = attn.rope_type == "split"
    key_rope = None if query_rope is None else key_rope  # as in stock
    tables = (*(query_rope or ()), *(key_rope or ()))
    known_rope = all(table.dim() == (4 if split else 3) and table.dtype in FLOATS for table in tables)
    # Spatio-temporal guidance skips or blends the attention of a few blocks of one pass in some steps.
    is_perturbed = perturbation.get("perturbation_mask") is not None or perturbation.get("all_perturbed")
    if is_perturbed or not known_rope or not _is_stock_attention(names, attn):
        return attn(
            x,
            encoder_hidden_states=context,
            attention_mask=mask,
            query_rotary_emb=query_rope,
            key_rotary_emb=key_rope,
            **perturbation,
        )
    gate_logits = None if attn.to_gate_logits is None else attn.to_gate_logits(x)  # [B, S, H]
    query, key, value = _project_qkv(attn, x, context)

    def by_token(rope: Rope) -> Rope:
        if not split or rope is None:
            return _heads_of(rope, attn.heads)
        return rope[0].transpose(1, 2), rope[1].transpose(1, 2)  # [B, H, S, d / 2] to [B, S, H, d / 2]

    ropes = (by_token(query_rope), by_token(key_rope))
    out = _attend(names, attn, query, key, value, mask, *ropes, interleaved=not split)
    if gate_logits is not None:
        out = (out.unflatten(2, (attn.heads, -1)) * (2.0 * torch.sigmoid(gate_logits)).unsqueeze(-1)).flatten(2, 3)
    return _out(attn, out)


_LTX2_NORMS = tuple(f"{stream}norm{i}" for stream in ("", "audio_") for i in (1, 2, 3)) + (
    "audio_to_video_norm",
    "video_to_audio_norm",
)
_LTX2_TABLES = (
    "scale_shift_table",
    "audio_scale_shift_table",
    "video_a2v_cross_attn_scale_shift_table",
    "audio_a2v_cross_attn_scale_shift_table",
)


def _ltx2_block(names: _Names) -> Callable:
    @own_forward("ltx2.block")
    def forward(
        self,
        hidden_states,
        audio_hidden_states,
        encoder_hidden_states,
        audio_encoder_hidden_states,
        temb,
        temb_audio,
        temb_ca_scale_shift,
        temb_ca_audio_scale_shift,
        temb_ca_gate,
        temb_ca_audio_gate,
        temb_prompt=None,
        temb_prompt_audio=None,
        video_rotary_emb=None,
        audio_rotary_emb=None,
        ca_video_rotary_emb=None,
        ca_audio_rotary_emb=None,
        encoder_attention_mask=None,
        audio_encoder_attention_mask=None,
        self_attention_mask=None,
        audio_self_attention_mask=None,
        a2v_cross_attention_mask=None,
        v2a_cross_attention_mask=None,
        use_a2v_cross_attention=True,
        use_v2a_cross_attention=True,
        perturbation_mask=None,
        all_perturbed=None,
    ):
        tables = [getattr(self, name) for name in _LTX2_TABLES]
        tembs = [temb, temb_audio, temb_ca_scale_shift, temb_ca_audio_scale_shift, temb_ca_gate, temb_ca_audio_gate]
        texts = [encoder_hidden_states, audio_encoder_hidden_states]
        norms = [getattr(self, name) for name in _LTX2_NORMS]
        if runs_stock(hidden_states, audio_hidden_states, *texts, *tembs, *tables) or not all(
            is_plain(norm, names.norm) and norm.bias is None for norm in norms
        ):
            return type(self).forward(
                self,
                hidden_states,
                audio_hidden_states,
                encoder_hidden_states,
                audio_encoder_hidden_states,
                temb,
                temb_audio,
                temb_ca_scale_shift,
                temb_ca_audio_scale_shift,
                temb_ca_gate,
                temb_ca_audio_gate,
                temb_prompt,
                temb_prompt_audio,
                video_rotary_emb,
                audio_rotary_emb,
                ca_video_rotary_emb,
                ca_audio_rotary_emb,
                encoder_attention_mask,
                audio_encoder_attention_mask,
                self_attention_mask,
                audio_self_attention_mask,
                a2v_cross_attention_mask,
                v2a_cross_attention_mask,
                use_a2v_cross_attention,
                use_v2a_cross_attention,
                perturbation_mask,
                all_perturbed,
            )
        attend = functools.partial(_ltx2_attention, names)
        video, audio = ResidualStream(hidden_states), ResidualStream(audio_hidden_states)
        video_table, audio_table, video_cross_table, audio_cross_table = tables
        # shift, scale, gate of self-attention, the same of the feed-forward, and of text cross-attention in 2.3 and
        # later
        video_mod, audio_mod = modulations(video_table, temb), modulations(audio_table, temb_audio)
        perturbation = {}
        if self.perturbed_attn:
            perturbation = {"perturbation_mask": perturbation_mask, "all_perturbed": all_perturbed}

        # 1. self-attention
        normed = video.norm(self.norm1, video_mod[1], video_mod[0])
        video.add(attend(self.attn1, normed, None, self_attention_mask, video_rotary_emb, **perturbation), video_mod[2])
        normed = audio.norm(self.audio_norm1, audio_mod[1], audio_mod[0])
        audio.add(
            attend(self.audio_attn1, normed, None, audio_self_attention_mask, audio_rotary_emb, **perturbation),
            audio_mod[2],
        )

        # 2. cross-attention to the text
        if self.cross_attn_adaln:
            encoder_hidden_states = _modulate_text(
                self, encoder_hidden_states, self.prompt_scale_shift_table, temb_prompt
            )
            audio_encoder_hidden_states = _modulate_text(
                self, audio_encoder_hidden_states, self.audio_prompt_scale_shift_table, temb_prompt_audio
            )
        shift, scale, gate = video_mod[6:9] if self.video_cross_attn_adaln else (None, None, None)
        normed = video.norm(self.norm2, scale, shift)
        video.add(attend(self.attn2, normed, encoder_hidden_states, encoder_attention_mask), gate)
        shift, scale, gate = audio_mod[6:9] if self.audio_cross_attn_adaln else (None, None, None)
        normed = audio.norm(self.audio_norm2, scale, shift)
        audio.add(attend(self.audio_attn2, normed, audio_encoder_hidden_states, audio_encoder_attention_mask), gate)

        # 3. between video and audio: both read the streams as they are before either is added to
        if use_a2v_cross_attention or use_v2a_cross_attention:
            video_cross = modulations(video_cross_table[:4], temb_ca_scale_shift)  # scale, shift of a2v, then of v2a
            audio_cross = modulations(audio_cross_table[:4], temb_ca_audio_scale_shift)
        if use_a2v_cross_attention:
            video_a2v = video.norm(self.audio_to_video_norm, *video_cross[:2])
            audio_a2v = audio.norm(self.video_to_audio_norm, *audio_cross[:2])
        if use_v2a_cross_attention:
            video_v2a = video.norm(self.audio_to_video_norm, *video_cross[2:])
            audio_v2a = audio.norm(self.video_to_audio_norm, *audio_cross[2:])
        if use_a2v_cross_attention:
            (gate,) = modulations(video_cross_table[4:], temb_ca_gate)
            video.add(
                attend(
                    self.audio_to_video_attn,
                    video_a2v,
                    audio_a2v,
                    a2v_cross_attention_mask,
                    ca_video_rotary_emb,
                    ca_audio_rotary_emb,
                ),
                gate,
            )
        if use_v2a_cross_attention:
            (gate,) = modulations(audio_cross_table[4:], temb_ca_audio_gate)
            audio.add(
                attend(
                    self.video_to_audio_attn,
                    audio_v2a,
                    video_v2a,
                    v2a_cross_attention_mask,
                    ca_audio_rotary_emb,
                    ca_video_rotary_emb,
                ),
                gate,
            )

        # 4. feed-forward
        video.add(self.ff(video.norm(self.norm3, video_mod[4], video_mod[3])), video_mod[5])
        audio.add(self.audio_ff(audio.norm(self.audio_norm3, audio_mod[4], audio_mod[3])), audio_mod[5])
        return video.value(), audio.value()

    return forward


def _modulate_text(block: nn.Module, text: Tensor, table: Tensor, temb: Optional[Tensor]) -> Tensor:
    """text * (1 + scale) + shift, a few hundred tokens; without temb the table alone."""
    if temb is not None:
        shift, scale = block.get_mod_params(table, temb, text.shape[0])
    else:
        shift, scale = table[None, None].to(device=text.device, dtype=text.dtype).unbind(dim=2)
    return text * (1 + scale) + shift


# ---- recipes


@functools.cache
def _names(module: str, prefix: str, processors: tuple[str, ...]) -> _Names:
    source = sys.modules[module]
    return _Names(
        attention=getattr(source, f"{prefix}Attention"),
        processors=tuple(getattr(source, name) for name in processors),
        norm=source.RMSNorm,
        source=source,
    )


def _block(make: Callable, prefix: str, *processors: str) -> Callable:
    # Made once for the module that defines the class: all its blocks share one forward, and so compile once.
    make = functools.cache(make)
    return lambda module: make(_names(type(module).__module__, prefix, processors))


def _projections(block: nn.Module) -> Iterator[list[nn.Module]]:
    """The Linears of one input: query, key and value of self-attention, key and value of cross-attention."""
    for name, attn in block.named_children():
        if hasattr(attn, "to_q"):
            yield [attn.to_q, attn.to_k, attn.to_v] if name.endswith("attn1") else [attn.to_k, attn.to_v]


_VIDEO, _VIDEO2 = (f"diffusers.models.transformers.transformer_{name}" for name in ("ltx", "ltx2"))

RECIPES = {
    (_VIDEO, "LTXVideoTransformerBlock"): Recipe(
        "ltx_video.block", _block(_ltx_video_block, "LTX", "LTXVideoAttnProcessor"), *packing(_projections)
    ),
    (_VIDEO, "LTXVideoRotaryPosEmbed"): Recipe("ltx_video.rope", lambda module: _ltx_video_rope, None, _forget),
    (_VIDEO2, "LTX2VideoTransformerBlock"): Recipe(
        "ltx2.block",
        _block(_ltx2_block, "LTX2", "LTX2AudioVideoAttnProcessor", "LTX2PerturbedAttnProcessor"),
        *packing(_projections),
    ),
}
