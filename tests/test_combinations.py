"""Every technique that is a setting, with every rung, on a tiny model: what runs, and what is refused in which words.

The table in docs/combinations.md is what this test finds: `make combinations` writes it, `make test` compares it.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import current_thread

import pytest
from helpers import MODELS, ROOT, RUNGS
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
    runner = str(ROOT / "tests" / "combination_runner.py")
    command = [sys.executable, runner, str(rung), json.dumps(list(techniques.values()))]
    kernels = f"{os.environ['TORCHINDUCTOR_CACHE_DIR']}-{current_thread().name}"  # each thread has one rung at a time
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": kernels}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def table(found: dict[str, list[str | None]], techniques: dict[str, list[str]]) -> str:
    """Return the Markdown: techniques down, rungs across, refusals numbered."""
    reasons = []
    lines = [f"| | {' | '.join(name.split('_')[0] for name in found)} |", "|---" * (len(found) + 1) + "|"]
    for row, technique in enumerate(techniques):
        cells = []
        for refusals in found.values():
            reason = refusals[row] and refusals[row].replace("combination_runner", "this rung")
            if reason and reason not in reasons:
                reasons.append(reason)
            cells.append(f"({reasons.index(reason) + 1})" if reason else "yes")
        lines.append(f"| {technique} | {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n\n" + "\n".join(f"{n}. {reason}" for n, reason in enumerate(reasons, 1)) + "\n"


@pytest.mark.timeout(1200)
def test_every_technique_runs_with_every_rung_or_is_refused_with_a_reason(techniques):
    with ThreadPoolExecutor(2) as pool:
        tried = pool.map(lambda rung: attempt(rung, techniques), RUNGS)
        found = dict(zip((path.stem for path in RUNGS), tried, strict=True))
    pairs = [(rung, *pair) for rung in found for pair in zip(techniques, found[rung], strict=True)]
    assert not [pair for pair in pairs if (pair[2] or "").startswith("BUG")]
    written = table(found, techniques)
    if os.environ.get("FABRIC_LADDER_WRITE_TABLE"):
        TABLE.write_text(written, encoding="utf-8")
    assert written == TABLE.read_text(encoding="utf-8")
