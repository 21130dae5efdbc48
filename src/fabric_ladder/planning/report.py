"""A plan as text: on the terminal, in Markdown and in JSON."""

import json
import shlex
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from fabric_ladder.planning.planner import Machine, Plan, Samples, recommend

HEADER = ("rung", "micro-batch", "weights", "gradients", "optimizer", "activations", "logits", "other", "overhead",
          "GPU", "room", "host", "speed")  # fmt: skip
LEGEND = (
    "GB (10^9 bytes) at the peak of one GPU; other: inputs, gradients of activations, temporary tensors; host: the "
    "machine's memory; speed: relative and not measured, 1 is a busy GPU in 16 bits."
)
SHARING = "9_ddp, 10_fsdp and ZeRO without offload share among GPUs: --devices 2 plans for two."


class Answer(NamedTuple):
    """What the planner found.

    Attributes:
        model: Name.
        parameters: Of the whole model.
        batch_size: Effective.
        samples: What it is planned for.
        machine: Where it is to run.
        options: Of the user, in every command.
        plans: By size of a GPU in bytes.
        problems: Why a candidate cannot run, by its name.
        takes: By size, what it would take where nothing fits.
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


def print_answer(answer: Answer, console: Console) -> None:
    """Print a line of what is planned, the table of one size or the choice for each of several, and the advice."""
    in_full = len(answer.plans) == 1
    if in_full:
        header, rows = HEADER, [_row(plan) for plans in answer.plans.values() for plan in plans]
    else:
        header = ("GPU", "fastest that trains all weights", "fastest with adapters")
        rows = [(f"{_gigabytes(size)} GB", *map(in_short, recommend(plans).values()))
                for size, plans in answer.plans.items()]  # fmt: skip
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, title in enumerate(header):
        table.add_column(title, justify="right" if number and in_full else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(_title(answer), soft_wrap=True, highlight=False)
    console.print(table)
    for line in _notes(answer, in_full):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def to_markdown(answer: Answer) -> str:
    """Return the same as GitHub's Markdown, a table for each size."""
    lines = [_title(answer), ""]
    for size, plans in answer.plans.items():
        if len(answer.plans) > 1:
            lines += [f"**{_gigabytes(size)} GB**", ""]
        lines += [f"| {' | '.join(HEADER)} |", "|---|" + "---:|" * (len(HEADER) - 1)]
        lines += [f"| {' | '.join(_row(plan))} |" for plan in plans] + [""]
    return "\n".join([*lines, *(f"{line}\n" for line in _notes(answer, in_full=True))])


def to_json(answer: Answer) -> str:
    """Return everything in bytes, and for each size the recommended rows by their number."""
    sizes = []
    for size, plans in answer.plans.items():
        chosen = {weights: plans.index(plan) if plan else None for weights, plan in recommend(plans).items()}
        rows = [_record(plan) for plan in plans]
        sizes.append({"gpu_memory": size, "recommended": chosen, "takes": answer.takes.get(size), "rows": rows})
    names = ("model", "parameters", "batch_size", "problems", "options")
    record = {"format": 1, **{name: getattr(answer, name) for name in names}}
    record |= {"samples": answer.samples._asdict(), "gpus": answer.machine.gpus}
    return json.dumps(record | {"overhead": answer.machine.overhead._asdict(), "sizes": sizes}, indent=1) + "\n"


def in_short(plan: Plan | None) -> str:
    """Return a plan in a few words: rung, options, micro-batch."""
    if plan is None:
        return "–"
    return plan.candidate.name + (f", micro-batch {plan.micro_batch}" if plan.micro_batch else "")


def _title(answer: Answer) -> str:
    samples, machine = answer.samples, answer.machine
    sample = f"images of {samples.image_size} pixels" if samples.image_size else f"samples of {samples.length:,} tokens"
    sizes = " or ".join(_gigabytes(size) for size in answer.plans)
    overhead = f" · overhead {machine.overhead.source}" if len(answer.plans) == 1 else ""
    return (
        f"{answer.model} ({answer.parameters / 1e6:,.1f} M parameters) · effective batch {answer.batch_size} · {sample}"
        f" · {machine.gpus} x {sizes} GB{overhead}"
    )


def _row(plan: Plan) -> list[str]:
    peak = plan.peak
    parts = (peak.parameters, peak.gradients, peak.optimizer_state, peak.activations, peak.logits, peak.other)
    return [
        plan.candidate.name,
        str(plan.micro_batch or "as set"),
        *(f"{size / 1e9:.2f}" for size in (*parts, plan.overhead, plan.needed)),
        f"{plan.free / 1e9:+.2f}" if plan.fits or plan.free < 0 else "host!",
        f"{plan.host / 1e9:.1f}",
        f"{plan.speed:.2f}",
    ]


def _notes(answer: Answer, in_full: bool) -> list[str]:
    """Return what the tables do not say; `in_full`: with what explains a table of all rows, and the commands."""
    notes = [LEGEND] * in_full + [SHARING] * (answer.machine.gpus == 1)
    notes += [f"{name}: {reason}" for name, reason in answer.problems.items()]
    shared = f" {shlex.join(answer.options)} "
    advice, commands = [], []
    for size, plans in answer.plans.items():
        start = f"{_gigabytes(size)} GB: " if len(answer.plans) > 1 else ""
        for weights, plan in recommend(plans).items():
            if plan:
                needed = f"({plan.needed / 1e9:.2f} GB): {plan.command}"
                advice.append(f"{start}Fastest that fits, {weights}: {in_short(plan)} {needed}")
        if size in answer.takes:
            advice.append(f"{start}{answer.takes[size]}")
        fitting = [f"  {f'{plan.command} '.replace(shared, ' … ').rstrip()}" for plan in plans if plan.fits]
        commands += [f"Commands, where … is{shared.rstrip()}:", *fitting] if fitting else []
    return notes + list(dict.fromkeys(commands)) * in_full + advice


def _record(plan: Plan) -> dict:
    peak = plan.peak._asdict() | {"total": plan.peak.total}
    peak["tensors"] = [(count, storage.shape, str(storage.dtype), storage.part, storage.made_by)
                       for count, storage in plan.peak.tensors]  # fmt: skip
    names = ("micro_batch", "overhead", "host", "fits", "speed", "command")
    record = {"rung": plan.candidate.rung, "options": plan.candidate.options, "peak": peak, "room": plan.free}
    return record | {name: getattr(plan, name) for name in names} | {"adapters": plan.candidate.settings.lora}


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f}".rstrip("0").rstrip(".")
