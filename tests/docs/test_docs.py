"""README, CONTRIBUTING and docs/: the pages build, and what they name and quote is there."""

import ast
import difflib
import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from support.helpers import ROOT, RUNGS, SMALL, run_script

from fabric_ladder.errors import UserError
from fabric_ladder.options import read_words
from fabric_ladder.places import SCRIPTS
from fabric_ladder.rungs import choose_rungs
from fabric_ladder.settings import FACTS
from fabric_ladder.tools.command import COMMANDS

DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *sorted(DOCS.rglob("*.md"))]
GENERATED = [DOCS / "combinations.md"]
NAMES = [rung.stem for rung in RUNGS]
HEADINGS = ["Idea", "In plain PyTorch", "What it saves", "What it costs", "When to take it", "Unchanged", "Code"]
OWN_OPTIONS = ("run_ladder.py", "plan_memory.py")  # they hand all others to the rungs
LAUNCHER_OPTIONS = {"nproc-per-node", "nnodes", "max-restarts", "rdzv-backend", "rdzv-endpoint", "signal", "logdir"}
LAUNCHER_OPTIONS |= {"strict"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def without_code(page: Path) -> str:
    return FENCE.sub("", text_of(page))


def inline_code(page: Path) -> list[str]:
    return [" ".join(code.split()) for code in INLINE.findall(without_code(page))]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=page_id)
written_page = pytest.mark.parametrize("page", [page for page in PAGES if page not in GENERATED], ids=page_id)


# The whole


def test_the_pages_build(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    built = (tmp_path / "site" / "techniques" / "2_grad_accum" / "index.html").read_text(encoding="utf-8")
    assert 'src="http' not in built  # a reader's browser needs no other site
    assert 'rel="stylesheet" href="http' not in built


def test_the_readme_is_short():
    assert len(text_of(README).splitlines()) <= 200


def test_every_rung_has_its_row_and_its_page():
    assert len(NAMES) >= 15
    assert sorted(NAMES) == sorted(path.stem for path in (ROOT / "src").iterdir() if path.name[0].isdigit())
    rows = re.findall(r"^\| \[(\d+_\w+)\]\(src/\1\.py\) \| .*\]\(docs/techniques/(\w+)\.md\)", text_of(README), re.M)
    assert rows == [(name, name) for name in NAMES]
    index = re.findall(r"^\| \[(\d+_\w+)\]\(techniques/\1\.md\)", text_of(DOCS / "index.md"), re.M)
    assert index == NAMES
    assert [page.stem for page in sorted((DOCS / "techniques").glob("[0-9]*.md"))] == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_technique_page_says_all_there_is_to_say(name):
    text = text_of(DOCS / "techniques" / f"{name}.md")
    assert re.findall(r"^## (.*)", text, re.M) == HEADINGS
    assert f"`src/{name}.py`" in text
    sections = dict(zip(HEADINGS, re.split(r"^## .*\n", text, flags=re.M)[1:], strict=True))
    assert "](../gpu.md" in text  # what has been measured there
    docstring = ast.get_docstring(ast.parse((ROOT / "src" / f"{name}.py").read_text(encoding="utf-8")))
    assert FENCE.findall(sections["In plain PyTorch"])[0][0] == "python"
    assert re.search(r"In the package: (.*)", docstring)[1] in re.findall(r"`([\w/]+\.py: \w+)`", sections["Code"])


# Links


def slug(heading: str) -> str:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.*)", without_code(page), re.M)}


@every_page
def test_links_lead_somewhere(page):
    text = INLINE.sub("", without_code(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert found.is_relative_to(ROOT), target
        if anchor and found.suffix != ".png":
            assert anchor in anchors(found), target
        elif anchor:
            assert anchor in ("gh-light-mode-only", "gh-dark-mode-only"), target


# Names of files, and of code


def home_of(path: str) -> Path | None:
    """Return the file or folder of this name: of the project, or of the package."""
    return next((home / path for home in (ROOT, ROOT / "src" / "fabric_ladder") if (home / path).exists()), None)


@cache
def names_in(path: Path) -> set[str]:
    """Return what a module defines: functions, classes and constants, and methods by `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


@every_page
def test_code_that_is_named_is_there(page):
    for code in inline_code(page):
        if found := re.fullmatch(r"([\w/]+\.py): ([\w.]+)", code):
            home = home_of(found[1])
            assert home, code
            assert found[2] in names_in(home), code


@every_page
def test_files_that_are_named_are_there(page):
    ours = re.compile(r"(?:src|docs|configs|benchmarks|scripts|tests|notebooks)/[\w./-]*|[\w/]+\.(?:py|yaml|sbatch)")
    for code in inline_code(page):
        if ours.fullmatch(code):
            assert home_of(code), code


# Commands


def commands(page: Path) -> list[list[str]]:
    """Return the words of each command of a page that runs something of this project."""
    blocks = [block for language, block in FENCE.findall(text_of(page)) if language in ("bash", "")]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines() + inline_code(page)
    found = []
    for line in lines:
        line = re.sub(r"^\s*!", "", line)
        if re.match(r"(python|make|torchrun|fabric run|fabric-ladder|sbatch) ", line):
            words = shlex.split(line, comments=True)
            found.append(words[: words.index(">")] if ">" in words else words)
    return found


def options(path: Path) -> set[str]:
    """Return the options that a script adds to its parser, itself or by a module beside it."""
    source = path.read_text(encoding="utf-8")
    beside = [path.parent / f"{name}.py" for name in re.findall(r"^(?:import|from) (\w+)", source, re.M)]
    sources = [source, *(other.read_text(encoding="utf-8") for other in beside if other.exists())]
    return {name for text in sources for name in re.findall(r'add_argument\(\s*(?:"-\w", )?"--([\w-]+)"', text)}


def check_settings(words: list[str], whole: list[str]) -> None:
    """Check that the rungs know these names and values; `…` stands for what a reader fills in."""
    words = [word for word in words if word not in ("…", "--help")]
    try:
        config = read_words(words).get("config")
    except UserError as error:
        raise AssertionError(f"{shlex.join(whole)}: {error}") from error
    assert config is None or home_of(config) or home_of(f"configs/{config}"), whole


def check_command(words: list[str]) -> None:
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        assert set(words[1:]) <= set(targets), words
        return
    if words[0] == "fabric-ladder":
        name, *rest = words[1:]
        if name.startswith("-"):
            return
        path = choose_rungs([rest.pop(0)])[0] if name == "run" else SCRIPTS / f"{COMMANDS[name]}.py"
        words = ["python", str(path.relative_to(ROOT)), *rest]
    place = next((index for index, word in enumerate(words) if word.endswith(".py") and "/" in word), None)
    if place is None or "<" in words[place]:  # a module of another project, or any rung
        return
    script, rest = ROOT / words[place], words[place + 1 :]
    assert script.is_file(), words
    if script.parent.name == "src":
        return check_settings(rest, words)
    given = [word[2:].split("=")[0] for word in rest if word.startswith("--")]
    others = [name for name in given if name not in options(script)]
    if script.name in OWN_OPTIONS:
        known = {*FACTS, "config", "print_config", "help"}
        others = [name for name in others if name not in known]
    assert not others, words


@every_page
def test_commands_can_be_run(page):
    for words in commands(page):
        check_command(words)


def test_the_makefile_s_paths_are_there():
    for path in re.findall(
        r"\b(?:src|scripts|benchmarks|tests)/[\w./]+", (ROOT / "Makefile").read_text(encoding="utf-8")
    ):
        assert (ROOT / path).exists(), path


def test_the_commands_are_found():
    found = [shlex.join(words) for page in PAGES for words in commands(page)]
    for start in (
        "make run",
        "python src/2_grad_accum.py --config",
        "python scripts/generate.py",
        "python benchmarks/memory_ladder.py",
        "torchrun --nnodes 2",
        "fabric run",
        "fabric-ladder run",
        "sbatch",
    ):
        assert any(command.startswith(start) for command in found), start


@pytest.mark.parametrize(
    "command",
    [
        "python src/2_grad_accum.py --batchsize 2",
        "python src/2_grad_accum.py --precision bf16",
        "python src/2_grad_accum.py --config nothing.yaml",
        "python src/2_gradaccum.py",
        "python scripts/doctor.py --jason",
        "fabric-ladder run 2 --batchsize 2",
        "fabric-ladder doctor --jason",
        "make nothing",
    ],
)
def test_a_wrong_command_is_found(command):
    with pytest.raises(AssertionError):
        check_command(shlex.split(command))


@written_page
def test_options_that_are_named_exist(page):
    known = {*FACTS, "config", "print_config", "help"} | LAUNCHER_OPTIONS
    for folder in ("scripts", "benchmarks"):
        for script in (ROOT / folder).glob("*.py"):
            known |= options(script)
    for code in inline_code(page):
        if code.startswith("--"):
            for name in re.findall(r"--([\w-]+)", code):
                assert name in known, code


# What the README quotes


def body(script: Path) -> list[str]:
    """Return a script's lines below its docstring."""
    source = script.read_text(encoding="utf-8")
    return source.splitlines()[ast.parse(source).body[0].end_lineno :]


def test_the_difference_of_two_rungs_is_theirs():
    [quoted] = re.findall(r"```diff\n(.*?)```", text_of(README), re.DOTALL)
    names = re.findall(r"^(?:---|\+\+\+) (\S+)", quoted, re.M)
    lines = difflib.unified_diff(*(body(ROOT / name) for name in names), *names, n=1, lineterm="")
    assert quoted.splitlines() == [line for line in lines if not line.startswith("@@")]


def skeleton(log: str) -> list[str]:
    """Return a log without its figures and without what belongs to a machine; losses are one line."""
    log = re.sub(r"(^Epoch.*Loss: .*\n)(…\n|Epoch.*Loss: .*\n)*", r"\1", log, flags=re.M)
    log = re.sub(r" cpu: .*", " cpu", log)
    return re.sub(r"\d[\w.+]*", "0", log).splitlines()


def test_the_log_is_what_a_run_prints(tmp_path):
    [quoted] = [block for language, block in FENCE.findall(text_of(README)) if not language]
    assert len(quoted.splitlines()) <= 18
    done = run_script(ROOT / "src" / "2_grad_accum.py", *SMALL, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    notice, _, log = done.stdout.partition("\n")
    assert notice.startswith("No --config and no CUDA GPU")
    assert skeleton(log) == skeleton(quoted)


# Figures


def rows_of(page: Path, heading: str) -> dict[str, list[str]]:
    """Return the cells of the tables under a heading, by the rung that their row begins with."""
    section = re.split(r"^## ", text_of(page), flags=re.M)
    [section] = [part for part in section if part.startswith(f"{heading}\n")]
    rows = re.findall(r"^\| \[?(\d+_\w+).*?\|(.*)\|$", section, re.M)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


def test_the_predicted_peaks_are_those_of_the_benchmark():
    entries = json.loads((ROOT / "benchmarks/results/memory_ladder.json").read_text())["bloom-560m"]["entries"]
    peaks = {
        (entry["rung"], entry["gpus"]): f"{entry['predicted']['total'] / 1e9:.2f}"
        for entry in entries
        if entry["predicted"] and not entry["options"]
    }
    cells = {name: row[-1] for name, row in rows_of(README, "The ladder").items()}
    assert list(cells) == NAMES
    given = {name: re.fullmatch(r"([\d.]+)(?: on (\d) GPUs)?", cell) for name, cell in cells.items()}
    given = {name: found for name, found in given.items() if found}
    assert len(given) >= 10
    for name, found in given.items():
        assert peaks[name, int(found[2] or 1)] == found[1], name


def test_the_quickstart_s_figures_are_those_of_the_results():
    results = rows_of(DOCS / "results.md", "Quickstart")
    for name, cells in rows_of(README, "The ladder").items():
        if found := re.fullmatch(r"([\d.]+ %)(?:, ([\d.]+))?", cells[-2]):
            accuracy, minutes, _ = results[name]
            assert accuracy.startswith(found[1]), name
            assert minutes.startswith(found[2] or ""), name


# What must be told


def test_every_dependency_has_its_reason():
    told = text_of(DOCS / "dependencies.md")
    for name in ("requirements.txt", "requirements-dev.txt"):
        for package in re.findall(r"^([\w.-]+)(?:\[\w+\])?==", (ROOT / name).read_text(encoding="utf-8"), re.M):
            assert re.search(rf"^\| .*\b{re.escape(package)}\b.* \| .+ \|$", told, re.M), package


def test_every_config_is_told():
    told = set(re.findall(r"^\| `(configs/\w+\.yaml)` \|", text_of(DOCS / "settings.md"), re.M))
    assert told == {page_id(path) for path in (ROOT / "configs").glob("*.yaml")}
    for path in (ROOT / "configs").glob("*.yaml"):
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        check_settings([f"--{name}={value}" for name, value in values.items()], [str(path)])
        for line in re.findall(r"^#\s+(python .*)", path.read_text(encoding="utf-8"), re.M):
            check_command(shlex.split(line, comments=True))
