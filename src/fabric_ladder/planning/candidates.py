"""Candidates of the planner: rungs with options, their settings and their measured speeds."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fabric_ladder.checks import check_precision
from fabric_ladder.cli import parse_settings
from fabric_ladder.distributed.deepspeed_config import read_deepspeed_config, settings_in_file
from fabric_ladder.environment import fit_precision
from fabric_ladder.errors import UserError
from fabric_ladder.foreign import BATCH, DEPENDENT, as_words
from fabric_ladder.ladder import LADDER, row_of
from fabric_ladder.options import drop_unneeded, read_named_config, read_words, script_defaults, without_options
from fabric_ladder.planning.gpus import ANY, Gpu
from fabric_ladder.planning.measured import SPEEDS, cost_rank
from fabric_ladder.planning.predict import unpredictable
from fabric_ladder.settings import Settings
from fabric_ladder.techniques import cuda_defaults, full_pass, trains_adapters, trains_all, used

NAMED = {(f"--{row.setting}", "true"): row.short_name for row in LADDER if row.short_name}
SWITCHES = {f"--{row.setting}" for row in LADDER}


class Candidate(NamedTuple):
    """A rung with options and settings.

    Attributes:
        name: The rung and short names of the options that the planner adds.
        rung: The script's name.
        words: The user's options that have an effect on the rung, and the added options, as on a command line.
        settings: Settings with the plan's devices. All other values were checked for a CPU.
        micro_batches: Sizes to try, in samples, ascending; (None,) if the user has chosen the size.
        speed: Measured samples/s of BLOOM-560m (`measured.py`); None: not measured.
    """

    name: str
    rung: str
    words: tuple[str, ...]
    settings: Settings
    micro_batches: tuple[int | None, ...]
    speed: float | None = None

    @property
    def trains(self) -> str:
        """The weights that the run trains, in words."""
        return "all weights" if trains_all(self.settings) else "some of the weights"

    @property
    def rank(self) -> tuple[float | str, ...]:
        """What is known without a rehearsal, the best first; `recommend` decides equal ranks by memory.

        Steps of measured cost in accuracy, all weights before some of them, least cost, most GPUs, highest measured
        speed, no copies to other memory, no recomputation. A cost or a speed that was not measured comes last.
        """
        settings, techniques = self.settings, used(self.settings)
        copies = any(not each.state_on_device or each.bytes_per_pass(settings) for each in techniques)
        recomputes = any(each.recomputes for each in techniques)
        steps, points = cost_rank(vars(settings))
        return steps, self.trains, points, -settings.ranks, -(self.speed or 0), copies, recomputes


def list_choices(rungs: list[Path], gpus: int) -> tuple[list[tuple[str, tuple[str, ...]]], dict[str, str]]:
    """Return rungs and options to try on N GPUs, in the ladder's order, and for each rung without any the reason."""
    choices, problems = [], {}
    for rung in rungs:
        row = row_of(rung.stem)
        choices += [(rung.stem, options) for options in row.planned(gpus)]
        if not row.plans:
            problems[rung.stem] = "not planned, see its page in docs/techniques"
        elif not row.planned(gpus):
            problems[rung.stem] = "planned only for --devices 2 or more"
    return choices, problems


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
    """
    if "--micro_batch_tokens auto" in " ".join(options).replace("=", " "):  # the plan looks for the size that fits
        options = without_options(options, ["micro_batch_tokens"])
    given = {word.split("=")[0] for word in options if word.startswith("--")}
    candidates, problems = {}, {}
    for rung, added in choices:
        pairs = [pair for pair in zip(added[::2], added[1::2], strict=True) if pair[0] not in given]
        name = " ".join([rung, *(NAMED.get(pair, pair[1]) for pair in pairs)])
        if name in candidates or name in problems:
            continue
        words = drop_unneeded([*options, *sum(pairs, ())], script_defaults(rung))  # another rung has use for them
        try:
            on_one_gpu = script_defaults(rung).get("strategy", "single") == "single"
            settings = read_settings(rung, words, 1 if on_one_gpu else gpus, gpu)
        except UserError as error:
            problems[name] = str(error)
            continue
        if Path(settings.model).is_file() and "--from_scratch" not in given:
            words += ["--from_scratch", "true"]  # a config file alone holds no weights to start from
        tokens = read_named_config(read_words(words)).get("micro_batch_tokens")
        counted = {f"--{name}" for name, option in DEPENDENT.items() if option.means == BATCH}
        settled = given & {"--micro_batch_size", "--micro_batch_tokens", *counted} or tokens not in (None, "auto")
        settled = settled or any(technique.whole_batch for technique in used(settings))
        sizes = (None,) if settled else _sizes(settings)
        batch = script_defaults(rung).get("batch_size", Settings.batch_size)
        usual = settings.batch_size == batch and settings.task == Settings.task  # as in the measured runs
        speed = SPEEDS.get(name) if usual and not given & SWITCHES else None
        candidates[name] = Candidate(name, rung, tuple(words), settings, sizes, speed)
    return list(candidates.values()), problems


def read_settings(rung: str, options: list[str], gpus: int = 1, gpu: Gpu = ANY) -> Settings:
    """Return a rung's settings for N GPUs, checked on this machine's CPU.

    DeepSpeed and `16-mixed`, which a CPU refuses, are added after the check. The notices hold only the lines about the
    length and the precision that the run would print.

    Raises:
        UserError: The rung cannot be run with these options.
    """
    defaults = script_defaults(rung) | {"config": None}  # without one a CPU would take the quickstart's
    given = read_words(options)
    from_file = read_named_config(given)
    precision = (defaults | from_file | given).get("precision", Settings.precision)
    deepspeed = given.get("deepspeed", defaults.get("deepspeed"))
    here = ["--devices", "1", "--accelerator", "cpu", "--from_scratch", "true"]  # a plan needs no weights
    if "deepspeed" in defaults:
        in_file = {name: value for name, value in settings_in_file(deepspeed).items() if name not in given}
        precision = in_file.pop("precision", precision)
        options = without_options(options, ["deepspeed"])
        for name, value in in_file.items():
            options += as_words(name, "null" if value is None else str(value))
        defaults = defaults | {"deepspeed": None}
    if precision == "16-mixed":
        here += ["--precision", "mixed"]
    options = _count_on_one_device(options, gpus)
    settings = parse_settings([*options, *here], **defaults)
    chosen = {*given, *from_file, *defaults}
    if switches := cuda_defaults(settings, chosen, gpu.capability):
        here += [f"--{name}=true" for name in switches]
        settings = parse_settings([*options, *here], **defaults)
    if gpus > settings.batch_size:
        raise UserError(f"--batch_size {settings.batch_size} is below the number of devices, {gpus}: raise it")
    replaceable = trains_adapters(settings) and "precision" not in given
    precision, meaning = fit_precision(precision, gpu.capability, replaceable, settings.shards_weights)
    lines = [line for line in settings.notices if line.startswith("--max_length ")]
    notices = (*lines, f"Precision: {meaning}") if meaning else (*lines,)
    changes = {"name": rung, "devices": gpus, "precision": precision, "notices": notices}
    # those of the GPU, and not what `parse_settings` chose for this CPU
    changes |= {"eval_batch_tokens": (from_file | given).get("eval_batch_tokens")}
    changes |= {"full_pass": full_pass(settings, gpu.capability)}
    settings = replace(settings, **changes)
    check_precision(settings, gpu.capability)
    for technique in used(settings) if gpu.name != ANY.name else ():
        if reason := technique.reason_against(settings, gpu.capability):
            raise UserError(f"--{technique.setting}: {reason}")
    if "deepspeed" in defaults:
        settings = replace(settings, deepspeed=deepspeed)
        read_deepspeed_config(settings)  # for its checks
    if reason := unpredictable(settings):
        raise UserError(f"--precision {settings.precision}: {reason}; plan for bf16-mixed")
    return settings


def _count_on_one_device(options: list[str], gpus: int) -> list[str]:
    """Return options with the micro-batches of all devices, if they count those of each device."""
    given = read_words(options)
    if not any(DEPENDENT[name].means == BATCH for name in given.keys() & DEPENDENT.keys()):
        return options
    steps = given.get("gradient_accumulation_steps", 1) * gpus
    return [*without_options(options, ["gradient_accumulation_steps"]), "--gradient_accumulation_steps", str(steps)]


def _sizes(settings: Settings) -> tuple[int, ...]:
    """Return the powers of two below a GPU's share of the effective batch, and the share."""
    share = -(-settings.batch_size // settings.ranks)
    return tuple(sorted({*(2**power for power in range(share.bit_length())), share}))
