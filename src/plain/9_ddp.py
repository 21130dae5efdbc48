# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["lightning==2.6.6", "pandas", "torch", "transformers>=5.23"]
# ///
"""9 · Distributed data parallel (DDP): every GPU computes its share of each effective batch.

Builds on 4_mixed_precision.py. Every GPU has a copy of the model. DDP averages the gradients over the GPUs, once for
each optimizer step.
The same with checkpoints, prediction, resume and your own data: src/9_ddp.py
"""

import os

import numpy as np
import pandas as pd
import torch
from lightning import Fabric
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MODEL, MAX_LENGTH = "bigscience/bloom-560m", 1024  # tokens of a review
EPOCHS, BATCH_SIZE, LEARNING_RATE, SEED, PRINT_EVERY = 1, 16, 5e-5, 123, 4800  # a loss is printed every 4800 reviews
BFLOAT16 = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
DEVICES = torch.cuda.device_count() or 1  # GPUs of this machine
DTYPE = torch.bfloat16 if BFLOAT16 else torch.float16  # NEW in 4: the type of the matrix multiplications


def share(fabric, reviews):  # NEW in 9: this rank's reviews and their weights; fillers of weight 0 keep ranks in step
    weighted = [(review, 1) for review in reviews] + [(reviews[-1], 0)] * (-len(reviews) % fabric.world_size)
    return weighted[fabric.global_rank :: fabric.world_size]


def train(fabric, model, optimizer, reviews):
    scaler = torch.amp.GradScaler(fabric.device.type, enabled=not BFLOAT16)
    for epoch in range(EPOCHS):
        model.train()
        order = np.random.default_rng([SEED, epoch]).permutation(len(reviews))
        total, seen, printed = 0.0, 0, 0
        for start in range(0, len(order), BATCH_SIZE):
            batch = [reviews[row] for row in order[start : start + BATCH_SIZE]]
            batch.sort(key=lambda review: review["input_ids"].shape[1], reverse=True)  # the longest first
            for number, (review, weight) in enumerate(share(fabric, batch), start=1):
                early = number * fabric.world_size < len(batch)  # NEW in 9: averaged after the last
                with fabric.no_backward_sync(model, enabled=early), torch.autocast(fabric.device.type, DTYPE):
                    loss = model(**fabric.to_device(review)).loss
                fabric.backward(scaler.scale(loss * weight * fabric.world_size / len(batch)))
                total += loss.detach().float() * weight
            scaler.step(optimizer)  # NEW in 4: divides by the scale, and steps the 32-bit weights
            scaler.update()
            optimizer.zero_grad()
            seen += len(batch)
            if seen // PRINT_EVERY > printed // PRINT_EVERY or seen == len(order):
                total = fabric.all_reduce(total, reduce_op="sum")
                place = f"Epoch: {epoch + 1:04d}/{EPOCHS:04d} | Samples {seen:05d}/{len(order):05d}"
                fabric.print(f"{place} | Loss: {total / (seen - printed):.4f}")
                total, printed = 0.0, seen


if __name__ == "__main__":
    fabric = Fabric(accelerator="auto", devices=DEVICES, strategy="ddp")  # NEW in 9: a process for each GPU
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
    model = fabric.setup(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)

    ### 3 Finetuning
    train(fabric, model, optimizer, splits["train"])

    ### 4 Evaluation
    model.eval()
    right = 0
    for review, weight in share(fabric, splits["test"]):
        with torch.no_grad(), torch.autocast(fabric.device.type, DTYPE):
            logits = model(**fabric.to_device(review)).logits
        right += weight * (logits.argmax().item() == review["labels"].item())
    right = fabric.all_reduce(right, reduce_op="sum")
    fabric.print(f"Test accuracy {100 * right / len(splits['test']):.2f}%")
    fabric.print(f"Peak GPU memory: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB here")
