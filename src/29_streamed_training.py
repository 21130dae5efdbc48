"""29_streamed_training · Streamed training: all weights are trained, in CPU memory, with two blocks on the GPU.

Builds on 17_step_in_backward.py. Weights, gradients and optimizer state are in CPU memory. A block comes to the GPU one
ahead of its use. As soon as a gradient is there, the CPU steps, while the GPU computes the block before.
Unchanged: losses and weights, bit by bit on a CPU.

src/plain/29_streamed_training.py shows the whole training in one file.
In the package: techniques/streamed_layers.py: stream_blocks
"""

from fabric_ladder import Run, build_dataloaders, build_model, build_optimizer, evaluate, parse_settings, train
from fabric_ladder.data.load import load_datasets

from lightning import Fabric

if __name__ == "__main__":
    settings = parse_settings(
        batch_size=16,
        precision="bf16-true",
        kahan_summation=True,
        step_in_backward=True,
        optimizer_offload=True,  # NEW
        stream_layers=True,  # NEW
        activation_checkpointing=True,  # NEW: activations would be most of the rest
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
