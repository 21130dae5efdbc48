"""5_low_precision · Low precision: weights, gradients and optimizer state in bfloat16 too.

Builds on 4_mixed_precision.py. Rounding loses an update below a 512th of its weight (torchao#1124).
Unchanged: samples, order and learning rate.

src/plain/5_low_precision.py shows the whole training in one file.
In the package: techniques/build.py: build_model
"""

from fabric_ladder import Run, build_dataloaders, build_model, build_optimizer, evaluate, parse_settings, train
from fabric_ladder.data.load import load_datasets

from lightning import Fabric

if __name__ == "__main__":
    settings = parse_settings(
        batch_size=16,
        micro_batch_tokens="auto",  # as many as a GPU has room for; on a CPU 1024
        precision="bf16-true",  # NEW
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
