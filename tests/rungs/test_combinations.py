"""Every technique that is a setting runs with every rung, or docs/tables/combinations.csv has the refusal.

`make combinations` tries all pairs and writes the table. The slow test tries every 23rd pair, and of the compiled ones
every 69th. The quick test tries each reason once.
"""

import csv
import io
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image
from support.data_files import write_rows
from support.helpers import MODELS, ROOT, RUNGS, finished, run_script

TABLE = ROOT / "docs" / "tables" / "combinations.csv"
INSTRUCTIONS = "--task instruction-tuning --max_length 512"
TABLE_OF = "--dataset TABLE --problem_type "
TECHNIQUES = {
    "32-true": "--precision 32-true",
    "64-true": "--precision 64-true",
    "16-mixed": "--precision 16-mixed",
    "bf16-mixed": "--precision bf16-mixed",
    "bf16-true": "--precision bf16-true",
    "16-true": "--precision 16-true",
    "16-true, SGD": "--precision 16-true --optimizer sgd",
    "micro-batch by tokens": "--micro_batch_tokens 64",
    "clipping": "--max_grad_norm 1",
    "activation checkpointing": "--activation_checkpointing true",
    "compile": "--compile true",
    "AdamW": "--optimizer adamw",
    "SGD, cosine": "--optimizer sgd --schedule cosine --warmup_steps 1",
    "Adafactor": "--optimizer adafactor",
    "SinkGD": "--optimizer sinkgd",
    "8-bit Adam": "--optimizer adam-8bit",
    "4-bit Adam": "--optimizer adam-4bit",
    "Kahan summation": "--precision bf16-true --kahan_summation true",
    "step in backward": "--step_in_backward true --batch_size 1",
    "optimizer offload": "--optimizer_offload true",
    "memory budget": "--activation_checkpointing true --memory_budget auto",
    "activation offload": "--activation_checkpointing true --activation_offload true",
    "selective checkpointing": "--activation_checkpointing true --selective_checkpointing true",
    "8-bit products": "--float8 true",
    "CUDA graphs": "--cuda_graphs true",
    "tiled MLP": "--mlp_tile 16",
    "offload": "--offload true",
    "last block": "--train_blocks last:1",
    "blocks in turn": "--block_steps 1",
    "LoRA": "--lora true",
    "LoRA, save, sharded": "--lora true --save sharded",
    "LoRA, save, consolidated": "--lora true --save consolidated",
    "LoRA, checkpointing": "--lora true --activation_checkpointing true",
    "LoRA, DoRA": "--lora true --dora true",
    "LoRA in 16 bits": "--lora true --precision bf16-true",
    "4-bit LoRA": "--lora true --quantization nf4",
    "LoRA, streamed layers": "--lora true --stream_layers true",
    "streamed training": "--stream_layers true --optimizer_offload true --step_in_backward true --batch_size 1 "
    "--precision bf16-true",
    "instruction tuning": INSTRUCTIONS,
    "packing": "--packing true --max_length 512",
    "packing, instructions": f"{INSTRUCTIONS} --packing true",
    "instruction tuning, LoRA": f"{INSTRUCTIONS} --lora true",
    "save, sharded": "--save sharded",
    "save, consolidated": "--save consolidated",
    "images (ViT)": f"--task image-classification --model {MODELS / 'vit-small.json'} --dataset IMAGES",
    "class weights": "--class_weights balanced --label_smoothing 0.1",
    "several labels": f"{TABLE_OF}multi_label_classification --label_column labels",
    "regression": f"{TABLE_OF}regression --label_column number",
    "words": "--dataset TABLE --task token-classification",
    "words, packing, LoRA": "--dataset TABLE --task token-classification --packing true --lora true",
}
ALL_PAIRS = [(technique, rung.stem) for technique in TECHNIQUES for rung in RUNGS]
Pair = tuple[str, str]  # pairs of technique and rung


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write a folder of dark and light images, and a table of texts with all kinds of labels; return their paths."""
    folder = tmp_path_factory.mktemp("data")
    for index in range(30):
        path = folder / "images" / ("dark", "light")[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (index + 120 * (index % 2),) * 3).save(path)
    rows = [
        {"text": f"text {index}", "labels": [["a"], ["a", "b"], []][index % 3], "number": index / 7,
         "tokens": ["Ann", f"{index}"], "ner_tags": ["B-PER", "O"]}
        for index in range(60)
    ]  # fmt: skip
    return {"IMAGES": str(folder / "images"), "TABLE": str(write_rows(rows, folder / "texts.jsonl"))}


def attempt(pairs: list[Pair], data: dict[str, str], compiled: bool = False) -> dict[Pair, str | None]:
    """Run each pair in one process, and return its refusal."""
    runs = []
    for technique, rung in pairs:
        settings = [data.get(word, word) for word in TECHNIQUES[technique].split()]
        runs.append([str(ROOT / "src" / f"{rung}.py"), settings])
    runner = ROOT / "tests" / "support" / "combination_runner.py"
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if torch.cuda.is_available() else {}
    done = run_script(runner, json.dumps(runs), cwd=os.getcwd(), timeout=3000, fresh=compiled, **hidden)
    found = json.loads(finished(done).splitlines()[-1])
    bugs = {pair: answer for pair, answer in zip(pairs, found, strict=True) if (answer or "").startswith("BUG")}
    assert not bugs
    return {pair: answer and answer.replace(pair[1], "this rung") for pair, answer in zip(pairs, found, strict=True)}


def written_table() -> dict[Pair, str | None]:
    """Return the table's reason for each refused pair, and None for the others."""
    stems = {rung.stem.split("_")[0]: rung.stem for rung in RUNGS}
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = [(row["technique"], row["rungs"].split(), row["answer"]) for row in csv.DictReader(file)]
    return {(name, stems[rung]): None if answer == "runs" else answer for name, rungs, answer in rows for rung in rungs}


def table(found: dict[Pair, str | None]) -> str:
    """Return the CSV: a row for each technique and answer, with the rungs that answer so."""
    rows = {}
    for technique, rung in ALL_PAIRS:
        rows.setdefault((technique, found[technique, rung] or "runs"), []).append(rung.split("_")[0])
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([("technique", "rungs", "answer"), *((name, " ".join(rungs), answer)
                                                         for (name, answer), rungs in rows.items())])  # fmt: skip
    return file.getvalue()


def is_compiled(pair: Pair) -> bool:
    return "compile" in pair[0] or pair[1] == "3_torch_compile"


def test_each_reason_agrees_with_the_table(data):
    written = written_table()
    assert written.keys() == set(ALL_PAIRS)
    tried = list({reason: pair for pair, reason in written.items() if reason}.values())
    assert len(tried) > 50
    assert attempt(tried, data) == {pair: written[pair] for pair in tried}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_technique_runs_with_a_rung_or_is_refused_with_a_reason(data):
    """One process runs all compiled pairs, because it compiles a model only once."""
    writing = bool(os.environ.get("FABRIC_LADDER_WRITE_TABLE"))
    # there are 29 rungs, so each technique gets other ones
    tried = [pair for place, pair in enumerate(ALL_PAIRS) if writing or place % (69 if is_compiled(pair) else 23) == 0]
    compiled = [pair for pair in tried if is_compiled(pair)]
    others = [pair for pair in tried if pair not in compiled]
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(attempt, [compiled, others], [data, data], [True, False])
    found = {pair: answer for answered in answers for pair, answer in answered.items()}
    if writing:
        TABLE.write_text(table(found), encoding="utf-8")
    assert table(written_table() | found) == TABLE.read_text(encoding="utf-8")
