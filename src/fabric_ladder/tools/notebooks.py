"""What a rung needs beside it, gathered from this repository, to travel inside a notebook or a single file."""

import ast
import re
from modulefinder import ModuleFinder
from pathlib import Path

from fabric_ladder.cli import PATHS, choose_config, read_config
from fabric_ladder.errors import UserError
from fabric_ladder.rungs import SRC
from fabric_ladder.runs.prediction import PLANNER

ROOT = SRC.parent
LARGEST = 200_000  # bytes of a file that a config names
# What decides the figures is pinned; of what a notebook's machine comes with, torch stays as it is, and of the rest is
# only added what is missing: a loaded numpy cannot be replaced without a new start of the kernel.
PINNED = "lightning transformers accelerate peft tokenizers huggingface-hub datasets jsonargparse pooch".split()
PINNED += ["watermark", "torchmetrics"]
AS_IT_IS = "torch pandas pyarrow numpy pyyaml pillow requests tqdm matplotlib filelock psutil".split()
MORE = {"12_deepspeed_zero": ["deepspeed"], "14_qlora": ["bitsandbytes"]}


def needed_files(rung: Path, config: str | None) -> dict[str, str]:
    """Return the text of the shared modules and configs that a rung needs, by their paths in the repository's layout.

    `local_dataset_utilities.py` goes to `src/`, too, where a script finds it without being installed; so does the
    planner, which a run on a GPU starts as a process of its own.

    Args:
        rung: The script.
        config: YAML file of settings that goes along with what it names; the quickstart always does.

    Raises:
        UserError: The config cannot be read, or names something beside it that is too large to go along.
    """
    finder = ModuleFinder(path=[str(SRC), str(ROOT)])
    finder.run_script(str(rung))
    finder.import_hook(PLANNER)
    modules = {Path(module.__file__) for module in finder.modules.values() if module.__file__} - {rung}
    files = {}
    for path in sorted(modules, key=lambda path: (path.parent != ROOT, path)):
        relative = path.relative_to(ROOT if path.parent == ROOT else SRC)
        files[f"src/{relative.as_posix()}"] = path.read_text(encoding="utf-8")
    for name in dict.fromkeys(["quickstart.yaml", config or "quickstart.yaml"]):
        files |= _config_files(name)
    if "deepspeed" in MORE.get(rung.stem, ()):
        for path in sorted((ROOT / "configs" / "deepspeed").glob("*.json")):
            files[f"configs/deepspeed/{path.name}"] = path.read_text(encoding="utf-8")
    return files


def _config_files(name: str) -> dict[str, str]:
    _, config = choose_config([], name)
    values = dict(argument.removeprefix("--").split("=", 1) for argument in read_config(config))
    files = {f"configs/{config.name}": config.read_text(encoding="utf-8")}
    for path in (Path(values[name]) for name in PATHS if name in values):
        beside = path.is_relative_to(config.parent)
        if not path.exists() or not (beside or path.is_absolute()):
            continue  # a name, or none
        if path.is_dir() or path.stat().st_size > LARGEST or not beside:
            raise UserError(
                f"{config.name} names {path}, which cannot go along (only files beside it of up to "
                f"{LARGEST // 1000} kB can): upload it, and leave its line out of the config"
            )
        files[f"configs/{path.relative_to(config.parent).as_posix()}"] = path.read_text(encoding="utf-8")
    return files


def pins(names: list[str]) -> list[str]:
    """Return the lines of requirements.txt, or of requirements-dev.txt, for these packages."""
    lines = "".join((ROOT / name).read_text() for name in ("requirements.txt", "requirements-dev.txt"))
    found = {re.split(r"[\[=]", line)[0]: line for line in lines.split() if "==" in line}
    return [found[name] for name in names]


def sections(rung: Path) -> tuple[str, str, list[tuple[str, str]]]:
    """Return a rung's docstring, what stands before its first heading, and the code under each heading.

    The code is that of the `if __name__ == "__main__":` block, without its indent.
    """
    text = rung.read_text(encoding="utf-8")
    tree = ast.parse(text)
    guard = tree.body[-1]
    if not isinstance(guard, ast.If):
        raise ValueError(f"{rung} does not end with its main block")
    lines = text.splitlines()
    imports = "\n".join(lines[tree.body[1].lineno - 1 : guard.lineno - 1]).strip()
    body = "\n".join(line.removeprefix("    ") for line in lines[guard.lineno :])
    first, *rest = re.split(r"^### (.*)\n", body, flags=re.MULTILINE)
    parts = [("Settings and Fabric", first.strip())]
    parts += [(heading, code.strip()) for heading, code in zip(rest[::2], rest[1::2], strict=True)]
    return ast.get_docstring(tree), imports, parts


def with_argument(code: str, argument: str) -> str:
    """Return the code with one more argument for `parse_settings`."""
    return re.sub(r"parse_settings\((\n *)?", lambda found: f"{found[0]}{argument},{found[1] or ' '}", code, count=1)
