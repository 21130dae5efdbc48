"""Names on the Hugging Face Hub: whether it can be reached, and data sets from it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import datasets as hf
import requests
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from fabric_ladder.data.splits import SPLITS
from fabric_ladder.errors import UserError, first_line


@contextmanager
def reachable(name: str, content: str) -> Iterator[dict[str, bool]]:
    """Give the options of `from_pretrained` for a folder or a Hub name.

    Without a network the Hub's libraries try again for up to 46 seconds; here they are sent to the cache at once.

    Raises:
        UserError: In one line, why the `content` (model, weights, tokenizer) cannot be loaded.
    """
    is_folder = Path(name).is_dir()
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


def load_hub(name: str, scratch: Path) -> dict[str, hf.Dataset]:
    """Download a data set and return those of its splits that are used."""
    if not _hub_answers():
        raise UserError(f"--dataset {name}: no such file or folder, and the Hub cannot be reached")
    try:
        loaded = hf.load_dataset(name, cache_dir=str(scratch / "hub"))
    except Exception as error:  # the Hub's builders raise errors of many kinds
        raise UserError(f"cannot load the data set {name} from the Hub ({first_line(error)})") from error
    if "train" not in loaded:
        raise UserError(f"the data set {name} has no split named train, only {', '.join(loaded)}")
    return {split: loaded[split] for split in SPLITS if split in loaded}
