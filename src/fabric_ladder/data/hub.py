"""What folders and the Hugging Face Hub hold: models' configs, what else transformers loads, and data sets."""

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
from transformers import AutoConfig, PretrainedConfig

from fabric_ladder.data.splits import SPLITS
from fabric_ladder.errors import UserError, first_line, read_outside, refused
from fabric_ladder.settings import DataSettings

# What transformers 5.23 takes as it comes, in the words of its architectures, and fails with later.
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
SIZES = "hidden_size n_embd d_model num_attention_heads n_head num_heads head_dim num_key_value_heads".split()
SIZES += "intermediate_size vocab_size image_size patch_size num_channels".split()
DROPOUTS = ("dropout", "dropout_prob", "drop", "pdrop")
MOST_LABELS = 100_000
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
    problem = f"the folder {name} holds no usable {content}"
    if not is_folder:
        hub = "cannot be reached and its cache has no such name" if offline else "has none that can be used"
        problem = (
            f"cannot load the {content} {name!r}: it is not a folder, and the Hugging Face Hub {hub}; check the "
            "spelling and the network, or give a local folder"
        )
    with refused(problem):
        yield {"local_files_only": offline or is_folder}


def load_config(name: str) -> PretrainedConfig:
    """Return the config of a model on the Hub, in a folder, or in a file of its own.

    Raises:
        UserError: The file holds no model config, or one of which no model can be made.
        UserError: The name is neither a folder nor reachable.
    """
    path = Path(name)
    if name.endswith(".json") and not path.is_file():
        raise UserError(f"there is no model config {name}")
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        _check_config(file, read_outside(file))
    if path.is_file():
        with refused(f"{name} is no model config"):
            return AutoConfig.from_pretrained(name)
    with reachable(name, "model") as options:
        return AutoConfig.from_pretrained(name, **options)


def _check_config(path: Path, config: object) -> None:
    """Refuse a model config whose numbers no model has; of the rest, transformers knows more."""
    if not isinstance(config, dict):
        raise UserError(f"{path} is no model config: it must hold one JSON object, {{...}}")
    bounds = (
        dict.fromkeys(SIZES, (1, 2**31 - 1)) | dict.fromkeys(LAYERS, (1, 10_000)) | {"num_labels": (1, MOST_LABELS)}
    )
    for key, value in config.items():
        low, high = (0, 1) if key.endswith(DROPOUTS) else bounds.get(key, (None, None))
        if low is not None and isinstance(value, int | float) and not low <= value <= high:
            raise UserError(f"{path} is no model config: {key} is {str(value)[:30]}, and must be from {low} to {high}")
    for key in ("id2label", "label2id", "quantization_config"):
        if not isinstance(config.get(key), dict | None):
            raise UserError(f"{path} is no model config: {key} must be an object, {{...}}")
        if len(config.get(key) or ()) > MOST_LABELS:
            raise UserError(f"{path} has more than {MOST_LABELS:,} entries of {key}: remove it")


def check_reachable(dataset: str) -> None:
    """Refuse the name of a data set on the Hub where the Hub cannot be reached."""
    if not _hub_answers():
        raise UserError(f"--dataset {dataset}: no such file or folder, and the Hub cannot be reached")


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
    check_reachable(name)
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
