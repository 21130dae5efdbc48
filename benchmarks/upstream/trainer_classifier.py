"""transformers: Trainer's gradient of a classifier is too long by the number of passes (transformers#47688).

One step of plain gradient descent with 16 samples, in one pass and in 16 passes. Both should be equally long.
"""

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainingArguments

SIZES = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
rows = [{"input_ids": torch.arange(8) + row, "labels": row % 2} for row in range(16)]
lengths = []
for passes in (1, 16):
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=2, pad_token_id=0))
    before = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    arguments = TrainingArguments(
        output_dir="unused", max_steps=1, max_grad_norm=0.0, save_strategy="no", report_to="none", use_cpu=True,
        per_device_train_batch_size=16 // passes, gradient_accumulation_steps=passes,
    )  # fmt: skip
    descent = torch.optim.SGD(model.parameters(), lr=1.0)
    Trainer(model, arguments, train_dataset=rows, optimizers=(descent, None)).train()
    after = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    lengths.append(float((after - before).norm()))
print(f"length of the gradient in 16 passes / in one pass: {lengths[1] / lengths[0]:.2f}")
