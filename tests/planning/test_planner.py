"""The planner: its peaks against real tensors for every rung, its choice, and the script that prints it."""

import json
import runpy
from dataclasses import replace

import pytest
import torch
from support.helpers import MODELS, ROOT, RUNGS, SRC, finished, run_script
from support.planning import PATCHES, PIXELS, VIT, measured_peak

from fabric_ladder import Settings, build_model, parse_settings
from fabric_ladder.errors import UserError
from fabric_ladder.planning import planner
from fabric_ladder.planning.candidates import (
    CHECKPOINTING,
    LEAN,
    SHARING,
    list_choices,
    read_candidates,
    relative_speed,
)
from fabric_ladder.planning.formulas import ASSUMED
from fabric_ladder.planning.planner import Machine, Samples, find_peaks, make_plan, recommend
from fabric_ladder.planning.predict import blank_datasets, largest_batches, predict_peak
from fabric_ladder.rungs import script_defaults

SCRIPT = ROOT / "scripts" / "plan_memory.py"
ON_A_CPU = [rung.stem for rung in RUNGS if rung.stem[:2] not in ("3_", "10", "11", "12", "14")]
FAMILIES = ("bloom-quickstart", "vit", "llama-tiny")
LLAMA = MODELS / "llama-tiny.json"


def rung_case(tmp_path, rung, family, length):
    """A rung's own settings for a small model, and its share of an effective batch."""
    options = ["--accelerator", "cpu", "--from_scratch", "true", "--config", "quickstart.yaml", "--devices", "1"]
    if family == "vit":
        (tmp_path / "vit.json").write_text(json.dumps(VIT))
        options += ["--model", str(tmp_path / "vit.json"), "--task", "image-classification"]
    else:
        options += ["--model", str(MODELS / f"{family}.json")]
        options += ["--task", "instruction-tuning"] if family == "llama-tiny" else []
    if rung == "13_lora":
        options += ["--lora_dropout", "0"]
    settings = parse_settings(options, **script_defaults(rung))
    settings = replace(settings, batch_size=min(settings.batch_size, 4), micro_batch_size=min(2, settings.batch_size))
    return settings, largest_batches(settings, length, PIXELS if family == "vit" else None)[0]


def test_the_rungs_that_are_compared_are_all_that_a_process_without_a_gpu_can_compare():
    left_out = {"3_torch_compile", "10_fsdp", "11_fsdp_cpu_offload", "12_deepspeed_zero", "14_qlora"}
    assert {*ON_A_CPU, *left_out} == {rung.stem for rung in SRC.glob("[0-9]*.py")}


def test_every_rung_is_a_candidate():
    alone, together = ({rung for rung, _ in list_choices(gpus)} for gpus in (1, 2))
    assert together == {rung.stem for rung in SRC.glob("[0-9]*.py")}
    assert together - alone == {"9_ddp", "10_fsdp"}


def test_candidates_are_named_by_what_the_user_did_not_say(tmp_path):
    choices = [("11_fsdp_cpu_offload", (*LEAN, *CHECKPOINTING)), ("7_grad_checkpointing", ()), ("1_batch_size_1", ())]
    (lean, *_), _ = read_candidates(choices, bloom(tmp_path, 1), 1)
    assert lean.name == "11_fsdp_cpu_offload bf16-true sgd checkpointing"
    (given, *_), problems = read_candidates(choices, [*bloom(tmp_path, 1), "--optimizer", "adafactor"], 1)
    assert given.name == "7_grad_checkpointing"
    assert "adafactor cannot step on FSDP2's shards" in problems["11_fsdp_cpu_offload bf16-true checkpointing"]
    with pytest.raises(UserError, match="there is no setting 'no_such'"):
        read_candidates(choices, ["--no_such", "1"], 1)


@pytest.mark.filterwarnings("ignore:Module is None")
@pytest.mark.parametrize(
    ("rung", "family"),
    [
        pytest.param(rung, family, marks=[] if number % 3 == other else [pytest.mark.slow])
        for number, rung in enumerate(ON_A_CPU)
        for other, family in enumerate(FAMILIES)
    ],
)
def test_every_rung_s_prediction_agrees_with_real_tensors(tmp_path, rung, family):
    for length in (PATCHES,) if family == "vit" else (48, 160):
        settings, training = rung_case(tmp_path, rung, family, length)
        assert predict_peak(settings, training).total == pytest.approx(measured_peak(settings, training), rel=0.01)


@pytest.mark.parametrize(
    ("ranks", "offload", "precision"),
    [(2, False, "bf16-mixed"), pytest.param(4, True, "32-true", marks=pytest.mark.slow)],
)
def test_sharded_predictions_agree_with_what_real_ranks_hold(tmp_path, ranks, offload, precision):
    values = {"model": str(LLAMA), "from_scratch": True, "task": "instruction-tuning", "precision": precision,
              "batch_size": 8, "micro_batch_size": 1, "devices": ranks, "offload": offload, "accelerator": "cpu",
              "eval_batch_tokens": 64, "optimizer": "adam", "pad_to_multiple_of": 1}  # fmt: skip
    script, question = ROOT / "tests" / "support" / "sharded_peaks.py", json.dumps(values | {"length": 96})
    process = run_script(script, question, cwd=tmp_path, fresh=True, PYTHONPATH=ROOT / "tests")
    held = json.loads(finished(process).strip().splitlines()[-1])
    settings = Settings(**values)
    predicted = predict_peak(settings, largest_batches(settings, 96, ranks=ranks)[0], ranks=ranks)
    assert predicted.phase == held["phase"]
    assert predicted.total == pytest.approx(held["total"], rel=0.03)
    assert predicted.host == pytest.approx(held["host"], rel=0.03)


def bloom(tmp_path, layers):
    config = json.loads((MODELS / "bloom-quickstart.json").read_text()) | {"n_layer": layers, "hidden_size": 256}
    path = tmp_path / f"bloom-{layers}.json"
    path.write_text(json.dumps(config))
    return ["--config", "imdb_bloom_560m.yaml", "--model", str(path)]


def plans_of(rungs, options, memories, length=256):
    """The plans for each size, of the choices for one GPU among these rungs."""
    candidates, _ = read_candidates([each for each in list_choices(1) if each[0] in rungs], options, 1)
    machine = Machine(tuple(memories), ASSUMED)
    figures = find_peaks(candidates, Samples(length), machine)
    return [
        [
            make_plan(candidate, its, options, machine, memory)
            for candidate, its in zip(candidates, figures, strict=True)
        ]
        for memory in memories
    ]


@pytest.mark.parametrize(
    "numbers", [("5_", "7_", "13"), pytest.param(("2_", "4_", "5_", "7_", "11", "13"), marks=pytest.mark.slow)]
)
def test_the_choice_is_monotone_in_memory_and_in_the_model_s_size(tmp_path, numbers):
    memories = [590_000_000, 640_000_000, 700_000_000, 850_000_000, 1_500_000_000]
    rungs = [rung.stem for rung in RUNGS if rung.stem[:2] in numbers]
    small, large = (
        [recommend(plans) for plans in plans_of(rungs, bloom(tmp_path, layers), memories)] for layers in (2, 6)
    )
    speeds = {}
    for weights in ("all weights", "adapters"):
        for name, found in (("small", small), ("large", large)):
            speeds[name] = [each[weights].speed if each[weights] else 0.0 for each in found]
            assert speeds[name] == sorted(speeds[name]), "more memory, slower rung"
        assert all(few <= many for few, many in zip(speeds["large"], speeds["small"], strict=True))
        assert len(set(speeds["large"])) > 2, "the sizes decide nothing"
    assert large[0]["all weights"] is None or large[0]["all weights"].speed < large[-1]["all weights"].speed


def test_the_largest_micro_batch_that_fits_is_found(tmp_path):
    memories, options = (620_000_000, 680_000_000, 760_000_000), bloom(tmp_path, 4)
    for memory, (plan,) in zip(memories, plans_of(["5_low_precision"], options, memories), strict=True):
        settings, fitting = plan.candidate.settings, []
        for size in plan.candidate.micro_batches:
            peak = predict_peak(settings, *largest_batches(replace(settings, micro_batch_size=size), 256))
            if ASSUMED.needed(peak) <= memory:
                fitting.append(size)
        assert plan.fits == bool(fitting)
        assert plan.micro_batch == (fitting[-1] if fitting else 1)


def test_a_process_that_sees_a_gpu_forks_none_that_would_die_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "get_context", lambda _: pytest.fail("forked"))
    monkeypatch.setattr(planner.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (plans,) = plans_of(["5_low_precision", "7_grad_checkpointing"], bloom(tmp_path, 1), [10**12], length=64)
    assert [plan.fits for plan in plans] == [True, True]


def test_the_order_of_speeds_is_the_deepspeed_guide_s():
    stages = [SHARING.get(name, 1.0) for name in ("9_ddp", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")]
    assert stages == sorted(stages, reverse=True)
    assert len(set(stages)) == len(stages)
    settings = Settings(batch_size=16, precision="bf16-true")
    recomputed = replace(settings, activation_checkpointing=True)
    speed, slower = (relative_speed(each, "5_low_precision", 1024) for each in (settings, recomputed))
    assert relative_speed(settings, "5_low_precision", 4096) > speed > slower
    assert relative_speed(recomputed, "7_grad_checkpointing", 1024) > SHARING["10_fsdp"] * speed


def test_4_bit_weights_take_what_the_formula_says(tmp_path):
    pytest.importorskip("bitsandbytes")
    (plans,) = plans_of(["14_qlora"], ["--model", str(LLAMA), *bloom(tmp_path, 2)[:2]], [10**12], length=64)
    model = build_model(plans[0].candidate.settings, blank_datasets(2))
    held = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for parameter in model.parameters() for tensor in (parameter, *quantised(parameter))}  # fmt: skip
    unquantised = sum(
        parameter.numel() * 2
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and parameter.dtype == torch.float32
    )  # Fabric halves these
    assert plans[0].peak.parameters == pytest.approx(sum(held.values()) - unquantised, rel=0.05)


def quantised(parameter):
    """The constants of a 4-bit parameter."""
    if (state := getattr(parameter, "quant_state", None)) is None:
        return []
    return [state.absmax, *([state.state2.absmax] if state.nested else [])]


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


def test_the_script_plans_for_the_gpus_that_it_finds_and_forks_before_it_sees_them(tmp_path):
    script = ROOT / "tests" / "support" / "plan_with_gpu.py"
    process = run_script(script, SCRIPT, *bloom(tmp_path, 2), "--length", "200", "--rungs", "5,10", cwd=tmp_path)
    out = finished(process)
    assert " · 2 x 1 GB · overhead assumed, not measured" in out
    assert int(out.splitlines()[-1]) == 1 + 2, "one process to look for GPUs, two to rehearse"
    assert "Fastest that fits, all weights: 5_low_precision, micro-batch 16" in out


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


def test_sizes_are_read_in_their_units():
    read_sizes = runpy.run_path(str(SCRIPT), run_name="plan_memory")["read_sizes"]
    assert read_sizes("80GB, 24 gb,16,16GB,0.5GiB,800MB,512MiB", "--gpu_memory") == (
        *(512 * 2**20, 800 * 10**6, 16 * 10**9, 24 * 10**9, 80 * 10**9),
    )


def test_the_calibration_s_training_runs():
    script = runpy.run_path(str(SCRIPT), run_name="plan_memory")
    options = ["--config", "quickstart.yaml", "--accelerator", "cpu"]
    assert script["train_briefly"](options, (16, 24)) is None
