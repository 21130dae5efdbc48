"""Models' configs from folders and the Hugging Face Hub, and data sets from the Hub."""

import copy
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import datasets as hf
import pyarrow.compute as pc
import requests
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import GatedRepoError
from transformers import AutoConfig, PretrainedConfig

from fabric_ladder.data.splits import SPLITS
from fabric_ladder.environment import write_whole
from fabric_ladder.errors import UserError, refused
from fabric_ladder.places import CONFIGS
from fabric_ladder.settings import DataSettings

# Words of a Hub name that do not change a model's shape, e.g. meta-llama/Meta-Llama-3.1-8B-Instruct: llama-3.1-8b.json
SAME_SHAPE = re.compile(r"^meta-|(?<=^bloom)z|patch|-base$|-(224|chat|deduped|hf|in21k|instruct|it|mt|pt)(?=-|$)")
NO_CODE = {"trust_remote_code": False}  # without it transformers asks on stdin whether to run a model's own code
WEIGHTS = (".safetensors", ".bin", ".distcp")  # suffixes of their files
HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")  # names with more parts are paths


@contextmanager
def reachable(name: str, content: str, revision: str | None = None) -> Iterator[dict[str, bool | str]]:
    """Yield the options for `from_pretrained` that load a folder or a name on the Hub.

    Without a network the Hub's libraries retry for up to 46 seconds; these options send them to their cache instead.

    Args:
        name: A folder or a name on the Hub.
        content: The content to load, for the error message: model, weights, tokenizer.
        revision: Branch, tag or commit on the Hub.

    Raises:
        UserError: The content cannot be loaded, because of the name, the network or the files.
    """
    folder = Path(name)
    if folder.is_dir():
        hint = ""
        if (folder / "model").is_dir():
            hint = f"; give {folder / 'model'}"
        elif (folder / "run.json").is_file() or folder.name in ("adapter", "checkpoint"):
            hint = "; scripts/export_model.py makes a model of it"
        problem = f"the folder {name} holds no usable {content}{hint}"
        options = {"local_files_only": True}
    elif not HUB_NAME.fullmatch(name) or (folder.parent.is_dir() and folder.name.isdecimal()):  # such as runs/99
        raise UserError(f"cannot load the {content}: there is no folder {name}")
    else:
        offline = not _hub_answers()
        found = "cannot be reached" if offline else "has nothing usable of this name"
        form = "" if "/" in name else " (most names there are OWNER/NAME)"
        problem = (
            f"cannot load the {content} {name!r}: it is not a folder, and the Hugging Face Hub {found}; check the "
            f"spelling{form} and the network, or give a local folder"
        )
        options = {"local_files_only": offline} | ({"revision": revision} if revision else {})
    with refused(problem):
        if content == "weights" and any(folder.glob("shard-*")):
            raise ValueError("it is a sharded checkpoint")  # transformers would take it for one of its own
        try:
            yield options | NO_CODE
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise UserError(
                f"{name} needs code of its own, which is never run here: choose a model that transformers knows"
            ) from error


def load_config(name: str) -> PretrainedConfig:
    """Return the config of a model on the Hub, in a folder, or in a file of its own.

    Each config is read once per process, unless its file changes. Callers get a copy, which they may change. The config
    of a model on the Hub has the commit in `_commit_hash`. If the Hub cannot be reached and its cache does not have the
    model, or if the Hub asks for a token, the config that is shipped in `configs/models` is taken, and a line on stderr
    reports it.

    Raises:
        UserError: The file is not a usable model config, or the name is neither a folder nor on the Hub.
    """
    path = Path(name)
    if name.endswith(".json") and not path.is_file():
        raise UserError(f"the model config {name} does not exist")
    file = path / "config.json" if path.is_dir() else path
    changed = file.stat().st_mtime_ns if file.is_file() else None
    return copy.deepcopy(_read_config(name, changed))


def find_weights(folder: str) -> list[Path]:
    """Return the files in a folder that may hold weights."""
    return sorted(each for each in Path(folder).glob("*") if each.suffix in WEIGHTS)


def hash_files(name: str | None, block: int = 2**16) -> str | None:
    """Return a hash of the config and the weights in a folder or a file; None: there is no such path here.

    It covers the sizes of the files, and the bytes on both sides of each tensor's borders: all bytes of a model would
    take as long as loading it.
    """
    if not name or not Path(name).exists():
        return None
    digest = hashlib.sha256()
    files = [Path(name)] if Path(name).is_file() else [*Path(name).glob("config.json"), *find_weights(name)]
    for path in files:
        digest.update(str(size := path.stat().st_size).encode())
        with path.open("rb") as file:
            places = {0, size}
            if path.suffix == ".safetensors":
                with suppress(ValueError, AttributeError):  # a damaged file
                    length = min(size, int.from_bytes(file.read(8), "little"))
                    header = json.loads(file.read(length)).values()
                    places |= {8 + length + border for tensor in header for border in tensor.get("data_offsets", ())}
            for place in sorted(places):
                file.seek(max(0, place - block))
                digest.update(file.read(2 * block))
    return digest.hexdigest()[:20]


@lru_cache(maxsize=8)
def _read_config(name: str, changed: int | None) -> PretrainedConfig:
    """Read a config; another time of change reads a file again."""
    if Path(name).is_file():
        with refused(f"{name} is not a model config"):
            return AutoConfig.from_pretrained(name, **NO_CODE)
    try:
        with reachable(name, "model") as options:
            return AutoConfig.from_pretrained(name, **options)
    except UserError as error:
        path = find_shipped_config(name)
        gated = error.__cause__ and isinstance(error.__cause__.__cause__, GatedRepoError)
        if not path or (_hub_answers() and not gated):
            raise
    problem = "asks for a token" if gated else "cannot be reached"
    print(f"The Hugging Face Hub {problem}: the config of {name} is read from {path}", file=sys.stderr)
    return AutoConfig.from_pretrained(path)


def find_shipped_config(name: str) -> Path | None:
    """Return the file in `configs/models` with the shape of a model on the Hub, or None if there is none.

    The file has the model's name in lower case, without the owner, perhaps without the words of `SAME_SHAPE`. The Hub
    knows only a few old names without an owner.
    """
    owner, _, own = name.lower().rpartition("/")
    if not owner and not own.startswith(("gpt2", "bert-", "distilbert-", "roberta-")):
        return None
    paths = (CONFIGS / "models" / f"{stem}.json" for stem in (own, SAME_SHAPE.sub("", own)))
    return next(filter(Path.is_file, paths), None)


def find_commit(settings: DataSettings) -> str:
    """Return the commit of a data set on the Hub, which identifies its content in the cache.

    Without a network, this is the commit from which the cache folder has last been filled.

    Raises:
        UserError: The Hub has no such data set, or cannot be reached.
    """
    name = settings.dataset.split(":")[0]
    if _hub_answers():
        with refused(f"the Hub has no data set {name} that can be read: check the spelling, or log in"):
            return HfApi().dataset_info(name, timeout=30).sha
    note = _commit_note(settings)
    if not note.exists():
        raise UserError(f"--dataset {name}: this file or folder does not exist, and the Hub cannot be reached")
    return note.read_text(encoding="utf-8")


def _commit_note(settings: DataSettings) -> Path:
    """Return the file that keeps the last commit of a data set for starts without a network."""
    name = f"{settings.dataset.split(':')[0]}@main"
    return Path(settings.cache_dir) / "commits" / name.replace("/", "--")


@lru_cache
def _hub_answers() -> bool:
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        requests.head(constants.ENDPOINT, timeout=5)
    except requests.RequestException:
        return False
    return True


def load_hub(settings: DataSettings, commit: str, scratch: Path, notices: list[str]) -> dict[str, hf.Dataset]:
    """Download a data set, `name` or `name:configuration`, at a commit; return its train, validation and test split.

    A split without labels, such as the test of a competition, is left out, and `notices` gets a line about it.
    """
    name = settings.dataset
    if not _hub_answers():
        raise UserError(f"--dataset {name} is not in the cache with these settings, and the Hub cannot be reached")
    with refused(f"cannot load the data set {name} from the Hub; {name}:CONFIGURATION chooses a configuration"):
        loaded = hf.load_dataset(*name.split(":"), revision=commit, cache_dir=str(scratch / "hub"))
    if "train" not in loaded:
        raise UserError(f"the data set {name} has no split named train, only {', '.join(loaded)}")
    note = _commit_note(settings)
    note.parent.mkdir(parents=True, exist_ok=True)
    write_whole(note, commit)
    if others := [split for split in loaded if split not in SPLITS]:
        notices.append(f"{name}: the splits {', '.join(others)} are not used, only {', '.join(SPLITS)}")
    splits = {}
    for split in SPLITS:
        if split not in loaded:
            continue
        table = loaded[split]
        kind = str(getattr(table.features.get(settings.label_column), "dtype", ""))
        numbers = split != "train" and kind.startswith(("int", "float"))  # -1 means no label
        if numbers and pc.unique(table.data.column(settings.label_column)).to_pylist() == [-1]:
            notices.append(f"{name} ({split}) has no labels and is left out")
        else:
            splits[split] = table
    return splits
