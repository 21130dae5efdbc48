"""Texts of the cells of a notebook, and of a single file; `notebooks.py` fills them in."""

BADGE = """\
[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]\
(https://colab.research.google.com/github/{address}/blob/main/notebooks/{name}.ipynb)"""

BOARD = "```python\n{code}\n```"

DIFFERENCE = "## What it changes\n\n```diff\n{lines}\n```"

FIGURES = """\
## What to expect

{table}

The quickstart runs where there is no GPU; the [README]({url}#the-ladder) says how these figures were found."""

INSTALL = """\
# Adds what is missing here. What is in range stays, torch above all: it must not be replaced once it is imported.
import importlib
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

{needed}
if NEEDED:
    held = [f"torch=={{version('torch')}}"] if find_spec("torch") else []
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *held, *NEEDED], check=True)
    importlib.invalidate_caches()"""

FROM_REPOSITORY = """\
REPOSITORY = "{url}"  # or the folder of a clone
NEEDED = []
if not ({found}):
    if Path("../src/fabric_ladder").is_dir():  # this notebook was opened in a clone
        REPOSITORY = ".."
    if "/OWNER/" in REPOSITORY:
        raise SystemExit("Write the project's address, or the folder of a clone, into REPOSITORY above.")
    NEEDED = [f"fabric-ladder{extras} @ git+{{REPOSITORY}}" if "://" in REPOSITORY else f"{{REPOSITORY}}{extras}"]"""

ACCELERATOR = """\
import torch

for number in range(torch.cuda.device_count()):
    gpu = torch.cuda.get_device_properties(number)
    print(f"GPU {number}: {gpu.name}, {gpu.total_memory / 1e9:.1f} GB, compute capability {gpu.major}.{gpu.minor}")
    if gpu.major < 8:
        print("It only emulates bfloat16: mixed precision takes float16 here, and rungs in pure bfloat16 are slow.")
if not torch.cuda.is_available():
    print("No GPU: the quickstart runs, a small model on synthetic reviews. For a GPU: Runtime > Change runtime type")
    print("in Colab, Settings > Accelerator in Kaggle.")"""

ABOUT_MODULES = """\
## Shared modules

The same for every rung: data set, train loop, log. They are written to `ladder_notebook/`. After a change in one of
them, restart the kernel and run all cells but the one that writes them."""

FOLDER = """\
import os

if Path.cwd().name != "ladder_notebook":  # a second run of this cell stays where it is
    Path("ladder_notebook").mkdir(exist_ok=True)
    os.chdir("ladder_notebook")
sys.path.insert(0, str(Path("src").absolute()))"""

FOLDERS = """\
for folder in {folders}:
    Path(folder).mkdir(parents=True, exist_ok=True)"""

UNPACK = '''\
#@title Unpack files {{ display-mode: "form" }}
import base64
import bz2
import json

# Modules and configs by their paths, as JSON, packed by bz2 and written in base 85; once written, read them there.
PACKED = """
{packed}
"""
for name, text in json.loads(bz2.decompress(base64.b85decode(PACKED.replace("\\n", "")))).items():
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")'''

SETTINGS = """\
# As on a command line, say ["--train_samples", "1000", "--max_length", "512"]. Without any it is the blog's run on a
# GPU, and the quickstart without one.
ARGS = {args}"""

ABOUT_SEVERAL = """\
## Several GPUs

A kernel runs on one device. On a machine with more, say Kaggle's two T4, the rung goes through its script, as below;
the cells after it run it on one."""

SEVERAL = """\
from fabric_ladder.places import SRC

if torch.cuda.device_count() > 1:
    !{{sys.executable}} {{SRC}}/{name} --devices {{torch.cuda.device_count()}} {{" ".join(ARGS)}}"""

PLOT = """\
import matplotlib.pyplot as plt
import pandas as pd

log = pd.read_csv(run.folder / "metrics.csv")
losses = log.dropna(subset="loss")
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.5), layout="constrained")
left.plot(losses["samples"], losses["loss"], color="0.75", label="since the line before")
left.plot(losses["samples"], losses["loss"].ewm(span=5).mean(), color="tab:blue", label="smoothed")
left.set(xlabel="samples seen", ylabel="training loss", title=settings.name)
left.legend(frameon=False)
memory = losses["peak_memory_bytes"] / 1e9
right.plot(losses["samples"], memory, color="tab:orange")
right.set(xlabel="samples seen", ylabel="peak memory in GB", ylim=(0, 1.1 * memory.max()))
right.set_title(run.record.values["hardware"].get("gpu", "CPU"))
plt.show()
print((run.folder / "log.txt").read_text(encoding="utf-8").splitlines()[-1], "·", run.folder)"""

ONE_FILE = '''\
"""{doc}

One file with all that it needs, by scripts/export_notebook.py: run it by `python`, or paste it into a notebook's cell.
It keeps the shared modules in the user's cache folder. Before the first run:
pip install {requirements}
"""

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

FILES = {{}}
{files}

CACHE = Path(os.environ.get("FABRIC_LADDER_CACHE") or "~/.cache/fabric_ladder").expanduser()
HOME = CACHE / "scripts" / hashlib.sha256(repr(FILES).encode()).hexdigest()[:16]
if not HOME.exists():
    HOME.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=HOME.parent))
    for name, text in FILES.items():
        (part / name).parent.mkdir(parents=True, exist_ok=True)
        (part / name).write_text(text, encoding="utf-8")
    try:
        part.rename(HOME)
    except OSError:  # the process of another device was faster
        shutil.rmtree(part)
sys.path.insert(0, str(HOME / "src"))

{code}
'''

NOTEBOOK = {
    "nbformat": 4,
    "nbformat_minor": 5,
    "metadata": {
        "accelerator": "GPU",
        "colab": {"gpuType": "T4", "toc_visible": True},
        "kaggle": {"accelerator": "nvidiaTeslaT4", "isGpuEnabled": True, "isInternetEnabled": True},
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    },
}
