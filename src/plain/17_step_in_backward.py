# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["lightning==2.6.6", "pandas", "torch", "transformers>=5.23"]
# ///
"""17 · Step in backward: each weight steps as soon as it has its gradient, which is then freed.

Builds on 16_bf16_that_learns.py. The effective batch is one pass, and its gradient cannot be clipped.
The same with checkpoints, prediction, resume and your own data: src/17_step_in_backward.py
"""

import os

import numpy as np
import pandas as pd
import torch
from lightning import Fabric
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MODEL, MAX_LENGTH, PREDICTED = "bigscience/bloom-560m", 1024, 57.43  # tokens of a review; GB that this needs on a GPU
EPOCHS, BATCH_SIZE, LEARNING_RATE, SEED, PRINT_EVERY = 1, 16, 5e-5, 123, 4800  # a loss is printed every 4800 reviews


class KahanAdam(torch.optim.Adam):  # NEW in 16: keeps the rounding errors of a step for the next one
    def __init__(self, weights, **options):
        super().__init__(weights, **options)
        self.rests = [torch.zeros_like(weight) for weight in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self):
        weights = [(weight, weight.data, rest) for weight, rest in zip(self.param_groups[0]["params"], self.rests)]
        for weight, _, rest in weights:
            weight.data = rest
        super().step()  # Adam adds its step to the rests
        for weight, value, rest in weights:
            before = value.clone()
            weight.data = value.add_(rest)  # the weight takes as much as its 8 significant bits can hold
            rest += before - value  # the rest waits for the next step


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
    model = fabric.setup(model.to(torch.bfloat16))  # NEW in 5: the gradients and Adam's state follow the weights
    optimizers = {weight: KahanAdam([weight], lr=LEARNING_RATE, fused=True) for weight in model.parameters()}

    def step(weight):  # NEW in 17: autograd calls this as soon as the gradient of the weight is complete
        optimizers[weight].step()
        weight.grad = None

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(step)

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
