"""11_fsdp_cpu_offload · FSDP with CPU offload: the shards stay in CPU memory, and the optimizer steps there.

Builds on 10_fsdp.py. Every use of a weight copies it to the GPU, which holds one block at a time: slow, not measured.
Unchanged: effective batches and their gradients.

src/plain/11_fsdp_cpu_offload.py shows the whole training in one file.
In the package: distributed/fsdp.py: sharding_policy
"""

from fabric_ladder import Run, build_dataloaders, build_model, build_optimizer, evaluate, parse_settings, train
from fabric_ladder.distributed.fsdp import fsdp_strategy, sharding_policy, transformer_blocks
from fabric_ladder.distributed.launch import watch_ranks
from fabric_ladder.data.load import load_datasets

from lightning import Fabric
from torch.distributed.fsdp import fully_shard

if __name__ == "__main__":
    settings = parse_settings(
        batch_size=16,
        micro_batch_tokens="auto",  # as many as a GPU has room for; on a CPU 1024
        precision="mixed",
        devices="auto",
        strategy="fsdp",
        offload=True,  # NEW
    )

    def shard(model, mesh):
        policy = sharding_policy(settings, mesh)
        for block in transformer_blocks(model):
            fully_shard(block, **policy)
        return fully_shard(model, **policy)

    strategy = fsdp_strategy(settings, shard)
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
