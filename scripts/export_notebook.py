"""Write a rung as a notebook, or as a single file, that needs nothing beside it.

python scripts/export_notebook.py 2                                    # 2_grad_accum.ipynb: Colab, Kaggle, Jupyter
python scripts/export_notebook.py 13 --config configs/cifar10_vit_small.yaml
python scripts/export_notebook.py 2 --script > grad_accum.py           # to paste into one cell, or to run
python scripts/export_notebook.py all --output_dir notebooks           # one for each rung

The shared modules and the quickstart's config go along, and so does --config with the small files that it names: packed
into one cell, or by --readable in a cell for each.
"""

import base64
import bz2
import json
import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from fabric_ladder.advice import show_errors
from fabric_ladder.checkpoints.export import Arguments
from fabric_ladder.errors import UserError
from fabric_ladder.rungs import RUNGS, choose_rungs
from fabric_ladder.tools.notebooks import AS_IT_IS, MORE, PINNED, needed_files, pins, sections, with_argument
from fabric_ladder.tools.outputs import check_outputs, write_outputs

INSTALL = """\
# Exact versions of what decides the figures. The machine's own torch stays, and of the rest is added what is missing.
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

PINNED = "{pinned}"
AS_IT_IS = "{as_it_is}"


def found(pin):
    try:
        return version(pin.split("==")[0].split("[")[0])
    except PackageNotFoundError:
        return None


missing = [pin for pin in PINNED.split() if found(pin) != pin.split("==")[1]]
missing += [pin for pin in AS_IT_IS.split() if not found(pin)]
if missing:
    own = [f"torch=={{found('torch')}}"] if found("torch") else []  # holds pip back from replacing it
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *own, *missing], check=True)
"""

ACCELERATOR = """\
import torch

for number in range(torch.cuda.device_count()):
    gpu = torch.cuda.get_device_properties(number)
    print(f"GPU {number}: {gpu.name}, {gpu.total_memory / 1e9:.1f} GB, compute capability {gpu.major}.{gpu.minor}")
    if gpu.major < 8:
        print("It only emulates bfloat16: mixed precision takes float16 here, and rungs in pure bfloat16 are slow.")
if not torch.cuda.is_available():
    print("No GPU: the quickstart runs, a small model on synthetic reviews. For a GPU: Runtime > Change runtime type")
    print("in Colab, Settings > Accelerator in Kaggle.")
"""

FOLDER = """\
import os
import sys
from pathlib import Path

if Path.cwd().name != "ladder_notebook":  # a second run of this cell stays where it is
    Path("ladder_notebook").mkdir(exist_ok=True)
    os.chdir("ladder_notebook")
sys.path.insert(0, str(Path("src").absolute()))
"""

FOLDERS = """\
for folder in {folders}:
    Path(folder).mkdir(parents=True, exist_ok=True)
"""

UNPACK = '''\
import base64
import bz2
import json

# Python modules and configs by their paths, as JSON that is packed by bz2 and written in base 85. Once this cell has
# run, read them in ladder_notebook/. With a cell for each instead: scripts/export_notebook.py {name} --readable
PACKED = """
{packed}
"""
for name, text in json.loads(bz2.decompress(base64.b85decode(PACKED.replace("\\n", "")))).items():
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")
'''

SETTINGS = """\
# As on a command line, say ["--train_samples", "1000", "--max_length", "512"]. Without any it is the blog's run on a
# GPU, and the quickstart without one.
ARGS = {args}
"""

SEVERAL = """\
if torch.cuda.device_count() > 1:
    !python src/{name}.py --devices {{torch.cuda.device_count()}} {{" ".join(ARGS)}}
"""

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
print((run.folder / "log.txt").read_text(encoding="utf-8").splitlines()[-1], "·", run.folder)
"""

ONE_FILE = '''\
"""{doc}

One file with all that it needs, by scripts/export_notebook.py: run it by `python`, or paste it into a notebook's cell.
It keeps the shared modules in the user's cache folder. Before the first run:
pip install {pins}
"""

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

FILES = {{}}
{files}

CACHE = Path(os.environ.get("FABRIC_LADDER_CACHE") or Path.home() / ".cache" / "fabric_ladder")
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


def notebook(rung: Path, config: str | None, readable: bool = False) -> str:
    """Return the text of a rung's notebook; the same sources give the same text.

    Args:
        rung: The script.
        config: YAML file of settings that goes along and is used.
        readable: Give each module a cell of its own, instead of one for all, of a quarter of their size.
    """
    doc, imports, parts = sections(rung)
    title = doc.split("\n\n")[0]
    pinned = " ".join(pins(PINNED + MORE.get(rung.stem, [])))
    arguments = [] if config is None else ["--config", f"configs/{Path(config).name}"]
    files, several = needed_files(rung, config), any('devices="auto"' in code for _, code in parts)
    if several:
        files[f"src/{rung.name}"] = rung.read_text(encoding="utf-8")

    cells = [
        new_markdown_cell(f"# {doc}"),
        new_markdown_cell("## Set-up"),
        _code(INSTALL.format(pinned=pinned, as_it_is=" ".join(pins(AS_IT_IS)))),
        _code(ACCELERATOR),
        new_markdown_cell(
            "## Shared modules\n\nThe same for every rung: data set, train loop, log. They are written to "
            "`ladder_notebook/`. After a change in one of them, restart the kernel and run all cells"
            + ("." if readable else " but the one that writes them.")
        ),
        _code(FOLDER),
        *(_readable(files) if readable else [_packed(files, rung.stem)]),
        new_markdown_cell("## Settings"),
        _code(SETTINGS.format(args=arguments)),
    ]
    if several:
        cells += [
            new_markdown_cell(
                "## Several GPUs\n\nA kernel runs on one device. On a machine with more, say Kaggle's two T4, the rung "
                f"goes through its script: `!python src/{rung.name} --devices 2`. The cells below run it on one."
            ),
            _code(SEVERAL.format(name=rung.stem)),
        ]
    cells += [new_markdown_cell("## The rung"), _code(f'"""{title}"""\n\n{imports}')]
    for heading, code in parts:
        cells += [new_markdown_cell(f"### {heading}"), _code(with_argument(code, "args=ARGS"))]
    cells += [new_markdown_cell("## The run's log"), _code(PLOT)]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    return nbformat.writes(new_notebook(cells=cells, metadata=_metadata(cells))) + "\n"


def _packed(files: dict[str, str], name: str):
    """Return the cell that unpacks files: bz2 packs them best, and alike on every machine."""
    text = base64.b85encode(bz2.compress(json.dumps(files, ensure_ascii=False).encode())).decode()
    return _code(UNPACK.format(name=name, packed="\n".join(re.findall(".{1,1000}", text))), hidden=True)


def _readable(files: dict[str, str]) -> list:
    folders = tuple(sorted({Path(name).parent.as_posix() for name in files}))
    cells = [_code(f"%%writefile {name}\n{content}", hidden=True) for name, content in files.items()]
    return [_code(FOLDERS.format(folders=folders)), *cells]


def _metadata(cells: list) -> dict:
    folded = [cell.id for cell in cells if cell.source.startswith("## Shared modules")]
    return {
        "accelerator": "GPU",
        "colab": {"gpuType": "T4", "toc_visible": True, "collapsed_sections": folded},
        "kaggle": {"accelerator": "nvidiaTeslaT4", "isGpuEnabled": True, "isInternetEnabled": True},
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }


def _code(source: str, hidden: bool = False):
    return new_code_cell(source.rstrip("\n"), metadata={"jupyter": {"source_hidden": True}} if hidden else {})


def script(rung: Path, config: str | None) -> str:
    """Return the text of one file that holds a rung and all that it needs."""
    code = rung.read_text(encoding="utf-8")
    doc, *_ = sections(rung)
    code = code.split('"""\n', 1)[1].strip()
    if config:
        code = with_argument(code, f'config="{Path(config).name}"')
    texts = needed_files(rung, config)
    files = "".join(f"\nFILES[{name!r}] = {_literal(text)}\n" for name, text in texts.items())
    install = " ".join(pins(["torch", *PINNED, *MORE.get(rung.stem, []), *AS_IT_IS[1:]]))
    return ONE_FILE.format(doc=doc, pins=install, files=files.strip("\n"), code=code)


def _literal(text: str) -> str:
    """Return a literal that can be read, too."""
    readable = "'''" not in text and not text.endswith(("'", "\\")) and "\r" not in text
    return f"r'''{text}'''" if readable else repr(text)


if __name__ == "__main__":
    show_errors()
    parser = Arguments(description=__doc__.split("\n\n")[0])
    parser.add_argument("rungs", nargs="+", metavar="RUNG", help="number or name of a rung, or `all`")
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings that goes along and is used")
    parser.add_argument("--output_dir", default=".", metavar="FOLDER", help="where to write; default: here")
    parser.add_argument("--readable", action="store_true", help="give each shared module a cell of its own")
    parser.add_argument("--script", action="store_true", help="print one rung as a single file instead")
    arguments = parser.parse_args()
    rungs = RUNGS if arguments.rungs == ["all"] else choose_rungs(arguments.rungs)
    if arguments.script:
        if len(rungs) > 1:
            raise UserError("--script prints one rung: name one")
        print(script(rungs[0], arguments.config), end="")
    else:
        outputs = {str(Path(arguments.output_dir) / f"{rung.stem}.ipynb"): rung for rung in rungs}
        check_outputs({f"{rung.stem} to": name for name, rung in outputs.items()})
        write_outputs({name: notebook(rung, arguments.config, arguments.readable) for name, rung in outputs.items()})
        for name in outputs:
            print(f"Saved {name}")
