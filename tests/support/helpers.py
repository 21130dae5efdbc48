"""Scripts as real processes; tiny models, tokens and settings for runs in the tests' process."""

import contextlib
import functools
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
    BloomForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from fabric_ladder import Settings
from fabric_ladder.cli import resolve
from fabric_ladder.data.splits import TextDatasets
from support import fork_server

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
RUNGS = sorted(SRC.glob("[0-9]*.py"), key=lambda path: int(path.name.split("_")[0]))
CONFIGS = ROOT / "configs"
DEEPSPEED_FILES = Path(__file__).parent / "fixtures" / "deepspeed"
MODELS = CONFIGS / "models"
SMALL = ("--train_samples", "96", "--validation_samples", "20", "--test_samples", "33", "--log_every", "16")
VOCABULARY = 64
DROPPED = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Tokenizer:
    """The attributes of a tokenizer that a model needs."""

    pad_token_id = 0
    eos_token_id = None

    def __init__(self, size=VOCABULARY):
        self.size = size

    def __len__(self):
        return self.size


def token_datasets(train=40, validation=11, test=13, classes=2, per_token=False, seed=0):
    """Return samples of random tokens with very different lengths, as `load_datasets` does."""
    splits = DatasetDict(_token_splits(train, validation, test, classes, per_token, seed))
    names = [] if per_token else [str(index) for index in range(classes)]
    return TextDatasets(splits, names, Tokenizer(), "test")


@functools.lru_cache(maxsize=16)
def _token_splits(train, validation, test, classes, per_token, seed):
    rng = np.random.default_rng(seed)

    def split(size):
        ids = [rng.integers(1, VOCABULARY, rng.integers(3, 30)).tolist() for _ in range(size)]
        columns = {"input_ids": ids, "length": [len(row) for row in ids]}
        if per_token:
            masked = rng.random(size)  # the prompt, which is not trained, has a random length
            columns["labels"] = [[-100] * int(share * len(row) * 0.7) + row[int(share * len(row) * 0.7) :]
                                 for share, row in zip(masked, ids, strict=True)]  # fmt: skip
            columns["items"] = [sum(label != -100 for label in row[1:]) for row in columns["labels"]]
        else:
            columns["labels"] = [int(sum(row) % classes) for row in ids]
        return Dataset.from_dict(columns)

    return {"train": split(train), "validation": split(validation), "test": split(test)}


def tiny_model(kind="bloom", dropout=0.0, seed=0, classes=2):
    """Make a model of a few thousand random weights."""
    torch.manual_seed(seed)
    common = {"vocab_size": VOCABULARY, "pad_token_id": 0, "num_labels": classes, "use_cache": False}
    if kind == "bloom":
        config = BloomConfig(hidden_size=16, n_layer=2, n_head=2, hidden_dropout=dropout, **common)
        return BloomForSequenceClassification(config)
    if kind == "bert":
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        return BertForSequenceClassification(BertConfig(**sizes, **dropouts, **common))
    if kind == "gpt2-lm":
        return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, **DROPPED, **common))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, intermediate_size=32, **common)
    return LlamaForCausalLM(config) if kind == "llama-lm" else LlamaForSequenceClassification(config)


def settings_for(tmp_path, **values):
    """Return settings as `parse_settings` does, for a run in this process."""
    defaults = {"batch_size": 16, "accelerator": "cpu", "name": "test", "log_every": 1, "eval_batch_tokens": 1024}
    defaults |= {"matmul_precision": "highest", "runs_dir": str(tmp_path / "runs")}
    return resolve(Settings(**(defaults | values)), given=values)


def run_script(path, *args, cwd, timeout=400, fresh=False, **environment):
    """Run a Python file as a user does, and return the finished process with its stdout and stderr.

    Args:
        fresh: Start a new Python instead of a fork, because the test checks the start.
    """
    arguments, environment = list(map(str, args)), os.environ | {k: str(v) for k, v in environment.items()}
    process = None if fresh else fork_server.run(path, arguments, cwd, environment, timeout)
    if process is None:
        command = [sys.executable, str(path), *arguments]
        process = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=timeout, env=environment, check=False
        )
    return process


def real_file(name, what):
    """Return the path of real data, or skip the test."""
    path = Path(os.environ.get("FABRIC_LADDER_DATA", "data")) / name
    if not path.exists():
        pytest.skip(f"needs {what}: set FABRIC_LADDER_DATA to a folder with {name}")
    return path


def without_package(folder, package):
    """Return the environment of a process that does not find a package, as if it were not installed."""
    (folder / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "def find_others(name, *args):\n"
        f"    return None if name.split('.')[0] == {package!r} else find(name, *args)\n"
        "PathFinder.find_spec = staticmethod(find_others)\n"
    )
    return {"PYTHONPATH": str(folder)}


def finished(process):
    """Return the stdout of a process that must have succeeded."""
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


def relative_error(first, second):
    """Return the largest relative distance, by norm, between two lists of tensors."""
    return max(
        (torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(a).clamp_min(1e-30)).item()
        for a, b in zip(first, second, strict=True)
    )


@contextlib.contextmanager
def file_system(place, kilobytes):
    """Mount a separate file system of this size on the folder `place`."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", place]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", "-l", place], check=True)
