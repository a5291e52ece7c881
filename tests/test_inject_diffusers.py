"""Diffusion models of diffusers other than LTX: what is fused in each family, and that the model stays what it was.

Tiny random models of the real classes (tiny_diffusers.py, which says the ops of a call too); LTX-Video and LTX-2 are in
test_inject_ltx.py.
"""

from __future__ import annotations

import copy
import functools
import gc
import sys
import weakref

import pytest
import tiny_models
import torch
from tiny_diffusers import FAMILIES
from tiny_models import OpCounter, count, relative
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

diffusers = pytest.importorskip("diffusers")


def run(model: nn.Module, inputs: dict) -> torch.Tensor:
    with torch.no_grad():
        result = model(**inputs)[0]
    return torch.stack(result) if isinstance(result, list) else result


def blocks_of(k, model: nn.Module) -> list[nn.Module]:
    """The blocks that are fused, of an injected model."""
    report = k.inject_optimized_kernels(model)
    names = [entry.name for entry in report.injected if entry.kind == "transformer_block"]
    return [model.get_submodule(name) for name in names]


def random_weights(model: nn.Module, seed: int) -> nn.Module:
    """Branches of the size of the residual stream: in a fresh model the rounding of the stream hides all else."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    return model


def calls_of(modules: list[nn.Module], model: nn.Module, inputs: dict) -> list[tuple]:
    """(module, args, kwargs) of the calls of some modules in a run of a model."""
    calls = []

    def keep(*call):
        calls.append(call)

    handles = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    run(model, inputs)
    for handle in handles:
        handle.remove()
    return calls


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """As from_pretrained loads it: some modules stay in fp32 (norms and tables of Wan)."""
    kept = model._keep_in_fp32_modules or ()
    for name, parameter in model.named_parameters():
        if not set(kept) & set(name.split(".")):
            parameter.data = parameter.data.to(dtype)
    return model


@pytest.fixture
def inner(k):
    """inner("heads"): a module of the loaded package's inject folder."""
    return lambda name: sys.modules[f"{k.__name__}.inject.{name}"]


@pytest.fixture
def flux():
    """(model, inputs, stock's output) of FLUX.1."""
    model, inputs = FAMILIES["flux"].build(), FAMILIES["flux"].inputs()
    return model, inputs, run(model, inputs)


# ---- each family


@pytest.mark.parametrize("name", FAMILIES)
def test_family_runs_the_kernels_and_keeps_its_output(k, device, name):
    family = FAMILIES[name]
    model = family.build().to(device)
    before = [dict(vars(m)) for m in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    expected = run(model, family.inputs(device))

    report = k.inject_optimized_kernels(model)
    for _ in range(2):
        assert relative(run(model, family.inputs(device)), expected) < 1e-5
    assert count(model, **family.inputs(device)) == family.ops
    assert not report.left_alone
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())

    assert k.remove_optimized_kernels(model) == len(report.injected)
    assert [dict(vars(m)) for m in model.modules()] == before
    assert not count(model, **family.inputs(device))
    assert torch.equal(run(model, family.inputs(device)), expected) or device == "cuda"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_half_precision_is_no_less_accurate_than_stock(k, device, name, dtype):
    """Each block on what it gets in the model, against fp64; the mean of a few, for one alone says nothing."""

    def cast(values, *to):
        return tree_map(lambda v: v.to(*to) if torch.is_tensor(v) and v.is_floating_point() else v, values)

    errors = torch.zeros(2)
    for seed in range(2):
        model = in_dtype(random_weights(FAMILIES[name].build(), seed), dtype).to(device)
        calls = calls_of(blocks_of(k, model), model, FAMILIES[name].inputs(device, dtype))
        k.remove_optimized_kernels(model)
        with torch.no_grad():
            for block, args, kwargs in calls:
                exact = copy.deepcopy(block).double()(*cast(args, torch.float64), **cast(kwargs, torch.float64))
                for i in range(2):
                    results = block(*args, **kwargs)
                    pairs = zip(*((r,) if torch.is_tensor(r) else r for r in (results, exact)))
                    for result, reference in pairs:
                        if result is not None:
                            assert result.dtype is dtype
                            errors[i] += relative(result, reference)
                    k.inject_optimized_kernels(block)
    assert errors[1] <= 1.01 * errors[0]


class RopeArguments(TorchDispatchMode):
    """The tensors that the ops with a rotation get."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "norm_rope" in func._schema.name:
            self.tensors += [a for a in args if isinstance(a, torch.Tensor)]
            # [B, S, H, d]: the kernel takes a few hundred heads at most
            assert args[0].dim() == 3 or args[0].stride(1) >= args[0].stride(2)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "qk_norm_rope" in family.ops])
def test_query_key_and_tables_are_whole_vectors(k, name):
    """What else comes to the op is read element by element, on a GPU: several times as slow."""
    model = FAMILIES[name].build()
    k.inject_optimized_kernels(model)
    with RopeArguments() as rope:
        run(model, FAMILIES[name].inputs())
    assert rope.tensors
    for tensor in rope.tensors:
        assert tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0
        assert all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])


# ---- deferred values: what a forward may do with them


class Odd(nn.Module):
    """A block that uses its stream in every order."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32, elementwise_affine=False)
        self.affine = nn.LayerNorm(32)
        self.rms = nn.RMSNorm(32, eps=1e-6)
        self.linear = nn.Linear(32, 32)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x, branch, gate, scale, shift, *rest, chunk=None, **options):
        h = x + gate * branch
        a = self.norm(h) * (1 + scale[:, None]) + shift[:, None]  # a sum and its norm
        b = (1.0 + scale)[:, None] * self.rms(h)  # a second norm of the sum
        c = h * 2 + a - b  # and the sum itself
        d = shift[:, None] + self.norm(x)  # a shift without a scale
        e = self.rms(h) + h
        p = branch * gate
        f = p + p * p
        g = (x.float() + branch * gate.float()).type_as(x)  # a chain in fp32
        i = self.norm(g.float()).to(x.dtype)
        j = self.norm(h)[:, 1:] * (1 + scale[:, None]) + shift[:, None]
        m = torch.cat([a, self.act(self.linear(self.affine(h)))], dim=-1)
        n = (h > 0).to(x.dtype) * -h
        first, second = self.norm(x + branch)  # along the batch
        o = gate * gate + gate
        q = (x + 3 * branch) * (1 + scale[:, None])
        r = h
        r = r + gate * branch if chunk is None else r
        s = self.affine(r)
        t = self.norm(r) * (1 + branch) + x  # a modulation for each token
        u = [self.norm(x) * (1 + scale[:, None]), (s, r.shape, r.dtype, r.ndim)]
        v = x + self.norm(branch)
        w = x + gate * self.rms(branch)
        y = self.norm(x.float()).to(x.dtype) * (1 + scale[:, None]) + shift[:, None]  # cast before the modulation
        y = [y, (self.norm(x.float()) * (1 + gate.float())).to(x.dtype) + gate]
        wide = (x.float() + branch.float()).to(torch.float64)
        z = [self.norm(wide), wide, (x.float() + branch.float()).to(torch.int64)]
        first_of = [(x + branch)[:1, :1, :1], 1 if x[:1, :1, :1] * (0 * branch[:1, :1, :1]) else 2, len(x + branch)]
        single = [self.norm(x) * (1 + scale.mean()), gate.mean() * branch + x]  # a factor without dimensions
        u = [u, y, z, first_of, single]
        return a, b, c, d, e, f, g, i, j, m, n, first, second, o, q, s, t, u, v, self.norm(w), w, len(rest), options


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 3, (torch.bfloat16,) * 3, (torch.bfloat16, torch.bfloat16, torch.float32)]
)
def test_any_order_of_operations_gives_what_stock_gives(k, device, inner, dtypes):
    """In values, in dtypes, and where a modulation is in fp32 in the result of the promotion."""
    x_dtype, gate_dtype, scale_dtype = dtypes
    torch.manual_seed(0)
    module = Odd().to(device, x_dtype)
    forward = inner("streams").plan("odd", lambda cls: False)(module)
    x, branch = (torch.randn(2, 5, 32, device=device, dtype=x_dtype) for _ in range(2))
    gate = torch.randn(2, 1, 32, device=device, dtype=gate_dtype)
    scale, shift = torch.randn(2, 64, device=device, dtype=scale_dtype).chunk(2, dim=1)
    for options in ({}, {"chunk": 1, "more": 2}):
        with torch.no_grad():
            expected = module(x, branch, gate, scale, shift, 1, **options)
        with torch.no_grad(), OpCounter() as ops:
            result = forward(module, x, branch, gate, scale, shift, 1, **options)
        assert ops.calls["residual_ada_norm"] >= 2 and ops.calls["ada_norm"] >= 2
        leaves, expected_leaves = tree_flatten(result)[0], tree_flatten(expected)[0]
        assert len(leaves) == len(expected_leaves)
        for ours, theirs in zip(leaves, expected_leaves):
            if torch.is_tensor(theirs):
                assert type(ours) is torch.Tensor and ours.dtype is theirs.dtype
                assert relative(ours, theirs) < (1e-5 if x_dtype is torch.float32 else 2e-2)
            else:
                assert ours == theirs


def heads_in_any_order(ops, norm, k_norm, wide_norm, apply_rotary_emb, q, k, tables):
    """As a processor might: `ops` has norm, rope, cat and put."""
    table = tuple(t[2:] for t in tables)
    a, b = ops.norm(norm, q), ops.norm(k_norm, k)
    yield a, b  # a norm alone
    c = ops.rope(apply_rotary_emb, ops.norm(norm, q), tables, sequence_dim=1)
    yield c[:, 1:3], c, c.shape, c.dtype
    d = ops.norm(norm, q)
    yield ops.put(d, (slice(None), slice(2, None)), ops.rope(apply_rotary_emb, d[:, 2:], table, sequence_dim=1))
    e = ops.norm(norm, q).clone()
    yield ops.put(e, (slice(None), slice(0, 4)), ops.rope(apply_rotary_emb, e[:, 2:], table, sequence_dim=1))
    f = ops.norm(norm, q)  # not the two parts of one tensor in their order
    yield ops.cat([f[:, 2:], ops.rope(apply_rotary_emb, f[:, 2:], table, sequence_dim=1)], dim=1)
    yield ops.cat([ops.rope(apply_rotary_emb, f[:, :4], table, sequence_dim=1), f[:, 4:]], dim=1)
    yield ops.cat([ops.norm(norm, q)[:, :2], ops.norm(k_norm, k)[:, -2:]], dim=1)
    g = ops.norm(wide_norm, q.flatten(2)).unflatten(2, (4, -1))
    yield g[:, :, :2], g[:, 1:]
    yield ops.rope(apply_rotary_emb, g, tables, sequence_dim=1), g
    h = ops.norm(norm, q.transpose(1, 2))  # [B, H, S, d]
    yield ops.rope(apply_rotary_emb, h, tables), ops.rope(apply_rotary_emb, h[:, :, 2:], table), h.transpose(1, 2)
    i = ops.cat([ops.norm(norm, q[:, :2]), ops.norm(k_norm, k[:, 2:])], dim=1)
    yield ops.rope(apply_rotary_emb, i, tables, sequence_dim=1), ops.rope(apply_rotary_emb, q, tables, sequence_dim=1)
    halves = tuple(torch.cat((t[:, ::2], t[:, ::2]), 1) for t in tables)
    yield ops.rope(apply_rotary_emb, ops.norm(norm, q), halves, sequence_dim=1, use_real_unbind_dim=-2)
    either = tuple(t[:, :1].repeat(1, 16) for t in tables)  # the same tables, read in two ways
    yield [ops.rope(apply_rotary_emb, q, either, sequence_dim=1, use_real_unbind_dim=dim) for dim in (-1, -2, -1)]
    j = q.clone()
    m = ops.norm(norm, j)  # of what is written to afterwards
    yield ops.put(j, (slice(None), slice(2)), k[:, :2]), m
    yield ops.rope(
        apply_rotary_emb, q.transpose(1, 2)[:, :2], tuple(t[:2] for t in tables), sequence_dim=1, use_real=True
    )


class Eagerly:
    """The operations as the library computes them."""

    cat = staticmethod(torch.cat)

    @staticmethod
    def norm(norm, x):
        return norm(x)

    @staticmethod
    def rope(function, x, *args, **options):
        return function(x, *args, **options)

    @staticmethod
    def put(x, index, values):
        x = x.clone()
        x[index] = values
        return x


@pytest.mark.parametrize("norms", ["LayerNorm", "FP32LayerNorm", "RMSNorm", "MochiRMSNorm"])
def test_query_and_key_in_any_order_of_operations(k, device, inner, norms):
    from diffusers.models import normalization
    from diffusers.models.embeddings import apply_rotary_emb

    heads, norms = inner("heads"), getattr(normalization, norms)
    assert inner("norms").know_norm(norms)
    norm, k_norm, wide_norm = (tiny_models.randomize(norms(n, eps=1e-5)).to(device) for n in (16, 16, 64))
    with torch.no_grad():
        for each in (k_norm, wide_norm):
            each.weight.add_(torch.randn(each.weight.shape, device=device))
    query, key = (torch.randn(2, 6, 4, 16, device=device) for _ in range(2))
    angles = torch.randn(6, 8, device=device).repeat_interleave(2, dim=1)
    arguments = (norm, k_norm, wide_norm, apply_rotary_emb, query, key, (angles.cos(), angles.sin()))
    rope = inner("rotations").ROPES["diffusers.models.embeddings", "apply_rotary_emb"]
    step = heads.Step(((apply_rotary_emb, rope),), None)
    with torch.no_grad(), OpCounter() as ops:
        expected = list(heads_in_any_order(Eagerly, *arguments))
        results = [inner("deferred").value(result) for result in heads_in_any_order(step, *arguments)]
    for number, (ours, theirs) in enumerate(zip(results, expected)):
        for a, b in zip(tree_flatten(ours)[0], tree_flatten(theirs)[0]):
            assert relative(a, b) < 1e-5 if torch.is_tensor(b) else a == b, number
    assert ops.calls["qk_norm_rope"] + ops.calls["q_norm_rope"] >= 15


class WritesToTheBranch(nn.Module):
    """x + gate * branch, and what then happens to the branch."""

    norm = nn.LayerNorm(32)

    def method(self, x, branch):
        h = x + branch * x
        branch.mul_(2)
        return self.norm(h), branch

    def function(self, x, branch):
        h = x + branch * x
        torch.relu_(branch)
        return self.norm(h), branch

    def out(self, x, branch):
        h = x + branch * x
        torch.add(x, 1, out=branch)
        return self.norm(h), branch

    def view(self, x, branch):
        h, row = x + branch * x, branch[0]
        row[:2] = 0
        return self.norm(h), branch

    def autocast(self, x, branch):
        with torch.autocast("cpu", torch.bfloat16):
            h = x + branch @ branch.mT @ x
        return self.norm(h), branch


@pytest.mark.parametrize("what", ["method", "function", "out", "view", "autocast"])
def test_a_forward_that_writes_to_operands_is_left_alone(k, inner, what):
    """What is put off would be made of other values, or in another state of torch."""
    cls = type("Writes", (WritesToTheBranch,), {"forward": getattr(WritesToTheBranch, what)})
    reason = inner("streams").plan("odd", lambda cls: False)(cls())
    assert reason == (
        f"its {what} holds what this package does not follow ({'With' if what == 'autocast' else 'in-place operation'})"
    )


# ---- when a call belongs to the class's own code


@pytest.mark.parametrize("name", ["flux", "sdxl", "wan2.1", "lumina2"])
def test_float64_gradients_and_autocast_run_stock(k, name):
    family = FAMILIES[name]
    model = family.build()
    stock = copy.deepcopy(model)
    k.inject_optimized_kernels(model)
    for each in (stock, model):
        each(**family.inputs())[0].square().mean().backward()
    for ours, theirs in zip(model.parameters(), stock.parameters()):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad) or relative(ours.grad, theirs.grad) < 1e-4
    with torch.autocast("cpu", torch.bfloat16):
        result, expected = run(model, family.inputs()), run(stock, family.inputs())
    assert result.dtype is expected.dtype and relative(result, expected) < 2e-2
    inputs = family.inputs(dtype=torch.float64)
    assert relative(run(model.double(), inputs), run(stock.double(), inputs)) < 1e-6
    assert set(count(model, **inputs)) <= {"layer_norm"}  # FP32LayerNorm, which Wan gives fp32 in any model


def test_fp16_overflow_is_clipped_as_in_stock(k):
    """A branch of ten thousands on a stream near the largest number of fp16."""
    model = random_weights(FAMILIES["flux"].build(), 0).half()
    inputs = FAMILIES["flux"].inputs(dtype=torch.float16)
    for block, last in (
        (model.transformer_blocks[0], "ff_context.net.2"),
        (model.single_transformer_blocks[0], "proj_out"),
    ):
        ((_, args, kwargs),) = calls_of([block], model, inputs)
        text = kwargs["encoder_hidden_states"]
        kwargs = {**kwargs, "encoder_hidden_states": 60000 * torch.sign(text)}
        with torch.no_grad():
            block.get_submodule(last).bias.fill_(20000.0)
            expected = block(*args, **kwargs)[0]
            k.inject_optimized_kernels(block)
            result = block(*args, **kwargs)[0]
        assert result.abs().max() == expected.abs().max() == 65504
        assert relative(result, expected) < 1e-2


def test_a_patched_rotation_is_used(k, flux, monkeypatch):
    """Somebody replaces the function in the module that calls it, before or after the injection."""
    model, inputs, expected = flux
    module = sys.modules[type(model).__module__]
    stock = module.apply_rotary_emb

    def no_rotation(x, *args, **kwargs):
        return x

    k.inject_optimized_kernels(model)
    monkeypatch.setattr(module, "apply_rotary_emb", no_rotation)
    changed = run(model, inputs)
    k.remove_optimized_kernels(model)
    assert relative(changed, run(model, inputs)) < 1e-5 and relative(changed, expected) > 1e-3
    monkeypatch.setattr(module, "apply_rotary_emb", stock)
    assert torch.equal(run(model, inputs), expected)


def twice(function, wraps: bool):
    """A function that somebody puts in the place of one of the library: its results times two."""

    def changed(*args, **kwargs):
        return tree_map(lambda t: 2 * t if torch.is_tensor(t) else t, function(*args, **kwargs))

    return functools.wraps(function)(changed) if wraps else changed


REPLACED = {
    "forward of a block": ("flux", "transformer_flux", "FluxTransformerBlock.forward"),
    "forward of a single block": ("flux", "transformer_flux", "FluxSingleTransformerBlock.forward"),
    "call of a processor": ("flux", "transformer_flux", "FluxAttnProcessor.__call__"),
    "followed function": ("flux", "transformer_flux", "_get_qkv_projections"),
    "rotation": ("qwen_image", "transformer_qwenimage", "apply_rotary_emb_qwen"),
    "method of a block": ("qwen_image", "transformer_qwenimage", "QwenImageTransformerBlock._modulate"),
    "forward of a modulated norm": ("flux", "transformer_flux", "AdaLayerNormZero.forward"),
    "forward of a norm": ("flux", "transformer_flux", "nn.LayerNorm.forward"),
}


@pytest.mark.parametrize("wraps", [False, True], ids=["function", "wrapper"])
@pytest.mark.parametrize("name, path", [("flux", "RMSNorm"), ("wan2.1", "FP32LayerNorm"), ("mochi", "MochiRMSNorm")])
def test_a_forward_that_somebody_gave_a_class_before_the_injection_is_left_alone(k, monkeypatch, name, path, wraps):
    """A class whose forward is not read, but known by its name."""
    from diffusers.models import normalization

    cls = nn.RMSNorm if path == "RMSNorm" else getattr(normalization, path)
    family = FAMILIES[name]
    model, inputs = family.build(), family.inputs()
    monkeypatch.setattr(cls, "forward", twice(cls.forward, wraps))
    expected = run(model, inputs)
    report = k.inject_optimized_kernels(model)
    reasons = {entry.reason for entry in report.left_alone if entry.cls == cls.__name__}
    taken_as = "something else has replaced the forward of its class" if wraps else "its forward takes other parameters"
    assert len(reasons) == 1 and reasons.pop().startswith(taken_as)
    assert relative(run(model, inputs), expected) < 1e-5


@pytest.mark.parametrize("wraps", [False, True], ids=["function", "wrapper"])
@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("what", REPLACED)
def test_what_somebody_replaces_in_the_library_is_used(k, monkeypatch, what, when, wraps):
    """On the class or in the module: before the injection, between two, or after it."""
    name, module, path = REPLACED[what]
    family = FAMILIES[name]
    model, inputs = family.build(), family.inputs()
    stock = run(model, inputs)
    *owner, attribute = path.split(".")
    target = functools.reduce(getattr, owner, sys.modules[f"diffusers.models.transformers.{module}"])
    if when != "before":
        k.inject_optimized_kernels(model)
        run(model, inputs)
    if when == "between":
        k.remove_optimized_kernels(model)
    monkeypatch.setattr(target, attribute, twice(getattr(target, attribute), wraps))
    if when != "after":
        k.inject_optimized_kernels(model)
    result = run(model, inputs)
    k.remove_optimized_kernels(model)
    expected = run(model, inputs)
    assert relative(result, expected) < 1e-5 and relative(expected, stock) > 1e-3
    monkeypatch.undo()
    k.inject_optimized_kernels(model)
    assert relative(run(model, inputs), stock) < 1e-5
    assert count(model, **inputs) == family.ops


def test_a_method_on_an_instance_is_used(k):
    family = FAMILIES["qwen_image"]
    model, inputs = family.build(), family.inputs()
    k.inject_optimized_kernels(model)
    stock = run(model, inputs)
    block = model.transformer_blocks[0]
    block._modulate = twice(block._modulate, False)
    result = run(model, inputs)
    k.remove_optimized_kernels(model)
    assert relative(result, run(model, inputs)) < 1e-5 and relative(result, stock) > 1e-3


@pytest.mark.parametrize("kind", ["attribute", "buffer"])
@pytest.mark.parametrize("name", ["flux", "wan2.1"])
def test_weights_of_norms_that_are_no_parameters_are_used(k, name, kind):
    """FSDP gives modules plain tensors in the place of parameters."""
    family = FAMILIES[name]
    model, inputs = family.build(), family.inputs()
    expected = run(model, inputs)
    k.inject_optimized_kernels(model)
    for path, parameter in list(model.named_parameters()):
        if "norm" in path and parameter.dim() == 1 and not path.endswith("linear.bias"):
            owner, attribute = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
            delattr(owner, attribute)
            if kind == "buffer":
                owner.register_buffer(attribute, parameter.detach())
            else:
                setattr(owner, attribute, parameter.detach())
    assert relative(run(model, inputs), expected) < 1e-5


# ---- processors


class Counting:
    """A processor that is somebody else's: stock's result and a count."""

    def __init__(self, inner):
        self.inner, self.calls = inner, 0

    def __call__(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None, **kwargs
    ):
        self.calls += 1
        return self.inner(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb, **kwargs)


@pytest.mark.parametrize("order", ["inject_first", "processor_first"])
@pytest.mark.parametrize("name", ["flux", "cogvideox"])
def test_another_attention_processor_is_used(k, name, order):
    family = FAMILIES[name]
    model = family.build()
    expected = run(model, family.inputs())
    if order == "inject_first":
        k.inject_optimized_kernels(model)
    processors = {path: Counting(processor) for path, processor in model.attn_processors.items()}
    model.set_attn_processor(dict(processors))
    report = k.inject_optimized_kernels(model)
    assert relative(run(model, family.inputs()), expected) < 1e-5
    assert all(processor.calls == 1 for processor in processors.values())
    assert not count(model, **family.inputs())["qk_norm_rope"]
    if order == "processor_first":
        assert {entry.reason for entry in report.left_alone} == {
            "its processor Counting is not one that this package knows"
        }


def test_ip_adapter_of_flux(k, flux):
    """Its processor is a module with weights, and returns three results."""
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    model, inputs, stock = flux
    torch.manual_seed(1)
    for block in model.transformer_blocks:
        block.attn.set_processor(FluxIPAdapterAttnProcessor(64, 64).eval())
    inputs["joint_attention_kwargs"] = {"ip_hidden_states": [torch.randn(2, 3, 64)]}
    expected = run(model, inputs)
    assert relative(stock, expected) > 1e-3
    k.inject_optimized_kernels(model)
    assert relative(run(model, inputs), expected) < 1e-5
    assert count(model, **inputs)["qk_norm_rope"] == len(model.single_transformer_blocks)


@pytest.mark.parametrize("order", ["inject_first", "fuse_first"])
@pytest.mark.parametrize("name", ["sdxl", "sd3", "flux", "flux2", "wan2.1", "cogvideox"])
def test_fused_qkv_projections(k, name, order):
    """The model's own fusion: another processor, or another path of the same."""
    family = FAMILIES[name]
    model = family.build()
    expected = run(model, family.inputs())
    steps = [model.fuse_qkv_projections, lambda: k.inject_optimized_kernels(model)]
    for step in steps if order == "fuse_first" else reversed(steps):
        step()
    assert relative(run(model, family.inputs()), expected) < 1e-5
    assert count(model, **family.inputs()) == family.ops
    model.unfuse_qkv_projections()
    assert count(model, **family.inputs()) == family.ops
    assert relative(run(model, family.inputs()), expected) < 1e-5


@pytest.mark.parametrize("name", ["flux", "flux2", "wan2.1", "hunyuan_video", "qwen_image", "z_image"])
def test_attention_backend_and_its_arguments_reach_the_dispatcher(k, name, monkeypatch):
    family = FAMILIES[name]
    model = family.build()
    module = sys.modules[type(model).__module__]
    expected = run(model, family.inputs())
    k.inject_optimized_kernels(model)
    model.set_attention_backend("_native_math")
    seen = []
    stock = module.dispatch_attention_fn

    def keep(*args, **kwargs):
        seen.append(kwargs["backend"])
        return stock(*args, **kwargs)

    monkeypatch.setattr(module, "dispatch_attention_fn", keep)
    assert relative(run(model, family.inputs()), expected) < 1e-5
    assert seen and {backend.value for backend in seen} <= {"_native_math"}
    assert count(model, **family.inputs())["qk_norm_rope"] == family.ops["qk_norm_rope"]


def pack(inner, model: nn.Module) -> int:
    """As injection does it with wide projections on a GPU; how many."""
    attentions = [module for module in model.modules() if hasattr(module, "to_q")]
    groups = [linears for attention in attentions for linears in inner("heads").projections(attention)]
    return sum(map(inner("blocks").pack, groups))


class Gemms(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return func(*args, **(kwargs or {}))


#: projections of one input that become one GEMM each: of three, of two
PACKED = {"flux": (6, 0), "sdxl": (8, 8), "sd3.5": (5, 0), "wan2.1": (2, 2), "qwen_image": (4, 0), "cogvideox": (2, 0)}


@pytest.mark.parametrize("name", PACKED)
def test_packed_projections_are_one_gemm(k, inner, name):
    family = FAMILIES[name]
    model = family.build()
    state = {n: p.clone() for n, p in model.named_parameters()}
    expected = run(model, family.inputs())
    k.inject_optimized_kernels(model)
    with torch.no_grad(), Gemms() as before:
        model(**family.inputs())
    threes, twos = PACKED[name]
    assert pack(inner, model) == threes + twos
    with torch.no_grad(), Gemms() as after:
        model(**family.inputs())
    assert before.calls - after.calls == 2 * threes + twos
    assert relative(run(model, family.inputs()), expected) < 1e-5
    moved = copy.deepcopy(model)  # parted: a GEMM each again
    with torch.no_grad(), Gemms() as parted:
        assert relative(moved(**family.inputs())[0], expected) < 1e-5
    assert parted.calls == before.calls
    k.remove_optimized_kernels(model)
    assert all(
        p.untyped_storage().nbytes() == p.nbytes and torch.equal(p, state[n]) for n, p in model.named_parameters()
    )


@pytest.mark.gpu
def test_wide_projections_are_packed_on_a_gpu(k):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    family = FAMILIES["flux"]
    sizes = {"num_attention_heads": 16, "attention_head_dim": 128, "axes_dims_rope": (16, 56, 56)}
    model = family.build(**sizes, num_layers=1, num_single_layers=1).to("cuda", torch.bfloat16)
    inputs = family.inputs("cuda", torch.bfloat16)
    expected = run(model, inputs)
    k.inject_optimized_kernels(model)
    for attn in (model.transformer_blocks[0].attn, model.single_transformer_blocks[0].attn):
        weights = [attn.to_q.weight, attn.to_k.weight, attn.to_v.weight]
        assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    assert relative(run(model, inputs), expected) < 2e-2


@pytest.mark.parametrize("path", ["to_k", "add_q_proj"])
def test_packed_projections_with_a_hook_are_called_as_modules(k, flux, inner, path):
    model, inputs, expected = flux
    k.inject_optimized_kernels(model)
    pack(inner, model)
    seen = []
    model.transformer_blocks[0].attn.get_submodule(path).register_forward_hook(lambda *_: seen.append(1))
    assert relative(run(model, inputs), expected) < 1e-5
    assert len(seen) == 1


# ---- hooks, adapters, offload, caches


@pytest.mark.parametrize(
    "path",
    [
        "transformer_blocks.0.norm1",
        "transformer_blocks.0.norm1.norm",
        "transformer_blocks.0.norm2",
        "transformer_blocks.0.attn.norm_q",
        "transformer_blocks.0.attn.norm_added_k",
        "transformer_blocks.0.attn.to_v",
        "transformer_blocks.0.ff.net.0.proj",
        "single_transformer_blocks.1.act_mlp",
        "single_transformer_blocks.1.proj_mlp",
        "single_transformer_blocks.1.norm",
    ],
)
def test_module_hooks_inside_a_block_run(k, flux, path):
    """A hook that changes an output changes the result as in stock."""
    model, inputs, expected = flux
    stock, ours = model, copy.deepcopy(model)
    k.inject_optimized_kernels(ours)

    def change(module, args, output):
        return tree_map(lambda t: 1.5 * t, output)

    for each in (stock, ours):
        handle = each.get_submodule(path).register_forward_hook(change)
    assert relative(run(ours, inputs), run(stock, inputs)) < 1e-5
    assert relative(run(ours, inputs), expected) > 1e-4
    handle.remove()
    assert count(ours, **inputs) == FAMILIES["flux"].ops


def test_lora_added_and_deleted_after_injection(k, flux):
    peft = pytest.importorskip("peft")
    model, inputs, expected = flux
    adapted = copy.deepcopy(model)
    targets = ["to_q", "add_k_proj", "to_out.0", "net.0.proj", "proj_mlp", "proj_out", "norm1.linear"]
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)

    def add(each):
        torch.manual_seed(1)
        each.add_adapter(config, "test")

    add(adapted)
    with_adapter = run(adapted, inputs)
    assert relative(with_adapter, expected) > 1e-3
    k.inject_optimized_kernels(model)
    add(model)
    assert relative(run(model, inputs), with_adapter) < 1e-5
    assert count(model, **inputs) == FAMILIES["flux"].ops
    model.delete_adapters("test")
    assert relative(run(model, inputs), expected) < 1e-5


def test_quantised_linears_are_called_as_modules(k, flux):
    model, inputs, _ = flux
    model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    expected = run(model, inputs)
    k.inject_optimized_kernels(model)
    assert count(model, **inputs) == FAMILIES["flux"].ops
    assert relative(run(model, inputs), expected) < 1e-2  # each layer rounds its input to 8 bits


@pytest.mark.parametrize("order", ["inject_first", "offload_first"])
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
@pytest.mark.parametrize("name", ["flux", "sdxl", "wan2.1"])
def test_group_offload(k, device, name, kind, order):
    from diffusers.hooks import apply_group_offloading

    family = FAMILIES[name]
    model = family.build()
    expected = run(model, family.inputs())
    steps = [
        lambda: k.inject_optimized_kernels(model),
        lambda: apply_group_offloading(
            model,
            onload_device=torch.device(device),
            offload_device=torch.device("cpu"),
            offload_type=kind,
            num_blocks_per_group=1 if kind == "block_level" else None,
        ),
    ]
    for step in steps if order == "inject_first" else reversed(steps):
        step()
    for _ in range(2):
        assert relative(run(model, family.inputs(device)).cpu(), expected) < 1e-5
    assert count(model, **family.inputs(device))


def test_sequential_cpu_offload(k, device, flux):
    """Within a processor the weights of a norm are on meta: the norm is called, and loads them."""
    accelerate = pytest.importorskip("accelerate")
    model, inputs, expected = flux
    k.inject_optimized_kernels(model)
    accelerate.cpu_offload(model, torch.device(device), offload_buffers=True)
    assert model.transformer_blocks[0].attn.norm_q.weight.is_meta
    assert relative(run(model, FAMILIES["flux"].inputs(device)).cpu(), expected) < 1e-5


@pytest.mark.parametrize("order", ["cache_first", "inject_first"])
def test_first_block_cache(k, flux, order):
    from diffusers import FirstBlockCacheConfig

    def cached(each):
        with each.cache_context("test"):
            return [run(each, inputs) for _ in range(3)]

    model, inputs, _ = flux
    stock = copy.deepcopy(model)
    stock.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    steps = [
        lambda: model.enable_cache(FirstBlockCacheConfig(threshold=0.5)),
        lambda: k.inject_optimized_kernels(model),
    ]
    for step in steps if order == "cache_first" else reversed(steps):
        step()
    expected = cached(stock)
    with OpCounter() as ops:
        results = cached(model)
    assert all(relative(a, b) < 1e-5 for a, b in zip(results, expected))
    # all in the first step; the first block and norm_out in the others
    assert ops.calls["residual_ada_norm"] == 4 + 2 + 2


def test_deepcopy_runs_on_its_own_weights(k, flux):
    model, inputs, expected = flux
    k.inject_optimized_kernels(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.1)
    assert relative(run(model, inputs), expected) < 1e-5
    changed = run(twin, inputs)
    k.remove_optimized_kernels(twin)
    assert relative(changed, run(twin, inputs)) < 1e-5 and relative(changed, expected) > 1e-3


def test_chunked_feed_forward(k):
    """A setting that changes which way a forward goes, after the injection."""
    family = FAMILIES["sd1.5"]
    model = family.build()
    k.inject_optimized_kernels(model)
    expected = run(model, family.inputs())
    for block in blocks_of(k, model):
        block.set_chunk_feed_forward(1, 0)
    assert relative(run(model, family.inputs()), expected) < 1e-5
    assert count(model, **family.inputs())["activate"] == 2 * family.ops["activate"]


def test_kinds_can_be_left_out(k, flux):
    model, inputs, expected = flux
    kinds = ["transformer_block", "ada_norm", "attention", "rms_norm", "layer_norm", "gelu"]
    assert set(k.inject_optimized_kernels(model).counts) == set(kinds)
    for kind in kinds:
        k.remove_optimized_kernels(model)
        report = k.inject_optimized_kernels(model, skip=kind)
        assert set(report.counts) == set(kinds) - {kind}
        assert relative(run(model, inputs), expected) < 1e-5
    k.remove_optimized_kernels(model)
    k.inject_optimized_kernels(model, only=["attention"])
    assert count(model, **inputs) == {"qk_norm_rope": 6}


def test_classes_of_processors_are_not_kept(k):
    """A user's own, which may hold as much as it likes."""
    from diffusers.models.attention_processor import AttnProcessor2_0

    family = FAMILIES["sd1.5"]
    model = family.build()
    k.inject_optimized_kernels(model)

    def run_with_another():
        other = type("Other", (AttnProcessor2_0,), {"__call__": lambda *args, **kwargs: args[2]})
        model.set_attn_processor(other())
        run(model, {**family.inputs(), "encoder_hidden_states": torch.randn(2, 5, 24)})
        model.set_attn_processor(AttnProcessor2_0())
        return weakref.ref(other)

    reference = run_with_another()
    gc.collect()
    assert reference() is None


# ---- compilation


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_traced_model_takes_other_sizes(k, flux):
    """As that of stock does: torch.jit.trace follows the sizes, where we count with them."""
    model, inputs, expected = flux
    k.inject_optimized_kernels(model.requires_grad_(False))
    tensors = {name: value for name, value in inputs.items() if torch.is_tensor(value)}

    class Traced(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tensors):
            return self.model(**tensors, return_dict=False)[0]

    with torch.no_grad():
        traced = torch.jit.trace(Traced(), (tensors,), check_trace=False)
        assert relative(traced(tensors), expected) < 1e-5
        shorter = {**tensors, "hidden_states": tensors["hidden_states"][:, :9], "img_ids": tensors["img_ids"][:9]}
        assert relative(traced(shorter), run(model, {**inputs, **shorter})) < 1e-5


class Graphs:
    """A backend that runs the graphs as they are and keeps them."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, example_inputs):
        self.graphs.append(graph)
        return graph.forward


#: As in stock: one for a kind of block and a layout of its inputs. HunyuanVideo's first block gets a transposed tensor
#: and returns a contiguous one, so that the next is compiled again (5 in stock).
GRAPHS = {"sdxl": 1, "flux": 3, "wan2.1": 1, "hunyuan_video": 6, "qwen_image": 1}


@pytest.mark.parametrize("name, order", [*((name, "inject_first") for name in GRAPHS), ("flux", "compile_first")])
def test_compile_repeated_blocks_fullgraph(k, name, order):
    family = FAMILIES[name]
    torch._dynamo.reset()
    model = family.build()
    expected = run(model, family.inputs())
    backend = Graphs()
    steps = [
        lambda: k.inject_optimized_kernels(model),
        lambda: model.compile_repeated_blocks(fullgraph=True, backend=backend),
    ]
    for step in steps if order == "inject_first" else reversed(steps):
        step()
    for _ in range(2):
        assert relative(run(model, family.inputs()), expected) < 1e-5
    nodes = [str(node.target) for graph in backend.graphs for node in graph.graph.nodes]
    assert any("residual_ada_norm" in node for node in nodes)
    assert len(backend.graphs) == GRAPHS[name]


@pytest.mark.parametrize("name", ["sd3.5", "cogvideox", "lumina2"])
def test_compile_a_block_fullgraph(k, name):
    """Of the models whose blocks diffusers does not compile alone."""
    family = FAMILIES[name]
    torch._dynamo.reset()
    model = family.build()
    expected = run(model, family.inputs())
    backend = Graphs()
    for block in blocks_of(k, model):
        block.compile(fullgraph=True, backend=backend)
    assert relative(run(model, family.inputs()), expected) < 1e-5
    assert any("ada_norm" in str(node.target) for graph in backend.graphs for node in graph.graph.nodes)


@pytest.mark.parametrize("name", ["flux", "wan2.1", "sdxl"])
def test_compiled_with_inductor(k, device, name):
    if device == "cpu" and name != "sdxl":
        pytest.skip("half a minute for inductor on a CPU; sdxl is tested there")
    family = FAMILIES[name]
    torch._dynamo.reset()
    model = family.build().to(device)
    expected = run(model, family.inputs(device))
    k.inject_optimized_kernels(model)
    model.compile_repeated_blocks(fullgraph=True)
    assert relative(run(model, family.inputs(device)), expected) < 1e-4
