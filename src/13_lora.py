"""13_lora · Low-rank adapters (LoRA): a few thin matrices are trained, the model itself stays as it is.

Builds on 5_low_precision.py. No gradient and no optimizer state of the model; the adapters are trained in 32-bit.
In plain PyTorch, for each linear layer of the attention:

    down = torch.nn.Linear(width, rank, bias=False)
    up = torch.nn.Linear(rank, width, bias=False)
    torch.nn.init.zeros_(up.weight)  # so that the first step starts from the model as it is
    output = layer(x) + up(down(dropout(x))) * alpha / rank  # only `down` and `up` are trained

Unchanged: the model's own weights. Here: techniques/lora.py: add_adapters
"""

from fabric_ladder import Run, build_dataloaders, build_model, build_optimizer, evaluate, parse_settings, train
from local_dataset_utilities import load_datasets

from lightning import Fabric

if __name__ == "__main__":
    settings = parse_settings(
        batch_size=16,
        micro_batch_tokens="auto",  # as many as a GPU has room for; on a CPU 1024
        precision="bf16-true",
        lora=True,  # NEW
        lora_rank=8,
        lora_alpha=32,
        lora_dropout=0.1,
        save="consolidated",  # NEW: the adapters alone, a few MB
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
