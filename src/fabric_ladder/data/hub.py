"""Names on the Hugging Face Hub: whether it can be reached, and data sets from it."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import datasets as hf
import pyarrow.compute as pc
import requests
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from fabric_ladder.data.splits import SPLITS
from fabric_ladder.errors import UserError, first_line
from fabric_ladder.settings import DataSettings

HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")  # longer ones are paths


@contextmanager
def reachable(name: str, content: str) -> Iterator[dict[str, bool]]:
    """Give the options of `from_pretrained` for a folder or a Hub name.

    Without a network the Hub's libraries try again for up to 46 seconds; here they are sent to the cache at once.

    Raises:
        UserError: In one line, why the `content` (model, weights, tokenizer) cannot be loaded.
    """
    is_folder = Path(name).is_dir()
    if not is_folder and not HUB_NAME.fullmatch(name):
        raise UserError(f"cannot load the {content}: there is no folder {name}")
    offline = not is_folder and not _hub_answers()
    try:
        yield {"local_files_only": offline or is_folder}
    except (OSError, ValueError, KeyError, SafetensorError, StrictDataclassError) as error:
        if isinstance(error, UserError):
            raise
        if is_folder:
            raise UserError(f"the folder {name} holds no usable {content} ({first_line(error)})") from error
        reason = first_line(error)
        if offline:
            reason = "the Hugging Face Hub cannot be reached and its cache has no such name"
        raise UserError(
            f"cannot load the {content} {name!r}: it is not a folder, and {reason}; check the spelling and the "
            "network, or give a local folder"
        ) from error


@lru_cache
def _hub_answers() -> bool:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    try:
        requests.head(ENDPOINT, timeout=5)
    except requests.RequestException:
        return False
    return True


def load_hub(settings: DataSettings, scratch: Path, notices: list[str]) -> dict[str, hf.Dataset]:
    """Download a data set, `name` or `name:configuration`, and return those of its splits that are used.

    `notices` gets a line on a split that has no labels, as the test of a competition.
    """
    name = settings.dataset
    if not _hub_answers():
        raise UserError(f"--dataset {name}: no such file or folder, and the Hub cannot be reached")
    try:
        loaded = hf.load_dataset(*name.split(":"), cache_dir=str(scratch / "hub"))
    except Exception as error:  # the Hub's builders raise errors of many kinds
        reason = first_line(error)
        if "onfig name is missing" in reason:
            reason = f"give one of its configurations as {name}:CONFIGURATION; {' '.join(str(error).split())[:300]}"
        raise UserError(f"cannot load the data set {name} from the Hub ({reason})") from error
    if "train" not in loaded:
        raise UserError(f"the data set {name} has no split named train, only {', '.join(loaded)}")
    splits = {split: loaded[split] for split in SPLITS if split in loaded}
    for split, table in list(splits.items()):
        is_class = isinstance(table.features.get(settings.label_column), hf.ClassLabel)
        if split != "train" and is_class and pc.max(table.data.column(settings.label_column)).as_py() == -1:
            del splits[split]
            notices.append(f"{name} ({split}) has no labels and is left out")
    return splits
