"""18_low_bit_optimizer · Low-bit optimizer: Adam's two moments in 8 bits each, or in 4.

Builds on 16_bf16_that_learns.py. Two bytes a weight instead of four, and a scale for every 256 values (bitsandbytes).
In plain PyTorch, of each moment between two steps:

    blocks = moment.view(-1, 256)
    scale = blocks.abs().amax(1, keepdim=True)
    codes = (blocks / scale).unsqueeze(-1).sub(table).abs().argmin(-1)  # the nearest of the table's 256 values
    moment = table[codes] * scale  # before the next step

With --optimizer adam-4bit (techniques/adam_4bit.py) the table has 16 values and a block 128; it needs no package.

Unchanged: the gradients of the first step. Here: techniques/build.py: build_optimizer
"""

from fabric_ladder import Run, build_dataloaders, build_model, build_optimizer, evaluate, parse_settings, train
from local_dataset_utilities import load_datasets

from lightning import Fabric

if __name__ == "__main__":
    settings = parse_settings(
        batch_size=16,
        micro_batch_tokens="auto",  # as many as a GPU has room for; on a CPU 1024
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
    training = train(run, model, optimizer, train_loader, val_loader)

    ### 4 Evaluation
    evaluate(training, test_loader)
