"""The blog's recipe (rasbt/gradient-accumulation-blog), reimplemented.

- The data frame grows by one row at a time.
- Every review is padded to the longest of the data set, up to `max_length`, and stored as PyTorch tensors.
- One review at a time: forward, loss / n, backward; the optimizer steps after n of them; the training accuracy is
  counted after every review, with the model put into eval mode and back.
- Validation and test go through the reviews one by one.

One thing is fixed here: the blog steps after reviews 1, n + 1, 2n + 1, …, and so loses the last n - 1. Here it steps
at the end of each window, so that both sides of a comparison take the same optimizer steps. 32-bit matrix
multiplications use the ladder's precision (`--matmul_precision`, on a GPU by default TF32); the blog uses `highest`.

As a script, it takes the settings of the rungs and `--texts`, `--padding` and `--out`, and writes its figures as JSON:
`python benchmarks/blog_recipe.py --texts FOLDER --out FILE [--padding max_length] [--batch_size 16 …]`.
"""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter

import numpy as np
import pandas as pd
import torch
import torchmetrics
from common import checksum, hf, precisions, reset_malloc  # first import: it makes the project importable
from lightning import Fabric
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from fabric_ladder import Settings, build_model, parse_settings
from fabric_ladder.environment import peak_memory, reset_peak_memory
from fabric_ladder.models.configs import load_config
from local_dataset_utilities import IMDBDataset, load_datasets

COLUMNS = ["input_ids", "attention_mask", "label"]


def read_frame(folder: Path) -> pd.DataFrame:
    """Read an unpacked `aclImdb`, one file and one `pd.concat` per review."""
    frame = pd.DataFrame()
    for split in ("test", "train"):
        for name, label in (("pos", 1), ("neg", 0)):
            for path in sorted((folder / split / name).iterdir()):
                row = pd.DataFrame([[path.read_text(encoding="utf-8"), label]], columns=["text", "label"])
                frame = pd.concat([frame, row], ignore_index=True)
    return frame


def split_frame(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Shuffle and cut 7 : 1 : 2. The three CSV files that the blog writes and reads again here are left out."""
    shuffled = frame.sample(frac=1, random_state=1).reset_index()
    first, second = len(frame) * 7 // 10, len(frame) * 8 // 10
    return shuffled.iloc[:first], shuffled.iloc[first:second], shuffled.iloc[second:]


def tokenize(
    texts: hf.DatasetDict, tokenizer: PreTrainedTokenizerBase, max_length: int, padding: bool | str = True
) -> hf.DatasetDict:
    """Pad every text of a split to the split's longest, as tensors.

    Args:
        texts: Splits with the columns `text` and `label`.
        tokenizer: Has a padding token.
        max_length: Tokens kept of a text.
        padding: True pads to the longest text that is there. `max_length` pads as far as the whole of IMDb would, when
            `texts` is a sample of it: each split of the 50,000 has reviews beyond 1,024 tokens.
    """

    def encode(batch: dict) -> dict:
        return tokenizer(batch["text"], truncation=True, padding=padding, max_length=max_length)

    tokens = texts.map(encode, batched=True, batch_size=None)
    tokens.set_format("torch", columns=COLUMNS)
    return tokens


def build_loaders(fabric: Fabric, tokens: hf.DatasetDict, num_workers: int = 0) -> list[DataLoader]:
    """Return the loaders of training, validation and test, one review at a time (the blog has 4 workers each)."""
    loaders = []
    for split in ("train", "validation", "test"):
        options = {"shuffle": True, "drop_last": True} if split == "train" else {}
        loaders.append(DataLoader(IMDBDataset(tokens, split), batch_size=1, num_workers=num_workers, **options))
    return fabric.setup_dataloaders(*loaders)


def _new_accuracy(fabric: Fabric) -> torchmetrics.Metric:
    return torchmetrics.Accuracy(task="multiclass", num_classes=2).to(fabric.device)


def _forward(model: nn.Module, batch: dict):
    return model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["label"])


def train_epoch(fabric: Fabric, model: nn.Module, optimizer: Optimizer, loader: DataLoader, accumulation: int) -> float:
    """Train for one epoch with `accumulation` reviews per optimizer step, and return the training accuracy."""
    accuracy = _new_accuracy(fabric)
    for number, batch in enumerate(loader, start=1):
        model.train()
        outputs = _forward(model, batch)
        fabric.backward(outputs.loss / accumulation)
        if number % accumulation == 0 or number == len(loader):
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            accuracy.update(outputs.logits.argmax(1), batch["label"])
    return accuracy.compute().item()


@torch.no_grad()
def evaluate(fabric: Fabric, model: nn.Module, loader: DataLoader) -> float:
    """Return the accuracy, review by review."""
    model.eval()
    accuracy = _new_accuracy(fabric)
    for batch in loader:
        accuracy.update(_forward(model, batch).logits.argmax(1), batch["label"])
    return accuracy.compute().item()


def measure(settings: Settings, texts: Path, padding: bool | str = True) -> dict:
    """Train for one epoch, validate and test, and return the figures that `common.run_rung` returns of a rung.

    The initial weights are those of a rung with the same settings: the same seed goes to the same `build_model`.
    """
    fabric = Fabric(accelerator=settings.accelerator, devices=1, precision=settings.precision)
    fabric.launch()
    fabric.seed_everything(settings.seed, verbose=False)
    torch.set_float32_matmul_precision(settings.matmul_precision)
    datasets = load_datasets(settings)  # for its tokenizer and the names of its classes
    hf.disable_progress_bars()
    tokens = tokenize(hf.load_from_disk(texts), datasets.tokenizer, settings.max_length, padding)
    train_loader, val_loader, test_loader = build_loaders(fabric, tokens, settings.num_workers)
    if load_config(settings.model).model_type == "bloom":
        settings = replace(settings, attention="eager")  # transformers has no other
    model = build_model(settings, datasets)
    weights = checksum(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    model, optimizer = fabric.setup(model, optimizer)
    masks = tokens["train"].with_format("numpy")["attention_mask"][:]
    real, padded = (int(sum(count(mask) for mask in masks)) for count in (np.sum, np.size))

    reset_peak_memory(fabric.device)
    start = perf_counter()
    train_epoch(fabric, model, optimizer, train_loader, settings.batch_size)
    trained = perf_counter()
    evaluate(fabric, model, val_loader)
    validated = perf_counter()
    peak = peak_memory(fabric.device)
    seconds, samples = trained - start, len(train_loader)
    return {
        "samples_per_second": samples / seconds,
        "evaluation_samples_per_second": len(val_loader) / (validated - trained),
        "peak_memory_bytes": peak,
        "training_seconds": seconds,
        "evaluation_seconds": validated - trained,
        "compile_seconds": 0.0,
        "tokens": real,
        "tokens_per_second": real / seconds,
        "padding": 1 - real / padded,
        "test_accuracy": evaluate(fabric, model, test_loader),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weights": weights,
        "updates": -(-samples // settings.batch_size),
        "threads": torch.get_num_threads(),
        **precisions(asdict(settings)),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--padding", choices=("longest", "max_length"), default="longest")
    parser.add_argument("--out", type=Path, required=True)
    own, options = parser.parse_known_args()
    reset_malloc()
    figures = measure(parse_settings(options, batch_size=16), own.texts, own.padding)
    own.out.write_text(json.dumps(figures), encoding="utf-8")
