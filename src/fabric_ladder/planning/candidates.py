"""Candidates of the planner: rungs with options, their settings and their relative speeds."""

import argparse
from dataclasses import replace
from typing import NamedTuple

from fabric_ladder.checks import check_precision
from fabric_ladder.cli import parse_settings
from fabric_ladder.data.sampler import EVALUATED
from fabric_ladder.distributed.deepspeed_config import read_deepspeed_config
from fabric_ladder.environment import emulates, fit_precision
from fabric_ladder.errors import UserError
from fabric_ladder.options import drop_unneeded
from fabric_ladder.planning.gpus import ANY, Gpu
from fabric_ladder.planning.predict import unpredictable
from fabric_ladder.rungs import RUNGS, script_defaults
from fabric_ladder.settings import Settings
from fabric_ladder.techniques import TECHNIQUES, technique_of, trains_adapters, used
from fabric_ladder.techniques.technique import Technique

# A run evaluates more tokens if its micro-batches are larger; then the micro-batches decide its peak.
EVAL_BATCH_TOKENS = str(EVALUATED)
NAMED = {(f"--{technique.setting}", "true"): technique.short_name for technique in TECHNIQUES if technique.short_name}

HALF_SPEED_TOKENS = 1024  # tokens of a micro-batch with half of a GPU's full speed: a guess
SINGLE_SAMPLE_SPEED = 0.8  # an optimizer step for each sample: a guess


class Candidate(NamedTuple):
    """A rung with options and settings.

    Attributes:
        name: The rung and short names of its options.
        rung: The script's name.
        options: Options added to the user's options, as on a command line.
        settings: Settings with the plan's devices. All other values were checked for a CPU.
        micro_batches: Sizes to try, in samples, ascending; (None,) if the user has chosen the size.
    """

    name: str
    rung: str
    options: tuple[str, ...]
    settings: Settings
    micro_batches: tuple[int | None, ...]

    @property
    def fsdp_ranks(self) -> int | None:
        """Number of GPUs that share the FSDP shards; None: no FSDP."""
        return self.settings.ranks if self.settings.strategy == "fsdp" else None

    @property
    def adapters(self) -> bool:
        """Whether only adapters are trained."""
        return trains_adapters(self.settings)


def list_choices(gpus: int) -> list[tuple[str, tuple[str, ...]]]:
    """Return the rungs and options to try on N GPUs, in the ladder's order."""
    choices = []
    for rung in RUNGS:
        technique = technique_of(rung.stem) or Technique()
        choices += [(rung.stem, options) for options in technique.planned(gpus)]
    return choices


def read_candidates(
    choices: list[tuple[str, tuple[str, ...]]], options: list[str], gpus: int, gpu: Gpu = ANY
) -> tuple[list[Candidate], dict[str, str]]:
    """Read the settings of every choice.

    Args:
        choices: Rungs and their options. An option that is also in `options` is left out.
        options: The user's options, as on a rung's command line.
        gpus: Number of GPUs of the plan.
        gpu: The type of the GPUs.

    Returns:
        The candidates, and for each other choice the reason why it cannot run.

    Raises:
        UserError: No choice can run. The message is the first reason.
    """
    given = {word.split("=")[0] for word in options if word.startswith("--")}
    here = ["--from_scratch", "true"]  # a plan needs no weights
    here += [] if "--eval_batch_tokens" in given else ["--eval_batch_tokens", EVAL_BATCH_TOKENS]
    candidates, problems = {}, {}
    for rung, extra in choices:
        pairs = [pair for pair in zip(extra[::2], extra[1::2], strict=True) if pair[0] not in given]
        name = " ".join([rung, *(NAMED.get(pair, pair[1]) for pair in pairs)])
        if name in candidates or name in problems:
            continue
        extra = sum(pairs, ())
        try:
            on_one_gpu = script_defaults(rung).get("strategy", "single") == "single"
            settings = read_settings(rung, [*options, *extra, *here], 1 if on_one_gpu else gpus, gpu)
            settled = given & {"--micro_batch_size", "--micro_batch_tokens"}
            settled = settled or any(technique.size_setting(settings) for technique in used(settings))
            sizes = (None,) if settled else _sizes(settings)
            candidates[name] = Candidate(name, rung, extra, settings, sizes)
        except UserError as error:
            problems[name] = str(error)
    if not candidates:
        nothing = "no rung to plan: 15 needs the memory of 4, 22 has no prediction, and 9 and 10 need --devices 2"
        raise UserError(next(iter(problems.values()), nothing))
    return list(candidates.values()), problems


def read_settings(rung: str, options: list[str], gpus: int = 1, gpu: Gpu = ANY) -> Settings:
    """Return a rung's settings for N GPUs, checked on this machine's CPU.

    DeepSpeed and `16-mixed`, which a CPU refuses, are added after the check. The notices hold only the line about the
    precision that the run would print.

    Raises:
        UserError: The rung cannot be run with these options.
    """
    defaults = script_defaults(rung)
    options = drop_unneeded(options, defaults)  # another rung has use for them
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--precision")
    if defaults.get("strategy") == "deepspeed":
        finder.add_argument("--deepspeed", default=defaults["deepspeed"])
    found, options = finder.parse_known_args(options)
    if found.precision:
        options += ["--precision", "mixed" if found.precision == "16-mixed" else found.precision]
    here = ["--accelerator", "cpu", "--devices", "1"]
    settings = parse_settings(
        [*options, *here], **defaults | {"deepspeed": None} if defaults.get("strategy") == "deepspeed" else defaults
    )
    if gpus > settings.batch_size:
        raise UserError(f"--batch_size {settings.batch_size} is below the number of devices, {gpus}: raise it")
    precision = found.precision or settings.precision
    sharded = settings.strategy == "fsdp"
    adapters = trains_adapters(settings)
    if not found.precision and precision == "bf16-mixed":
        precision = "mixed"  # a CPU has turned it into bf16-mixed
    precision, meaning = fit_precision(precision, gpu.capability, adapters and not found.precision, sharded)
    settings = replace(settings, name=rung, devices=gpus, precision=precision, notices=(meaning,) if meaning else ())
    check_precision(settings, gpu.capability)
    if defaults.get("strategy") == "deepspeed":
        settings = replace(settings, deepspeed=found.deepspeed)
        read_deepspeed_config(settings)  # for its checks
    if reason := unpredictable(settings):
        raise UserError(f"--precision {settings.precision}: {reason}; plan for bf16-mixed")
    return settings


def accuracy_costs(settings: Settings) -> list[str]:
    """Return the measured costs in accuracy of the techniques in use, in words."""
    return [cost for technique in used(settings) if (cost := technique.accuracy_cost(settings))]


def relative_speed(settings: Settings, tokens: int, gpu: Gpu = ANY) -> float:
    """Return a run's samples/s, relative to a busy GPU of this type in 16 bits.

    Args:
        settings: Settings of the run.
        tokens: Padded tokens of a micro-batch.
        gpu: The GPU. Its peaks give the speed of 32-bit matrix multiplications; emulated bfloat16 is as slow.
    """
    speed = settings.ranks * tokens / (tokens + HALF_SPEED_TOKENS)
    if settings.precision in ("32-true", "64-true") or emulates(settings.precision, gpu.capability):
        speed *= gpu.single / gpu.half
    for technique in used(settings):
        speed *= technique.relative_speed(settings)
    if settings.batch_size == 1:
        speed *= SINGLE_SAMPLE_SPEED
    return speed


def _sizes(settings: Settings) -> tuple[int, ...]:
    """Return the powers of two below a GPU's share of the effective batch, and the share."""
    share = -(-settings.batch_size // settings.ranks)
    return tuple(sorted({*(2**power for power in range(share.bit_length())), share}))
