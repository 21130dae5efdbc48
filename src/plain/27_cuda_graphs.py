# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["lightning==2.6.6", "pandas", "torch", "transformers>=5.23"]
# ///
"""27 · CUDA graphs: record the kernels of a pass once, and launch all of them together from then on.

Builds on 4_mixed_precision.py. Each length has a graph, so lengths are rounded up. On a CPU the pass runs as before.
The same with checkpoints, prediction, resume, your own data and packed reviews: src/27_cuda_graphs.py
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
MULTIPLE, POOL = 64, torch.cuda.is_available() and torch.cuda.graph_pool_handle()  # NEW in 27: lengths, shared memory


def run(step, review, graphs):  # NEW in 27: a graph repeats its kernels on the memory that they used when recorded
    if (shape := review["input_ids"].shape) in graphs:
        place, graph = graphs[shape]
        torch._foreach_copy_([*place.values()], [*review.values()])
        return graph.replay()
    step(**review)  # the first pass of a shape prepares libraries and makes the gradients
    if POOL:
        place, graph = graphs[shape] = {name: each.clone() for name, each in review.items()}, torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=POOL):  # this records, and runs nothing
            step(**place)


def train(fabric, model, optimizer, reviews):
    scaler = torch.amp.GradScaler(fabric.device.type, enabled=not BFLOAT16)
    mean, graphs = torch.zeros((), device=fabric.device), {}

    def step(weight, **review):
        with torch.autocast(fabric.device.type, DTYPE):  # NEW in 4: forward pass in 16 bits
            loss = model(**review, use_cache=False).loss  # a cache would be made by Python in each pass
        fabric.backward(scaler.scale(loss * weight))  # NEW in 2: ... adds its share to the gradients
        mean.copy_(loss.detach())

    for epoch in range(EPOCHS):
        model.train()
        order = np.random.default_rng([SEED, epoch]).permutation(len(reviews))
        total, seen, printed = 0.0, 0, 0
        for start in range(0, len(order), BATCH_SIZE):
            batch = [reviews[row] for row in order[start : start + BATCH_SIZE]]
            batch.sort(key=lambda review: review["input_ids"].shape[1], reverse=True)  # the longest first
            for review in batch:  # NEW in 2: one review at a time ...
                weight = torch.tensor(1 / len(batch))  # NEW in 27: a number of Python would stay as it was recorded
                run(step, fabric.to_device(review | {"weight": weight}), graphs)
                total += mean
            scaler.step(optimizer)  # NEW in 4: divides by the scale, and steps the 32-bit weights
            scaler.update()
            optimizer.zero_grad(set_to_none=False)  # NEW in 27: graphs write gradients to the same place
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
            review = tokenizer.pad({"input_ids": ids}, pad_to_multiple_of=MULTIPLE, padding_side="right")
            reviews.append({**review, "labels": torch.tensor([names.index(label)])})

    ### 2 Initializing the model
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=len(names), dtype=torch.float32)
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
