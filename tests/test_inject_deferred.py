"""Deferred values: what a forward may do with them, and the result is that of stock."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from tiny_models import OpCounter, relative
from torch import nn
from torch.utils._pytree import tree_flatten

pytest.importorskip("diffusers")


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


class Inner(nn.Module):
    def forward(self, x, *rest, **options):
        return torch.relu(options["y"]) + torch.relu(rest[0]) + torch.relu(x)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x, branch, gate):
        return self.inner(x + gate * branch, x + branch, y=x - gate * branch + x)


def test_a_deferred_value_among_the_options_of_a_deferred_module_is_asked_for(k, inner):
    """It came to torch as it was: TypeError, relu() got a Sum."""
    streams = inner("streams")
    module = Outer()
    module.inner.forward = streams.plan("inner", lambda cls: cls is Inner)(module.inner).__get__(module.inner)
    forward = streams.plan("outer", lambda cls: cls is Inner)(module)
    x, branch, gate = (torch.randn(2, 5, 32) for _ in range(3))
    with torch.no_grad():
        expected = Outer()(x, branch, gate)
        assert relative(forward(module, x, branch, gate), expected) < 1e-6


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
