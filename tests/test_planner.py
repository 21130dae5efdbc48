"""The planner: its peaks against real tensors for every rung, its choice, and what a run says of its own peak."""

import json
import os
from dataclasses import replace

import pytest
import torch
from helpers import MODELS, ROOT, RUNGS, SMALL, SRC, finished, run_script, settings_for
from test_memory import VIT, measured_peak

from fabric_ladder import Settings, build_model, parse_settings
from fabric_ladder.candidates import SHARING, Candidate, candidates, relative_speed
from fabric_ladder.errors import UserError
from fabric_ladder.expected import Expected
from fabric_ladder.formulas import NF4_BYTES, Counts, in_4_bits, with_8_bit_adam, with_zero
from fabric_ladder.memory import blank_datasets, largest_batches, predict_peak
from fabric_ladder.overhead import ASSUMED, KEPT, Overhead, keep_overhead, load_overhead, measure_overhead
from fabric_ladder.planner import Limits, Samples, find_peaks, make_plan, make_ways, recommend
from fabric_ladder.rungs import script_defaults
from fabric_ladder.tracker import Peak

SCRIPT = ROOT / "scripts" / "plan_memory.py"
ON_A_CPU = [rung.stem for rung in RUNGS if rung.stem[:2] not in ("3_", "10", "11", "12", "14")]
LLAMA = MODELS / "llama-tiny.json"


def rung_case(tmp_path, rung, kind, length):
    """A rung's own settings for a small model, how to build it, and its share of an effective batch."""
    options = ["--accelerator", "cpu", "--from_scratch", "true", "--config", "quickstart.yaml", "--devices", "1"]
    if kind == "vit":
        (tmp_path / "vit.json").write_text(json.dumps(VIT))
        options += ["--model", str(tmp_path / "vit.json"), "--task", "image-classification"]
    else:
        options += ["--model", str(MODELS / f"{kind}.json")]
        options += ["--task", "instruction-tuning"] if kind == "llama-tiny" else []
    if rung == "13_lora":
        options += ["--lora_dropout", "0"]
    settings = parse_settings(options, **script_defaults(rung))
    settings = replace(settings, batch_size=min(settings.batch_size, 4), micro_batch_size=min(2, settings.batch_size))
    image = 64 if kind == "vit" else None
    datasets = blank_datasets(2, image)
    training, _ = largest_batches(settings, length, image)
    return settings, lambda: build_model(settings, datasets), training


def test_the_rungs_that_are_compared_are_all_that_a_process_without_a_gpu_can_compare():
    left_out = {"3_torch_compile", "10_fsdp", "11_fsdp_cpu_offload", "12_deepspeed_zero", "14_qlora"}
    assert {*ON_A_CPU, *left_out} == {rung.stem for rung in SRC.glob("[0-9]*.py")}


def test_every_rung_is_a_candidate():
    assert {candidate.rung for candidate in candidates(2)} == {rung.stem for rung in SRC.glob("[0-9]*.py")}
    assert {candidate.rung for candidate in candidates(2)} - {each.rung for each in candidates(1)} == {
        "9_ddp",
        "10_fsdp",
    }


@pytest.mark.filterwarnings("ignore:Module is None")
@pytest.mark.parametrize("kind", ["bloom-quickstart", "vit", "llama-tiny"])
@pytest.mark.parametrize("rung", ON_A_CPU)
def test_every_rung_s_prediction_agrees_with_real_tensors(tmp_path, rung, kind):
    for length in (65,) if kind == "vit" else (48, 160):
        settings, build, training = rung_case(tmp_path, rung, kind, length)
        predicted = predict_peak(build, settings, training).total
        assert predicted == pytest.approx(measured_peak(settings, build, training), rel=0.01)


@pytest.mark.parametrize(("ranks", "offload", "precision"), [(2, False, "bf16-mixed"), (4, True, "32-true")])
def test_sharded_predictions_agree_with_what_real_ranks_hold(tmp_path, ranks, offload, precision):
    values = {"model": str(LLAMA), "from_scratch": True, "task": "instruction-tuning", "precision": precision,
              "batch_size": 8, "micro_batch_size": 1, "devices": ranks, "offload": offload, "accelerator": "cpu",
              "eval_batch_tokens": 64, "optimizer": "adam"}  # fmt: skip
    process = run_script(
        ROOT / "tests" / "sharded_peaks.py", json.dumps(values | {"length": 96}), cwd=tmp_path, fresh=True
    )
    held = json.loads(finished(process).strip().splitlines()[-1])
    settings = Settings(**values)
    training, _ = largest_batches(settings, 96, ranks=ranks)
    predicted = predict_peak(lambda: build_model(settings, blank_datasets(2)), settings, training, ranks=ranks)
    assert predicted.phase == held["phase"]
    assert predicted.total == pytest.approx(held["total"], rel=0.03)
    assert predicted.host == pytest.approx(held["host"], rel=0.03)


def bloom(tmp_path, layers):
    config = json.loads((MODELS / "bloom-quickstart.json").read_text()) | {"n_layer": layers, "hidden_size": 256}
    path = tmp_path / f"bloom-{layers}.json"
    path.write_text(json.dumps(config))
    return ["--config", "imdb_bloom_560m.yaml", "--model", str(path)]


def choices(options, memories, gpus=1, found=None):
    """The recommended ways for each size, fastest first."""
    ways, _ = make_ways(found or candidates(gpus), options, gpus)
    limits = Limits(tuple(memories), ASSUMED)
    figures = find_peaks(ways, Samples(256), limits)
    return [
        recommend([make_plan(way, its, options, ASSUMED, memory) for way, its in zip(ways, figures, strict=True)])
        for memory in memories
    ]


def test_the_choice_is_monotone_in_memory_and_in_the_model_s_size(tmp_path):
    memories = [590_000_000, 640_000_000, 700_000_000, 850_000_000, 1_500_000_000]
    few = [each for each in candidates(1) if each.rung[:2] in ("2_", "4_", "5_", "7_", "11", "13")]
    small, large = (choices(bloom(tmp_path, layers), memories, found=few) for layers in (2, 6))
    speeds = {}
    for kind in ("all weights", "adapters"):
        for name, found in (("small", small), ("large", large)):
            speeds[name] = [each[kind].speed if each[kind] else 0.0 for each in found]
            assert speeds[name] == sorted(speeds[name]), "more memory, slower rung"
        assert all(few <= many for few, many in zip(speeds["large"], speeds["small"], strict=True))
        assert len(set(speeds["large"])) > 2, "the sizes decide nothing"
    assert large[0]["all weights"] is None or large[0]["all weights"].speed < large[-1]["all weights"].speed


def test_the_largest_micro_batch_that_fits_is_found(tmp_path):
    options = bloom(tmp_path, 4)
    ways, _ = make_ways([Candidate("5_low_precision")], options, 1)
    memories = (620_000_000, 680_000_000, 760_000_000)
    (figures,) = find_peaks(ways, Samples(256), Limits(memories, ASSUMED))
    settings = ways[0].settings
    for memory in memories:
        plan = make_plan(ways[0], figures, options, ASSUMED, memory)
        fitting = []
        for size in ways[0].sizes:
            batches = largest_batches(replace(settings, micro_batch_size=size), 256)
            peak = predict_peak(lambda: build_model(settings, blank_datasets(2)), settings, *batches)
            if peak.total + ASSUMED.beside(peak.total) <= memory:
                fitting.append(size)
        assert plan.fits == bool(fitting)
        assert plan.micro_batch == (fitting[-1] if fitting else 1)


def test_the_order_of_speeds_is_the_deepspeed_guide_s():
    stages = [SHARING.get(name, 1.0) for name in ("9_ddp", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")]
    assert stages == sorted(stages, reverse=True)
    assert len(set(stages)) == len(stages)
    settings = Settings(batch_size=16, precision="bf16-true")
    again = replace(settings, activation_checkpointing=True)
    speed = relative_speed(settings, "5_low_precision", 1024)
    assert relative_speed(settings, "5_low_precision", 4096) > speed > relative_speed(again, "5_low_precision", 1024)
    assert relative_speed(again, "7_grad_checkpointing", 1024) > SHARING["10_fsdp"] * speed


COUNTS = Counts(all=10_000, trained=10_000, largest_layer=700, linear=0, largest_linear=0)
NOTHING = Peak(0, 0, 0, 0, 0, 0, 0, "training", [])


@pytest.mark.parametrize("ranks", [1, 4])
def test_zero_s_states_are_those_of_deepspeed_s_own_estimates(ranks):
    stage_2 = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2").estimate_zero2_model_states_mem_needs
    stage_3 = pytest.importorskip("deepspeed.runtime.zero.stage3").estimate_zero3_model_states_mem_needs
    none = {"reduce_bucket_size": 0, "allgather_bucket_size": 0}
    cpu = {"device": "cpu"}

    def mine(**config):
        peak = with_zero(NOTHING, COUNTS, none | config, "adam", ranks)
        return peak.host * ranks, peak.total

    assert mine(stage=2)[1] == stage_2(10_000, ranks, 1, cpu_offload=False)[1]
    assert mine(stage=2, offload_optimizer=cpu) == pytest.approx(stage_2(10_000, ranks, 1, cpu_offload=True), abs=4)
    assert mine(stage=3)[1] == stage_3(10_000, 700, ranks, 1, False, False, False)[1]
    estimate = stage_3(10_000, 700, ranks, 1, True, False, False)[:2]
    assert mine(stage=3, offload_optimizer=cpu) == pytest.approx(estimate, abs=4)
    estimate = stage_3(10_000, 700, ranks, 1, True, True, False)[:2]
    assert mine(stage=3, offload_optimizer=cpu, offload_param=cpu) == pytest.approx(estimate, abs=4)
    assert mine(stage=1)[1] == 20_000 + 60_000 + 120_000 / ranks


def test_what_few_bits_take():
    assert pytest.approx(4.127, abs=5e-4) == NF4_BYTES * 8  # bits a weight, as the article says
    peak = in_4_bits(NOTHING._replace(parameters=20_000), COUNTS._replace(linear=8_000, largest_linear=500))
    assert peak.parameters == 20_000 - 16_000 + round(8_000 * NF4_BYTES)
    assert peak.other == 1_000, "one layer is unpacked at a time"
    assert with_8_bit_adam(NOTHING, COUNTS).optimizer_state == 20_000 + 2 * 10_000 * 4 // 256


def test_4_bit_weights_take_what_the_formula_says(tmp_path):
    pytest.importorskip("bitsandbytes")
    ways, _ = make_ways([Candidate("14_qlora")], ["--model", str(LLAMA), *bloom(tmp_path, 2)[:2]], 1)
    settings = ways[0].settings
    (figures,) = find_peaks(ways, Samples(64), Limits((10**12,), ASSUMED))
    model = build_model(settings, blank_datasets(2))
    held = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for parameter in model.parameters() for tensor in (parameter, *quantised(parameter))}  # fmt: skip
    unquantised = sum(
        parameter.numel() * 2
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and parameter.dtype == torch.float32
    )  # Fabric halves these
    peak = next(iter(figures.peaks.values()))
    assert peak.parameters == pytest.approx(sum(held.values()) - unquantised, rel=0.05)


def quantised(parameter):
    """The constants of a 4-bit parameter."""
    if (state := getattr(parameter, "quant_state", None)) is None:
        return []
    return [state.absmax, *([state.state2.absmax] if state.nested else [])]


def test_overheads_are_kept_by_gpu_and_version(tmp_path):
    measured = Overhead(400_000_000, 9_000_000, 0.02, "measured on A, torch x")
    assert load_overhead(str(tmp_path), "A") is ASSUMED
    keep_overhead(str(tmp_path), "A", measured)
    keep_overhead(str(tmp_path), "B", measured._replace(context=1))
    assert load_overhead(str(tmp_path), "A") == measured
    assert load_overhead(str(tmp_path), "B").context == 1
    assert load_overhead(str(tmp_path), "C") is ASSUMED
    (tmp_path / KEPT).write_text("{")
    assert load_overhead(str(tmp_path), "A") is ASSUMED
    assert measured.beside(1_000_000_000) == 400_000_000 + 9_000_000 + round(0.02 * 1_009_000_000)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="--calibrate measures a CUDA GPU"):
            measure_overhead(lambda: None)


def plan(cwd, *options, **environment):
    return run_script(SCRIPT, *options, cwd=cwd, HF_HUB_OFFLINE=1, **environment)


def test_the_script_prints_a_table_a_choice_and_files(tmp_path):
    model = ["--config", "imdb_bloom_560m.yaml", "--model", bloom(tmp_path, 2)[-1], "--length", "200"]
    files = ["--json", "p.json", "--markdown", "p.md"]
    out = finished(plan(tmp_path, *model, "--gpu_memory", "1GB", "--rungs", "2,5,7", *files))
    assert "effective batch 16 · samples of 200 tokens · 1 x 1 GB · overhead assumed, not measured" in out
    assert "Fastest that fits, all weights: 5_low_precision, micro-batch 16" in out
    record = json.loads((tmp_path / "p.json").read_text())
    (size,) = record["sizes"]
    assert [row["rung"] for row in size["rows"]] == ["2_grad_accum", "5_low_precision", "7_grad_checkpointing"]
    chosen = size["rows"][size["recommended"]["all weights"]]
    assert chosen["peak"]["total"] + chosen["overhead"] + chosen["room"] == 1_000_000_000
    assert chosen["command"] in out
    assert size["recommended"]["adapters"] is None
    assert (tmp_path / "p.md").read_text().count("\n| ") == 4
    words = [*chosen["command"].split()[2:], "--accelerator", "cpu", "--check_only", "true"]
    assert run_script(SRC / "5_low_precision.py", *words, cwd=tmp_path).returncode == 0, "the command is not one"


def test_the_script_says_what_it_would_take(tmp_path):
    options = [*bloom(tmp_path, 2), "--length", "200", "--rungs", "2,5"]
    out = finished(plan(tmp_path, *options, "--gpu_memory", "560MB,2GB"))
    assert "0.56 GB: Nothing fits. It would take a GPU of 0.6 GB, for 5_low_precision; or shorter samples" in out
    assert "2 GB: Fastest that fits, all weights" in out


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--gpu_memory", "16 XB"], "--gpu_memory 16 XB: give a size such as 16GB"),
        (["--gpu_memory", "0GB"], "--gpu_memory 0GB: give a size"),
        (["--gpu_memory", "16GB", "--devices", "0"], "--devices 0: must be at least 1"),
        (["--gpu_memory", "16GB", "--length", "5000"], "--length 5000: must be from 2 to --max_length 1024"),
        (["--gpu_memory", "16GB", "--rungs", "77"], "there is no rung 77"),
        (["--gpu_memory", "16GB", "--model", "nobody/nothing"], "cannot load the model 'nobody/nothing'"),
        (["--gpu_memory", "16GB", "--model", "empty.json"], "empty.json is no model config"),
        (
            ["--gpu_memory", "16GB", "--model", "vit.json", "--task", "image-classification"],
            "vit.json is no model config",
        ),
        (["--gpu_memory", "16GB", "--no_such", "1"], "there is no setting 'no_such'"),
        (["--calibrate"], "--calibrate measures a CUDA GPU"),
        ([], "say which one to plan for"),
    ],
)
def test_bad_input_is_one_line(tmp_path, options, line):
    if not torch.cuda.is_available() or "--gpu_memory" in options:
        (tmp_path / "empty.json").write_text("{}")
        (tmp_path / "vit.json").write_text('{"model_type": "vit", "image_size": null}')
        model = [] if "--model" in options else ["--model", str(MODELS / "bloom-quickstart.json")]
        process = plan(tmp_path, "--config", "imdb_bloom_560m.yaml", *model, *options)
        assert process.returncode == 2
        assert line in process.stderr
        assert process.stderr.count("\n") == 1
        assert not (tmp_path / "runs").exists()


def test_a_run_s_prediction_leaves_no_trace_and_is_kept(tmp_path):
    def run(number, **environment):
        out = finished(run_script(SRC / "4_mixed_precision.py", *SMALL, "--runs_dir", f"runs{number}", cwd=tmp_path,
                                  FABRIC_LADDER_CACHE=tmp_path / "cache", **environment))  # fmt: skip
        record = json.loads((tmp_path / f"runs{number}" / "4_mixed_precision" / "1" / "run.json").read_text())
        return [line for line in out.splitlines() if "Loss" in line or "acc" in line or "redicted peak" in line], record

    first, record = run(1)
    kept = list((tmp_path / "cache" / "memory").glob("*.json"))
    second, again = run(2)
    assert first == second
    assert len(kept) == len(list((tmp_path / "cache" / "memory").glob("*.json"))) == 1
    results = record["results"]
    assert results["predicted_peak_bytes"] == again["results"]["predicted_peak_bytes"] > 0
    parts = dict(results["predicted"])
    phase, host = parts.pop("phase"), parts.pop("host")
    assert sum(parts.values()) == results["predicted_peak_bytes"]
    assert (phase, host) == ("training", 0) or phase == "evaluation"
    assert any(line.startswith("Predicted peak: 0.0") for line in first)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: the planner does not fork")
def test_a_forked_rehearsal_asks_no_gpu(tmp_path, monkeypatch):
    """A GPU that the parent has used cannot be asked in a fork: the question itself would fail."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: 1 / 0)
    ways, _ = make_ways([Candidate("5_low_precision"), Candidate("7_grad_checkpointing")], bloom(tmp_path, 2), 1)
    figures = find_peaks(ways, Samples(64), Limits((10**12,), ASSUMED))
    assert all(peak.total for each in figures for peak in each.peaks.values())


def test_what_cannot_be_predicted_does_not_stop_a_run(tmp_path):
    out = finished(run_script(SRC / "2_grad_accum.py", *SMALL, "--micro_batch_tokens", "auto", cwd=tmp_path))
    assert "Predicted peak: unknown (--micro_batch_tokens auto tries what fits)" in out
    assert "Memory predicted" not in out


def test_a_gpu_that_is_too_small_is_named_with_the_next_script(tmp_path):
    settings = settings_for(tmp_path, name="5_low_precision", batch_size=16, micro_batch_size=2)
    expected = Expected(NOTHING._replace(parameters=3_000_000_000, activations=5_000_000_000))
    line = expected.line(settings, {"gpu": "a GPU", "gpu_memory": 8_000_000_000})
    assert "8.00 GB (weights 3.00, activations 5.00); 8.97 of 8.00 GB with CUDA's own, so it may not fit" in line
    assert "6_lean_optimizer" in line
    assert "may not fit" not in expected.line(settings, {"gpu": "a GPU", "gpu_memory": 9_000_000_000})
    assert expected.end_line(8_400_000_000, of_gpu=True) == "Memory predicted: 8.00 GB, measured +0.40 GB (+4.8%)"


def test_the_calibration_s_training_runs(tmp_path):
    import runpy

    script = runpy.run_path(str(SCRIPT), run_name="plan_memory")
    options = ["--config", "quickstart.yaml", "--accelerator", "cpu"]
    assert script["train_briefly"](options, (16, 24)) is None
