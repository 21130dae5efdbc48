"""Plans for a Mac: one memory for CPU and GPU, and the settings and operations of PyTorch on its GPU."""

import json
import re
import shlex
from argparse import Namespace
from dataclasses import replace

import psutil
import pytest
import torch
from support.helpers import MODELS, ROOT, RUNGS, finished, run_script
from support.planning import case, measured_peak
from torch.nn.attention import SDPBackend, sdpa_kernel

from fabric_ladder.cli import parse_settings
from fabric_ladder.errors import UserError
from fabric_ladder.planning import plan, planner
from fabric_ladder.planning.candidates import as_on_mac, list_choices, read_candidates, relative_speed
from fabric_ladder.planning.gpus import _list_gpus, find_gpu, mac
from fabric_ladder.planning.memory import predict_memory
from fabric_ladder.planning.overhead import ON_MAC
from fabric_ladder.planning.planner import MACOS, WITHOUT_CUDA, Machine, Samples
from fabric_ladder.planning.predict import blank_datasets, largest_batches, predict_peak
from fabric_ladder.planning.rehearsal import rehearse
from fabric_ladder.planning.report import Answer, answer_lines
from fabric_ladder.rungs import script_defaults

SCRIPT = ROOT / "scripts" / "plan_memory.py"
MODEL = str(MODELS / "bloom-quickstart.json")
MAC = mac("Mac 16 GB", 16 * 10**9)


def candidates_of(rungs, *options):
    """Return the candidates of these rungs on a Mac, and the problems."""
    choices, _ = list_choices([rung for rung in RUNGS if rung.stem in rungs], 1)
    return read_candidates(choices, as_on_mac(["--model", MODEL, "--batch_size", "8", *options]), 1, MAC)


@pytest.fixture(scope="module")
def plan_for():
    """Return a function that plans rung 2 for a Mac; all plans share a rehearsal, which has ended."""
    candidate = candidates_of(["2_grad_accum"], "--eval_batch_tokens", "64")[0][0]
    with rehearse(candidate.settings, blank_datasets(2)) as rehearsal:
        for size in candidate.micro_batches:
            settings = planner._cut(candidate.settings, size)
            rehearsal.peak(settings, *largest_batches(settings, 64))
    return lambda gpu: planner._make_plan(candidate, rehearsal, Samples(64), Machine(gpu, overhead=ON_MAC))


def test_macs_are_found_by_name_and_memory():
    sizes = {"Mac 16 GB": 16, "M2 16GB": 16, "mps 24GB": 24, "Mac mini 32 GB": 32, "MacBook Pro 16 36GB": 36,
             "Apple M4 Max 128 GB": 128}  # fmt: skip
    for name, size in sizes.items():
        gpu = find_gpu(name)
        assert (gpu.memory, gpu.capability) == (size * 10**9, None)
        least, most = (part / gpu.memory for part in gpu.usable)
        assert (round(least, 2), round(most, 2)) == ((0.67, 0.75) if size < 36 else (0.75, 0.84))
    for name, line in (("M40 24GB", "not in the table"), ("Mac", "name the memory of the Mac, too")):
        with pytest.raises(UserError, match=line):
            find_gpu(name)


def test_the_memory_of_a_mac_may_have_a_decimal():
    assert find_gpu("Mac 17.2 GB").memory == 17_200_000_000


def test_this_mac_is_planned_with_its_own_limit(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 123)
    (gpu,) = _list_gpus()
    assert (gpu.memory, gpu.usable) == (psutil.virtual_memory().total, (123, 123))
    monkeypatch.setattr(plan, "own_gpus", lambda: [gpu])
    machine, (note,) = plan.find_machine(Namespace(gpu=None, devices=None, gpu_memory=None, host_memory=None))
    assert (machine.gpu, machine.gpus, machine.host_memory) == (gpu, 1, None)
    assert "PYTORCH_MPS_HIGH_WATERMARK_RATIO=1.0" in note


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"gpu": "M2 16GB", "devices": 2}, "2 GPUs: a Mac has one"),
        ({"gpu": "T4, Mac 16 GB"}, "2 GPUs: a Mac has one"),
        ({"gpu": "Mac 16 GB", "host_memory": "8GB"}, "--host_memory 8GB: CPU and GPU of a Mac share one memory"),
        ({"gpu": "Mac 16 GB", "gpu_memory": "8GB"}, "--gpu_memory 8GB: CPU and GPU of a Mac share one memory"),
    ],
)
def test_options_that_a_mac_cannot_have_are_refused(monkeypatch, options, line):
    monkeypatch.setattr(plan, "own_gpus", list)
    with pytest.raises(UserError, match=line):
        plan.find_machine(Namespace(**{"devices": None, "gpu_memory": None, "host_memory": None} | options))


def test_what_a_mac_refuses_is_no_candidate():
    rungs = {rung.stem for rung in RUNGS}
    candidates, problems = candidates_of(rungs)
    planned = {choice for choice, _ in list_choices(RUNGS, 1)[0]}
    refused = {"3_torch_compile", "11_fsdp_cpu_offload", "12_deepspeed_zero", "14_qlora", "19_optimizer_offload",
               "20_activation_offload", "24_streamed_layers"}  # fmt: skip
    assert planned - {candidate.rung for candidate in candidates} == refused
    reasons = " ".join(problems.values())
    for part in ("FSDP2: use src/7", "4-bit weights", "--compile true", "share the CPU's memory", "adam-8bit"):
        assert part in reasons
    assert "12_deepspeed_zero needs a CUDA GPU" in reasons


def test_the_planned_settings_are_those_of_the_run(monkeypatch):
    """The planned run is refused here, so PyTorch is made to find a Mac's GPU."""
    candidates, _ = candidates_of(["1_batch_size_1", "4_mixed_precision", "13_lora"])
    candidates += candidates_of(["2_grad_accum"], "--precision", "16-mixed")[0]  # which a CPU refuses
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_: True)
    for candidate in candidates:
        words = shlex.split(planner._command(candidate, candidate.micro_batches[-1]))[2:]
        run, planned = parse_settings(words, **script_defaults(candidate.rung)), candidate.settings
        assert (run.accelerator, run.micro_batch_size) == ("mps", candidate.micro_batches[-1])
        names = ("precision", "pad_to_multiple_of", "eval_batch_tokens", "lora", "optimizer", "batch_size")
        assert [getattr(run, name) for name in names] == [getattr(planned, name) for name in names]
        assert (run.pad_to_multiple_of, run.eval_batch_tokens) == (16, 1024)
    found = {candidate.settings.precision for candidate in candidates}
    assert found == {"32-true", "bf16-mixed", "bf16-true", "16-mixed"}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_the_prediction_agrees_with_real_tensors_computed_as_on_a_mac(tmp_path, precision):
    settings, training, _ = case(tmp_path, "vit", precision=precision)
    with sdpa_kernel(SDPBackend.MATH):
        measured = measured_peak(settings, training, on_mac=True)
    on_mac = predict_peak(replace(settings, accelerator="mps"), training)
    assert on_mac.total == pytest.approx(measured, rel=0.01)
    assert on_mac.activations > 1.2 * predict_peak(settings, training).activations, "attention keeps its matrix"


def test_one_memory_holds_the_tensors_of_both_and_the_weights_that_are_loaded(plan_for):
    alone = plan_for(MAC)
    assert alone.shared == tuple(max(alone.host, WITHOUT_CUDA + part) for part in (alone.low, alone.needed, alone.high))
    assert (alone.fits, alone.micro_batch) == (True, 8)
    assert alone.free == MAC.usable[0] - alone.high
    memory = MACOS + WITHOUT_CUDA + alone.high
    tight = MAC._replace(memory=memory, usable=(memory, memory))
    fitting = plan_for(tight)
    assert (fitting.fits, fitting.micro_batch, fitting.free) == (True, 8, 0)
    assert plan_for(tight._replace(memory=memory - 1)).micro_batch == 4
    assert plan_for(MAC._replace(usable=(alone.high - 1, memory))).micro_batch == 4
    enough = MACOS + WITHOUT_CUDA + 4 * alone.counts.all
    small = alone.counts.all * 4 < alone.high
    assert small, "else the next line would test the weights that are loaded in 32 bits"
    assert not plan_for(tight._replace(memory=enough - 1)).fits


def test_larger_tensors_than_a_mac_can_have_are_avoided(plan_for, monkeypatch):
    whole = plan_for(MAC)
    monkeypatch.setattr(planner, "LARGEST_ON_MAC", whole.peak.largest - 1)
    smaller = plan_for(MAC)
    assert smaller.micro_batch < whole.micro_batch
    assert smaller.peak.largest < whole.peak.largest
    monkeypatch.setattr(planner, "LARGEST_ON_MAC", 1)
    assert not plan_for(MAC).fits


def test_16_and_32_bits_take_the_same_time():
    settings = candidates_of(["2_grad_accum"])[0][0].settings
    speeds = {relative_speed(replace(settings, precision=name), 1024, MAC) for name in ("32-true", "bf16-true")}
    assert len(speeds) == 1


def test_a_program_asks_for_the_memory_of_a_mac():
    question = {"length": 64, "micro_batch_size": 4, "precision": "bf16-true"}
    on_mac, on_cuda = (
        predict_memory(str(MODELS / "llama-tiny.json"), gpu=gpu, **question) for gpu in ("M3 24GB", "L4")
    )
    assert on_mac.tensors.activations > on_cuda.tensors.activations
    assert on_mac.low == on_mac.tensors.total < on_mac.expected < on_mac.high


def test_a_mac_that_is_too_small_is_told_the_size_of_a_larger_one(plan_for):
    tiny = mac("Mac 4 GB", 4 * 10**9)
    answer = Answer("model", 8, Samples(64), Machine(tiny, overhead=ON_MAC), [plan_for(tiny)], {}, [])
    assert answer_lines(answer) == [
        "Nothing fits. It would take a Mac of 8 GB, for 2_grad_accum; or shorter samples, e.g. --max_length 32."
    ]


def test_the_answer_for_a_mac(tmp_path):
    options = ["--gpu", "Mac 16 GB", "--model", MODEL, "--length", "512", "--rungs", "2", "--batch_size", "4"]
    out = finished(run_script(SCRIPT, *options, "--json", "p.json", "--page", "p.html", cwd=tmp_path))
    run, takes, costs, *_ = out.splitlines()
    assert run.startswith("Run    python src/2_grad_accum.py --config imdb_bloom_560m.yaml ")
    assert " --accelerator mps" in run
    sizes, limit = takes.split("; ")
    assert re.fullmatch(r"Takes  1\.\d of 16 GB \(1\.\d to 1\.\d\)", sizes)
    assert re.fullmatch(r"the GPU takes 0\.\d of the 10\.7 to 12\.0 GB that macOS lets it use", limit)
    assert costs.endswith("of full speed")
    text = " ".join(out.split())
    assert "samples of 512 tokens · Mac 16 GB PyTorch keeps freed memory on a Mac" in text
    assert "Metal's own memory is assumed, not measured; full speed: this Mac's busy GPU" in text
    assert "CUDA" not in text
    record = json.loads((tmp_path / "p.json").read_text())
    chosen = record["plans"][record["recommended"]["all weights"]]
    assert chosen["shared"][1] == chosen["needed"] + WITHOUT_CUDA
    assert record["machine"]["gpu"]["usable"] == list(MAC.usable)
    assert "Metal's own" in (tmp_path / "p.html").read_text()
