# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["lightning==2.6.6", "pandas", "torch", "transformers>=5.23", "bitsandbytes", "accelerate"]
# ///
"""14 · Adapters on a 4-bit model (QLoRA): each frozen weight takes 4 bits.

Builds on 13_lora.py. Weights are one of 16 levels, and restored for each use: `pip install bitsandbytes`.
The same with checkpoints, prediction, resume and your own data: src/14_qlora.py
"""

import os

import numpy as np
import pandas as pd
import torch
from lightning import Fabric
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig

MODEL, MAX_LENGTH, PREDICTED = "bigscience/bloom-560m", 1024, 4.19  # tokens of a review; GB that this needs on a GPU
EPOCHS, BATCH_SIZE, LEARNING_RATE, SEED, PRINT_EVERY = 1, 16, 2e-4, 123, 4800  # a loss is printed every 4800 reviews
RANK, ALPHA, DROPOUT, TARGETS = 8, 32, 0.1, ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")  # adapted


class LoRALinear(torch.nn.Module):  # NEW in 13: a frozen layer plus a detour through RANK dimensions
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.dropout = torch.nn.Dropout(DROPOUT)
        self.down = torch.nn.Linear(layer.in_features, RANK, bias=False)
        self.up = torch.nn.Linear(RANK, layer.out_features, bias=False)
        torch.nn.init.kaiming_uniform_(self.down.weight, a=5**0.5)
        torch.nn.init.zeros_(self.up.weight)  # training starts from the model as it is

    def forward(self, x):
        update = self.up(self.down(self.dropout(x.float()))) * ALPHA / RANK
        return (self.layer(x) + update).to(x.dtype)


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
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}  # NEW in 14
    nf4 = BitsAndBytesConfig(**nf4, bnb_4bit_compute_dtype=torch.bfloat16, llm_int8_skip_modules=["score"])
    options = {"dtype": torch.float32, "quantization_config": nf4, "device_map": {"": fabric.device}}
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=len(names), **options)
    model.base_model.to(torch.bfloat16).requires_grad_(False)  # NEW in 13: frozen, except for the head
    for name, layer in list(model.named_modules()):
        if name.endswith(TARGETS):
            model.set_submodule(name, LoRALinear(layer))
    model.score.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))  # the head is in 32-bit
    model = fabric.setup(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)

    ### 3 Finetuning
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
