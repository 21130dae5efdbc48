"""13_lora · Low-rank adapters (LoRA): a few thin matrices are trained, and the model's own weights are frozen.

Builds on 5_low_precision.py. The model has no gradients and no optimizer state. The adapters are trained in 32-bit.
Unchanged: the model's own weights.

src/plain/13_lora.py shows the whole training in one file.
In the package: techniques/lora.py: add_adapters
"""

from fabric_ladder import Run, build_dataloaders, build_model, build_optimizer, evaluate, parse_settings, train
from fabric_ladder.data.load import load_datasets

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
