"""What every public op does, whatever it computes: one table of ops, one test for each behaviour.

The files of the families hold what differs: the results, the layouts, the names of the arguments.
"""

from __future__ import annotations

import inspect
from typing import Callable, NamedTuple

import pytest
import torch
import torch._dynamo
from conftest import DTYPES, full_gpu_memory, misaligned, outputs_of, same_bits
from layouts import FAR, room_for_far
from torch.utils._python_dispatch import TorchDispatchMode

FP32, FP16, BF16 = DTYPES.values()
TOKENS, HEADS = 6, 4


class Op(NamedTuple):
    """A function, the shapes of its tensors for (batch, tokens, width), and the options that choose what it computes.

    The first tensor is the one that all others go with. A tensor of more than one dimension has the batch first.
    """

    function: str
    shapes: Callable[[int, int, int], dict]
    options: dict = {}
    widths: tuple = (64,)  # of which each has a launch of its own
    memory_format: torch.memory_format = torch.contiguous_format


def norm_shapes(*names: str) -> Callable[[int, int, int], dict]:
    def shapes(batch: int, tokens: int, width: int) -> dict:
        rows = dict.fromkeys(("x", "residual"), (batch, tokens, width))
        modulations = dict.fromkeys(("gate", "scale", "shift"), (batch, 1, width))
        return {name: {**rows, **modulations}.get(name, (width,)) for name in names}

    return shapes


def rope_shapes(heads: dict, weights: Callable[[int], dict] = lambda width: {}, tables: bool = True) -> Callable:
    def shapes(batch: int, tokens: int, width: int) -> dict:
        cos_sin = dict.fromkeys(("cos", "sin") if tables else (), (batch, tokens, width // 2))
        return {**{name: (batch, tokens, n, width) for name, n in heads.items()}, **weights(width), **cos_sin}

    return shapes


def packed_shapes(batch: int, tokens: int, width: int) -> dict:
    return {"x": (batch, tokens, 2 * width)}


def activation_shapes(*names: str) -> Callable[[int, int, int], dict]:
    return lambda batch, tokens, width: dict.fromkeys(names, (batch, tokens, width))


def pixel_shapes(batch: int, tokens: int, width: int) -> dict:
    return {"x": (batch, width, tokens, 4), **dict.fromkeys(("scale", "shift"), (batch, width, 1, 1))}


_ADA = ("x", "scale", "shift", "weight", "bias", "scale_table", "shift_table")
_RESIDUAL_ADA = ("x", "residual", "gate", "gate_table", *_ADA[1:])
_QK = {"q": HEADS, "k": HEADS // 2}
_NORM_WIDTHS = (8, 96, 1000, 2048, 16384)
_HEAD_SIZES = (32, 96, 128)
_GLU_WIDTHS = (8, 96, 1001)
_CHANNELS = (3, 96, 512, 1024, 2048)


def grid(inputs: dict) -> tuple:
    tokens = next(t.shape[1] for t in inputs.values() if isinstance(t, torch.Tensor) and t.dim() > 1)
    return (1, 2, tokens // 2)


OPS = {
    "rms_norm": Op("rms_norm", norm_shapes("x", "weight"), {}, _NORM_WIDTHS),
    "layer_norm": Op("layer_norm", norm_shapes("x", "weight", "bias"), {}, _NORM_WIDTHS),
    "ada_norm-rms": Op("ada_norm", norm_shapes(*_ADA), {}, _NORM_WIDTHS),
    "ada_norm-layer": Op("ada_norm", norm_shapes(*_ADA), {"norm": "layer"}, _NORM_WIDTHS),
    "gated_residual": Op("gated_residual", norm_shapes("x", "residual", "gate", "gate_table"), {}, _NORM_WIDTHS),
    "residual_ada_norm-rms": Op("residual_ada_norm", norm_shapes(*_RESIDUAL_ADA), {}, _NORM_WIDTHS),
    "residual_ada_norm-layer": Op("residual_ada_norm", norm_shapes(*_RESIDUAL_ADA), {"norm": "layer"}, _NORM_WIDTHS),
    "add_rms_norm": Op("add_rms_norm", norm_shapes("x", "residual", "weight"), {}, _NORM_WIDTHS),
    "rope": Op("rope", rope_shapes({"x": HEADS}), {}, _HEAD_SIZES),
    "rope-half": Op("rope", rope_shapes({"x": HEADS}), {"interleaved": False}, _HEAD_SIZES),
    "rope_3d": Op("rope_3d", rope_shapes(_QK, tables=False), {"grid": grid}, _HEAD_SIZES),
    "qk_norm_rope-per_head": Op(
        "qk_norm_rope",
        rope_shapes(_QK, lambda width: dict.fromkeys(("q_weight", "k_weight"), (width,))),
        {},
        _HEAD_SIZES,
    ),
    "qk_norm_rope-across_heads": Op(
        "qk_norm_rope",
        rope_shapes(_QK, lambda width: {"q_weight": (HEADS * width,), "k_weight": (HEADS // 2 * width,)}),
        {"across_heads": True},
        _HEAD_SIZES,
    ),
    "qk_norm_rope-q_only": Op(
        "qk_norm_rope",
        rope_shapes({"q": HEADS}, lambda width: {"q_weight": (width,), "q_bias": (width,)}),
        {"k": None, "norm": "layer", "interleaved": False},
        _HEAD_SIZES,
    ),
    "geglu": Op("geglu", packed_shapes, {}, _GLU_WIDTHS),
    "geglu-tanh": Op("geglu", packed_shapes, {"approximate": "tanh", "gate_first": True}, _GLU_WIDTHS),
    "swiglu": Op("swiglu", packed_shapes, {}, _GLU_WIDTHS),
    "swiglu-two_tensors": Op("swiglu", activation_shapes("x", "up"), {}, _GLU_WIDTHS),
    "gelu": Op("gelu", activation_shapes("x"), {"approximate": "none"}, _GLU_WIDTHS),
    "gelu-tanh": Op("gelu", activation_shapes("x"), {}, _GLU_WIDTHS),
    "pixel_norm_silu": Op("pixel_norm_silu", pixel_shapes, {}, _CHANNELS),
    "pixel_norm_silu-channels_last": Op("pixel_norm_silu", pixel_shapes, {}, _CHANNELS, torch.channels_last),
}


@pytest.fixture(params=OPS)
def op(request) -> Op:
    return OPS[request.param]


def at_each_width(test):
    """The test with `op` and `width`: each op at each of its widths."""
    cases = [pytest.param(op, width, id=f"{name}-{width}") for name, op in OPS.items() for width in op.widths]
    return pytest.mark.parametrize("op, width", cases)(test)


def make_inputs(op: Op, dtype, device: str, *, batch: int = 2, tokens: int = TOKENS, width: int = 32) -> dict:
    shapes = op.shapes(batch, tokens, width)
    inputs = {name: torch.randn(shape, device=device).to(dtype) for name, shape in shapes.items()}
    return {n: t.contiguous(memory_format=op.memory_format) if t.dim() == 4 else t for n, t in inputs.items()}


def call(k, op: Op, inputs: dict) -> tuple[torch.Tensor, ...]:
    options = {name: value(inputs) if callable(value) else value for name, value in op.options.items()}
    return outputs_of(getattr(k, op.function)(**{**options, **inputs}))


def first_of(inputs: dict) -> str:
    return next(iter(inputs))


def of_images(inputs: dict, images: slice) -> dict:
    """The inputs of a part of the batch."""
    return {name: t[images] if t.dim() > 1 else t for name, t in inputs.items()}


def test_every_public_function_is_in_the_table(k):
    functions = {name for name in k.__all__ if getattr(k, name).__class__ is type(lambda: None)}
    functions = {name for name in functions if getattr(k, name).__module__ == f"{k.__name__}.functional"}
    assert functions - {"rmsnorm"} == {op.function for op in OPS.values()}


# ---- memory


def test_no_batch_at_all_and_then_the_next_call(k, op, device, dtype):
    """sglang#3304: a launch of no rows left an error behind for the op after it."""
    inputs = make_inputs(op, dtype, device)
    expected = call(k, op, inputs)
    empty = call(k, op, make_inputs(op, dtype, device, batch=0))
    for nothing, output in zip(empty, expected):
        assert nothing.shape == (0, *output.shape[1:]) and nothing.dtype is dtype and nothing.device == output.device
    assert same_bits(call(k, op, inputs), expected)
    if device == "cuda":
        torch.cuda.synchronize()


@at_each_width
def test_alignment_does_not_change_bits(k, op, width, device, dtype):
    inputs = make_inputs(op, dtype, device, width=width)
    expected = call(k, op, inputs)
    for name in inputs:
        assert same_bits(call(k, op, {**inputs, name: misaligned(inputs[name])}), expected), name
    assert same_bits(call(k, op, {name: misaligned(tensor) for name, tensor in inputs.items()}), expected)


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in rows with something between them."""
    dim = 1 if tensor.stride(1) == 1 < tensor.stride(-1) else -1
    rows = tensor.movedim(dim, -1)
    wide = torch.full((*rows.shape[:-1], rows.shape[-1] + 24), float("nan"), dtype=tensor.dtype, device=tensor.device)
    return wide[..., 8:-16].copy_(rows).movedim(-1, dim)


@at_each_width
def test_rows_apart_do_not_change_bits(k, op, width, device, dtype):
    """A slice of a fused projection."""
    inputs = make_inputs(op, dtype, device, width=width)
    moved = {name: apart(tensor) if tensor.dim() > 1 else tensor for name, tensor in inputs.items()}
    assert same_bits(call(k, op, moved), call(k, op, inputs))


def test_offsets_beyond_2_31_elements(k, op, device):
    """vllm#42862: an offset in int32 wraps. Two images far apart; what lies between is never touched."""
    inputs = make_inputs(op, BF16, device)
    expected = call(k, op, inputs)
    for name in (name for name, tensor in inputs.items() if tensor.dim() > 1):
        tensor = inputs[name]
        memory = room_for_far(tensor.numel(), device)
        moved = memory.as_strided(tensor.shape, (FAR, *tensor.stride()[1:])).copy_(tensor)
        assert same_bits(call(k, op, {**inputs, name: moved}), expected), name


@pytest.mark.gpu
def test_out_of_memory_keeps_its_type(k, op, gpu):
    """Frameworks catch torch.OutOfMemoryError to retry with a smaller batch."""
    one = make_inputs(op, BF16, "cuda", batch=1, width=96)
    batch = 2**28 // one[first_of(one)].numel()
    shapes = op.shapes(batch, TOKENS, 96)

    def make() -> dict:
        return {name: torch.empty(shape, dtype=BF16, device="cuda") for name, shape in shapes.items()}

    with full_gpu_memory(make) as big, pytest.raises(torch.OutOfMemoryError):
        call(k, op, big)
    del big
    torch.cuda.empty_cache()
    call(k, op, one)


# ---- determinism


@at_each_width
def test_batch_invariance(k, op, width, device, dtype):
    """vllm#48271: the same row gives the same bits in any batch."""
    inputs = make_inputs(op, dtype, device, batch=7, width=width)
    whole = call(k, op, inputs)
    for images in (slice(0, 1), slice(6, 7), slice(2, 5)):
        assert same_bits(call(k, op, of_images(inputs, images)), [output[images] for output in whole]), images
    doubled = {name: torch.cat([t] * 2) if t.dim() > 1 else t for name, t in inputs.items()}
    assert same_bits(call(k, op, doubled), [torch.cat([output] * 2) for output in whole])


@pytest.mark.kernels_ci
def test_repeatability(k, op, device):
    inputs = make_inputs(op, BF16, device, tokens=128, width=256)
    first = call(k, op, inputs)
    for _ in range(5):
        assert same_bits(call(k, op, inputs), first)


# ---- streams, graphs, devices


@pytest.mark.gpu
def test_non_default_stream(k, op, gpu):
    """The input arrives late on a side stream: a kernel on the default stream would read the old values."""
    inputs = make_inputs(op, BF16, "cuda", tokens=64, width=256)
    expected = call(k, op, inputs)
    name = first_of(inputs)
    late = torch.zeros_like(inputs[name])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(inputs[name])
        outputs = call(k, op, {**inputs, name: late})
    stream.synchronize()
    assert same_bits(outputs, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("graphed", (False, True))
def test_a_launch_waits_for_the_one_before(k, op, graphed, gpu):
    """On sm_90 a kernel begins before the one ahead of it has ended: it must not read or write memory before that."""
    inputs = make_inputs(op, BF16, "cuda", tokens=2048, width=128)
    name = first_of(inputs)
    flat = torch.as_strided(inputs[name], (inputs[name].numel(),), (1,))
    steps = [torch.full_like(flat, turn) for turn in range(6)]  # what is read too early is of another turn

    def of(made: torch.Tensor):
        return call(k, op, {**inputs, name: made.as_strided(inputs[name].shape, inputs[name].stride())})

    expected = [of(flat + step) for step in steps]

    def chain() -> list:
        found = []
        for step in steps:
            made = k.gated_residual(flat, step)  # our kernel writes what the next one reads
            found.append(of(made))
            del made  # ours writes into this memory in the next turn, while it may still be read
        return found

    chain()
    torch.cuda.synchronize()
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chain()
        graph.replay()
    else:
        found = chain()
    torch.cuda.synchronize()
    assert all(map(same_bits, found, expected))
    assert not same_bits(expected[0], expected[1])


@pytest.mark.gpu
@at_each_width
def test_cuda_graph_capture(k, op, width, gpu):
    inputs = make_inputs(op, BF16, "cuda", width=width)
    call(k, op, inputs)  # the first launch loads the module
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call(k, op, inputs)
    for tensor in inputs.values():
        tensor.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(outputs, call(k, op, inputs))


@pytest.mark.gpu
def test_the_device_is_that_of_the_inputs(k, op, gpu):
    """apex#1736: x on cuda:1 while cuda:0 is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    inputs = make_inputs(op, BF16, "cuda:1")
    outputs = call(k, op, inputs)
    assert all(output.device == torch.device("cuda:1") for output in outputs)
    assert torch.cuda.current_device() == 0
    on_first = call(k, op, {name: tensor.to("cuda:0") for name, tensor in inputs.items()})
    assert same_bits([output.cpu() for output in outputs], [output.cpu() for output in on_first])


# ---- torch.compile, opcheck, export, modes


class Calls(TorchDispatchMode):
    """The calls of this package's ops, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace.startswith("_ltx_kernels_"):
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", ["contiguous", "apart", "transposed", "required_alone"])
def test_opcheck(k, op, device, layout):
    inputs = make_inputs(op, BF16, device)
    if layout == "apart":
        inputs = {name: apart(tensor) if tensor.dim() > 1 else tensor for name, tensor in inputs.items()}
    if layout == "transposed":
        name = first_of(inputs)
        inputs[name] = inputs[name].transpose(0, 1).clone().transpose(0, 1)
    if layout == "required_alone":
        parameters = inspect.signature(getattr(k, op.function)).parameters
        inputs = {n: tensor for n, tensor in inputs.items() if parameters[n].default is inspect.Parameter.empty}
    with Calls() as recorded:
        call(k, op, inputs)
    assert len(recorded.calls) == 1
    for func, arguments in recorded.calls:
        torch.library.opcheck(func, arguments)


@pytest.mark.kernels_ci
def test_compile_fullgraph_with_dynamic_shapes_and_no_recompile(k, op, device, fresh_dynamo):
    """kernels-community#270, diffusers#11126: one graph for every batch and sequence length."""
    compiled = torch.compile(lambda inputs: call(k, op, inputs), fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for batch, tokens in ((5, 6), (3, 8), (7, 34), (2, 128)):
            inputs = make_inputs(op, BF16, device, batch=batch, tokens=tokens)
            outputs, expected = compiled(inputs), call(k, op, inputs)
            assert same_bits(outputs, expected)
            assert [output.stride() for output in outputs] == [output.stride() for output in expected]


def test_export(k, op, device):
    class Module(torch.nn.Module):
        def forward(self, inputs):
            return call(k, op, inputs)

    inputs = make_inputs(op, BF16, device)
    with torch.no_grad():
        exported = torch.export.export(Module(), (inputs,))
        assert same_bits(exported.module()(inputs), call(k, op, inputs))


def test_fake_and_meta_tensors_have_the_form_of_the_result(k, op, device):
    inputs = make_inputs(op, BF16, device)
    name = first_of(inputs)
    inputs[name] = inputs[name].transpose(0, 1).contiguous().transpose(0, 1)
    if "residual" in inputs:
        inputs["residual"] = inputs["residual"].float()
    real = call(k, op, inputs)
    fake = call(k, op, {name: tensor.to("meta") for name, tensor in inputs.items()})
    assert len(fake) == len(real)
    for f, r in zip(fake, real):
        assert (f.shape, f.dtype, f.stride(), f.device.type) == (r.shape, r.dtype, r.stride(), "meta")


def test_inference_mode_and_autocast(k, op, device):
    inputs = make_inputs(op, BF16, device)
    expected = call(k, op, inputs)
    with torch.inference_mode():
        assert same_bits(call(k, op, inputs), expected)
    with torch.autocast(device, dtype=BF16):
        assert same_bits(call(k, op, inputs), expected)


# ---- bad input


@pytest.mark.parametrize("op", [op for op in OPS.values() if op.function != "rms_norm"], ids=list(OPS)[1:])
def test_a_wanted_gradient_is_refused_where_there_is_no_backward(k, op, device):
    """Never a silent None: each input alone, and fine under no_grad."""
    inputs = make_inputs(op, FP32, device)
    for name in inputs:
        wanting = {**inputs, name: inputs[name].clone().requires_grad_()}
        with pytest.raises(RuntimeError, match=f"{op.function} has no backward"):
            call(k, op, wanting)
        with torch.no_grad():
            assert not any(output.requires_grad for output in call(k, op, wanting))


@pytest.mark.kernels_ci
def test_an_input_on_another_device_is_named(k, op, device):
    """CPU tensors beside CUDA ones; where there is only the CPU, the meta device stands in."""
    inputs = make_inputs(op, FP32, device)
    expected = call(k, op, inputs)
    first = first_of(inputs)
    for name in inputs if len(inputs) > 1 else ():
        with pytest.raises(RuntimeError, match="is on .*device of" if name == first else f"{name} is on .*device of"):
            call(k, op, {**inputs, name: inputs[name].to("cpu" if device == "cuda" else "meta")})
    if device == "cuda" and torch.cuda.device_count() > 1 and len(inputs) > 1:
        with pytest.raises(RuntimeError, match="cuda:1"):
            call(k, op, {**inputs, first: inputs[first].to("cuda:1")})
    assert same_bits(call(k, op, inputs), expected)


@pytest.mark.parametrize("wrong", [torch.float64, torch.int64, torch.int32, torch.bool, torch.complex64], ids=str)
def test_an_input_of_a_wrong_dtype_is_named(k, op, device, wrong):
    inputs = make_inputs(op, FP32, device)
    for name in inputs:
        with pytest.raises(RuntimeError, match=f"{name} has dtype .* is needed"):
            call(k, op, {**inputs, name: inputs[name].to(wrong)})


def test_no_dimension_is_refused(k, op, device):
    inputs = make_inputs(op, FP32, device)
    for name in inputs:
        message = rf"{name} has shape \[\].* needed|the shape of {name} is needed: \[\]"
        with pytest.raises(RuntimeError, match=message):
            call(k, op, {**inputs, name: torch.tensor(1.0, device=device)})


@pytest.mark.parametrize("wrong", [None, [1.0], 3, 2.5, "x", object()], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("grad", [True, False])
def test_something_that_is_no_tensor_is_named(k, op, device, wrong, grad):
    inputs = make_inputs(op, FP32, device)
    parameters = inspect.signature(getattr(k, op.function)).parameters
    for name in inputs:
        # qk_norm_rope asks for a k that may be None
        may_be_none = parameters[name].default is None or (name == "k" and op.function == "qk_norm_rope")
        if wrong is None and may_be_none:
            continue
        needed = "a tensor or None" if parameters[name].default is None else "a tensor"
        message = f"ltx_kernels: {name} is of type {type(wrong).__name__}; {needed} is needed"
        with torch.set_grad_enabled(grad), pytest.raises(TypeError, match=message):
            call(k, op, {**inputs, name: wrong})
    call(k, op, inputs)
