"""Run every rung as a user does, in a real process on a short quickstart."""

import csv
import difflib
import hashlib
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from support.helpers import RUNGS, SMALL, SRC, finished, run_script, settings_for

from fabric_ladder.data.sampler import EffectiveBatchSampler
from fabric_ladder.rungs import script_defaults

NAMES = [path.stem for path in RUNGS]
ON_CPU = [name for name in NAMES if name != "12_deepspeed_zero"]  # Fabric starts DeepSpeed on CUDA GPUs only
QUICK = [name for name in ON_CPU if name != "3_torch_compile"]  # compilation takes a minute
EACH = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in ON_CPU]
NUMBER = r"\d+(\.\d+)?"
LINES = [
    r"No --config and no CUDA GPU: this is the quickstart .*--help",
    r"(Learning rate [\d.]+ in place of 0\.001, which quickstart\.yaml has .*\n)?",
    r"(PyTorch has no fast bfloat16 on this CPU: .*\n)?(SGD barely learns from random weights: .*\n)?",
    r"(--float8 on a CPU: .*\n)?(--cuda_graphs on cpu: .*\n)?(Running on one device\. .*\n)?",
    rf"Python {NUMBER}\.\d+ · torch .* · lightning .* · transformers .*",
    r"{name} · synthetic · bloom-quickstart\.json · seed 123 · batch \d+{cut} · {precision} · {optimizer} · cpu: .*",
    r"Torch CUDA available\? False",
    r"synthetic: 5,500 rows · negative 2,761, positive 2,739 · train 96, validation \d+, test \d+",
    r"Parameters: 0\.2 M, {parameters}",
    r"(Epoch: 0001/0001 \| Batch \d{{4}}/\d{{4}} \| Samples \d{{5}}/00096 \| Loss: \d+\.\d{{4}}\n){{6}}",
    r"Epoch: 0001/0001 \| Train acc\.: \d+\.\d\d% \| Val acc\.: \d+\.\d\d%",
    r"Time elapsed \d+\.\d\d min",
    r"(Compile time \d+\.\d\d min of it, \d+ graphs\n)?Throughput \d+\.\d samples/s, \d+ tokens/s, padding \d+\.\d%",
    r"Memory used: \d+\.\d\d GB",
    r"Host memory used: \d+\.\d\d GB, loading included",
    r"(Saved runs/{name}/1/adapter\nUse it: python scripts/predict.py .*\n)?Test accuracy \d+\.\d\d%",
    r"Test samples 33, 95 % interval \d+\.\d\d% to \d+\.\d\d%",
    r"class \\ predicted +negative +positive +precision +recall +f1 +support\n'negative' .*\n'positive' .*",
]
STATED = {name: script_defaults(name).get("precision", "32-true") for name in NAMES}
PRECISION = {name: "bf16-mixed" if stated == "mixed" else stated for name, stated in STATED.items()}
OPTIMIZER = dict.fromkeys(NAMES, r"adam 0\.001 constant")
OPTIMIZER |= {"6_lean_optimizer": "sgd 0.01 cosine", "18_low_bit_optimizer": "adam-8bit 0.001 constant"}
OPTIMIZER |= dict.fromkeys(["13_lora", "14_qlora", "24_streamed_layers"], "adam 0.002 constant")
OPTIMIZER |= {"26_stateless": "sinkgd 0.001 cosine"}
ALL = r"0\.2 M trainable, torch\.(float32|bfloat16)"
FEW = r"0\.017 M trainable \(9\.05%\), torch\.bfloat16, torch\.float32"
CUT = dict.fromkeys(NAMES, " in micro-batches of 1024 tokens") | dict.fromkeys(NAMES[:3], r" = \d+ x 1")
CUT |= dict.fromkeys(["15_packing", "27_cuda_graphs"], " in packed micro-batches of 1024 tokens")
CUT |= {"17_step_in_backward": r" = 1 x \d+"}
PARAMETERS = dict.fromkeys(NAMES, ALL) | {"13_lora": FEW, "14_qlora": rf"{FEW}, torch\.uint8"}
PARAMETERS |= {"25_block_by_block": r"0\.\d+ M trainable \(\d+\.\d\d%\), torch\.bfloat16"}
PARAMETERS |= {"24_streamed_layers": FEW}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each rung's finished process and its folder; some run in a new interpreter, which shows warnings of imports."""
    done = {}

    def run(name):
        if name not in done:
            cwd = tmp_path_factory.mktemp(name)
            fresh = name in ("10_fsdp", "14_qlora")  # they import all that the others import
            done[name] = run_script(SRC / f"{name}.py", *SMALL, cwd=cwd, timeout=600, fresh=fresh), cwd
        return done[name]

    return run


@pytest.mark.parametrize("name", EACH)
def test_a_rung_prints_the_documented_lines(runs, name):
    process, _ = runs(name)
    values = {
        "precision": PRECISION[name],
        "optimizer": OPTIMIZER[name],
        "parameters": PARAMETERS[name],
        "cut": CUT[name],
    }
    pattern = "\n".join(LINES).format(name=name, **values) + "\n"
    pattern = pattern.replace(r"\n){6}" + "\n", r"\n){6}").replace(r"\n)?" + "\n", r"\n)?")
    assert re.fullmatch(pattern, finished(process)), process.stdout


@pytest.mark.parametrize("name", EACH)
def test_a_run_leaves_its_log_its_figures_and_its_settings(runs, name):
    process, cwd = runs(name)
    folder = cwd / "runs" / name / "1"
    assert (folder / "log.txt").read_text(encoding="utf-8") == finished(process)
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert record["status"] == "finished"
    assert record["settings"]["name"] == name
    assert record["data"]["read"][0] in process.stdout.splitlines()
    results = record["results"]
    assert f"Test accuracy {results['test_accuracy'] * 100:.2f}%" in process.stdout
    assert f"Memory used: {results['peak_memory_bytes'] / 1e9:.2f} GB" in process.stdout
    assert results["test_samples"] == 33
    assert ("compile_seconds" in results) == (name == "3_torch_compile")
    saved = ["adapter", "base"] if name in ("13_lora", "14_qlora", "24_streamed_layers") else []
    assert sorted(path.name for path in folder.iterdir()) == [*saved, "log.txt", "metrics.csv", "run.json"]


def record_of(runs, name):
    return json.loads((runs(name)[1] / "runs" / name / "1" / "run.json").read_text(encoding="utf-8"))


def test_every_rung_trains_on_the_same_samples_in_the_same_effective_batches(runs, tmp_path):
    """`samples_hash` is the hash of all effective batches' rows, in the order of the train loop."""
    batches = list(EffectiveBatchSampler(np.ones(96, int), np.ones(96, int), settings_for(tmp_path), 0, 1))
    expected = ""
    for batch in batches:
        content = expected.encode() + np.asarray(batch.rows, "<i8").tobytes()
        expected = hashlib.sha256(content).hexdigest()[:16]
    assert len(batches) == 6
    for name in QUICK[1:]:
        assert record_of(runs, name)["results"]["samples_hash"] == expected, name
        assert record_of(runs, name)["data"] == record_of(runs, "2_grad_accum")["data"]
    assert record_of(runs, QUICK[0])["results"]["samples_hash"] != expected, "rung 1 steps after each sample"


def test_the_first_losses_are_equal_or_near_in_every_rung(runs):
    """In low precision the first effective batch of 16 has nearly the same loss."""
    first = {name: float(re.search(r"Loss: ([\d.]+)", finished(runs(name)[0]))[1]) for name in QUICK}
    for name in QUICK[2:]:
        assert first[name] == pytest.approx(first["2_grad_accum"], rel=0.02), name


def losses(runs, name):
    with open(runs(name)[1] / "runs" / name / "1" / "metrics.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]


def test_exact_techniques_change_no_bit(runs):
    """The techniques are recomputation, streaming, and sharding on one device with and without CPU offload."""
    assert losses(runs, "7_grad_checkpointing") == losses(runs, "5_low_precision")
    assert losses(runs, "24_streamed_layers") == losses(runs, "13_lora")
    saved = [runs(name)[1] / "runs" / name / "1" / "base" for name in ("13_lora", "24_streamed_layers")]
    first, second = ((folder / "model.safetensors").read_bytes() for folder in saved)
    assert first == second
    assert losses(runs, "11_fsdp_cpu_offload") == losses(runs, "10_fsdp")
    assert losses(runs, "9_ddp") == losses(runs, "4_mixed_precision")
    assert losses(runs, "27_cuda_graphs") == losses(runs, "15_packing")


@pytest.mark.slow
def test_compiled_and_eager_agree_and_lengths_share_their_graphs(runs):
    assert losses(runs, "3_torch_compile") == pytest.approx(losses(runs, "2_grad_accum"), abs=1e-4)
    results = record_of(runs, "3_torch_compile")["results"]
    assert results["samples_hash"] == record_of(runs, "2_grad_accum")["results"]["samples_hash"]
    assert results["compiled_graphs"] <= 4, "one forward graph, one backward graph, one or two evaluation graphs"
    assert 0 < results["compile_seconds"] < results["elapsed_seconds"]


def code_lines(path):
    """Return the lines without the docstring, blank lines and `# NEW` comments."""
    lines = path.read_text().split('"""', 2)[2].splitlines()
    return [re.sub("  # NEW.*", "", line) for line in lines if line.strip()]


@pytest.mark.parametrize("path", RUNGS, ids=NAMES)
def test_a_rung_is_short_and_near_its_parent(path):
    source = path.read_text()
    assert len(source.splitlines()) <= 70
    parent = re.search(r"Builds on (\d\w*\.py)", source)
    if path == RUNGS[0]:
        assert parent is None
        return
    difference = list(difflib.unified_diff(code_lines(SRC / parent[1]), code_lines(path), n=0, lineterm=""))[2:]
    changed = [line for line in difference if line[0] in "+-"]
    assert 0 < len(changed) <= 12
    added = {line[1:] for line in changed if line[0] == "+"}
    assert any(re.sub("  # NEW.*", "", line) in added for line in source.splitlines() if "# NEW" in line)


def test_weights_made_on_the_device_are_those_of_the_checkpoint(tmp_path):
    """The losses equal rung 5's bit by bit. The checkpoint is another rung's, in half precision."""
    small = [*SMALL, "--micro_batch_size", 4]
    finished(run_script(SRC / "2_grad_accum.py", *small, "--save", "consolidated", cwd=tmp_path))
    model = tmp_path / "runs" / "2_grad_accum" / "1" / "model"
    found = {}
    for name in ("5_low_precision", "8_init_on_device"):
        finished(run_script(SRC / f"{name}.py", *small, "--from_scratch", "false", "--model", model, cwd=tmp_path))
        with open(tmp_path / "runs" / name / "1" / "metrics.csv", newline="") as file:
            found[name] = [row["loss"] for row in csv.DictReader(file) if row["loss"]]
    assert found["5_low_precision"] == found["8_init_on_device"]


@pytest.mark.slow
def test_the_quickstart_touches_no_network(tmp_path):
    """The run is in a network namespace without interfaces."""
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([unshare, "-n", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a network namespace (unshare -n)")
    command = [unshare, "-n", sys.executable, str(SRC / "2_grad_accum.py"), *SMALL]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert "Test accuracy" in finished(process)
