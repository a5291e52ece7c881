"""The gated activations, forward: geglu, swiglu, gelu.

Every test runs on both backends. Accuracy is judged by reference.py's rule; a regression test is named by the failure
that it guards.
"""

from __future__ import annotations

import pytest
import reference
import torch
import torch._dynamo
import torch.nn.functional as F
from conftest import DTYPES
from layouts import VIEWS, RandomLayouts, assert_nothing_copied
from reference import assert_no_worse_than_eager

FP32, FP16, BF16 = DTYPES.values()
FP64 = torch.float64

#: case -> (function, keyword arguments, operands); a packed operand has two halves, each as wide as the output.
CASES = {
    "geglu": ("geglu", {}, {"x": 2}),
    "geglu-tanh": ("geglu", {"approximate": "tanh"}, {"x": 2}),
    "geglu-gate_first": ("geglu", {"gate_first": True}, {"x": 2}),
    "swiglu": ("swiglu", {}, {"x": 2}),
    "swiglu-gate_last": ("swiglu", {"gate_first": False}, {"x": 2}),
    "swiglu-two_tensors": ("swiglu", {}, {"x": 1, "up": 1}),
    "gelu": ("gelu", {"approximate": "none"}, {"x": 1}),
    "gelu-tanh": ("gelu", {}, {"x": 1}),
}
#: One of each shape of arguments, where the formula does not matter.
FORMS = ("geglu", "swiglu-two_tensors", "gelu-tanh")
PACKED = [case for case in CASES if CASES[case][2] == {"x": 2}]

# Around the vector sizes, odd ones, and those that users reported.
WIDTHS = [1, 2, 3, 4, 7, 8, 9, 64, 127, 250, 1001, 3420, 4096, 13824]


@pytest.fixture(params=CASES)
def case(request) -> str:
    return request.param


def make_inputs(case, shape, dtype, device, size=2.0) -> dict:
    """Inputs for an output of this shape."""
    operands = CASES[case][2]
    return {
        name: (size * torch.randn(*shape[:-1], halves * shape[-1], device=device)).to(dtype)
        for name, halves in operands.items()
    }


def call(k, case, inputs):
    name, variant, _ = CASES[case]
    return getattr(k, name)(**inputs, **variant)


def check_layout(k, case, inputs):
    """The bits of contiguous inputs, on which `check` is for other tests: too few elements here for a statistic."""
    output = call(k, case, inputs)
    assert output.is_contiguous()
    contiguous = {n: t.clone(memory_format=torch.contiguous_format) for n, t in inputs.items()}
    assert torch.equal(output, call(k, case, contiguous))
    expected = getattr(reference, CASES[case][0])(**inputs, **CASES[case][1]).to(output.dtype)
    torch.testing.assert_close(output, expected, rtol=0.01 if output.dtype == BF16 else 1e-3, atol=1e-4)
    return output


def check(k, case, inputs):
    """The op against fp64 by the rule: a contiguous output of x's dtype, the inputs untouched."""
    name, variant, _ = CASES[case]
    before = {key: tensor.clone() for key, tensor in inputs.items()}
    output = call(k, case, inputs)
    for key, tensor in inputs.items():
        assert torch.equal(tensor, before[key]), f"{name} wrote to {key}"
    assert output.is_contiguous()
    expected, eager = (getattr(reference, name)(**inputs, **variant, compute=t) for t in (FP64, FP32))
    assert_no_worse_than_eager(output, eager, expected, inputs["x"].dtype)
    return output


# ---- sizes, dtypes, formulas -----------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_every_width(k, case, device, dtype, width):
    """flashinfer#5013: at 3420 in fp16 the second half of a packed tensor is not aligned for a vector."""
    check(k, case, make_inputs(case, (2, 200 if width < 10 else 10, width), dtype, device))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("width", [96, 1001, 2048])
def test_typical_sizes(k, case, device, dtype, width):
    check(k, case, make_inputs(case, (2, 64, width), dtype, device))


@pytest.mark.parametrize("rows", [0, 1, 255, 256, 257, 65535, 65536, 65537])
@pytest.mark.parametrize("form", FORMS)
def test_any_number_of_rows(k, form, device, rows):
    """apex#411: a grid dimension ends at 65535. Widths for each kind of access: a vector, a pair, an element."""
    for width in (8, 6, 3):
        check_layout(k, form, make_inputs(form, (rows, width), BF16, device))


def eager_in_dtype(case, inputs):
    """What a model computes today: each op rounds to the dtype."""
    name, variant, operands = CASES[case]
    if name == "gelu":
        return F.gelu(inputs["x"], approximate=variant.get("approximate", "tanh"))
    if "up" in operands:
        gate, value = inputs["x"], inputs["up"]
    else:
        gate, value = reference._halves(inputs["x"], variant.get("gate_first", name == "swiglu"))
    activated = F.silu(gate) if name == "swiglu" else F.gelu(gate, approximate=variant.get("approximate", "none"))
    return activated * value


@pytest.mark.parametrize("centre", [-20.0, -9.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 4.0, 20.0])
def test_accuracy_in_every_part_of_the_curve(k, case, device, dtype, centre):
    """An error in the tails drowns in the RMS of a whole normal distribution: a narrow one at each place."""
    for spread in (0.25, 1e-3):
        inputs = make_inputs(case, (64, 512), dtype, device, size=spread)
        inputs["x"] += centre
        name, variant, _ = CASES[case]
        expected = getattr(reference, name)(**inputs, **variant)
        if expected.abs().max() < torch.finfo(dtype).smallest_normal:
            continue  # nothing to be relative to
        assert_no_worse_than_eager(call(k, case, inputs), eager_in_dtype(case, inputs), expected, dtype)


def test_large_and_special_values(k, case, device, dtype):
    """What the formulas give: 0 far below, x far above, infinity for infinity, NaN for -infinity (-inf * 0) and NaN."""
    big = torch.finfo(dtype).max
    special = [0.0, -0.0, 1e-8, -1e-8, 1e4, -1e4, 6e4, -6e4, big, -big, 90.0, -90.0, 200.0, -200.0]
    special += [float("inf"), float("-inf"), float("nan")]
    gate = torch.tensor(special, device=device).to(dtype).repeat(3, 1)
    name, variant, operands = CASES[case]
    if case in PACKED:
        one = torch.ones_like(gate)
        gate_first = variant.get("gate_first", name == "swiglu")
        inputs = {"x": torch.cat([gate, one] if gate_first else [one, gate], -1)}
    else:
        inputs = {"x": gate, **{name: torch.ones_like(gate) for name in operands if name != "x"}}
    expected = getattr(reference, name)(**inputs, **variant).to(dtype)
    assert expected[0, 0] == 0 and expected[0, 4] == gate[0, 4] and expected[0, -3] == float("inf")
    assert expected[0, -2:].isnan().all()
    torch.testing.assert_close(call(k, case, inputs), expected, equal_nan=True, rtol=1e-6, atol=1e-30)


def test_a_special_value_stays_where_it_is(k, case, device, dtype):
    inputs = make_inputs(case, (5, 200), dtype, device)
    clean = call(k, case, inputs)
    for tensor in inputs.values():
        tensor[2, 17] = float("nan")
    output = call(k, case, inputs)
    assert output[2, 17].isnan()
    output[2, 17] = clean[2, 17]
    assert torch.equal(output, clean)


def test_the_value_is_not_activated(k, device, dtype):
    """Which half is which: diffusers' GEGLU gates with the second half, Llama's SwiGLU with the first."""
    first, second = (
        torch.full((4, 64), 3.0, device=device).to(dtype),
        torch.full((4, 64), -2.0, device=device).to(dtype),
    )
    x = torch.cat([first, second], -1)

    def close(actual, expected):
        torch.testing.assert_close(actual, expected.to(dtype), rtol=1e-2, atol=1e-4)

    close(k.geglu(x), first * F.gelu(second))
    close(k.geglu(x, gate_first=True), F.gelu(first) * second)
    close(k.geglu(x, approximate="tanh"), first * F.gelu(second, approximate="tanh"))
    close(k.swiglu(x), F.silu(first) * second)
    close(k.swiglu(x, gate_first=False), first * F.silu(second))
    close(k.swiglu(first, second), F.silu(first) * second)
    close(k.gelu(second), F.gelu(second, approximate="tanh"))
    close(k.gelu(second, approximate="none"), F.gelu(second))


@torch.no_grad()
def test_diffusers_classes(k, device, dtype):
    activations = pytest.importorskip("diffusers.models.activations")
    x = torch.randn(2, 33, 64, device=device).to(dtype)
    for module, function in (
        (activations.GEGLU(64, 96), k.geglu),
        (activations.SwiGLU(64, 96), lambda x: k.swiglu(x, gate_first=False)),
        (activations.GELU(64, 96), lambda x: k.gelu(x, approximate="none")),
        (activations.GELU(64, 96, approximate="tanh"), k.gelu),
    ):
        module = module.to(device, dtype)
        projected = module.proj(x)
        exact = type(module).forward(module.double(), x.double())
        stock = module.to(dtype)(x)
        ours = function(projected)
        assert ours.shape == stock.shape
        # The projection's rounding is in both, so the stock error bounds ours with some room for chance.
        assert reference.rms_error(ours, exact) <= 1.02 * reference.rms_error(stock, exact) + 1e-7


@torch.no_grad()
def test_transformers_llama_mlp(k, device, dtype):
    llama = pytest.importorskip("transformers.models.llama")
    config = llama.LlamaConfig(hidden_size=64, intermediate_size=160)
    mlp = llama.modeling_llama.LlamaMLP(config).to(device, dtype)
    x = torch.randn(2, 9, 64, device=device).to(dtype)
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    stock = mlp.act_fn(gate) * up
    assert_no_worse_than_eager(k.swiglu(gate, up), stock, reference.swiglu(gate, up), dtype)


# ---- layouts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [64, 50, 51])
def test_row_strided_inputs_are_read_in_place(k, case, device, dtype, width):
    """A slice of a fused projection (FLUX.2's to_qkv_mlp_proj), at starts of every alignment."""
    for start in (0, 1, 2, 4, 8):
        inputs = {}
        for name, tensor in make_inputs(case, (2, 5, width), dtype, device).items():
            wide = torch.randn(2, 5, tensor.shape[-1] + 40, device=device).to(dtype)
            wide[..., start : start + tensor.shape[-1]] = tensor
            inputs[name] = wide[..., start : start + tensor.shape[-1]]
        check_layout(k, case, inputs)
        assert_nothing_copied(lambda inputs=inputs: call(k, case, inputs))


VIEWS = {**VIEWS, "two columns of many": lambda r: r(6, 5)[:, 2:4]}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_every_rank(k, case, device, view):
    """What cannot be read in place is copied, never misread."""
    for dtype in (FP32, BF16):
        inputs = {
            name: VIEWS[view](lambda *shape, d=dtype: torch.randn(shape, device=device).to(d))
            for name in CASES[case][2]
        }
        check_layout(k, case, inputs)


@pytest.mark.parametrize("number", range(40))
def test_random_layouts(k, device, number):
    """Random rank, sizes, dtype, permutation, slice and offset of each operand."""
    random = RandomLayouts(number, device)
    pick = random.pick
    shape = tuple(pick(1, 2, 3) for _ in range(pick(0, 1, 2, 2, 3, 4))) + (pick(1, 5, 8, 24, 300, 2049),)
    case, dtype = pick(*CASES), pick(FP32, FP16, BF16)
    check_layout(k, case, {n: random.tensor((*shape[:-1], h * shape[-1]), dtype) for n, h in CASES[case][2].items()})


@pytest.mark.parametrize("shape", [(0,), (0, 0), (3, 0), (0, 8), (2, 0, 8), (2, 3, 0)])
def test_zero_size_inputs(k, case, device, dtype, shape):
    output = call(k, case, make_inputs(case, shape, dtype, device))
    assert output.shape == shape and output.dtype == dtype and output.device.type == device


@pytest.mark.gpu
@pytest.mark.parametrize(
    "form, shape",
    [
        ("geglu", (2**17 + 1, 16384)),
        ("geglu", (2**21 + 1, 1025)),
        ("swiglu-two_tensors", (2**31 // 8 + 3, 8)),
        ("gelu-tanh", (2**31 + 5,)),
        ("gelu-tanh", (2**23 + 1, 257)),
    ],
)
def test_more_than_2_31_elements(k, form, shape, gpu):
    needed = torch.Size(shape).numel() * 2 * (4 if form == "gelu-tanh" else 6)
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed >> 30} GB of free GPU memory")
    inputs = {
        name: torch.empty(*shape[:-1], halves * shape[-1], dtype=BF16, device="cuda").normal_()
        for name, halves in CASES[form][2].items()
    }
    output = call(k, form, inputs)
    last = shape[0]
    for part in (slice(0, 16), slice(last // 2, last // 2 + 16), slice(last - 16, last)):
        assert torch.equal(check(k, form, {n: t[part] for n, t in inputs.items()}), output[part])
    del output, inputs
    torch.cuda.empty_cache()


# ---- torch.compile ----------------------------------------------------------------------------------------


def test_compile_with_inductor_among_other_ops(k, device, fresh_dynamo):
    x = torch.randn(2, 6, 128, device=device, dtype=BF16)

    def block(x):
        gate, up = (x * 2).chunk(2, dim=-1)
        return k.geglu(x + 1) + k.swiglu(gate, up) * k.gelu(gate) - k.swiglu(x)

    with torch.no_grad():
        compiled = torch.compile(block, fullgraph=True)(x)
        torch.testing.assert_close(compiled, block(x), atol=0.1, rtol=0.05)


# ---- bad input -------------------------------------------------------------------------------------------


def test_two_tensors_of_different_dtypes(k, device):
    x, up = torch.randn(2, 16, device=device), torch.randn(2, 16, device=device)
    with pytest.raises(RuntimeError, match="up has dtype bfloat16; the dtype of x is needed: float32"):
        k.swiglu(x, up.bfloat16())


@pytest.mark.parametrize("shape", [(2, 3, 15), (2, 3, 1), (7,)])
def test_an_odd_packed_width(k, device, shape):
    x = torch.randn(shape, device=device)
    for function in (k.geglu, k.swiglu):
        with pytest.raises(RuntimeError, match=r"x has shape \[.*\]; an even last dimension is needed"):
            function(x)


@pytest.mark.parametrize("shape", [(2, 3, 15), (2, 3, 1), (1, 3, 16), (3, 16), (16,), (1, 2, 3, 16), ()])
def test_an_up_of_another_shape(k, device, shape):
    x = torch.randn(2, 3, 16, device=device)
    with pytest.raises(RuntimeError, match=r"up has shape \[.*\]; the shape of x is needed: \[2, 3, 16\]"):
        k.swiglu(x, torch.randn(shape, device=device))


@pytest.mark.parametrize("wrong", ["erf", "TANH", "", None, True])
def test_an_unknown_approximation(k, device, wrong):
    x = torch.randn(2, 16, device=device)
    for function in (k.geglu, k.gelu):
        with pytest.raises(ValueError, match="'none' or 'tanh' is needed"):
            function(x, approximate=wrong)


def test_an_unknown_activation_number(k, device):
    """The raw op has a number where the public functions have names."""
    x = torch.randn(2, 16, device=device)
    for number in (-1, 3):
        with pytest.raises(RuntimeError, match=f"activation is {number}; "):
            k._ops.ops.glu(x, number, True)
