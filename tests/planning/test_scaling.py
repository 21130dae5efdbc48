"""The bytes that a step sends: the formulas against what real processes send, and how far a link goes."""

import json
import re
from importlib.util import find_spec

import pytest
import torch
from support.devices import ONE_THREAD, SIZES
from support.export import run_here
from support.helpers import MODELS, ROOT, SRC, finished, run_script

from fabric_ladder import UserError
from fabric_ladder.planning import scaling_tables
from fabric_ladder.planning.candidates import read_settings
from fabric_ladder.planning.predict import blank_datasets
from fabric_ladder.planning.scaling import TECHNIQUES, Work, bytes_sent, describe_work, most_gpus
from fabric_ladder.techniques.build import build_model

PLAN = ROOT / "scripts" / "plan_scaling.py"
SUPPORT = ROOT / "tests" / "support"
SCRIPTS = {"ddp": SRC / "9_ddp.py", "fsdp2": SRC / "10_fsdp.py"}
FACTORS = {"allreduce_": 2, "_allgather_base_": 1, "_reduce_scatter_base_": 1}  # of (N - 1) / N, for a ring
KEPT_LONGER = ("stage3_param_persistence_threshold", "stage3_max_reuse_distance", "stage3_max_live_parameters",
               "stage3_prefetch_bucket_size")  # fmt: skip
QUICKSTART = str(MODELS / "bloom-quickstart.json")


def work_of(precision, *more):
    """What a run of SIZES trains: 16 samples a step, two a micro-batch."""
    settings = read_settings("2_grad_accum", ["--model", QUICKSTART, "--from_scratch", "true", *more])
    with torch.device("meta"):
        model = build_model(settings, blank_datasets(2))
    return describe_work(model, precision, samples=16, micro_batch=2, length=100)


def counted(cwd, technique, gpus, precision, *more):
    """The bytes that a GPU of a ring sends for what rank 0 of a real run hands to collectives in a step."""
    script, environment = SCRIPTS.get(technique, SUPPORT / "deepspeed_script.py"), ONE_THREAD
    environment = environment | {"COUNT_SENT": str(script), "COUNTED": str(cwd / "counted.json")}
    if technique.startswith("zero"):
        config = json.loads((ROOT / "configs" / "deepspeed" / f"{technique}.json").read_text())
        if technique == "zero3":  # nothing of this small model is kept from one use to the next
            config["zero_optimization"] |= dict.fromkeys(KEPT_LONGER, 0)
        (cwd / "zero.json").write_text(json.dumps(config))
        more += ("--deepspeed", str(cwd / "zero.json"))
    arguments = (*SIZES, "--model", QUICKSTART, "--from_scratch", "true", "--devices", gpus, "--precision", precision)
    arguments += ("--train_samples", "48", "--validation_samples", "4", "--test_samples", "4")
    process = run_script(SUPPORT / "count_sent.py", *arguments, *more, cwd=cwd, **environment)
    if not technique.startswith("zero"):  # DeepSpeed may abort at exit
        finished(process)
    assert (cwd / "counted.json").exists(), process.stderr[-3000:]
    found = json.loads((cwd / "counted.json").read_text())
    return sum(FACTORS[name] * size for name, size in found.items()) * (gpus - 1) / gpus


SLOW = pytest.mark.slow
CASES = [
    ("ddp", 2, "32-true"),
    ("fsdp2", 2, "bf16-mixed"),
    *(pytest.param(*case, marks=SLOW) for case in [
        ("ddp", 4, "bf16-mixed"), ("fsdp2", 2, "32-true"), ("fsdp2", 4, "bf16-true"),
        ("zero1", 2, "bf16-mixed"), ("zero2", 4, "32-true"), ("zero3", 2, "bf16-mixed"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("technique", "gpus", "precision"), CASES)
def test_a_real_step_sends_what_the_formula_says(tmp_path, technique, gpus, precision):
    if technique.startswith("zero") and not find_spec("deepspeed"):
        pytest.skip("needs deepspeed: requirements-dev.txt")
    expected = bytes_sent(technique, work_of(precision), gpus)
    assert counted(tmp_path, technique, gpus, precision) == pytest.approx(expected, rel=0.01)


def test_the_script_prints_memory_bytes_and_how_far_each_link_goes(monkeypatch, capsys):
    sizes = ("--length", 64, "--batch_size", 2, "--micro_batch_tokens", 100)  # one sample
    run_here(monkeypatch, PLAN, "--model", QUICKSTART, *sizes)
    printed = capsys.readouterr().out
    assert "(0.2 M parameters) · effective batch 2 · micro-batch 1 · samples of 64 tokens · bf16-mixed" in printed
    rows = re.findall(r"^ *(\d+) +((?:\S+ · \S+ *){5})$", printed, re.M)
    assert [gpus for gpus, _ in rows] == ["1", "2"], "no GPU without a sample"
    assert [cell.split(" · ")[1] for cell in re.findall(r"\S+ · \S+", rows[0][1])] == ["0.00"] * 5
    assert len(re.findall(r"GB/s +(?:(?:\d+|–) *){5}$", printed, re.M)) == 5
    for arguments, said in (
        (("--tflops", 0), "--tflops 0.0: must be above 0"),
        (("--length", 5000), "--length 5000: must be from 2 to --max_length 1024"),
        (("--precision", "bf16-mixd"), "bf16-mixd"),
    ):
        with pytest.raises((UserError, SystemExit)) as error:
            run_here(monkeypatch, PLAN, "--model", QUICKSTART, *arguments)
        line = capsys.readouterr().err.strip() if error.type is SystemExit else str(error.value)
        assert said in line
        assert "\n" not in line


def test_the_memory_of_more_gpus_than_are_rehearsed_is_that_of_a_rehearsal(monkeypatch):
    options = ["--model", QUICKSTART, "--from_scratch", "true", "--batch_size", "256", "--micro_batch_size", "2"]
    found = {}
    for rehearsed in (16, 64):
        monkeypatch.setattr(scaling_tables, "REHEARSED", rehearsed)
        found[rehearsed] = scaling_tables.memory("fsdp2", options, 64, None, 64)
    assert found[16] == pytest.approx(found[64], rel=0.01)


WORK = Work(weights=1000, trained=1000, root=100, precision="32-true", samples=64, micro_batch=4, flops=1e6)


def test_nothing_is_sent_alone_and_adapters_send_little():
    assert [bytes_sent(technique, WORK, 1) for technique in TECHNIQUES] == [0] * 5
    lean = WORK._replace(trained=10)
    assert bytes_sent("ddp", lean, 4) == 2 * 4 * 10 * 3 / 4
    assert bytes_sent("fsdp2", lean, 64) > bytes_sent("fsdp2", WORK, 64) / 2, "frozen weights are gathered all the same"


def test_one_micro_batch_more_is_gathered_once_more():
    once, twice = (bytes_sent("zero3", WORK._replace(samples=samples), 4) for samples in (16, 32))
    assert twice == 2 * once
    assert bytes_sent("ddp", WORK._replace(samples=16), 4) == bytes_sent("ddp", WORK, 4)


def test_a_faster_link_keeps_more_gpus_busy_and_a_faster_gpu_fewer():
    counts = [1, 2, 4, 8, 16, 32, 64, 128]
    # 64 samples of 1e6 operations at 1e9 a second take 64 ms on one GPU; about 8,000 bytes are sent
    slow, fast = (most_gpus("ddp", WORK, counts, 1e9, link) for link in (1e6, 2e6))
    assert (slow, fast) == (8, 16)
    assert most_gpus("ddp", WORK, counts, 2e9, 1e6) == 4
    assert most_gpus("ddp", WORK, counts, 1e9, 1e12) == 64, "no GPU without a sample"


def test_what_is_only_looked_up_costs_no_operation():
    work = work_of("32-true")
    config = json.loads((MODELS / "bloom-quickstart.json").read_text())
    looked_up = config["vocab_size"] * config["hidden_size"]
    matrices = 100 * 6 * (work.weights - looked_up)
    assert work.flops == matrices + 12 * config["n_layer"] * config["hidden_size"] * 100**2
    assert looked_up < work.root < work.weights
