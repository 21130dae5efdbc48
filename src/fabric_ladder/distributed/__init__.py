"""Several processes: launching, sharding, DeepSpeed, dead ranks and signals."""
