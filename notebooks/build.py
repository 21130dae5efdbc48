"""Write a notebook for each plain script with Fabric: 2_grad_accum.ipynb from src/plain/2_grad_accum.py and texts.yaml.

    python notebooks/build.py [RUNG ...]               # 2 or 2_grad_accum; without a rung: all
    python notebooks/build.py --execute [RUNG ...]     # run the notebooks too, and store what they print

Without `--execute`, a code cell that has not changed keeps its outputs. `--execute` replaces BLOOM-560m by a small
BLOOM, and reads IMDb from the folder in FABRIC_LADDER_DATA. It needs neither a GPU nor a network.
"""

import argparse
import ast
import os
import re
import tempfile
from copy import deepcopy
from pathlib import Path

import nbformat
import yaml
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
PLAIN = HERE.parent / "src" / "plain"
TEXTS = yaml.safe_load((HERE / "texts.yaml").read_text(encoding="utf-8"))
METADATA = {
    "accelerator": "GPU",
    "colab": {"gpuType": "T4", "toc_visible": True},
    "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
    "language_info": {"name": "python"},
}
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
        if title := re.match(r"### (.*)", line):
            found.append((title[1], []))
            continue
        if not main and (definition := re.match(r"(?:def|class) (\w+)", line)):
            found.append((definition[1], []))
        found[-1][1].append(line)
    return [(heading, "\n".join(code).strip("\n")) for heading, code in found]


def gpu_sentence(script: str) -> str:
    """Return which GPU a script needs."""
    if "BFLOAT16" in script:
        return TEXTS["gpu"]["float16 on a T4"]
    return TEXTS["gpu"]["bfloat16" if "bfloat16" in script else "32-bit"]


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
    gpu = texts.get("gpu", gpu_sentence(script))
    stored = TEXTS["stored"]["nothing" if runs_on_cuda_only(script) else "small"]
    start = TEXTS["start"].format(name=name, gpu=gpu.strip(), stored=stored.strip())
    cells.append(nbformat.v4.new_markdown_cell(f"# {title}\n\n{texts['problem'].strip()}\n\n{start.strip()}"))
    extras = "".join(f" {packages}" for package, packages in EXTRAS.items() if package in script.lower())
    add("Install", f'%pip install -q lightning "transformers>=5.23" datasets matplotlib{extras}')
    add("The idea", texts["code"], texts["idea"])
    cells.append(nbformat.v4.new_markdown_cell(texts["shown"].strip()))
    add("Data", TEXTS["data"])
    for heading, code in sections(script):
        add(heading, code)
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
    notebook = nbformat.v4.new_notebook(cells=cells_of(name), metadata=METADATA)
    path = HERE / f"{name}.ipynb"
    stored = nbformat.read(path, as_version=4).cells if path.exists() else []
    outputs = {cell.source: cell.outputs for cell in stored if cell.cell_type == "code"}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        if cell.cell_type == "code":
            cell.outputs = outputs.get(cell.source, [])
    return notebook


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
    names = sorted((path.stem for path in PLAIN.glob("[1-9]*.py")), key=lambda name: int(name.split("_")[0]))
    if arguments.rungs:
        names = [name for name in names if {name, name.split("_")[0]} & set(arguments.rungs)]
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
