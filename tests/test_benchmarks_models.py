"""The benchmarks of whole models: e2e.py on tiny ones, what an interrupt leaves, and the table of all results."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT
from test_results_schema import GOOD

sys.path.insert(0, str(ROOT / "benchmarks"))
_results = pytest.importorskip("_results", reason="benchmarks/ is not there (a Nix build has only tests/)")
_timing = pytest.importorskip("_timing")
_models = pytest.importorskip("_models")
_workloads = pytest.importorskip("_workloads")
summary = pytest.importorskip("summary")


@pytest.fixture
def e2e(k, tmp_path, monkeypatch):
    """Run e2e.py in this process on tiny models; returns the result that it wrote."""
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    module = pytest.importorskip("e2e")
    monkeypatch.setattr(module, "load_package", lambda: k)
    out = tmp_path / "e2e.json"

    def result():
        result = json.loads(out.read_text())
        assert not _results.problems(result)
        return result

    def run(*arguments):
        command = ["--tiny", "--budget-ms", "1", "--rounds", "1", "--out", str(out), *arguments]
        assert module.main(command) == 0
        return result()

    run.module, run.result = module, result
    return run


def candidates(result, op) -> dict[str, dict]:
    return {row["candidate"]: row for row in result["rows"] if row["op"] == op}


@pytest.mark.parametrize("model", list(_models.FAMILIES))
def test_every_family_is_measured_and_agrees_with_stock(e2e, model, capsys):
    family = _models.FAMILIES[model]
    timed = [part for part in ("step", "prefill", "decode") if part in family.parts]
    parts = ",".join([*timed, "accuracy"])
    result = e2e("--model", model, "--parts", parts, "--configurations", "stock,injected")
    ops = {row["op"] for row in result["rows"]}
    name = f"tiny_{family.op}"
    decodes = {f"{name}:decode[{cache} cache]" for cache in ("dynamic", "static")} if "decode" in timed else set()
    assert ops == decodes | {f"{name}:{part}" for part in [*timed, "accuracy"] if part != "decode"}
    for op in ops - {f"{name}:accuracy"}:
        assert all(row["us_median"] for row in candidates(result, op).values()), op
    differences = re.findall(r"injected: relative difference to stock (\S+)", capsys.readouterr().out)
    assert len(differences) == len(ops) - 1
    assert all(float(d) < (1e-4 if not torch.cuda.is_available() else 5e-2) for d in differences)
    errors = {n: row["error_fp64"] for n, row in candidates(result, f"{name}:accuracy").items()}
    assert errors["injected"] < (1e-4 if not torch.cuda.is_available() else 5e-2)


#: Billions of parameters as the model cards give them.
PARAMETERS = {
    **{"ltx-2b": 1.9, "ltx-13b": 13.0, "flux": 11.9, "sdxl": 2.57, "sd35-large": 8.06, "wan-1.3b": 1.42},
    **{"hunyuan-video": 12.8, "cogvideox-5b": 5.57, "qwen-image": 20.4, "llama-3-8b": 8.03, "qwen3-8b": 8.19},
}


@pytest.mark.parametrize("model", list(_models.FAMILIES))
def test_the_true_size_has_the_parameters_of_the_released_model(model):
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    family = _models.FAMILIES[model]
    config, depth = family.configured(False, None)
    built = family.build(config, "meta", torch.bfloat16)
    assert depth == ""
    assert sum(p.numel() for p in built.parameters()) / 1e9 == pytest.approx(PARAMETERS[model], rel=0.02)


@pytest.mark.parametrize("model", [name for name, family in _models.FAMILIES.items() if family.inputs])
def test_the_accuracy_of_a_model_is_that_of_an_input_that_fp32_can_bear(e2e, model):
    """fp32 without tensor cores, and attention that grows with the square of the tokens."""
    family = _models.FAMILIES[model]
    config, _ = family.configured(False, e2e.module.ACCURATE_BLOCKS if family.depth else None)
    built = family.build(config, "meta", torch.bfloat16)
    frames = min(family.sizes["frames"][0], e2e.module.ACCURATE_FRAMES)
    _, (batch, tokens, _) = family.inputs(
        built.config, lambda *shape: torch.zeros(shape), {**family.sizes, "frames": frames}
    )
    # The UNet's are pixels of the latents; its attention is over a quarter of them, and less.
    assert batch * tokens <= (32768 if model == "sdxl" else 20000)


def test_a_reduced_depth_stands_in_the_rows(e2e):
    result = e2e("--model", "flux", "--parts", "step", "--depth", "2", "--configurations", "stock")
    assert {row["op"] for row in result["rows"]} == {"tiny_flux_1[2 of 3 blocks]:step"}
    with pytest.raises(SystemExit, match="has no depth"):
        e2e("--model", "sdxl", "--parts", "step", "--depth", "2")


def test_what_is_measured_without_a_kind_is_not_taken_for_the_whole(e2e):
    """Nor found there already: it would be neither measured nor told apart."""
    arguments = ("--parts", "step", "--configurations", "injected")
    whole = e2e(*arguments)["rows"]
    both = e2e(*arguments, "--skip", "gelu", "--skip", "ltx_video.rope")["rows"]
    assert both[: len(whole)] == whole
    assert {row["op"] for row in both[len(whole) :]} == {"tiny_ltx_video_2b[without gelu, ltx_video.rope]:step"}


def test_a_configuration_that_fails_is_a_row_with_its_reason(e2e, monkeypatch, k):
    class Broken:
        __file__ = k.__file__

        @staticmethod
        def inject_optimized_kernels(model, skip):
            raise torch.OutOfMemoryError("needs 5 GiB")

    monkeypatch.setattr(e2e.module, "load_package", lambda: Broken)
    rows = candidates(e2e("--parts", "step", "--configurations", "stock,injected"), "tiny_ltx_video_2b:step")
    assert rows["stock"]["us_median"] > 0
    assert rows["injected"]["reason"] == "OutOfMemoryError: needs 5 GiB"


def test_a_model_that_injection_breaks_is_not_timed(e2e, monkeypatch, k):
    class Broken:
        __file__ = k.__file__

        @staticmethod
        def inject_optimized_kernels(model, skip):
            model.proj_out.forward = lambda x: x.new_zeros(*x.shape[:-1], model.proj_out.out_features)

    monkeypatch.setattr(e2e.module, "load_package", lambda: Broken)
    rows = candidates(e2e("--parts", "step", "--configurations", "stock,injected"), "tiny_ltx_video_2b:step")
    assert rows["stock"]["us_median"] > 0
    assert rows["injected"]["reason"].startswith("RuntimeError: wrong: relative difference 1.0e+00")


def test_a_row_of_steps_lasts_no_longer_than_it_needs():
    calls = []

    def call():
        calls.append(0)
        time.sleep(0.02)

    runs = {name: _workloads.Run(call, call, units=2) for name in "ab"}
    for row_ms, expected in ((1, 1), (35, 2), (1000, 4)):
        rows = _workloads.in_a_row(runs, 4, row_ms)
        assert {name: row.units for name, row in rows.items()} == dict.fromkeys("ab", 2 * expected), row_ms
        calls.clear()
        rows["a"].call()
        assert len(calls) == expected
    assert _workloads.in_a_row(runs, 1, 1000) is runs


def test_an_interrupt_leaves_what_was_measured_and_it_is_measured_again(e2e, monkeypatch):
    arguments = ("--parts", "step", "--configurations", "stock,injected")
    run = _timing.Bench.run

    def stopped(bench, *rest):
        run(bench, *rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(_timing.Bench, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        e2e(*arguments)
    rows = candidates(e2e.result(), "tiny_ltx_video_2b:step")
    assert set(rows) == {"stock", "injected"}
    assert all(row["us_median"] and row["method"].startswith("interrupted: 3 samples") for row in rows.values())
    monkeypatch.setattr(_timing.Bench, "run", run)
    whole = e2e(*arguments)
    assert all(row["method"].startswith("3 samples") for row in whole["rows"])
    monkeypatch.setattr(_timing.Bench, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        e2e("--parts", "step", "--configurations", "compiled")
    assert e2e.result()["rows"] == whole["rows"], "a part replaces no whole"


def test_sigint_ends_a_run_quickly_without_a_traceback(tmp_path):
    """Twice, as `timeout --signal=INT` sends it."""
    pytest.importorskip("diffusers")
    out = tmp_path / "e2e.json"
    command = [sys.executable, "benchmarks/e2e.py", "--tiny", "--parts", "step", "--configurations", "stock,injected"]
    command += ["--budget-ms", "600000", "--rounds", "1000", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # on busy cores two threads wait for each other
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
    try:
        for line in run.stdout:
            if "injected: relative difference" in line:
                break
        time.sleep(2)  # among the samples
        start = time.perf_counter()
        run.send_signal(signal.SIGINT)
        time.sleep(0.01)
        run.send_signal(signal.SIGINT)
        rest, said = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130
    assert time.perf_counter() - start < 10
    assert "Traceback" not in said and said.splitlines()[-1] == "stopped: the same command goes on"
    rows = json.loads(out.read_text())["rows"]
    assert rows and all(row["method"].startswith("interrupted: ") for row in rows), said
    assert " ms (p10" in rest, "the table of what there is"


def test_e2e_goes_on_where_it_stopped(e2e, capsys):
    arguments = ("--parts", "step", "--configurations")
    first = e2e(*arguments, "stock")
    assert e2e(*arguments, "stock")["rows"] == first["rows"], "nothing is measured twice"
    both = e2e(*arguments, "injected")
    assert {row["candidate"] for row in both["rows"]} == {"stock", "injected"}
    assert candidates(both, "tiny_ltx_video_2b:step")["stock"] != first["rows"][0], "compared inside one run"
    assert "\nworst: tiny_ltx_video_2b:step 2x12x64, stock/injected " in capsys.readouterr().out


def test_vae_and_pipeline_of_ltx_video(e2e):
    result = e2e("--parts", "vae,pipeline", "--configurations", "stock,injected", "--steps", "2")
    assert set(candidates(result, "tiny_ltx_vae:decode")) == {"stock", "injected_no_format", "injected"}
    assert set(candidates(result, "tiny_ltx_video_2b:pipeline[2 steps]")) == {"stock", "injected"}
    assert all(row["us_median"] for row in result["rows"])


@pytest.mark.parametrize("option", ["--rounds", "--steps", "--depth", "--frames", "--height", "--width"])
@pytest.mark.parametrize("value", ["0", "-1", "2.5", "many"])
def test_a_count_that_is_none_is_an_error(e2e, capsys, option, value):
    with pytest.raises(SystemExit):
        e2e(option, value)
    assert f"'{value}' is not a whole number from 1 on" in capsys.readouterr().err


def test_a_part_or_configuration_that_does_not_exist_is_an_error(e2e, capsys):
    for wrong in (("--model", "flux", "--parts", "vae"), ("--configurations", "fast")):
        with pytest.raises(SystemExit):
            e2e(*wrong)
        assert re.search("has no vae|is called fast", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void ltx_kernels::norm::forward<__nv_bfloat16, 2>(Params)", "ours"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_bias_TNT", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "gemm"),
        ("std::enable_if<true, void>::type internal::gemvx::kernel<int, int, __nv_bfloat16>", "gemm"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "gemm"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_add_mul_3", "other"),
        ("triton_tem_fused_addmm_1", "gemm"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>", "other"),
    ],
)
def test_kernels_are_told_apart_by_their_names(e2e, kernel, kind):
    assert e2e.module.kind_of(kernel) == kind


# ---- summary.py


def of_model(op: str, **times) -> list[dict]:
    """The rows of a model's problem: ms of each configuration, with a spread of 1 %, or the reason that it has none."""
    rows = []
    for candidate, ms in times.items():
        failed = isinstance(ms, str)
        spread = (None,) * 3 if failed else (990.0 * ms, 1000.0 * ms, 1010.0 * ms)
        reason = {"reason": ms} if failed else {}
        problem = {"op": op, "shape": [1, 64, 64], "candidate": candidate}
        rows.append({**GOOD["rows"][0], **problem, **dict(zip(_results.TIMES, spread)), **reason})
    return rows


GOOD_MODEL = of_model("flux_1:step", stock=150, compiled=120, injected=100, injected_compiled=96)
FLOOR = [of_model(f"flux_1:step:{kind}", injected=ms)[0] for kind, ms in (("gpu", 90), ("gemm", 50), ("attention", 25))]
OF_MODELS = {
    "never slower": ([*GOOD_MODEL, *FLOOR], "flux_1:step", "compiled/injected_compiled 1.250: faster"),
    "slower than compile alone": (
        [*of_model("sdxl:step", stock=70, compiled=50, injected=60, injected_compiled=62.5), *GOOD_MODEL],
        "sdxl:step",
        "compiled/injected_compiled 0.800: slower beyond the spread",
    ),
    "slower within the spread": (
        [*GOOD_MODEL, *of_model("wan:step", stock=100, injected=101)],
        "wan:step",
        "stock/injected 0.990: within the spread",
    ),
    "failed": (
        [*of_model("dit:step", stock=100, injected="RuntimeError: wrong"), *GOOD_MODEL],
        "dit:step",
        "stock/injected 0.000: RuntimeError: wrong",
    ),
}


@pytest.mark.parametrize("what", OF_MODELS)
def test_the_summary_of_models_ends_with_the_worst(what, tmp_path, capsys):
    rows, op, said = OF_MODELS[what]
    (tmp_path / "e2e_models.json").write_text(_results.dump({**GOOD, "rows": rows}))
    (tmp_path / "rmsnorm.json").write_text("{}")  # no model's
    assert summary.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"worst: {op} 1x64x64, {said}"
    assert lines[-2].startswith(op)
    flux = next(line.split() for line in lines if line.startswith("flux_1:step"))
    floor = "1.200" if rows[-1] in FLOOR else "-"
    assert flux == ["flux_1:step", "1x64x64", "bf16", "150.00", "120.00", "100.00", "96.00", "1.500", "1.250", floor]


def test_a_summary_of_an_interrupted_run_says_so_and_one_of_nothing_fails(tmp_path, capsys):
    rows = [{**row, "method": "interrupted: 2 samples"} for row in of_model("wan:step", stock=100, injected=80)]
    assert " 100.00? " in summary.summary([{"rows": rows}])
    assert summary.main([str(tmp_path)]) == 1
    assert "no result of a model" in capsys.readouterr().out
