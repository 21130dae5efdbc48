"""22_float8 · Float8: the matrix multiplications of linear layers in 8-bit floating point.

Builds on 4_mixed_precision.py. GPUs from Ada and Hopper on multiply 8 bits twice as fast as 16. On a GPU the blocks are
compiled, so that the rounding costs less than that gain.
Unchanged: weights, gradients and optimizer state in 32-bit, all else in 16.

src/plain/22_float8.py shows the whole training in one file.
In the package: techniques/float8.py: use_float8
"""

from fabric_ladder import Run, build_dataloaders, build_model, build_optimizer, evaluate, parse_settings, train
from fabric_ladder.data.load import load_datasets

from lightning import Fabric

if __name__ == "__main__":
    settings = parse_settings(
        batch_size=16,
        micro_batch_tokens="auto",  # as many as a GPU has room for; on a CPU 1024
        precision="mixed",
        float8=True,  # NEW; on a GPU it turns on --compile
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
