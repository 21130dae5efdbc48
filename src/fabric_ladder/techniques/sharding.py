"""Several GPUs: DDP, FSDP2 and DeepSpeed, and their checks; `distributed/` builds the strategies."""

from fabric_ladder.distributed.deepspeed import check_deepspeed
from fabric_ladder.distributed.fsdp import transformer_blocks
from fabric_ladder.errors import UserError
from fabric_ladder.models.layers import meta_model
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.technique import NextRung, Technique

ON_ONE_DEVICE = ("kahan_summation", "step_in_backward", "optimizer_offload", "optimizer")  # FSDP2 refuses them
PARKED_WEIGHTS = NextRung(
    "11_fsdp_cpu_offload", "parks weights in the host's memory", replaces=("offload", *ON_ONE_DEVICE)
)


class _Strategy(Technique):
    """A strategy is given by the rung, not by a setting."""

    strategy = ""

    def is_used(self, settings: Settings) -> bool:
        """Return whether the rung has this strategy."""
        return settings.strategy == self.strategy


class DDP(_Strategy):
    """Each GPU has all weights, and a share of each effective batch."""

    strategy = "ddp"
    rung = "9_ddp"
    next_rung = NextRung(
        "10_fsdp", "shards weights, gradients and optimizer state", replaces=("offload", *ON_ONE_DEVICE)
    )


class FSDP(_Strategy):
    """Parameters, gradients and optimizer state are sharded."""

    strategy = "fsdp"
    rung = "10_fsdp"
    refused_precisions = ("16-mixed", "64-true")
    next_rung = NextRung("11_fsdp_cpu_offload", "parks weights in the host's memory", replaces=("offload",))

    def check_precision(self, settings: Settings) -> None:
        """Refuse precisions that Fabric's FSDP2 cannot do."""
        if settings.precision in self.refused_precisions:
            raise UserError(
                f"--precision {settings.precision}: FSDP2 under Fabric cannot do it; use bf16-mixed, bf16-true or "
                "32-true"
            )

    def check(self, settings: Settings, capability: tuple[int, int] | None) -> None:
        """Refuse optimizers, trials and models that FSDP2 cannot work with."""
        if not self.is_used(settings):
            return
        check_no_trial(settings)
        if settings.optimizer in ("adafactor", "adam-8bit", "adam-4bit"):
            raise UserError(
                f"--optimizer {settings.optimizer} cannot step on FSDP2's shards; use sgd, the leanest, adam or adamw"
            )
        transformer_blocks(meta_model(settings))


class CpuOffload(Technique):
    """The shards are kept in CPU memory, and the optimizer steps there."""

    setting = "offload"
    rung = "11_fsdp_cpu_offload"
    next_rung = NextRung(None, "trains thin adapters alone", options=("--precision", "bf16-true", "--lora", "true"))


class DeepSpeed(_Strategy):
    """ZeRO 1, 2 and 3 with offloading to CPU memory or disk, from a DeepSpeed configuration."""

    setting = "deepspeed"
    strategy = "deepspeed"
    rung = "12_deepspeed_zero"
    next_rung = NextRung(
        None, "parks weights in the host's memory", options=("--deepspeed", "zero3_offload"), replaces=("optimizer",)
    )

    def check(self, settings: Settings, capability: tuple[int, int] | None) -> None:
        """Refuse settings that contradict DeepSpeed's configuration."""
        if not settings.deepspeed:
            return
        check_no_trial(settings)
        if settings.on_nan == "skip":
            raise UserError("--on_nan skip: DeepSpeed cannot undo a gradient; in fp16 it skips overflows by itself")
        check_deepspeed(settings)


def check_no_trial(settings: Settings) -> None:
    """Refuse to find the micro-batch by trial, where ranks communicate within the forward pass.

    Raises:
        UserError: `micro_batch_tokens` is `auto` without a CUDA GPU, whose memory could be predicted.
    """
    if settings.micro_batch_tokens == "auto" and settings.accelerator != "cuda":
        raise UserError(
            "--micro_batch_tokens auto: weights are sharded, so the ranks communicate within the forward pass. A rank "
            "that runs out of memory in a trial would leave the others waiting; give a number"
        )
