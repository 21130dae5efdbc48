"""Write a notebook for each plain script with Fabric: 2_grad_accum.ipynb from src/plain/2_grad_accum.py and texts.yaml.

    python notebooks/build.py [RUNG ...]               # 2 or 2_grad_accum; without a rung: all
    python notebooks/build.py --execute [RUNG ...]     # run the notebooks too, and store what they print

It also writes eight_billion_in_4_gib.ipynb, which runs a rung by the installed package, and has no stored outputs.

Without `--execute`, a code cell that has not changed keeps its outputs. `--execute` replaces BLOOM-560m by a small
BLOOM, and reads IMDb from the folder in FABRIC_LADDER_DATA. It needs neither a GPU nor a network.
"""

import argparse
import ast
import json
import os
import re
import tempfile
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import nbformat
import yaml
from nbclient import NotebookClient

from fabric_ladder.rungs import parent

HERE = Path(__file__).resolve().parent
PLAIN = HERE.parent / "src" / "plain"
TEXTS = yaml.safe_load((HERE / "texts.yaml").read_text(encoding="utf-8"))
LIMIT = "eight_billion_in_4_gib"
METADATA = {
    "accelerator": "GPU",
    "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
    "language_info": {"name": "python"},
}
[LIGHTNING] = re.findall("^lightning==.*", (HERE.parent / "requirements.txt").read_text(encoding="utf-8"), re.MULTILINE)
PREDICTIONS = HERE.parent / "benchmarks" / "results" / "memory_ladder.json"
# predicted GB of the plain scripts: they use the attention of transformers
PEAKS = {
    entry["rung"]: entry["predicted"]["total"] / 1e9
    for entry in json.loads(PREDICTIONS.read_text(encoding="utf-8"))["bloom-560m"]["entries"]
    if entry["options"].startswith("--attention eager")
}
SIZES = {16: "T4", 24: "L4", 40: "A100", 80: "A100"}  # GB of Colab's GPUs; CUDA takes up to 1.5 GB of them
PEAK = 'fabric.print(f"Peak GPU memory'  # the last line of a plain script: it belongs to the bars
EXTRAS = {
    "bitsandbytes": "bitsandbytes accelerate",
    "torchao": "torchao",
    "deepspeed": "deepspeed",
    "with fabric.device": "accelerate",  # transformers needs it to load a model on a GPU
}
# the notebook writes train.csv and test.csv itself
IMPORT = "            from local_dataset_utilities import load_dataset_into_to_dataframe, partition_dataset\n\n"
PRINT_EVERY = "PRINT_EVERY = 160  # reviews"
ONE_PROCESS = """
DEVICES = 1  # a notebook has one process
os.environ["LOCAL_RANK"] = "0"  # it is rank 0, and Fabric starts no others
lightning.fabric.connector._IS_INTERACTIVE = False  # otherwise Fabric refuses this strategy in notebooks
"""
LAUNCH = """
import gc

for name in ("model", "optimizer", "fabric", "strategy"):  # they hold the memory of the first GPU
    globals().pop(name, None)
gc.collect()
torch.cuda.empty_cache()
if torch.cuda.device_count() > 1:
    !torchrun --standalone --nproc-per-node={torch.cuda.device_count()} SCRIPT
else:
    print("There is one GPU or none, and nothing to launch.")
"""
# these two cells are executed and not stored
SMALL_DATA = """
import datasets
import pandas as pd
import torch

torch.manual_seed(0)
parts = {name: datasets.Dataset.from_pandas(pd.read_csv(f"imdb_{name}.csv")) for name in ("train", "test")}
datasets.load_dataset = lambda name: datasets.DatasetDict(parts)
"""
SMALL_SETTINGS = """
MODEL, MAX_LENGTH, LEARNING_RATE, PRINT_EVERY = "model", 128, 20 * LEARNING_RATE, 64
for name, rows in {"train": 640, "test": 200}.items():
    pd.read_csv(f"{name}.csv")[:rows].to_csv(f"{name}.csv", index=False)
"""


def sections(script: str) -> list[tuple[str, str]]:
    """Return heading and code of each part of a plain script: imports, functions, and the sections of its main part.

    The main part loses its indentation, since a notebook is always `__main__`.
    """
    lines = script.replace(IMPORT, "").splitlines()[ast.parse(script).body[0].end_lineno :]
    found = [("Imports and settings", [])]
    main = False
    for line in lines:
        if line.startswith("if __name__"):
            main = True
            found.append(("Fabric", []))
            continue
        if main:
            line = line.removeprefix("    ")
        if line.startswith(PEAK):
            found.append(("Memory", []))
        if title := re.match(r"### (.*)", line):
            found.append((title[1], []))
            continue
        if not main and (definition := re.match(r"(?:def|class) (\w+)", line)):
            found.append((definition[1], []))
        found[-1][1].append(line)
    return [(heading, "\n".join(code).strip("\n")) for heading, code in found]


def scripts() -> list[str]:
    """Return the names of the plain scripts with Fabric, in the order of their numbers."""
    names = sorted(path.stem for path in PLAIN.glob("[1-9]*.py"))
    return sorted(names, key=lambda name: int(name.split("_")[0]))


def below(name: str) -> str | None:
    """Return the name of a script's parent."""
    found = parent(PLAIN / f"{name}.py")
    return found and found.stem


def gpu_of(name: str, script: str) -> tuple[str, str]:
    """Return the GPU that Colab should choose, and the sentences on the GPU that a script needs."""
    peak = PEAKS.get(name)
    size = next(size for size in SIZES if (peak or 0) <= size - 1.5)
    fits = TEXTS["gpu"]["several" if not peak else "small" if size == 16 else "large"].format(size=size, peak=peak)
    number_type = "float16 on a T4" if "BFLOAT16" in script else "bfloat16" if "bfloat16" in script else "32-bit"
    own = TEXTS[name].get("gpu")
    needs_more = size == 16 and (own or number_type == "bfloat16")
    return SIZES[24 if needs_more else size], f"{fits} {own or TEXTS['gpu'][number_type]}"


def links(name: str) -> str:
    """Return links to the page of a technique, to the notebook that it builds on, and to the next one."""
    page = "9_ddp.md#dataparallel" if name == "9_dp" else f"{name}.md"
    following = dict(pairwise(scripts())).get(name)
    notebooks = {"Builds on": below(name), "Next": following}
    found = [f"[The technique](../docs/techniques/{page})"]
    return " · ".join(found + [f"{word}: [{other}]({other}.ipynb)" for word, other in notebooks.items() if other])


def bars(name: str) -> str:
    """Return the code that draws the peak of a script next to that of the nearest parent with a prediction."""
    before = below(name)
    while before and before not in PEAKS:
        before = below(before)
    known = [f'"{before}, predicted": {PEAKS[before]:.2f}'] if before else []
    known += [f'"{name}, predicted": PREDICTED'] if name in PEAKS else []
    return TEXTS["bars"].replace("KNOWN", ", ".join(known)).replace("NAME", name)


def cells_of(name: str) -> list[nbformat.NotebookNode]:
    """Return the cells of a rung's notebook, without outputs."""
    script = (PLAIN / f"{name}.py").read_text(encoding="utf-8")
    texts = TEXTS[name]
    explained = TEXTS["all"] | texts.get("cells", {})
    several = "DEVICES" in script
    cells = []

    def add(heading: str, code: str, text: str = "") -> None:
        title = f"`{heading}`" if re.search(rf"^(def|class) {heading}\b", script, re.MULTILINE) else heading
        cells.append(nbformat.v4.new_markdown_cell(f"## {title}\n\n{(text or explained[heading]).strip()}"))
        cells.append(nbformat.v4.new_code_cell(code.strip("\n")))

    title = ast.get_docstring(ast.parse(script)).splitlines()[0].rstrip(".")
    _, gpu = gpu_of(name, script)
    stored = TEXTS["stored"]["nothing" if runs_on_cuda_only(script) else "small"]
    start = TEXTS["start"].format(name=name, stored=stored.strip())
    paragraphs = [f"# {title}", gpu, links(name), texts["problem"], start]
    cells.append(nbformat.v4.new_markdown_cell("\n\n".join(text.strip() for text in paragraphs)))
    extras = "".join(f" {packages}" for package, packages in EXTRAS.items() if package in script.lower())
    add("Install", f'%pip install -q {LIGHTNING} "transformers>=5.23" datasets matplotlib{extras}')
    add("The idea", texts["code"], texts["idea"])
    cells.append(nbformat.v4.new_markdown_cell(texts["shown"].strip()))
    add("Data", TEXTS["data"])
    for heading, code in sections(script):
        add(heading, f"{code}\n{bars(name)}" if heading == "Memory" else code)
        if heading == "Imports and settings":
            imports = "import lightning.fabric.connector\n\n" if several else ""
            add("Settings of this notebook", imports + PRINT_EVERY + (ONE_PROCESS if several else ""))
            if several:
                cells[-2].source += f" {TEXTS['one process'].strip()}"
        if heading == "Fabric":
            add("Keep the printed lines", TEXTS["keep"])
        if heading == "3 Finetuning":
            add("The loss", TEXTS["picture"])
    without_gradients = re.findall(r"with (torch\.no_grad\(\).*):", script)[-1]
    own = TEXTS["own"].replace("torch.no_grad()", without_gradients)
    add("A text of your own", own.replace(TEXTS["call"], texts.get("call", TEXTS["call"])))
    if several:
        add("All GPUs", f"%%writefile {name}.py\n{script.replace(IMPORT, '').replace('4800', '160')}")
        cells.append(nbformat.v4.new_code_cell(LAUNCH.replace("SCRIPT", f"{name}.py").strip("\n")))
    return cells


def runs_on_cuda_only(script: str) -> bool:
    """Whether a script names CUDA as its accelerator, so that its notebook cannot be run on a CPU."""
    return 'accelerator="cuda"' in script


def notebook_of(name: str) -> nbformat.NotebookNode:
    """Return a rung's notebook; a code cell that is stored already keeps its outputs."""
    gpu, _ = gpu_of(name, (PLAIN / f"{name}.py").read_text(encoding="utf-8"))
    colab = {"gpuType": gpu, "toc_visible": True}
    notebook = nbformat.v4.new_notebook(cells=cells_of(name), metadata=METADATA | {"colab": colab})
    path = HERE / f"{name}.ipynb"
    stored = nbformat.read(path, as_version=4).cells if path.exists() else []
    outputs = {cell.source: cell.outputs for cell in stored if cell.cell_type == "code"}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        if cell.cell_type == "code":
            cell.outputs = outputs.get(cell.source, [])
    return notebook


def limit_notebook() -> nbformat.NotebookNode:
    """Return the notebook about `--gpu_memory_limit`."""
    make = {"text": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    cells = [make[kind](part[kind].rstrip()) for part in TEXTS["limit"] for kind in make]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    return nbformat.v4.new_notebook(cells=cells, metadata=METADATA | {"colab": {"gpuType": "T4", "toc_visible": True}})


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run a notebook in a kernel on small data, and store what its cells print and draw.

    Args:
        folder: `prepare` has written the small model and data into it.
    """
    small = deepcopy(notebook)
    code = [cell for cell in small.cells if cell.cell_type == "code"]
    install, _, *others = code
    only_idea = any(runs_on_cuda_only(cell.source) for cell in code)
    for cell in [install, *(others if only_idea else [])]:
        cell.metadata.tags = ["skip-execution"]
        cell.outputs = []
    if not only_idea:
        settings = next(place for place, cell in enumerate(small.cells) if PRINT_EVERY in cell.source)
        small.cells.insert(settings + 1, nbformat.v4.new_code_cell(SMALL_SETTINGS))
    small.cells.insert(0, nbformat.v4.new_code_cell(SMALL_DATA))
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "TOKENIZERS_PARALLELISM": "false"}
    options = {"resources": {"metadata": {"path": str(folder)}}, "record_timing": False, "coalesce_streams": True}
    NotebookClient(small, timeout=600, kernel_name="python3", **options).execute()
    outputs = {cell.id: cell.get("outputs", []) for cell in small.cells}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in outputs[cell.id] if is_for_readers(output)]


def is_for_readers(output: nbformat.NotebookNode) -> bool:
    """Whether an output is a printed text or a picture: no warning, and no progress bar."""
    return output.get("name") == "stdout" or "image/png" in output.get("data", {})


def prepare(folder: Path, reviews_of_the_model: int = 12_000) -> None:
    """Write imdb_train.csv, imdb_test.csv and the folder `model`: a small BLOOM, trained on other reviews.

    Its classifier is random again, as after loading a pretrained language model.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import BloomConfig, BloomForSequenceClassification, PreTrainedTokenizerFast

    from local_dataset_utilities import load_dataset_into_to_dataframe

    reviews = load_dataset_into_to_dataframe().sample(2500 + reviews_of_the_model, random_state=0)
    reviews[:2000].to_csv(folder / "imdb_train.csv", index=False)
    reviews[2000:2500].to_csv(folder / "imdb_test.csv", index=False)
    others = reviews[2500:]
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<pad>"]
    backend.train_from_iterator(others["text"], trainers.BpeTrainer(vocab_size=3000, special_tokens=special))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>")
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "n_layer": 2, "n_head": 2, "vocab_size": len(tokenizer)}
    model = BloomForSequenceClassification(BloomConfig(**sizes, pad_token_id=tokenizer.pad_token_id))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    inputs = tokenizer(list(others["text"]), truncation=True, max_length=128, padding=True, return_tensors="pt")
    labels = torch.tensor(others["label"].values)
    for _ in range(2):  # epochs
        for rows in torch.randperm(len(labels)).split(50):
            batch = {key: inputs[key][rows] for key in ("input_ids", "attention_mask")}
            model(**batch, labels=labels[rows]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.nn.init.normal_(model.score.weight, std=0.02)
    model.save_pretrained(folder / "model")


def main() -> None:
    """Build the notebooks that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rungs", nargs="*", metavar="RUNG", help="number or name; default: all")
    parser.add_argument("--execute", action="store_true", help="run them too, on a CPU")
    arguments = parser.parse_args()
    names = scripts()
    if arguments.rungs:
        names = [name for name in names if {name, name.split("_")[0]} & set(arguments.rungs)]
    else:
        nbformat.write(limit_notebook(), HERE / f"{LIMIT}.ipynb")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.execute:
            prepare(Path(folder))
        for name in names:
            notebook = notebook_of(name)
            if arguments.execute:
                execute(notebook, Path(folder))
            nbformat.write(notebook, HERE / f"{name}.ipynb")
            print(f"Saved notebooks/{name}.ipynb", flush=True)


if __name__ == "__main__":
    main()
