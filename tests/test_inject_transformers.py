"""Language models of transformers: what is fused in each family, and that the model stays the model it was.

Tiny random models of the real classes. Which ops a forward runs says `FAMILIES`; the norms alone are tested in
test_inject_rmsnorm.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import count, relative
from tiny_transformers import EXPERTS, FAMILIES, LAYERS, build, logits, tokens

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("every_layer_norm")


# ---- each family


@pytest.mark.parametrize("name", FAMILIES)
def test_family_runs_the_kernels_and_keeps_its_output(k, device, name):
    family, model, inputs = FAMILIES[name], build(name).to(device), tokens(device)
    before = [dict(vars(m)) for m in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    expected = logits(model, **inputs)

    report = k.inject_optimized_kernels(model)
    assert relative(logits(model, **inputs), expected) < 1e-5
    ops = {
        "rms_norm": LAYERS * family.norms + (family.norms and family.other_norms),
        "layer_norm": LAYERS * family.layer_norms + (family.layer_norms > 0),
        "residual_ada_norm": LAYERS * family.sums,
        "activate": LAYERS * family.gated,
        **{op: LAYERS * number for op, number in family.rope.items()},
    }
    assert count(model, **inputs) == {op: number for op, number in ops.items() if number}
    assert {entry.cls for entry in report.left_alone} == set(family.left_alone)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert list(model.state_dict()) == list(state)

    assert k.remove_optimized_kernels(model) == len(report.injected)
    assert [dict(vars(m)) for m in model.modules()] == before
    assert not count(model, **inputs)
    assert torch.equal(logits(model, **inputs), expected) or device == "cuda"


@pytest.mark.parametrize("name", FAMILIES)
def test_family_in_bf16_is_no_less_accurate(k, device, name):
    """Against fp64, the mean of a few batches and weights; one of them alone says nothing (it varies by 5 %)."""
    stock_error = our_error = 0.0
    for seed in range(4):
        # All experts: which ones are chosen hangs on the last bit.
        model = build(name, **({"num_experts_per_tok": 4} if FAMILIES[name].config is EXPERTS else {}))
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.05)
        model, inputs = model.bfloat16().to(device), tokens(device, 4, 24, seed)
        reference = logits(copy.deepcopy(model).double(), **inputs)
        stock_error += relative(logits(model, **inputs), reference)
        k.inject_optimized_kernels(model)
        our_error += relative(logits(model, **inputs), reference)
    assert our_error <= stock_error * 1.03


GENERATE = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "beams": {"num_beams": 3},
    "no_cache": {"use_cache": False},
}


@pytest.mark.parametrize("arguments", GENERATE.values(), ids=GENERATE)
@pytest.mark.parametrize("name", FAMILIES)
def test_generation_is_token_identical(k, device, name, arguments):
    model = build(name, eos_token_id=None).to(device)
    inputs = tokens(device)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, :4] = 0  # padding on the left
    arguments = {**inputs, "max_new_tokens": 8, "do_sample": False, **arguments}
    expected = model.generate(**arguments)
    k.inject_optimized_kernels(model)
    assert torch.equal(model.generate(**arguments), expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations_are_untouched(k, device, attention):
    model = build("llama", attn_implementation=attention).to(device)
    inputs = tokens(device)
    outputs = []
    for _ in range(2):
        with torch.no_grad():
            outputs.append(model(**inputs, output_hidden_states=True, output_attentions=attention == "eager"))
        k.inject_optimized_kernels(model)
    stock, ours = outputs
    assert len(ours.hidden_states) == LAYERS + 1
    for result, expected in zip(ours.hidden_states, stock.hidden_states):
        assert relative(result, expected) < 1e-5
    for result, expected in zip(ours.attentions or (), stock.attentions or ()):
        assert relative(result, expected) < 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gpt_oss", "gpt_neox"])
def test_compiles_fullgraph(k, name):
    torch._dynamo.reset()
    model, inputs = build(name), tokens()
    if name == "gpt_oss":  # the stock experts break the graph
        model = model.model.layers[0].self_attn
        tables = torch.randn(2, 2, 11, 8)
        inputs = {"hidden_states": torch.randn(2, 11, 64), "position_embeddings": tuple(tables), "attention_mask": None}
        run = lambda m: m(**inputs)[0]  # noqa: E731
    else:
        run = lambda m: m(**inputs, use_cache=False).logits  # noqa: E731
    k.inject_optimized_kernels(model)
    seen = []

    def backend(graph, _):
        seen.extend(str(n.target).split(".")[1] for n in graph.graph.nodes if "_ltx_kernels" in str(n.target))
        return graph.forward

    with torch.no_grad():
        expected = run(model)
        assert relative(run(torch.compile(model, fullgraph=True, backend=backend)), expected) < 1e-6
        assert "qk_norm_rope" in seen
        torch._dynamo.reset()
        assert relative(run(torch.compile(model, fullgraph=True, backend="aot_eager")), expected) < 1e-6


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "falcon"])
def test_compiled_decode_with_a_static_cache(k, device, name):
    """CUDA graphs on a GPU: each step writes into the cache that the graph before has read."""
    torch._dynamo.reset()
    model, prompt = build(name).to(device), tokens(device)["input_ids"]

    @torch.no_grad()
    def decode(step) -> torch.Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        steps = [model(prompt, past_key_values=cache).logits[:, -1:]]
        for position in range(prompt.shape[1], 16):
            at = {"position_ids": torch.tensor([[position]], device=device), "past_key_values": cache}
            steps.append(step(steps[-1].argmax(-1), **at).logits.clone())
        return torch.cat(steps, 1)

    expected = decode(model)
    k.inject_optimized_kernels(model)
    how = {"mode": "reduce-overhead"} if device == "cuda" else {"backend": "aot_eager"}
    result = decode(torch.compile(model, fullgraph=True, **how))
    assert relative(result, expected) < 1e-4 and torch.equal(result.argmax(-1), expected.argmax(-1))
