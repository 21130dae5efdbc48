"""9_ddp · Distributed data parallel: the GPUs of one or several machines share each effective batch.

Builds on 4_mixed_precision.py. It takes all GPUs. For more machines use torchrun, fabric run, or configs/slurm.
Unchanged: effective batches and their gradients.

src/plain/9_ddp.py shows the whole training in one file.
In the package: training/gradients.py: accumulate_gradients
"""

from fabric_ladder import Run, build_dataloaders, build_model, build_optimizer, evaluate, parse_settings, train
from fabric_ladder.distributed.ddp import DDPInBuckets
from fabric_ladder.distributed.launch import watch_ranks
from fabric_ladder.data.load import load_datasets

from lightning import Fabric

if __name__ == "__main__":
    settings = parse_settings(
        batch_size=16,
        micro_batch_tokens="auto",  # as many as a GPU has room for; on a CPU 1024
        precision="mixed",
        devices="auto",  # NEW
        strategy="ddp",  # NEW
    )

    strategy = DDPInBuckets() if settings.ranks > 1 else "auto"  # NEW
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
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(build_optimizer(settings, model))

    ### 3 Finetuning
    training = train(run, model, optimizer, train_loader, val_loader)

    ### 4 Evaluation
    evaluate(training, test_loader)
