"""Every technique that is a setting, with every rung, on a tiny model: what runs, and what is refused in which words.

The table in docs/combinations.md is what this test finds: `make combinations` tries all pairs and writes it. To save
minutes, `make test` takes the table's word for pairs with `torch.compile` and for two of three others that run; every
refusal is tried.
"""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import current_thread

import pytest
from helpers import MODELS, ROOT, RUNGS, run_script
from PIL import Image

TABLE = ROOT / "docs" / "combinations.md"
TECHNIQUES = {
    "32-true": ["--precision", "32-true"],
    "64-true": ["--precision", "64-true"],
    "16-mixed": ["--precision", "16-mixed"],
    "bf16-mixed": ["--precision", "bf16-mixed"],
    "bf16-true": ["--precision", "bf16-true"],
    "16-true": ["--precision", "16-true"],
    "16-true, SGD": ["--precision", "16-true", "--optimizer", "sgd"],
    "micro-batch by tokens": ["--micro_batch_tokens", "64"],
    "clipping": ["--max_grad_norm", "1"],
    "activation checkpointing": ["--activation_checkpointing", "true"],
    "compile": ["--compile", "true"],
    "AdamW": ["--optimizer", "adamw"],
    "SGD, cosine": ["--optimizer", "sgd", "--schedule", "cosine", "--warmup_steps", "1"],
    "Adafactor": ["--optimizer", "adafactor"],
    "8-bit Adam": ["--optimizer", "adam-8bit"],
    "offload": ["--offload", "true"],
    "LoRA": ["--lora", "true"],
    "LoRA, DoRA on all linear": ["--lora", "true", "--dora", "true", "--lora_targets", "all-linear"],
    "LoRA in 16 bits": ["--lora", "true", "--precision", "bf16-true"],
    "4-bit LoRA": ["--lora", "true", "--quantization", "nf4"],
    "LoRA, checkpointing": ["--lora", "true", "--activation_checkpointing", "true"],
    "LoRA, save, sharded": ["--lora", "true", "--save", "sharded"],
    "LoRA, save, consolidated": ["--lora", "true", "--save", "consolidated"],
    "instruction tuning": ["--task", "instruction-tuning", "--max_length", "512"],
    "packing": ["--task", "instruction-tuning", "--max_length", "512", "--packing", "true"],
    "instruction tuning, LoRA": ["--task", "instruction-tuning", "--max_length", "512", "--lora", "true"],
    "save, sharded": ["--save", "sharded"],
    "save, consolidated": ["--save", "consolidated"],
}
HEAD = """# Which technique goes with which rung

Each cell is a run of the rung with that setting, on one CPU process and a tiny model. A number is a refusal before any
work; the reasons stand below. Written by `make combinations`; `make test` fails when it is no longer true.

"""


@pytest.fixture(scope="module")
def techniques(tmp_path_factory):
    """What the table's rows run, images among them."""
    folder = tmp_path_factory.mktemp("images")
    for index in range(30):
        path = folder / ("dark", "light")[index % 2] / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (32, 32), (index + 120 * (index % 2),) * 3).save(path)
    images = ["--task", "image-classification", "--dataset", str(folder), "--model", str(MODELS / "vit-small.json")]
    return TECHNIQUES | {"images (ViT)": images}


def attempt(rung: Path, techniques: dict[str, list[str]]) -> list[str | None]:
    """Run a rung with each technique, in one process."""
    if not techniques:
        return []
    runner = str(ROOT / "tests" / "combination_runner.py")
    arguments = (runner, rung, json.dumps(list(techniques.values())))
    kernels = f"{os.environ['TORCHINDUCTOR_CACHE_DIR']}-{current_thread().name}"  # each thread has one rung at a time
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": kernels}
    done = run_script(*arguments, cwd=os.getcwd(), timeout=3000, fresh="compile" in techniques, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def written_table() -> dict[tuple[str, str], str | None]:
    """Return what the table says of each technique and rung number: None, or the reason of a refusal."""
    text = TABLE.read_text(encoding="utf-8")
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    head, _, *rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    cells = {(row[0], number): cell for row in rows for number, cell in zip(head, row[1:], strict=True)}
    return {pair: reasons.get(cell.strip("()")) for pair, cell in cells.items()}


def table(found: dict[str, list[str | None]], techniques: dict[str, list[str]]) -> str:
    """Return the Markdown: techniques down, rungs across, refusals numbered."""
    reasons = []
    lines = [f"| | {' | '.join(name.split('_')[0] for name in found)} |", "|---" * (len(found) + 1) + "|"]
    for row, technique in enumerate(techniques):
        cells = []
        for rung, refusals in found.items():
            reason = refusals[row] and refusals[row].replace(rung, "this rung")
            if reason and reason not in reasons:
                reasons.append(reason)
            cells.append(f"({reasons.index(reason) + 1})" if reason else "yes")
        lines.append(f"| {technique} | {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n\n" + "\n".join(f"{n}. {reason}" for n, reason in enumerate(reasons, 1)) + "\n"


@pytest.mark.timeout(5400)
def test_every_technique_runs_with_every_rung_or_is_refused_with_a_reason(techniques):
    everything = bool(os.environ.get("FABRIC_LADDER_WRITE_TABLE"))
    written = {} if everything else written_table()

    def is_tried(row: int, name: str, column: int, rung: Path) -> bool:
        if everything:
            return True
        compiled = name == "compile" or rung.stem == "3_torch_compile"
        return not compiled and ((row + column) % 3 == 0 or written.get((name, rung.stem.split("_")[0])) is not None)

    tried = [
        {name: settings for row, (name, settings) in enumerate(techniques.items()) if is_tried(row, name, column, rung)}
        for column, rung in enumerate(RUNGS)
    ]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(attempt, RUNGS, tried))
    pairs = {(name, rung.stem): written.get((name, rung.stem.split("_")[0])) for name in techniques for rung in RUNGS}
    for rung, names, row in zip(RUNGS, tried, answers, strict=True):
        pairs |= {(name, rung.stem): answer for name, answer in zip(names, row, strict=True)}
    assert not [(pair, answer) for pair, answer in pairs.items() if (answer or "").startswith("BUG")]
    found = {rung.stem: [pairs[name, rung.stem] for name in techniques] for rung in RUNGS}
    if everything:
        TABLE.write_text(table(found, techniques), encoding="utf-8")
    assert table(found, techniques) == TABLE.read_text(encoding="utf-8")
