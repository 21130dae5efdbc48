# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["lightning==2.6.6", "pandas", "torch", "transformers>=5.23"]
# ///
"""15 · Packing: short reviews share a row and do not see each other.

Builds on 4_mixed_precision.py. One full row is faster than many short ones. (For BLOOM models.)
The same with checkpoints, prediction, resume and your own data: src/15_packing.py
"""

import os

import numpy as np
import pandas as pd
import torch
from lightning import Fabric
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MODEL, MAX_LENGTH, PREDICTED = "bigscience/bloom-560m", 1024, 12.95  # tokens of a review; GB that this needs on a GPU
EPOCHS, BATCH_SIZE, LEARNING_RATE, SEED, PRINT_EVERY = 1, 16, 5e-5, 123, 4800  # a loss is printed every 4800 reviews
BFLOAT16 = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
DTYPE = torch.bfloat16 if BFLOAT16 else torch.float16  # NEW in 4: the type of the matrix multiplications


def pack(batch):  # NEW in 15: the longest first, each review goes into the first row with space for it
    rows = [[] for _ in batch]
    for review in sorted(batch, key=lambda review: review["input_ids"].shape[1], reverse=True):
        fits = (row for row in rows if not row or sum(r["input_ids"].shape[1] for r in [*row, review]) <= MAX_LENGTH)
        next(fits).append(review)
    return [row for row in rows if row]


def packed_loss(model, row):  # NEW in 15: each token sees only the tokens before it in its own review
    ids, labels = (torch.cat([review[key] for review in row], dim=-1) for key in ("input_ids", "labels"))
    lengths = torch.tensor([review["input_ids"].shape[1] for review in row], device=ids.device)
    number = torch.arange(len(row), device=ids.device).repeat_interleave(lengths)  # of each token's review
    mask = torch.where((number[:, None] == number).tril(), 0.0, torch.finfo(torch.float32).min)
    hidden = model.transformer(ids, attention_mask=mask[None, None]).last_hidden_state
    logits = model.score(hidden[0, lengths.cumsum(0) - 1])  # the last token of each review
    return torch.nn.functional.cross_entropy(logits, labels)


def train(fabric, model, optimizer, reviews):
    scaler = torch.amp.GradScaler(fabric.device.type, enabled=not BFLOAT16)
    for epoch in range(EPOCHS):
        model.train()
        order = np.random.default_rng([SEED, epoch]).permutation(len(reviews))
        total, seen, printed = 0.0, 0, 0
        for start in range(0, len(order), BATCH_SIZE):
            batch = [reviews[row] for row in order[start : start + BATCH_SIZE]]
            for row in pack(batch):  # NEW in 15: one row at a time
                with torch.autocast(fabric.device.type, DTYPE):  # NEW in 4: forward pass in 16 bits
                    loss = packed_loss(model, fabric.to_device(row))
                fabric.backward(scaler.scale(loss * len(row) / len(batch)))
                total += loss.detach().float() * len(row)
            scaler.step(optimizer)  # NEW in 4: divides by the scale, and steps the 32-bit weights
            scaler.update()
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
    alibi = model.transformer.build_alibi_tensor  # NEW in 15: positions start again in each review
    model.transformer.build_alibi_tensor = lambda mask, heads, dtype: alibi(
        torch.ones_like(mask[:, 0, 0]), heads, dtype
    )[..., (mask[0, 0] == 0).sum(dim=-1) - 1]
    model = fabric.setup(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)

    ### 3 Finetuning
    train(fabric, model, optimizer, splits["train"])

    ### 4 Evaluation
    model.eval()
    right = 0
    for review in splits["test"]:
        with torch.no_grad(), torch.autocast(fabric.device.type, DTYPE):
            logits = model(**fabric.to_device(review)).logits
        right += logits.argmax().item() == review["labels"].item()
    fabric.print(f"Test accuracy {100 * right / len(splits['test']):.2f}%")
    fabric.print(f"Peak GPU memory: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB here, {PREDICTED} GB predicted")
