"""12_deepspeed_zero · DeepSpeed ZeRO: stages 1, 2 and 3, with CPU or NVMe offload, by a DeepSpeed configuration.

Builds on 9_ddp.py. Configurations: configs/deepspeed/, or any written for Hugging Face (--deepspeed FILE.json).
Unchanged: effective batches.

src/plain/12_deepspeed_zero.py shows the whole training in one file.
In the package: distributed/deepspeed_config.py: read_deepspeed_config
"""

from fabric_ladder import Run, build_dataloaders, build_model, build_optimizer, evaluate, parse_settings, train
from fabric_ladder.distributed.deepspeed import deepspeed_strategy
from fabric_ladder.distributed.launch import watch_ranks
from fabric_ladder.data.load import load_datasets

from lightning import Fabric

if __name__ == "__main__":
    settings = parse_settings(
        batch_size=16,
        micro_batch_tokens="auto",  # as many as a GPU has room for; on a CPU 1024
        precision="mixed",
        devices="auto",
        strategy="deepspeed",  # NEW
        deepspeed="zero2",  # NEW
    )

    strategy = deepspeed_strategy(settings)  # NEW
    ranks = {"devices": settings.devices, "num_nodes": settings.num_nodes, "strategy": strategy}
    fabric = Fabric(accelerator=settings.accelerator, precision=settings.precision, **ranks)
    fabric.launch()
    watch_ranks(fabric)
    fabric.seed_everything(settings.seed)
    run = Run(fabric, settings)

    ### 1 Loading the dataset
    datasets = load_datasets(settings)
    train_loader, val_loader, test_loader = build_dataloaders(fabric, datasets, settings)

    ### 2 Initializing the model
    model = build_model(settings, datasets)
    model, optimizer = fabric.setup(model, build_optimizer(settings, model))  # NEW: DeepSpeed wants them together

    ### 3 Finetuning
    training = train(run, model, optimizer, train_loader, val_loader)

    ### 4 Evaluation
    evaluate(training, test_loader)
