"""Injected models of diffusers beside what else is done to them: hooks, adapters, offload, caches, compilation."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from tiny_diffusers import FAMILIES, blocks_of, run
from tiny_models import Graphs, OpCounter, count, relative
from torch import nn
from torch.utils._pytree import tree_map

diffusers = pytest.importorskip("diffusers")


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
        "transformer_blocks.0.attn.to_out.0",
        "transformer_blocks.0.attn.to_out.1",
        "transformer_blocks.0.attn.to_add_out",
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
    kinds = ["transformer_block", "ada_norm", "attention", "rms_norm", "layer_norm", "gelu", "feed_forward"]
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


#: As in stock: one for a kind of block and a layout of its inputs. HunyuanVideo's first block gets a transposed tensor
#: and returns a contiguous one, so that the next is compiled again (5 in stock).
GRAPHS = {"sdxl": 1, "flux": 3, "wan2.1": 1, "hunyuan_video": 6, "qwen_image": 1}


@pytest.mark.parametrize("name, order", [*((name, "inject_first") for name in GRAPHS), ("flux", "compile_first")])
def test_compile_repeated_blocks_fullgraph(k, any_size, name, order):
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
    assert "residual_ada_norm" in backend.ops()
    assert len(backend.graphs) == GRAPHS[name]


@pytest.mark.parametrize("name", ["sd3.5", "cogvideox", "lumina2"])
def test_compile_a_block_fullgraph(k, any_size, name):
    """Of the models whose blocks diffusers does not compile alone."""
    family = FAMILIES[name]
    torch._dynamo.reset()
    model = family.build()
    expected = run(model, family.inputs())
    backend = Graphs()
    for block in blocks_of(k, model):
        block.compile(fullgraph=True, backend=backend)
    assert relative(run(model, family.inputs()), expected) < 1e-5
    assert any("ada_norm" in op for op in backend.ops())


@pytest.mark.parametrize("name", ["flux", "wan2.1", "sdxl"])
def test_compiled_with_inductor(k, any_size, device, name):
    if device == "cpu" and name != "sdxl":
        pytest.skip("half a minute for inductor on a CPU; sdxl is tested there")
    family = FAMILIES[name]
    torch._dynamo.reset()
    model = family.build().to(device)
    expected = run(model, family.inputs(device))
    k.inject_optimized_kernels(model)
    model.compile_repeated_blocks(fullgraph=True)
    assert relative(run(model, family.inputs(device)), expected) < 1e-4


@pytest.mark.parametrize("name, guards_of_stock", [("sdxl", 1.02), ("sd1.5", 1.02), ("flux", 1.0), ("wan2.1", 1.15)])
def test_small_compiled_blocks_are_those_of_stock(k, name, guards_of_stock):
    """Inductor gets the expressions that it fuses itself, and hardly more is looked at before each call.

    Of Stable Diffusion, which is bound by the host, only what decides that: no part has an own forward to be seen.
    """
    family = FAMILIES[name]
    guards, nodes = {}, {}
    for injected in (False, True):
        torch._dynamo.reset()
        model = family.build()
        expected = run(model, family.inputs())
        if injected:
            k.inject_optimized_kernels(model)
        backend, counts, forwards = Graphs(), [], []

        def count_guards(entries, counts=counts, forwards=forwards):
            counts.append(len(entries))
            forwards.extend(entry.name for entry in entries if ".forward" in entry.name)
            return [True] * len(entries)

        model.compile_repeated_blocks(fullgraph=True, backend=backend, options={"guard_filter_fn": count_guards})
        assert relative(run(model, family.inputs()), expected) < 1e-6
        guards[injected] = sum(counts)
        computed = (node for graph in backend.graphs for node in graph.graph.nodes if node.op != "placeholder")
        nodes[injected] = [str(node.target) for node in computed]
    assert nodes[True] == nodes[False]
    assert guards[True] <= guards_of_stock * guards[False]
    assert not forwards or not name.startswith("sd")


BLOCK = "down_blocks.1.attentions.0.transformer_blocks.0"
PARTS = ("norm2", "attn1", "ff", "ff.net.0")


def sd_block(k):
    """(model, its inputs, a block) of Stable Diffusion, injected."""
    model = FAMILIES["sd1.5"].build()
    k.inject_optimized_kernels(model)
    return model, FAMILIES["sd1.5"].inputs(), model.get_submodule(BLOCK)


def test_parts_run_the_kernels_within_their_block_alone(k):
    """Their own forward is not in the place of their class's, where compiled stock code would have guards for it."""
    model, inputs, block = sd_block(k)
    assert count(model, **inputs) == FAMILIES["sd1.5"].ops
    for path in PARTS:
        assert "forward" not in block.get_submodule(path).__dict__
    x = torch.randn(2, 5, block.norm1.normalized_shape[0])
    assert not count(block.ff, x) and count(block, x, encoder_hidden_states=torch.randn(2, 5, 24))
    assert count(copy.deepcopy(model), **inputs) == FAMILIES["sd1.5"].ops
    again = k.inject_optimized_kernels(model)
    assert again.counts["attention"] == 2 * again.counts["transformer_block"] == 2 * again.counts["feed_forward"]
    assert count(model, **inputs) == FAMILIES["sd1.5"].ops
    assert k.remove_optimized_kernels(block) == 1 + 2 + 1 + 1 + 3  # itself, attentions, feed-forward, its GEGLU, norms
    assert not any("ltx" in name for module in block.modules() for name in module.__dict__)


def test_parts_whose_block_is_left_alone_run_the_kernels(k):
    model, inputs, block = sd_block(k)
    k.remove_optimized_kernels(model)
    k.inject_optimized_kernels(model, skip="transformer_block")
    assert count(model, **inputs)["activate"] == FAMILIES["sd1.5"].ops["activate"]
    k.inject_optimized_kernels(block.ff)  # by itself it is no part
    assert "forward" in block.ff.__dict__


@pytest.mark.parametrize("path", PARTS)
def test_a_forward_put_on_a_part_later_runs(k, path):
    """As hooks of accelerate and of caches do it: around the forward that they find."""
    model, inputs, block = sd_block(k)
    stock, expected = FAMILIES["sd1.5"].build(), run(model, inputs)
    for part in (block.get_submodule(path), stock.get_submodule(f"{BLOCK}.{path}")):
        part.forward = lambda *args, _forward=part.forward, **options: 1.5 * _forward(*args, **options)
    assert relative(run(model, inputs), run(stock, inputs)) < 1e-5
    assert relative(run(model, inputs), expected) > 1e-4


@pytest.mark.parametrize("path", PARTS)
def test_a_forward_put_on_a_part_after_compilation_runs(k, path):
    torch._dynamo.reset()
    model, inputs, block = sd_block(k)
    model.compile_repeated_blocks(fullgraph=True, backend="eager")
    before, part = run(model, inputs), block.get_submodule(path)
    stock = type(part).forward

    def forward(self, *args, **options):
        return 1.5 * stock(self, *args, **options)

    part.forward = forward.__get__(part)
    changed = run(model, inputs)
    assert relative(changed, before) > 1e-4
    del part.forward
    assert torch.equal(run(model, inputs), before)


def test_a_compiled_attention_passes_its_options_on(k):
    """They are filtered by what the processor takes, which is looked at only when there are any."""
    from diffusers.models.attention_processor import Attention

    torch._dynamo.reset()
    attention, x, temb = Attention(32, heads=2, dim_head=16).eval(), torch.randn(2, 5, 32), torch.randn(2, 5)

    class Processor(type(attention.processor)):
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None):
            return super().__call__(attn, hidden_states) + (0 if temb is None else temb[..., None])

    for processor in (attention.processor, Processor()):
        k.inject_optimized_kernels(attention)
        attention.processor = processor
        compiled = torch.compile(attention, fullgraph=True, backend="eager")
        with torch.no_grad():
            expected = type(attention).forward(attention, x, temb=temb)
            assert torch.equal(attention(x, temb=temb, unknown=1), expected)
            assert torch.equal(compiled(x, temb=temb), expected)
            assert torch.equal(compiled(x), attention(x))
    assert not torch.equal(compiled(x), expected)


def test_compiled_code_is_kept_for_each_class(k):
    """With a code object, up to a limit, and sizes by its name: instances of a class share one, classes do not."""
    model = FAMILIES["flux"].build()
    codes = {}
    for block in blocks_of(k, model):
        codes.setdefault(type(block), set()).add(block.forward.__func__.__code__)
    assert len(codes) == len({code.co_name for code in set.union(*codes.values())}) == 2
    assert all(len(of_class) == 1 for of_class in codes.values())
