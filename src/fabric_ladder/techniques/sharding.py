"""Several GPUs: DDP, FSDP2 and DeepSpeed, and their checks; `distributed/` builds the strategies."""

from dataclasses import replace

from fabric_ladder.distributed.deepspeed import check_deepspeed
from fabric_ladder.distributed.deepspeed_config import read_deepspeed_config
from fabric_ladder.distributed.fsdp import transformer_blocks
from fabric_ladder.errors import UserError
from fabric_ladder.models.layers import meta_model
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.memory import Counts, Peak
from fabric_ladder.techniques.technique import Technique
from fabric_ladder.techniques.zero_memory import with_zero

# Bytes per weight in each pass. ZeRO-2 adds gradients over the ranks; ZeRO-3 also gathers 16-bit weights twice. Offload
# moves gradients out, and with ZeRO-3 weights in, twice.
ZERO_BYTES = {"zero1": 0, "zero2": 2, "zero2_offload": 4, "zero3": 6, "zero3_offload": 12, "zero3_nvme": 12}


class DDP(Technique):
    """Each GPU has all weights, and a share of each effective batch."""


class FSDP(Technique):
    """Parameters, gradients and optimizer state are sharded."""

    shards = True
    refused_precisions = ("16-mixed", "64-true")
    refused_on_mps = "FSDP2: use src/7_grad_checkpointing.py"

    def check_precision(self, settings: Settings, capability: tuple[int, int] | None) -> None:
        if settings.precision in self.refused_precisions:
            raise UserError(
                f"--precision {settings.precision}: FSDP2 under Fabric cannot do it; use bf16-mixed, bf16-true or "
                "32-true"
            )

    def check(self, settings: Settings, capability: tuple[int, int] | None) -> None:
        if not self.is_used(settings):
            return
        check_no_trial(settings)
        if settings.optimizer in ("adafactor", "sinkgd", "adam-8bit", "adam-4bit"):
            raise UserError(
                f"--optimizer {settings.optimizer} cannot step on FSDP2's shards; use sgd, the leanest, adam or adamw"
            )
        transformer_blocks(meta_model(settings))

    def bytes_per_pass(self, settings: Settings) -> int:
        """Return the bytes of weights in 16 bits, gathered twice, and of gradients in 32 bits."""
        return 2 * 2 + 4


class CpuOffload(Technique):
    """The shards are kept in CPU memory, and the optimizer steps there."""

    shards = True
    refused_precisions = FSDP.refused_precisions

    def bytes_per_pass(self, settings: Settings) -> int:
        """Return the bytes beyond FSDP2's: a single GPU gets 32-bit weights twice, and sends 32-bit gradients."""
        return 3 * 4 - FSDP().bytes_per_pass(settings)


class DeepSpeed(Technique):
    """ZeRO 1, 2 and 3 with offloading to CPU memory or disk, from a DeepSpeed configuration."""

    shards = True
    explained_errors = (
        (
            "Current loss scale already at minimum",  # DeepSpeed has skipped at least 17 steps by then
            "gradients overflow float16 at every loss scale: try a lower --learning_rate, --precision 32-true, or "
            "bf16-mixed on a GPU that computes in it",
        ),
    )

    def packages(self, settings: Settings) -> tuple[str, ...]:
        return ("deepspeed",)

    def check(self, settings: Settings, capability: tuple[int, int] | None) -> None:
        if not settings.deepspeed:
            return
        check_no_trial(settings)
        check_deepspeed(settings)

    def rehearsed(self, settings: Settings) -> Settings:
        """Return settings of one device without optimizer state, which are equal for all stages."""
        options = {"deepspeed": "zero2", "precision": "bf16-true", "optimizer": "sgd"}
        return replace(settings, devices=1, num_nodes=1, **options)

    def add_memory(self, peak: Peak, counts: Counts, settings: Settings) -> Peak:
        """Replace weights, gradients and optimizer state by those of the ZeRO stage."""
        config = read_deepspeed_config(settings)[0]["zero_optimization"]
        return with_zero(peak, counts, config, settings.optimizer, settings.ranks)

    def unpredictable(self, settings: Settings) -> str | None:
        return "ZeRO's memory is known for 16-bit weights only" if settings.precision == "32-true" else None

    def bytes_per_pass(self, settings: Settings) -> int:
        """Return the bytes of the stage; those of ZeRO-3 for a configuration of the user's own."""
        return ZERO_BYTES.get(settings.deepspeed, ZERO_BYTES["zero3"])


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
