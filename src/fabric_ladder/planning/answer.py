"""Write a plan: the answer with its reasons to the terminal, all figures to JSON."""

import json
import math
import textwrap
from dataclasses import replace
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from fabric_ladder.planning.gpus import ANY, Gpu, match_gpu
from fabric_ladder.planning.measured import MEASURED, accuracy_cost
from fabric_ladder.planning.planner import Machine, Plan, Samples, cut, recommend
from fabric_ladder.runs.speed import expected_time, find_speed
from fabric_ladder.techniques import technique_of
from fabric_ladder.techniques.memory import KINDS, Peak

TOGETHER = [kind for kind in KINDS if kind != "logits"]  # logits are shown with the activations
HEADER = ("rung", "batch", *(KINDS[kind].short for kind in TOGETHER), "GPU", "room", "host", "speed")
LARGE = 1_000_000_000  # parameters: the accuracies were measured with 23 M parameters
MUCH = 32_000_000_000  # bytes of CPU memory of a common computer
LEGEND = (
    "GB (10^9 bytes) at the peak of one GPU. batch: the micro-batch, in samples; activ: activations and logits; other: "
    "inputs, gradients of activations, temporary tensors, CUDA's own; host: CPU memory; speed: samples/s measured "
    f"with {MEASURED['speeds']['of']}."
)
PLAIN = {"soft_wrap": True, "highlight": False, "markup": False}


class Answer(NamedTuple):
    """The planner's results.

    Attributes:
        model: Name of the model.
        batch_size: Effective batch size.
        samples: The planned samples.
        machine: The planned machine.
        plans: A plan for each candidate, in the ladder's order.
        problems: For each rung or candidate that is not planned, the reason.
        notes: Other assumptions, in words.
    """

    model: str
    batch_size: int
    samples: Samples
    machine: Machine
    plans: list[Plan]
    problems: dict[str, str]
    notes: list[str]


def print_answer(answer: Answer, console: Console, full: bool = False) -> None:
    """Print the recommended command, its memory and its costs, then the reasons; `full`: with a table of all plans."""
    console.print("\n".join(answer_lines(answer)), **PLAIN)
    console.print(*(["", _table(answer.plans)] if full else []), sep="\n")
    indents = {"initial_indent": "  ", "subsequent_indent": "    ", "break_on_hyphens": False}
    lines = [textwrap.fill(line, console.width, **indents) for line in _reasons(answer, full)]
    console.print("\n".join(["Why", *lines]), **PLAIN)


def to_json(answer: Answer) -> str:
    """Return all figures in bytes, and for each kind of training the number of the recommended plan."""
    machine = answer.machine
    overhead = {name: each._asdict() for name, each in machine.overhead._asdict().items()}
    record = answer._asdict() | {
        "samples": answer.samples._asdict(),
        "machine": machine._asdict() | {"gpu": machine.gpu._asdict(), "overhead": overhead},
        "plans": [_record(plan) for plan in answer.plans],
        "recommended": {weights: answer.plans.index(plan) for weights, plan in recommend(answer.plans).items()},
    }
    return json.dumps(record, indent=1) + "\n"


def answer_lines(answer: Answer) -> list[str]:
    """Return lines for each recommended plan: the command, its memory, its costs, and the time if it is known."""
    lines = []
    for weights, plan in recommend(answer.plans).items():
        lines += ["", f"Or train {weights}:"] if lines else []
        lines += [
            f"Run    {plan.command}",
            f"Takes  {_takes(plan, answer.machine.gpu)}",
            f"Costs  {_costs(plan)}; {_speed(plan)}",
            *_time(plan, answer),
        ]
    return lines or [_remedies(answer)]


def _takes(plan: Plan, gpu: Gpu) -> str:
    """Return the memory of a plan in words."""
    low, high = plan.low, plan.high
    sizes = f"{plan.needed / 1e9:.1f} of {_gigabytes(gpu.memory)} GB"
    bounds = "" if low == high else f" ({low / 1e9:.1f} to {high / 1e9:.1f})"
    each = " each" if plan.candidate.settings.ranks > 1 else ""
    return f"{sizes}{bounds} of the GPU{each}, {plan.host / 1e9:.0f} GB of CPU memory"


def _costs(plan: Plan) -> str:
    """Return the cost in accuracy in words."""
    cost = accuracy_cost(vars(plan.candidate.settings))
    if plan.counts.all > LARGE:
        small = f"{cost['words']}; " if cost and cost["points"] else "accuracy "
        return f"{small}not measured for a model of this size"
    return "accuracy not measured" if cost is None else cost["words"] or "no measured loss of accuracy"


def _speed(plan: Plan) -> str:
    """Return the measured speed in words."""
    speed = plan.candidate.speed
    return f"{speed:.0f} samples/s were measured with {MEASURED['speeds']['of']}" if speed else "speed not measured"


def _time(plan: Plan, answer: Answer) -> list[str]:
    """Return a line with the time of the training, by the speed of an earlier run or a measured one."""
    settings = plan.candidate.settings
    cuts = [cut(settings, plan.micro_batch)]
    if plan.micro_batch:  # as large as fits, like `auto`
        cuts.append(replace(settings, micro_batch_size=None, micro_batch_tokens="auto"))

    def is_same(hardware: dict) -> bool:
        size = f" {round(hardware['gpu_memory'] / 2**30)}GB" if "gpu_memory" in hardware else ""  # see `own_gpus`
        known = match_gpu(f"{hardware.get('gpu')}{size}")
        return answer.machine.gpu.name in (hardware.get("gpu"), known and known.name)

    speeds = (find_speed(each, settings.ranks, is_same) for each in cuts)
    line = expected_time(settings, next(filter(None, speeds), None), answer.samples.train)
    return [f"Time   {line}"] if line else []


def _remedies(answer: Answer) -> str:
    """Return a line about what would help if nothing fits: a larger GPU, more GPUs, or shorter samples."""
    machine, samples = answer.machine, answer.samples
    able = [plan for plan in answer.plans if not plan.emulated]
    if not able:
        return f"Nothing to recommend: {machine.gpu.name} only emulates bfloat16; plan without --precision bf16-true"
    least = min(able, key=lambda plan: plan.high)
    shorter = "" if samples.image_size else f"; or shorter samples, e.g. --max_length {samples.length // 2}"
    if least.free >= 0:
        return f"Nothing fits: {least.candidate.name} needs {least.host / 1e9:.1f} GB of CPU memory."
    rungs = {name.split()[0] for name in (*answer.problems, *(plan.candidate.rung for plan in answer.plans))}
    shards = any(technique.shards for technique in map(technique_of, rungs) if technique)
    more = f"; or more GPUs, e.g. --devices {2 * machine.gpus}" if shards else ""
    size = math.ceil(least.high / 1e8) / 10
    # of the ways that the planner would add to a rung, those that the user's options rule out
    refused = [f" Not planned: {name}: {reason}." for name, reason in answer.problems.items() if " " in name]
    needed = f"Nothing fits. It would take a GPU of {size:.1f} GB, for {least.candidate.name}{more}{shorter}."
    return needed + "".join(refused[:1])


def _reasons(answer: Answer, full: bool) -> list[str]:
    """Return the title, the reasons for the answer, and the assumptions."""
    gpu = answer.machine.gpu
    plans = answer.plans
    best = next(iter(recommend(plans).values()), plans[0])
    notices = [f"{notice}." for notice in best.candidate.settings.notices]
    reasons = [title(answer), *answer.notes, *_choice(plans), *notices]
    if gpu.name == ANY.name:
        reasons.append("Assumed: a GPU that computes in bfloat16; --gpu T4 plans for one that does not.")
    elif any(plan.emulated for plan in plans):
        major, minor = gpu.capability
        reasons.append(f"{gpu.name} (compute capability {major}.{minor}) only emulates bfloat16: never recommended.")
    own = f"CUDA's own memory is {answer.machine.overhead.expected.source}"
    reasons.append(f"{own}.")
    if not full:
        return [*reasons, "All plans, with their memory by kind: --full or --json FILE."]
    problems = (f"{name}: {reason}" for name, reason in answer.problems.items())
    return [*reasons, LEGEND, *problems]


def _choice(plans: list[Plan]) -> list[str]:
    """Return why the first recommended plan was chosen, and a plan with less CPU memory."""
    best = next(iter(recommend(plans).values()), None)
    if best is None:
        return []
    unmeasured = "without a measured speed, the least memory without copies and recomputation"
    order = "the highest measured speed" if best.candidate.speed else unmeasured
    known = math.isfinite(best.candidate.rank[0])
    cost = "at the least measured cost in accuracy" if known else "(the cost in accuracy was not measured)"
    ways = f"ways that fit and train {best.candidate.trains}"
    reasons = [f"{_in_short(best)}: of the {ways} {cost}, {order}."]
    if best.host > MUCH:
        smaller = [plan for plan in plans if plan.fits and not plan.emulated and plan.host <= MUCH]
        remedy = "--host_memory 32GB plans with less"
        if smaller:
            lean = min(smaller, key=lambda plan: (plan.host, plan.candidate.rank))
            remedy += f", e.g. {_in_short(lean)} with {lean.host / 1e9:.0f} GB"
        reasons.append(f"It takes {best.host / 1e9:.0f} GB of CPU memory: {remedy}.")
    return reasons


def _in_short(plan: Plan) -> str:
    """Return a plan in a few words: rung, options, micro-batch."""
    return plan.candidate.name + (f", micro-batch {plan.micro_batch}" if plan.micro_batch else "")


def title(answer: Answer) -> str:
    """Return the model, the samples and the machine in one line."""
    samples, machine = answer.samples, answer.machine
    parameters = min(plan.counts.all for plan in answer.plans) / 1e6  # adapters add to them
    sample = f"images of {samples.image_size} pixels" if samples.image_size else f"samples of {samples.length:,} tokens"
    gpu = "" if machine.gpu.name == ANY.name else f"{machine.gpu.name}, "
    gpus = f"{machine.gpus} x {gpu}{_gigabytes(machine.gpu.memory)} GB"
    return f"{answer.model} ({parameters:,.1f} M parameters) · effective batch {answer.batch_size} · {sample} · {gpus}"


def _table(plans: list[Plan]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for number, title in enumerate(HEADER):
        table.add_column(title, justify="right" if number else "left", overflow="fold", no_wrap=number > 0)
    for plan in plans:
        *sizes, other = parts(plan.peak)
        sizes += [other + plan.needed - plan.peak.total, plan.needed]
        room = f"{'+' if plan.free >= 0 else '-'}{_three_digits(abs(plan.free))}"
        room = room if plan.fits or plan.free < 0 else "host!"
        table.add_row(
            plan.candidate.name, str(plan.micro_batch or "set"), *map(_three_digits, sizes), room,
            _three_digits(plan.host), f"{plan.candidate.speed:.0f}" if plan.candidate.speed else "–",
        )  # fmt: skip
    return table


def parts(peak: Peak) -> tuple[int, ...]:
    """Return the bytes of the kinds in `TOGETHER`."""
    return tuple(getattr(peak, kind) + peak.logits * (kind == "activations") for kind in TOGETHER)


def _record(plan: Plan) -> dict:
    """Return the figures of a plan for JSON."""
    peak = plan.peak._asdict() | {"total": plan.peak.total}
    names = {"name": plan.candidate.name, "rung": plan.candidate.rung, "precision": plan.candidate.settings.precision}
    figures = plan._asdict() | {"counts": plan.counts._asdict(), "peak": peak}
    figures |= {"costs": _costs(plan), "speed": plan.candidate.speed}
    del figures["candidate"]
    return names | figures


def _three_digits(size: int) -> str:
    """Return bytes in GB, in four characters."""
    return f"{size / 1e9:.{2 if size < 10e9 else 1 if size < 100e9 else 0}f}"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f}".rstrip("0").rstrip(".")
