"""An injected LTX-Video or LTX-2 under torch.compile and in CUDA graphs."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch
from ltx_models import MODELS, blocks, differences, lora, run, to
from tiny_models import Graphs

pytest.importorskip("diffusers")
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("order", ["inject_first", "compile_first"])
def test_compile_repeated_blocks_fullgraph(k, model_and_inputs, order):
    model, inputs = model_and_inputs
    expected = run(model, inputs)
    backend = Graphs()
    steps = [
        lambda: model.compile_repeated_blocks(fullgraph=True, backend=backend),
        lambda: k.inject_optimized_kernels(model),
    ]
    for step in steps if order == "compile_first" else reversed(steps):
        step()
    for _ in range(2):
        assert differences(run(model, inputs), expected) < 1e-5
    assert len(backend.graphs) == 1  # once for all blocks and steps
    assert len(backend.ops()) >= 5


@pytest.mark.parametrize("name", ["ltx_video", "ltx_video_per_token", "ltx2.3"])
def test_compile_of_the_whole_model_fullgraph(k, name):
    model, inputs = MODELS[name]()
    expected = run(model, inputs)
    k.inject_optimized_kernels(model)
    backend = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert differences(run(compiled, inputs), expected) < 1e-5
    assert len(backend.ops()) >= 5 * blocks(model)


def test_compiled_with_inductor(k, ltx, device):
    model, inputs, expected = ltx
    model, inputs = model.to(device), to(inputs, device)
    k.inject_optimized_kernels(model)
    model.compile_repeated_blocks(fullgraph=True)
    for _ in range(2):
        assert differences([r.cpu() for r in run(model, inputs)], expected) < 1e-5


def test_compiled_blocks_notice_changes(k, ltx):
    """LoRA and removal after the compilation: guards see them."""
    model, inputs, expected = ltx
    stock = copy.deepcopy(model)
    k.inject_optimized_kernels(model)
    backend = Graphs()
    model.compile_repeated_blocks(backend=backend)
    assert differences(run(model, inputs), expected) < 1e-5
    lora(stock), lora(model)
    assert differences(run(model, inputs), run(stock, inputs)) < 1e-5
    model.delete_adapters("test")
    assert differences(run(model, inputs), expected) < 1e-5
    backend.graphs.clear()
    k.remove_optimized_kernels(model)
    assert differences(run(model, inputs), expected) < 1e-6
    assert backend.graphs and not backend.ops()


def test_other_shapes_compile_no_more_often_than_stock(k, ltx):
    model, inputs, _ = ltx
    graphs = []
    for each in (copy.deepcopy(model), model):
        if each is model:
            k.inject_optimized_kernels(each)
        backend = Graphs()
        each.compile_repeated_blocks(fullgraph=True, backend=backend)
        for grid in ((2, 3, 4), (3, 3, 4), (4, 3, 4), (5, 4, 4)):
            run(each, tiny_models.ltx_video_inputs(grid=grid))
        graphs.append(len(backend.graphs))
        torch._dynamo.reset()
    assert graphs[1] <= graphs[0] + 1


@pytest.mark.gpu
def test_compile_reduce_overhead(k, ltx, gpu):
    model, inputs, expected = ltx
    model, inputs = model.to("cuda"), to(inputs, "cuda")
    k.inject_optimized_kernels(model)
    compiled = torch.compile(model, mode="reduce-overhead")
    for _ in range(4):
        assert differences([r.cpu() for r in run(compiled, inputs)], expected) < 1e-5


@pytest.mark.gpu
def test_cuda_graph_capture(k, ltx, gpu):
    model, inputs, expected = ltx
    model, inputs = model.to("cuda"), to(inputs, "cuda")
    inputs["encoder_attention_mask"] = inputs["encoder_attention_mask"].bool()
    k.inject_optimized_kernels(model)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        model(**inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = model(**inputs)[0]
        graph.replay()
    torch.cuda.synchronize()
    assert differences([result.cpu()], expected) < 1e-5
