"""A rung as a notebook: its technique, what it changes and what to expect of it, then its code; or as a single file."""

import ast
import base64
import bz2
import difflib
import json
import re
import textwrap
from pathlib import Path

from fabric_ladder.errors import UserError
from fabric_ladder.options import PATHS, choose_config, read_config
from fabric_ladder.places import CONFIGS, PACKAGE
from fabric_ladder.rungs import parent
from fabric_ladder.tools import notebook_cells as cells
from fabric_ladder.tools.project import ROOT, describe_project

LARGEST = 200_000  # bytes of a file that a config names
EXTRAS = {  # the optional library without which a rung does not run
    "12_deepspeed_zero": "deepspeed", "14_qlora": "bitsandbytes", "18_low_bit_optimizer": "bitsandbytes",
    "22_float8": "torchao",
}  # fmt: skip
LEFT_OUT = ("comparing", "tools", "configs", "scripts", "src")  # folders of the package that no run needs
LINE = 10_000  # characters in a line of packed files: few lines, which editors still show


def notebook(rung: Path, config: str | None, self_contained: bool = False, readable: bool = False) -> str:
    """Return the text of a rung's notebook; the same sources give the same text.

    Args:
        rung: The script.
        config: YAML file of settings that is used, and goes along unless it is one of the project's.
        self_contained: Carry the shared modules, instead of installing them from the repository.
        readable: Give each file that goes along a cell of its own, instead of one for all.
    """
    doc, imports, parts = sections(rung)
    files = needed_files(rung, config) if self_contained else _config_files(config) if config else {}
    about = [_introduction(rung, doc), _difference(rung), _figures(rung)]
    content = [_text(text) for text in [*about, "## Set-up"] if text]
    content += [_code(_install(rung, self_contained)), _code(cells.ACCELERATOR)]
    if self_contained:
        content += [_text(cells.ABOUT_MODULES), _code(cells.FOLDER)]
    if files:
        content += _readable(files) if readable else [_packed(files)]
    arguments = ["--config", f"configs/{Path(config).name}"] if config else []
    content += [_text("## Settings"), _code(cells.SETTINGS.format(args=arguments))]
    if any('devices="auto"' in code for _, code in parts):
        content += [_text(cells.ABOUT_SEVERAL), _code(cells.SEVERAL.format(name=rung.name))]
    content += [_text("## The rung"), _code(f'"""{doc.splitlines()[0]}"""\n\n{imports}')]
    for heading, code in parts:
        content += [_text(f"### {heading}"), _code(with_argument(code, "args=ARGS"))]
    content += [_text("## The run's log"), _code(cells.PLOT)]
    for number, cell in enumerate(content):
        cell["id"] = f"cell-{number}"
    return json.dumps(cells.NOTEBOOK | {"cells": content}, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def script(rung: Path, config: str | None) -> str:
    """Return the text of one file that holds a rung and all that it needs."""
    doc, *_ = sections(rung)
    code = rung.read_text(encoding="utf-8").split('"""\n', 1)[1].strip()
    if config:
        code = with_argument(code, f'config="{Path(config).name}"')
    texts = needed_files(rung, config).items()
    files = "\n\n".join(f"FILES[{name!r}] = {_literal(text)}" for name, text in texts)
    install = " ".join(f'"{line}"' for line in _requirements(rung))
    return cells.ONE_FILE.format(doc=doc, requirements=install, files=files, code=code)


def _literal(text: str) -> str:
    """Return a literal that can be read, too."""
    readable = "'''" not in text and not text.endswith(("'", "\\")) and "\r" not in text
    return f"r'''{text}'''" if readable else repr(text)


def _text(source: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "source": source.strip("\n").splitlines(keepends=True)}


def _code(source: str, folded: bool = False) -> dict:
    """Return a cell; Jupyter and Colab show the title alone of one that is folded."""
    metadata = {"jupyter": {"source_hidden": True}, "cellView": "form", "tags": ["hide-input"]} if folded else {}
    return _text(source) | {"cell_type": "code", "execution_count": None, "metadata": metadata, "outputs": []}


def _packed(files: dict[str, str]) -> dict:
    """Return the cell that unpacks files: of what Python unpacks, bz2 packs sources best, and alike everywhere."""
    text = base64.b85encode(bz2.compress(json.dumps(files, ensure_ascii=False).encode())).decode()
    return _code(cells.UNPACK.format(packed="\n".join(re.findall(f".{{1,{LINE}}}", text))), folded=True)


def _readable(files: dict[str, str]) -> list[dict]:
    folders = sorted({Path(name).parent.as_posix() for name in files})
    cell = cells.FOLDERS.format(folders=folders)
    return [_code(cell), *(_code(f"%%writefile {name}\n{text}", folded=True) for name, text in files.items())]


def _install(rung: Path, self_contained: bool) -> str:
    extra = EXTRAS.get(rung.stem)
    if self_contained:
        needed = f"NEEDED = {_requirements(rung)}"
    else:
        found = " and ".join(f'find_spec("{module}")' for module in ("fabric_ladder", extra) if module)
        extras = f"[{extra}]" if extra else ""
        needed = cells.FROM_REPOSITORY.format(url=describe_project().url, found=found, extras=extras)
    return cells.INSTALL.format(needed=needed)


def _requirements(rung: Path) -> list[str]:
    project = describe_project()
    extra = EXTRAS.get(rung.stem)
    return project.needed + [line for line in project.optional if extra and line.startswith(extra)]


def _introduction(rung: Path, doc: str) -> str:
    """Return the docstring as Markdown, below a link that opens the notebook in Colab."""
    first, *paragraphs = doc.split("\n\n")
    title, _, what = first.partition(" · ")[2].partition(": ")
    shown = [cells.BOARD.format(code=textwrap.dedent(text)) if text.startswith("    ") else text for text in paragraphs]
    badge = cells.BADGE.format(address=describe_project().url.removeprefix("https://github.com/"), name=rung.stem)
    return "\n\n".join([badge, f"# {rung.stem.split('_')[0]} · {title}", what[:1].upper() + what[1:], *shown])


def _difference(rung: Path) -> str:
    """Return the lines that the rung changes in the one it builds on; nothing for the first."""
    if not (before := parent(rung)):
        return ""
    bodies = (path.read_text(encoding="utf-8").split('"""\n', 1)[1].splitlines() for path in (before, rung))
    lines = difflib.unified_diff(*bodies, f"src/{before.name}", f"src/{rung.name}", n=1, lineterm="")
    return cells.DIFFERENCE.format(lines="\n".join(line for line in lines if not line.startswith("@@")))


def _figures(rung: Path) -> str:
    """Return the rung's row of the README's table, with links that lead to the repository."""
    project = describe_project()
    row = re.search(rf"^\| \[{rung.stem}\].*", project.readme, re.MULTILINE)
    head = re.search(r"^\| rung .*\n\|.*", project.readme, re.MULTILINE)
    if not (row and head):
        return ""
    table = re.sub(r"\]\((?!http)", f"]({project.url}/blob/main/", f"{head[0]}\n{row[0]}")
    return cells.FIGURES.format(table=table, url=project.url)


def needed_files(rung: Path, config: str | None) -> dict[str, str]:
    """Return the text of the shared modules and configs that a rung needs, by their paths in the repository's layout.

    `local_dataset_utilities.py` goes to `src/`, too, where a script finds it without being installed.

    Args:
        rung: The script, which goes along if it starts processes of its own.
        config: YAML file of settings that goes along with what it names; the quickstart always does.

    Raises:
        UserError: The config cannot be read, or names something beside it that is too large to go along.
    """
    modules = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in LEFT_OUT]
    utilities = next(path for home in (ROOT, PACKAGE.parent) if (path := home / "local_dataset_utilities.py").exists())
    paths = {f"src/{utilities.name}": utilities}
    paths |= {f"src/{path.relative_to(PACKAGE.parent).as_posix()}": path for path in modules}
    if 'devices="auto"' in rung.read_text(encoding="utf-8"):
        paths[f"src/{rung.name}"] = rung
    if EXTRAS.get(rung.stem) == "deepspeed":
        paths |= {f"configs/deepspeed/{path.name}": path for path in sorted(CONFIGS.glob("deepspeed/*.json"))}
    files = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    return files | _config_files("quickstart.yaml", ours=True) | (_config_files(config, ours=True) if config else {})


def _config_files(name: str, ours: bool = False) -> dict[str, str]:
    """Return the text of a config and of the files that it names; of the project's own none unless `ours`."""
    _, config = choose_config(name)
    values = read_config(config)
    if config.is_relative_to(CONFIGS) and not ours:
        return {}
    files = {f"configs/{config.name}": config.read_text(encoding="utf-8")}
    for path in (Path(values[name]) for name in PATHS if values.get(name)):
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
