"""15_packing · Packing: short texts share a row, in which they do not see each other, and nothing is padding.

Builds on 4_mixed_precision.py. In plain PyTorch, with `positions` (rows, length) that count from 0 in each text:

    number = (positions == 0).cumsum(-1)[:, None, :, None]  # of the text in its row
    digits = (number >> torch.arange(7)) % 2 * 2.0 - 1  # in binary, of 1 and -1
    one = torch.ones_like(digits[..., :1])
    query = torch.cat([512 * torch.cat([7 * one, digits], -1).expand(-1, heads, -1, -1), query], -1)
    key = torch.cat([torch.cat([-one, digits], -1).expand(-1, heads, -1, -1), key], -1)
    # what that adds to a score is 0 within a text, and -1024 * scale or less between two: no mask is needed
    output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)

Unchanged: the gradient of the effective batch. Here: techniques/packing.py: support_packing
"""

from fabric_ladder import Run, build_dataloaders, build_model, build_optimizer, evaluate, parse_settings, train
from local_dataset_utilities import load_datasets

from lightning import Fabric

if __name__ == "__main__":
    settings = parse_settings(
        batch_size=16,
        micro_batch_tokens="auto",  # as many as a GPU has room for; on a CPU 1024
        precision="mixed",
        packing=True,  # NEW
    )

    fabric = Fabric(accelerator=settings.accelerator, devices=1, precision=settings.precision)
    fabric.launch()
    fabric.seed_everything(settings.seed)
    run = Run(fabric, settings)

    ### 1 Loading the dataset
    datasets = load_datasets(settings)
    train_loader, val_loader, test_loader = build_dataloaders(fabric, datasets, settings)

    ### 2 Initializing the model
    model = build_model(settings, datasets)
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(build_optimizer(settings, model))

    ### 3 Finetuning
    training = train(run, model, optimizer, train_loader, val_loader)

    ### 4 Evaluation
    evaluate(training, test_loader)
