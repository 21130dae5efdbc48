"""Each rung prints the documented lines, leaves its files, and has the losses of its plain script.

Each rung runs once, on rows and a small pretrained model that its plain script reads too.
"""

import csv
import difflib
import hashlib
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from support import fork_server
from support.helpers import RUNGS, SMALL, SRC, finished, run_script, settings_for
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BloomConfig, BloomForSequenceClassification, PreTrainedTokenizerFast

from fabric_ladder.data.sampler import EffectiveBatchSampler
from fabric_ladder.data.synthetic import synthetic_reviews
from fabric_ladder.environment import cpu_has_fast_bfloat16
from fabric_ladder.options import script_defaults

NAMES = [path.stem for path in RUNGS]
ON_CPU = [name for name in NAMES if name != "12_deepspeed_zero"]  # Fabric starts DeepSpeed on CUDA GPUs only
QUICK = [name for name in ON_CPU if name != "3_torch_compile"]  # compilation takes a minute
EACH = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in ON_CPU]
ADAPTERS = ("13_lora", "14_qlora", "24_streamed_layers")
SHARED = ("9_ddp", "10_fsdp", "11_fsdp_cpu_offload")  # on several devices

TRAIN, TEST = 10, 7  # rows; the last effective batch of an epoch has 2
CONSTANTS = {"MAX_LENGTH": 64, "EPOCHS": 2, "BATCH_SIZE": 4, "LEARNING_RATE": 1e-3, "PRINT_EVERY": 4}
ONE_BY_ONE = ("--micro_batch_size", "1")
EAGER = ("--attention", "eager")  # the plain scripts use transformers' own attention
LONG = ("--max_length", "1024", "--batch_size", f"{TRAIN}")
NO_DROPOUT = (*EAGER, *ONE_BY_ONE, "--lora_dropout", "0")
# the rung's options, the plain script's constants, and the largest difference between two printed losses
CASES = dict.fromkeys(NAMES, ((*EAGER, *ONE_BY_ONE), {}, 0))
CASES |= dict.fromkeys(SHARED, ((*EAGER, *ONE_BY_ONE), {"DEVICES": 1}, 0))
CASES |= {
    "1_batch_size_1": ((*EAGER, "--batch_size", "1"), {}, 0),
    "17_step_in_backward": (EAGER, {}, 0),
    "29_streamed_training": ((*EAGER, "--kahan_summation", "false"), {}, 0),  # the plain script has none
    "3_torch_compile": ((*EAGER, *ONE_BY_ONE), {}, 1e-3),  # fused kernels round differently
    "6_lean_optimizer": ((*EAGER, *ONE_BY_ONE, "--learning_rate", "3e-2"), {"LEARNING_RATE": 3e-2}, 0),
    "13_lora": (NO_DROPOUT, {"DROPOUT": 0.0}, 0),
    "14_qlora": (NO_DROPOUT, {"DROPOUT": 0.0}, 2e-3),  # the rung's 4-bit layers round differently on a CPU
    # The rung has its own kernel for packed rows, which rounds differently in 16 bits. Rows are long, because positions
    # that went on through a row would be rounded.
    "15_packing": ((*ONE_BY_ONE, *LONG), {"MAX_LENGTH": 1024, "BATCH_SIZE": TRAIN}, 3e-3),
    "22_float8": ((*EAGER, *ONE_BY_ONE), {}, 1e-2),  # rounding to 8 bits magnifies the last bit of a factor
    "23_tiled_mlp": ((*EAGER, *ONE_BY_ONE, "--mlp_tile", "16"), {"TILE": 16}, 0),
    "24_streamed_layers": (NO_DROPOUT, {"DROPOUT": 0.0}, 2e-4),  # the last digit differs on CPUs with AMX
    # the rung multiplies by factors of rows and columns, which rounds differently
    "26_stateless": ((*EAGER, *ONE_BY_ONE, "--learning_rate", "2e-4"), {"LEARNING_RATE": 2e-4}, 1e-2),
    # the rung passes no mask where there is no padding, and rounding differs in 16 bits
    "27_cuda_graphs": ((*EAGER, *ONE_BY_ONE, "--packing", "false", "--pad_to_multiple_of", "64"), {}, 5e-3),
}
LOSS = re.compile(r"Samples (\d+)/.*Loss: ([\d.]+)")
# a rung computes bfloat16 in this way where PyTorch is slow
AS_A_RUNG = f"""
import sys
sys.path.append({str(SRC)!r})
from fabric_ladder.models.cpu_bfloat16 import compute_in_32_bits
compute_in_32_bits()
"""

NUMBER = r"\d+(\.\d+)?"
LINES = [
    r"No --config and no CUDA GPU: this trains model .* on train\.csv\. .*--help",
    r"(PyTorch has no fast bfloat16 on this CPU: .*\n)?{notice}Python {number}\.\d+ · torch .* · lightning .*",
    r"{name} · train\.csv · model · seed 123 · batch {cut} · {precision} · {optimizer} · cpu: .*",
    r"Torch CUDA available\? False",
    r"train \(train\.csv\): 10 rows · text 'text', label 'label' · N/A \d, good \d",
    r"validation \(test\.csv\): 7 rows · .*\ntest \(test\.csv\): 7 rows · .*",
    r"\d+ of 24 labels \('N/A'\) are kept as classes: .*(\n\d+ of 24 texts have --max_length .*)?",
    r"Parameters: 0\.1 M, {parameters}",
    r"{epoch}{epoch}Time elapsed \d+\.\d\d min",
    r"(Compile time \d+\.\d\d min of it, \d+ graphs\n)?Throughput \d+\.\d samples/s, \d+ tokens/s, padding \d+\.\d%",
    r"Memory used: \d+\.\d\d GB",
    r"Host memory used: \d+\.\d\d GB, loading included",
    r"(Saved runs/{name}/1/adapter\nUse it: python scripts/predict.py .*\n)?Test accuracy \d+\.\d\d%",
    r"Test samples 7, 95 % interval \d+\.\d\d% to \d+\.\d\d%",
    r"(Test macro-F1 .*\n)?class \\ predicted +N/A +good +precision +recall +f1 +support\n'N/A' .*\n'good' .*",
]
EPOCH = r"(Epoch: 000\d/0002 \| Batch 00\d\d/00\d\d \| Samples \d{5}/00010 \| Loss: \d+\.\d{4}\n){1,3}"
EPOCH += r"Epoch: 000\d/0002 \| Train acc\.: \d+\.\d\d% \| Val acc\.: \d+\.\d\d%\n"
STATED = {name: script_defaults(name).get("precision", "32-true") for name in NAMES}
PRECISION = {name: "bf16-mixed" if stated == "mixed" else stated for name, stated in STATED.items()}
OPTIMIZER = {"6_lean_optimizer": r"sgd 0\.03 cosine", "18_low_bit_optimizer": r"adam-8bit 0\.001 constant"}
OPTIMIZER |= {"26_stateless": r"sinkgd 0\.0002 cosine"}
ALL = r"0\.1 M trainable, torch\.(float32|bfloat16)"
FEW = r"0\.017 M trainable \(12\.14%\), torch\.bfloat16, torch\.float32"
PARAMETERS = dict.fromkeys(ADAPTERS, FEW) | {"14_qlora": rf"{FEW}, torch\.uint8"}
PARAMETERS |= {"25_block_by_block": r"0\.\d+ M trainable \(\d+\.\d\d%\), torch\.bfloat16"}
CUT = {
    "1_batch_size_1": "1 = 1 x 1",
    "15_packing": "10 packed, 1 row of up to 1024 tokens at once",
    "17_step_in_backward": "4 = 1 x 4",
    "29_streamed_training": "4 = 1 x 4",
}
NOTICE = {"22_float8": "--float8 on a CPU: ", "27_cuda_graphs": "--cuda_graphs on cpu: "}
NOTICE["28_memory_budget"] = "Memory budget: auto is that of a GPU, so no block is recomputed"
NOTICE |= dict.fromkeys(SHARED, r"Running on one device\. ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write train.csv and test.csv, and save a small pretrained BLOOM without dropout in `model`."""
    folder = tmp_path_factory.mktemp("rungs")
    reviews = pd.DataFrame(dict(zip(("text", "label"), synthetic_reviews(TRAIN + TEST, seed=2), strict=True)))
    reviews["label"] = reviews["label"].map({0: "N/A", 1: "good"})
    reviews.loc[0, "text"] = "null"  # a text, as N/A is a label
    reviews[:TRAIN].to_csv(folder / "train.csv", index=False)
    reviews[TRAIN:].to_csv(folder / "test.csv", index=False)
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(
        reviews["text"],
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<pad>"], show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>")
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    # a CPU that computes in bfloat16 cannot pack weights narrower than a block of 4 bits
    sizes = {"hidden_size": 64, "n_layer": 2, "n_head": 2, "vocab_size": len(tokenizer)}
    config = BloomConfig(**sizes, pad_token_id=tokenizer.pad_token_id, initializer_range=0.1)
    BloomForSequenceClassification(config).save_pretrained(folder / "model")
    return folder


def copy_plain(name, copy, more="", **constants):
    """Write a copy of a plain script with other constants and with more lines at its end."""
    text = (SRC / "plain" / f"{name}.py").read_text(encoding="utf-8")
    constants = CONSTANTS | constants
    for constant in {*constants} - {"BATCH_SIZE"}:  # two scripts have none
        assert re.search(rf"^(\w+, )*{constant}\b.* = ", text, re.MULTILINE)
    values = "".join(f"{constant} = {value!r}\n" for constant, value in constants.items())
    if not cpu_has_fast_bfloat16():
        values += AS_A_RUNG
    copy.write_text(text.replace("\n\n\n", f"\n{values}\n\n", 1) + more, encoding="utf-8")


def run_plain(name, folder, **constants):
    """Run a copy of a plain script with other constants, and return what it prints."""
    copy = folder / f"{name}.py"
    copy_plain(name, copy, **{"MODEL": str(folder / "model")} | constants)
    if fork_server.can_be_forked(SRC / f"{name}.py", [], dict(fork_server.os.environ)):
        return finished(fork_server.fork([str(copy)], str(folder), dict(fork_server.os.environ), 300))
    return finished(run_script(copy, cwd=folder, fresh=True))


@pytest.fixture(scope="module")
def plain(folder):
    """Return a function that runs a plain script, or returns what it has printed."""
    printed = {}

    def run(name):
        if name not in printed:
            printed[name] = run_plain(name, folder, **CASES[name][1] if name in CASES else {})
        return printed[name]

    return run


@pytest.fixture(scope="module")
def runs(folder):
    """Return a function that runs a rung, or returns its finished process.

    Some run in a new interpreter, which shows warnings of imports.
    """
    done = {}

    def run(name):
        if name not in done:
            options = ["--dataset", "train.csv", "--validation_file", "test.csv", "--test_file", "test.csv"]
            options += ["--model", "model", "--log_every", CONSTANTS["PRINT_EVERY"]]
            for constant in ("MAX_LENGTH", "EPOCHS", "BATCH_SIZE", "LEARNING_RATE"):
                options += [f"--{constant.lower()}", CONSTANTS[constant]]
            fresh = name in ("10_fsdp", "14_qlora")  # they import all that the others import
            options += CASES[name][0]
            done[name] = run_script(SRC / f"{name}.py", *options, cwd=folder, timeout=600, fresh=fresh)
        return done[name]

    return run


@pytest.mark.parametrize("name", EACH)
def test_a_rung_prints_the_documented_lines(runs, name):
    values = {
        "notice": NOTICE[name] + r".*\n" if name in NOTICE else "",
        "cut": CUT.get(name, "4 = 4 x 1"),
        "precision": PRECISION[name],
        "optimizer": OPTIMIZER.get(name, r"adam 0\.001 constant"),
        "parameters": PARAMETERS.get(name, ALL),
        "epoch": EPOCH,
    }
    pattern = "\n".join(LINES).format(name=name, number=NUMBER, **values) + "\n"
    assert re.fullmatch(pattern, finished(runs(name))), runs(name).stdout


@pytest.mark.parametrize("name", EACH)
def test_a_run_leaves_its_log_its_figures_and_its_settings(runs, folder, name):
    process, folder = runs(name), folder / "runs" / name / "1"
    assert (folder / "log.txt").read_text(encoding="utf-8") == finished(process)
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert record["status"] == "finished"
    assert record["settings"]["name"] == name
    assert record["data"]["read"][0] in process.stdout.splitlines()
    results = record["results"]
    assert f"Test accuracy {results['test_accuracy'] * 100:.2f}%" in process.stdout
    assert f"Memory used: {results['peak_memory_bytes'] / 1e9:.2f} GB" in process.stdout
    assert results["test_samples"] == TEST
    assert ("compile_seconds" in results) == (name == "3_torch_compile")
    saved = ["adapter"] if name in ADAPTERS else []
    assert sorted(path.name for path in folder.iterdir()) == [*saved, "log.txt", "metrics.csv", "run.json"]


def record_of(runs, folder, name):
    finished(runs(name))
    return json.loads((folder / "runs" / name / "1" / "run.json").read_text(encoding="utf-8"))


def results_of(runs, folder, name):
    return record_of(runs, folder, name)["results"]


def losses(runs, folder, name):
    finished(runs(name))
    with open(folder / "runs" / name / "1" / "metrics.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]


def compare(printed, expected, bound):
    """Compare the losses and the accuracy that a plain script and a rung print."""
    plain, rung = ([(place, float(loss)) for place, loss in LOSS.findall(text)] for text in (printed, expected))
    assert len(plain) >= CONSTANTS["EPOCHS"]
    for (place, loss), (same, wanted) in zip(plain, rung, strict=True):
        assert place == same
        assert loss == pytest.approx(wanted, abs=bound + 1e-9), (plain, rung)
    accuracy = [float(re.search(r"Test accuracy ([\d.]+)", text)[1]) for text in (printed, expected)]
    assert accuracy[0] == pytest.approx(accuracy[1], abs=100 / TEST + 0.01 if bound else 0)  # one review


@pytest.mark.parametrize("name", EACH)
def test_a_plain_script_prints_the_losses_of_its_rung(runs, plain, name):
    compare(plain(name), finished(runs(name)), CASES[name][2])


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_a_plain_script_on_two_devices_prints_the_losses_of_one(runs, folder, name):
    compare(run_plain(name, folder, DEVICES=2), finished(runs(name)), 5e-3)  # two ranks sum in another order


def test_the_quickstart_prints_its_own_lines(tmp_path):
    """Rung 6 has its own learning rate, and starts from random weights here."""
    printed = finished(run_script(SRC / "6_lean_optimizer.py", *SMALL, cwd=tmp_path))
    for line in (
        r"No --config and no CUDA GPU: this is the quickstart \(configs/quickstart\.yaml\), .*",
        r"Learning rate 0\.01 in place of 0\.001, which quickstart\.yaml has .*",
        r"SGD barely learns from random weights: .*",
        r"6_lean_optimizer · synthetic · bloom-quickstart\.json · .* · batch 16 in micro-batches of 1024 tokens · .*",
        r"synthetic: 5,500 rows · negative 2,761, positive 2,739 · train 96, validation 20, test 33",
    ):
        assert re.search(f"^{line}$", printed, re.MULTILINE), printed


def test_pytorch_alone_prints_the_lines_of_the_script_with_fabric(plain):
    assert "Test accuracy" in plain("0_pytorch")
    assert plain("0_pytorch") == plain("1_batch_size_1")


def test_data_parallel_prints_the_losses_of_ddp(runs, plain):
    compare(plain("9_dp"), finished(runs("9_ddp")), 5e-3)  # padded rows round differently in 16 bits


def test_every_rung_trains_on_the_same_samples_in_the_same_effective_batches(runs, folder, tmp_path):
    """`samples_hash` is the hash of all effective batches' rows, in the order of the train loop."""
    settings, expected = settings_for(tmp_path, batch_size=CONSTANTS["BATCH_SIZE"]), ""
    sampler = EffectiveBatchSampler(np.ones(TRAIN, int), np.ones(TRAIN, int), settings, 0, 1)
    for epoch in range(CONSTANTS["EPOCHS"]):
        sampler.set_epoch(epoch)
        for batch in sampler:
            content = expected.encode() + np.asarray(batch.rows, "<i8").tobytes()
            expected = hashlib.sha256(content).hexdigest()[:16]
    found = {name: results_of(runs, folder, name)["samples_hash"] for name in QUICK}
    others = [found.pop(name) for name in ("1_batch_size_1", "15_packing")]  # they have other batches
    assert found == dict.fromkeys(found, expected)
    assert expected not in others


def test_every_rung_reads_the_same_data(runs, folder):
    for name in {*QUICK} - {"15_packing"}:  # it has longer texts here
        assert record_of(runs, folder, name)["data"] == record_of(runs, folder, "2_grad_accum")["data"], name


def test_the_first_losses_are_equal_or_near(runs):
    """In low precision the first effective batch has nearly the same loss."""
    names = {*QUICK[1:]} - {"14_qlora", "15_packing"}  # 4 bits are coarse in this model; rung 15 has other batches
    expected, *found = (float(LOSS.search(finished(runs(name)))[2]) for name in ("2_grad_accum", *names))
    assert found == pytest.approx([expected] * len(found), rel=0.02), names


def test_exact_techniques_change_no_bit(runs, folder):
    """The techniques are recomputation, weights made on the device, streaming, and sharding on one device."""
    for name, same in (
        ("7_grad_checkpointing", "5_low_precision"),
        ("28_memory_budget", "5_low_precision"),
        ("8_init_on_device", "5_low_precision"),
        ("24_streamed_layers", "13_lora"),
        ("11_fsdp_cpu_offload", "10_fsdp"),
        ("9_ddp", "4_mixed_precision"),
    ):
        assert losses(runs, folder, name) == losses(runs, folder, same), name


@pytest.mark.slow
def test_compiled_and_eager_agree_and_lengths_share_their_graphs(runs, folder):
    compiled, eager = ((losses(runs, folder, name), results_of(runs, folder, name))
                       for name in ("3_torch_compile", "2_grad_accum"))  # fmt: skip
    assert compiled[0] == pytest.approx(eager[0], abs=1e-4)
    assert compiled[1]["samples_hash"] == eager[1]["samples_hash"]
    assert compiled[1]["compiled_graphs"] <= 2, "one forward graph, one backward graph"
    assert 0 < compiled[1]["compile_seconds"] < compiled[1]["elapsed_seconds"]


@pytest.mark.slow
def test_all_blocks_of_rung_3_share_their_graphs(folder):
    """PyTorch compiles up to 8 graphs of a function, and leaves the rest uncompiled."""
    blocks = 10
    config = BloomConfig.from_pretrained(folder / "model", n_layer=blocks)
    BloomForSequenceClassification(config).save_pretrained(folder / "deep")
    for path in (folder / "model").glob("token*"):
        shutil.copy(path, folder / "deep")
    count = "    print('graphs:', torch._dynamo.utils.counters['stats']['unique_graphs'])\n"
    copy_plain("3_torch_compile", folder / "counted.py", count, MODEL=str(folder / "deep"), EPOCHS=1)
    printed = finished(run_script(folder / "counted.py", cwd=folder, fresh=True))
    assert 0 < int(re.search(r"graphs: (\d+)", printed)[1]) < blocks / 2  # training, evaluation, and a length of 64


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


@pytest.mark.slow
def test_the_quickstart_touches_no_network(tmp_path):
    """The run is in a network namespace without interfaces."""
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([unshare, "-n", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a network namespace (unshare -n)")
    command = [unshare, "-n", sys.executable, str(SRC / "2_grad_accum.py"), *SMALL]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert "Test accuracy" in finished(process)
