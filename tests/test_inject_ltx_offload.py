"""Hooks of diffusers and accelerate around an injected LTX-Video: caches, offload, casting, context parallelism."""

from __future__ import annotations

import copy
import os

import pytest
import tiny_models
import torch
from ltx_models import differences, fused, run, to
from tiny_models import count

pytest.importorskip("diffusers")


# ---- caches


def cached(model, inputs, steps=3):
    results = []
    for step in range(steps):
        with torch.no_grad(), model.cache_context("cond_uncond"):
            x = inputs["hidden_states"] * (1 + 0.001 * step)
            results.append(model(**{**inputs, "hidden_states": x})[0])
    return results


@pytest.mark.parametrize("order", ["cache_first", "inject_first"])
def test_first_block_cache(k, ltx, order):
    from diffusers import FirstBlockCacheConfig

    model, inputs, _ = ltx
    reference = copy.deepcopy(model)
    reference.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    expected = cached(reference, inputs)
    steps = [
        lambda: model.enable_cache(FirstBlockCacheConfig(threshold=0.5)),
        lambda: k.inject_optimized_kernels(model),
    ]
    for step in steps if order == "cache_first" else reversed(steps):
        step()
    with tiny_models.OpCounter() as ops:
        results = cached(model, inputs)
    assert differences(results, expected) < 1e-5
    assert ops.calls["residual_ada_norm"] == 3 + 1 + 1  # all blocks in the first step, the first one in the others
    model.disable_cache()
    assert fused(k, model, inputs)
    k.remove_optimized_kernels(model)
    assert not count(model, **inputs)


# ---- offload


ORDERS = ["inject_first", "offload_first"]


def offloaded(k, model, inputs, order, offload):
    """Offload and inject in one order or the other; returns the result of two calls."""
    steps = [lambda: offload(model), lambda: k.inject_optimized_kernels(model)]
    for step in steps if order == "offload_first" else reversed(steps):
        step()
    run(model, inputs)
    return [r.cpu() for r in run(model, inputs)]


@pytest.mark.parametrize("order", ORDERS)
def test_model_cpu_offload(k, ltx, device, order):
    accelerate = pytest.importorskip("accelerate")
    model, inputs, expected = ltx
    result = offloaded(
        k, model, to(inputs, device), order, lambda m: accelerate.cpu_offload_with_hook(m, torch.device(device))
    )
    assert differences(result, expected) < 1e-5
    assert fused(k, model, to(inputs, device))


@pytest.mark.parametrize("order", ORDERS)
def test_sequential_cpu_offload(k, ltx, device, order):
    accelerate = pytest.importorskip("accelerate")
    model, inputs, expected = ltx
    result = offloaded(k, model, to(inputs, device), order, lambda m: accelerate.cpu_offload(m, torch.device(device)))
    assert differences(result, expected) < 1e-5
    assert model.transformer_blocks[0].attn1.norm_q.weight.is_meta  # the hooks were not lost
    assert count(model, **to(inputs, device))["residual_ada_norm"] == 3  # each block has a hook: none hands on
    assert k.remove_optimized_kernels(model)
    assert differences([r.cpu() for r in run(model, to(inputs, device))], expected) < 1e-5
    assert not count(model, **to(inputs, device))
    assert model.transformer_blocks[0].attn1.norm_q.weight.is_meta


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offload(k, ltx, device, order, kind):
    from diffusers.hooks import apply_group_offloading

    def offload(model):
        apply_group_offloading(
            model,
            onload_device=torch.device(device),
            offload_device=torch.device("cpu"),
            offload_type=kind,
            num_blocks_per_group=1 if kind == "block_level" else None,
        )

    model, inputs, expected = ltx
    assert differences(offloaded(k, model, to(inputs, device), order, offload), expected) < 1e-5
    assert count(model, **to(inputs, device))["residual_ada_norm"] == 3  # each block has a hook: none hands on


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offload_with_streams(k, ltx, kind, gpu):
    from diffusers.hooks import apply_group_offloading

    model, inputs, expected = ltx
    k.inject_optimized_kernels(model)
    apply_group_offloading(
        model,
        onload_device=torch.device("cuda"),
        offload_device=torch.device("cpu"),
        offload_type=kind,
        num_blocks_per_group=1 if kind == "block_level" else None,
        use_stream=True,
    )
    for _ in range(3):
        assert differences([r.cpu() for r in run(model, to(inputs, "cuda"))], expected) < 1e-5


@pytest.mark.parametrize("order", ORDERS)
def test_layerwise_casting(k, ltx, order):
    model, inputs, _ = ltx
    model, inputs = tiny_models.in_dtype(model, inputs, torch.bfloat16)

    def cast(m):
        m.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)

    stock = copy.deepcopy(model)
    cast(stock)
    expected = run(stock, inputs)
    assert differences(offloaded(k, model, inputs, order, cast), expected) < 3e-2
    assert count(model, **inputs)["residual_ada_norm"] == 3 + 2


# ---- context parallelism


def _context_parallel_worker(rank, path, port):
    import kernels
    import torch.distributed as dist
    from diffusers import ContextParallelConfig

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank)
    )
    torch.set_num_threads(1)
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it
    dist.init_process_group("gloo")
    k = kernels.get_kernel("org/ltx-kernels", version=1)
    model, inputs = tiny_models.ltx_video(layers=2), tiny_models.ltx_video_inputs(text=6)
    inputs["encoder_attention_mask"] = None  # diffusers refuses masks in context-parallel attention
    expected = run(model, inputs)
    k.inject_optimized_kernels(model)
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
    result = run(model, inputs)
    calls = count(model, **inputs)
    torch.save((differences(result, expected), dict(calls)), f"{path}/{rank}")
    dist.destroy_process_group()


def test_context_parallel(k, tmp_path):
    import socket

    import torch.multiprocessing as mp

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(_context_parallel_worker, args=(str(tmp_path), port), nprocs=2)
    for rank in range(2):
        difference, calls = torch.load(tmp_path / str(rank))
        assert difference < 1e-5 and calls["residual_ada_norm"] == 2 + 1
