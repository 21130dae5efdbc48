"""16_bf16_that_learns · bfloat16 that learns: what rounding takes from small steps is kept (Kahan summation).

Builds on 5_low_precision.py. Two more bytes a weight, and steps too small for a bfloat16 weight still move it.
In plain PyTorch, for each weight, with `remainder` 0 at first:

    remainder -= lr * step  # the optimizer steps on the remainder, not on the weight
    before = weight.clone()
    weight += remainder  # as far as 8 bits can say
    remainder += before - weight  # what the weight did not take

Unchanged: the gradients of the first step. Here: techniques/kahan.py: Kahan
"""

from fabric_ladder import Run, build_dataloaders, build_model, build_optimizer, evaluate, parse_settings, train
from local_dataset_utilities import load_datasets

from lightning import Fabric

if __name__ == "__main__":
    settings = parse_settings(
        batch_size=16,
        micro_batch_tokens="auto",  # as many as a GPU has room for; on a CPU 1024
        precision="bf16-true",
        kahan_summation=True,  # NEW
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
