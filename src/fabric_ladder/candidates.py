"""The ways to run a model that the planner weighs: each rung with the settings that are worth trying, and their speed.

Speeds are relative and not measured: 1 is a 16-bit rung on one GPU whose micro-batches keep it busy. They depend on the
technique alone, not on the model, so that a larger model never gets a faster one.
"""

from typing import NamedTuple

AGAIN = ("--activation_checkpointing", "true")
LEAN = ("--precision", "bf16-true", "--optimizer", "sgd")
BUSY = 1024  # tokens of a micro-batch at which half of a GPU's speed is reached: a guess

# In the DeepSpeed guide's order, which is 0 > 1 > 2 > 2 + offload > 3 > 3 + offload; the distances are guesses.
# FSDP2 is a stage 3. (huggingface.co/docs/transformers/deepspeed, "Select a ZeRO stage")
SHARING = {
    "zero1": 0.95, "zero2": 0.9, "zero2_offload": 0.7, "zero3": 0.6, "10_fsdp": 0.6, "zero3_offload": 0.25,
    "11_fsdp_cpu_offload": 0.25,
}  # fmt: skip
HALF_AS_FAST = 0.5  # 32-bit by TF32: 156 against 312 TFLOP/s in 16 bits (NVIDIA, A100 data sheet; H100: 494 and 989)
COMPUTED_AGAIN = 0.75  # three thirds of work become four (Chen et al., 2016, Training Deep Nets with Sublinear Memory)
COMPILED = 1.2  # 51.4 against 43.3 minutes in the series that the rungs follow
UNPACKED = 0.7  # 4-bit weights are unpacked for each product: a guess
ONE_BY_ONE = 0.8  # an optimizer step for each sample: a guess


class Candidate(NamedTuple):
    """A rung and the options that it gets beside the user's.

    Attributes:
        rung: The script's name.
        options: As on a command line.
        several: Whether it runs on all GPUs of the plan, not on one.
    """

    rung: str
    options: tuple[str, ...] = ()
    several: bool = False

    @property
    def name(self) -> str:
        """What stands in the table: the values that speak for themselves, without their option's name."""
        values = {"--activation_checkpointing": "checkpointing"}
        words = [values.get(name, value) for name, value in zip(self.options[::2], self.options[1::2], strict=True)]
        return " ".join([self.rung, *words])


def candidates(gpus: int) -> list[Candidate]:
    """Return what is worth trying on so many GPUs, in the ladder's order.

    Where something is shared or offloaded, activations are computed again before: it costs less speed.
    """
    alone = [Candidate(rung) for rung in ("1_batch_size_1", "2_grad_accum", "3_torch_compile", "4_mixed_precision")]
    alone += [Candidate("4_mixed_precision", AGAIN), Candidate("5_low_precision"), Candidate("6_lean_optimizer")]
    alone += [Candidate("6_lean_optimizer", AGAIN), Candidate("7_grad_checkpointing"), Candidate("8_init_on_device")]
    shared = []
    if gpus > 1:
        shared += [Candidate("9_ddp", options, True) for options in ((), AGAIN)]
        shared += [Candidate("10_fsdp", options, True) for options in ((), AGAIN)]
    shared += [Candidate("11_fsdp_cpu_offload", options, True) for options in (AGAIN, (*LEAN, *AGAIN))]
    stages = ["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"] if gpus > 1 else ["zero2_offload"]
    stages += [] if gpus > 1 else ["zero3_offload"]
    for stage in stages:
        shared.append(Candidate("12_deepspeed_zero", ("--deepspeed", stage), True))
        shared.append(Candidate("12_deepspeed_zero", ("--deepspeed", stage, *AGAIN), True))
    adapters = [Candidate(rung, options) for rung in ("13_lora", "14_qlora") for options in ((), AGAIN)]
    return [*alone, *shared, *adapters]


def relative_speed(settings, rung: str, tokens: int) -> float:
    """Return a run's samples/s, as a multiple of what a busy GPU does in 16 bits.

    Args:
        settings: `precision`, `activation_checkpointing`, `compile`, `quantization`, `deepspeed`, `batch_size`, and
            `devices` and `num_nodes`.
        rung: The script's name.
        tokens: Padded tokens of a micro-batch.
    """
    speed = settings.ranks * SHARING.get(settings.deepspeed or rung, 1.0)
    speed *= tokens / (tokens + BUSY)
    if settings.precision in ("32-true", "64-true"):
        speed *= HALF_AS_FAST
    if settings.activation_checkpointing:
        speed *= COMPUTED_AGAIN
    if settings.compile:
        speed *= COMPILED
    if settings.quantization != "no":
        speed *= UNPACKED
    if settings.batch_size == 1:
        speed *= ONE_BY_ONE
    return speed
