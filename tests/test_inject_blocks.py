"""The linear layers of the fused blocks, as torch.compile sees them: two ops of their own."""

import ast
import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn


@pytest.fixture
def blocks(inner):
    return inner("blocks")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_linears_of_one_input_wherever_their_weights_lie(blocks, device, dtype, packed, bias):
    linears = [nn.Linear(24, n, bias=bias, device=device, dtype=dtype) for n in (16, 8, 40)]
    x = torch.randn(2, 3, 24, device=device, dtype=dtype)
    with torch.no_grad():
        expected = torch.cat([linear(x) for linear in linears], dim=-1)
        assert blocks.pack(linears) or not packed
        if not packed:
            blocks.unpack(linears)
        weights, biases = ([getattr(linear, name) for linear in linears] for name in ("weight", "bias"))
        y = blocks._linear_joined_op(x, weights, biases if bias else [])
    tolerance = 4 * torch.finfo(dtype).eps  # one GEMM or three: the order of the sums may differ
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)


def test_opcheck(blocks, device):
    x, weights, biases = torch.randn(2, 3, 24, device=device), torch.randn(2, 8, 24, device=device), torch.randn(2, 8)
    biases = biases.to(device)
    torch.library.opcheck(blocks._linear_joined_op, (x, list(weights.unbind()), list(biases.unbind())))
    if blocks.HAS_GELU_EPILOGUE:
        torch.library.opcheck(blocks._linear_gelu_op, (x, weights[0], biases[0]), rtol=1e-3, atol=1e-3)


def test_gelu_epilogue_is_the_tanh_formula(blocks, dtype):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: the epilogue is CUDA's")
    if dtype is torch.float32:
        pytest.skip("not used in fp32")
    linear = nn.Linear(64, 48, device="cuda", dtype=dtype)
    x = torch.randn(4, 7, 64, device="cuda", dtype=dtype)
    with torch.no_grad():
        exact = F.gelu(linear.double()(x.double()), approximate="tanh")
        linear.to(dtype)
        eager = F.gelu(linear(x), approximate="tanh")
        y = blocks.linear_gelu_tanh(x, linear)
        compiled = torch.compile(lambda: blocks.linear_gelu_tanh(x, linear), fullgraph=True)()
    assert (y - exact).norm() <= 1.1 * (eager - exact).norm()
    assert torch.equal(compiled, y)


def test_heads_concatenated_keep_their_layout(inner, device, dtype):
    """Of a slice of a QKV projection too. torch.cat gives [B, H, S, d] contiguous, and attention's output is copied."""
    concatenated = inner("heads").concatenated
    packed = torch.randn(2, 5, 3 * 4 * 8, device=device).to(dtype)
    image, text = packed[..., 32:64].unflatten(-1, (4, 8)), torch.randn(2, 3, 4, 8, device=device).to(dtype)
    for parts, dim in (([text, image], 1), ([image.transpose(1, 2), text.transpose(1, 2)], 2)):
        result = concatenated(parts, dim)
        assert torch.equal(result, torch.cat(parts, dim=dim))
        assert (result if dim == 1 else result.transpose(1, 2)).is_contiguous()
    assert torch.equal(concatenated([image.contiguous(), image], -1), torch.cat([image, image], -1))


@torch.no_grad()
@pytest.mark.parametrize("index", [(slice(None), slice(2, None)), (0, slice(2, None)), (0, 0)])
def test_a_slice_gets_its_bias_in_the_gemm(blocks, device, dtype, index):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Ops(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen.add(function.overloadpacket)
            return function(*args, **(kwargs or {}))

    linear = nn.Linear(16, 24, device=device, dtype=dtype)
    x = torch.randn(2, 7, 32, device=device, dtype=dtype)[:, :, ::2][index]
    exact = linear.double()(x.double())
    linear.to(dtype)
    with Ops() as stock_ops:
        stock = linear(x)
    with Ops() as ops:
        result = blocks.call_plain(linear, x)
    aten = torch.ops.aten
    assert aten.add in stock_ops.seen or x.dim() == 2
    assert aten.addmm in ops.seen and not {aten.add, aten.add_} & ops.seen
    assert result.shape == stock.shape
    assert (result - exact).norm() <= 1.01 * (stock - exact).norm() + 1e-6 * exact.norm()


@torch.no_grad()
@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("first", ["norm", "value", "add"])
def test_a_stream_taken_over_leaves_the_one_before_what_it_was(blocks, device, first, is_read):
    x, branch, other = torch.randn(3, 2, 5, 16, device=device).unbind()
    gate = (torch.randn(2, 1, 16, device=device), None)
    before = blocks.ResidualStream(x)
    before.add(branch, gate)
    if is_read:
        before.value()
    after = blocks.ResidualStream(before)
    if first == "norm":
        after.norm(nn.RMSNorm(16, eps=1e-6, device=device))
    elif first == "value":
        after.value()
    after.add(other)
    total = x + gate[0] * branch
    torch.testing.assert_close(after.value(), total + other)
    torch.testing.assert_close(before.value(), total)
    assert (before.shape, before.dtype) == (x.shape, x.dtype)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(), (1,), (2, 1, 16), (1, 5, 16)])
@pytest.mark.parametrize("has_table", [False, True])
def test_a_branch_that_a_hook_has_put_in_is_broadcast(blocks, device, shape, has_table):
    x, branch = torch.randn(2, 5, 16, device=device), torch.randn(shape, device=device)
    gate, table = torch.randn(2, 1, 16, device=device), torch.randn(16, device=device)
    stream = blocks.ResidualStream(x)
    stream.add(branch, (gate, table if has_table else None))
    torch.testing.assert_close(stream.value(), x + (gate + table if has_table else gate) * branch)


@torch.no_grad()
def test_a_stream_added_to_after_it_was_taken_over_keeps_its_branch(blocks, device):
    x, branch, other = torch.randn(3, 2, 5, 16, device=device).unbind()
    before = blocks.ResidualStream(x)
    before.add(branch)
    after = blocks.ResidualStream(before)
    before.add(other)
    torch.testing.assert_close(after.value(), x + branch)
    torch.testing.assert_close(before.value(), x + branch + other)


def doubled(module, args, output):
    return 2 * output


def negated(module, args):
    return (-args[0],)


CHANGES = {
    "nothing": lambda layer, monkeypatch: None,
    "hook": lambda layer, monkeypatch: layer.register_forward_hook(doubled),
    "pre-hook": lambda layer, monkeypatch: layer.register_forward_pre_hook(negated),
    "hook on all modules": lambda layer, monkeypatch: nn.modules.module.register_module_forward_hook(doubled),
    "own forward": lambda layer, monkeypatch: setattr(layer, "forward", lambda x: x + 1),
    "forward of the class": lambda layer, monkeypatch: monkeypatch.setattr(
        type(layer), "forward", lambda self, x: x + self.training + 1
    ),
    "subclass": lambda layer, monkeypatch: setattr(
        layer, "__class__", type("Other", (type(layer),), {"forward": lambda self, x: x + 1})
    ),
    "training": lambda layer, monkeypatch: layer.train(),
    "call of the class": lambda layer, monkeypatch: setattr(
        layer, "__class__", type("Other", (type(layer),), {"__call__": lambda self, x: x + 1})
    ),
    "call of all modules": lambda layer, monkeypatch: monkeypatch.setattr(nn.Module, "__call__", lambda self, x: x + 1),
}


LAYERS = [nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Dropout(), nn.Hardtanh()]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_to_a_layer_that_is_called_past_its_module(blocks, monkeypatch, layer, change):
    layer, x = copy.deepcopy(layer).eval(), torch.randn(3, 8)
    handle = CHANGES[change](layer, monkeypatch)
    try:
        with torch.no_grad():
            results = []
            for call in (layer, *(partial(call, layer) for call in (blocks.call_plain, blocks.call_forward))):
                torch.manual_seed(0)
                results.append(call(x))
    finally:
        if hasattr(handle, "remove"):
            handle.remove()
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize("call", ["call_plain", "call_forward"])
def test_backward_hooks_of_a_layer_run(blocks, call):
    layer, seen = nn.Linear(8, 8), []
    layer.register_full_backward_hook(lambda module, grads, more: seen.append(module))
    getattr(blocks, call)(layer, torch.randn(3, 8)).sum().backward()
    assert seen == [layer]


def test_a_compiled_layer_runs_what_was_compiled(blocks):
    class Plus(nn.Module):  # dynamo compiles no frame of torch.nn
        def forward(self, x):
            return x + 1

    layer, seen = Plus(), []
    layer.compile(backend=lambda graph, inputs: seen.append(graph) or graph.forward)
    with torch.no_grad():
        blocks.call_forward(layer, torch.randn(3, 8))
    assert len(seen) == 1


@pytest.mark.parametrize(
    "path", ["m.child", "m.layers[0]", "m.gone", "m.empty", "m.attribute", "m.missing", "m.empty[0]"]
)
def test_submodules_are_those_that_the_module_gives(inner, path):
    m = nn.Module()
    m.child, m.layers, m.gone, m.empty = nn.Linear(2, 2), nn.ModuleList([nn.GELU()]), nn.GELU(), nn.ModuleList()
    m.gone, m.attribute = None, "text"
    node = inner("rewriting").submodule(ast.parse(path, mode="eval").body)
    found = compile(ast.fix_missing_locations(ast.Expression(node)), path, "eval")
    try:
        expected = eval(path)
    except (AttributeError, IndexError) as error:
        with pytest.raises(type(error)):
            eval(found)
    else:
        assert eval(found) is expected
