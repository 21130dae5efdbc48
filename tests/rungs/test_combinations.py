"""Every technique that is a setting, with every rung, on a tiny model: what runs, and what is refused in which words.

`make combinations` tries all pairs and writes docs/combinations.md; the slow test tries every third again. The quick
test tries every pair that is refused there, and of those that run one for each technique and at least one for each
rung; it compiles none, which takes minutes.
"""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image
from support.helpers import MODELS, ROOT, RUNGS, finished, run_script

TABLE = ROOT / "docs" / "combinations.md"
INSTRUCTIONS = "--task instruction-tuning --max_length 512"
TECHNIQUES = {  # settings, and the number of the rung with which the quick test runs them, if with any
    "32-true": ("--precision 32-true", 9),
    "64-true": ("--precision 64-true", 2),
    "16-mixed": ("--precision 16-mixed", None),
    "bf16-mixed": ("--precision bf16-mixed", 10),
    "bf16-true": ("--precision bf16-true", 4),
    "16-true": ("--precision 16-true", 6),
    "16-true, SGD": ("--precision 16-true --optimizer sgd", 8),
    "micro-batch by tokens": ("--micro_batch_tokens 64", 1),
    "clipping": ("--max_grad_norm 1", 10),
    "activation checkpointing": ("--activation_checkpointing true", 11),
    "compile": ("--compile true", None),
    "AdamW": ("--optimizer adamw", 5),
    "SGD, cosine": ("--optimizer sgd --schedule cosine --warmup_steps 1", 11),
    "Adafactor": ("--optimizer adafactor", 7),
    "8-bit Adam": ("--optimizer adam-8bit", 22),
    "4-bit Adam": ("--optimizer adam-4bit", 18),
    "Kahan summation": ("--precision bf16-true --kahan_summation true", 19),
    "step in backward": ("--step_in_backward true --batch_size 1", 18),
    "optimizer offload": ("--optimizer_offload true", 17),
    "activation offload": ("--activation_checkpointing true --activation_offload true", 21),
    "selective checkpointing": ("--activation_checkpointing true --selective_checkpointing true", 20),
    "8-bit products": ("--float8 true", 16),
    "offload": ("--offload true", 10),
    "LoRA": ("--lora true", 4),
    "LoRA, save, sharded": ("--lora true --save sharded", 10),
    "LoRA, save, consolidated": ("--lora true --save consolidated", 13),
    "LoRA, checkpointing": ("--lora true --activation_checkpointing true", 7),
    "LoRA, DoRA on all linear": ("--lora true --dora true --lora_targets all-linear", 9),
    "LoRA in 16 bits": ("--lora true --precision bf16-true", 11),
    "4-bit LoRA": ("--lora true --quantization nf4", 8),
    "instruction tuning": (INSTRUCTIONS, 1),
    "packing": ("--packing true --max_length 512", 9),
    "packing, rows of one shape": ("--packing true --max_length 512 --pack_rows 1", 15),
    "packing, instructions": (f"{INSTRUCTIONS} --packing true", 6),
    "instruction tuning, LoRA": (f"{INSTRUCTIONS} --lora true", 14),
    "save, sharded": ("--save sharded", 9),
    "save, consolidated": ("--save consolidated", 10),
    "images (ViT)": (f"--task image-classification --model {MODELS / 'vit-small.json'} --dataset", 13),
}
ALL_PAIRS = [(technique, rung.stem) for technique in TECHNIQUES for rung in RUNGS]
HEAD = """# Which technique goes with which rung

Each cell is a run of the rung with that setting, on one CPU process and a tiny model. A number is a refusal before any
work; the reasons stand below. Written by `make combinations`, which tries every cell. `make test-slow` tries every
third again; `make test` tries every refusal, and of the cells that run one in each row and each column that is not
compiled.

"""
Pair = tuple[str, str]  # technique and rung


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of dark and light images."""
    folder = tmp_path_factory.mktemp("images")
    for index in range(30):
        path = folder / ("dark", "light")[index % 2] / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (32, 32), (index + 120 * (index % 2),) * 3).save(path)
    return str(folder)


def attempt(pairs: list[Pair], images: str, compiled: bool = False) -> dict[Pair, str | None]:
    """Run each pair, in one process, and return what refused it."""
    runs = []
    for technique, rung in pairs:
        settings = TECHNIQUES[technique][0].split()
        runs.append([str(ROOT / "src" / f"{rung}.py"), [*settings, *([images] if settings[-1] == "--dataset" else [])]])
    runner = ROOT / "tests" / "support" / "combination_runner.py"
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if torch.cuda.is_available() else {}
    done = run_script(runner, json.dumps(runs), cwd=os.getcwd(), timeout=3000, fresh=compiled, **hidden)
    found = json.loads(finished(done).splitlines()[-1])
    bugs = {pair: answer for pair, answer in zip(pairs, found, strict=True) if (answer or "").startswith("BUG")}
    assert not bugs
    return {pair: answer and answer.replace(pair[1], "this rung") for pair, answer in zip(pairs, found, strict=True)}


def written_table() -> dict[Pair, str | None]:
    """Return what the table says of each pair: None, or the reason of a refusal."""
    text = TABLE.read_text(encoding="utf-8")
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    head, _, *rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    stems = {rung.stem.split("_")[0]: rung.stem for rung in RUNGS}
    cells = {(row[0], stems[number]): cell for row in rows for number, cell in zip(head, row[1:], strict=True)}
    return {pair: None if cell == "yes" else reasons[cell.strip("()")] for pair, cell in cells.items()}


def table(found: dict[Pair, str | None]) -> str:
    """Return the Markdown: techniques down, rungs across, refusals numbered."""
    reasons = list(dict.fromkeys(found[pair] for pair in ALL_PAIRS if found[pair]))
    lines = [f"| | {' | '.join(rung.stem.split('_')[0] for rung in RUNGS)} |", "|---" * (len(RUNGS) + 1) + "|"]
    for technique in TECHNIQUES:
        answers = [found[technique, rung.stem] for rung in RUNGS]
        cells = [f"({reasons.index(answer) + 1})" if answer else "yes" for answer in answers]
        lines.append(f"| {technique} | {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n\n" + "\n".join(f"{n}. {reason}" for n, reason in enumerate(reasons, 1)) + "\n"


def test_every_refusal_and_a_sample_of_what_runs_is_as_the_table_says(images):
    written = written_table()
    assert list(written) == ALL_PAIRS
    numbers = {rung.stem.split("_")[0]: rung.stem for rung in RUNGS}
    sample = [(technique, numbers[str(number)]) for technique, (_, number) in TECHNIQUES.items() if number]
    assert not [pair for pair in sample if written[pair]], "a sample of what runs"
    assert len([reason for reason in written.values() if reason]) > 50
    refusing = {rung.stem for rung in RUNGS if all(written[technique, rung.stem] for technique in TECHNIQUES)}
    assert {rung for _, rung in sample} == set(numbers.values()) - {"3_torch_compile"} - refusing
    tried = [pair for pair in ALL_PAIRS if written[pair] or pair in sample]
    assert attempt(tried, images) == {pair: written[pair] for pair in tried}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_technique_runs_with_a_rung_or_is_refused_with_a_reason(images):
    """All that is compiled in one process, which compiles a model only once, and all others in another."""
    writing = bool(os.environ.get("FABRIC_LADDER_WRITE_TABLE"))
    tried = ALL_PAIRS if writing else ALL_PAIRS[::3]  # 22 rungs: another third of them for each technique
    compiled = [pair for pair in tried if pair[0] == "compile"]
    compiled = [pair for pair in tried if pair[1] == "3_torch_compile"] + compiled
    others = [pair for pair in tried if pair not in compiled]
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(attempt, [compiled, others], [images, images], [True, False])
    found = {pair: answer for answered in answers for pair, answer in answered.items()}
    if writing:
        TABLE.write_text(table(found), encoding="utf-8")
    assert table(written_table() | found) == TABLE.read_text(encoding="utf-8")
