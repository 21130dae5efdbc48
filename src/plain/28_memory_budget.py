# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["lightning==2.6.6", "pandas", "torch", "transformers>=5.23"]
# ///
"""28 · Memory budget: recompute only the blocks whose activations have no room.

Builds on 7_grad_checkpointing.py. On a GPU the longest review is tried before the first step, with one more recomputed
block each time, until it has room. The last blocks keep theirs, since the backward pass frees them first.
The same with a prediction instead of trials, checkpoints, resume and your own data: src/28_memory_budget.py
"""

import os
from functools import partial

import numpy as np
import pandas as pd
import torch
from lightning import Fabric
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer

MODEL, MAX_LENGTH, PREDICTED = "bigscience/bloom-560m", 1024, 7.78  # tokens of a review; GB on a GPU, none recomputed
EPOCHS, BATCH_SIZE, LEARNING_RATE, SEED, PRINT_EVERY = 1, 16, 5e-5, 123, 4800  # a loss is printed every 4800 reviews
BUDGET = None  # NEW in 28: bytes of tensors on the GPU, e.g. 8 * 2**30; None: nine tenths of its memory


def has_room(fabric, model, review):  # NEW in 28: does a training on this review stay within the budget?
    torch.cuda.reset_peak_memory_stats()
    try:
        _adam = [torch.empty_like(weight) for weight in model.parameters() for _ in range(2)]  # what it will keep
        with torch.random.fork_rng():  # dropout draws the same numbers afterwards
            for _ in range(2):  # the second pass adds to the gradients of the first
                fabric.backward(model(**fabric.to_device(review)).loss)
        return torch.cuda.max_memory_allocated() <= (BUDGET or 0.9 * torch.cuda.mem_get_info()[1])
    except torch.OutOfMemoryError:
        return False
    finally:
        model.zero_grad()  # no weight has changed


def train(fabric, model, optimizer, reviews):
    for epoch in range(EPOCHS):
        model.train()
        order = np.random.default_rng([SEED, epoch]).permutation(len(reviews))
        total, seen, printed = 0.0, 0, 0
        for start in range(0, len(order), BATCH_SIZE):
            batch = [reviews[row] for row in order[start : start + BATCH_SIZE]]
            batch.sort(key=lambda review: review["input_ids"].shape[1], reverse=True)  # the longest first
            for review in batch:  # NEW in 2: one review at a time ...
                loss = model(**fabric.to_device(review)).loss
                fabric.backward(loss.float() / len(batch))  # NEW in 2: ... adds its share to the gradients
                total += loss.detach().float()
            optimizer.step()
            optimizer.zero_grad()
            seen += len(batch)
            if seen // PRINT_EVERY > printed // PRINT_EVERY or seen == len(order):
                place = f"Epoch: {epoch + 1:04d}/{EPOCHS:04d} | Samples {seen:05d}/{len(order):05d}"
                fabric.print(f"{place} | Loss: {total / (seen - printed):.4f}")
                total, printed = 0.0, seen


if __name__ == "__main__":
    fabric = Fabric(accelerator="auto", devices=1)
    fabric.launch()
    fabric.seed_everything(SEED)

    ### 1 Loading the dataset
    with fabric.rank_zero_first():
        if not os.path.exists("train.csv"):  # your own train.csv and test.csv have columns text and label
            from local_dataset_utilities import load_dataset_into_to_dataframe, partition_dataset

            partition_dataset(load_dataset_into_to_dataframe())
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    splits, names = {"train": [], "test": []}, sorted({*pd.read_csv("train.csv", dtype=str, na_filter=False).label})
    for name, reviews in splits.items():
        for text, label in pd.read_csv(f"{name}.csv", dtype=str, na_filter=False)[["text", "label"]].values:
            ids = tokenizer(text, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")["input_ids"]
            reviews.append({"input_ids": ids, "labels": torch.tensor([names.index(label)])})

    ### 2 Initializing the model
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=len(names), dtype=torch.float32)
    model.config.use_cache = False  # a cache would get each key twice
    keeping = [block for block in model.modules() if isinstance(block, GradientCheckpointingLayer)]
    model = fabric.setup(model.to(torch.bfloat16))  # NEW in 5: the gradients and Adam's state follow the weights
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)

    ### 3 Finetuning
    longest = max(splits["train"], key=lambda review: review["input_ids"].shape[1])
    while fabric.device.type == "cuda" and keeping and not has_room(fabric, model.train(), longest):  # NEW in 28
        block = keeping.pop(0)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # NEW in 7: keeps the input alone
    fabric.print(f"Blocks that keep their activations: {len(keeping)}")
    train(fabric, model, optimizer, splits["train"])

    ### 4 Evaluation
    model.eval()
    right = 0
    for review in splits["test"]:
        with torch.no_grad():
            logits = model(**fabric.to_device(review)).logits
        right += logits.argmax().item() == review["labels"].item()
    fabric.print(f"Test accuracy {100 * right / len(splits['test']):.2f}%")
    fabric.print(f"Peak GPU memory: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB here, {PREDICTED} GB predicted")
