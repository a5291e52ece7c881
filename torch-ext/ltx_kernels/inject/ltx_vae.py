"""The VAEs of LTX-Video and LTX-2: norm, modulation and SiLU in one pass, convolutions with channels last.

cuDNN convolves half precision with channels last; in the default format each convolution transposes its input and its
output. So the weights are stored with channels last (their values stay), and the frames that a causal convolution
repeats are put in front in the same copy that would have been made anyway. `skip="ltx_vae.conv"` leaves the format
alone.
"""

from typing import Callable, Union

import torch
from torch import Tensor, nn

from .. import functional
from .blocks import runs_stock
from .patching import Recipe, is_plain, own_forward

_VAE, _VAE2 = (f"diffusers.models.autoencoders.autoencoder_kl_{name}" for name in ("ltx", "ltx2"))

# ---- resnet blocks


def _is_pixel_norm(norm: nn.Module) -> bool:
    """RMS over the channels without a weight: diffusers' RMSNorm on a moved view, or LTX-2's PerChannelRMSNorm."""
    if not is_plain(norm, type(norm)):
        return False
    name = type(norm).__name__
    if name == "PerChannelRMSNorm":
        return type(norm).__module__ == _VAE2 and norm.channel_dim == 1
    return (
        name == "RMSNorm"
        and type(norm).__module__ == "diffusers.models.normalization"
        and norm.weight is None
        and norm.bias is None
    )


def _resnet(self: nn.Module, inputs: Tensor, temb: Union[Tensor, None], generator, **causal) -> Tensor:
    table = self.scale_shift_table
    modulation = () if table is None else (temb, table)
    if (
        runs_stock(inputs, *modulation)
        or not (_is_pixel_norm(self.norm1) and _is_pixel_norm(self.norm2))
        or not is_plain(self.nonlinearity, nn.SiLU)
    ):
        return type(self).forward(self, inputs, temb, generator, **causal)
    shift_1 = scale_1 = shift_2 = scale_2 = None
    if table is not None:
        ada = temb.unflatten(1, (4, -1)) + table[None, ..., None, None, None]  # [B, 4, C, 1, 1, 1]
        shift_1, scale_1, shift_2, scale_2 = ada.unbind(dim=1)

    def noisy(x: Tensor, per_channel_scale: Union[Tensor, None]) -> Tensor:
        if per_channel_scale is None:
            return x
        noise = torch.randn(x.shape[-2:], generator=generator, device=x.device, dtype=x.dtype)[None]
        return x + (noise * per_channel_scale)[None, :, None, ...]

    x = functional.pixel_norm_silu(inputs, scale_1, shift_1, self.norm1.eps)
    x = noisy(self.conv1(x, **causal), self.per_channel_scale1)
    x = functional.pixel_norm_silu(x, scale_2, shift_2, self.norm2.eps)
    x = noisy(self.conv2(self.dropout(x), **causal), self.per_channel_scale2)
    if self.norm3 is not None:
        inputs = self.norm3(inputs.movedim(1, -1)).movedim(-1, 1)
    if self.conv_shortcut is not None:
        inputs = self.conv_shortcut(inputs)
    return x + inputs


@own_forward("ltx_vae.resnet")
def _ltx_resnet(self, inputs, temb=None, generator=None):
    return _resnet(self, inputs, temb, generator)


@own_forward("ltx_vae.resnet")
def _ltx2_resnet(self, inputs, temb=None, generator=None, causal=True):
    return _resnet(self, inputs, temb, generator, causal=causal)


# ---- convolutions

CHANNELS_LAST = torch.channels_last_3d


def _padded(x: Tensor, before: int, after: int) -> Tensor:
    """x [B, C, T, H, W] with its first and last frame repeated, channels last."""
    if before == after == 0:
        return x
    batch, channels, frames, height, width = x.shape
    shape = (batch, channels, before + frames + after, height, width)
    padded = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=CHANNELS_LAST)
    padded[:, :, before : before + frames].copy_(x)
    padded[:, :, :before].copy_(x[:, :, :1].expand(-1, -1, before, -1, -1))
    padded[:, :, before + frames :].copy_(x[:, :, -1:].expand(-1, -1, after, -1, -1))
    return padded


def _conv(self: nn.Module, x: Tensor, causal: bool) -> Union[Tensor, None]:
    if runs_stock(x, self.conv.weight) or not is_plain(self.conv, nn.Conv3d):
        return None
    repeated = self.kernel_size[0] - 1
    before, after = (repeated, 0) if causal else (repeated // 2, repeated // 2)
    return self.conv(_padded(x, before, after))


@own_forward("ltx_vae.conv")
def _ltx_conv(self, hidden_states):
    y = _conv(self, hidden_states, self.is_causal)
    return type(self).forward(self, hidden_states) if y is None else y


@own_forward("ltx_vae.conv")
def _ltx2_conv(self, hidden_states, causal=True):
    y = _conv(self, hidden_states, causal)
    return type(self).forward(self, hidden_states, causal) if y is None else y


def _reformat(memory_format: torch.memory_format) -> Callable[[nn.Module], None]:
    def act(module: nn.Module) -> None:
        weight = module.conv.weight
        if type(module.conv) is nn.Conv3d and type(weight) is nn.Parameter and not weight.is_meta:
            with torch.inference_mode(False):
                weight.data = weight.data.contiguous(memory_format=memory_format)

    return act


def _conv_recipe(forward: Callable) -> Recipe:
    return Recipe("ltx_vae.conv", lambda module: forward, _reformat(CHANNELS_LAST), _reformat(torch.contiguous_format))


RECIPES = {
    (_VAE, "LTXVideoResnetBlock3d"): Recipe("ltx_vae.resnet", lambda module: _ltx_resnet),
    (_VAE, "LTXVideoCausalConv3d"): _conv_recipe(_ltx_conv),
    (_VAE2, "LTX2VideoResnetBlock3d"): Recipe("ltx_vae.resnet", lambda module: _ltx2_resnet),
    (_VAE2, "LTX2VideoCausalConv3d"): _conv_recipe(_ltx2_conv),
}
