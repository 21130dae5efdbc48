"""The planner: its peaks against real tensors for every rung, its choice, and the script that prints it."""

import json
import re
from dataclasses import replace

import pytest
import torch
from support.helpers import MODELS, ROOT, RUNGS, SRC, finished, run_script
from support.planning import PATCHES, PIXELS, VIT, measured_peak

from fabric_ladder import Settings, build_model, parse_settings
from fabric_ladder.errors import UserError
from fabric_ladder.planning import planner
from fabric_ladder.planning.candidates import accuracy_costs, list_choices, read_candidates, relative_speed
from fabric_ladder.planning.gpus import ANY, GPUS, find_gpu, match_gpu
from fabric_ladder.planning.overhead import ASSUMED
from fabric_ladder.planning.plan import read_sizes, train_briefly
from fabric_ladder.planning.planner import Machine, Samples, find_peaks, make_plan, recommend
from fabric_ladder.planning.predict import blank_datasets, largest_batches, predict_peak
from fabric_ladder.rungs import script_defaults
from fabric_ladder.techniques.sharding import LEAN
from fabric_ladder.techniques.technique import CHECKPOINTING

SCRIPT = ROOT / "scripts" / "plan_memory.py"
ON_A_CPU = [rung.stem for rung in RUNGS if rung.stem[:2] not in ("3_", "10", "11", "12", "14", "18", "19", "20", "22")]
KAHAN = ["--kahan_summation", "true"]
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
    size = min(settings.batch_size, 4)
    cut = size if settings.step_in_backward else min(2, size)
    settings = replace(settings, batch_size=size, micro_batch_size=cut)
    return settings, largest_batches(settings, length, PIXELS if family == "vit" else None)[0]


def test_the_rungs_that_are_compared_are_all_that_a_process_without_a_gpu_can_compare():
    left_out = {"3_torch_compile", "10_fsdp", "11_fsdp_cpu_offload", "12_deepspeed_zero", "14_qlora"}
    left_out |= {"18_low_bit_optimizer"}  # by formula, which leaves small tensors out: most of a small model's are
    left_out |= {"19_optimizer_offload", "20_activation_offload"}  # a CPU's memory is the host's
    left_out |= {"22_float8"}  # emulated
    assert {*ON_A_CPU, *left_out} == {rung.stem for rung in SRC.glob("[0-9]*.py")}


def test_every_rung_but_packing_which_saves_no_memory_of_the_longest_sample_is_a_candidate():
    alone, together = ({rung for rung, _ in list_choices(gpus)} for gpus in (1, 2))
    assert together == {rung.stem for rung in SRC.glob("[0-9]*.py")} - {"15_packing", "22_float8"}
    assert together - alone == {"9_ddp", "10_fsdp"}


def test_candidates_are_named_by_what_the_user_did_not_say(tmp_path):
    choices = [("11_fsdp_cpu_offload", (*LEAN, *CHECKPOINTING)), ("7_grad_checkpointing", ()), ("1_batch_size_1", ())]
    (lean, *_), _ = read_candidates(choices, bloom(tmp_path, 1), 1)
    assert lean.name == "11_fsdp_cpu_offload bf16-true sgd checkpointing"
    (given, *_), problems = read_candidates(choices, [*bloom(tmp_path, 1), "--optimizer", "adafactor"], 1)
    assert given.name == "7_grad_checkpointing"
    assert "adafactor cannot step on FSDP2's shards" in problems["11_fsdp_cpu_offload bf16-true checkpointing"]
    low_bit = [choice for choice in list_choices(1) if choice[0] == "18_low_bit_optimizer"]
    candidates, _ = read_candidates(low_bit, bloom(tmp_path, 1), 1)
    assert [accuracy_costs(each.settings) for each in candidates] == [[]] * 4
    names = [each.name for each in candidates]
    assert names == [
        f"18_low_bit_optimizer{more}" for bits in ("", " adam-4bit") for more in (bits, f"{bits} checkpointing")
    ]
    with pytest.raises(UserError, match="there is no setting 'no_such'"):
        read_candidates(choices, ["--no_such", "1"], 1)


@pytest.mark.parametrize("on_the_command_line", [True, False])
def test_rows_that_are_packed_leave_no_micro_batch_to_choose(tmp_path, on_the_command_line):
    options = [*bloom(tmp_path, 1), "--packing", "true", "--max_length", "96"]
    if on_the_command_line:
        options += ["--pack_rows", "2"]
    else:
        (tmp_path / "rows.yaml").write_text("pack_rows: 2\n")
        options += ["--config", str(tmp_path / "rows.yaml")]
    (candidate,), _ = read_candidates([("2_grad_accum", ())], options, 1)
    assert (candidate.settings.pack_rows, candidate.micro_batches) == (2, (None,))


@pytest.mark.filterwarnings("ignore:Module is None")
@pytest.mark.parametrize(
    ("rung", "family"),
    [
        pytest.param(rung, family, marks=[] if number % 3 == other else [pytest.mark.slow])
        for number, rung in enumerate(ON_A_CPU)
        for other, family in enumerate(FAMILIES)
        if (rung, family) != ("15_packing", "vit")  # images have no padding
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


def plans_of(rungs, options, memories, length=256, gpu=ANY):
    """The plans for each size, of the choices for one GPU among these rungs."""
    candidates, _ = read_candidates([each for each in list_choices(1) if each[0] in rungs], options, 1, gpu)
    machine = Machine(tuple(memories), ASSUMED, gpu=gpu)
    figures = find_peaks(candidates, Samples(length), machine)
    return [
        [
            make_plan(candidate, its, options, machine, memory)
            for candidate, its in zip(candidates, figures, strict=True)
        ]
        for memory in memories
    ]


@pytest.mark.parametrize(
    "numbers", [("5_", "13"), pytest.param(("2_", "4_", "5_", "7_", "11", "13"), marks=pytest.mark.slow)]
)
def test_the_choice_is_monotone_in_memory_and_in_the_model_s_size(tmp_path, numbers):
    memories = [590_000_000, 640_000_000, 700_000_000, 850_000_000, 1_500_000_000]
    rungs = [rung.stem for rung in RUNGS if rung.stem[:2] in numbers]
    small, large = (
        [recommend(plans) for plans in plans_of(rungs, bloom(tmp_path, layers), memories)] for layers in (2, 6)
    )
    worth = {}
    for weights in ("all weights", "adapters"):
        for name, found in (("small", small), ("large", large)):
            plans = [each[weights] for each in found]
            worth[name] = [(-len(plan.costs), plan.speed) if plan else (-9, 0.0) for plan in plans]
            assert worth[name] == sorted(worth[name]), "more memory, and a worse rung"
        assert all(few <= many for few, many in zip(worth["large"], worth["small"], strict=True))
        assert len(set(worth["large"])) > 2, "the sizes decide nothing"
    assert large[0]["all weights"] is None or large[0]["all weights"].speed < large[-1]["all weights"].speed


def test_the_largest_micro_batch_that_fits_is_found(tmp_path):
    memories, options = (620_000_000, 680_000_000, 760_000_000), bloom(tmp_path, 4)
    for memory, (plan,) in zip(memories, plans_of(["5_low_precision"], options, memories), strict=True):
        settings, fitting = plan.candidate.settings, []
        for size in plan.candidate.micro_batches:
            cut = replace(settings, micro_batch_size=size, micro_batch_tokens=None)
            peak = predict_peak(settings, *largest_batches(cut, 256))
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
    settings = Settings(batch_size=16, precision="bf16-true")
    stages = ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
    runs = [
        replace(settings, strategy="ddp"),
        *(replace(settings, strategy="deepspeed", deepspeed=stage) for stage in stages),
    ]
    speeds = [relative_speed(each, 1024) for each in runs]
    assert speeds == sorted(speeds, reverse=True)
    assert len(set(speeds)) == len(speeds)
    sharded = replace(settings, strategy="fsdp")
    assert relative_speed(sharded, 1024) == speeds[4]
    assert relative_speed(replace(sharded, offload=True), 1024) == pytest.approx(speeds[5])
    recomputed = replace(settings, activation_checkpointing=True)
    speed, slower = (relative_speed(each, 1024) for each in (settings, recomputed))
    assert relative_speed(settings, 4096) > speed > slower
    assert slower > relative_speed(sharded, 1024)


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


def test_the_answer_comes_first_in_three_lines_and_every_figure_on_demand(tmp_path):
    model = ["--config", "imdb_bloom_560m.yaml", "--model", bloom(tmp_path, 2)[-1], "--length", "200"]
    files = ["--json", "p.json", "--markdown", "p.md"]
    out = finished(plan(tmp_path, *model, "--gpu_memory", "1GB", "--rungs", "2,5,7", "--full", *files))
    run, takes, costs, *rest = out.splitlines()
    assert run.startswith("Run    python src/2_grad_accum.py --config imdb_bloom_560m.yaml ")
    assert re.fullmatch(r"Takes  0\.\d\d of 1 GB of the GPU, \d+\.\d GB of CPU memory", takes)
    assert re.fullmatch(r"Costs  no measured loss of accuracy; speed 0\.\d\d", costs)
    assert max(map(len, rest)) <= 80, "readable when piped"
    text = " ".join(out.split())
    assert "effective batch 16 · samples of 200 tokens · 1 x 1 GB" in text
    assert "Faster: 5_low_precision, micro-batch 16, speed 0.76; it costs 13 points of accuracy" in text
    record = json.loads((tmp_path / "p.json").read_text())
    (size,) = record["sizes"]
    assert [row["rung"] for row in size["rows"]] == ["2_grad_accum", "5_low_precision", "7_grad_checkpointing"]
    chosen = size["rows"][size["recommended"]["all weights"]]
    assert chosen["peak"]["total"] + chosen["overhead"] + chosen["room"] == 1_000_000_000
    assert run == f"Run    {chosen['command']}"
    assert size["recommended"]["adapters"] is None
    assert [line.split()[0] for line in rest if re.match(r"\d_", line)] == [row["name"] for row in size["rows"]]
    markdown = (tmp_path / "p.md").read_text()
    assert re.findall(r"^\| (\w+)", markdown, re.M) == ["rung", *(row["name"] for row in size["rows"])]
    assert chosen["command"] in markdown
    words = [*chosen["command"].split()[2:], "--accelerator", "cpu", "--check_only", "true"]
    assert run_script(SRC / "2_grad_accum.py", *words, cwd=tmp_path).returncode == 0, "the command is not one"


def test_the_script_says_what_it_would_take(tmp_path):
    options = [*bloom(tmp_path, 2), "--length", "200", "--rungs", "2,5"]
    out = finished(plan(tmp_path, *options, "--gpu_memory", "560MB,2GB"))
    assert out.startswith(
        "0.56 GB:\nNothing fits. It would take a GPU of 0.6 GB, for 5_low_precision; or shorter samples"
    )
    assert "2 GB:\nRun    python src/2_grad_accum.py" in out


@pytest.mark.parametrize(
    "more", [["--batch_size", "1"], ["--batch_size", "4"], ["--rungs", "5", "--kahan_summation", "true"]]
)
def test_what_more_gpus_cannot_share_is_no_error(tmp_path, more):
    options = [*bloom(tmp_path, 2), "--length", "200", "--rungs", "2", *more]
    out = finished(plan(tmp_path, *options, "--gpu_memory", "100MB"))
    assert out.startswith("Nothing fits. It would take a GPU of ")


def test_a_model_whose_blocks_are_not_known_is_planned_without_sharding(tmp_path):
    config = {"model_type": "distilbert", "dim": 64, "hidden_dim": 128, "n_layers": 1, "n_heads": 2, "vocab_size": 999}
    (tmp_path / "distilbert.json").write_text(json.dumps(config))
    model = ["--config", "imdb_bloom_560m.yaml", "--model", str(tmp_path / "distilbert.json"), "--max_length", "512"]
    candidates, problems = read_candidates([("2_grad_accum", ()), ("11_fsdp_cpu_offload", CHECKPOINTING)], model, 1)
    assert [candidate.rung for candidate in candidates] == ["2_grad_accum"]
    assert problems == {
        "11_fsdp_cpu_offload checkpointing": "FSDP needs blocks, and transformers lists none "
        "for distilbert: use src/9_ddp.py"
    }


def test_zero_is_not_planned_in_32_bits_whose_memory_is_not_known(tmp_path):
    choice = "12_deepspeed_zero", ("--deepspeed", "zero2_offload")
    with pytest.raises(UserError, match="ZeRO's memory is known for 16-bit weights only; plan for bf16-mixed"):
        read_candidates([choice], [*bloom(tmp_path, 1), "--precision", "32-true"], 1)


def test_a_micro_batch_that_a_config_says_otherwise_is_in_the_command(tmp_path):
    """Of the script it is 1, too, but the config's would be taken."""
    config = (ROOT / "configs" / "imdb_bloom_560m.yaml").read_text()
    (tmp_path / "own.yaml").write_text(f"{config}\nmicro_batch_size: 4\n")
    options = ["--config", str(tmp_path / "own.yaml"), *bloom(tmp_path, 1)[2:]]
    ((smallest,),) = plans_of(["2_grad_accum"], options, [1], length=64)
    assert (smallest.micro_batch, smallest.command.endswith("--micro_batch_size 1")) == (1, True)


def test_without_the_data_a_plan_is_for_the_longest_sample_there_can_be(tmp_path):
    """And tries to download none: IMDb's archive would be written into `data`."""
    options = [*bloom(tmp_path, 1), "--max_length", "96", "--rungs", "4,5", "--gpu", "t4"]
    out = " ".join(finished(plan(tmp_path, *options, FABRIC_LADDER_DATA="data")).split())
    assert "IMDb is not in data, and a plan downloads no data: it is for --max_length 96" in out
    assert "samples of 96 tokens · 1 x T4, 15.6 GB" in out
    assert "T4 (compute capability 7.5) only emulates bfloat16: never recommended" in out
    assert not (tmp_path / "data").exists()
    process = plan(tmp_path, *options, "--dataset", "nowhere.csv")
    assert process.returncode == 2
    assert "there is no file or folder nowhere.csv" in process.stderr


def test_a_model_whose_config_is_shipped_is_planned_without_a_network(tmp_path):
    options = ["--gpu", "T4", "--rungs", "4", "--length", "16", "--batch_size", "1"]
    process = plan(tmp_path, *options, HF_HOME=tmp_path / "empty")
    assert "Run    python src/4_mixed_precision.py --config imdb_bloom_560m.yaml" in finished(process)
    assert "the config of bigscience/bloom-560m is read from " in process.stderr


@pytest.mark.slow
def test_bfloat16_everywhere_comes_after_what_costs_no_accuracy_unless_nothing_else_fits(tmp_path):
    rungs, options = ["4_mixed_precision", "5_low_precision", "6_lean_optimizer"], bloom(tmp_path, 6)
    (without_room,) = plans_of(rungs, options, (1,), length=64)
    least = min(plan.needed for plan in without_room if plan.candidate.rung == rungs[0])
    found = plans_of(rungs, options, (least - 1, least), length=64)
    chosen = [recommend(plans)["all weights"] for plans in found]
    assert [plan.candidate.rung for plan in chosen] == ["5_low_precision", "4_mixed_precision"]
    assert ["13 points" in " ".join(plan.costs) for plan in chosen] == [True, False]
    (plans,) = plans_of(rungs, [*options, "--precision", "bf16-true"], (10**10,), length=64)
    assert recommend(plans)["all weights"].candidate.settings.precision == "bf16-true", "asked for"


def test_emulated_bfloat16_is_planned_but_never_recommended(tmp_path):
    rungs = ["4_mixed_precision", "5_low_precision", "6_lean_optimizer", "12_deepspeed_zero", "13_lora"]
    older, newer = (
        {plan.candidate.name: plan for plan in plans_of(rungs, bloom(tmp_path, 2), (10**10,), gpu=find_gpu(name))[0]}
        for name in ("T4", "L4")
    )
    for name, plan in older.items():
        emulated = name[0] in "56"
        assert plan.candidate.settings.precision == ("bf16-true" if emulated else "16-mixed")
        assert (plan.emulated, newer[name].emulated) == (emulated, False)
        if emulated:
            assert plan.speed == pytest.approx(newer[name].speed * 8.1 / 65)
        elif "13_lora" not in name:
            assert plan.peak == newer[name].peak, "float16 holds the same bytes"
    low = "5_low_precision"
    assert older[low].peak.activations > newer[low].peak.activations, "attention keeps its matrix"
    assert older["13_lora"].peak.parameters > newer["13_lora"].peak.parameters, "embeddings in 32-bit"
    assert recommend([older[low]]) == {"all weights": None, "adapters": None}


def test_a_precision_given_to_the_planner_is_taken_or_refused_as_by_a_rung(tmp_path):
    choices, t4 = [("10_fsdp", ()), ("4_mixed_precision", ())], find_gpu("T4")
    precisions = {}
    for given in (None, "mixed", "32-true", "16-mixed"):
        options = [*bloom(tmp_path, 1), *(["--precision", given] if given else [])]
        candidates, _ = read_candidates(choices, options, 1, t4)
        precisions[given] = [candidate.settings.precision for candidate in candidates]
    both = ["32-true", "16-mixed"]
    assert precisions == {None: both, "mixed": both, "32-true": ["32-true"] * 2, "16-mixed": ["16-mixed"]}
    with pytest.raises(UserError, match=r"capability 7.5, below 8.0, only emulates bfloat16; use --precision 32-true"):
        read_candidates(choices, [*bloom(tmp_path, 1), "--precision", "bf16-mixed"], 1, t4)


def test_gpus_are_found_by_what_users_and_drivers_call_them():
    for name, found in {
        "t4": "T4", "Tesla T4": "T4", "rtx-2080ti": "RTX 2080 Ti", "RTX 2060": "RTX 2060", "4060 Ti 16GB":
        "RTX 4060 Ti 16GB", "a100-80gb": "A100 80GB", "NVIDIA A100-SXM4-80GB": "A100 80GB", "A4000": "RTX A4000",
        "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100 PCIe", "NVIDIA GeForce RTX 3090": "RTX 3090",
        "NVIDIA A10G": "A10G", "Tesla V100-SXM2-16GB": "V100", "NVIDIA L40S": "L40S", "B 200": "B200",
    }.items():  # fmt: skip
        assert match_gpu(name).name == found, name
        assert find_gpu(name) is match_gpu(name)
    for name in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3080 Ti", "NVIDIA GeForce RTX 4070 SUPER"):
        assert match_gpu(name) is None
    with pytest.raises(
        UserError, match=r"^--gpu A100: not in the table, which has A100 40GB, A100 80GB; for another GPU"
    ):
        find_gpu("A100")
    with pytest.raises(UserError, match=r"--gpu RTX 4091: .*RTX 4090"):
        find_gpu("RTX 4091")
    for gpu in GPUS:
        assert match_gpu(gpu.name) is gpu
        assert 5e9 < gpu.memory < 2e11
        assert 1 < gpu.half / gpu.single < 9


def test_the_script_plans_for_the_gpus_that_it_finds_and_forks_before_it_sees_them(tmp_path):
    script = ROOT / "tests" / "support" / "plan_with_gpu.py"
    process = run_script(script, SCRIPT, *bloom(tmp_path, 2), "--length", "200", "--rungs", "5,10", cwd=tmp_path)
    out = finished(process)
    assert " · 2 x Small, 1 GB" in out.replace("\n    ", " ")
    assert int(out.splitlines()[-1]) == 1 + 2, "one process to look for GPUs, two to rehearse"
    assert out.startswith("Run    python src/10_fsdp.py ")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--gpu_memory", "16 XB"], "--gpu_memory 16 XB: give a size such as 16GB"),
        (["--gpu_memory", "0GB"], "--gpu_memory 0GB: give a size"),
        (["--gpu", "T40", "--gpu_memory", "16GB"], "--gpu T40: not in the table, which has "),
        (["--gpu_memory", "16GB", "--devices", "0"], "--devices 0: must be at least 1"),
        (["--gpu_memory", "16GB", "--length", "5000"], "--length 5000: must be from 2 to --max_length 1024"),
        (["--gpu_memory", "16GB", "--rungs", "77"], "there is no rung 77"),
        (["--gpu_memory", "16GB", "--model", "nobody/nothing"], "cannot load the model 'nobody/nothing'"),
        (["--gpu_memory", "16GB", "--model", "empty.json"], "empty.json is not a model config"),
        (
            ["--gpu_memory", "16GB", "--model", "vit.json", "--task", "image-classification"],
            "vit.json is not a model config",
        ),
        (["--gpu_memory", "16GB", "--no_such", "1"], "there is no setting 'no_such'"),
        (["--calibrate"], "--calibrate measures a CUDA GPU"),
        ([], "name one to plan for"),
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
    assert read_sizes("80GB, 24 gb,16,16GB,0.5GiB,800MB,512MiB", "--gpu_memory") == (
        *(512 * 2**20, 800 * 10**6, 16 * 10**9, 24 * 10**9, 80 * 10**9),
    )


def test_the_calibration_s_training_runs():
    options = ["--config", "quickstart.yaml", "--accelerator", "cpu"]
    assert train_briefly(options, (16, 24)) is None
