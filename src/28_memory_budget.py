"""28_memory_budget · A memory budget: recompute only the blocks whose activations have no room.

Builds on 7_grad_checkpointing.py. The planner finds their number before the first step.
Unchanged: losses and gradients.

src/plain/28_memory_budget.py shows the whole training in one file.
In the package: techniques/memory_budget.py: MemoryBudget
"""

from fabric_ladder import Run, build_dataloaders, build_model, build_optimizer, evaluate, parse_settings, train
from fabric_ladder.data.load import load_datasets

from lightning import Fabric

if __name__ == "__main__":
    settings = parse_settings(
        batch_size=16,
        micro_batch_tokens="auto",  # as many as a GPU has room for; on a CPU 1024
        precision="bf16-true",
        activation_checkpointing=True,
        memory_budget="auto",  # NEW; what is free on the GPU, or a size such as 8GiB; a CPU recomputes nothing
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
