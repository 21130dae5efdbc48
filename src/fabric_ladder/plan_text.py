"""A plan as text: on the terminal, in Markdown and in JSON."""

import json
import shlex
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from fabric_ladder.overhead import Overhead
from fabric_ladder.planner import Plan, Samples, recommend

HEADER = ("rung", "micro-batch", "weights", "gradients", "optimizer", "activations", "logits", "other", "overhead",
          "GPU", "room", "host", "speed")  # fmt: skip
LEGEND = (
    "GB (10^9 bytes) at the peak of one GPU; other: inputs, gradients of activations, temporary tensors; host: the "
    "machine's memory; speed: relative and not measured, 1 is a busy GPU in 16 bits."
)


class Answer(NamedTuple):
    """What the planner found.

    Attributes:
        model: Name.
        parameters: Of the whole model.
        batch_size: Effective.
        samples: What it is planned for.
        gpus: Their number.
        overhead: What comes on top of tensors.
        plans: By size of a GPU in bytes.
        problems: Why a candidate cannot run, by its name.
        takes: By size, what it would take where nothing fits.
        options: Of the user, in every command.
    """

    model: str
    parameters: int
    batch_size: int
    samples: Samples
    gpus: int
    overhead: Overhead
    plans: dict[int, list[Plan]]
    problems: dict[str, str]
    takes: dict[int, str]
    options: list[str]


def print_answer(answer: Answer, console: Console) -> None:
    """Print a line of what is planned, the table of one size or the choice for each of several, and the advice."""
    console.print(_title(answer), soft_wrap=True, highlight=False)
    if len(answer.plans) == 1:
        rows = [_row(plan) for plan in next(iter(answer.plans.values()))]
        header, notes = HEADER, [LEGEND]
    else:
        rows = [_choice(size, plans) for size, plans in answer.plans.items()]
        header, notes = ("GPU", "fastest that trains all weights", "fastest with adapters"), []
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, title in enumerate(header):
        table.add_column(title, justify="right" if number and len(answer.plans) == 1 else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    commands = _commands(*answer.plans.values(), answer.options) if len(answer.plans) == 1 else []
    for line in (*notes, *_notes(answer), *commands, *_advice(answer)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def to_markdown(answer: Answer) -> str:
    """Return the same as GitHub's Markdown, a table for each size."""
    lines = [_title(answer), ""]
    for size, plans in answer.plans.items():
        if len(answer.plans) > 1:
            lines += [f"**{_gigabytes(size)} GB**", ""]
        lines += [f"| {' | '.join(HEADER)} |", "|---|" + "---:|" * (len(HEADER) - 1)]
        lines += [f"| {' | '.join(_row(plan))} |" for plan in plans] + [""]
    commands = [line for plans in answer.plans.values() for line in _commands(plans, answer.options)]
    notes = [LEGEND, *_notes(answer), *dict.fromkeys(commands), *_advice(answer)]
    return "\n".join([*lines, *(f"{line}\n" for line in notes)])


def to_json(answer: Answer) -> str:
    """Return everything in bytes, and for each size the recommended rows by their number."""
    sizes = []
    for size, plans in answer.plans.items():
        chosen = {kind: plans.index(plan) if plan else None for kind, plan in recommend(plans).items()}
        rows = [_record(plan) for plan in plans]
        sizes.append({"gpu_memory": size, "recommended": chosen, "takes": answer.takes.get(size), "rows": rows})
    record = answer._asdict() | {"format": 1, "samples": answer.samples._asdict(), "sizes": sizes}
    record["overhead"] = answer.overhead._asdict()
    return json.dumps({key: record[key] for key in record if key not in ("plans", "takes")}, indent=1) + "\n"


def in_short(plan: Plan | None) -> str:
    """Return a way in a few words: rung, options, micro-batch."""
    if plan is None:
        return "–"
    return plan.candidate.name + (f", micro-batch {plan.micro_batch}" if plan.micro_batch else "")


def _title(answer: Answer) -> str:
    samples, count = answer.samples, len(answer.plans)
    sample = f"images of {samples.image_size} pixels" if samples.image_size else f"samples of {samples.length:,} tokens"
    sizes = " or ".join(_gigabytes(size) for size in answer.plans)
    return (
        f"{answer.model} ({answer.parameters / 1e6:,.1f} M parameters) · effective batch {answer.batch_size} · "
        f"{sample} · {answer.gpus} x {sizes} GB{'' if count > 1 else f' · overhead {answer.overhead.source}'}"
    )


def _row(plan: Plan) -> list[str]:
    peak = plan.peak
    parts = (peak.parameters, peak.gradients, peak.optimizer_state, peak.activations, peak.logits, peak.other)
    room = f"{plan.room / 1e9:+.2f}" if plan.fits or plan.room < 0 else "host!"
    return [
        plan.candidate.name,
        str(plan.micro_batch or "as set"),
        *(f"{part / 1e9:.2f}" for part in parts),
        f"{plan.overhead / 1e9:.2f}",
        f"{(peak.total + plan.overhead) / 1e9:.2f}",
        room,
        f"{plan.host / 1e9:.1f}",
        f"{plan.speed:.2f}",
    ]


def _choice(size: int, plans: list[Plan]) -> list[str]:
    return [f"{_gigabytes(size)} GB", *(in_short(plan) for plan in recommend(plans).values())]


def _notes(answer: Answer) -> list[str]:
    alone = ["9_ddp, 10_fsdp and ZeRO without offload share among GPUs: --devices 2 plans for two."]
    return [*alone * (answer.gpus == 1), *(f"{name}: {why}" for name, why in answer.problems.items())]


def _commands(plans: list[Plan], options: list[str]) -> list[str]:
    """Return the command of each row that fits, in short."""
    shared = f" {shlex.join(options)} "
    fitting = [f"{plan.command} ".replace(shared, " … ").rstrip() for plan in plans if plan.fits]
    return [f"Commands, where … is{shared.rstrip()}:", *(f"  {command}" for command in fitting)] if fitting else []


def _advice(answer: Answer) -> list[str]:
    lines = []
    for size, plans in answer.plans.items():
        start = f"{_gigabytes(size)} GB: " if len(answer.plans) > 1 else ""
        for kind, plan in recommend(plans).items():
            if plan:
                needs = (plan.peak.total + plan.overhead) / 1e9
                lines.append(f"{start}Fastest that fits, {kind}: {in_short(plan)} ({needs:.2f} GB): {plan.command}")
        if size in answer.takes:
            lines.append(f"{start}{answer.takes[size]}")
    return lines


def _record(plan: Plan) -> dict:
    peak = plan.peak._asdict() | {"total": plan.peak.total}
    peak["tensors"] = [[count, list(storage.shape), str(storage.dtype), storage.kind, storage.made_by]
                       for count, storage in plan.peak.tensors]  # fmt: skip
    record = plan._asdict() | {"rung": plan.candidate.rung, "options": list(plan.candidate.options), "peak": peak}
    return {key: value for key, value in record.items() if key != "candidate"}


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f}".rstrip("0").rstrip(".")
