"""pixel_norm_silu: RMS over the channels of each pixel, modulation, SiLU; contiguous and with channels last.

Every test runs on both backends. Accuracy is judged by reference.py's rule.
"""

from __future__ import annotations

import pytest
import reference
import torch
import torch._dynamo
import torch.nn.functional as F
from conftest import DTYPES, misaligned, same_bits
from layouts import FAR, assert_nothing_copied, room_for_far
from reference import assert_no_worse_than_eager

FP32, FP16, BF16 = DTYPES.values()
FP64 = torch.float64


@pytest.fixture(params=["contiguous", "channels_last"])
def layout(request) -> str:
    return request.param


def as_layout(x, layout):
    if layout == "contiguous":
        return x.contiguous()
    return x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def make_inputs(shape, dtype, device, layout="contiguous", *, modulation="scale shift", batch=None, param_dtype=None):
    x = as_layout(torch.randn(shape, device=device).to(dtype), layout)
    form = (shape[0] if batch is None else batch, shape[1], *[1] * (len(shape) - 2))
    names = modulation.split()
    return {"x": x, **{n: torch.randn(form, device=device).to(param_dtype or dtype) for n in names}}


def memory_format(x):
    """As the fake says it: channels last where x is and is not contiguous."""
    last = x.stride(1) == 1 and not x.is_contiguous()
    return (torch.channels_last if x.dim() == 4 else torch.channels_last_3d) if last else torch.contiguous_format


def check(k, inputs, **extra):
    """The op against fp64 by the rule: x's dtype and memory format, the inputs untouched."""
    before = {key: tensor.clone() for key, tensor in inputs.items()}
    output = k.pixel_norm_silu(**inputs, **extra)
    for key, tensor in inputs.items():
        assert torch.equal(tensor, before[key]), f"the op wrote to {key}"
    assert output.is_contiguous(memory_format=memory_format(inputs["x"]))
    expected, eager = (reference.pixel_norm_silu(**inputs, **extra, compute=t) for t in (FP64, FP32))
    assert_no_worse_than_eager(output, eager, expected, inputs["x"].dtype)
    return output


# ---- sizes, dtypes, operands ------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 2, 3, 8, 33, 100, 128, 256, 512, 1000, 1024, 2048])
@pytest.mark.parametrize("pixels", [(3, 4, 8), (1, 5, 7)], ids=["aligned", "odd"])
def test_every_number_of_channels(k, device, dtype, layout, channels, pixels):
    check(k, make_inputs((2, channels, *pixels), dtype, device, layout))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("channels", [128, 1024])
def test_typical_sizes(k, device, dtype, layout, channels):
    check(k, make_inputs((1, channels, 2, 16, 24), dtype, device, layout))


@pytest.mark.parametrize(
    "spatial", [(1, 1, 1), (1, 1, 2), (8,) * 3, (5, 13, 17), (2, 9, 64), (1, 1, 1031), (3, 9), (40, 56)]
)
def test_any_number_of_pixels(k, device, dtype, layout, spatial):
    for channels in (3, 40):
        check(k, make_inputs((2, channels, *spatial), dtype, device, layout))


@pytest.mark.parametrize("channels", [4096, 5001])
def test_more_channels_than_shared_memory_holds(k, device, layout, channels):
    """x is read twice then."""
    for dtype in (FP32, BF16):
        for width in (8, 7):
            check(k, make_inputs((1, channels, 1, 2, width), dtype, device, layout))


@pytest.mark.parametrize("channels", [3, 24, 64, 96, 128, 200, 256, 384, 512, 1000, 1024, 1500])
@pytest.mark.parametrize("modulation", ["", "scale shift"])
def test_the_place_of_operands_does_not_change_bits(k, device, dtype, channels, modulation):
    """Aligned planes wait for their sums in registers, others in shared memory."""
    inputs = make_inputs((2, channels, 1, 5, 16), dtype, device, modulation=modulation)
    expected = check(k, inputs)
    assert same_bits([k.pixel_norm_silu(**{**inputs, "x": misaligned(inputs["x"])})], [expected])


def test_more_images_than_a_dimension_of_the_grid_holds(k, device):
    for width in (8, 3):
        check(k, make_inputs((65535 + 5, 2, 1, 1, width), BF16, device))


@pytest.mark.parametrize("modulation", ["", "scale", "shift", "scale shift"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("param_dtype", DTYPES.values(), ids=DTYPES)
def test_modulation(k, device, dtype, layout, modulation, batch, param_dtype):
    arguments = {"modulation": modulation, "batch": batch, "param_dtype": param_dtype}
    check(k, make_inputs((3, 40, 2, 4, 8), dtype, device, layout, **arguments))
    check(k, make_inputs((3, 40, 5, 7), dtype, device, layout, **arguments))


def test_modulation_views_are_read_in_place(k, device, dtype, layout):
    """LTX-Video: temb.unflatten(1, (4, -1)) + table, unbound along dim 1."""
    x = make_inputs((2, 64, 2, 4, 8), dtype, device, layout, modulation="")["x"]
    shift, scale, *_ = torch.randn(2, 4, 64, 1, 1, 1, device=device).to(dtype).unbind(dim=1)
    check(k, {"x": x, "scale": scale, "shift": shift})
    assert_nothing_copied(lambda: k.pixel_norm_silu(x, scale, shift))
    across = torch.randn(64, 2, device=device).to(dtype).t()[..., None, None, None]  # channels are two apart
    check(k, {"x": x, "scale": across})


@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-5, 1.0])
def test_eps(k, device, dtype, layout, eps):
    inputs = make_inputs((1, 64, 1, 8, 8), dtype, device, layout)
    inputs["x"] *= 1e-3
    check(k, inputs, eps=eps)


def test_zeros_stay_finite(k, device, dtype, layout):
    x = as_layout(torch.zeros(1, 64, 2, 4, 8, device=device, dtype=dtype), layout)
    assert torch.equal(k.pixel_norm_silu(x), x)


def test_magnitudes_near_the_ends_of_the_range(k, device, layout):
    """Squares are formed in fp32: 6e4 in fp16 does not overflow."""
    for dtype, size in ((FP16, 6e4), (BF16, 1e17), (BF16, 1e-15), (FP32, 1e17), (FP32, 1e-15)):
        x = as_layout((size * (0.5 + torch.rand(1, 256, 1, 4, 8, device=device))).to(dtype), layout)
        check(k, {"x": x.clamp(max=torch.finfo(dtype).max)}, eps=0.0)


def test_nan_and_inf_stay_in_their_pixel(k, device, dtype, layout):
    inputs = make_inputs((1, 40, 1, 5, 8), dtype, device, layout)
    clean = k.pixel_norm_silu(**inputs)
    inputs["x"][0, 17, 0, 2, 3] = float("nan")
    inputs["x"][0, 39, 0, 4, 7] = float("inf")
    output = k.pixel_norm_silu(**inputs)
    assert output[0, :, 0, 2, 3].isnan().all() and not output[0, :, 0, 4, 7].isfinite().all()
    for pixel in ((2, 3), (4, 7)):
        output[0, :, 0, pixel[0], pixel[1]] = clean[0, :, 0, pixel[0], pixel[1]]
    assert torch.equal(output, clean)


@torch.no_grad()
@pytest.mark.parametrize("timestep_conditioning", [False, True])
def test_ltx_video_resnet(k, device, dtype, layout, timestep_conditioning):
    """The norm, modulation and activation in front of each convolution of diffusers' LTXVideoResnetBlock3d."""
    ltx = pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_ltx")
    block = ltx.LTXVideoResnetBlock3d(64, timestep_conditioning=timestep_conditioning).to(device, dtype)
    x = as_layout(torch.randn(2, 64, 2, 6, 8, device=device).to(dtype), layout)
    temb = torch.randn(2, 4 * 64, 1, 1, 1, device=device).to(dtype)
    seen = []
    block.conv1.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    block(x, temb)

    scale = shift = None
    if timestep_conditioning:
        table = temb.unflatten(1, (4, -1)) + block.scale_shift_table[None, ..., None, None, None]
        shift, scale, *_ = table.unbind(dim=1)
    ours = k.pixel_norm_silu(x, scale, shift, eps=block.norm1.eps)
    assert_no_worse_than_eager(ours, seen[0], reference.pixel_norm_silu(x, scale, shift, eps=1e-8), dtype)


@torch.no_grad()
def test_ltx2_per_channel_rms_norm(k, device, dtype, layout):
    ltx2 = pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_ltx2")
    x = make_inputs((1, 96, 2, 6, 8), dtype, device, layout, modulation="")["x"]
    stock = F.silu(ltx2.PerChannelRMSNorm()(x))
    assert_no_worse_than_eager(k.pixel_norm_silu(x), stock, reference.pixel_norm_silu(x), dtype)


# ---- layouts ---------------------------------------------------------------------------------------------


IN_PLACE = {
    "every second image": lambda x: x[::2],
    "some channels": lambda x: x[:, 3:35],
    "some frames": lambda x: x[:, :, 1:],
    "one frame": lambda x: x[:, :, 1],
}
COPIED = {
    "cropped rows": lambda x: x[:, :, :, 1:5],
    "cropped columns": lambda x: x[..., 1:7],
    "transposed space": lambda x: x.transpose(3, 4),
    "every second channel": lambda x: x[:, ::2],
    "expanded": lambda x: x[:, :, :, :1].expand(-1, -1, -1, 5, -1),
    "batch and channels swapped": lambda x: x.transpose(0, 1),
}


@pytest.mark.parametrize("view", IN_PLACE)
def test_slices_are_read_in_place(k, device, dtype, layout, view):
    x = IN_PLACE[view](make_inputs((4, 40, 3, 5, 8), dtype, device, layout)["x"])
    check(k, {"x": x})
    assert_nothing_copied(lambda: k.pixel_norm_silu(x))


@pytest.mark.parametrize("view", COPIED)
def test_other_views_are_never_misread(k, device, dtype, layout, view):
    check(k, {"x": COPIED[view](make_inputs((4, 40, 3, 6, 8), dtype, device, layout)["x"])})


def test_the_output_keeps_the_memory_format(k, device, layout):
    for shape in ((2, 16, 3, 4, 8), (2, 16, 4, 8)):
        x = make_inputs(shape, BF16, device, layout, modulation="")["x"]
        assert k.pixel_norm_silu(x).stride() == x.stride()


@pytest.mark.parametrize("shape", [(0, 8, 2, 4, 4), (2, 8, 0, 4, 4), (2, 0, 2, 4, 4), (2, 8, 2, 4, 0), (0, 0, 0, 0)])
def test_zero_size_inputs(k, device, dtype, layout, shape):
    output = k.pixel_norm_silu(**make_inputs(shape, dtype, device, layout))
    assert output.shape == shape and output.dtype == dtype and output.device.type == device


def test_offsets_beyond_2_31_elements(k, device):
    """Two images far apart, and two channels; what lies between is never touched."""
    memory = room_for_far(4096, device)
    for strides in ((FAR, 64, 64, 8, 1), (64, FAR, 64, 8, 1), (FAR, 1, 1024, 128, 16)):
        x = torch.randn(2, 2, 1, 8, 8, device=device, dtype=BF16)
        moved = memory.as_strided(x.shape, strides).copy_(x)
        expected = k.pixel_norm_silu(as_layout(x, "contiguous" if strides[-1] == 1 else "channels_last"))
        assert torch.equal(k.pixel_norm_silu(moved), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 128, 2**24 + 1), (1, 128, 2**24 + 8), (3, 1024, 2**20)])
def test_more_than_2_31_elements(k, layout, shape, gpu):
    needed = torch.Size(shape).numel() * 2 * 3
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed >> 30} GB of free GPU memory")
    x = torch.empty(*shape[:2], 1, 1, shape[2], dtype=BF16, device="cuda")
    if layout == "channels_last":
        x = torch.empty(shape[0], 1, 1, shape[2], shape[1], dtype=BF16, device="cuda").movedim(-1, 1)
    output = k.pixel_norm_silu(x.normal_())
    for pixels in (slice(0, 64), slice(shape[2] - 64, shape[2])):
        part = as_layout(x[-1:, ..., pixels], layout)
        assert torch.equal(check(k, {"x": part}), output[-1:, ..., pixels])
    del output, x
    torch.cuda.empty_cache()


# ---- determinism -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [3, 96, 128, 512, 1024, 2048])
def test_batch_invariance(k, device, dtype, layout, channels):
    """vllm#48271: the same pixel gives the same bits in any batch and any video, at any place."""
    inputs = make_inputs((3, channels, 2, 5, 16), dtype, device, layout)
    whole = k.pixel_norm_silu(**inputs)
    for image in range(3):
        part = {name: tensor[image : image + 1] for name, tensor in inputs.items()}
        assert torch.equal(k.pixel_norm_silu(**part), whole[image : image + 1])
    x, *modulation = inputs.values()
    for frames in (slice(0, 1), slice(1, 2)):
        assert torch.equal(k.pixel_norm_silu(x[:, :, frames], *modulation), whole[:, :, frames])
    for columns in (slice(0, 1), slice(3, 7), slice(8, 16)):
        part = as_layout(x[..., columns], layout)
        if part.is_contiguous() == (layout == "contiguous"):
            assert torch.equal(k.pixel_norm_silu(part, *modulation), whole[..., columns])


# ---- torch.compile ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 16, 3, 4, 8), (2, 16, 5, 7), (1, 1, 2, 3, 4), (2, 16, 1, 1)])
def test_opcheck(k, device, layout, shape):
    op = k._ops.ops.pixel_norm_silu.default
    inputs = make_inputs(shape, BF16, device, layout, param_dtype=FP32)
    torch.library.opcheck(op, (*inputs.values(), 1e-8))
    torch.library.opcheck(op, (inputs["x"][:, :, :1], None, None, 1e-8))


def test_compile_with_inductor_among_other_ops(k, device, layout, fresh_dynamo):
    inputs = make_inputs((1, 32, 2, 4, 8), BF16, device, layout)

    def block(x, scale, shift):
        return k.pixel_norm_silu(x * 2, scale + 1, shift) + x

    with torch.no_grad():
        compiled = torch.compile(block, fullgraph=True)(**inputs)
        torch.testing.assert_close(compiled, block(**inputs), atol=0.1, rtol=0.05)


@pytest.mark.parametrize("view", [*IN_PLACE, *COPIED])
def test_fake_and_meta_tensors_have_the_form_of_the_result(k, device, layout, view):
    x = {**IN_PLACE, **COPIED}[view](make_inputs((4, 40, 3, 6, 8), BF16, device, layout)["x"])
    real = k.pixel_norm_silu(x)
    fake = k.pixel_norm_silu(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"))
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
    assert fake.device.type == "meta"


# ---- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (8,), (2, 8), (2, 8, 4), (1, 2, 8, 2, 4, 4)])
def test_an_x_of_a_wrong_rank(k, device, shape):
    with pytest.raises(RuntimeError, match=r"x has shape \[.*\]; \[B, C, H, W\] or \[B, C, D, H, W\] is needed"):
        k.pixel_norm_silu(torch.randn(shape, device=device))


@pytest.mark.parametrize(
    "shape", [(), (16,), (2, 16), (2, 16, 1, 1), (3, 16, 1, 1, 1), (2, 15, 1, 1, 1), (2, 16, 1, 4, 1)]
)
def test_a_modulation_of_a_wrong_shape_is_named(k, device, layout, shape):
    x = make_inputs((2, 16, 2, 4, 8), FP32, device, layout)["x"]
    for name in ("scale", "shift"):
        with pytest.raises(RuntimeError, match=rf"{name} has shape \[.*\]; \[2 or 1, 16, 1, 1, 1\] is needed"):
            k.pixel_norm_silu(x, **{name: torch.randn(shape, device=device)})
