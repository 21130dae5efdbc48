"""What the planner may choose from: rungs with options, their settings, and the speeds by which they are compared."""

import argparse
from dataclasses import replace
from typing import NamedTuple

from fabric_ladder.checks import check_precision
from fabric_ladder.cli import parse_settings
from fabric_ladder.data.sampler import EVALUATED
from fabric_ladder.distributed.deepspeed_config import read_deepspeed_config
from fabric_ladder.environment import emulates, fit_precision
from fabric_ladder.errors import UserError
from fabric_ladder.planning.gpus import ANY, Gpu
from fabric_ladder.rungs import script_defaults
from fabric_ladder.settings import Settings

CHECKPOINTING, ON_HOST = ("--activation_checkpointing", "true"), ("--optimizer_offload", "true")
IN_4_BITS = ("--optimizer", "adam-4bit")
NAMED = {CHECKPOINTING: "checkpointing", ON_HOST: "optimizer offload"}
LEAN = ("--precision", "bf16-true", "--optimizer", "sgd")
ON_ALL_GPUS = ("9_ddp", "10_fsdp", "11_fsdp_cpu_offload", "12_deepspeed_zero")  # of the plan; the other rungs on one
EVAL_BATCH_TOKENS = str(EVALUATED)  # a run takes more where a micro-batch has more, and needs more for that one

BUSY = 1024  # tokens of a micro-batch at which half of a GPU's speed is reached: a guess
# In the DeepSpeed guide's order, which is 0 > 1 > 2 > 2 + offload > 3 > 3 + offload; the distances are guesses.
# FSDP2 is a stage 3. (huggingface.co/docs/transformers/deepspeed, "Select a ZeRO stage")
SHARING = {
    "zero1": 0.95, "zero2": 0.9, "zero2_offload": 0.7, "zero3": 0.6, "10_fsdp": 0.6, "zero3_offload": 0.25,
    "11_fsdp_cpu_offload": 0.25,
}  # fmt: skip
RECOMPUTED = 0.75  # three thirds of work become four (Chen et al., 2016, Training Deep Nets with Sublinear Memory)
COMPILED = 1.2  # 51.4 against 43.3 minutes in the series that the rungs follow
PRODUCTS_KEPT = 0.93  # what selective checkpointing leaves of the speed: on a CPU (page of rung 21)
OFFLOADED = 0.84  # 1.27 against 1.52 s a step (torchao's README, CPUOffloadOptimizer, ViT-g)
UNPACKED = 0.7  # 4-bit weights are unpacked for each product: a guess
ONE_BY_ONE = 0.8  # an optimizer step for each sample: a guess


class Candidate(NamedTuple):
    """A rung as it would be run.

    Attributes:
        name: The rung, and the values of its options that speak for themselves without the option's name.
        rung: The script's name.
        options: What it gets besides the user's options, as on a command line.
        settings: Of the run; for a CPU, which they are checked on, but with the plan's devices.
        micro_batches: Sizes worth trying, in samples, ascending; (None,) where the user has settled them.
    """

    name: str
    rung: str
    options: tuple[str, ...]
    settings: Settings
    micro_batches: tuple[int | None, ...]

    @property
    def fsdp_ranks(self) -> int | None:
        """GPUs over which FSDP shards; None: no FSDP."""
        return self.settings.ranks if "fsdp" in self.rung else None


def list_choices(gpus: int) -> list[tuple[str, tuple[str, ...]]]:
    """Return the rungs and options worth trying on so many GPUs, in the ladder's order.

    FSDP's offload is tried with activation checkpointing alone, which costs less speed than offloading does.
    """
    either = ((), CHECKPOINTING)
    choices = [(rung, ()) for rung in ("1_batch_size_1", "2_grad_accum", "3_torch_compile")]
    choices += [("4_mixed_precision", options) for options in either]
    choices += [("5_low_precision", ()), *(("6_lean_optimizer", options) for options in either)]
    choices += [("7_grad_checkpointing", ()), ("8_init_on_device", ())]
    choices += [("20_activation_offload", ()), ("21_selective_checkpointing", ())]
    if gpus > 1:
        choices += [(rung, options) for rung in ("9_ddp", "10_fsdp") for options in either]
    choices += [("11_fsdp_cpu_offload", options) for options in (CHECKPOINTING, (*LEAN, *CHECKPOINTING))]
    stages = ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload") if gpus > 1 else (
        "zero2_offload", "zero3_offload")  # fmt: skip
    choices += [("12_deepspeed_zero", ("--deepspeed", stage, *options)) for stage in stages for options in either]
    choices += [(rung, options) for rung in ("13_lora", "14_qlora", "16_bf16_that_learns") for options in either]
    choices += [("17_step_in_backward", options) for options in (*either, (*ON_HOST, *CHECKPOINTING))]
    choices += [("18_low_bit_optimizer", (*bits, *options)) for bits in ((), IN_4_BITS) for options in either]
    choices += [("19_optimizer_offload", options) for options in either]
    return choices


def read_candidates(
    choices: list[tuple[str, tuple[str, ...]]], options: list[str], gpus: int, gpu: Gpu = ANY
) -> tuple[list[Candidate], dict[str, str]]:
    """Read the settings of every choice.

    Args:
        choices: Rungs and their options; what `options` says already is taken out of these.
        options: Of the user, as on a rung's command line.
        gpus: Devices of the plan.
        gpu: Each of them.

    Returns:
        The candidates, and by name why other choices cannot be run.

    Raises:
        UserError: No choice can be run: the reason of the first.
    """
    given = {word.split("=")[0] for word in options if word.startswith("--")}
    here = ["--from_scratch", "true"]  # no weights are looked for
    here += [] if "--eval_batch_tokens" in given else ["--eval_batch_tokens", EVAL_BATCH_TOKENS]
    candidates, problems = {}, {}
    for rung, extra in choices:
        pairs = [pair for pair in zip(extra[::2], extra[1::2], strict=True) if pair[0] not in given]
        name = " ".join([rung, *(NAMED.get(pair, pair[1]) for pair in pairs)])
        if name in candidates or name in problems:
            continue
        extra = sum(pairs, ())
        try:
            settings = read_settings(rung, [*options, *extra, *here], gpus if rung in ON_ALL_GPUS else 1, gpu)
            settled = given & {"--micro_batch_size", "--micro_batch_tokens"} or settings.pack_rows
            sizes = (None,) if settled or settings.step_in_backward else _sizes(settings)
            candidates[name] = Candidate(name, rung, extra, settings, sizes)
        except UserError as error:
            problems[name] = str(error)
    if not candidates:
        none = "there is nothing to plan: 15 takes what 4 takes, 22 is not known yet, and 9 and 10 need --devices 2"
        raise UserError(next(iter(problems.values()), none))
    return list(candidates.values()), problems


def read_settings(rung: str, options: list[str], gpus: int = 1, gpu: Gpu = ANY) -> Settings:
    """Return a rung's settings as they would be on so many GPUs, checked on this machine's CPU.

    What would be refused there, DeepSpeed and `16-mixed`, is put in afterwards. A line that the run would print of its
    precision is the only one of the notices.

    Raises:
        UserError: The rung cannot be run with these options.
    """
    defaults = script_defaults(rung)
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--precision")
    if "deepspeed" in defaults:
        finder.add_argument("--deepspeed", default=defaults["deepspeed"])
    found, options = finder.parse_known_args(options)
    if found.precision:
        options += ["--precision", "mixed" if found.precision == "16-mixed" else found.precision]
    here = ["--accelerator", "cpu", "--devices", "1"]
    settings = parse_settings(
        [*options, *here], **defaults | {"deepspeed": None} if "deepspeed" in defaults else defaults
    )
    if gpus > settings.batch_size:
        raise UserError(f"--batch_size {settings.batch_size} is below the number of devices, {gpus}: raise it")
    precision, sharded = found.precision or settings.precision, "offload" in defaults
    if not found.precision and precision == "bf16-mixed":
        precision = "mixed"  # as it is on a CPU
    precision, meaning = fit_precision(precision, gpu.capability, settings.lora and not found.precision, sharded)
    settings = replace(settings, name=rung, devices=gpus, precision=precision, notices=(meaning,) if meaning else ())
    check_precision(settings, gpu.capability, sharded)
    if "deepspeed" in defaults:
        settings = replace(settings, deepspeed=found.deepspeed)
        read_deepspeed_config(settings)  # refuses one that does not fit
        if precision == "32-true":
            raise UserError("--precision 32-true: what ZeRO holds is known of 16-bit weights only; plan for bf16-mixed")
    return settings


def accuracy_costs(settings: Settings) -> list[str]:
    """Return in words what settings have been seen to cost in accuracy: MiniLM on 2,000 reviews (docs/results.md)."""
    if settings.lora and settings.lora_targets == "all-linear":
        return []
    if settings.lora:
        return ["7 points of accuracy (MiniLM; 0.6 at --learning_rate 8e-4)"]
    costs = []
    if settings.precision in ("bf16-true", "16-true") and not settings.kahan_summation:
        costs.append("13 points of accuracy (MiniLM after 63 steps; 0.7 after 125)")
    if settings.optimizer == "sgd":
        costs.append("26 points against Adam (MiniLM; 6 at --learning_rate 0.16)")
    return costs


def relative_speed(settings: Settings, rung: str, tokens: int, gpu: Gpu = ANY) -> float:
    """Return a run's samples/s, as a multiple of what a busy GPU of this kind does in 16 bits.

    Args:
        settings: `precision`, `activation_checkpointing`, `selective_checkpointing`, `compile`,
            `quantization`, `optimizer_offload`, `deepspeed`, `batch_size`, `devices` and `num_nodes`.
        rung: The script's name.
        tokens: Padded tokens of a micro-batch.
        gpu: Its peaks tell how much slower 32-bit products are; an emulated bfloat16 is taken to be no faster.
    """
    speed = settings.ranks * SHARING.get(settings.deepspeed or rung, 1.0)
    speed *= tokens / (tokens + BUSY)
    if settings.precision in ("32-true", "64-true") or emulates(settings.precision, gpu.capability):
        speed *= gpu.single / gpu.half
    if settings.activation_checkpointing:
        speed *= PRODUCTS_KEPT if settings.selective_checkpointing else RECOMPUTED
    if settings.compile:
        speed *= COMPILED
    if settings.quantization != "no":
        speed *= UNPACKED
    if settings.optimizer_offload:
        speed *= OFFLOADED
    if settings.batch_size == 1:
        speed *= ONE_BY_ONE
    return speed


def _sizes(settings: Settings) -> tuple[int, ...]:
    """Return the powers of two below a GPU's share of the effective batch, and the share."""
    share = -(-settings.batch_size // settings.ranks)
    return tuple(sorted({*(2**power for power in range(share.bit_length())), share}))
