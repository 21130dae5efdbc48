"""Draw the pictures of the README and of docs/techniques, each once on a light and once on a dark ground.

    python docs/pictures/draw.py [NAME ...]     # 7_grad_checkpointing, readme, ...; without a name: all pictures

A picture is one function with `@picture`, and its docstring is the title. `shapes.py` has the colours and the parts of
pictures. "Predicted" memory comes from `benchmarks/results/memory_ladder.json`, or from `record.py`, which runs a
training step of BLOOM-560m on tensors without data.
"""

import argparse
import io
import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from bitsandbytes.functional import create_dynamic_map, get_4bit_type
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from record import bloom, record
from shapes import DPI, GB, LOOKS, PARTS, WIDTH, Look, arrow, bars, bits, box, canvas, lanes, over_time, panels, stacked
from torch._subclasses import FakeTensorMode

from fabric_ladder.rungs import RUNGS
from fabric_ladder.techniques.adam_4bit import TABLES

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "benchmarks"))
from rung_tables import MEASURED, accuracy, on_h100  # noqa: E402

RESULTS = HERE.parents[1] / "benchmarks" / "results"
PICTURES: dict[str, tuple[Callable[[Figure, Look], None], float]] = {}


def picture(name: str, height: float) -> Callable:
    """Register a function as the picture of this name, with its height in inches."""
    return lambda function: PICTURES.setdefault(name, (function, height))[0]


def draw(name: str, folder: Path) -> None:
    """Write a picture's light and dark PNG files into a folder."""
    function, height = PICTURES[name]
    for theme, look in LOOKS.items():
        style = {
            "figure.facecolor": look["back"], "axes.facecolor": look["back"], "font.size": 10, "axes.axisbelow": True,
            "text.color": look["ink"], "axes.labelcolor": look["ink"], "axes.edgecolor": look["line"],
            "xtick.color": look["soft"], "ytick.color": look["soft"], "grid.color": look["line"],
            "axes.spines.top": False, "axes.spines.right": False, "hatch.color": look["line"],
        }  # fmt: skip
        on_github = name.startswith("readme")  # the site has another dark background
        look = look | {"ground": look["back"] if on_github else "none"}
        with rc_context(style):
            # GitHub shows the README 765 points wide, on many screens with two dots each
            figure = Figure(figsize=(WIDTH, height), dpi=DPI * (1.5 if on_github else 1))
            title = function.__doc__.rstrip(".")
            figure.text(0.1 / WIDTH, 1 - 0.08 / height, title, va="top", fontsize=11.5, fontweight="bold")
            function(figure, look)
            image = io.BytesIO()
            figure.savefig(image, transparent=not on_github)
        colours = Image.open(image).quantize(128, method=Image.Quantize.FASTOCTREE)
        colours.save(folder / f"{name}_{theme}.png", optimize=True)


# Numbers


def predicted(model: str, rung: str, options: str = "") -> dict[str, float]:
    """Return the parts of a predicted peak on one GPU in GB, from benchmarks/results/memory_ladder.json."""
    entries = json.loads((RESULTS / "memory_ladder.json").read_text(encoding="utf-8"))[model]["entries"]
    [peak] = [e["predicted"] for e in entries if (e["rung"], e["options"], e["gpus"]) == (rung, options, 1)]
    named = {"weights": "parameters", "optimizer state": "optimizer_state"}
    parts = {part: peak[named.get(part, part)] / GB for part in PARTS[:-1]}
    return parts | {"temporary": (peak["logits"] + peak["other"]) / GB}


@cache
def lengths() -> list[int]:
    """Return 16 lengths of texts in tokens, spread like those of IMDb's reviews, the longest first."""
    drawn = np.random.default_rng(4).lognormal(np.log(230), 0.7, 16)
    return sorted((min(int(length), 1024) for length in drawn), reverse=True)


# Pictures


ONE_PASS = "--micro_batch_size 16"


@picture("readme", 3.8)
def measured_peaks(figure: Figure, look: Look) -> None:
    """BLOOM-560m on one H100: peak memory of a step with 16 texts."""
    names = {
        "2_grad_accum": "2 gradient accumulation", "4_mixed_precision": "4 mixed precision",
        "16_bf16_that_learns": "16 bfloat16, Kahan sum", "18_low_bit_optimizer": "18 Adam in 8 bits",
        "5_low_precision": "5 bfloat16", "7_grad_checkpointing": "7 checkpointing", "13_lora": "13 LoRA on attention",
        "14_qlora": "14 the same in 4 bits",
    }  # fmt: skip
    found = [on_h100(rung, MEASURED[rung]) for rung in names]
    source = "measured, one text of 1,024 tokens at a time; first bar predicted"
    [axes] = panels(figure, look, source, left=2.1)
    rows = {
        "all 16 texts in one pass": {"activations": sum(predicted("bloom-560m", "2_grad_accum", ONE_PASS).values())}
    }
    rows |= {
        name: {"weights": each["peak_memory_bytes"] / GB} for name, each in zip(names.values(), found, strict=True)
    }
    bars(axes, look, rows, "{:.2f} GB")
    predictions = [each["predicted_peak_bytes"] / GB for each in found]
    axes.plot(predictions, range(1, len(rows)), "|", color=look["ink"], markersize=14, label="predicted")
    place = {"textcoords": "offset points", "color": look["soft"]}
    for card in (8, 24):
        axes.axvline(card, color=look["soft"], linestyle=":", linewidth=1, zorder=0)
        axes.annotate(f"{card} GB card", (card, -0.7), (3, 0), **place)
    paths = {rung.stem: rung for rung in RUNGS}
    for row, rung in enumerate(names, 1):
        axes.text(45, row, accuracy(paths[rung]), va="center")
    axes.annotate("accuracy of\nMiniLM, %", (45, -0.45), va="bottom", color=look["soft"])
    axes.legend(frameon=False, loc="center", bbox_to_anchor=(0.3, 0.15), handletextpad=0)
    axes.set(xlim=(0, 54), xticks=range(0, 41, 10), xlabel="GB")


@picture("1_batch_size_1", 3.4)
def batch_size_1(figure: Figure, look: Look) -> None:
    """Activations grow with the samples in a pass."""
    source = "predicted · BLOOM-560m, 32-bit, 1,024 tokens per sample"
    axes = panels(figure, look, source, 2, legend=PARTS)
    for each, rows in zip(axes, (1, 16), strict=True):
        over_time(each, look, record(rows, dtype=torch.float32), PARTS, f"{rows} sample{'s' * (rows > 1)}")
    axes[0].set_ylabel("GB")


@picture("2_grad_accum", 3.4)
def grad_accum(figure: Figure, look: Look) -> None:
    """Four micro-batches, one gradient, one step."""
    source = "predicted · BLOOM-560m, 32-bit, micro-batches of 1 × 1,024 tokens"
    [axes] = panels(figure, look, source, legend=PARTS)
    step = record(micro_batches=4, dtype=torch.float32)
    ends = [end for name, _, end in step.phases if name != "forward"]
    names = [*(f"micro-batch {number}" for number in range(1, 5)), "step"]
    phases = [(name, *edges) for name, edges in zip(names, pairwise([0, *ends]), strict=True)]
    over_time(axes, look, step._replace(phases=phases), PARTS)
    axes.set_ylabel("GB")


@picture("3_torch_compile", 2.9)
def torch_compile(figure: Figure, look: Look) -> None:
    """Fused kernels read and write memory less often."""
    axes = canvas(figure, look, "sketch · MLP of a BLOOM block, whose GELU is nine operations in eager mode", 17.1, 7)
    gelu = ["×", "×", "+", "×", "×", "tanh", "+", "×", "×"]  # transformers: bloom_gelu_forward
    before, after = [("norm", 1.6), ("matmul", 2)], [("matmul", 2), ("+ input", 1.6)]
    eager = [*before, *((name, 1.1) for name in gelu), *after]
    fused = [*before, ("GELU", 1.1 * len(gelu)), *after]
    for y, name, kernels in ((0, "eager", eager), (3.8, "compiled", fused)):
        axes.text(0, y, f"{name}: {len(kernels)} kernels", va="center", fontweight="bold")
        box(axes, 0, y + 2.3, 17.1, 0.7, look["activations"], "activations in GPU memory")
        x = 0.0
        for text, width in kernels:
            box(axes, x, y + 0.4, width, 1, look["line" if text == "matmul" else "fraction"], text)
            arrow(axes, look, (x + 0.3, y + 2.35), (x + 0.3, y + 1.35))
            arrow(axes, look, (x + width - 0.3, y + 1.35), (x + width - 0.3, y + 2.35))
            x += width


@picture("4_mixed_precision", 2.8)
def mixed_precision(figure: Figure, look: Look) -> None:
    """bfloat16 has the range of float32 and fewer digits."""
    axes = canvas(figure, look, "gap: distance from 1 to the next larger number", 44, 5)
    axes.set_xlim(-6.5, 45)
    formats = {
        "float32": ((1, 8, 23), "3.4e38", "1.2e-7"), "TF32": ((1, 8, 10), "3.4e38", "9.8e-4"),
        "float16": ((1, 5, 10), "65,504", "9.8e-4"), "bfloat16": ((1, 8, 7), "3.4e38", "7.8e-3"),
    }  # fmt: skip
    for row, (name, (counts, largest, gap)) in enumerate(formats.items()):
        bits(axes, look, row + 0.9, name, counts)
        axes.text(38, row + 1.25, largest, ha="right", va="center")
        axes.text(44.5, row + 1.25, gap, ha="right", va="center")
    for x, name, part in ((1, "sign", "temporary"), (7.5, "exponent", "exponent"), (16, "fraction", "fraction")):
        axes.text(x, 0.4, name, ha="right", color=look[part], fontweight="bold")
    for x, name in ((38, "largest"), (44.5, "gap")):
        axes.text(x, 0.4, name, ha="right", color=look["soft"])


@picture("5_low_precision", 2.6)
def low_precision(figure: Figure, look: Look) -> None:
    """bfloat16 rounds a small update away."""
    axes = canvas(figure, look, "computed · all bfloat16 numbers near 1", 1, 4)
    axes.set_xlim(0.986, 1.0262)
    axes.axhline(2, color=look["soft"], linewidth=1.2)
    number = torch.tensor(0.98828125, dtype=torch.bfloat16)
    while number <= 1.025:
        axes.plot([number.item()] * 2, [1.75, 2.25], color=look["weights"], linewidth=3)
        axes.text(
            number.item(), 3.2, f"{number.item():.4f}".rstrip("0").rstrip("."), ha="center", va="center", fontsize=9.5
        )
        number = torch.nextafter(number, torch.tensor(2.0, dtype=torch.bfloat16))
    for start, update, side in ((1.0, 0.003, "right"), (1.0078125, 0.006, "left")):
        there = start + update
        rounded = (torch.tensor(start, dtype=torch.bfloat16) + update).item()
        arrow(axes, look, (start, 1.3), (there, 1.3))
        axes.plot([there] * 2, [1.2, 2], color=look["gradients"], linewidth=1.2, linestyle=":")
        axes.plot(there, 2, "o", color=look["gradients"])
        bend = {"arrowstyle": "-|>", "color": look["gradients"], "linewidth": 1.5, "mutation_scale": 12}
        bend["connectionstyle"] = f"arc3,rad={0.6 if rounded > there else -0.6}"
        axes.annotate("", (rounded, 2.3), (there, 2.1), arrowprops=bend)
        verdict = "rounded back to 1" if rounded == start else f"rounded to {rounded:.5g}"
        axes.text(there, 0.7, f"+ {update}\n{verdict}", ha=side, va="center", color=look["ink"], linespacing=1.4)


@picture("6_lean_optimizer", 2.7)
def lean_optimizer(figure: Figure, look: Look) -> None:
    """Adam's state is half of its memory; SGD has none."""
    tall, wide = 4096, 1024  # a matrix in BLOOM-560m's blocks; Adafactor keeps a value for each row and each column
    states = {
        "Adam": 2 * 2, "AdamW, 8-bit": 2 * (1 + 4 / 256), "Adam, 4-bit": 2 * (1 / 2 + 4 / 128),
        "Adafactor": 2 * (tall + wide) / (tall * wide), "SGD": 0,
    }  # fmt: skip
    source = "computed · bfloat16; 8- and 4-bit moments with their scales"
    [axes] = panels(figure, look, source, left=1.2, legend=["weights", "gradients", "optimizer state"])
    rows = {name: {"weights": 2, "gradients": 2, "optimizer state": state} for name, state in states.items()}
    bars(axes, look, rows, "{:.1f}")
    axes.set(xlim=(0, 9), xlabel="bytes per weight")


@picture("7_grad_checkpointing", 3.4)
def grad_checkpointing(figure: Figure, look: Look) -> None:
    """Checkpointing keeps one input per block."""
    source = "predicted · BLOOM-560m, bfloat16, 16 × 1,024 tokens"
    axes = panels(figure, look, source, 2, legend=PARTS)
    over_time(axes[0], look, record(16), PARTS, "all activations kept")
    over_time(axes[1], look, record(16, checkpointing="all"), PARTS, "checkpointing")
    axes[0].set_ylabel("GB")


@picture("8_init_on_device", 2.8)
def init_on_device(figure: Figure, look: Look) -> None:
    """No 32-bit copy in CPU memory."""
    source = "predicted · weights of BLOOM-560m, drawn to scale"
    axes = canvas(figure, look, source, 10, 6)
    whole, half = (predicted("bloom-560m", rung)["weights"] for rung in ("4_mixed_precision", "5_low_precision"))
    for x, name in ((1.9, "disk"), (4.1, "CPU memory"), (8.3, "GPU memory")):
        axes.text(x, 0.4, name, color=look["soft"])
    for y, name in ((1, "usual"), (3.9, "init on\ndevice")):
        axes.text(0, y + 0.85, name, va="center", fontweight="bold")
        box(axes, 1.9, y, half, 1.7, look["weights"], f"{half:.1f} GB\n16-bit")
        box(axes, 8.3, y, half, 1.7, look["weights"], f"{half:.1f} GB\n16-bit")
    box(axes, 4.1, 1, whole, 1.7, look["weights"], f"{whole:.1f} GB\n32-bit")
    arrow(axes, look, (3.05, 1.85), (4.1, 1.85))
    arrow(axes, look, (6.4, 1.85), (8.3, 1.85))
    arrow(axes, look, (3.05, 4.75), (8.3, 4.75))


@picture("9_ddp", 3.1)
def ddp(figure: Figure, look: Look) -> None:
    """Every GPU gets the mean of all gradients."""
    axes = canvas(figure, look, "sketch · one number stands for all gradients", 10, 7.2)
    for y, name in ((1.45, "own samples"), (3.8, "all-reduce"), (5.45, "same step")):
        axes.text(0, y, name, va="center", color=look["soft"])
    own = (2, 4, 0, 6)
    box(axes, 1.9, 3.3, 8, 1, look["line"])
    axes.text(5.9, 3.8, f"mean of {own[0]}, {own[1]}, {own[2]} and {own[3]}", ha="center", va="center")
    for gpu, gradient in enumerate(own):
        x = 1.9 + 2.05 * gpu
        axes.text(x + 0.92, 0.2, f"GPU {gpu}", ha="center", fontweight="bold")
        box(axes, x, 0.6, 1.85, 0.85, look["weights"], "all weights")
        box(axes, x, 1.45, 1.85, 0.85, look["gradients"], f"gradient {gradient}")
        arrow(axes, look, (x + 0.92, 2.3), (x + 0.92, 3.3))
        arrow(axes, look, (x + 0.92, 4.3), (x + 0.92, 5.0))
        box(axes, x, 5.0, 1.85, 0.85, look["gradients"], f"gradient {np.mean(own):.0f}")
        box(axes, x, 5.85, 1.85, 0.85, look["weights"], "all weights")


@picture("data_parallel", 2.6)
def data_parallel(figure: Figure, look: Look) -> None:
    """DataParallel fills the first GPU; under DDP all are equal."""
    model = predicted("bloom-560m", "1_batch_size_1")
    weights, state = model["weights"], model["optimizer state"]
    kept = sum(record(dtype=torch.float32).kept.values()) / GB
    logits = 2 * 4 * 1024 * 250_880 / GB  # of one text in 32-bit, with their gradient
    first = {"weights": weights, "optimizer state": state, "gradients": weights, "activations": kept}
    rows = {
        "DataParallel, GPU 0": first | {"temporary": 4 * logits},
        "DataParallel, GPUs 1 to 3": {"weights": weights, "activations": kept},
        "DDP, each GPU": first | {"temporary": logits},
    }
    source = "predicted · BLOOM-560m as a language model, 32-bit, 4 texts of 1,024 tokens on 4 GPUs"
    [axes] = panels(figure, look, source, left=1.95, legend=PARTS)
    figure.legends[0].get_texts()[4].set_text("logits, their gradient")
    bars(axes, look, rows, "{:.1f}")
    axes.set(xlim=(0, 21), xlabel="GB in a step's second pass, once the logits have their gradient")


@picture("10_fsdp", 3.0)
def fsdp(figure: Figure, look: Look) -> None:
    """Gather a block's weights, compute, free them."""
    axes = canvas(figure, look, "sketch · memory of one of 4 GPUs over time", 18.4, 6.2)
    axes.set_xlim(-2.3, 16.2)
    axes.plot([8, 8], [0, 5.1], color=look["soft"], linewidth=1, linestyle=":")
    for x, text in ((4, "forward"), (12, "backward")):
        axes.text(x, 0.1, text, ha="center", va="center", color=look["soft"])
    for block in range(4):
        axes.text(-0.2, block + 1.6, f"block {block + 1}", ha="right", va="center")
        box(axes, 0, block + 1.77, 16, 0.22, look["weights"], linewidth=0)
        for start in (2 * block, 14 - 2 * block):
            box(axes, start, block + 1.11, 2, 0.88, look["weights"], "compute")
    for x, text in ((0, "↓ gather"), (2.1, "↑ free")):
        axes.text(x, 0.8, text, va="center", fontsize=9.5)
    note = "thin: own quarter of the weights, always there · thick: gathered from 4 GPUs"
    axes.text(0, 5.7, note, va="center", fontsize=9.5)


@picture("11_fsdp_cpu_offload", 2.9)
def fsdp_cpu_offload(figure: Figure, look: Look) -> None:
    """Weights visit the GPU, the optimizer steps on the CPU."""
    legend = ["weights", "gradients", "optimizer state"]
    axes = canvas(figure, look, "sketch · 4 blocks, not to scale", 12, 4.5, legend=legend)
    axes.set_xlim(-2.3, 11.8)
    tasks = [("CPU", 9.8, 1.9, "optimizer state", "step")]
    for n in range(4):
        tasks += [("bus to GPU", n, 0.8, "weights", f"{n + 1}"), ("GPU", n + 0.9, 0.9, "line", f"fwd {n + 1}")]
        start, text = 4 + 1.25 * n, f"{4 - n}"
        tasks += [("bus to GPU", start, 0.8, "weights", text), ("GPU", start + 0.9, 1.15, "line", f"bwd {text}")]
        tasks += [("bus to CPU", start + 2.1, 0.8, "gradients", text)]
    lanes(axes, look, ["bus to GPU", "GPU", "bus to CPU", "CPU"], tasks)


@picture("12_deepspeed_zero", 2.8)
def deepspeed_zero(figure: Figure, look: Look) -> None:
    """Each ZeRO stage shards one part more over 4 GPUs."""
    size = {"weights": 2, "gradients": 2, "optimizer state": 12}  # 16-bit; 16-bit; 32-bit weights and two moments
    sharded = {"no ZeRO": [], "ZeRO 1": ["optimizer state"], "ZeRO 2": ["optimizer state", "gradients"], "ZeRO 3": size}
    rows = {name: {part: n / 4 if part in parts else n for part, n in size.items()} for name, parts in sharded.items()}
    source = "computed · 16-bit weights and gradients, 32-bit state (ZeRO paper)"
    [axes] = panels(figure, look, source, left=0.9, legend=list(size))
    bars(axes, look, rows, "{:g}")
    axes.set(xlim=(0, 17.5), xlabel="bytes per weight on each GPU")


@picture("13_lora", 2.9)
def lora(figure: Figure, look: Look) -> None:
    """Train 32,768 weights instead of 3,145,728."""
    wide, tall, rank = 1024, 3072, 8
    source = "to scale, but B and A drawn twenty times too thick · query_key_value of BLOOM-560m"
    axes = canvas(figure, look, source, 13, 6.2)
    height, width, middle = 4.4, 0.93, 2.3
    shapes = {
        "W, frozen": (2.2, width, height, look["weights"], tall, wide),
        "up (B), trained": (6.5, 20 * width * rank / wide, height, look["gradients"], tall, rank),
        "down (A), trained": (10.8, width, 20 * height * rank / tall, look["gradients"], rank, wide),
    }
    for name, (x, across, down, colour, rows, columns) in shapes.items():
        box(axes, x - across / 2, middle - down / 2, across, down, colour)
        text = f"{name}\n{rows:,} × {columns:,} = {rows * columns:,}"
        axes.text(x, 5.4, text, ha="center", va="center", linespacing=1.4)
    for x, text in ((4.35, "+"), (8.65, "×")):
        axes.text(x, middle, text, ha="center", va="center", fontsize=18)


@picture("14_qlora", 3.1)
def qlora(figure: Figure, look: Look) -> None:
    """NF4 has most of its 16 levels where most weights are."""
    source = "computed · normally distributed weights in blocks of 64"
    [axes] = panels(figure, look, source, left=0.3)
    weights = np.random.default_rng(0).normal(size=(40_000, 64))
    weights /= np.abs(weights).max(axis=1, keepdims=True)
    axes.hist(weights.ravel(), 120, range=(-0.995, 0.995), density=True, color=look["weights"], alpha=0.55)
    for code, level in enumerate(get_4bit_type("nf4", device="cpu").tolist()):
        axes.plot([level] * 2, [0, 1.15], color=look["ink"], linewidth=1.3)
        axes.text(level, 1.2, code, ha="center", fontsize=9)
    axes.set(xlim=(-1.06, 1.06), ylim=(0, 1.35), yticks=[], xlabel="weight / largest weight of its block")
    axes.spines["left"].set_visible(False)


@picture("15_packing", 3.2)
def packing(figure: Figure, look: Look) -> None:
    """Short texts share a row."""
    rows: list[list[int]] = []
    for length in lengths():  # the longest first, each into the first row with space for it, as in src/plain/15
        free = [row for row in rows if sum(row) + length <= 1024]
        free[0].append(length) if free else rows.append([length])
    source = "sketch · 16 texts, lengths like IMDb's"
    axes = panels(figure, look, source, 2, left=0.15, bottom=0.3)
    alone = [[length] for length in lengths()]
    share = 1 - sum(lengths()) / (16 * max(lengths()))
    cuts = {f"one padded batch: {share:.0%} padding": alone, f"packed: {len(rows)} rows, one at a time": rows}
    box(axes[0], 0, 0, max(lengths()), 16, look["back"], hatch="////", edgecolor=look["line"])
    for each, (title, cut) in zip(axes, cuts.items(), strict=True):
        for y, row in enumerate(cut):
            for start, end in pairwise(np.cumsum([0, *row])):
                box(each, start, y, end - start, 1, look["activations"])
        each.set(xlim=(0, 1030), ylim=(16, 0), xticks=[], yticks=[], xlabel="tokens in a row")
        each.set_title(title, fontsize=10)
        each.spines[:].set_visible(False)


@picture("16_bf16_that_learns", 3.1)
def bf16_that_learns(figure: Figure, look: Look) -> None:
    """Kahan summation keeps what rounding takes."""
    size, steps = 1e-4, 150
    exact, plain = torch.tensor(1.0), torch.tensor(1.0, dtype=torch.bfloat16)
    kahan, rest = plain.clone(), torch.zeros_like(plain)
    values = []
    for _ in range(steps):
        exact += size
        plain += size
        rest += size
        before = kahan.clone()
        kahan += rest
        rest += before - kahan
        values.append((exact.item(), plain.item(), kahan.item()))
    source = "measured with PyTorch · a weight of 1"
    [axes] = panels(figure, look, source, left=0.85)
    curves = [("float32", "soft", "--", (117, 1.0093)), ("bfloat16", "exponent", "-", (117, 1.0008))]
    curves += [("bfloat16 with Kahan summation", "weights", "-", (40, 1.0172))]
    for (name, colour, line, place), curve in zip(curves, zip(*values, strict=True), strict=True):
        axes.plot(range(1, steps + 1), curve, line, color=look[colour], linewidth=2.5)
        axes.text(*place, name, color=look[colour], fontweight="bold")
    axes.set(xlim=(0, steps), ylim=(0.9995, 1.019), xlabel=f"steps of {size:g}", ylabel="weight")
    axes.ticklabel_format(useOffset=False)


@picture("17_step_in_backward", 3.2)
def step_in_backward(figure: Figure, look: Look) -> None:
    """Each gradient is used and freed immediately."""
    source = "predicted · BLOOM-560m, bfloat16, 1 × 1,024 tokens, checkpointing"
    axes = panels(figure, look, source, 2)
    for each, inside in zip(axes, (False, True), strict=True):
        step = record(checkpointing="all", in_backward=inside)
        over_time(each, look, step, ["gradients"], "step in backward" if inside else "step after backward")
    for each, point, label in zip(axes, ((0.82, 0.85), (0.985, 0.5)), ((0.4, 0.95), (0.55, 0.8)), strict=True):
        arrow = {"arrowstyle": "-|>", "color": look["soft"]}
        each.annotate("embedding table", point, label, ha="center", arrowprops=arrow)
    axes[0].set_ylabel("gradients, GB")


@picture("18_low_bit_optimizer", 3.3)
def low_bit_optimizer(figure: Figure, look: Look) -> None:
    """A block shares one scale; each moment becomes a level."""
    moments = np.random.default_rng(3).standard_t(3, 14)
    moments /= np.abs(moments).max()
    source = "computed · ring: first moment of a weight, dot: the stored level"
    axes = panels(figure, look, source, 2, left=0.7, bottom=0.2)
    for each, levels in zip(axes, (create_dynamic_map().numpy(), np.array(TABLES["exp_avg"])), strict=True):
        for level in levels:
            each.axhline(level, color=look["line"], linewidth=0.5 if len(levels) > 16 else 1)
        nearest = levels[np.abs(moments[:, None] - levels).argmin(axis=1)]
        each.vlines(range(14), moments, nearest, color=look["ink"], linewidth=1.2)
        each.plot(moments, "o", color=look["back"], markeredgecolor=look["ink"], markersize=6.5)
        each.plot(nearest, "o", color=look["optimizer state"], markersize=4.5)
        each.set(xticks=[], ylim=(-1.06, 1.06))
        each.set_title(f"{len(levels)} levels: {np.log2(len(levels)):.0f} bits", fontsize=10)
        each.spines[:].set_visible(False)
        each.tick_params(length=0)
    axes[0].set_ylabel("first moment / scale")


@picture("19_optimizer_offload", 2.9)
def optimizer_offload(figure: Figure, look: Look) -> None:
    """The CPU steps while the GPU computes on."""
    legend = ["gradients", "optimizer state", "weights"]
    axes = canvas(figure, look, "sketch · 4 blocks, not to scale", 10, 4.5, legend=legend)
    axes.set_xlim(-1.95, 10.5)
    tasks = [("GPU", 0, 2, "line", "forward")]
    for block in range(4, 0, -1):
        start, text = 8 - 1.5 * block, f"{block}"
        tasks += [("GPU", start, 1.4, "line", f"bwd {block}"), ("bus to CPU", start + 1.5, 0.5, "gradients", text)]
        tasks += [("CPU", start + 2.1, 1.2, "optimizer state", f"step {block}")]
        tasks += [("bus to GPU", start + 3.4, 0.5, "weights", text)]
    lanes(axes, look, ["GPU", "bus to CPU", "CPU", "bus to GPU"], tasks)


@picture("20_activation_offload", 3.2)
def activation_offload(figure: Figure, look: Look) -> None:
    """The blocks' inputs wait in CPU memory."""
    source = "predicted · BLOOM-560m, bfloat16, 16 × 1,024 tokens"
    axes = panels(figure, look, source, 2)
    for each, offload in zip(axes, (False, True), strict=True):
        step = record(16, checkpointing="all", offload=offload)
        over_time(each, look, step, ["activations"], "with offload" if offload else "checkpointing alone")
    [(_, _, parked)] = stacked(step, ["CPU memory"])
    axes[1].plot(np.linspace(0, 1, len(parked)), parked, color=look["ink"], linewidth=1.5, linestyle="--")
    axes[1].text(0.45, 0.85, "in CPU memory")
    axes[0].set_ylabel("activations, GB")


@picture("21_selective_checkpointing", 3.0)
def selective_checkpointing(figure: Figure, look: Look) -> None:
    """Keep matrix products, recompute what is cheap."""
    source = "widths: bytes · totals predicted: BLOOM-560m, bfloat16, 16 × 1,024 tokens"
    axes = canvas(figure, look, source, 26, 7)
    operations = {"input": 1, "norm": 1, "qkv": 3, "attention": 1.2, "dense": 1, "add": 1}
    operations |= {"norm 2": 1, "MLP up": 4, "GELU": 4, "MLP down": 1}
    products = {"input", "qkv", "attention", "dense", "MLP up", "MLP down"}
    ways = {"keep all": ("", operations), "selective": ("cheap", products), "recompute\nall": ("all", {"input"})}
    for row, (name, (checkpointing, kept)) in enumerate(ways.items()):
        x, y = 4.0, 1.8 * row + 1.8
        axes.text(0, y + 0.6, name, va="center", linespacing=1.1)
        for operation, size in operations.items():
            if not row:
                axes.text(x + size / 2, y - 0.1, operation, rotation=45, ha="left", va="bottom", fontsize=9)
            style = {} if operation in kept else {"linestyle": ":", "edgecolor": look["soft"]}
            box(axes, x, y, size, 1.2, look["activations" if operation in kept else "back"], **style)
            x += size
        axes.text(x + 0.3, y + 0.6, f"{sum(block_activations(checkpointing).values()):.0f} MB", va="center")


@cache
def block_activations(checkpointing: str = "") -> Counter:
    """Return MB of activations that a block keeps, by the kind of operation that computed them."""
    kinds = {"addmm": "products", "_scaled": "products", "add.": "input"}
    sizes = Counter()
    for operation, size in record(16, checkpointing=checkpointing).kept.items():
        kind = next((kind for start, kind in kinds.items() if operation.startswith(start)), "norms, GELU, copies")
        sizes[kind] += size / 24 / 1e6
    return sizes


@picture("22_float8", 2.8)
def float8(figure: Figure, look: Look) -> None:
    """8 bits: a short range, so each tensor gets a scale."""
    formats = {
        "bfloat16": ((1, 8, 7), torch.bfloat16, "3.4e38"), "e4m3": ((1, 4, 3), torch.float8_e4m3fn, "448"),
        "e5m2": ((1, 5, 2), torch.float8_e5m2, "57,344"),
    }  # fmt: skip
    source = "computed · normal numbers of each format"
    [left, right] = panels(figure, look, source, 2, left=0.15)
    left.set(xlim=(-6, 16.5), ylim=(3, -0.6))
    left.axis("off")
    for row, (name, (counts, dtype, largest)) in enumerate(formats.items()):
        bits(left, look, row, name, counts)
        low, high = np.log2(torch.finfo(dtype).tiny), np.log2(torch.finfo(dtype).max)
        right.barh(row + 0.35, high - low, left=low, height=0.5, color=look["exponent"])
        right.text(high + 4, row + 0.35, f"to {largest}", va="center")
    for x, name, part in ((1, "sign", "temporary"), (7.5, "exponent", "exponent"), (16, "fraction", "fraction")):
        left.text(x, -0.2, name, ha="right", color=look[part], fontweight="bold")
    right.set(xlabel="range, powers of two", xlim=(-130, 205), xticks=[-100, 0, 100])
    right.spines["left"].set_visible(False)
    right.tick_params(axis="y", length=0)


@picture("23_tiled_mlp", 2.9)
def tiled_mlp(figure: Figure, look: Look) -> None:
    """The wide tensors of an MLP exist for one tile of tokens."""
    source = "drawn to scale · MLP of Llama 3.1 8B: width of the tensors x tokens, 8 tiles"
    axes = canvas(figure, look, source, 32.5, 7.2)
    wide = 14336 / 4096
    tensors = {"input": 1, "gate": wide, "up": wide, "product": wide, "output": 1}
    for left, name, tiles in ((0, "whole", 1), (17, "tiled", 8)):
        axes.text(left, 0.2, name, fontweight="bold")
        x = left
        for tensor, width in tensors.items():
            axes.text(
                x + width / 2, 1.6, tensor, rotation=35 if width == 1 else 0, ha="center", va="bottom", fontsize=9
            )
            narrow = width == 1
            for tile in range(1 if narrow else tiles):
                height = 5 / (1 if narrow else tiles)
                kept = narrow or tile == tiles // 2
                style = {} if kept else {"linestyle": ":", "edgecolor": look["soft"]}
                colour = look["activations" if kept else "back"]
                box(axes, x, 1.9 + tile * height, width, height, colour, **style)
            x += width + 0.4
    axes.text(-0.35, 4.4, "tokens", rotation=90, ha="center", va="center", fontsize=9, color=look["soft"])


@picture("25_block_by_block", 3.4)
def block_by_block(figure: Figure, look: Look) -> None:
    """One block is trained at a time; the backward pass ends at it."""
    source = "sketch · trained: also gradients, 32-bit copies, optimizer state and activations"
    axes = canvas(figure, look, source, 14, 8.2)
    names = ["embeddings", *(f"block {number}" for number in range(1, 7)), "head"]
    for row, name in enumerate(names):
        y = 7.3 - 0.95 * row
        axes.text(2, y + 0.42, name, ha="right", va="center")
        for turn in range(1, 7):
            trained = row == turn or name == "head"
            part, text = ("activations", "activations") if row > turn else ("line", "weights only")
            if trained:
                part, text = "optimizer state", "trained"
            box(axes, 0.2 + 1.98 * turn, y, 1.88, 0.85, look[part], text)
    for turn in range(1, 7):
        axes.text(1.14 + 1.98 * turn, 0.2, f"turn {turn}", ha="center", va="center", fontweight="bold")


@picture("24_streamed_layers", 2.6)
def streamed_layers(figure: Figure, look: Look) -> None:
    """Two buffers hold all blocks in turn."""
    axes = canvas(figure, look, "sketch · 4 blocks, not to scale", 10.8, 3.4, legend=["weights", "temporary"])
    axes.set_xlim(-1.4, 10.9)
    figure.legends[0].get_texts()[1].set_text("copy from CPU memory")
    figure.legends[0].get_texts()[0].set_text("weights on the GPU")
    tasks = [("GPU", 0.7 + block, 0.95, "line", f"fwd {block}") for block in range(4)]
    tasks += [("GPU", 4.7 + 1.5 * (3 - block), 1.45, "line", f"bwd {block}") for block in range(3, -1, -1)]
    visits = [(0, 0, 1.7), (1, 0.7, 2.7), (2, 1.7, 7.65), (3, 2.7, 6.15), (1, 6.2, 10.65), (0, 7.7, 10.65)]
    for block, start, end in visits:
        lane = f"buffer {block % 2}"
        tasks += [
            (lane, start, 0.6, "temporary", f"{block}"),
            (lane, start + 0.6, end - start - 0.6, "weights", f"{block}"),
        ]
    lanes(axes, look, ["GPU", "buffer 0", "buffer 1"], tasks)


@picture("26_stateless", 3.1)
def stateless(figure: Figure, look: Look) -> None:
    """SinkGD balances the rows and columns of a gradient."""
    axes = canvas(figure, look, "computed · a random gradient; stronger colour: a longer step", 30, 7.9)
    rng = np.random.default_rng(1)
    step = rng.normal(size=(6, 8)) * np.exp(rng.normal(size=(6, 1))) * np.exp(0.7 * rng.normal(size=8))
    step[4] = 0
    for turn in range(11):
        step = step / np.maximum(np.sqrt((step**2).mean(turn % 2, keepdims=True)), 1e-9) if turn else step
        if turn in (0, 2, 10):
            x, name = {0: (0, "SGD: the gradient"), 2: (11, "one round"), 10: (22, "SinkGD: five rounds")}[turn]
            axes.text(x, 0.4, name, va="center", fontweight="bold")
            for (row, column), value in np.ndenumerate(np.abs(step) / np.sqrt((step**2).mean())):
                strength = min(1, round(0.5 + 4 * value) / 10)  # ten steps, since a picture has 64 colours
                box(axes, x + column, row + 1, 1, 1, look["gradients"], alpha=strength)
    for x in (8.4, 19.4):
        arrow(axes, look, (x, 4), (x + 2.2, 4))
    axes.text(0, 7.6, "A row without a gradient stays empty: its token is not in the batch.", va="center", fontsize=9.5)


@picture("27_cuda_graphs", 2.5)
def cuda_graphs(figure: Figure, look: Look) -> None:
    """One launch for all kernels: the GPU waits no more."""
    axes = canvas(figure, look, "sketch · 7 kernels of a pass, not to scale", 10, 4.6)
    axes.set_xlim(-1.95, 10.9)
    tasks = []
    for kernel in range(7):
        start, name = 1.35 * kernel, f"{kernel + 1}"
        tasks += [("Python", start, 1.3, "line", f"launch {name}"), ("GPU", start + 1.3, 0.4, "weights", name)]
        tasks += [("GPU, graph", 1.3 + 0.4 * kernel, 0.4, "weights", name)]
    tasks += [("Python, graph", 0, 1.3, "line", "replay"), ("Python, graph", 1.35, 1.3, "line", "copy next")]
    tasks += [("Python, graph", 2.7, 1.3, "line", "replay")]
    tasks += [("GPU, graph", 4.1 + 0.4 * kernel, 0.4, "gradients", f"{kernel + 1}") for kernel in range(7)]
    lanes(axes, look, ["Python", "GPU", "Python, graph", "GPU, graph"], tasks)


@picture("28_memory_budget", 3.4)
def memory_budget(figure: Figure, look: Look) -> None:
    """Only the blocks that have no room are recomputed."""
    source = "predicted · BLOOM-560m, bfloat16, 16 × 1,024 tokens, 24 blocks"
    axes = panels(figure, look, source, 3, legend=PARTS)
    for each, blocks in zip(axes, (0, 12, 24), strict=True):
        over_time(each, look, record(16, checkpointing="all", blocks=blocks), PARTS, f"{blocks} recomputed")
        each.axhline(12, color=look["ink"], linewidth=1.3, linestyle="--")
    axes[2].text(0.97, 12.3, "budget", ha="right", fontsize=9.5)
    axes[0].set_ylabel("GB")


@picture("29_streamed_training", 2.9)
def streamed_training(figure: Figure, look: Look) -> None:
    """Weights come, gradients go, and the CPU steps."""
    legend = ["weights", "gradients", "optimizer state"]
    axes = canvas(figure, look, "sketch · 4 blocks, not to scale", 12.3, 4.5, legend=legend)
    axes.set_xlim(-1.95, 12.4)
    tasks = []
    for block in range(4):
        start, text = 9.2 - 1.5 * block, f"{block}"
        tasks += [("bus to GPU", block, 0.6, "weights", text), ("GPU", 0.7 + block, 0.95, "line", f"fwd {block}")]
        tasks += [("GPU", start, 1.45, "line", f"bwd {block}"), ("bus to CPU", start + 1.5, 0.6, "gradients", text)]
        tasks += [("CPU", start + 2.1, 1.0, "optimizer state", f"step {block}")]
    tasks += [("bus to GPU", 6.2, 0.6, "weights", "1"), ("bus to GPU", 7.7, 0.6, "weights", "0")]
    lanes(axes, look, ["bus to GPU", "GPU", "bus to CPU", "CPU"], tasks)


@picture("micro_batches", 3.2)
def micro_batches(figure: Figure, look: Look) -> None:
    """One effective batch, three cuts."""
    source = "sketch · 16 texts, lengths like IMDb's; a frame is one pass"
    axes = panels(figure, look, source, 3, left=0.15, bottom=0.3)
    cuts = {"1 text": 1, "up to 1,024 tokens": 1024, "all 16 texts": 10**6}
    for each, (name, budget) in zip(axes, cuts.items(), strict=True):
        batches: list[list[int]] = []
        for length in lengths():
            if batches and batches[-1][0] * (len(batches[-1]) + 1) <= budget:
                batches[-1].append(length)
            else:
                batches.append([length])
        y = 0.0
        for batch in batches:
            for row, length in enumerate(batch):
                box(each, 0, y + row, length, 1, look["activations"], linewidth=0.6)
            frame = {"facecolor": "none", "hatch": "////", "linewidth": 0}
            each.add_patch(Rectangle((0, y), batch[0], len(batch), zorder=0, **frame))
            each.add_patch(Rectangle((0, y), batch[0], len(batch), fill=False, edgecolor=look["ink"], linewidth=1.3))
            y += len(batch)
        padding = 1 - sum(lengths()) / sum(batch[0] * len(batch) for batch in batches)
        passes = f"{len(batches)} pass{'es' * (len(batches) > 1)}"
        each.set(xlim=(-8, 1032), ylim=(16.2, -0.2), xticks=[], yticks=[])
        each.set_title(name, fontsize=10, fontweight="bold")
        each.set_xlabel(f"{passes}, {f'{padding:.0%}' if padding else 'no'} padding")
        each.spines[:].set_visible(False)


@picture("train_blocks", 2.7)
def train_blocks(figure: Figure, look: Look) -> None:
    """Frozen blocks keep their weights, and nothing else."""
    options = {"all 24 blocks": "", "the last 12": "--train_blocks last:12", "the last 4": "--train_blocks last:4"}
    source = "predicted · BLOOM-560m, 32-bit, 1 × 1,024 tokens"
    [axes] = panels(figure, look, source, left=1.2, legend=PARTS)
    bars(
        axes, look, {name: predicted("bloom-560m", "2_grad_accum", words) for name, words in options.items()}, "{:.1f}"
    )
    axes.set(xlim=(0, 12.5), xlabel="GB")


@picture("fused_attention", 3.1)
def fused_attention(figure: Figure, look: Look) -> None:
    """Scores grow with the square of the length."""
    source = "predicted · BLOOM-560m, bfloat16, one text"
    [axes] = panels(figure, look, source)
    tokens = [256, 512, 1024, 1536, 2048, 3072, 4096]
    names = {False: "eager: keeps\ntokens × tokens scores", True: "fused: no scores"}
    for fused, name in names.items():
        sizes = [sum(record(1, length, fused=fused).kept.values()) / GB for length in tokens]
        colour, place = ("weights", (3000, 6)) if fused else ("activations", (1050, 22))
        axes.plot(tokens, sizes, "o-", color=look[colour], linewidth=2.5)
        axes.text(*place, name, color=look[colour], fontweight="bold")
    axes.set(xlim=(0, 4200), xticks=[0, 1024, 2048, 3072, 4096], xlabel="tokens", ylabel="activations, GB")
    axes.set_ylim(bottom=0)


@picture("chunked_cross_entropy", 2.9)
def chunked_cross_entropy(figure: Figure, look: Look) -> None:
    """Only 256 tokens have logits at the same time."""
    tokens, vocabulary, chunk = 2048, 250_880, 256
    figures = json.loads((RESULTS / "chunked_loss.json").read_text(encoding="utf-8"))
    peaks = figures["cpu, float32, head trained, width 1024"]["figures"]
    source = "measured peaks of the loss · 2,048 tokens, 250,880 logits each, 32-bit"
    axes = canvas(figure, look, source, 12, 9.3)
    axes.text(0.6, 4.9, "tokens", rotation=90, ha="right", va="center", color=look["soft"])
    for x, name, rows in ((0.8, "whole", tokens), (6.9, f"chunks of {chunk}", chunk)):
        axes.text(x, 0.2, f"{name}: peak {peaks[name]['peak_bytes'] / GB:.2f} GB", va="center", fontweight="bold")
        for start in range(0, tokens, rows):
            there = start == tokens // rows // 3 * rows
            style = {} if there else {"linestyle": ":", "edgecolor": look["soft"]}
            text = f"logits of {rows:,} tokens: {4 * rows * vocabulary / GB:.2f} GB" * there
            part = "temporary" if there else "back"
            box(axes, x, 0.9 + 8 * start / tokens, 5, 8 * rows / tokens, look[part], text, **style)


@picture("embedding_gradients", 2.9)
def embedding_gradients(figure: Figure, look: Look) -> None:
    """A text touches few rows of the embedding table."""
    figures = json.loads((RESULTS / "embedding_gradients.json").read_text(encoding="utf-8"))
    whole, rows = (value["peak_bytes"] / 1e6 for value in figures["cpu, float32"]["figures"].values())
    source = "sketch · measured peaks: BLOOM-560m's table, 1,024 tokens, 32-bit"
    axes = canvas(figure, look, source, 12, 8)
    columns = [(0.2, "weights\n250,880 rows", "weights"), (4.4, f"gradient by PyTorch\npeak {whole:,.0f} MB", "line")]
    for x, name, part in [*columns, (8.6, f"gradient by rows\npeak {rows:.0f} MB", "back")]:
        axes.text(x, 0.3, name, va="center", linespacing=1.3)
        box(axes, x, 1.2, 2.6, 6.4, look[part])
    axes.text(5.7, 7, "zeros", ha="center")
    touched = np.random.default_rng(1).beta(0.6, 2.2, 22) * 6.3
    for number, row in enumerate(touched):
        box(axes, 0.2, 1.2 + row, 2.6, 0.08, look["back"], linewidth=0)
        box(axes, 4.4, 1.2 + row, 2.6, 0.08, look["gradients"], linewidth=0)
        box(axes, 8.6, 1.2 + 0.1 * number, 2.6, 0.08, look["gradients"], linewidth=0)


@picture("where_the_memory_goes", 3.2)
def where_the_memory_goes(figure: Figure, look: Look) -> None:
    """Where the memory of BLOOM-560m goes."""
    with FakeTensorMode():
        sizes = {name: weight.numel() for name, weight in bloom(torch.float32, False, "").named_parameters()}
    table, total = sizes["transformer.word_embeddings.weight"], sum(sizes.values())
    block = block_activations()
    source = "computed; activations predicted for bfloat16, 16 × 1,024 tokens"
    axes = canvas(figure, look, source, 10, 6.6)
    names = {"norms, GELU, copies": "norms, GELU, copies", "products": "matrix products,\nattention", "input": "input"}
    rows = {
        f"{total / 1e6:.0f} million weights": [
            (f"embedding table {table / total:.0%}", table, "weights"), ("24 blocks", total - table, "weights")
        ],
        "16 bytes per weight with Adam in 32-bit": [
            ("weights 4", 4, "weights"), ("gradients 4", 4, "gradients"), ("optimizer state 8", 8, "optimizer state")
        ],
        f"{sum(block.values()):.0f} MB activations of one block": [
            (name, block[kind], "activations") for kind, name in names.items()
        ],
    }  # fmt: skip
    for y, (name, parts) in enumerate(rows.items()):
        axes.text(0, 2.2 * y + 0.3, name, va="center", fontweight="bold")
        x = 0.0
        for text, size, part in parts:
            width = 10 * size / sum(size for _, size, _ in parts)
            box(axes, x, 2.2 * y + 0.65, width, 1.15, look[part], text)
            x += width


@picture("published_peaks", 4.6)
def published_peaks(figure: Figure, look: Look) -> None:
    """Peaks that others published, and their predictions."""
    rows = json.loads((RESULTS / "published.json").read_text(encoding="utf-8"))["published"]["rows"]
    colours = {"rasbt": "weights", "LitGPT": "exponent", "torchtune": "optimizer state", "torchao": "activations"}
    colours |= {"PEFT": "temporary", "Soup": "gradients"}
    [axes] = panels(figure, look, "published by others · predicted here, without a fitted constant", left=0.75)
    for source, colour in colours.items():
        points = [row for row in rows if row["counts"] and row["source"].startswith(source)]
        x, y = ([row[side] / GB for row in points] for side in ("published", "predicted"))
        axes.scatter(x, y, s=26, color=look[colour], edgecolors=look["back"], linewidths=0.5, label=source, zorder=2)
    ends = np.array([0.2, 90])
    axes.plot(ends, ends, color=look["ink"], linewidth=1)
    axes.fill_between(ends, ends / 1.25, ends * 1.25, color=look["line"], alpha=0.5, linewidth=0, label="±25 %")
    ticks = [0.5, 1, 2, 5, 10, 20, 50]
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="published, GB", ylabel="predicted, GB")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, list(map(str, ticks)))
        axis.set_ticks([], minor=True)
    axes.grid()
    axes.legend(frameon=False, fontsize=9.5, labelcolor=look["ink"])


def main() -> None:
    """Draw the pictures that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *PICTURES], help=", ".join(PICTURES))
    for name in parser.parse_args().names or PICTURES:
        draw(name, HERE)
        print(*(HERE / f"{name}_{theme}.png" for theme in LOOKS))


if __name__ == "__main__":
    main()
