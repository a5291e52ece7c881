"""Language models of transformers: what somebody does to a model, when its stock code runs and what is left alone."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import pickle
import types

import pytest
import tiny_models
import torch
from tiny_models import count, relative
from tiny_transformers import LAYERS, build, logits, tokens
from torch import nn

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("every_layer_norm")


# ---- when the stock code runs


def test_training_is_stock_but_for_the_norms(k, device):
    model = build("qwen3").to(device).train()
    ours, inputs = copy.deepcopy(model), tokens(device)
    k.inject_optimized_kernels(ours)
    with tiny_models.OpCounter() as ops:
        for each in (model, ours):
            each(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert set(ops.calls) == {"rms_norm_with_rstd", "rms_norm_backward"}
    for (name, expected), result in zip(model.named_parameters(), ours.parameters()):
        assert relative(result.grad, expected.grad) < 1e-4, name


def test_a_gradient_to_the_input_alone_is_given(k):
    model, ours = build("llama").requires_grad_(False), build("llama").requires_grad_(False)
    k.inject_optimized_kernels(ours)
    grads = []
    for each in (model, ours):
        x = each.get_input_embeddings()(tokens()["input_ids"]).detach().requires_grad_()
        each(inputs_embeds=x).logits.square().sum().backward()
        grads.append(x.grad)
    assert relative(*reversed(grads)) < 1e-4


def test_gradient_checkpointing(k):
    model = build("llama").train()
    k.inject_optimized_kernels(model)
    model.gradient_checkpointing_enable()
    model(**tokens(), use_cache=False).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_float64_runs_stock(k):
    model, inputs = build("llama").double(), tokens()
    expected = logits(model, **inputs)
    k.inject_optimized_kernels(model)
    assert torch.equal(logits(model, **inputs), expected)
    assert not count(model, **inputs)


@pytest.mark.parametrize("name", ["llama", "gpt_neox_sequential"])
def test_autocast_returns_what_stock_returns(k, device, name):
    model, inputs = build(name).to(device), tokens(device)
    with torch.autocast(device, torch.bfloat16):
        expected = logits(model, **inputs)
        k.inject_optimized_kernels(model)
        result = logits(model, **inputs)
    assert result.dtype is expected.dtype and relative(result, expected) < 1e-2


def test_a_hook_on_the_norm_or_the_activation_still_runs(k):
    model, inputs, calls = build("llama"), tokens(), []
    layer = model.model.layers[0]
    k.inject_optimized_kernels(model)
    handles = [
        m.register_forward_hook(lambda *_: calls.append(1)) for m in (layer.post_attention_layernorm, layer.mlp.act_fn)
    ]
    assert count(model, **inputs)["residual_ada_norm"] == count(model, **inputs)["activate"] == LAYERS - 1
    assert len(calls) == 4
    for handle in handles:
        handle.remove()
    assert count(model, **inputs)["residual_ada_norm"] == LAYERS and len(calls) == 4


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_of_another_implementation(k, name, implementation):
    """Chosen on each call, and computed by a function of transformers that calls the experts' gate."""
    model, inputs = build(name), tokens()
    model.set_experts_implementation(implementation)
    state = [dict(vars(m)) for m in model.modules()]
    expected = logits(model, **inputs)
    k.inject_optimized_kernels(model)
    assert count(model, **inputs)["activate"] == LAYERS
    assert relative(logits(model, **inputs), expected) < 1e-5
    copied = copy.deepcopy(model)
    assert copied.model.layers[0].mlp.experts._apply_gate.__self__ is copied.model.layers[0].mlp.experts
    with torch.no_grad():
        torch._dynamo.reset()
        compiled = torch.compile(copied, fullgraph=True, backend="aot_eager")(**inputs, use_cache=False).logits
    assert relative(compiled, expected) < 1e-5
    loaded = pickle.loads(pickle.dumps(model.model.layers[0].mlp.experts))
    assert loaded._apply_gate.__func__ is type(loaded)._apply_gate
    model.set_experts_implementation("eager")
    assert count(model, **inputs)["activate"] == LAYERS * 4
    model.set_experts_implementation(implementation)
    k.remove_optimized_kernels(model)
    assert [dict(vars(m)) for m in model.modules()] == state


@pytest.mark.parametrize(
    ("rotation", "norms"),
    [
        ("q, k = apply_rotary_pos_emb(q, k, cos, sin)", ["q_norm", "k_norm"]),
        ("v = v + q; q, k = apply_rotary_pos_emb(q, k, cos, sin)", []),
        ("rotated, k = apply_rotary_pos_emb(q, k, cos, sin)", []),
        ("k, q = apply_rotary_pos_emb(q, k, cos, sin)", []),
        ("kept = q, k = apply_rotary_pos_emb(q, k, cos, sin)", []),
        ("both = apply_rotary_pos_emb(q, k, cos, sin)", []),
    ],
)
def test_norms_of_heads_go_with_the_rotation_only_where_nothing_else_reads_them(inner, rotation, norms):
    """As a forward of another version of transformers may: the norm is not where it was any more."""
    tree = ast.parse(
        f"q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)\n"
        f"k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)\n{rotation}"
    )
    stock = ast.unparse(tree)
    assert inner("decoders")._fuse_norm_rope(tree.body) == norms
    assert (ast.unparse(tree) == stock) is (not norms)


@pytest.mark.parametrize("change", ["hook", "eps", "width"])
def test_norms_of_heads_that_changed_are_called(k, change):
    """Qwen3's norms of q and k go with the rotation only as the class made them, and as one."""
    model, inputs, calls = build("qwen3"), tokens(), []
    k.inject_optimized_kernels(model)
    norm = model.model.layers[0].self_attn.q_norm
    if change == "hook":
        norm.register_forward_hook(lambda *_: calls.append(1))
    if change == "eps":
        norm.variance_epsilon = 0.1
    if change == "width":
        norm.weight.data = norm.weight.data[:1].clone()  # broadcasts in stock
    stock = copy.deepcopy(model)
    k.remove_optimized_kernels(stock)
    if change == "width":
        k.remove_optimized_kernels(norm)  # its own op would refuse
    expected = logits(stock, **inputs)
    calls.clear()
    assert relative(logits(model, **inputs), expected) < 1e-5
    assert len(calls) == (change == "hook")
    assert count(model, **inputs)["qk_norm_rope"] >= LAYERS - 1


def test_layer_norm_of_few_elements_or_under_compile_is_torchs(k, inner, monkeypatch):
    """One kernel in torch too: fewer microseconds on the host, or fused by Inductor."""
    monkeypatch.setattr(inner("decoders"), "LAYER_NORM_ELEMENTS", 2 * 32)
    norm = nn.LayerNorm(32).requires_grad_(False)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    assert k.inject_optimized_kernels(norm).counts == {"layer_norm": 1}
    for rows, ops in ((1, {}), (2, {"layer_norm": 1}), (5, {"layer_norm": 1})):
        x = torch.randn(rows, 32)
        assert count(norm, x) == ops
        assert relative(norm(x), type(norm).forward(norm, x)) < 1e-6
    graphs = []
    with torch.no_grad():
        torch.compile(norm, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)(x)
    assert graphs and "_ltx_kernels" not in graphs[0].code
    for x in (torch.randn(2, 32, dtype=torch.float64), torch.randn(2, 32, requires_grad=True)):
        assert torch.equal(norm.to(x.dtype)(x), type(norm).forward(norm, x))


def test_layer_norm_of_any_kind_is_that_of_stock(k, device):
    for norm in (nn.LayerNorm((3, 32)), nn.LayerNorm(32, bias=False), nn.LayerNorm(32, elementwise_affine=False)):
        norm.to(device)
        k.inject_optimized_kernels(norm)
        x = torch.randn(2, 3, 32, device=device)
        with torch.no_grad():
            assert relative(norm(x), type(norm).forward(norm, x)) < 1e-6
        with pytest.raises(RuntimeError, match="normalized_shape"):
            norm(torch.randn(2, 3, 16, device=device))


@pytest.fixture
def mesh():
    """A device mesh of this process alone."""
    distributed = pytest.importorskip("torch.distributed.tensor")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_a_norm_of_distributed_tensors_is_that_of_stock(k, mesh, norm):
    """As tensor parallelism has them behind sequence-parallel layers: no op of ours says how it is sharded."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    norm = parallelize_module(norm(32), mesh, SequenceParallel())
    x = distribute_tensor(torch.randn(2, 4, 32), mesh, [Shard(1)])
    with torch.no_grad():
        expected = norm(x)
        k.inject_optimized_kernels(norm)
        assert torch.equal(norm(x).full_tensor(), expected.full_tensor())


@pytest.mark.parametrize(
    ("norm", "layout"), [(nn.RMSNorm, torch.jagged), (nn.LayerNorm, torch.jagged), (nn.LayerNorm, torch.strided)]
)
def test_a_norm_of_nested_tensors_is_that_of_stock(k, norm, layout):
    norm, parts = norm(32), [torch.randn(length, 32) for length in (2, 3)]
    x = torch.nested.nested_tensor(parts, layout=layout)
    k.inject_optimized_kernels(norm)
    with torch.no_grad():
        for result, part in zip(norm(x).unbind(), parts):
            assert relative(result, norm(part)) < 1e-6


def test_a_replaced_projection_is_called(k):
    """As an adapter does: around the projections, or in their place."""

    class Doubled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return 2 * self.inner(x)

    model, inputs = build("llama"), tokens()
    k.inject_optimized_kernels(model)
    for layer in model.model.layers:
        layer.mlp.up_proj, layer.self_attn.q_proj = Doubled(layer.mlp.up_proj), Doubled(layer.self_attn.q_proj)
    result = logits(model, **inputs)
    k.remove_optimized_kernels(model)
    assert relative(result, logits(model, **inputs)) < 1e-5


def test_accelerate_offload(k):
    accelerate = pytest.importorskip("accelerate")
    model, inputs = build("llama"), tokens()
    expected = logits(model, **inputs)
    k.inject_optimized_kernels(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.model.layers.parameters())
    assert relative(logits(model, **inputs), expected) < 1e-5
    assert count(model, **inputs)["qk_norm_rope"] == LAYERS
    assert k.remove_optimized_kernels(model) and not count(model, **inputs)


def test_a_deepcopy_runs_on_its_own_weights(k):
    model, inputs = build("llama"), tokens()
    k.inject_optimized_kernels(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    stock = build("llama")
    assert relative(logits(copied, **inputs), logits(stock, **inputs)) < 1e-5
    assert count(copied, **inputs)["qk_norm_rope"] == LAYERS


def test_save_pretrained_round_trip(k, tmp_path):
    model, inputs = build("qwen3"), tokens()
    k.inject_optimized_kernels(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert not count(loaded, **inputs)
    assert relative(logits(model, **inputs), logits(loaded, **inputs)) < 1e-5


# ---- one instance, and nothing of the library


def test_only_the_injected_model_is_changed(k):
    from transformers.models.llama import modeling_llama

    names = dict(vars(modeling_llama))
    classes = {name: dict(vars(c)) for name, c in names.items() if isinstance(c, type)}
    model, other, inputs = build("llama"), build("llama"), tokens()
    k.inject_optimized_kernels(model)
    assert count(model, **inputs) and not count(other, **inputs)
    assert dict(vars(modeling_llama)) == names
    assert {name: dict(vars(names[name])) for name in classes} == classes


def test_signatures_are_those_of_stock(k):
    model = build("llama")
    k.inject_optimized_kernels(model)
    layer = model.model.layers[0]
    for module in (layer, layer.self_attn, layer.mlp):
        stock = types.MethodType(type(module).forward, module)
        assert inspect.signature(module.forward) == inspect.signature(stock)


def test_layers_share_one_function(k):
    """Or every layer would compile anew."""
    model = build("llama")
    k.inject_optimized_kernels(model)
    first, second = model.model.layers
    for part in ("self_attn", "mlp", "input_layernorm"):
        assert getattr(first, part).forward.__func__ is getattr(second, part).forward.__func__
    assert first.forward.__func__ is second.forward.__func__


def test_a_traceback_shows_the_stock_lines(k):
    model = build("llama")
    k.inject_optimized_kernels(model)
    ours, stock = model.model.layers[0].forward.__func__.__code__, type(model.model.layers[0]).forward.__code__
    assert (ours.co_filename, ours.co_firstlineno) == (stock.co_filename, stock.co_firstlineno)


@pytest.mark.parametrize(
    "kind, ops",
    [
        ("decoder_layer", {"residual_ada_norm"}),
        ("gated_mlp", {"activate"}),
        ("rope", {"qk_norm_rope"}),
        ("rms_norm", {"rms_norm"}),
    ],
)
def test_each_kind_can_be_chosen_alone(k, kind, ops):
    model, inputs = build("llama"), tokens()
    expected = logits(model, **inputs)
    report = k.inject_optimized_kernels(model, only=kind)
    assert set(report.counts) == {kind} and set(count(model, **inputs)) == ops
    assert relative(logits(model, **inputs), expected) < 1e-5


# ---- what is left alone


def variant(cls: type, forward) -> type:
    """A class of the library with another forward, as another version of the library has it."""
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "forward": forward})


def test_a_forward_whose_source_is_elsewhere_is_left_alone(k):
    """Decorated, or generated, or changed on the disk since it was imported."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    source = "def forward(self, x):\n    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) + 1\n"
    namespace: dict = {}
    exec(compile(source, inspect.getsourcefile(LlamaMLP), "exec"), namespace)
    model, inputs = build("llama"), tokens()
    for layer in model.model.layers:
        layer.mlp.__class__ = variant(LlamaMLP, namespace["forward"])
    expected = logits(model, **inputs)
    report = k.inject_optimized_kernels(model)
    assert {(e.cls, e.reason) for e in report.left_alone} == {
        ("LlamaMLP", "the source of its forward is not what it runs")
    }
    assert relative(logits(model, **inputs), expected) < 1e-5


def test_a_decorated_forward_keeps_its_decorators(k):
    """As many forwards of transformers 4 have them."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    calls = []

    def counted(name):
        def decorate(function):
            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                calls.append(name)
                return function(*args, **kwargs)

            return wrapper

        return decorate

    def opaque(function):
        table = {"forward": function}
        return functools.wraps(function)(lambda *args: table["forward"](*args))

    @counted("outer")
    @counted("inner")
    def forward(self, x, scale: float = 2.0):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * scale

    for function, reason in ((forward, None), (opaque(forward), "decorator")):
        model, inputs = build("llama"), tokens()
        for layer in model.model.layers:
            layer.mlp.__class__ = variant(LlamaMLP, function)
        expected = logits(model, **inputs)
        report = k.inject_optimized_kernels(model)
        assert [reason in entry.reason for entry in report.left_alone] == ([True] * LAYERS if reason else [])
        calls.clear()
        assert relative(logits(model, **inputs), expected) < 1e-5
        assert calls == ["outer", "inner"] * LAYERS
        assert count(model, **inputs)["activate"] == (0 if reason else LAYERS)


def test_another_layer_is_fused_only_where_a_sum_goes_into_the_norm(k):
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    def scaled(self, hidden_states, **kwargs):
        residual = hidden_states
        hidden_states, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = (residual + hidden_states) * 0.5
        return residual + self.mlp(self.post_attention_layernorm(hidden_states))

    def doubled(self, hidden_states, **kwargs):
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        h = hidden_states + 2.0 * attended
        return self.mlp(self.post_attention_layernorm(h)) + h

    for forward, fused in ((scaled, 0), (doubled, LAYERS)):
        model, inputs = build("llama"), tokens()
        for layer in model.model.layers:
            layer.__class__ = variant(LlamaDecoderLayer, forward)
        expected = logits(model, **inputs)
        report = k.inject_optimized_kernels(model)
        assert report.counts.get("decoder_layer", 0) == fused
        assert count(model, **inputs)["residual_ada_norm"] == fused
        assert relative(logits(model, **inputs), expected) < 1e-5


def test_an_unknown_activation_is_left_alone(k):
    model = build("llama", hidden_act="relu")
    report = k.inject_optimized_kernels(model)
    assert {e.cls for e in report.left_alone} == {"LlamaMLP"}
    assert "ReLU" in report.left_alone[0].reason


@pytest.mark.parametrize("activation", ["silu", "swish", "gelu", "gelu_pytorch_tanh"])
def test_activations(k, activation):
    model, inputs = build("llama", hidden_act=activation), tokens()
    expected = logits(model, **inputs)
    k.inject_optimized_kernels(model)
    assert count(model, **inputs)["activate"] == LAYERS
    assert relative(logits(model, **inputs), expected) < 1e-5


def test_a_rotation_that_is_not_known_is_left_alone(k, monkeypatch):
    """Another function of that name in the module, as a patch of the process puts there."""
    from transformers.models.mistral import modeling_mistral

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        return q * cos.unsqueeze(unsqueeze_dim), k

    monkeypatch.setattr(modeling_mistral, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    model = build("mistral")
    assert "rope" not in k.inject_optimized_kernels(model).counts


def test_a_rotation_that_is_replaced_later_is_called(k, monkeypatch):
    from transformers.models.mistral import modeling_mistral

    model, inputs, calls = build("mistral"), tokens(), []
    stock = modeling_mistral.apply_rotary_pos_emb
    k.inject_optimized_kernels(model)

    def apply_rotary_pos_emb(*args, **kwargs):
        calls.append(1)
        return stock(*args, **kwargs)

    monkeypatch.setattr(modeling_mistral, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    assert "qk_norm_rope" not in count(model, **inputs) and len(calls) == LAYERS
