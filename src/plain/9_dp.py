# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["lightning==2.6.6", "pandas", "torch", "transformers>=5.23"]
# ///
"""9 · DataParallel (DP): one process splits each effective batch over all GPUs.

Builds on 9_ddp.py, which replaced it. Each pass copies the model from the first GPU to the others. The first GPU holds
the optimizer, adds up the gradients, and steps. All reviews of a step are in memory together, an equal share per GPU.
It has run on a CPU only, where there is nothing to split, and not yet on several GPUs.
"""

import os

import numpy as np
import pandas as pd
import torch
from lightning import Fabric
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MODEL, MAX_LENGTH = "bigscience/bloom-560m", 1024  # tokens of a review
EPOCHS, BATCH_SIZE, LEARNING_RATE, SEED, PRINT_EVERY = 1, 16, 5e-5, 123, 4800  # a loss is printed every 4800 reviews
BFLOAT16 = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
DTYPE = torch.bfloat16 if BFLOAT16 else torch.float16  # NEW in 4: the type of the matrix multiplications


class Logits(torch.nn.Module):  # NEW in 9: the pass of one GPU, in a thread that does not inherit DTYPE from outside
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        with torch.autocast(ids.device.type, DTYPE):
            mask = (ids != self.model.config.pad_token_id).long()
            return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits


def pad(fabric, model, reviews):  # NEW in 9: one batch for all GPUs, as long as its longest review
    ids = [review["input_ids"][0] for review in reviews]
    ids = pad_sequence(ids, batch_first=True, padding_value=model.model.config.pad_token_id)
    return fabric.to_device((ids, torch.cat([review["labels"] for review in reviews])))


def train(fabric, model, optimizer, reviews):
    scaler = torch.amp.GradScaler(fabric.device.type, enabled=not BFLOAT16)
    for epoch in range(EPOCHS):
        model.train()
        order = np.random.default_rng([SEED, epoch]).permutation(len(reviews))
        total, seen, printed = 0.0, 0, 0
        for start in range(0, len(order), BATCH_SIZE):
            batch = [reviews[row] for row in order[start : start + BATCH_SIZE]]
            ids, labels = pad(fabric, model, batch)
            logits = model(ids)  # NEW in 9: each GPU computes its rows; the first GPU gets all logits
            loss = cross_entropy(logits.float(), labels)  # NEW in 9: on the first GPU, the mean also of unequal shares
            fabric.backward(scaler.scale(loss))
            total += loss.detach() * len(batch)
            scaler.step(optimizer)  # NEW in 4: divides by the scale, and steps the 32-bit weights
            scaler.update()
            optimizer.zero_grad()
            seen += len(batch)
            if seen // PRINT_EVERY > printed // PRINT_EVERY or seen == len(order):
                place = f"Epoch: {epoch + 1:04d}/{EPOCHS:04d} | Samples {seen:05d}/{len(order):05d}"
                fabric.print(f"{place} | Loss: {total / (seen - printed):.4f}")
                total, printed = 0.0, seen


if __name__ == "__main__":
    gpus = torch.cuda.device_count()  # NEW in 9: one process for all GPUs
    fabric = Fabric(accelerator="auto", devices=gpus or 1, strategy="dp" if gpus else "auto")
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
    model = fabric.setup(Logits(model))
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)

    ### 3 Finetuning
    train(fabric, model, optimizer, splits["train"])

    ### 4 Evaluation
    model.eval()
    right = 0
    for start in range(0, len(splits["test"]), BATCH_SIZE):
        ids, labels = pad(fabric, model, splits["test"][start : start + BATCH_SIZE])
        with torch.no_grad():
            logits = model(ids)
        right += (logits.argmax(dim=1) == labels).sum().item()
    fabric.print(f"Test accuracy {100 * right / len(splits['test']):.2f}%")
    fabric.print(f"Peak GPU memory: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB here")
