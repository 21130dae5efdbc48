# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["lightning==2.6.6", "pandas", "torch", "transformers>=5.23"]
# ///
"""29 · Streamed training: all weights are trained in CPU memory, and a block is on the GPU while it computes.

Builds on 17_step_in_backward.py, without Kahan summation. Embeddings, norms and head come to the GPU as blocks do.
The same with copies ahead of their use, Kahan summation, resume and your own data: src/29_streamed_training.py
"""

import os
from copy import copy
from functools import partial

import numpy as np
import pandas as pd
import torch
from lightning import Fabric
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer

MODEL, MAX_LENGTH, PREDICTED = "bigscience/bloom-560m", 1024, 5.43  # tokens of a review; GB that this needs on a GPU
EPOCHS, BATCH_SIZE, LEARNING_RATE, SEED, PRINT_EVERY = 1, 16, 5e-5, 123, 4800  # a loss is printed every 4800 reviews


def streamed(module, x, *inputs, **options):  # NEW in 29: weights come to the GPU, and their gradients go back
    weights = {name: each.to(x.device, non_blocking=True) for name, each in module.named_parameters()}
    return torch.func.functional_call(module, weights, (x, *inputs), options)


def train(fabric, model, reviews):
    for epoch in range(EPOCHS):
        model.train()
        order = np.random.default_rng([SEED, epoch]).permutation(len(reviews))
        total, seen, printed = 0.0, 0, 0
        for start in range(0, len(order), BATCH_SIZE):
            batch = [reviews[row] for row in order[start : start + BATCH_SIZE]]
            batch.sort(key=lambda review: review["input_ids"].shape[1], reverse=True)  # the longest first
            pad = model.config.pad_token_id
            ids = torch.nn.utils.rnn.pad_sequence([r["input_ids"][0] for r in batch], True, pad)
            rows = {"input_ids": ids, "attention_mask": ids.ne(pad), "labels": torch.cat([r["labels"] for r in batch])}
            loss = model(**fabric.to_device(rows)).loss  # NEW in 17: all reviews in one pass
            fabric.backward(loss.float())  # NEW in 17: the hooks step and free each gradient
            total += loss.detach().float() * len(batch)
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
    model.to(torch.bfloat16)  # NEW in 5: the gradients and Adam's state follow the weights
    model.config.use_cache = False  # a cache would get each key twice
    optimizers = {weight: torch.optim.Adam([weight], lr=LEARNING_RATE, fused=True) for weight in model.parameters()}

    def step(weight):  # NEW in 17: autograd calls this as soon as the gradient of the weight is complete
        optimizers[weight].step()
        weight.grad = None

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(step)
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) or (module._parameters and ".h." not in name):
            module.forward = partial(checkpoint, partial(streamed, copy(module)), use_reentrant=False)  # NEW in 29
    model = fabric.setup(model, move_to_device=False)  # NEW in 29: weights, gradients and Adam stay in CPU memory

    ### 3 Finetuning
    train(fabric, model, splits["train"])

    ### 4 Evaluation
    model.eval()
    right = 0
    for review in splits["test"]:
        with torch.no_grad():
            logits = model(**fabric.to_device(review)).logits
        right += logits.argmax().item() == review["labels"].item()
    fabric.print(f"Test accuracy {100 * right / len(splits['test']):.2f}%")
    fabric.print(f"Peak GPU memory: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB here, {PREDICTED} GB predicted")
