"""18_low_bit_optimizer · Low-bit optimizer: Adam's two moments in 8 bits each.

Builds on 16_bf16_that_learns.py. Two bytes a weight instead of four, with a scale of their own for every 256 values.
In plain PyTorch, of each moment between two steps:

    scale = moment.view(-1, 256).abs().amax(1, keepdim=True)
    codes = (moment.view(-1, 256) / scale).sub(table).abs().argmin(-1)  # of the 256 values of a table
    moment = table[codes] * scale  # before the next step

Unchanged: the gradients of the first step. Here: models/optimizer.py: build_optimizer, with bitsandbytes
"""

from lightning import Fabric

from fabric_ladder import Run, build_dataloaders, build_model, build_optimizer, evaluate, parse_settings, train
from local_dataset_utilities import load_datasets

if __name__ == "__main__":
    settings = parse_settings(
        batch_size=16,
        micro_batch_tokens="auto",  # as many as a GPU has room for; on a CPU one sample
        precision="bf16-true",
        kahan_summation=True,
        optimizer="adam-8bit",  # NEW
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
    train(run, model, optimizer, train_loader, val_loader)

    ### 4 Evaluation
    evaluate(run, model, test_loader)
