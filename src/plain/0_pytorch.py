# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["pandas", "torch", "transformers>=5.23"]
# ///
"""0 · PyTorch alone: the training of 1_batch_size_1.py without Fabric.

Compare the two files to see what Fabric replaces: the choice of the device, the moves to it, the backward pass, the
seed and the printing. Both print the same losses.
"""

import os

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MODEL, MAX_LENGTH, PREDICTED = "bigscience/bloom-560m", 1024, 10.07  # tokens of a review; GB that this needs on a GPU
EPOCHS, LEARNING_RATE, SEED, PRINT_EVERY = 1, 5e-5, 123, 4800  # a loss is printed every 4800 reviews


def train(device, model, optimizer, reviews):
    for epoch in range(EPOCHS):
        model.train()
        order = np.random.default_rng([SEED, epoch]).permutation(len(reviews))
        total, seen, printed = 0.0, 0, 0
        for row in order:
            loss = model(**{name: tensor.to(device) for name, tensor in reviews[row].items()}).loss
            loss.backward()
            total += loss.detach().float()
            optimizer.step()
            optimizer.zero_grad()
            seen += 1
            if seen // PRINT_EVERY > printed // PRINT_EVERY or seen == len(order):
                place = f"Epoch: {epoch + 1:04d}/{EPOCHS:04d} | Samples {seen:05d}/{len(order):05d}"
                print(f"{place} | Loss: {total / (seen - printed):.4f}")
                total, printed = 0.0, seen


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)

    ### 1 Loading the dataset
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
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)

    ### 3 Finetuning
    train(device, model, optimizer, splits["train"])

    ### 4 Evaluation
    model.eval()
    right = 0
    for review in splits["test"]:
        with torch.no_grad():
            logits = model(**{name: tensor.to(device) for name, tensor in review.items()}).logits
        right += logits.argmax().item() == review["labels"].item()
    print(f"Test accuracy {100 * right / len(splits['test']):.2f}%")
    print(f"Peak GPU memory: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB here, {PREDICTED} GB predicted")
