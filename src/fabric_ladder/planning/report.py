"""Write a plan: the answer with its reasons to the terminal, all figures to Markdown and JSON."""

import io
import json
import textwrap
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from fabric_ladder.planning.gpus import ANY
from fabric_ladder.planning.planner import Machine, Plan, Samples, recommend
from fabric_ladder.techniques import used

HEADER = ("rung", "batch", "weight", "grad", "optim", "activ", "other", "GPU", "room", "host", "speed")
LEGEND = (
    "GB (10^9 bytes) at the peak of one GPU. batch: the micro-batch, in samples; activ: activations and logits; other: "
    "inputs, gradients of activations, temporary tensors, CUDA's own; host: CPU memory; speed: 1 is a busy GPU in 16 "
    "bits, not measured."
)
PLAIN = {"soft_wrap": True, "highlight": False, "markup": False}
SHARING = "9_ddp, 10_fsdp and ZeRO without offload share among GPUs: --devices 2 plans for two."


class Answer(NamedTuple):
    """The planner's results.

    Attributes:
        model: Name of the model.
        parameters: Number of the model's parameters.
        batch_size: Effective batch size.
        samples: The planned samples.
        machine: The planned machine.
        options: The user's options, which are part of every command.
        plans: Plans by GPU memory in bytes.
        problems: For each candidate that cannot run, the reason.
        takes: By GPU memory, the hardware or options that would be enough if no plan fits.
        notes: Other assumptions, in words.
    """

    model: str
    parameters: int
    batch_size: int
    samples: Samples
    machine: Machine
    options: list[str]
    plans: dict[int, list[Plan]]
    problems: dict[str, str]
    takes: dict[int, str]
    notes: list[str]


def print_answer(answer: Answer, console: Console, full: bool = False) -> None:
    """Print the recommended command, its memory and its costs, then the reasons; `full`: with a table of all plans."""
    for size, plans in answer.plans.items():
        console.print("\n".join([f"{_gigabytes(size)} GB:"] * (len(answer.plans) > 1) + _answer(answer, size)), **PLAIN)
        console.print(*(["", _table(plans)] if full else []), sep="\n")
    indents = {"initial_indent": "  ", "subsequent_indent": "    ", "break_on_hyphens": False}
    lines = [textwrap.fill(line, console.width, **indents) for line in _reasons(answer, full)]
    console.print("\n".join(["Why", *lines]), **PLAIN)


def to_markdown(answer: Answer) -> str:
    """Return the same as GitHub's Markdown, with a table for each size."""
    lines = [f"{_title(answer)}\n"]
    for size, plans in answer.plans.items():
        console = Console(file=io.StringIO(), width=400)
        console.print(_table(plans, box.MARKDOWN))
        table = "\n".join(line.strip() for line in console.file.getvalue().strip().splitlines())
        lines += [f"**{_gigabytes(size)} GB**\n", f"{table}\n", "```", *_answer(answer, size), "```\n"]
    return "\n".join([*lines, *(f"- {line}" for line in _reasons(answer, full=True)[1:])]) + "\n"


def to_json(answer: Answer) -> str:
    """Return all figures in bytes, and for each size the numbers of the recommended rows."""
    sizes = []
    for size, plans in answer.plans.items():
        chosen = {weights: plans.index(plan) if plan else None for weights, plan in recommend(plans).items()}
        rows = [_record(plan) for plan in plans]
        sizes.append({"gpu_memory": size, "recommended": chosen, "takes": answer.takes.get(size), "rows": rows})
    names = ("model", "parameters", "batch_size", "problems", "options", "notes")
    record = {"format": 2, **{name: getattr(answer, name) for name in names}}
    record |= {"samples": answer.samples._asdict(), "gpus": answer.machine.gpus, "gpu": answer.machine.gpu._asdict()}
    return json.dumps(record | {"overhead": answer.machine.overhead._asdict(), "sizes": sizes}, indent=1) + "\n"


def in_short(plan: Plan) -> str:
    """Return a plan in a few words: rung, options, micro-batch."""
    return plan.candidate.name + (f", micro-batch {plan.micro_batch}" if plan.micro_batch else "")


def _answer(answer: Answer, size: int) -> list[str]:
    """Return three lines for each recommended plan: the command, its memory and its costs."""
    lines = []
    for plan in filter(None, recommend(answer.plans[size]).values()):
        lines += ["", "Or train adapters alone:"] if lines else []
        each = " each" if plan.candidate.settings.ranks > 1 else ""
        host = plan.host / 1e9
        measured = all(technique.accuracy_is_measured for technique in used(plan.candidate.settings))
        none = "no measured loss of accuracy" if measured else "accuracy not measured"
        lines += [
            f"Run    {plan.command}",
            f"Takes  {plan.needed / 1e9:.2f} of {_gigabytes(size)} GB of the GPU{each}, {host:.1f} GB of CPU memory",
            f"Costs  {'; '.join(plan.costs) or none}; speed {plan.speed:.2f}",
        ]
    return lines or [answer.takes[size]]


def _reasons(answer: Answer, full: bool) -> list[str]:
    """Return the title, the reasons for the answer, and the assumptions."""
    gpu = answer.machine.gpu
    overhead = answer.machine.overhead
    reasons = [_title(answer), *answer.notes]
    if len(answer.plans) == 1:
        reasons += _choice(*answer.plans.values())
    if gpu is ANY:
        reasons.append("Assumed: a GPU that computes in bfloat16; --gpu T4 plans for one that does not.")
    elif any(plan.emulated for plans in answer.plans.values() for plan in plans):
        major, minor = gpu.capability
        reasons.append(f"{gpu.name} (compute capability {major}.{minor}) only emulates bfloat16: never recommended.")
    reasons.append(f"CUDA's own memory is {overhead.source}; speed: 1 is a busy GPU in 16 bits, not measured.")
    if not full:
        return [*reasons, "All plans, with their memory by kind: --full, --markdown FILE, --json FILE."]
    reasons += [LEGEND] + [SHARING] * (answer.machine.gpus == 1)
    return reasons + [f"{name}: {reason}" for name, reason in answer.problems.items()]


def _choice(plans: list[Plan]) -> list[str]:
    """Return why this plan for one size was chosen, and a faster plan with its costs."""
    best = next(filter(None, recommend(plans).values()), None)
    if best is None:
        return []
    adapters = best.candidate.adapters
    fitting = [plan for plan in plans if plan.fits and not plan.emulated and plan.candidate.adapters == adapters]
    alike = sum(plan.costs == best.costs for plan in fitting)
    all_weights = "all weights at this cost" if best.costs else "all weights at no known cost in accuracy"
    costs = "adapters" if adapters else all_weights
    reasons = [f"{in_short(best)}: the fastest of {alike} ways that fit and train {costs}."]
    if (faster := max(fitting, key=lambda plan: plan.speed)).speed > best.speed:
        reasons.append(f"Faster: {in_short(faster)}, speed {faster.speed:.2f}; it costs {'; '.join(faster.costs)}.")
    return reasons + [f"Precision: {meaning}." for meaning in best.candidate.settings.notices]


def _title(answer: Answer) -> str:
    samples, machine = answer.samples, answer.machine
    sample = f"images of {samples.image_size} pixels" if samples.image_size else f"samples of {samples.length:,} tokens"
    gpu = "" if machine.gpu is ANY else f"{machine.gpu.name}, "
    sizes = " or ".join(_gigabytes(size) for size in answer.plans)
    return (
        f"{answer.model} ({answer.parameters / 1e6:,.1f} M parameters) · effective batch {answer.batch_size} · {sample}"
        f" · {machine.gpus} x {gpu}{sizes} GB"
    )


def _table(plans: list[Plan], style: box.Box | None = None) -> Table:
    table = Table(box=style, padding=(0, 1) if style else (0, 1, 0, 0))
    for number, title in enumerate(HEADER):
        table.add_column(title, justify="right" if number else "left", overflow="fold", no_wrap=number > 0)
    for plan in plans:
        peak = plan.peak
        parts = (peak.parameters, peak.gradients, peak.optimizer_state, peak.activations + peak.logits)
        sizes = (*parts, peak.other + plan.overhead, plan.needed)
        room = f"{'+' if plan.free >= 0 else '-'}{_three_digits(abs(plan.free))}"
        room = room if plan.fits or plan.free < 0 else "host!"
        table.add_row(
            plan.candidate.name, str(plan.micro_batch or "set"), *map(_three_digits, sizes), room,
            _three_digits(plan.host), f"{plan.speed:.2f}",
        )  # fmt: skip
    return table


def _record(plan: Plan) -> dict:
    peak = plan.peak._asdict() | {"total": plan.peak.total}
    peak["tensors"] = [(count, storage.shape, str(storage.dtype), storage.part, storage.made_by)
                       for count, storage in plan.peak.tensors]  # fmt: skip
    names = ("micro_batch", "needed", "overhead", "host", "fits", "emulated", "costs", "speed", "command")
    record = {"rung": plan.candidate.rung, "options": plan.candidate.options, "peak": peak, "room": plan.free}
    record |= {"adapters": plan.candidate.adapters, "precision": plan.candidate.settings.precision}
    return record | {name: getattr(plan, name) for name in names} | {"name": plan.candidate.name}


def _three_digits(size: int) -> str:
    """Return bytes in GB, in four characters."""
    return f"{size / 1e9:.{2 if size < 10e9 else 1 if size < 100e9 else 0}f}"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f}".rstrip("0").rstrip(".")
