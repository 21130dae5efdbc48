"""17_step_in_backward · Step in backward: each weight is updated as soon as it has its gradient, which is then freed.

Builds on 16_bf16_that_learns.py. One gradient is in memory at a time. The effective batch is one pass, and its
gradient cannot be clipped. On a GPU packing removes the padding of that pass; --activation_checkpointing true makes it
smaller.
Unchanged: losses and weights of the same pass, bit by bit.

src/plain/17_step_in_backward.py shows the whole training in one file.
In the package: techniques/weight_steps.py: WeightSteps
"""

from fabric_ladder import Run, build_dataloaders, build_model, build_optimizer, evaluate, parse_settings, train
from fabric_ladder.data.load import load_datasets

from lightning import Fabric

if __name__ == "__main__":
    settings = parse_settings(
        batch_size=16,
        precision="bf16-true",
        kahan_summation=True,
        step_in_backward=True,  # NEW: the whole effective batch in one pass; on a GPU it turns on --packing
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
