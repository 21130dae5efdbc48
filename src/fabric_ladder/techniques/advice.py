"""What to try next when memory runs out, and how errors are shown."""

import errno
import os
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from fabric_ladder.data.sampler import EVALUATED
from fabric_ladder.distributed.launch import command_line
from fabric_ladder.distributed.watch import lost_contact, running_watch
from fabric_ladder.environment import compute_capability, emulates, notebook_shell, peak_memory
from fabric_ladder.errors import (
    NotFiniteError,
    UserError,
    drop_unread_output,
    first_line,
    is_out_of_memory,
    print_error,
)
from fabric_ladder.options import drop_unneeded, read_named_config, read_words, script_defaults, without_options
from fabric_ladder.places import SRC
from fabric_ladder.settings import Settings, show
from fabric_ladder.techniques import TECHNIQUES, technique_of, used
from fabric_ladder.techniques.lean_optimizer import LeanOptimizer
from fabric_ladder.techniques.low_precision import IN_16_BITS
from fabric_ladder.techniques.technique import NextRung


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
        return f"{error}; try {_steadier(settings, error.in_training)}"
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


def _steadier(settings: Settings | None, in_training: bool) -> str:
    """Return what to try after a loss that is not finite, without settings that the run has or refuses."""
    tries = ["a lower --learning_rate", "another --precision"]
    if settings and not settings.max_grad_norm and _allowed(replace(settings, max_grad_norm=1.0)):
        tries.append("--max_grad_norm 1")
    if settings and in_training and settings.on_nan == "stop" and _allowed(replace(settings, on_nan="skip")):
        tries.append("--on_nan skip, which leaves such batches out")
    return ", ".join(tries[:-1]) + f" or {tries[-1]}"


def _allowed(settings: Settings) -> bool:
    """Return whether no technique refuses these settings."""
    capability = compute_capability() if settings.accelerator == "cuda" else None
    try:
        for technique in TECHNIQUES:
            technique.check(settings, capability)
    except UserError:
        return False
    return True


def _out_of_memory(error: BaseException, settings: Settings | None, smaller: str) -> str:
    text = f"out of memory ({first_line(error, 160)})"
    if settings is None:
        return f"{text}. Next to try: {smaller}"
    phase, shape = getattr(error, "batch", (None, ()))
    if shape:
        size = f"{shape[0]} x {shape[1]} tokens" if len(shape) == 2 else f"{shape[0]} images of {shape[-1]} pixels"
        text += f" in a batch of {size} in {phase}"
    text += f", at a peak of {peak_memory(torch.device(settings.accelerator)) / 1e9:.2f} GB"
    return f"{text}. Next to try: {less_memory(settings, phase, shape)}"


def less_memory(settings: Settings, phase: str | None = None, shape: tuple[int, ...] = ()) -> str:
    """Return the next things to try: settings that change no loss, then rungs that may, then shorter texts.

    Args:
        settings: Settings of the run.
        phase: The phase in which memory ran out: `training`, `the optimizer` or `the evaluation`.
        shape: Shape of the batch in that phase.
    """
    faster, slower = [], []
    for technique in TECHNIQUES:
        if not technique.is_used(settings) and (option := technique.as_option(phase)):
            (slower if technique.recomputes else faster).append(option)
    name = _size_setting(settings, phase, shape)
    smaller = _smaller_batch(settings, name, phase, shape)
    # a smaller effective batch is another run, so it comes last
    tries = [*faster, *slower, *smaller] if name == "batch_size" else [*faster, *smaller, *slower]
    for technique in used(settings):
        if more := technique.save_more(settings):
            tries.append(f"{_command(settings, more.options, replaces=more.replaces)}, which {more.reason}")
    rung = _next_rung(settings)
    if rung and (rung.name or replace(settings, **read_words([*rung.options])) != settings):
        tries.append(f"{_command(settings, rung.options, rung.name, rung.replaces)}, which {rung.reason}")
    if settings.task != "image-classification":
        tries.append(f"--max_length {max(1, settings.max_length // 2)}")
    return "; ".join(tries)


def _size_setting(settings: Settings, phase: str | None, shape: tuple[int, ...]) -> str:
    """Return the setting that limits the batch of that phase."""
    evaluating = phase == "the evaluation"
    for technique in used(settings):
        if name := technique.size_setting(settings, evaluating):
            return name
    if evaluating:
        return "eval_batch_tokens"
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


def _next_rung(settings: Settings) -> NextRung | None:
    """Return the next rung that saves more memory, with all options that it needs, or None."""
    technique = next((each for each in used(settings) if each.advises_first), None) or technique_of(settings.name)
    rung = technique.next_to_try(settings) if technique else IN_16_BITS
    capability = compute_capability() if settings.accelerator == "cuda" else None
    if rung and rung.name == IN_16_BITS.name and emulates("bf16-true", capability):
        rung = LeanOptimizer.next_rung  # emulated bfloat16 may take more memory than 16-mixed
    while rung:
        technique, refused = rung.name and technique_of(rung.name), _refused_on_mps(rung, settings)
        if not refused and not (technique and technique.saves_no_more(settings)):
            break
        above = technique.next_to_try(settings) if technique else None
        rung = above and above._replace(options=above.options if refused else rung.options + above.options)
    technique = rung and rung.name and technique_of(rung.name)
    if technique:
        refused = (each.setting for each in used(settings) if each.conflict(technique) or technique.conflict(each))
        rung = rung._replace(replaces=(*rung.replaces, *refused))
        if settings.precision in technique.refused_precisions:
            rung = rung._replace(options=(*rung.options, "--precision", "32-true"))
    if rung and settings.optimizer == "sgd":  # every rung supports it, and no optimizer needs less memory
        rung = rung._replace(replaces=tuple(name for name in rung.replaces if name != "optimizer"))
    return rung


def _refused_on_mps(rung: NextRung, settings: Settings) -> bool:
    """Return whether the run is on Apple's GPU, and the next rung cannot be."""
    if settings.accelerator != "mps":
        return False
    defaults = script_defaults(SRC / f"{rung.name}.py") if rung.name else {}
    there = replace(settings, **(defaults | read_words([*rung.options])))
    return any(each.refused_on_mps or each.reason_against(there, None) for each in used(there))


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
        defaults = script_defaults(SRC / f"{rung}.py")
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
    names = [name for name in from_file if name in {*defaults, *replaced} and name not in given and name in own]
    return [word for name in names if from_file[name] != own[name] for word in (f"--{name}", show(own[name]))]


def show_errors(settings: Settings | None = None, **smaller: str) -> None:
    """From now on, print errors that the user can fix as one line on stderr; in a script, end with exit status 2.

    The arguments are those of `explain`.
    """

    def explained(error: BaseException, stream) -> bool:
        line = explain(error, settings, **smaller)
        if line is not None:
            rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
            start = "error:" if rank == "0" else f"error on rank {rank}:"
            print_error(error, f"{start} {line}", stream)
        return line is not None

    def in_script(error_type, error, trace):
        if watch := running_watch():
            if lost_contact(error):
                watch.find_dead()
            watch.stop()
        if isinstance(error, BrokenPipeError) and drop_unread_output():
            raise SystemExit(1)
        if isinstance(error, KeyboardInterrupt):  # while nothing of the run is there that could be saved
            sys.__stderr__.write("Stopped by Ctrl-C\n")
            return
        if explained(error, sys.__stderr__):  # torch.distributed's own hook holds sys.stderr back
            raise SystemExit(2)  # raised inside the hook, it sets the exit status
        sys.__excepthook__(error_type, error, trace)

    def in_notebook(shell, error_type, error, trace, tb_offset=None):
        if not explained(error, sys.stderr):
            shell.showtraceback((error_type, error, trace), tb_offset)

    if shell := notebook_shell():
        shell.set_custom_exc((Exception,), in_notebook)
    else:
        sys.excepthook = in_script
