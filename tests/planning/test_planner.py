"""The planner: its candidates, its choice, and the script that prints it."""

import gc
import json
import os
import re
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from unittest import mock

import pytest
import torch
import torch._dynamo  # the script would turn it off
from support.export import run_here
from support.helpers import MODELS, ROOT, RUNGS, SRC, finished, run_script
from support.planning import NO_PEAK

from fabric_ladder import Settings
from fabric_ladder.errors import UserError
from fabric_ladder.ladder import CHECKPOINTING, LEAN
from fabric_ladder.planning import planner
from fabric_ladder.planning.answer import _choice
from fabric_ladder.planning.calibration import train_briefly
from fabric_ladder.planning.candidates import (
    list_choices,
    read_candidates,
    read_settings,
)
from fabric_ladder.planning.gpus import ANY, GPUS, card_memory, find_gpu, match_gpu
from fabric_ladder.planning.measured import SPEEDS, accuracy_cost
from fabric_ladder.planning.overhead import ANY_GPU, NCCL, assume
from fabric_ladder.planning.planner import Machine, Samples, make_plans, recommend
from fabric_ladder.planning.predict import largest_batches, predict_peak
from fabric_ladder.techniques.memory import Counts

SCRIPT = ROOT / "scripts" / "plan_memory.py"
BERT = str(MODELS / "bert-base-cased.json")
VIT = str(MODELS / "vit-base-16.json")
ENOUGH = 10**12  # bytes of a GPU that every small model fits


def bloom(tmp_path, layers=1):
    """Return the options for a small BLOOM with IMDb's settings."""
    config = json.loads((MODELS / "bloom-quickstart.json").read_text()) | {"n_layer": layers, "hidden_size": 256}
    path = tmp_path / f"bloom-{layers}.json"
    path.write_text(json.dumps(config))
    return ["--config", "imdb_bloom_560m.yaml", "--model", str(path)]


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Plan in the tests' process, since each fork starts with empty caches; the scripts below still fork."""
    monkeypatch.setattr(planner.os, "cpu_count", lambda: 1)


def with_setting(tmp_path, name, value):
    """Return the options for a small BLOOM with a setting on the command line, and with the same in a YAML file."""
    options = bloom(tmp_path)
    if value is None:
        return [options]
    config = (ROOT / "configs" / "imdb_bloom_560m.yaml").read_text()
    (tmp_path / "own.yaml").write_text(f"{config}\n{name}: {value}\n")
    return [[*options, f"--{name}", str(value)], ["--config", str(tmp_path / "own.yaml"), *options[2:]]]


def plans_of(rungs, options, memory=ENOUGH, length=256, gpu=ANY, every=True, started=None, plain=False):
    """Return the plans of all choices for one GPU among these rungs, of `plain` rungs, or of those that can win."""
    choices, _ = list_choices([SRC / f"{rung}.py" for rung in rungs], 1)
    choices = [(rung, ()) for rung in rungs] if plain else choices
    candidates, _ = read_candidates(choices, options, 1, gpu)
    report = [].append if started is None else started.append
    return make_plans(candidates, Samples(length), Machine(gpu._replace(memory=memory)), every, report)


def test_rungs_that_are_not_planned_have_a_reason():
    (alone, left_out), (together, problems) = (list_choices(RUNGS, gpus) for gpus in (1, 2))
    assert {rung for rung, _ in together} | problems.keys() == {rung.stem for rung in RUNGS}
    assert problems.keys() == {"22_float8", "27_cuda_graphs", "28_memory_budget"}
    assert left_out.keys() - problems.keys() == {"9_ddp", "10_fsdp"}
    assert left_out["10_fsdp"] == "planned only for --devices 2 or more"
    assert len(alone) < len(together)


def test_candidates_are_named_by_the_options_that_the_planner_adds(tmp_path):
    choices = [("11_fsdp_cpu_offload", (*LEAN, *CHECKPOINTING)), ("7_grad_checkpointing", ()), ("1_batch_size_1", ())]
    (lean, *_), _ = read_candidates(choices, bloom(tmp_path), 1)
    assert lean.name == "11_fsdp_cpu_offload bf16-true sgd checkpointing"
    (given, *_), problems = read_candidates(choices, [*bloom(tmp_path), "--optimizer", "adafactor"], 1)
    assert given.name == "7_grad_checkpointing"
    assert "adafactor cannot step on FSDP2's shards" in problems["11_fsdp_cpu_offload bf16-true checkpointing"]
    candidates, _ = read_candidates(list_choices([SRC / "18_low_bit_optimizer.py"], 1)[0], bloom(tmp_path), 1)
    assert {accuracy_cost(vars(each.settings))["points"] for each in candidates} == {0}
    assert [each.name.removeprefix("18_low_bit_optimizer") for each in candidates] == [
        "", " checkpointing", " adam-4bit", " adam-4bit checkpointing",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rung", "points", "speed"),
    [
        ("15_packing", 0, SPEEDS["15_packing"]), ("1_batch_size_1", 6.1, None), ("13_lora", 2.3, None),
        ("14_qlora", 3.9, None), ("25_block_by_block", 7.2, None), ("26_stateless", 5.8, None),
        ("12_deepspeed_zero", None, None), ("5_low_precision", 1.8, SPEEDS["5_low_precision"]),
    ],
)  # fmt: skip
def test_a_candidate_has_its_own_measured_accuracy_and_speed(tmp_path, rung, points, speed):
    (candidate, *_), _ = read_candidates(list_choices([SRC / f"{rung}.py"], 1)[0], bloom(tmp_path), 1)
    cost = accuracy_cost(vars(candidate.settings))
    assert (cost and round(cost["points"], 1), candidate.speed) == (points, speed)
    (candidate, *_), _ = read_candidates([(rung, ())], [*bloom(tmp_path), "--compile", "true"], 1)
    assert candidate.speed is None, "a switch of the user's own was not measured"
    assert accuracy_cost(vars(candidate.settings) | {"optimizer": "adafactor"}) is None


def test_packing_compile_and_16_bits_together_are_the_fastest_plan(tmp_path):
    options = [*bloom(tmp_path), "--micro_batch_size", "16"]
    plans = plans_of(["4_mixed_precision", "16_bf16_that_learns"], options, length=64)
    assert {plan.candidate.name.removeprefix("16_bf16_that_learns") for plan in plans[2:]} == {
        "", " checkpointing", " packing compile", " packing compile checkpointing"}  # fmt: skip
    assert "16_bf16_that_learns.py" in (command := recommend(plans)["all weights"].command)
    assert "--packing true --compile true" in command


@pytest.mark.parametrize(
    ("rung", "name"), [("17_step_in_backward", "packing"), ("21_selective_checkpointing", "compile")]
)
def test_a_plan_has_the_switches_that_the_gpu_turns_on(tmp_path, rung, name):
    settings = read_settings(rung, bloom(tmp_path))
    assert getattr(settings, name)
    assert settings.pad_to_multiple_of == 16, "the default of runs with few shapes"
    assert not getattr(read_settings(rung, [*bloom(tmp_path), f"--{name}", "false"]), name)
    (candidate, *_), _ = read_candidates([(rung, ())], bloom(tmp_path), 1)
    assert getattr(candidate.settings, name)
    assert f"--{name}" not in candidate.words, "the run turns it on itself"


def test_a_command_has_only_the_options_with_an_effect_on_its_rung(tmp_path):
    options = [*bloom(tmp_path), "--lora_rank", "16"]
    candidates, _ = read_candidates([("2_grad_accum", CHECKPOINTING), ("13_lora", ())], options, 1)
    assert [list(each.words) for each in candidates] == [
        [*bloom(tmp_path), *CHECKPOINTING, "--from_scratch", "true"],
        [*options, "--from_scratch", "true"],
    ]


def test_settings_that_cannot_be_planned_have_a_reason(tmp_path):
    path = tmp_path / "distilbert.json"
    sizes = {"dim": 64, "hidden_dim": 128, "n_layers": 1, "n_heads": 2, "vocab_size": 999}
    path.write_text(json.dumps({"model_type": "distilbert"} | sizes))
    unknown_blocks = ["--config", "imdb_bloom_560m.yaml", "--model", str(path), "--max_length", "512"]
    for choice, options, reason in (
        (("11_fsdp_cpu_offload", ()), unknown_blocks, "transformers lists none for distilbert: use src/9_ddp.py"),
        (
            ("12_deepspeed_zero", ("--deepspeed", "zero2_offload")),
            [*bloom(tmp_path), "--precision", "32-true"],
            "ZeRO's memory is known for 16-bit weights only; plan for bf16-mixed",
        ),
        (("2_grad_accum", ()), ["--no_such", "1"], "there is no setting 'no_such'"),
    ):
        candidates, problems = read_candidates([choice], options, 1)
        assert not candidates
        assert reason in " ".join(problems.values())
    assert len(read_candidates([("2_grad_accum", ())], unknown_blocks, 1)[0]) == 1


def test_the_largest_micro_batch_that_fits_is_found(tmp_path):
    options = [*bloom(tmp_path, 2), "--batch_size", "8"]
    needed = {}
    (plan,) = plans_of(["5_low_precision"], options, length=64)
    for size in plan.candidate.micro_batches:
        cut = replace(plan.candidate.settings, micro_batch_size=size, micro_batch_tokens=None)
        needed[size] = ANY_GPU.bounds(predict_peak(cut, *largest_batches(cut, 64)))[1]
    assert list(needed) == [1, 2, 4, 8]
    for memory in (needed[1] - 1, needed[4] - 1):
        (plan,) = plans_of(["5_low_precision"], options, memory, 64)
        fitting = [size for size in needed if needed[size] <= memory]
        assert plan.fits == bool(fitting)
        assert plan.micro_batch == (fitting[-1] if fitting else 1)
        assert plan.high == needed[plan.micro_batch]
        assert plan.low < plan.needed < plan.high == memory - plan.free


def test_a_plan_of_one_pass_is_found_where_a_sum_of_gradients_has_no_room(tmp_path):
    """A second pass keeps the gradient of a tied embedding table three times."""
    config = json.loads((MODELS / "llama-tiny.json").read_text()) | {"vocab_size": 100_000, "tie_word_embeddings": True}
    (tmp_path / "llama.json").write_text(json.dumps(config))
    options = ["--model", str(tmp_path / "llama.json"), "--task", "instruction-tuning", "--optimizer", "sgd"]
    options += ["--batch_size", "2", "--activation_checkpointing", "true"]
    needed = []
    for each in ("1", "2"):
        (plan,) = plans_of(["5_low_precision"], [*options, "--micro_batch_size", each], length=512, plain=True)
        needed.append(plan.high)
    assert needed[0] > needed[1]
    (plan,) = plans_of(["5_low_precision"], options, sum(needed) // 2, length=512, plain=True)
    assert (plan.fits, plan.micro_batch) == (True, 2), (needed, plan.peak)


@pytest.mark.slow
def test_the_search_finds_the_recommended_plans_and_leaves_out_the_others(tmp_path):
    rungs = ["2_grad_accum", "4_mixed_precision", "5_low_precision", "13_lora", "18_low_bit_optimizer"]
    options = bloom(tmp_path, 2)
    whole = recommend(plans_of(rungs, options, length=64))
    less = whole["all weights"].high - 1
    smaller = recommend(plans_of(rungs, options, less, 64))
    assert smaller["all weights"] != whole["all weights"]
    for memory, expected in {ENOUGH: whole, less: smaller}.items():
        started = []
        found = plans_of(rungs, options, memory, 64, every=False, started=started)
        assert recommend(found) == expected
        assert len(found) == len(started) < 8, "of 8 candidates"


def test_the_recommended_plan_fits_costs_no_accuracy_if_possible_and_is_the_fastest_that_was_measured():
    settings = Settings(precision="32-true", batch_size=16, devices=1)
    candidate = planner.Candidate("2_grad_accum", "2_grad_accum", (), settings, (1,))
    whole = Counts(all=10, trained=10, largest_layer=1, linear=1)
    plan = planner.Plan(candidate, 1, whole, NO_PEAK, 2, 1, 3, 1, 1, True, False, "first")

    def other(speed=None, needed=2, **changes):
        changed = candidate._replace(settings=replace(settings, **changes), speed=speed)
        return plan._replace(candidate=changed, needed=needed)

    measured, faster, costly = other(64), other(200), other(300, precision="bf16-true")
    assert recommend([plan, costly, measured, faster]) == {"all weights": faster}
    assert recommend([costly, plan._replace(fits=False), plan._replace(emulated=True)]) == {"all weights": costly}
    assert recommend([plan, plan._replace(command="a later rung")]) == {"all weights": plan}
    assert recommend([other(needed=3), plan, other(needed=1, activation_checkpointing=True)]) == {"all weights": plan}
    assert recommend([other(900, optimizer="adafactor"), costly]) == {"all weights": costly}
    assert "(the cost in accuracy was not measured)" in _choice([other(900, optimizer="adafactor")])[0]
    assert recommend([faster, both := other(devices=2)]) == {"all weights": both}, "no GPU is idle"
    frozen = other(lora=True)
    assert list(recommend([frozen, plan]).items()) == [("all weights", plan), ("some of the weights", frozen)]
    sgd = other(optimizer="sgd", precision="bf16-true")
    found = {"some of the weights": frozen, "all weights": sgd}
    assert list(recommend([sgd, frozen]).items()) == list(found.items()), "adapters lose less than SGD"
    worse = [other(block_steps=4, needed=1), other(lora=True, quantization="nf4", needed=1)]
    assert recommend([*worse, frozen]) == {"some of the weights": frozen}, "equal within noise, better at its best rate"


def test_only_plans_on_several_gpus_have_nccl(tmp_path):
    candidates, _ = read_candidates([("2_grad_accum", ()), ("9_ddp", ())], [*bloom(tmp_path), "--batch_size", "2"], 2)
    machine = Machine(ANY._replace(memory=ENOUGH), gpus=2)
    alone, both = make_plans(candidates, Samples(32), machine, True, lambda _: None)
    assert alone.needed == ANY_GPU.needed(alone.peak)
    assert both.needed == ANY_GPU.needed(both.peak) + NCCL[1]


def test_a_process_that_has_seen_a_gpu_does_not_fork(tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "get_context", lambda _: pytest.fail("forked"))
    monkeypatch.setattr(planner.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plans = plans_of(["2_grad_accum", "5_low_precision"], bloom(tmp_path), length=64, plain=True)
    assert [plan.fits for plan in plans] == [True, True]


def test_a_language_models_frozen_weights_are_read_in_their_final_precision(tmp_path):
    words = [*bloom(tmp_path), "--task", "instruction-tuning", "--precision"]
    counts = Counts(all=10**10, trained=10, largest_layer=1, linear=1)
    for precision, width in (("bf16-true", 2), ("bf16-mixed", 4)):
        settings = read_settings("13_lora", [*words, precision])
        host = planner.host_bytes("13_lora", settings, counts, NO_PEAK)
        assert host - planner.LIBRARIES == width * counts.all


def test_emulated_bfloat16_is_planned_but_never_recommended(tmp_path):
    rungs = ["4_mixed_precision", "5_low_precision", "13_lora"]
    options = [*bloom(tmp_path), "--micro_batch_size", "4"]
    older, newer = (
        {plan.candidate.name: plan for plan in plans_of(rungs, options, length=64, gpu=find_gpu(name), plain=True)}
        for name in ("T4", "L4")
    )
    for name, plan in older.items():
        emulated = name[0] == "5"
        assert plan.candidate.settings.precision == ("bf16-true" if emulated else "16-mixed")
        assert (plan.emulated, newer[name].emulated) == (emulated, False)
        assert emulated or "lora" in name or plan.peak == newer[name].peak, "float16 holds the same bytes"
    low = "5_low_precision"
    assert older[low].peak.activations > newer[low].peak.activations, "attention keeps its matrix"
    assert older["13_lora"].peak.parameters > newer["13_lora"].peak.parameters, "embeddings in 32-bit"
    assert recommend([older[low]]) == {}


def test_the_planner_uses_or_refuses_a_precision_as_a_rung_does(tmp_path):
    choices, t4 = [("10_fsdp", ()), ("4_mixed_precision", ())], find_gpu("T4")
    both = ["32-true", "16-mixed"]
    for given, expected in {None: both, "mixed": both, "32-true": ["32-true"] * 2, "16-mixed": ["16-mixed"]}.items():
        for options in with_setting(tmp_path, "precision", given):
            candidates, _ = read_candidates(choices, options, 1, t4)
            assert [candidate.settings.precision for candidate in candidates] == expected
    for options in with_setting(tmp_path, "precision", "bf16-mixed"):
        candidates, problems = read_candidates(choices, options, 1, t4)
        assert not candidates
        assert "capability 7.5, below 8.0, only emulates bfloat16; use --precision 32-true" in problems["10_fsdp"]


def test_numbers_of_tokens_are_not_replaced(tmp_path):
    for options in with_setting(tmp_path, "micro_batch_tokens", 2048):
        (plan,) = plans_of(["4_mixed_precision"], options, length=64, plain=True)
        assert (plan.micro_batch, "--micro_batch_size" in plan.command) == (None, False)
    for options in with_setting(tmp_path, "eval_batch_tokens", 32768):
        assert int(read_settings("4_mixed_precision", options).eval_batch_tokens) == 32768
    automatic, choices = [*bloom(tmp_path), "--micro_batch_tokens", "auto"], [("2_grad_accum", ())]
    assert read_candidates(choices, automatic, 1) == read_candidates(choices, bloom(tmp_path), 1)


def test_gpus_are_found_by_the_names_that_users_and_drivers_give_them():
    for name, found in {
        "t4": "T4", "Tesla T4": "T4", "rtx-2080ti": "RTX 2080 Ti", "RTX 2060": "RTX 2060", "4060 Ti 16GB":
        "RTX 4060 Ti 16GB", "a100-80gb": "A100 80GB", "NVIDIA A100-SXM4-80GB": "A100 80GB", "A4000": "RTX A4000",
        "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100 PCIe", "NVIDIA GeForce RTX 3090": "RTX 3090",
        "NVIDIA A10G": "A10G", "Tesla V100-SXM2-16GB": "V100", "NVIDIA L40S": "L40S", "B 200": "B200",
        "NVIDIA GeForce RTX 4070 Ti SUPER": "RTX 4070 Ti SUPER", "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000", "Titan RTX": "TITAN RTX",
        "GTX 1080Ti": "GTX 1080 Ti", "NVIDIA GeForce RTX 3080 12GB": "RTX 3080 12GB", "RTX 3080": "RTX 3080",
    }.items():  # fmt: skip
        assert find_gpu(name).name == found, name
    for name in ("GeForce RTX 4090 Laptop GPU", "GeForce RTX 4090 D", "RTX 4000 SFF Ada Generation", "RTX 4060 Ti"):
        assert match_gpu(f"NVIDIA {name}") is None
    with pytest.raises(UserError, match=r"^--gpu A100: not in the table, which has A100 40GB, A100 80GB; for another"):
        find_gpu("A100")
    with pytest.raises(UserError, match=r"--gpu RTX 4091: .*RTX 4090"):
        find_gpu("RTX 4091")
    for gpu in GPUS:
        assert match_gpu(gpu.name) is gpu
        assert 6e9 < gpu.memory < 2e11
        assert 1 <= gpu.half / gpu.single < 9


# In GiB, the least that a driver reported for each size as sold, see `card_memory`
@pytest.mark.parametrize(
    ("sold", "reported"),
    [(4, 3.81), (6, 5.80), (8, 7.75), (10, 9.78), (11, 10.76), (12, 11.50), (16, 15.45), (24, 23.53), (32, 31.34),
     (40, 39.59), (48, 47.46), (80, 79.15), (96, 94.97), (141, 139.80)],
)  # fmt: skip
def test_a_whole_number_of_gb_is_a_card_as_it_is_sold(sold, reported):
    for text in (f"{sold}GB", f"{sold} gb", str(sold)):
        assert max(1.015 * sold * 1e9, 0.96 * reported * 2**30) < card_memory(text) <= reported * 2**30
    assert card_memory(f"{sold}GiB") == sold * 2**30
    assert card_memory(f"{sold}000MB") == card_memory(f"{sold}.0GB") == sold * 10**9


def test_no_gpu_of_the_table_is_larger_than_a_measured_one():
    for path in (ROOT / "benchmarks" / "results").glob("gpu*.json"):
        hardware = json.loads(path.read_text(encoding="utf-8"))["machine"]["hardware"]
        assert 0.985 * hardware["gpu_memory"] < match_gpu(hardware["gpu"]).memory <= hardware["gpu_memory"]


def test_the_calibration_trains_briefly():
    options = ["--config", "quickstart.yaml", "--accelerator", "cpu"]
    assert train_briefly(options, (16, 24)) is None


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """Return a function that runs the script in this process, without a network, and returns what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(gc, "disable", lambda: None)

    def run(*options):
        with mock.patch.dict(os.environ):  # a rung that the test starts would not be forked with other variables
            run_here(monkeypatch, SCRIPT, *options)
        return capsys.readouterr().out

    return run


def test_the_answer_comes_first_in_three_lines_and_every_figure_on_demand(tmp_path, plan):
    options = [*bloom(tmp_path, 2), "--length", "200", "--gpu_memory", "1000MB", "--rungs", "2,5,7"]
    out = plan(*options, "--full", "--json", "p.json")
    run, takes, costs, *rest = out.splitlines()
    assert run.startswith("Run    python src/2_grad_accum.py --config imdb_bloom_560m.yaml ")
    assert re.fullmatch(r"Takes  0\.\d of 1 GB \(0\.\d to [01]\.\d\) of the GPU, 2 GB of CPU memory", takes)
    assert costs == "Costs  no measured loss of accuracy; speed not measured"
    assert max(map(len, rest)) <= 80, "readable when piped"
    text = " ".join(out.split())
    assert "effective batch 16 · samples of 200 tokens · 1 x 1 GB" in text
    assert "of the ways that fit and train all weights at the least measured cost in accuracy, without a" in text
    assert "--devices" not in text, "no line about other rungs"
    record = json.loads((tmp_path / "p.json").read_text())
    rungs = ["2_grad_accum", "5_low_precision", "7_grad_checkpointing"]
    assert [row["rung"] for row in record["plans"]] == rungs
    assert record["recommended"].keys() == {"all weights"}
    chosen = record["plans"][record["recommended"]["all weights"]]
    assert chosen["high"] + chosen["free"] == 1_000_000_000
    assert chosen["peak"]["total"] < chosen["low"] < chosen["needed"] < chosen["high"]
    assert run == f"Run    {chosen['command']}"
    assert [line.split()[0] for line in rest if re.match(r"\d_", line)] == rungs
    words = [*chosen["command"].split()[2:], "--accelerator", "cpu", "--check_only", "true"]
    assert run_script(SRC / "2_grad_accum.py", *words, cwd=tmp_path).returncode == 0, "the printed command must run"


def test_the_script_names_the_remedies_if_nothing_fits(tmp_path, plan):
    options = [*bloom(tmp_path, 2), "--length", "200", "--gpu_memory", "400MB", "--rungs"]
    remedy = r"or more GPUs, e\.g\. --devices 2; or shorter samples, e\.g\. --max_length 100\."
    line = plan(*options, "2,5,10").splitlines()[0]
    assert re.fullmatch(rf"Nothing fits\. It would take a GPU of 0\.\d GB, for 5_low_precision; {remedy}", line)
    line = plan(*options, "17", "--optimizer", "adam-8bit").splitlines()[0]
    assert "Not planned: 17_step_in_backward optimizer offload checkpointing: --optimizer adam-8bit: " in line
    assert line.endswith("use --optimizer adam.")
    assert "more GPUs" not in line


def test_a_micro_batch_that_differs_from_the_config_is_in_the_command(tmp_path):
    """The size equals the script's default, but the config has another size and would override it."""
    config = (ROOT / "configs" / "imdb_bloom_560m.yaml").read_text()
    (tmp_path / "own.yaml").write_text(f"{config}\nmicro_batch_size: 4\n")
    options = ["--config", str(tmp_path / "own.yaml"), *bloom(tmp_path)[2:]]
    (smallest,) = plans_of(["2_grad_accum"], options, 1, length=64, plain=True)
    assert (smallest.micro_batch, smallest.command.endswith("--micro_batch_size 1")) == (1, True)


def test_a_plan_without_a_length_takes_the_positions_of_the_model_as_its_run_does(monkeypatch, plan):
    monkeypatch.setenv("FABRIC_LADDER_DATA", "none")
    words = ["--gpu", "T4", "--rungs", "2", "--model", BERT]
    for options, length in (([], 512), (["--length", "300"], 300)):
        out = " ".join(plan(*words, *options).split())
        assert f" · samples of {length} tokens · " in out
        assert f"--max_length 512: {BERT} has no more positions." in out
        assert "--max_length" not in out.split(" Takes ")[0]


def test_without_the_data_a_plan_is_for_the_longest_possible_sample(tmp_path, monkeypatch, plan):
    """The planner downloads nothing. A download would write IMDb's archive into `data`."""
    monkeypatch.setenv("FABRIC_LADDER_DATA", "data")
    words = ["--max_length", "96", "--precision", "bf16-true", "--rungs", "5", "--gpu", "t4"]
    out = " ".join(plan(*bloom(tmp_path), *words).split())
    assert out.startswith("Nothing to recommend: T4 only emulates bfloat16; plan without --precision bf16-true")
    assert "IMDb is not in data, and a plan downloads no data: it is for --max_length 96" in out
    assert "samples of 96 tokens · 1 x T4, 15.6 GB" in out
    assert "T4 (compute capability 7.5) only emulates bfloat16: never recommended" in out
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_the_config_of_a_gated_model_is_shipped_and_its_tokenizer_is_not_needed(tmp_path):
    """The Hub refuses a token-less request with this status and header; IMDb is on the machine."""

    class Hub(BaseHTTPRequestHandler):
        def handle_one_request(self):
            self.raw_requestline = self.rfile.readline()
            if self.raw_requestline and self.parse_request():
                self.send_response(401)
                self.send_header("X-Error-Code", "GatedRepo")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def log_message(self, *_):
            """Print nothing."""

    (tmp_path / "data" / "aclImdb").mkdir(parents=True)
    options = ["--gpu", "T4", "--rungs", "5", "--max_length", "16", "--batch_size", "1"]
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        Thread(target=hub.serve_forever, daemon=True).start()
        environment = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": tmp_path / "empty"}
        environment |= {"HF_HUB_OFFLINE": 0, "FABRIC_LADDER_DATA": tmp_path / "data"}
        process = run_script(SCRIPT, *options, "--model", "meta-llama/Llama-3.2-1B", cwd=tmp_path, **environment)
        hub.shutdown()
    out = " ".join(finished(process).split())
    assert "The Hugging Face Hub asks for a token: the config of meta-llama/Llama-3.2-1B is read from" in process.stderr
    assert "The tokenizer of meta-llama/Llama-3.2-1B is not on this machine" in out


def test_gpus_that_differ_are_planned_as_the_smallest_and_long_samples_are_in_the_command(tmp_path, plan):
    """The length is beyond the default of `--max_length`."""
    words = ["--length", "2048", "--batch_size", "2", "--rungs", "9", "--gpu", "RTX 3090, T4"]
    out = " ".join(plan(*bloom(tmp_path)[2:], *words).split())
    assert "2 x T4, 15.6 GB The GPUs differ: the plan gives each the 15.6 GB of the T4." in out
    assert " --max_length 2048 " in out.split(" Takes ")[0]


def test_the_script_plans_for_the_gpus_that_it_finds_and_forks_before_it_sees_them(tmp_path):
    script = ROOT / "tests" / "support" / "plan_with_gpu.py"
    process = run_script(script, SCRIPT, *bloom(tmp_path, 2), "--length", "64", "--rungs", "5,9", cwd=tmp_path)
    out = finished(process)
    assert " · 2 x Small, 3 GB" in out.replace("\n    ", " ")
    assert int(out.splitlines()[-1]) == 1 + 2, "one process to look for GPUs, two to rehearse"
    assert out.startswith("Run    python src/9_ddp.py ")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--gpu_memory", "16 XB"], "--gpu_memory 16 XB: give a size such as 16GB"),
        (["--gpu", "T40", "--gpu_memory", "16GB"], "--gpu T40: not in the table, which has "),
        (["--gpu_memory", "16GB", "--devices", "0"], "--devices 0: must be at least 1"),
        (["--gpu_memory", "16GB", "--length", "5000"], "--length 5000: must be from 2 to --max_length 1024"),
        (["--gpu_memory", "16GB", "--length", "50", "--config", "cifar10_vit_large.yaml", "--model", VIT],
         "--length 50: images have no length; leave it out"),
        (["--gpu_memory", "16GB", "--check_only", "true"], "--check_only checks one rung's start: give it to"),
        (["--gpu_memory", "16GB", "--accelerator", "mps"], "--accelerator mps: plans are for CUDA GPUs; leave it out"),
        (["--gpu_memory", "16GB", "--rungs", "77"], "there is no rung 77"),
        (["--gpu_memory", "16GB", "--rungs", "9"], "9_ddp: planned only for --devices 2 or more"),
        (["--gpu_memory", "16GB", "--model", "nobody/nothing"], "cannot load the model 'nobody/nothing'"),
        (["--gpu_memory", "16GB", "--dataset", "nowhere.csv"], "there is no file or folder nowhere.csv"),
        (["--gpu", "T4", "--model", BERT, "--length", "1024"], "--length 1024 is beyond the 512 positions of "),
        (["--calibrate"], "--calibrate measures a CUDA GPU"),
        (["--gpu_memory", "16GB", "--full", "--json", "-"], "which has all candidates: leave out --full"),
        (["--gpu", "T4,T4", "--devices", "3"], "--gpu T4,T4 --devices 3: these are 2 GPUs; leave out --devices"),
        ([], "name one to plan for"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_line(tmp_path, monkeypatch, capsys, plan, options, line):
    if torch.cuda.is_available() and "--gpu_memory" not in options:
        pytest.skip("needs a machine without a GPU")
    model = [] if "--model" in options else ["--model", str(MODELS / "bloom-quickstart.json")]
    words = ["--config", "imdb_bloom_560m.yaml", *model, *options]
    monkeypatch.setenv("FABRIC_LADDER_DATA", "none")
    with pytest.raises((UserError, SystemExit)) as error:
        plan(*words)
    refused = str(error.value) if isinstance(error.value, UserError) else capsys.readouterr().err
    assert line in refused
    assert "\n" not in refused.rstrip()
    assert not [*tmp_path.iterdir()]
    if not options:
        process = run_script(SCRIPT, *words, cwd=tmp_path)
        assert (process.returncode, process.stderr.count("\n")) == (2, 1)


def test_the_plan_has_the_time_by_a_run_of_the_printed_command(tmp_path, plan):
    options = [*bloom(tmp_path), "--train_samples", "7200", "--length", "64"]
    words = ["--gpu", "T4", "--rungs", "4", *options]
    [candidate], _ = read_candidates(
        list_choices([SRC / "4_mixed_precision.py"], 1)[0][:1], options[:4], 1, find_gpu("T4")
    )
    settings = replace(candidate.settings, micro_batch_tokens="auto", max_length=1024)
    record = {"status": "finished", "begun": "2026", "settings": vars(settings), "ranks": 1}
    record |= {"hardware": {"device": "cuda", "gpu": "Tesla T4", "gpu_memory": 15_600_000_000}}
    folder = tmp_path / "runs" / "4_mixed_precision" / "1"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(record | {"results": {"samples_per_second": 1.0}}))
    line = "Time   2.0 h of training on 7,200 samples; 1.0 samples/s in runs/4_mixed_precision/1"
    assert line in plan(*words).splitlines()


def test_no_measured_peak_is_above_the_printed_need():
    """Every row that a GPU measured of the ladder's own code; all rows of published.json are of other projects."""
    compared = 0
    for path in (ROOT / "benchmarks" / "results").glob("gpu*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        capability = tuple(map(int, content["machine"]["hardware"]["compute_capability"].split(".")))
        overhead = assume(capability).expected
        for record in content["entries"].values():
            figures = record.get("figures", {})
            if predicted := figures.get("predicted_peak_bytes"):
                bound = overhead.needed(NO_PEAK._replace(parameters=predicted)) - overhead.outside
                assert figures["peak_memory_bytes"] <= bound
                compared += 1
    assert compared >= 27
    for path in (ROOT / "benchmarks" / "results" / "runs").glob("**/run.json"):
        run = json.loads(path.read_text(encoding="utf-8"))
        if run["hardware"]["device"] == "cuda" and (predicted := run["results"].get("predicted_peak_bytes")):
            high = assume(tuple(map(int, run["hardware"]["compute_capability"].split(".")))).high
            bound = high.needed(NO_PEAK._replace(parameters=predicted)) - high.outside
            assert run["results"]["peak_memory_bytes"] <= bound, "small models: buffers of some MB count"
            compared += 1
    assert compared >= 100
    published = json.loads((ROOT / "benchmarks" / "results" / "published.json").read_text(encoding="utf-8"))
    assert not any("fabric" in row["source"].lower() for row in published["published"]["rows"])
