"""rms_norm's backward: both gradients against fp64 autograd, by reference.py's rule, on both backends."""

from __future__ import annotations

import pytest
import reference
import torch
import torch._dynamo
from conftest import DTYPES, misaligned, same_bits
from reference import assert_no_worse_than_eager
from test_norm import HIDDEN, VIEWS
from torch.utils.checkpoint import checkpoint

FP32, FP16, BF16 = DTYPES.values()


def gradients(k, grad_y, x, weight=None, **options):
    """``(grad_x, grad_weight)`` through the public function; grad_weight is None without a weight."""
    x = x.detach().requires_grad_()
    weight = None if weight is None else weight.detach().requires_grad_()
    y = k.rms_norm(x, weight, **options)
    assert y.requires_grad
    grads = torch.autograd.grad(y, [x] if weight is None else [x, weight], grad_y)
    return grads[0], None if weight is None else grads[1]


def check(k, grad_y, x, weight=None, **options):
    grads = gradients(k, grad_y, x, weight, **options)
    expected = reference.rms_norm_backward(grad_y, x, weight, **options)
    eager = reference.rms_norm_backward(grad_y, x, weight, **options, compute=FP32)
    for actual, e, r, of in zip(grads, eager, expected, (x, weight)):
        if of is not None:
            assert_no_worse_than_eager(actual, e, r, of.dtype)
    return grads


def make(shape, dtype, device, weight_dtype=None):
    """grad_y, x, weight."""
    grad_y, x = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    return grad_y, x, torch.randn(shape[-1], device=device).to(weight_dtype or dtype)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_every_hidden_size(k, device, dtype, hidden):
    # In a row of one, y is the sign of x and grad_x the eps alone: a large one, or there is nothing but cancellation.
    check(k, *make((5, hidden), dtype, device), eps=1.0 if hidden < 8 else 1e-6)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 527, 528, 529, 1055, 1056, 1057, 2113])
def test_rows_around_the_number_of_partial_sums(k, device, rows):
    check(k, *make((rows, 96), BF16, device))


@pytest.mark.parametrize("hidden", [40, 2048, 4100, 12000, 70000])
@pytest.mark.parametrize("rows", [7, 63, 64, 65, 255, 256, 257])
def test_rows_around_the_number_that_is_few(k, device, rows, hidden):
    """Of few rows grad_weight is summed from grad_y and x, not from partial sums, whatever their layout."""
    grad_y, x, weight = make((rows, hidden), BF16, device)
    grads = check(k, grad_y, x, weight)
    assert same_bits(gradients(k, grad_y.t().contiguous().t(), misaligned(x), weight), grads)


@pytest.mark.parametrize("rows,hidden", [(600, 12000), (601, 16384), (230, 20480), (250, 32768), (130, 65536)])
def test_clusters_that_walk_over_many_long_rows(k, device, rows, hidden):
    """Five turns and more: their sums take turns in two places, whose barriers change phase."""
    check(k, *make((rows, hidden), BF16, device))


def test_no_rows_of_any_length_have_a_weight_gradient_of_zeros(k, device, dtype):
    for hidden in (64, 4096, 16384, 70001):
        grad_x, grad_weight = gradients(k, *make((0, hidden), dtype, device))
        assert grad_x.shape == (0, hidden) and not grad_weight.any()


@pytest.mark.parametrize("weight_dtype", [None, *DTYPES.values()], ids=["absent", *DTYPES])
@pytest.mark.parametrize("hidden", [256, 1001])
def test_weights_of_every_dtype(k, device, dtype, weight_dtype, hidden):
    grad_y, x, weight = make((2, 9, hidden), dtype, device, weight_dtype)
    check(k, grad_y, x, None if weight_dtype is None else weight)


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_options(k, device, dtype, offset, cast):
    """Gemma's 1 + w, and Llama's rounding, whose weight saw the rounded value; the gradient passes straight through."""
    grad_y, x, weight = make((300, 512), dtype, device)
    check(k, grad_y, x, weight, eps=1e-5, weight_offset=offset, cast_before_weight=cast)
    check(k, grad_y, x, None, eps=1e-5, weight_offset=offset, cast_before_weight=cast)


def test_large_eps_has_its_part_in_the_gradient(k, device, dtype):
    grad_y, x, weight = make((6, 64), dtype, device)
    check(k, grad_y, x, weight, eps=1.0)


@pytest.mark.parametrize("rows", [32768, 65537])
def test_liger_950_weight_gradient_over_many_rows(k, device, dtype, rows):
    """A running sum in bf16 stops growing; ours is fp32 throughout, in any number of rows."""
    grad_y, x, weight = make((rows, 64), dtype, device)
    check(k, grad_y.add_(1), x.abs_(), weight)  # all terms of one sign: the sum grows with the rows


def test_quack_88_expanded_gradient(k, device, dtype):
    """.sum().backward() hands back one element with strides of zero."""
    _, x, weight = make((4, 6, 96), dtype, device)
    check(k, torch.ones((), dtype=dtype, device=device).expand(x.shape), x, weight)
    x.requires_grad_()
    k.rms_norm(x, weight).sum().backward()
    expected = reference.rms_norm_backward(torch.ones_like(x), x, weight)[0]
    eager = reference.rms_norm_backward(torch.ones_like(x), x, weight, compute=FP32)[0]
    assert_no_worse_than_eager(x.grad, eager, expected, dtype)


def test_unsloth_10617_transposed_gradient(k, device, dtype):
    _, x, weight = make((24, 40), dtype, device)
    check(k, torch.randn(40, 24, device=device).to(dtype).t(), x, weight)
    _, x, weight = make((3, 8, 40), dtype, device)
    check(k, torch.randn(8, 3, 40, device=device).to(dtype).transpose(0, 1), x, weight)


def test_flash_attention_781_one_dimension_and_repeated_calls(k, device, dtype):
    grad_y, x, weight = make((4,), dtype, device)
    first = gradients(k, grad_y, x, weight)
    for actual, expected in zip(first, reference.rms_norm_backward(grad_y, x, weight)):
        torch.testing.assert_close(actual, expected.to(dtype))
    for _ in range(3):
        assert same_bits(gradients(k, grad_y, x, weight), first)


@pytest.mark.parametrize("view", VIEWS)
def test_views(k, device, view):
    x = VIEWS[view](lambda *shape: torch.randn(shape, device=device).to(BF16))
    grad_y = VIEWS[view](lambda *shape: torch.randn(shape, device=device).to(BF16))
    weight = torch.randn(x.shape[-1], device=device).to(BF16)
    for of_grad in (grad_y, grad_y.contiguous()):
        for of_x in (x, x.contiguous()):
            check(k, of_grad, of_x, weight)


@pytest.mark.parametrize("hidden", [200, 2048, 16384])
def test_the_place_of_operands_does_not_change_bits(k, device, dtype, hidden):
    grad_y, x, weight = make((7, hidden), dtype, device)
    expected = gradients(k, grad_y, x, weight)
    assert same_bits(gradients(k, misaligned(grad_y), misaligned(x), misaligned(weight)), expected)
    assert same_bits(gradients(k, grad_y.t().contiguous().t(), x, weight), expected)


def test_only_what_is_wanted(k, device):
    grad_y, x, weight = make((6, 64), FP32, device)
    both = gradients(k, grad_y, x, weight)
    for wants_x, wants_weight in ((True, False), (False, True)):
        a, w = x.clone().requires_grad_(wants_x), weight.clone().requires_grad_(wants_weight)
        k.rms_norm(a, w).backward(grad_y)
        assert (a.grad is not None, w.grad is not None) == (wants_x, wants_weight)
        assert torch.equal(a.grad, both[0]) if wants_x else torch.equal(w.grad, both[1])


def test_nothing_is_recorded_where_no_gradient_is_wanted(k, device):
    _, x, weight = make((6, 64), FP32, device)
    assert not k.rms_norm(x, weight).requires_grad
    with torch.no_grad():
        assert not k.rms_norm(x.requires_grad_(), weight).requires_grad


def test_what_is_kept_for_the_backward(k, device):
    """x, the weight and one number a row; not y."""
    _, x, weight = make((64, 256), BF16, device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        k.rms_norm(x.requires_grad_(), weight.requires_grad_())
    assert sum(kept) <= x.numel() + weight.numel() + 64


@pytest.mark.kernels_ci
@pytest.mark.parametrize("hidden", [64, 2048, 20000])
def test_deterministic(k, device, dtype, hidden):
    """No atomics: both gradients have the same bits each time."""
    inputs = make((700, hidden) if hidden < 4096 else (40, hidden), dtype, device)
    first = gradients(k, *inputs)
    for _ in range(4):
        assert same_bits(gradients(k, *inputs), first)


@pytest.mark.parametrize("hidden", [8, 1000, 16384])
def test_grad_x_is_batch_invariant(k, device, dtype, hidden):
    grad_y, x, weight = make((37, hidden), dtype, device)
    whole, _ = gradients(k, grad_y, x, weight)
    for first, last in ((0, 1), (36, 37), (3, 20)):
        part, _ = gradients(k, grad_y[first:last], x[first:last], weight)
        assert torch.equal(part, whole[first:last])


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (0,)])
def test_zero_size(k, device, dtype, shape):
    grad_x, grad_weight = gradients(k, *make(shape, dtype, device))
    assert grad_x.shape == shape and grad_x.dtype == dtype
    assert torch.equal(grad_weight, torch.zeros(shape[-1], dtype=dtype, device=device)), "no rows: zeros, not memory"


def test_nan_stays_in_its_row_of_grad_x(k, device, dtype):
    grad_y, x, weight = make((5, 100), dtype, device)
    clean, _ = gradients(k, grad_y, x, weight)
    grad_y[2, 50] = float("nan")
    grad_x, grad_weight = gradients(k, grad_y, x, weight)
    assert grad_x[2].isnan().all() and torch.equal(grad_x[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    assert grad_weight.isnan().sum() == 1 and grad_weight[50].isnan()


def test_retained_graph_and_accumulation(k, device):
    grad_y, x, weight = make((6, 64), FP32, device)
    x.requires_grad_(), weight.requires_grad_()
    y = k.rms_norm(x, weight)
    y.backward(grad_y, retain_graph=True)
    once = x.grad.clone(), weight.grad.clone()
    y.backward(grad_y)
    assert torch.equal(x.grad, 2 * once[0]) and torch.equal(weight.grad, 2 * once[1])


def test_second_derivative_is_a_clear_error(k, device):
    """create_graph is fine as long as nobody asks for the second derivative, which would be wrong, not missing."""
    grad_y, x, weight = make((6, 64), FP32, device)
    first = gradients(k, grad_y, x, weight)
    x.requires_grad_()
    (grad_x,) = torch.autograd.grad(k.rms_norm(x, weight), x, grad_y, create_graph=True)
    assert torch.equal(grad_x, first[0])
    with pytest.raises(RuntimeError, match="rms_norm has no second derivative"):
        grad_x.sum().backward()
    assert same_bits(gradients(k, grad_y, x, weight), first)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(k, device, reentrant):
    grad_y, x, weight = make((6, 64), BF16, device)
    x.requires_grad_(), weight.requires_grad_()
    checkpoint(lambda t: k.rms_norm(t * 2, weight), x, use_reentrant=reentrant).backward(grad_y)
    expected = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    k.rms_norm(x * 2, weight).backward(grad_y)
    assert same_bits((x.grad, weight.grad), expected)


def test_input_changed_in_place_is_noticed(k, device):
    """The backward reads x; autograd must refuse one that was written to since."""
    grad_y, x, weight = make((6, 64), FP32, device)
    hidden_states = x.requires_grad_() * 1
    y = k.rms_norm(hidden_states, weight)
    hidden_states.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad_y)


# ---- torch.compile, opcheck ------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_dtype", [None, BF16, FP32], ids=["absent", "bf16", "fp32"])
def test_opcheck(k, device, weight_dtype):
    grad_y, x, weight = make((2, 3, 32), BF16, device, weight_dtype)
    weight = None if weight_dtype is None else weight.requires_grad_()
    ops = k._ops.ops
    torch.library.opcheck(ops.rms_norm_with_rstd.default, (x.requires_grad_(), weight, 1e-6, 0.0, False))
    _, rstd = ops.rms_norm_with_rstd(x.detach(), weight, 1e-6, 0.0, False)
    for wanted in (False, True):
        plain = None if weight is None else weight.detach()
        torch.library.opcheck(
            ops.rms_norm_backward.default, (grad_y, x.detach(), plain, rstd.detach(), 0.0, False, wanted)
        )


@pytest.mark.parametrize("has_weight", [True, False])
def test_compile_fullgraph_with_dynamic_shapes_and_no_recompile(k, device, fresh_dynamo, has_weight):
    compiled = torch.compile(lambda x, weight: k.rms_norm(x, weight), fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch, tokens in ((2, 5), (3, 7), (4, 33)):
            grad_y, x, weight = make((batch, tokens, 64), BF16, device)
            inputs = [x.requires_grad_(), weight.requires_grad_() if has_weight else None]
            grads = torch.autograd.grad(compiled(*inputs), inputs[: 1 + has_weight], grad_y)
            assert same_bits(grads, gradients(k, grad_y, *inputs)[: 1 + has_weight])


@pytest.mark.kernels_ci
def test_compile_with_inductor_among_other_ops(k, device, fresh_dynamo):
    """kernels-community#270; and an op compiled before its autograd formula exists would give None."""
    grad_y, x, weight = make((6, 64), FP32, device)

    def model(x, weight):
        return torch.nn.functional.silu(k.rms_norm(x + 1, weight)) * 2

    results = []
    for function in (model, torch.compile(model, fullgraph=True)):
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
        results.append(torch.autograd.grad(function(*inputs), inputs, grad_y))
    for eager, compiled in zip(*results):
        torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-4)


# ---- GPU only --------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_non_default_stream(k, gpu):
    grad_y, x, weight = make((64, 1024), BF16, "cuda")
    expected = gradients(k, grad_y, x, weight)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        grads = gradients(k, grad_y, late, weight)
    stream.synchronize()
    assert same_bits(grads, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [96, 4096, 40000])
def test_cuda_graph_capture(k, hidden, gpu):
    grad_y, x, weight = make((64, hidden), BF16, "cuda")
    x.requires_grad_(), weight.requires_grad_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.autograd.grad(k.rms_norm(x, weight), [x, weight], grad_y)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = torch.autograd.grad(k.rms_norm(x, weight), [x, weight], grad_y)
    with torch.no_grad():
        for tensor in (grad_y, x, weight):
            tensor.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(grads, gradients(k, grad_y, x, weight))


@pytest.mark.gpu
def test_the_device_is_that_of_x(k):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    check(k, *make((8, 512), BF16, "cuda:1"))
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_more_than_2_31_elements(k, gpu):
    """Liger#1483."""
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GB of free GPU memory")
    rows, hidden = 2**23 + 16, 256
    grad_y, x = (torch.empty(rows, hidden, device="cuda", dtype=BF16).normal_() for _ in range(2))
    weight = torch.randn(hidden, device="cuda", dtype=BF16)
    grad_x, grad_weight = gradients(k, grad_y, x, weight)
    for part in (slice(0, 64), slice(rows - 64, rows)):
        assert torch.equal(grad_x[part], gradients(k, grad_y[part], x[part], weight)[0])
    expected = torch.zeros(hidden, dtype=torch.float64, device="cuda")
    for begin in range(0, rows, 2**19):
        part = slice(begin, begin + 2**19)
        normed = reference.rms_norm(x[part])
        expected += (grad_y[part].double() * normed).sum(0)
    assert_no_worse_than_eager(grad_weight, expected, expected, BF16)
    del grad_y, x, grad_x
    torch.cuda.empty_cache()
