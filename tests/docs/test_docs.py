"""The pages build; their links, names, commands, options and quotations are correct."""

import ast
import difflib
import re
import shlex
import subprocess
import sys
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest
import yaml
from support.helpers import ROOT, RUNGS, finished, run_script

from fabric_ladder.errors import UserError
from fabric_ladder.foreign import DEPENDENT, OWN_OPTIONS
from fabric_ladder.options import read_words
from fabric_ladder.places import SCRIPTS
from fabric_ladder.rungs import choose_rungs
from fabric_ladder.settings import FACTS
from fabric_ladder.tools.command import COMMANDS

DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *sorted(DOCS.rglob("*.md"))]
NAMES = [rung.stem for rung in RUNGS]
HEADINGS = ["Problem", "Idea", "In code", "Run it", "Memory", "Price and limits", "When to use it"]
HEADINGS += ["What stays the same", "Sources"]
QUICKSTART = ROOT / "benchmarks" / "results" / "runs" / "quickstart"
RUNG_OPTIONS = ("run_ladder.py", "plan_memory.py")  # scripts that also take the options of rungs
KNOWN = {*FACTS, *DEPENDENT, *OWN_OPTIONS}
OTHERS = set(
    "nproc-per-node nnodes max-restarts rdzv-backend rdzv-endpoint signal logdir strict include local_rank".split()
)  # options of launchers
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ANSWER = re.compile(  # a command of the planner, and its table folded below it
    r"^```bash\n(python scripts/plan_memory\.py [^`]*)```\n\n<details markdown>\n<summary>.*\n\n```\n([^`]*)```",
    re.MULTILINE,
)
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


# Pages


def test_the_pages_build(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    built = (tmp_path / "site" / "techniques" / "2_grad_accum" / "index.html").read_text(encoding="utf-8")
    assert not re.search(r'(?:src|rel="stylesheet" href)="http', built)  # the pages work without the network
    assert 'rel="next" href="../3_torch_compile/"' in built  # the next rung, not the next of its group


def test_every_rung_has_its_page_and_the_readme_is_short():
    assert len(text_of(README).splitlines()) <= 182 + len(NAMES)
    assert sorted(NAMES) == sorted(path.stem for path in (ROOT / "src").iterdir() if path.name[0].isdigit())
    pages = [page.stem for page in (DOCS / "techniques").glob("[0-9]*.md")]
    assert sorted(pages) == sorted(["0_pytorch", *NAMES])


@pytest.mark.parametrize("name", NAMES)
def test_a_technique_page_has_its_sections(name):
    text = text_of(DOCS / "techniques" / f"{name}.md")
    assert re.findall(r"^## (.*)", text, re.M) == HEADINGS
    for theme in ("light", "dark"):
        assert f"](../pictures/{name}_{theme}.png#gh-{theme}-mode-only)" in text
        assert (DOCS / "pictures" / f"{name}_{theme}.png").stat().st_size < 60_000
    sections = dict(zip(HEADINGS, re.split(r"^## .*\n", text, flags=re.M)[1:], strict=True))
    assert "](../gpu.md" in text
    plain = re.sub(r"[#\s\\,()]", "", text_of(ROOT / "src" / "plain" / f"{name}.py"))
    for language, code in FENCE.findall(sections["In code"]):
        assert language == "python"
        assert [line for line in code.splitlines() if re.sub(r"[#\s\\,()]", "", line) not in plain] == []
    wide = [(72 if language else 96, code.splitlines()) for language, code in FENCE.findall(text)]
    assert [line for width, lines in wide for line in lines if len(line) > width] == []  # the site cuts them off
    log = "".join(path.read_text(encoding="utf-8") for path in (QUICKSTART / name).rglob("log.txt"))
    printed = "".join(code for language, code in FENCE.findall(ANSWER.sub("", sections["Run it"])) if not language)
    assert [line for line in printed.splitlines() if line not in log] == []
    assert printed or name == "12_deepspeed_zero", "the log of the quickstart"


def answers() -> dict[str, tuple[str, str]]:
    """Return the planner's commands of the technique pages, each with its folded answer."""
    found = {}
    for name in NAMES:
        for pair in ANSWER.findall(text_of(DOCS / "techniques" / f"{name}.md")):
            found[f"{name}-{len(found)}"] = pair
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", answers())
def test_the_planner_prints_the_folded_answer(name):
    command, answer = answers()[name]
    _, script, *options = shlex.split(command.replace("\\\n", " "))
    out = finished(run_script(ROOT / script, *options, cwd=ROOT, COLUMNS=96, HF_HUB_OFFLINE=1))
    printed = [line.rstrip() for line in out.splitlines()]
    assert [line for line in answer.splitlines() if line not in printed] == []


def test_the_page_without_a_rung_shows_all_lines_that_fabric_changes():
    text = text_of(DOCS / "techniques" / "0_pytorch.md")
    assert re.findall(r"^## (.*)", text, re.M) == HEADINGS
    scripts = [text_of(ROOT / "src" / "plain" / f"{name}.py") for name in ("0_pytorch", "1_batch_size_1")]
    code = [script.splitlines()[ast.parse(script).body[0].end_lineno :] for script in scripts]
    changed = [line for line in difflib.ndiff(*code) if line[0] in "-+" and "print(" not in line]
    [shown] = [block.splitlines() for language, block in FENCE.findall(text) if language == "diff"]
    shown, changed = (  # in one line for each sign, because the page breaks long lines
        [re.sub(r"\n[-+]|[\s\\]", "", "\n".join(group)) for _, group in groupby(lines, lambda line: line[0])]
        for lines in (filter(None, shown), changed)
    )
    assert shown == changed


# Links


def slug(heading: str) -> str:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.*)", without_code(page), re.M)}


@pytest.mark.parametrize("page", [page for page in PAGES if DOCS not in page.parents], ids=page_id)
def test_links_lead_somewhere(page):  # mkdocs checks the links of docs/
    text = INLINE.sub("", without_code(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert target.startswith("https://") or (found.exists() and found.is_relative_to(ROOT)), target
        assert not anchor or target.startswith("https://") or anchor in anchors(found), target


# Files and code


def find_file(path: str) -> Path | None:
    """Return the file or folder with this name in the project or in the package."""
    return next((home / path for home in (ROOT, ROOT / "src" / "fabric_ladder") if (home / path).exists()), None)


@every_page
def test_named_files_and_code_exist(page):
    ours = re.compile(r"(?:src|docs|configs|benchmarks|scripts|tests|notebooks)/[\w./-]*|[\w/]+\.(?:py|yaml|sbatch)")
    for code in inline_code(page):
        path, _, names = code.partition(": ")
        if ours.fullmatch(path):
            assert find_file(path), code
            for name in names.split(".") if re.fullmatch(r"[\w.]+", names) else []:
                assert re.search(rf"^ *(?:class|def) {name}\b|^{name}\b.* = ", text_of(find_file(path)), re.M), code


# Commands


def commands(page: Path) -> list[list[str]]:
    """Return the words of each command of a page that runs a program of this project."""
    blocks = [block for language, block in FENCE.findall(text_of(page)) if language in ("bash", "")]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines() + inline_code(page)
    found = []
    for line in lines:
        line = re.sub(r"^\s*!", "", line)
        if re.match(r"(python|make|torchrun|fabric run|fabric-ladder|sbatch) ", line):
            words = shlex.split(line, comments=True)
            found.append(words[: words.index(">")] if ">" in words else words)
    return found


@cache
def options(path: Path) -> set[str]:
    """Return the options that a script or a module of its folder adds to a parser."""
    modules = [path.parent / f"{name}.py" for name in re.findall(r"^(?:import|from) (\w+)", text_of(path), re.M)]
    sources = [text_of(module) for module in (path, *modules) if module.exists()]
    return {name for text in sources for name in re.findall(r'add_argument\(\s*(?:"-\w", )?"--([\w-]+)"', text)}


def check_settings(words: list[str], whole: list[str]) -> None:
    """Check that rungs accept these names and values. `…` stands for the reader's value."""
    words = [word for word in words if word not in ("…", "--help")]
    try:
        config = read_words(words).get("config")
    except UserError as error:
        raise AssertionError(f"{shlex.join(whole)}: {error}") from error
    assert config is None or find_file(config) or find_file(f"configs/{config}"), whole


def check_command(words: list[str]) -> None:
    if words[0] == "make":
        known = re.findall(r"^([\w-]+)(?::| \?=)", text_of(ROOT / "Makefile"), re.M)
        assert {word.partition("=")[0] for word in words[1:]} <= set(known), words
        return
    if words[0] == "fabric-ladder":
        name, *rest = words[1:]
        if name.startswith("-"):
            return
        path = choose_rungs([rest.pop(0)])[0] if name == "run" else SCRIPTS / f"{COMMANDS[name]}.py"
        words = ["python", str(path.relative_to(ROOT)), *rest]
    place = next((index for index, word in enumerate(words) if word.endswith(".py") and "/" in word), None)
    if place is None or "<" in words[place]:  # a module of another project, or a placeholder for a rung
        return
    script, rest = ROOT / words[place], words[place + 1 :]
    assert script.is_file(), words
    if script.parent.name == "src":
        return check_settings(rest, words)
    given = {word[2:].split("=")[0] for word in rest if word.startswith("--")}
    assert given <= options(script) | (KNOWN if script.name in RUNG_OPTIONS else set()), words


@every_page
def test_commands_can_be_run(page):
    for words in commands(page):
        check_command(words)


def test_commands_and_paths_are_found():
    found = [shlex.join(words) for page in PAGES for words in commands(page)]
    for start in (
        "make run",
        "python src/",
        "python benchmarks/",
        "python scripts/",
        "torchrun",
        "fabric run",
        "sbatch",
    ):
        assert any(command.startswith(start) for command in found), start
    for path in re.findall(r"\b(?:src|scripts|benchmarks|tests)/[\w./]+", text_of(ROOT / "Makefile")):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    "command",
    [
        "python src/2_grad_accum.py --batchsize 2",
        "python src/2_gradaccum.py",
        "fabric-ladder doctor --jason",
        "make no",
    ],
)
def test_a_wrong_command_is_found(command):
    with pytest.raises(AssertionError):
        check_command(shlex.split(command))


@every_page
def test_named_options_exist(page):
    scripts = [*(ROOT / "scripts").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    named = {name for code in inline_code(page) if code.startswith("--") for name in re.findall(r"--([\w-]+)", code)}
    assert named <= KNOWN | OTHERS | set().union(*map(options, scripts))


# Quotations of the README


def test_the_quoted_log_is_that_of_the_stored_run():
    [quoted] = [block.splitlines() for language, block in FENCE.findall(text_of(README)) if not language]
    log = text_of(QUICKSTART / "2_grad_accum" / "0.001" / "123" / "log.txt").splitlines()
    assert len(quoted) >= 4
    assert [line for line in quoted if line != "…" and line not in log] == []


# Dependencies and configs


def test_every_dependency_has_its_reason():
    for name in ("requirements.txt", "requirements-dev.txt"):
        text = text_of(ROOT / name)
        for package in re.findall(r"^([\w.-]+)(?:\[\w+\])?==", text, re.M):
            assert re.search(rf"^# (?:[\w.-]+, )*{re.escape(package)}(?:, [\w.-]+)*: \S", text, re.M), package


def test_every_config_is_documented():
    documented = set(re.findall(r"^\| `(configs/\w+\.yaml)` \|", text_of(DOCS / "runs.md"), re.M))
    assert documented == {page_id(path) for path in (ROOT / "configs").glob("*.yaml")}
    for path in (ROOT / "configs").glob("*.yaml"):
        values = yaml.safe_load(text_of(path))
        check_settings([f"--{name}={value}" for name, value in values.items()], [str(path)])
        for line in re.findall(r"^#\s+(python .*)", text_of(path), re.M):
            check_command(shlex.split(line, comments=True))
