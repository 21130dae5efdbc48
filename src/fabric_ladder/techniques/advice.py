"""What to try next when memory runs out, and how errors are shown."""

import errno
import sys
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from fabric_ladder.data.sampler import EVALUATED
from fabric_ladder.distributed.launch import command_line
from fabric_ladder.distributed.watch import lost_contact, running_watch
from fabric_ladder.environment import compute_capability, emulates, peak_memory
from fabric_ladder.errors import (
    NotFiniteError,
    UserError,
    first_line,
    is_out_of_memory,
    show_errors,
)
from fabric_ladder.ladder import Row, Step, row_of
from fabric_ladder.models.optimizer import STATELESS
from fabric_ladder.options import (
    drop_unneeded,
    own_rate,
    read_named_config,
    read_words,
    script_defaults,
    without_options,
)
from fabric_ladder.places import SRC
from fabric_ladder.settings import Settings, show
from fabric_ladder.techniques import TECHNIQUES, technique_of, trains_adapters, used

DEFAULTS = Settings()


def explain(
    error: BaseException, settings: Settings | None = None, smaller: str = "a smaller --micro_batch_size"
) -> str | None:
    """Return one line for an error that the user can fix, or None: a bug keeps its traceback.

    Args:
        error: Any error.
        settings: Settings of the run, if there is one.
        smaller: What to try without settings if memory has run out.
    """
    if isinstance(error, NotFiniteError):
        return f"{error}; try {_steadier(settings)}"
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.filename and error.errno in (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG):
        return f"cannot use {error.filename} ({error.strerror}): change its permissions, or name another file"
    if isinstance(error, torch.distributed.DistNetworkError):
        return f"the processes cannot meet ({first_line(error)})"
    if is_out_of_memory(error):
        return _out_of_memory(error, settings, smaller)
    if "does not have a deterministic implementation" in str(error):
        return f"--deterministic true: {first_line(error)}; leave it out, or run on another device"
    if "Expected more than 1 value per channel" in str(error):
        return "batch normalization needs two images: use a --micro_batch_size above 1 that divides --batch_size"
    known = [pair for technique in TECHNIQUES for pair in technique.explained_errors]
    return next((line for text, line in known if text in str(error)), None)


def _steadier(settings: Settings | None) -> str:
    """Return what to try after a loss that is not finite, without settings that the run has or refuses."""
    tries = ["a lower --learning_rate", "another --precision"]
    if settings and not settings.max_grad_norm:
        clipped = replace(settings, max_grad_norm=1.0)
        if not any(technique.reason_against(clipped, None) for technique in used(settings)):
            tries.append("--max_grad_norm 1")
    return ", ".join(tries[:-1]) + f" or {tries[-1]}"


def _out_of_memory(error: BaseException, settings: Settings | None, smaller: str) -> str:
    text = f"out of memory ({first_line(error, 160)})"
    if settings is None:
        return f"{text}. Next to try: {smaller}"
    phase, shape = getattr(error, "batch", (None, ()))
    if shape:
        size = f"{shape[0]} x {shape[1]} tokens" if len(shape) == 2 else f"{shape[0]} images of {shape[-1]} pixels"
        text += f" in a batch of {size} in {phase}"
    peak = peak_memory(torch.device(settings.accelerator))
    text += f", at a peak of {peak / 1e9:.2f} GB"
    if settings.accelerator == "cuda" and not settings.replays:  # the pool of graphs is reserved, and no gap
        text += _gaps(peak, torch.cuda.max_memory_reserved())
    return f"{text}. Next to try: {less_memory(settings, phase, shape)}"


def _gaps(peak: int, reserved: int) -> str:
    """Return whether the tensors or the gaps between them took the memory that PyTorch had reserved, in bytes."""
    lost = f" of tensors in {reserved / 1e9:.2f} GB reserved"
    if reserved - peak > peak / 4:
        return f"{lost}: much is lost in gaps between tensors (fragmentation)"
    return f"{lost}: the tensors take it, not gaps between them"


def less_memory(settings: Settings, phase: str | None = None, shape: tuple[int, ...] = ()) -> str:
    """Return the next things to try: settings that change no loss, then rungs that may, then shorter texts.

    Args:
        settings: Settings of the run.
        phase: The phase in which memory ran out: `training`, `the optimizer` or `the evaluation`.
        shape: Shape of the batch in that phase.
    """
    faster, slower = [], []
    for technique in TECHNIQUES:
        row = technique.row
        helps = row.anywhere and (phase in (None, "training") or not row.in_training)
        if helps and not technique.is_used(settings):
            option = f"--{row.setting} {row.values[0] if row.values else 'true'}, which {row.anywhere}"
            (slower if technique.recomputes else faster).append(option)
    name = _size_setting(settings, phase, shape)
    smaller = _smaller_batch(settings, name, phase, shape)
    # a smaller effective batch is another run, so it comes last
    tries = [*faster, *slower, *smaller] if name == "batch_size" else [*faster, *smaller, *slower]
    if step := _next_step(settings):
        tries.append(f"{_command(settings, step.options, step.rung, step.replaces)}, which {step.reason}")
    if settings.task != "image-classification":
        tries.append(f"--max_length {max(1, settings.max_length // 2)}")
    return "; ".join(tries)


def _size_setting(settings: Settings, phase: str | None, shape: tuple[int, ...]) -> str:
    """Return the setting that limits the batch of that phase."""
    if phase == "the evaluation":
        return "eval_batch_tokens"
    if any(technique.whole_batch for technique in used(settings)):
        return "batch_size"
    counts_tokens = not shape or (len(shape) == 2 and settings.micro_batch_tokens != "auto")  # images are counted
    return "micro_batch_tokens" if settings.micro_batch_tokens and counts_tokens else "micro_batch_size"


def _smaller_batch(settings: Settings, name: str, phase: str | None, shape: tuple[int, ...]) -> list[str]:
    """Return the command of this run with half the setting `name`; empty if a smaller batch does not help."""
    tokens = shape[0] * shape[1] if len(shape) == 2 else None
    samples = shape[0] if shape else None
    seen = {"micro_batch_size": samples, "micro_batch_tokens": tokens, "eval_batch_tokens": tokens}.get(name)
    sizes = [size for size in (getattr(settings, name), seen) if size] or [EVALUATED]
    if "auto" in sizes or min(sizes) == 1 or samples == 1 or phase == "the optimizer":
        return []
    replaces = ("micro_batch_tokens",) if name == "micro_batch_size" else ()
    command = _command(settings, (f"--{name}", str(min(sizes) // 2)), replaces=replaces)
    same = "" if name == "batch_size" or phase == "the evaluation" else " (the same effective batch in less memory)"
    return [command + same]


def _next_step(settings: Settings) -> Step | None:
    """Return the first step down the ladder that saves memory, with all options that it needs, or None."""
    leading = next((technique.row for technique in used(settings) if technique.row.leads), None)
    return _step_below(leading or row_of(settings.name), settings, [])


def _step_below(row: Row, settings: Settings, seen: list[Row]) -> Step | None:
    """Return the first step of a row that helps; a rung whose technique is in use stands for its own steps."""
    refused = []
    for step in row.tries:
        below = row_of(step.rung) if step.rung else None
        if below and not below.planned(settings.ranks):
            continue  # it needs several GPUs
        whole = _complete(step, settings)
        if step.when(settings) and _helps(whole, settings):
            return whole
        if below and below not in seen:
            seen.append(below)
            technique = technique_of(step.rung)
            if not (technique and technique.is_used(settings)):
                refused.append(below)
            elif found := _step_below(below, settings, seen):
                return found
    return next(filter(None, (_step_below(below, settings, seen) for below in refused)), None)


def _helps(step: Step, settings: Settings) -> bool:
    """Return whether a complete step saves memory in this run, and whether no technique refuses it."""
    technique = step.rung and technique_of(step.rung)
    if technique and technique.is_used(settings):
        return False
    if step.of_state and (settings.optimizer in STATELESS or settings.optimizer_offload or settings.lora):
        return False
    there = _after(step, settings)
    capability = compute_capability() if settings.accelerator == "cuda" else None
    if there == settings or (step.rung and emulates(there.precision, capability) and not trains_adapters(there)):
        return False  # emulated bfloat16 may take more memory than 16-mixed
    techniques = used(there)
    conflicts = any(one.conflict(other) for one in techniques for other in techniques)
    on_mps = settings.accelerator == "mps"
    return not conflicts and not any(
        (on_mps and each.refused_on_mps) or each.reason_against(there, capability) for each in techniques
    )


def _after(step: Step, settings: Settings) -> Settings:
    """Return roughly the settings of the command of a complete step."""
    left = {*step.replaces, *(_defaults(settings.name) if step.rung else ())} - {"devices"}
    own = _defaults(step.rung) if step.rung else {}
    return replace(settings, **{name: getattr(DEFAULTS, name) for name in left} | own | read_words([*step.options]))


@cache
def _defaults(rung: str) -> dict:
    """Return the keywords of a rung's script; empty for a script of the user's own."""
    found = script_defaults(rung) if (SRC / f"{rung}.py").exists() else {}
    return found | ({"precision": "bf16-mixed"} if found.get("precision") == "mixed" else {})


def _complete(step: Step, settings: Settings) -> Step:
    """Return the step with the options that keep the run's techniques, and without what its rung refuses."""
    options, replaces = step.options, step.replaces
    if step.rung:
        technique, own = technique_of(step.rung), _defaults(step.rung)
        there = replace(settings, **own)
        for each in used(settings):
            if each.setting in (*own, *step.replaces):
                continue
            conflicts = technique and (each.conflict(technique) or technique.conflict(each))
            if conflicts or each.reason_against(there, None):
                replaces += (each.setting,)
            elif each.row.stays:
                options += (f"--{each.setting}", show(getattr(settings, each.setting)))
        if technique and settings.precision in technique.refused_precisions:
            options += ("--precision", "32-true")
    if settings.optimizer == "sgd":  # every rung supports it, and no optimizer needs less memory
        replaces = tuple(name for name in replaces if name != "optimizer")
    return step._replace(options=options, replaces=replaces)


def _command(
    settings: Settings, options: tuple[str, ...], rung: str | None = None, replaces: tuple[str, ...] = ()
) -> str:
    """Return the command line of this run with other options, or of another rung."""
    script = Path(sys.argv[0])
    given = sys.argv[1:]
    if script.stem != settings.name:  # in a notebook these are the kernel's
        script = Path("src") / f"{settings.name}.py"
        given = []
    replaced = {*replaces, *(option.removeprefix("--") for option in options), *(["resume"] if rung else [])}
    words = [*without_options(given, replaced), *options]
    if rung:
        defaults = script_defaults(rung)
        words += _own_defaults(words, defaults, replaced)
        return command_line(script.with_name(f"{rung}.py"), drop_unneeded(words, defaults))
    return command_line(script, words)


def _own_defaults(words: list[str], defaults: dict, replaced: Collection[str]) -> list[str]:
    """Return the options that keep a rung's own settings where the YAML file of a command line has others."""
    try:
        given = read_words(words)
        from_file = read_named_config(given)
    except UserError:  # the file is gone by now
        return []
    own = vars(Settings()) | defaults
    own["learning_rate"] = own_rate(from_file | defaults | given) or own["learning_rate"]
    names = [name for name in from_file if name in {*defaults, *replaced} and name not in given and name in own]
    return [word for name in names if from_file[name] != own[name] for word in (f"--{name}", show(own[name]))]


def explain_errors(settings: Settings | None = None, **smaller: str) -> None:
    """From now on, show errors with `explain`, whose arguments these are; a dead rank is named first."""

    def explained(error: BaseException) -> str | None:
        if watch := running_watch():
            if lost_contact(error):
                watch.find_dead()
            watch.stop()
        return explain(error, settings, **smaller)

    show_errors(explained)
