"""4_mixed_precision · Mixed precision: 16-bit activations, 32-bit weights.

Builds on 2_grad_accum.py. It uses bfloat16 where the GPU computes in it, else float16 with a scaled loss.
Unchanged: weights, gradients and optimizer state in 32-bit.

src/plain/4_mixed_precision.py shows the whole training in one file.
In the package: environment.py: fit_precision
"""

from fabric_ladder import Run, build_dataloaders, build_model, build_optimizer, evaluate, parse_settings, train
from fabric_ladder.data.load import load_datasets

from lightning import Fabric

if __name__ == "__main__":
    settings = parse_settings(
        batch_size=16,
        micro_batch_tokens="auto",  # NEW: as many as a GPU has room for; on a CPU 1024
        precision="mixed",  # NEW
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
