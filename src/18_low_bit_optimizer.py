"""18_low_bit_optimizer · Low-bit optimizer: Adam's two moments in 8 bits each, or in 4.

Builds on 16_bf16_that_learns.py. Two bytes per weight instead of four, and a scale for every 256 values
(bitsandbytes). --optimizer adam-4bit (techniques/adam_4bit.py, torchao) halves that again.
Unchanged: the gradients of the first step.

src/plain/18_low_bit_optimizer.py shows the whole training in one file.
In the package: techniques/low_bit_optimizer.py: LowBitOptimizer
"""

from fabric_ladder import Run, build_dataloaders, build_model, build_optimizer, evaluate, parse_settings, train
from fabric_ladder.data.load import load_datasets

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
