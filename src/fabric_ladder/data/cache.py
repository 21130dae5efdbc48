"""Keep data derived from files in a cache folder, under a key made of the inputs."""

import errno
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets as hf
import numpy as np
import pyarrow as pa
from filelock import FileLock
from tqdm import tqdm

from fabric_ladder.environment import write_whole
from fabric_ladder.errors import UserError, first_line
from fabric_ladder.settings import DataSettings

FULL = (errno.ENOSPC, errno.EDQUOT)


def make_once(
    settings: DataSettings, name: str, inputs: list, make: Callable[[Path], tuple[Path, dict]]
) -> tuple[Path, dict]:
    """Return the cache's folder for these inputs and the facts about it, after making it if it does not exist.

    One process makes it, under a lock, while others wait. It appears as a whole.

    Args:
        settings: `cache_dir` is used.
        name: Kind of content, a folder of the cache.
        inputs: Everything that changes the content; must be JSON.
        make: Makes a folder below the folder that it is given, and returns it with the facts.

    Raises:
        UserError: The cache cannot be written.
    """
    key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:20]
    folder = Path(settings.cache_dir) / name / key
    try:
        if not folder.exists():  # otherwise nothing is written: the cache may be read-only
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                if not folder.exists():
                    _make_whole(folder, make)
    except UserError:
        raise
    except Exception as error:
        problem = error if isinstance(error, OSError) else _disk_error(error)
        if problem is None:
            raise
        line = f"cannot write {folder.parent} ({first_line(problem)}): set FABRIC_LADDER_CACHE to another folder"
        raise UserError(line) from error
    return folder, json.loads((folder / "facts.json").read_text(encoding="utf-8"))


def _disk_error(error: BaseException | None) -> BaseException | None:
    """Return the error of a full disk behind a library's error, or None.

    `tokenizers` raises a bare Exception with "(os error 28)". `datasets` raises ValueError when it closes the file.
    """
    while error is not None and getattr(error, "errno", None) not in FULL and "(os error " not in str(error):
        error = error.__cause__ or error.__context__
    return error


def _make_whole(folder: Path, make: Callable[[Path], tuple[Path, dict]]) -> None:
    """Make the content in a scratch folder, and give it the name `folder` when it is complete."""
    scratch = folder.with_name(f"unfinished-{folder.name}")
    shutil.rmtree(scratch, ignore_errors=True)  # a killed process can have left it
    scratch.mkdir()
    try:
        with quiet():
            made, facts = make(scratch)
        write_whole(made / "facts.json", json.dumps(facts, ensure_ascii=False))
        made.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def save_tokens(target: Path, splits: dict[str, hf.Dataset], facts: dict) -> tuple[Path, dict]:
    """Write tokens into the folder `target`; return it and the facts, with a hash of the tokens added."""
    content = hashlib.sha256(json.dumps(facts["class_names"]).encode())
    for split, tokens in splits.items():
        for batch in tokens.with_format("numpy").iter(1000):
            labels = np.concatenate(list(map(np.atleast_1d, batch["labels"])))
            for column in (np.concatenate(batch["input_ids"]), batch["length"], labels):
                content.update(column.astype("<f8" if column.dtype.kind == "f" else "<i8").tobytes())
        tokens.save_to_disk(target / split)
    return target, facts | {"fingerprint": content.hexdigest()[:20]}


def map_batches(table: hf.Dataset, function: Callable[[dict], dict], name: str, scratch: Path, **options) -> hf.Dataset:
    """Apply `function` to the batches of a table, write the new columns to a file in `scratch`, and map it."""
    hf.disable_progress_bars()  # `quiet` enables them again

    def count(batch: dict) -> dict:
        columns = function(batch)
        bar.update(len(next(iter(batch.values()))))
        return columns

    with progress_bar("Tokenizing", total=len(table)) as bar:
        return table.map(
            count, batched=True, load_from_cache_file=False, new_fingerprint=name,
            cache_file_name=str(scratch / f"mapped-{name}.arrow"), remove_columns=table.column_names, **options,
        )  # fmt: skip


def progress_bar(work: str, samples: Iterable | None = None, total: int | None = None) -> tqdm:
    """Return a bar on stderr for work of more than ten seconds; a log gets a line once a minute."""
    terminal = sys.stderr.isatty()
    how = {"mininterval": 0.1} if terminal else {"mininterval": 60, "bar_format": "{desc}: {n_fmt}, {elapsed}\n"}
    return tqdm(samples, work, total, unit=" samples", delay=10, leave=False, **how)


def write_rows(path: Path, schema: pa.Schema, rows: Iterable[dict]) -> hf.Dataset:
    """Write rows to an Arrow file as they arrive, and map it; see `write_batches`."""
    return write_batches(path, schema, _in_batches(rows, schema))


def write_batches(path: Path, schema: pa.Schema, batches: Iterable[pa.Table | pa.RecordBatch]) -> hf.Dataset:
    """Write batches to a new Arrow file as they arrive, and map it; one batch at a time is in memory."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for batch in batches:
            writer.write(batch)
    return hf.Dataset.from_file(str(path))


def _in_batches(rows: Iterable[dict], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Collect batches of 32 MB of images or 1,024 rows of text."""
    batch = []
    size = 0
    for row in rows:
        batch.append(row)
        size += len(row["image"]) if "image" in row else 2**15
        if size >= 2**25:
            yield pa.RecordBatch.from_pylist(batch, schema)
            batch = []
            size = 0
    yield pa.RecordBatch.from_pylist(batch, schema)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the log of `datasets`, and its progress bars except on a terminal."""
    shown, level = hf.is_progress_bar_enabled(), hf.logging.get_verbosity()
    hf.logging.set_verbosity(hf.logging.CRITICAL)
    if not sys.stderr.isatty():
        hf.disable_progress_bars()
    try:
        yield
    finally:
        hf.logging.set_verbosity(level)
        if shown:
            hf.enable_progress_bars()
