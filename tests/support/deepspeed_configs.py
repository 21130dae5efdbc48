"""DeepSpeed configurations of Hugging Face's guide to DeepSpeed with the Trainer, with its "auto" values."""

ADAMW = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
HUGGING_FACE = {
    "fp16": {
        "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": ADAMW},
    "scheduler": {"type": "WarmupLR", "params": WARMUP},
    **dict.fromkeys(BATCHES, "auto"),
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}  # fmt: skip
ZERO_2 = HUGGING_FACE | {
    "zero_optimization": {
        "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "allgather_partitions": True,
        "allgather_bucket_size": 2e8, "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": "auto",
        "contiguous_gradients": True,
    },
}  # fmt: skip
ZERO_3 = HUGGING_FACE | {
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True}, "overlap_comm": True, "contiguous_gradients": True,
        "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
    },
}  # fmt: skip
