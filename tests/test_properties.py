"""Any input either runs with consistent results, or is refused in one line and leaves nothing behind.

Each group draws inputs of one kind and tries each in a fork, see `support/forks.py`. Inputs that once failed are always
tried. The drawn inputs are the same each time. The slow test draws 180 more, or as many as
FABRIC_LADDER_CASES says (10,000 take half an hour). Another number in FABRIC_LADDER_DRAW draws others.
"""

import gzip
import json
import os
import re
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest
import yaml
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from support.data_files import BLOOM, SPLITS, load_in, table
from support.forks import RUNS, in_fork

from fabric_ladder import Settings, parse_settings
from fabric_ladder.errors import Checked
from fabric_ladder.foreign import ALIASES
from fabric_ladder.options import NAMES
from fabric_ladder.settings import kinds_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")

ODD_TEXTS = ["", " ", "null", "auto", "~", "NaN", "[1", "{a: b}", "a\0b", "a\nb", "\ud800", "é" * 300, "/", "..", "-"]
ODD_NUMBERS = [-1, 0, 1, 2, 3, 8, 2**31, 2**63, 10**40, 0.5, -0.0, 1e308, float("inf"), float("nan")]
scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=9)
scalars |= st.sampled_from(ODD_NUMBERS) | st.sampled_from(ODD_TEXTS)
seldom = st.sampled_from([False] * 7 + [True])
WORDS = ["a", "good film", "1", "1.0", "x" * 2000, "naïve 很好", '"', "a,b", "two\nlines", "\t", *ODD_TEXTS]
words = st.sampled_from(WORDS)


@st.composite
def texts_of(draw, good):
    """Draw a valid file's bytes, sometimes cut off or with strange bytes, or only strange bytes."""
    data = draw(st.binary(max_size=200)) if draw(seldom) else draw(good)
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    for _ in range(draw(st.integers(1, 2)) if draw(seldom) else 0):
        at = draw(st.integers(0, len(data)))
        odd = draw(st.sampled_from([b"", b"\0", b"\xff", b'"', b"{"]))
        data = data[:at] + odd + (data[at + 1 :] if draw(st.booleans()) else b"")
    return data


@st.composite
def setting_values(draw, name):
    """Draw values of a setting, which are usually valid and sometimes anything."""
    if draw(seldom):
        return draw(scalars)
    kinds, words = kinds_of(name) if name in NAMES else ((), ())
    likely = [getattr(Settings(), name, "1"), *words]
    likely += [1, 2, 16] * (int in kinds) + ["true", False] * (bool in kinds) + [1e-3, 2] * (float in kinds)
    return draw(st.sampled_from(likely))


@st.composite
def options(draw):
    """Draw settings with values, sometimes under another library's name or a random name."""
    names = draw(st.lists(st.sampled_from(NAMES), max_size=4))
    if draw(seldom):
        names.append(draw(st.sampled_from([*ALIASES]) | st.text(max_size=9)))
    return {name: draw(setting_values(name)) for name in names}


@st.composite
def command_lines(draw):
    pairs = {name: "null" if value is None else value for name, value in draw(options()).items()}
    args = [f"--{name}={value}".replace("\0", "") for name, value in pairs.items()]
    loose = st.sampled_from([*(f"--{name}" for name in NAMES), "--", "-x", "1", "--config"])
    return [*QUICK, *args, *(draw(st.lists(loose, max_size=3)) if draw(seldom) else ())]


def act_on_arguments(args):
    """Parse arguments. The output of --print_config must give the same settings."""
    try:
        parse_settings([*args, "--check_only"])
    except Checked:
        Path("own.yaml").write_text(printed(*args), encoding="utf-8")
        assert printed("--config", "own.yaml") == Path("own.yaml").read_text(encoding="utf-8")
        raise


def printed(*args):
    with redirect_stdout(StringIO()) as text, pytest.raises(SystemExit):
        parse_settings([*args, "--print_config"])
    return text.getvalue()


# few texts: the synthetic reviews take a second
QUICK = ["--model", BLOOM, "--from_scratch", "true", "--dataset", "few.csv"]


def yaml_files():
    structured = options().map(lambda pairs: yaml.safe_dump(pairs).encode(errors="replace"))
    signs = ["- ", ": ", "\n", "[", "]", "{", "}", "&a ", "*a", "!!python/object:os.system", "|", "'"]
    names = st.sampled_from([*NAMES, *signs])
    loose = st.lists(names, max_size=12).map(lambda parts: "".join(parts).encode())
    return texts_of(seldom.flatmap(lambda yes: loose if yes else structured))


def act_on_yaml(data):
    Path("own.yaml").write_bytes(data)
    parse_settings(["--config", "own.yaml", *([] if b"model" in data else QUICK), "--check_only"])


class File(NamedTuple):
    """Draw a data file and settings."""

    name: str
    data: bytes
    options: dict


@st.composite
def some_of(draw, chosen):
    """Draw values of up to two settings."""
    names = draw(st.lists(st.sampled_from([*chosen]), max_size=2)) if draw(st.booleans()) else []
    return {name: draw(chosen[name]) for name in names}


@st.composite
def table_rows(draw):
    """Draw a table with up to two odd cells."""
    labels = draw(st.sampled_from([[0, 1], ["no", "yes"], ["0", "1", "unknown"], [1.0, 0.0], [2, 10, 1]]))
    frame = table(30)[: draw(st.sampled_from([30, 12, 30, 3, 1]))].astype(object)
    frame["label"] = pd.Series([labels[index % len(labels)] for index in range(len(frame))], dtype=object)
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        row, column = draw(st.integers(0, len(frame) - 1)), draw(st.sampled_from(["text", "label"]))
        frame.at[row, column] = draw(words | scalars)
    return frame


@st.composite
def tables(draw):
    kind = draw(st.sampled_from([".csv", ".tsv", ".json", ".jsonl", ".csv.gz"]))
    frame = draw(table_rows())
    if kind in (".json", ".jsonl"):
        records = frame.to_dict("records")
        data = [json.dumps(each) for each in records]
        data = ("\n".join(data) if kind == ".jsonl" else json.dumps(records)).encode()
    else:
        frame = frame.map(lambda cell: str(cell).encode(errors="replace").decode())
        data = frame.to_csv(index=False, sep=draw(st.sampled_from(",;\t")), header=not draw(seldom)).encode()
    data = draw(texts_of(st.just(data)))
    chosen = {
        "max_length": st.integers(1, 64), "column_names": st.sampled_from(["text,label", "a,b,c", ""]),
        "text_column": words, "bad_samples": st.just("skip"), "train_samples": st.integers(1, 9),
    }  # fmt: skip
    data = gzip.compress(data, mtime=0) if kind == ".csv.gz" and not draw(seldom) else data
    return File(f"texts{kind}", data, draw(some_of(chosen)))


def act_on_table(file):
    Path(file.name).write_bytes(file.data)
    try:
        got = load_in(Path(), file.name, model=BLOOM, **file.options)
    finally:
        assert not [*Path().glob("cache/*/unfinished*")]
    for split in SPLITS:
        part = got.splits[split][:]
        assert len(part["labels"]) > 0
        assert part["length"] == [len(ids) for ids in part["input_ids"]]
        assert 0 < min(part["length"]) <= max(part["length"]) <= file.options.get("max_length", 1024)
        assert {*part["labels"]} <= {*range(len(got.class_names))}
        assert max(map(max, part["input_ids"])) < len(got.tokenizer)
    assert len({*got.splits["train"]["labels"]}) > 1
    assert len({*got.class_names}) == len(got.class_names)


KNOWN_BAD = {  # inputs that once ended in a traceback or ran without end
    "command lines": [
        [*QUICK, option]
        for option in (
            "--seed=4294967296", "--threads=100000", "--num_workers=100000", f"--lora_alpha={10**40}",
            f"--train_samples={10**30}", f"--dataset={'x' * 300}", "--config=", "--loss_chunk=",
        )
    ],
    "YAML files": [b"null", b"5", b"- 1"],
    "tables": [
        File("texts.json", b"null", {}), File("texts.jsonl", b"null\nnull\n", {}),
        File("texts.csv", b"a nice film,1\na bad film,0\n", {}), File("texts.csv", b"text,label\n", {}),
        File("texts.jsonl", b'{"text": "a", "label": "\\ud800"}\n', {}),
    ],
}  # fmt: skip
GROUPS = {  # each group has its inputs and its action
    "command lines": (command_lines(), act_on_arguments),
    "YAML files": (yaml_files(), act_on_yaml),
    "tables": (tables(), act_on_table),
}


def runs_or_is_refused(act, case):
    """Try an input in a fork; return whether it ran."""
    with tempfile.TemporaryDirectory() as folder:
        table(30).to_csv(Path(folder) / "few.csv", index=False)
        outcome = in_fork(lambda: act(case), Path(folder))
    assert outcome == RUNS or re.fullmatch(r"error: .{10,1010}\n", outcome), outcome
    return outcome == RUNS


def try_drawn(name, cases, draw=None):
    """Try drawn inputs of a group. `draw` is a number that gives the same inputs again; None: the usual ones."""
    drawn, act = GROUPS[name]
    outcomes = set()

    @settings(deadline=None, suppress_health_check=[*HealthCheck], max_examples=cases, database=None,
              derandomize=draw is None, print_blob=True)  # fmt: skip
    @given(drawn)
    def try_each(case):
        outcomes.add(runs_or_is_refused(act, case))

    (try_each if draw is None else seed(draw)(try_each))()
    assert outcomes == {True, False}, "some run and some are refused"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", GROUPS)
def test_any_input_runs_or_is_refused_in_one_line(name):
    for case in KNOWN_BAD.get(name, ()):
        runs_or_is_refused(GROUPS[name][1], case)
    try_drawn(name, 15)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", GROUPS)
def test_new_inputs_run_or_are_refused_in_one_line(name):
    draw = int(os.environ.get("FABRIC_LADDER_DRAW", 5))
    print(f"FABRIC_LADDER_DRAW={draw}")
    cases = int(os.environ.get("FABRIC_LADDER_CASES", 180))
    try_drawn(name, cases // len(GROUPS), draw)
