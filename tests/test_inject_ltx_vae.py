"""The VAEs of LTX-Video and LTX-2 with fused resnet blocks and convolutions with channels last."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch
from tiny_models import count, relative

diffusers = pytest.importorskip("diffusers")

# the decoder of 0.9.1 in small
CONDITIONED = {
    "timestep_conditioning": True,
    "decoder_block_out_channels": (8, 16, 32),
    "decoder_layers_per_block": (1, 1, 1, 1),
    "decoder_spatio_temporal_scaling": (True, True, True),
    "decoder_inject_noise": (True, True, True, False),
    "upsample_residual": (True, True, True),
    "upsample_factor": (2, 2, 2),
}
VAES = {
    "ltx": lambda: (tiny_models.ltx_vae(), None),
    "ltx_conditioned": lambda: (tiny_models.ltx_vae(**CONDITIONED), torch.tensor([0.05, 0.3])),
    "ltx_causal_decoder": lambda: (tiny_models.ltx_vae(decoder_causal=True, encoder_causal=False), None),
    "ltx2": lambda: (tiny_models.ltx2_vae(), None),
    "ltx2_conditioned": lambda: (
        tiny_models.ltx2_vae(timestep_conditioning=True, decoder_inject_noise=True, decoder_causal=False),
        torch.tensor([0.05, 0.3]),
    ),
}


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    """TF32 in the convolutions would hide what is compared, and differs with the memory format."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(params=VAES)
def case(request):
    """(vae, latents, timestep); noise scales are zero in a fresh model."""
    vae, temb = VAES[request.param]()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            if "per_channel_scale" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return vae, torch.randn(2, 8, 2, 2, 3, generator=generator), temb


def decode(vae, latents, temb):
    torch.manual_seed(4)  # the noise of the resnet blocks
    with torch.no_grad():
        return vae.decode(latents, temb, return_dict=False)[0]


def test_vae_decode_is_that_of_stock(k, device, case):
    vae, latents, temb = (part if part is None else part.to(device) for part in case)
    expected = decode(vae, latents, temb)
    report = k.inject_optimized_kernels(vae)
    assert report.counts["ltx_vae.resnet"] and report.counts["ltx_vae.conv"]
    result = decode(vae, latents, temb)
    assert result.dtype is expected.dtype and relative(result, expected) < 1e-5
    resnets = [m for m in vae.decoder.modules() if "Resnet" in type(m).__name__]
    assert count(vae.decode, latents, temb)["pixel_norm_silu"] == 2 * len(resnets)


def test_vae_encode_is_that_of_stock(k, device, case):
    vae = case[0].to(device)
    video = torch.randn(1, 3, 9, 32, 32, device=device)
    with torch.no_grad():
        expected = vae.encode(video).latent_dist.mean
        k.inject_optimized_kernels(vae)
        assert relative(vae.encode(video).latent_dist.mean, expected) < 1e-5


def test_vae_without_the_memory_format(k, case):
    """skip="ltx_vae.conv": weights and activations keep their format, the fused norms run all the same."""
    vae, latents, temb = case
    strides = [p.stride() for p in vae.parameters()]
    expected = decode(vae, latents, temb)
    report = k.inject_optimized_kernels(vae, skip="ltx_vae.conv")
    assert "ltx_vae.conv" not in report.counts
    assert [p.stride() for p in vae.parameters()] == strides
    assert relative(decode(vae, latents, temb), expected) < 1e-5
    assert count(vae.decode, latents, temb)["pixel_norm_silu"]


def test_vae_convolutions_get_channels_last(k, case):
    """Input and weight of each: so cuDNN has nothing to transpose."""
    vae, latents, temb = case
    k.inject_optimized_kernels(vae)
    convolve, seen = torch.nn.functional.conv3d, []

    def spy(x, weight, *args, **kwargs):
        if weight.shape[2] > 1:
            seen.append(all(t.is_contiguous(memory_format=torch.channels_last_3d) for t in (x, weight)))
        return convolve(x, weight, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "conv3d", spy)
        decode(vae, latents, temb)
    assert len(seen) > 10
    # where space is padded by reflection, that copy decides; it keeps the format on a GPU
    assert all(seen) or any(m.padding_mode != "zeros" for m in vae.modules() if isinstance(m, torch.nn.Conv3d))


def test_vae_remove_restores_exactly(k, case):
    vae, latents, temb = case
    expected = decode(vae, latents, temb)
    state = {n: (p.clone(), p.stride()) for n, p in vae.named_parameters()}
    before = [dict(vars(m)) for m in vae.modules()]
    k.inject_optimized_kernels(vae)
    decode(vae, latents, temb)
    k.remove_optimized_kernels(vae)
    assert [dict(vars(m)) for m in vae.modules()] == before
    assert all(torch.equal(p, state[n][0]) and p.stride() == state[n][1] for n, p in vae.named_parameters())
    assert torch.equal(decode(vae, latents, temb), expected)
    assert not count(vae.decode, latents, temb)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_vae_half_precision_is_no_less_accurate_than_stock(k, device, case, dtype):
    vae = case[0].to(dtype)
    resnets = [m for m in vae.decoder.modules() if "Resnet" in type(m).__name__ and m.per_channel_scale1 is None]
    errors = torch.zeros(2)
    generator = torch.Generator().manual_seed(6)
    for resnet in resnets:
        channels = resnet.conv1.in_channels
        x = torch.randn(1, channels, 3, 8, 8, generator=generator).to(dtype)
        ada = None
        if resnet.scale_shift_table is not None:
            ada = (0.3 * torch.randn(1, 4 * channels, 1, 1, 1, generator=generator)).to(dtype)
        with torch.no_grad():
            exact = copy.deepcopy(resnet).double()(x.double(), None if ada is None else ada.double())
            each = copy.deepcopy(resnet).to(device)
            for i in range(2):
                result = each(x.to(device), None if ada is None else ada.to(device)).cpu()
                errors[i] += relative(result, exact)
                k.inject_optimized_kernels(each)
    assert errors[1] <= errors[0]


def test_vae_gradients_are_those_of_stock(k, case):
    vae, latents, temb = case

    def gradients():
        torch.manual_seed(4)
        vae.zero_grad()
        x = latents.clone().requires_grad_()
        vae.decode(x, temb, return_dict=False)[0].square().mean().backward()
        return [x.grad, *(p.grad.clone() for p in vae.decoder.parameters() if p.grad is not None)]

    expected = gradients()
    k.inject_optimized_kernels(vae)
    results = gradients()
    assert len(results) == len(expected)
    assert max(map(relative, results, expected)) < 1e-4


def test_vae_save_pretrained(k, case, tmp_path):
    vae, latents, temb = case
    expected = decode(vae, latents, temb)
    k.inject_optimized_kernels(vae)
    vae.save_pretrained(tmp_path)
    loaded = type(vae).from_pretrained(tmp_path)
    assert relative(decode(loaded, latents, temb), expected) < 1e-6


def test_vae_tiling_and_slicing(k):
    vae, latents = tiny_models.ltx_vae(), torch.randn(2, 8, 3, 4, 4)
    vae.enable_slicing()
    vae.enable_tiling(
        tile_sample_min_height=64, tile_sample_min_width=64, tile_sample_stride_height=48, tile_sample_stride_width=48
    )
    expected = decode(vae, latents, None)
    k.inject_optimized_kernels(vae)
    assert relative(decode(vae, latents, None), expected) < 1e-5


def test_vae_compiles_fullgraph(k):
    vae, latents = tiny_models.ltx_vae(), torch.randn(1, 8, 2, 2, 2)
    k.inject_optimized_kernels(vae)
    with torch.no_grad():
        expected = vae.decoder(latents)
        result = torch.compile(vae.decoder, fullgraph=True, backend="aot_eager")(latents)
    assert relative(result, expected) < 1e-5


@pytest.mark.parametrize("order", ["inject_first", "offload_first"])
def test_vae_sequential_offload(k, device, order):
    accelerate = pytest.importorskip("accelerate")
    vae, latents = tiny_models.ltx_vae(), torch.randn(1, 8, 2, 2, 2)
    expected = decode(vae, latents, None)
    steps = [lambda: k.inject_optimized_kernels(vae), lambda: accelerate.cpu_offload(vae, torch.device(device))]
    for step in steps if order == "inject_first" else reversed(steps):
        step()
    assert relative(decode(vae, latents.to(device), None).cpu(), expected) < 1e-5
