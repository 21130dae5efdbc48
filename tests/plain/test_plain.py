"""Each plain script teaches its rung's technique in one file, and prints the losses that the rung prints."""

import ast
import difflib
import re
import runpy
import shutil
from importlib import import_module

import pandas as pd
import pytest
import torch
from support import fork_server
from support.helpers import SRC, finished, relative_error, run_script
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn.parallel.replicate import replicate
from transformers import BloomConfig, BloomForSequenceClassification, PreTrainedTokenizerFast

from fabric_ladder.data.synthetic import synthetic_reviews
from fabric_ladder.environment import cpu_has_fast_bfloat16
from fabric_ladder.rungs import RUNGS, parent

PLAIN = SRC / "plain"
NAMES = [rung.stem for rung in RUNGS]
WIDE = (10, 11, 12, 13, 14, 15, 17, 19, 25, 27)  # techniques that need up to 25 lines, the others 15
TRAIN, TEST = 26, 11  # the number of rows; the last effective batch has 10
CONSTANTS = {"MAX_LENGTH": 64, "EPOCHS": 2, "LEARNING_RATE": 3e-3, "PRINT_EVERY": 16}
LINE = re.compile(r"Samples (\d+)/.*Loss: ([\d.]+)")
ONE_BY_ONE = ("--micro_batch_size", "1")
EAGER = ("--attention", "eager")  # the plain scripts use transformers' own attention
# a rung computes bfloat16 in this way where PyTorch is slow
AS_A_RUNG = f"""
import sys
sys.path.append({str(SRC)!r})
from fabric_ladder.models.cpu_bfloat16 import compute_in_32_bits
compute_in_32_bits()
"""
# the rung's options, the plain script's constants, and the largest difference between two printed losses
CASES = {
    **dict.fromkeys((1, 2, 17), ((*EAGER,), {}, 0)),
    **dict.fromkeys((4, 5, 6, 7, 8, 16, 18, 19, 20, 21, 25), ((*EAGER, *ONE_BY_ONE), {}, 0)),
    3: ((*EAGER, *ONE_BY_ONE), {}, 1e-3),  # fused kernels round differently
    9: ((*EAGER, *ONE_BY_ONE, "--devices", "2"), {"DEVICES": 2}, 5e-3),  # two ranks sum gradients in another order
    10: ((*EAGER, *ONE_BY_ONE, "--devices", "2"), {"DEVICES": 2}, 5e-3),
    11: ((*EAGER, *ONE_BY_ONE, "--devices", "2"), {"DEVICES": 2}, 5e-3),
    13: ((*EAGER, *ONE_BY_ONE, "--lora_dropout", "0"), {"DROPOUT": 0.0}, 0),
    # the rung's 4-bit layers round differently on a CPU
    14: ((*EAGER, *ONE_BY_ONE, "--lora_dropout", "0"), {"DROPOUT": 0.0}, 2e-3),
    15: ((*ONE_BY_ONE,), {}, 5e-3),  # the rung has its own kernel for packed rows, which rounds differently in 16 bits
    # rounding to 8 bits magnifies the last bit of a factor, the more the larger the steps
    22: ((*EAGER, *ONE_BY_ONE, "--learning_rate", "1e-3"), {"LEARNING_RATE": 1e-3}, 1e-2),
    23: ((*EAGER, *ONE_BY_ONE, "--mlp_tile", "16"), {"TILE": 16}, 0),
    # the last digit differs on CPUs with AMX
    24: ((*EAGER, *ONE_BY_ONE, "--lora_dropout", "0"), {"DROPOUT": 0.0}, 2e-4),
    26: ((*EAGER, *ONE_BY_ONE), {}, 5e-3),  # the rung multiplies by factors of rows and columns
    # the rung passes no mask where there is no padding, and rounding differs in 16 bits
    27: ((*EAGER, *ONE_BY_ONE, "--packing", "false", "--pad_to_multiple_of", "64"), {}, 5e-3),
}


def number(name):
    return int(name.split("_")[0])


def code(name):
    """Return the lines of a plain script without its docstring."""
    text = (PLAIN / f"{name}.py").read_text(encoding="utf-8")
    return text.splitlines()[ast.parse(text).body[0].end_lineno :]


@pytest.mark.parametrize("name", ["0_pytorch", "9_dp", *NAMES])
def test_a_plain_script_is_short_and_marks_its_new_lines(name):
    text = (PLAIN / f"{name}.py").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 120
    assert "fabric_ladder" not in text
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring.startswith(f"{number(name)} · ")
    assert f"# NEW in {number(name)}" in text or number(name) < 2


@pytest.mark.parametrize("rung", [rung for rung in RUNGS if parent(rung)], ids=lambda rung: rung.stem)
def test_a_plain_script_differs_from_its_parent_by_the_technique(rung):
    before = parent(PLAIN / rung.name).stem
    assert before == ("4_mixed_precision" if number(rung.stem) == 27 else parent(rung).stem)  # 27 and 15 are too long
    matcher = difflib.SequenceMatcher(None, code(before), code(rung.stem), autojunk=False)
    changed = sum(
        max(
            sum(line != "" for line in matcher.a[first:last]),
            sum(line != "" for line in matcher.b[start:end]),
        )
        for kind, first, last, start, end in matcher.get_opcodes()
        if kind != "equal"
    )
    assert changed <= (25 if number(rung.stem) in WIDE else 15)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Write train.csv and test.csv, and save a small pretrained BLOOM without dropout in `model`."""
    folder = tmp_path_factory.mktemp("plain")
    reviews = pd.DataFrame(dict(zip(("text", "label"), synthetic_reviews(TRAIN + TEST, seed=1), strict=True)))
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
    text = (PLAIN / f"{name}.py").read_text(encoding="utf-8")
    constants = CONSTANTS | constants
    assert all(re.search(rf"^(\w+, )*{constant}\b.* = ", text, re.MULTILINE) for constant in constants)
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


def run_rung(name, folder, *options):
    return finished(
        run_script(
            SRC / f"{name}.py",
            *("--dataset", "train.csv", "--validation_file", "test.csv", "--test_file", "test.csv"),
            *("--model", "model", "--max_length", CONSTANTS["MAX_LENGTH"], "--epochs", CONSTANTS["EPOCHS"]),
            *("--learning_rate", CONSTANTS["LEARNING_RATE"], "--log_every", CONSTANTS["PRINT_EVERY"], *options),
            cwd=folder,
        )
    )


def compare(name, folder, options, constants, bound, rung=None):
    """Compare the losses and the accuracy that a plain script and its rung, or another one, print."""
    plain = run_plain(name, folder, **constants)
    rung = run_rung(rung or name, folder, *options)
    losses = [[(place, float(loss)) for place, loss in LINE.findall(printed)] for printed in (plain, rung)]
    assert len(losses[0]) == 2 * -(-TRAIN // 16)
    for (place, loss), (same, expected) in zip(*losses, strict=True):
        assert place == same
        assert loss == pytest.approx(expected, abs=bound + 1e-9), losses
    accuracy = [re.search(r"Test accuracy ([\d.]+)", printed)[1] for printed in (plain, rung)]
    assert float(accuracy[0]) == pytest.approx(float(accuracy[1]), abs=100 / TEST + 0.01 if bound else 0)  # one review


SLOW = (3, 9, 10, 11)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if number(name) in SLOW else []) for name in NAMES]
)
def test_a_plain_script_prints_the_losses_of_its_rung(name, folder):
    if name == "12_deepspeed_zero":
        pytest.skip("DeepSpeed needs a CUDA GPU")
    compare(name, folder, *CASES[number(name)])


def test_pytorch_alone_prints_the_lines_of_the_script_with_fabric(folder):
    alone, fabric = (run_plain(name, folder) for name in ("0_pytorch", "1_batch_size_1"))
    assert "Test accuracy" in alone
    assert alone == fabric


def test_data_parallel_prints_the_losses_of_ddp(folder):
    compare("9_dp", folder, (*EAGER, *ONE_BY_ONE), {}, 5e-3, rung="9_ddp")  # padded rows round differently in 16 bits


def test_unequal_shares_of_data_parallel_have_the_gradients_of_the_whole_batch(folder, monkeypatch):
    """PyTorch's own replicas compute 2, 2 and 1 rows; only the copies from GPU to GPU are replaced."""
    script = runpy.run_path(str(PLAIN / "9_dp.py"))
    script["Logits"].forward.__globals__["DTYPE"] = torch.float32  # autocast has no effect with it
    model = script["Logits"](BloomForSequenceClassification.from_pretrained(folder / "model"))
    ids = torch.randint(2, model.model.config.vocab_size, (5, 12), generator=torch.manual_seed(0))
    ids[1, 7:] = ids[4, 3:] = model.model.config.pad_token_id
    labels = torch.tensor([0, 1, 1, 0, 1])

    def copies(tensors, devices, detach=False):
        return [[tensor.view_as(tensor) for tensor in tensors] for _ in devices]

    monkeypatch.setattr(import_module("torch.nn.parallel.replicate"), "_broadcast_coalesced_reshape", copies)
    parts = ids.chunk(3)
    assert [len(part) for part in parts] == [2, 2, 1]
    gradients = []
    for replicas in ([model], replicate(model, [0, 1, 2])):
        shares = parts if len(replicas) > 1 else [ids]
        logits = torch.cat([replica(share) for replica, share in zip(replicas, shares, strict=True)])
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert relative_error(*gradients) < 1e-5


def test_long_packed_rows_print_the_losses_of_the_rung(folder):
    """Positions that went on through a row of 1,024 tokens would be rounded in 16 bits."""
    options = (*ONE_BY_ONE, "--max_length", "1024", "--learning_rate", "3e-4")
    compare("15_packing", folder, options, {"MAX_LENGTH": 1024, "LEARNING_RATE": 3e-4}, 3e-3)


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


def test_labels_may_be_words_and_a_review_null(folder, tmp_path):
    for name in ("train", "test"):
        reviews = pd.read_csv(folder / f"{name}.csv")
        reviews["label"] = reviews["label"].map({0: "N/A", 1: "good"})
        reviews.loc[0, "text"] = "null"
        reviews.to_csv(tmp_path / f"{name}.csv", index=False)
    printed = run_plain("2_grad_accum", tmp_path, MODEL=str(folder / "model"))
    assert "Test accuracy" in printed
