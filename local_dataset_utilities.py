"""The one dataset module: gets, reads, splits and tokenises the texts, and decodes the images, of every script.

It keeps the four names of the blog's module of the same name (`download_dataset`, `load_dataset_into_to_dataframe`,
`partition_dataset`, `IMDBDataset`), so that a script written for the blog runs with it unchanged.
It imports no other file of this project and is therefore one long file: it works when it is dropped beside a script.
"""

import hashlib
import itertools
import json
import os
import random
import re
import string
import sys
import tarfile
import tempfile
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

import datasets as hf
import numpy as np
import pandas as pd
import PIL
import pooch
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import requests
from datasets.table import table_cast
from filelock import FileLock
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.errors import StrictDataclassError
from PIL import Image, ImageOps
from safetensors import SafetensorError
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoTokenizer,
    ImageProcessingMixin,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

IMDB_ARCHIVE = "aclImdb_v1.tar.gz"
IMDB_URL = f"https://ai.stanford.edu/~amaas/data/sentiment/{IMDB_ARCHIVE}"
IMDB_MD5 = "7c2ac02c03563afcf9b574c7e56c153a"
IMDB_REVIEWS = 50_000
TOKENIZER_FILES = ("tokenizer.*", "vocab.*", "*.model")
FILE_FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
SPLITS = ("train", "validation", "test")
SYNTHETIC_SIZES = (4000, 500, 1000)
CACHE_FORMAT = 1  # raise it whenever the same inputs would give other tokens
INSTRUCTION_CACHE_FORMAT = 1  # the same for instructions
IMAGE_CACHE_FORMAT = 1  # or other pixels
DAMAGES = (tarfile.TarError, EOFError, zlib.error, OSError)  # what reading a damaged archive raises
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
IMAGES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".avif")
IMAGES += (".jp2", ".heic")  # the last is not read, and therefore not passed over in silence
IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "WEBP", "TIFF", "AVIF", "JPEG2000")  # others start programs
FOLDER_SPLITS = {"train": "train", "test": "test"} | dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
FILE = pa.struct({"bytes": pa.binary(), "path": pa.string()})  # as `datasets` keeps an image that is not decoded
PIXELS = pa.schema({"image": pa.binary(), "height": pa.int32(), "width": pa.int32(), "labels": pa.int64()})
IGNORED = -100  # label of a token that is not trained, as in PyTorch's cross entropy
END_OF_TEXT = "<|endoftext|>"  # of a trained tokenizer
INSTRUCTION_FORMS = (("instruction", "output"), ("input", "target"), ("messages",))  # columns that tell them
ROLES = ("system", "user", "assistant")
REVIEW_QUESTION = "Is this film review positive or negative?"
ALPACA = (  # with and without an input, word for word as Stanford's Alpaca was trained
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
    "### Response:",
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:",
)
INSTRUCTIONS = pa.schema(dict.fromkeys(("instruction", "input", "output"), pa.string()))
CHATS = pa.schema(
    {"messages": pa.list_(pa.struct(dict.fromkeys(("role", "content"), pa.string()))), "place": pa.string()}
)


class DatasetError(ValueError):
    """The data cannot be used; the message is one line that says why and what to do."""


@dataclass
class DataSettings:
    """Which texts or images to load, and how to make them into what a model reads.

    Args:
        task: What is learned, and with what kind of model: a class, or the answers to instructions.
        dataset: `imdb`, `synthetic`, a CSV, JSON, JSON Lines or Parquet file, a folder of such files (train, validation
            and test told by their names), or a name on the Hugging Face Hub. Images: a folder with a folder for each
            class, or with `train`, `validation` and `test` that hold such folders, a tar or zip archive of either, or a
            name on the Hub. Instructions: such tables with the columns `instruction`, `output` and perhaps `input`, or
            `input` and `target`, or chat `messages`; the reviews are made into questions.
        data_dir: Folder in which files are looked for; it may be read-only. Default: $FABRIC_LADDER_DATA, else `data`.
        cache_dir: Folder for what is derived from them. Default: $FABRIC_LADDER_CACHE, else the user's cache folder.
        text_column: Column of the texts.
        label_column: Column of the labels, integers or strings.
        image_column: Column of the images of a data set on the Hub; where it has none of this name, its only one.
        validation_file: Validation texts for a `dataset` that is a file (default: 10 % of it).
        test_file: Test texts for a `dataset` that is a file (default: 20 % of it).
        train_samples: Keep only so many training samples, drawn by `split_seed`.
        validation_samples: The same for validation.
        test_samples: The same for the test.
        split_seed: Seed of what is split or drawn here; apart from `seed`, so that all seeds are tested on one set.
        model: A name on the Hugging Face Hub, a local folder, or a model's config file (with `from_scratch`).
        tokenizer: The tokenizer's Hub name or folder, or `trained` for a byte-pair encoding learned from the training
            texts. Default: the model's own, or `trained` when `model` is a config file.
        max_length: Tokens kept of a text.
        image_size: Pixels of a side of the square that the model sees. Default: what the model was made for.
        resize_to: Resize images to a square of this side before the square that the model sees is cut out, at random
            in training and from the centre in evaluation. Default: `image_size`, so that nothing is cut off.
        random_flip: Mirror every other training image, drawn anew in each epoch.
        prompt_template: How an instruction becomes a prompt, say `Human: {instruction}\\n{input}\\nAssistant: `. Chat
            `messages` are written by the tokenizer's chat template instead. Default: Alpaca's wording.
        train_on_inputs: Train on the tokens of the prompts too, not on those of the answers alone.
        bad_samples: What to do about images that cannot be decoded, and instructions without an answer: `refuse` to
            start, or `skip` and count them.
    """

    task: Literal["text-classification", "image-classification", "instruction-tuning"] = "text-classification"
    dataset: str = "imdb"
    data_dir: str = field(default_factory=lambda: os.environ.get("FABRIC_LADDER_DATA") or "data")
    cache_dir: str = field(
        default_factory=lambda: os.environ.get("FABRIC_LADDER_CACHE") or str(pooch.os_cache("fabric_ladder"))
    )
    text_column: str = "text"
    label_column: str = "label"
    image_column: str = "image"
    validation_file: str | None = None
    test_file: str | None = None
    train_samples: int | None = None
    validation_samples: int | None = None
    test_samples: int | None = None
    split_seed: int = 1
    model: str = "bigscience/bloom-560m"
    tokenizer: str | None = None
    max_length: int = 1024
    image_size: int | None = None
    resize_to: int | None = None
    random_flip: bool = False
    prompt_template: str | None = None
    train_on_inputs: bool = False
    bad_samples: Literal["refuse", "skip"] = "refuse"


@dataclass
class TextDatasets:
    """Tokenised splits, memory-mapped from the cache.

    Attributes:
        splits: `train`, `validation` and `test`, each with the columns `input_ids` (tokens), `labels` and `length`. Of
            instructions `labels` has a label for each token, -100 where it is not trained, and `items` counts those
            that are, without the first token, which nothing predicts.
        class_names: Names of the labels 0, 1, …; none of instructions.
        tokenizer: The tokenizer that made `input_ids`. Of instructions `init_kwargs["prompt_template"]`, which is saved
            and loaded with it, says how: a template for `prompt_text`, `alpaca`, or `chat` (its chat template).
        fingerprint: A hash of all tokens and labels: the same on every machine, another when anything changes.
        notices: Lines that the user should read.
    """

    splits: hf.DatasetDict
    class_names: list[str]
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    notices: list[str] = field(default_factory=list)


class ImageFormat(NamedTuple):
    """How stored pixels become what a model sees.

    Attributes:
        size: Pixels of a side of the square that the model sees.
        resize_to: Pixels of a side of the square that every image is resized to before, at least `size`.
        mean: Of the channels red, green and blue; the model sees (pixel / 255 - mean) / std.
        std: Of the channels likewise.
        resample: How images are resized.
        random_flip: Mirror every other training image.
        tokens: Tokens of a sample: its patches and the one that stands for the class.
    """

    size: int
    resize_to: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resample: Literal["bilinear", "bicubic"]
    random_flip: bool
    tokens: int


@dataclass
class ImageDatasets:
    """Decoded splits, memory-mapped from the cache.

    Attributes:
        splits: `train`, `validation` and `test`, each with the columns `image` (bytes: height x width x 3 colours),
            `height`, `width` (neither above `format.resize_to`), `labels`, and `length` (tokens, the same for all).
        class_names: Names of the labels 0, 1, …
        format: What is left to do when a batch is made.
        fingerprint: A hash of all pixels, all labels and the format: another when anything changes.
        notices: Lines that the user should read.
    """

    splits: hf.DatasetDict
    class_names: list[str]
    format: ImageFormat
    fingerprint: str
    notices: list[str]


# ----------------------------------------------------------------------------------------------------------------------
# The blog's four names
# ----------------------------------------------------------------------------------------------------------------------


def download_dataset(data_dir: str | Path | None = None) -> Path:
    """Return the IMDb archive or its unpacked folder `aclImdb`, and download the archive (84 MB) if neither is there.

    Both are looked for in `data_dir` and in the current folder. Nothing is unpacked: the reviews are read straight
    from the archive, which takes 2 seconds instead of writing 50,000 files.

    Raises:
        DatasetError: No network, a wrong checksum, or a folder that cannot be written. No file is left then.
    """
    folder = Path(data_dir or DataSettings().data_dir)
    for place in (folder, Path()):
        for name in ("aclImdb", IMDB_ARCHIVE):
            if (place / name).exists():
                return place / name
    fetch = f"save {IMDB_URL} as {folder / IMDB_ARCHIVE}"
    pooch.get_logger().setLevel("WARNING")
    try:
        path = pooch.retrieve(
            IMDB_URL, known_hash=f"md5:{IMDB_MD5}", fname=IMDB_ARCHIVE, path=folder, progressbar=sys.stderr.isatty()
        )
    except requests.RequestException as error:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        raise DatasetError(
            f"IMDb is neither in {folder.resolve()} nor can it be downloaded ({type(error).__name__}): {fetch}, or set "
            "FABRIC_LADDER_DATA to a folder that holds it, or try --dataset synthetic, which needs no network"
        ) from error
    except OSError as error:
        raise DatasetError(f"cannot write {folder} ({_brief(error)}): choose another --data_dir") from error
    except ValueError as error:  # pooch's checksum
        raise DatasetError(f"the download of {IMDB_URL} has a wrong checksum: try again, or {fetch}") from error
    return Path(path)


def load_dataset_into_to_dataframe(data_dir: str | Path | None = None) -> pd.DataFrame:
    """Return all 50,000 reviews with the columns `text` and `label` (0 negative, 1 positive), in the blog's order.

    Raises:
        DatasetError: The archive is damaged or hostile, or it does not hold 50,000 labelled reviews.
    """
    return _read_imdb(download_dataset(data_dir), IMDB_REVIEWS)


def partition_dataset(df: pd.DataFrame) -> None:
    """Write the blog's split into the current folder: train.csv (35,000), val.csv (5,000) and test.csv (the rest)."""
    for name, part in zip(("train", "val", "test"), _imdb_parts(df), strict=True):
        temporary = Path(f".{name}.csv.{os.getpid()}")
        part.reset_index().to_csv(temporary, index=False, encoding="utf-8")
        temporary.replace(f"{name}.csv")


class IMDBDataset(Dataset):
    """One split of a dictionary of `datasets` splits, as a PyTorch data set."""

    def __init__(self, dataset_dict, partition_key="train"):
        self.partition = dataset_dict[partition_key]

    def __getitem__(self, index):
        return self.partition[index]

    def __len__(self):
        return self.partition.num_rows


def _imdb_parts(df: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Shuffle and cut as the blog does, 7 : 1 : 2, so that the same pandas version gives the same rows."""
    shuffled = df.sample(frac=1, random_state=1)
    first, second = len(df) * 7 // 10, len(df) * 8 // 10
    return shuffled.iloc[:first], shuffled.iloc[first:second], shuffled.iloc[second:]


def _read_imdb(source: Path, expected: int) -> pd.DataFrame:
    """Read an archive or an unpacked folder; the rows stand as in the blog: test before train, pos before neg."""
    member = re.compile(r"(?:\./)?aclImdb/(train|test)/(pos|neg)/([^/]+\.txt)")
    reviews = {}
    try:
        if source.is_dir():
            for path in source.glob("*/*/*.txt"):
                if found := member.fullmatch(f"aclImdb/{path.relative_to(source).as_posix()}"):
                    reviews[found.groups()] = path.read_bytes()
        else:
            with tarfile.open(source, "r|gz") as archive:
                for entry in archive:
                    if entry.name.startswith("/") or ".." in PurePosixPath(entry.name).parts:
                        raise DatasetError(f"{source} is not to be trusted: it holds {entry.name!r}")
                    if entry.isfile() and (found := member.fullmatch(entry.name)):
                        reviews[found.groups()] = archive.extractfile(entry).read()
                    archive.members.clear()  # `tarfile` would keep 100 MB of what it has passed
        order = sorted(reviews, key=lambda key: (key[0] != "test", key[1] != "pos", key[2]))
        rows = [(reviews.pop(key).decode("utf-8"), int(key[1] == "pos")) for key in order]  # never both in memory
    except (*DAMAGES, UnicodeDecodeError) as error:
        raise DatasetError(f"{source} is damaged ({_brief(error)}): delete it and get it again") from error
    if len(rows) != expected:
        raise DatasetError(f"{source} holds {len(rows):,} reviews instead of {expected:,}: delete it and get it again")
    return pd.DataFrame(rows, columns=["text", "label"])


# ----------------------------------------------------------------------------------------------------------------------
# From settings to tokens
# ----------------------------------------------------------------------------------------------------------------------


def load_datasets(settings: DataSettings) -> TextDatasets | ImageDatasets:
    """Read, split, and tokenise or decode; a second call with the same inputs only maps the first one's result.

    Several processes may call it at once: one does the work, the others wait for it.

    Raises:
        DatasetError: Anything that is wrong with the data, the tokenizer or the cache folder.
    """
    return _load_images(settings) if settings.task == "image-classification" else _load_texts(settings)


def _load_texts(settings: DataSettings) -> TextDatasets:
    instructed = settings.task == "instruction-tuning"
    prompt_forms = _prompt_forms(settings.prompt_template) if instructed else None
    source = _find_source(settings)
    tokenizer_name = settings.tokenizer or ("trained" if settings.model.endswith(".json") else settings.model)
    tokenizer = None if tokenizer_name == "trained" else load_tokenizer(tokenizer_name)
    vocabulary = _trained_vocabulary(settings.model) if tokenizer is None else tokenizer.backend_tokenizer.to_str()
    names = ("text_column", "label_column", "train_samples", "validation_samples", "test_samples")
    names += ("split_seed", "max_length")
    inputs = [CACHE_FORMAT, pd.__version__, source, vocabulary, *(getattr(settings, name) for name in names)]
    make = _tokenise
    if instructed:
        inputs += [settings.task, INSTRUCTION_CACHE_FORMAT, prompt_forms, settings.train_on_inputs]
        inputs += [settings.bad_samples]
        if tokenizer is not None:
            _set_end(tokenizer, tokenizer_name)
            inputs += [tokenizer.chat_template, tokenizer.special_tokens_map]
        make = _tokenise_instructions
    folder = _make_once(settings, "tokenised", inputs, partial(make, settings, source, tokenizer, vocabulary))
    if tokenizer is None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    splits = hf.DatasetDict({split: hf.load_from_disk(folder / split) for split in SPLITS})
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    if instructed:
        template = "chat" if facts["chat"] else settings.prompt_template or "alpaca"
        tokenizer.init_kwargs["prompt_template"] = template  # `save_pretrained` writes it
    return TextDatasets(splits, facts["class_names"], tokenizer, facts["fingerprint"], facts.get("notices", []))


def _make_once(settings: DataSettings, kind: str, inputs: list, make: Callable[[Path], Path]) -> Path:
    """Return the cache's folder for these inputs; where there is none, `make` fills one in a folder of its own."""
    key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:20]
    folder = Path(settings.cache_dir).expanduser() / kind / key
    try:
        if not folder.exists():  # else nothing is written, and the cache may be read-only
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                if not folder.exists():
                    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="unfinished-") as scratch, _quiet():
                        make(Path(scratch)).rename(folder)
    except OSError as error:
        raise DatasetError(f"cannot write {folder.parent} ({_brief(error)}): choose another --cache_dir") from error
    return folder


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the Hub, with a padding token (the end-of-text token where it has none).

    Raises:
        DatasetError: The name is neither a folder nor reachable, or the tokenizer has no fast version.
    """
    with reachable(name, "tokenizer") as options:
        if Path(name).is_dir() and not any(found for kind in TOKENIZER_FILES for found in Path(name).glob(kind)):
            raise OSError("no tokenizer.json and no vocabulary")  # for some models the library would make one up
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    if not tokenizer.is_fast:
        raise DatasetError(f"the tokenizer of {name} has no fast version: choose another --tokenizer")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


@contextmanager
def reachable(name: str, what: str):
    """Give the `from_pretrained` options for `name`, a folder or a Hub name, and say in one line why it fails.

    Without a network the Hub's libraries try again for up to 46 seconds; here they are sent to the cache at once.
    """
    is_folder = Path(name).is_dir()
    offline = not is_folder and not _hub_answers()
    try:
        yield {"local_files_only": offline or is_folder}
    except (OSError, ValueError, KeyError, SafetensorError, StrictDataclassError) as error:
        if isinstance(error, DatasetError):
            raise
        if is_folder:
            raise DatasetError(f"the folder {name} holds no usable {what} ({_brief(error)})") from error
        where = "the Hugging Face Hub cannot be reached and its cache has no such name" if offline else _brief(error)
        raise DatasetError(
            f"cannot load the {what} {name!r}: it is not a folder, and {where}; check the spelling and the network, "
            "or give a local folder"
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


def _find_source(settings: DataSettings) -> list:
    """Return what identifies the texts: their kind and their files (path, size and time of change)."""
    name = settings.dataset
    path = None if name in ("imdb", "synthetic") else _find_file(name, settings.data_dir)
    if (settings.validation_file or settings.test_file) and (path is None or path.is_dir()):
        raise DatasetError(f"--validation_file and --test_file go with a --dataset that is a file, not with {name}")
    if name == "synthetic":
        return [name]
    if name == "imdb":
        source = download_dataset(settings.data_dir)
        return [name, _stamp(source)] if source.is_file() else [name, _stamp(source), _stamp(source / "train")]
    if path is None and Path(name).suffix.lower() not in FILE_FORMATS and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return ["hub", name]
    if path is None:
        raise DatasetError(f"there is no file or folder {name} here or in {settings.data_dir}")
    if path.is_dir():
        files = _folder_files(path)
    else:
        files = {"train": [path]}
        for split, file in (("validation", settings.validation_file), ("test", settings.test_file)):
            if file:
                files[split] = [_find_file(file, settings.data_dir)]
                if files[split] == [None]:
                    raise DatasetError(f"there is no {split} file {file} here or in {settings.data_dir}")
    return ["files", {split: [_stamp(file) for file in some] for split, some in files.items()}]


def _find_file(name: str, data_dir: str) -> Path | None:
    return next((path for path in (Path(name), Path(data_dir) / name) if path.exists()), None)


def _stamp(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return str(path.resolve()), status.st_size, status.st_mtime_ns


def _folder_files(folder: Path) -> dict[str, list[Path]]:
    """Sort a folder's files into splits by their names; files that name no split are training texts."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in FILE_FORMATS:
            starts = {"val": "validation", "dev": "validation", "test": "test"}
            split = next((split for start, split in starts.items() if path.stem.lower().startswith(start)), "train")
            found.setdefault(split, []).append(path)
    if "train" not in found:
        raise DatasetError(
            f"{folder} holds no training file ({', '.join(FILE_FORMATS)}); for images add --task image-classification"
        )
    return found


def _tokenise(settings: DataSettings, source: list, tokenizer, vocabulary, scratch: Path) -> Path:
    """Read all splits, tokenise them and save them into a folder in `scratch`, which is returned."""
    target = scratch / "tokens"
    splits, class_names = _read_splits(settings, source, scratch / "texts")
    splits = _cut(splits, settings)
    if tokenizer is None:
        tokenizer = _train_tokenizer(splits["train"], vocabulary)
        tokenizer.save_pretrained(target / "tokenizer")

    def encode(batch):
        ids = tokenizer(
            batch["text"], truncation=True, max_length=settings.max_length,
            return_attention_mask=False, return_token_type_ids=False,
        )["input_ids"]  # fmt: skip
        return {"input_ids": [np.asarray(row, np.int32) for row in ids], "length": [len(row) for row in ids]}

    tokens = {}
    for split in SPLITS:
        texts = splits[split].rename_column("label", "labels")
        tokens[split] = _map(texts, encode, split, scratch, remove_columns=["text"])
        if pc.min(tokens[split].data.column("length")).as_py() == 0:
            raise DatasetError(f"a {split} text has no token left: remove texts that hold only unknown characters")
    return _save(target, tokens, {"class_names": class_names})


def _map(table: hf.Dataset, function: Callable[[dict], dict], name: str, scratch: Path, **options) -> hf.Dataset:
    """Write what `function` makes of the table's batches into a file, from where it is mapped."""
    return table.map(
        function, batched=True, load_from_cache_file=False, new_fingerprint=name, desc="Tokenizing",
        cache_file_name=str(scratch / f"mapped-{name}.arrow"), **options,
    )  # fmt: skip


def _save(target: Path, splits: dict[str, hf.Dataset], facts: dict) -> Path:
    """Write tokens and facts into the folder `target`, which is returned, with a hash of what they hold."""
    content = hashlib.sha256(json.dumps(facts["class_names"]).encode())
    for split, tokens in splits.items():
        for batch in tokens.with_format("numpy").iter(1000):
            labels = batch["labels"] if facts["class_names"] else np.concatenate(batch["labels"])
            for column in (np.concatenate(batch["input_ids"]), batch["length"], labels):
                content.update(column.astype("<i8").tobytes())
        tokens.save_to_disk(target / split)
    facts["fingerprint"] = content.hexdigest()[:20]
    (target / "facts.json").write_text(json.dumps(facts, ensure_ascii=False), encoding="utf-8")
    return target


def _read_splits(settings: DataSettings, source: list, scratch: Path) -> tuple[dict[str, hf.Dataset], list[str]]:
    """Return the splits that the source has, with the columns `text` and `label`, and the names of the classes."""
    kind, *rest = source
    if kind in ("imdb", "synthetic"):
        return _read_reviews(settings, kind, scratch), ["negative", "positive"]
    if kind == "hub":
        splits = {
            split: _text_and_label(table, f"{rest[0]} ({split})", settings)
            for split, table in _load_hub(rest[0], scratch).items()
        }
    else:
        splits = {}
        for split, stamps in rest[0].items():
            parts = [_text_and_label(_read_file(Path(path), scratch), path, settings) for path, _, _ in stamps]
            kinds = {str(part.features["label"]) for part in parts}
            if len(kinds) > 1:
                raise DatasetError(f"the {split} files hold labels of unlike kinds: make all integers or all strings")
            splits[split] = hf.concatenate_datasets(parts) if len(parts) > 1 else parts[0]
    return _number_labels(splits, "texts")


def _read_reviews(settings: DataSettings, kind: str, scratch: Path) -> dict[str, hf.Dataset]:
    """Return the splits of the reviews, with the columns `text` and `label` (0 negative, 1 positive)."""
    if kind == "imdb":
        reviews = load_dataset_into_to_dataframe(settings.data_dir)
        rows = [part.index.to_numpy() for part in _imdb_parts(reviews[["label"]])]
        table = pa.Table.from_pandas(reviews, preserve_index=False).replace_schema_metadata()
        mapped = _copy(table.to_batches(1000), table.schema, scratch)
        del reviews, table
        pa.default_memory_pool().release_unused()  # 150 MB: from here on they are read from the disk
        return {split: mapped.select(some) for split, some in zip(SPLITS, rows, strict=True)}
    wanted = (settings.train_samples, settings.validation_samples, settings.test_samples)
    sizes = [max(own, some or 0) for own, some in zip(SYNTHETIC_SIZES, wanted, strict=True)]
    splits = {}
    for number, (split, size) in enumerate(zip(SPLITS, sizes, strict=True)):
        texts, labels = synthetic_reviews(size, 3 * settings.split_seed + number)
        splits[split] = hf.Dataset.from_dict({"text": texts, "label": labels})
    return splits


def _load_hub(name: str, scratch: Path) -> dict[str, hf.Dataset]:
    """Download a data set and return those of its splits that are used."""
    if not _hub_answers():
        raise DatasetError(f"--dataset {name}: no such file or folder, and the Hub cannot be reached")
    try:
        loaded = hf.load_dataset(name, cache_dir=str(scratch))
    except Exception as error:  # the Hub's builders raise errors of many kinds
        raise DatasetError(f"cannot load the data set {name} from the Hub ({_brief(error)})") from error
    if "train" not in loaded:
        raise DatasetError(f"the data set {name} has no split named train, only {', '.join(loaded)}")
    return {split: loaded[split] for split in SPLITS if split in loaded}


def _read_file(path: Path, scratch: Path) -> hf.Dataset:
    """Read a table into an Arrow file in `scratch`, which is mapped from there however large it is."""
    kind = FILE_FORMATS.get(path.suffix.lower())
    if kind is None:
        raise DatasetError(f"{path}: files of this kind are not read, only {', '.join(FILE_FORMATS)}")
    with _reading(path, kind):
        if kind != "parquet":
            with open(path, encoding="utf-8") as lines:  # `datasets` would guess another encoding, or die of it
                for _ in lines:
                    pass
        if kind == "parquet":
            return _read_parquet(path, scratch)
        options = {"keep_default_na": False} if kind == "csv" else {}  # the text "None" is a text
        return hf.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(scratch), **options)


def _read_parquet(path: Path, scratch: Path) -> hf.Dataset:
    """Copy 1,000 rows at a time; `datasets` would have all of a row group in memory, and often a file is one."""
    with pq.ParquetFile(path, memory_map=True) as file:  # else all of a column of a row group is read at once
        if file.metadata.num_rows == 0:
            raise DatasetError(f"{path} holds no rows")
        schema = hf.Features.from_arrow_schema(file.schema_arrow).arrow_schema
        return _copy((table_cast(pa.table(batch), schema) for batch in file.iter_batches(1000)), schema, scratch)


def _copy(tables: Iterable[pa.Table | pa.RecordBatch], schema: pa.Schema, scratch: Path) -> hf.Dataset:
    """Write tables as they come into a new Arrow file in `scratch`, and map it."""
    scratch.mkdir(parents=True, exist_ok=True)
    target = scratch / f"copy-{len(list(scratch.iterdir()))}.arrow"
    with pa.OSFile(str(target), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for table in tables:
            writer.write(table)
    return hf.Dataset.from_file(str(target))


@contextmanager
def _reading(path: Path, kind: str):
    """Say in one line why a file cannot be read."""
    try:
        if path.stat().st_size == 0:
            raise DatasetError(f"{path} is empty")
        yield
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{path} is not UTF-8 (byte {error.object[error.start]:#x}): convert it, say by iconv"
        ) from error
    except DatasetError:
        raise
    except OSError as error:
        raise DatasetError(f"cannot read {path} ({_brief(error)})") from error
    except Exception as error:  # parsers raise errors of many kinds, and `datasets` wraps them
        raise DatasetError(f"{path} cannot be read as {kind} ({_brief(error.__cause__ or error)})") from error


def _text_and_label(table: hf.Dataset, where: str, settings: DataSettings) -> hf.Dataset:
    """Check the two columns that are used and name them `text` and `label`."""
    if settings.text_column == settings.label_column:
        raise DatasetError(f"--text_column and --label_column name the same column, {settings.text_column!r}")
    for name in (settings.text_column, settings.label_column):
        if name not in table.column_names:
            found = ", ".join(table.column_names)
            raise DatasetError(f"{where} has no column {name!r}, only {found}: set --text_column or --label_column")
    table = table.select_columns([settings.text_column, settings.label_column])
    table = table.rename_columns({settings.text_column: "text", settings.label_column: "label"})
    text = table.data.column("text")
    if not str(text.type).endswith("string"):
        raise DatasetError(f"{where}: column {settings.text_column!r} holds {text.type}, not text")
    empty = [pc.fill_null(pc.equal(pc.utf8_trim_whitespace(chunk), ""), True) for chunk in text.iterchunks()]
    _refuse_rows(pa.chunked_array(empty, pa.bool_()), f"{where}: empty text")
    _check_labels(table, where, settings)
    return table


def _check_labels(table: hf.Dataset, where: str, settings: DataSettings) -> None:
    """Refuse a column `label` that holds no labels, or not in every row."""
    label = table.data.column("label")
    if not (pa.types.is_integer(label.type) or pa.types.is_boolean(label.type) or str(label.type).endswith("string")):
        raise DatasetError(f"{where}: column {settings.label_column!r} holds {label.type}, not integers or strings")
    empty = pc.is_null(label)
    if str(label.type).endswith("string"):
        empty = pc.or_(empty, pc.fill_null(pc.equal(label, ""), False))
    elif isinstance(table.features["label"], hf.ClassLabel):
        empty = pc.or_(empty, pc.less(label, 0))
    _refuse_rows(empty, f"{where}: no label")


def _refuse_rows(bad, problem: str) -> None:
    rows = np.flatnonzero(bad.to_numpy())
    if len(rows):
        some = ", ".join(str(row + 1) for row in rows[:5]) + (", …" if len(rows) > 5 else "")
        raise DatasetError(f"{problem} in {len(rows):,} of {len(bad):,} rows (row {some}): fill or remove them")


def _number_labels(splits: dict[str, hf.Dataset], what: str) -> tuple[dict[str, hf.Dataset], list[str]]:
    """Replace the labels by 0, 1, … in the order of their values (numbers by size, strings by letters).

    `what` they are labels of is for the messages.
    """
    feature = splits["train"].features["label"]
    if isinstance(feature, hf.ClassLabel):
        return {split: table.cast_column("label", hf.Value("int64")) for split, table in splits.items()}, feature.names
    values = sorted(pc.unique(splits["train"].data.column("label")).to_pylist())
    if len(values) < 2:
        raise DatasetError(f"all training {what} have the same label, {values[0]!r}: there is nothing to learn")
    number = {value: index for index, value in enumerate(values)}
    for split, table in splits.items():
        strange = [value for value in pc.unique(table.data.column("label")).to_pylist() if value not in number]
        if strange:
            raise DatasetError(f"the {split} {what} have labels that the training {what} lack: {strange[:5]}")
        ids = pc.index_in(table.data.column("label"), pa.array(values, table.data.column("label").type))
        splits[split] = table.remove_columns("label").add_column("label", ids.cast(pa.int64()).to_numpy())
    return splits, [str(value) for value in values]


def _cut(splits: dict[str, hf.Dataset], settings: DataSettings) -> dict[str, hf.Dataset]:
    """Split off what the source lacks (10 % validation, 20 % test) and keep as many samples as the settings want."""
    what = {"image-classification": "images", "instruction-tuning": "samples"}.get(settings.task, "texts")
    missing = {split: share for split, share in (("validation", 0.1), ("test", 0.2)) if split not in splits}
    if missing:
        train = splits["train"]
        order = np.random.default_rng(settings.split_seed).permutation(len(train))
        for split, share in missing.items():
            size = max(1, round(share * len(train)))
            splits[split], order = train.select(order[:size]), order[size:]
        if len(order) == 0:
            raise DatasetError(f"{len(train)} {what} are too few to be split into train, validation and test")
        splits["train"] = train.select(order)
    for split in SPLITS:
        wanted = getattr(settings, f"{split}_samples")
        if wanted and wanted < len(splits[split]):
            splits[split] = splits[split].shuffle(settings.split_seed).select(range(wanted))
    if "label" in splits["train"].column_names:
        labels = (set(batch["label"]) for batch in splits["train"].select_columns("label").iter(1000))
        first = next(labels)
        if len(first) == 1 and all(more == first for more in labels):
            raise DatasetError(f"the training {what} that are left have a single label: raise --train_samples")
    return splits


def _trained_vocabulary(model: str) -> int:
    """Entries of a tokenizer trained for this model: its embedding's rows, at most 32,768."""
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    try:
        return min(json.loads(path.read_text(encoding="utf-8"))["vocab_size"], 32_768)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"--tokenizer trained needs a config with vocab_size: {path} ({_brief(error)})") from error


def _train_tokenizer(texts: hf.Dataset, vocabulary: int, **special: str) -> PreTrainedTokenizerFast:
    """Learn a byte-level byte-pair encoding, BLOOM's kind of tokenizer, from the training texts.

    `special` tokens beside the padding one are given by their names in transformers, say `eos_token`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", *special.values()],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator((batch["text"] for batch in texts.iter(1000)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", **special)


def _leave_out(bad: list[tuple[str, str]], total: int, problem: str, settings: DataSettings) -> list[str]:
    """Return the notice, if any, that what is bad (names with reasons) is left out, or refuse it."""
    if not bad:
        return []
    some = "; ".join(f"{name}: {reason}" for name, reason in bad[:3]) + ("; …" if len(bad) > 3 else "")
    found = f"{len(bad):,} of {total:,} {problem} ({some})"
    if settings.bad_samples == "refuse":
        raise DatasetError(f"{found}: mend or remove them, or leave them out with --bad_samples skip")
    return [f"{found} and are left out"]


@contextmanager
def _quiet():
    """No log of `datasets`, whose errors are said in one line, and no progress bars where nobody watches them."""
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


def _brief(error: BaseException) -> str:
    """The first line of an error's message."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


# ----------------------------------------------------------------------------------------------------------------------
# Instructions: from rows to prompts and answers
# ----------------------------------------------------------------------------------------------------------------------


def prompt_text(instruction: str, input: str = "", template: str | None = None) -> str:
    """Write what a model is asked, up to where its answer starts.

    Args:
        instruction: What to do.
        input: What to do it with; may be empty.
        template: A text with `{instruction}` and perhaps `{input}`; a line that holds nothing but `{input}` is left out
            where the input is empty. None or `alpaca`: Alpaca's two wordings.

    Raises:
        DatasetError: The template lacks `{instruction}` or names another field.
    """
    whole, short = _prompt_forms(template)
    if not input.strip():
        whole, input = short, ""
    return whole.format(instruction=instruction, input=input)


@lru_cache
def _prompt_forms(template: str | None) -> tuple[str, str]:
    """Return the forms of a prompt with and without an input, for `str.format`."""
    if template in (None, "alpaca"):
        return ALPACA
    template = template.replace("\\n", "\n")  # as it is typed on a command line
    try:
        fields = [tuple(field) for _, *field in string.Formatter().parse(template) if field[0] is not None]
    except ValueError as error:
        raise DatasetError(f"--prompt_template: {error}; write a brace that is meant as one twice") from error
    for name, form, conversion in fields:
        if name not in ("instruction", "input") or form or conversion:
            raise DatasetError(
                f"--prompt_template names {{{name}}}: only {{instruction}} and {{input}} are filled in, as they are; "
                "write a brace that is meant as one twice"
            )
    if "instruction" not in [name for name, *_ in fields]:
        raise DatasetError(f"--prompt_template {template!r} lacks {{instruction}}: say where the instruction goes")
    return template, "\n".join(line for line in template.split("\n") if line.strip() != "{input}")


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[list[int]]:
    """Tokenise prompts that an answer will follow: with what the tokenizer puts first (say BOS), but no end."""
    encoded = tokenizer(
        prompts, return_special_tokens_mask=True, return_attention_mask=False, return_token_type_ids=False,
        verbose=False,
    )  # fmt: skip
    rows = zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
    return [ids[: len(ids) - (mask[::-1].index(0) if 0 in mask else 0)] for ids, mask in rows]


def _part_tokens(tokenizer: PreTrainedTokenizerBase, parts: list[str]) -> list[list[int]]:
    """Tokenise parts of a text that goes on before and after them."""
    return tokenizer(
        parts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )["input_ids"]  # fmt: skip


def _set_end(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """See to a token that ends an answer: BERT's kind has none, and gets its separator."""
    if tokenizer.eos_token is None:
        if tokenizer.sep_token is None:
            raise DatasetError(
                f"the tokenizer of {name} has no token that ends an answer (eos_token): choose another --tokenizer"
            )
        tokenizer.eos_token = tokenizer.sep_token


def _tokenise_instructions(settings: DataSettings, source: list, tokenizer, vocabulary, scratch: Path) -> Path:
    """Read all splits, tokenise prompts and answers and save them into a folder in `scratch`, which is returned."""
    target = scratch / "tokens"
    splits, notices = _read_instructions(settings, source, scratch)
    splits = _cut(splits, settings)
    chat, longest = "messages" in splits["train"].column_names, settings.max_length
    if chat and (tokenizer is None or tokenizer.chat_template is None):
        raise DatasetError(
            f"{settings.dataset} holds messages, and the tokenizer has no chat template to write them: choose a "
            "--tokenizer that has one, or give instructions with the columns instruction and output"
        )
    if chat and settings.prompt_template:
        notices.append("--prompt_template is not used: the tokenizer's chat template writes the messages")

    def prompts(batch):
        pairs = zip(batch["instruction"], batch["input"], strict=True)
        return [prompt_text(*pair, settings.prompt_template) for pair in pairs]

    if tokenizer is None:
        texts = _map(
            splits["train"],
            lambda batch: {"text": prompts(batch) + batch["output"]},
            "texts",
            scratch,
            remove_columns=INSTRUCTIONS.names,
        )
        tokenizer = _train_tokenizer(texts, vocabulary, eos_token=END_OF_TEXT)
        tokenizer.save_pretrained(target / "tokenizer")
    bad, counts, total = [], Counter(), sum(map(len, splits.values()))

    def samples(batch):
        """Return the samples as lists of tokens of which every second is trained."""
        if chat:
            return _chat_tokens(batch, tokenizer, bad)
        counts["input"] += sum(map(bool, map(str.strip, batch["input"])))
        answers = _part_tokens(tokenizer, batch["output"])
        asked = prompt_tokens(tokenizer, prompts(batch))
        return [[ids, [*answer, tokenizer.eos_token_id]] for ids, answer in zip(asked, answers, strict=True)]

    def encode(batch):
        columns = {name: [] for name in features}
        for parts in samples(batch):
            ids = np.array([token for part in parts for token in part], np.int32)
            answered = np.repeat(np.arange(len(parts)) % 2 == 1, [len(part) for part in parts])
            labels = (ids if settings.train_on_inputs else np.where(answered, ids, np.int32(IGNORED)))[:longest]
            items = np.count_nonzero(labels[1:] != IGNORED)
            if items:
                counts["cut"] += bool(answered[longest:].any())
                row = {"input_ids": ids[:longest], "labels": labels, "length": len(labels), "items": items}
                for name, value in row.items():
                    columns[name].append(value)
            else:
                counts["left out"] += 1
        return columns

    tokens, number = hf.List(hf.Value("int32")), hf.Value("int64")
    features = hf.Features({"input_ids": tokens, "labels": tokens, "length": number, "items": number})
    for split in SPLITS:
        names = splits[split].column_names
        splits[split] = _map(splits[split], encode, split, scratch, remove_columns=names, features=features)
    notices += _leave_out(bad, total, "samples cannot be written by the tokenizer's chat template", settings)
    if counts["left out"]:
        notices.append(
            f"{counts['left out']:,} of {total:,} samples have a prompt of --max_length {longest} tokens or more and "
            "are left out"
        )
    for split in SPLITS:
        if len(splits[split]) == 0:
            cure = f": raise --max_length {longest}" if counts["left out"] else ""
            raise DatasetError(f"no {split} sample is left ({'; '.join(notices)}){cure}")
    if counts["cut"]:
        notices.append(f"{counts['cut']:,} of {total:,} samples have their answer cut at --max_length {longest} tokens")
    if counts["input"] and "{input}" not in _prompt_forms(settings.prompt_template)[0]:
        notices.append(f"{counts['input']:,} of {total:,} samples have an input that --prompt_template does not show")
    return _save(target, splits, {"class_names": [], "chat": chat, "notices": notices})


def _chat_tokens(batch: dict[str, list], tokenizer: PreTrainedTokenizerBase, bad: list) -> list[list[list[int]]]:
    """Tokenise the parts of chats; `bad` gets places and reasons of those that the template cannot write."""
    chats = []
    for messages, place in zip(batch["messages"], batch["place"], strict=True):
        try:
            chats.append(_chat_parts(messages, tokenizer))
        except Exception as error:  # a template is a program of its own
            bad.append((place, _brief(error)))
    tokens = iter(_part_tokens(tokenizer, [part for parts in chats for part in parts]) if chats else ())
    return [list(itertools.islice(tokens, len(parts))) for parts in chats]


def _chat_parts(messages: list[dict], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Write a chat by the tokenizer's template, cut so that every second part is an assistant's turn.

    Raises:
        ValueError: The template writes a turn otherwise when more follows.
        Exception: Any that the template raises.
    """
    ends = [(end, False) for end, message in enumerate(messages, 1) if message["role"] == "assistant"]
    ends = [step for end, _ in ends for step in ((end - 1, True), (end, False))]
    parts, written = [], ""
    for end, ask in [*ends, (len(messages), False)]:
        text = tokenizer.apply_chat_template(messages[:end], tokenize=False, add_generation_prompt=ask)
        if not text.startswith(written):
            raise ValueError(f"the messages before message {end} are written otherwise once it follows")
        parts.append(text[len(written) :])
        written = text
    return parts if parts[-1] else parts[:-1]


def _read_instructions(settings: DataSettings, source: list, scratch: Path) -> tuple[dict[str, hf.Dataset], list[str]]:
    """Return the splits that the source has, and notices of rows that are left out.

    The columns are `instruction`, `input` and `output`, or `messages` and `place` (file and row, for messages).
    """
    kind, *rest = source
    if kind in ("imdb", "synthetic"):
        reviews = _read_reviews(settings, kind, scratch)
        return {split: _ask_of_reviews(table, scratch / f"{split}.arrow") for split, table in reviews.items()}, []
    if kind == "hub":
        sources = {
            split: {f"{rest[0]} ({split})": _table_rows(table)}
            for split, table in _load_hub(rest[0], scratch / "hub").items()
        }
    else:
        sources = {
            split: {path: _file_rows(Path(path), scratch / "files") for path, _, _ in stamps}
            for split, stamps in rest[0].items()
        }
    splits, notices, forms = {}, [], {}
    for split, files in sources.items():
        tables = []
        for where, rows in files.items():
            target = scratch / f"{split}-{len(tables)}.arrow"
            tables.append(_read_rows(rows, where, target, settings, notices))
            forms.setdefault(tuple(tables[-1].column_names), where)
        splits[split] = hf.concatenate_datasets(tables) if len(tables) > 1 else tables[0]
        if len(forms) > 1:
            raise DatasetError(f"{' and '.join(forms.values())} are of two forms: give messages or instructions alone")
    return splits, notices


def _ask_of_reviews(reviews: hf.Dataset, target: Path) -> hf.Dataset:
    """Make instructions of labelled reviews, written to `target`."""
    rows = (
        {"instruction": REVIEW_QUESTION, "input": text, "output": "positive" if label else "negative"}
        for batch in reviews.iter(1000)
        for text, label in zip(batch["text"], batch["label"], strict=True)
    )
    _write(target, INSTRUCTIONS, rows)
    return hf.Dataset.from_file(str(target))


def _read_rows(
    rows: Iterator[tuple[str, dict | ValueError]], where: str, target: Path, settings: DataSettings, notices: list[str]
) -> hf.Dataset:
    """Check rows (place and row, or why it is none) and write them to `target`; `notices` gets what is left out."""
    seen, columns, form = [], {}, None
    for place, row in itertools.islice(rows, 1000):
        seen.append((place, row))
        columns |= dict.fromkeys(row if isinstance(row, dict) else ())
        form = next((form for form in INSTRUCTION_FORMS if columns.keys() >= set(form)), None)
        if form:
            break
    if form is None:
        reasons = "; ".join(f"{place}: {row}" for place, row in seen[:3]) or "none"
        found = f"has the columns {', '.join(columns)}" if columns else f"holds no rows that can be read ({reasons})"
        raise DatasetError(
            f"{where} {found}: instructions are read as instruction, output and perhaps input, as input and target, or "
            "as messages"
        )
    bad, total = [], 0

    def good():
        nonlocal total
        for place, row in itertools.chain(seen, rows):
            total += 1
            try:
                if isinstance(row, ValueError):
                    raise row
                checked = _chat(row) | {"place": f"{where}, {place}"} if form == ("messages",) else _pair(row, *form)
            except ValueError as error:
                bad.append((place, str(error)))
            else:
                yield checked

    _write(target, CHATS if form == ("messages",) else INSTRUCTIONS, good())
    notices += _leave_out(bad, total, f"rows of {where} cannot be used", settings)
    if len(bad) == total:
        raise DatasetError(f"no row is left: {notices[-1]}")
    return hf.Dataset.from_file(str(target))


def _pair(row: dict, asked: str, answer: str) -> dict[str, str]:
    texts = {"instruction": _text(row, asked), "input": "", "output": _text(row, answer)}
    if asked != "input":
        texts["input"] = _text(row, "input", may_be_empty=True)
    return texts


def _chat(row: dict) -> dict[str, list[dict[str, str]]]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages is {messages!r:.40}, not a list of messages" if messages else "no messages")
    chat = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is {message!r:.40}, not role and content")
        role = message.get("role")
        if role not in ROLES:
            raise ValueError(f"message {number} has the role {role!r:.40}, not {', '.join(ROLES)}")
        content = _text(message, "content", f" in message {number}", may_be_empty=role == "system")
        chat.append({"role": role, "content": content})
    roles = [message["role"] for message in chat]
    if "assistant" not in roles:
        raise ValueError("no message of the assistant")
    if roles[0] == "assistant":
        raise ValueError("the first message is the assistant's")
    return {"messages": chat}


def _text(row: dict, name: str, where: str = "", may_be_empty: bool = False) -> str:
    text = row.get(name)
    if text is None:
        text = ""
    if not isinstance(text, str):
        raise ValueError(f"{name}{where} is {text!r:.40}, not text")
    if not (may_be_empty or text.strip()):
        raise ValueError(f"no {name}{where}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}{where} holds half a character (a lone surrogate)") from None
    return text


def _file_rows(path: Path, scratch: Path) -> Iterator[tuple[str, dict | ValueError]]:
    """Go through a file's rows with their places; CSV values are all texts, and a bad JSON line is an error's value."""
    kind = FILE_FORMATS.get(path.suffix.lower())
    if kind == "json":
        with _reading(path, kind), open(path, encoding="utf-8-sig") as file:
            first = next((line for line in file if line.strip()), "").lstrip()[:1]
            file.seek(0)
            yield from _json_list(file) if first == "[" else _json_lines(file)
    elif kind == "csv":
        with _reading(path, kind):
            for chunk in pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8", chunksize=1000):
                if not isinstance(chunk.index, pd.RangeIndex):
                    raise ValueError("its rows have more fields than its header: quote texts that hold commas")
                frame = chunk.astype(object).where(chunk.notna(), None)
                for index, row in zip(frame.index, frame.to_dict("records"), strict=True):
                    yield f"row {index + 1}", row
    else:
        yield from _table_rows(_read_file(path, scratch))


def _table_rows(table: hf.Dataset) -> Iterator[tuple[str, dict]]:
    number = itertools.count(1)
    for batch in table.with_format("arrow").iter(1000):
        for row in batch.to_pylist():
            yield f"row {next(number)}", row


def _json_list(file: Iterable[str]) -> Iterator[tuple[str, dict | ValueError]]:
    for number, row in enumerate(json.load(file), 1):
        yield f"row {number}", row if isinstance(row, dict) else ValueError("no JSON object")


def _json_lines(file: Iterable[str]) -> Iterator[tuple[str, dict | ValueError]]:
    for number, line in enumerate(map(str.strip, file), 1):
        if line:
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                row = ValueError(f"no JSON ({error.msg}, column {error.colno})")
            except (ValueError, RecursionError) as error:
                row = ValueError(f"no JSON ({_brief(error)})")
            yield f"line {number}", row if isinstance(row, (dict, ValueError)) else ValueError("no JSON object")


# ----------------------------------------------------------------------------------------------------------------------
# Images: from files to pixels
# ----------------------------------------------------------------------------------------------------------------------


def _load_images(settings: DataSettings) -> ImageDatasets:
    form, notices = read_image_format(settings)
    source = _find_images(settings)
    names = ("image_column", "label_column", "bad_samples", "train_samples", "validation_samples", "test_samples")
    chosen = [getattr(settings, name) for name in (*names, "split_seed")]
    inputs = [IMAGE_CACHE_FORMAT, PIL.__version__, source, form.resize_to, form.resample, *chosen]
    folder = _make_once(settings, "images", inputs, partial(_decode_splits, settings, source, form))
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    splits = hf.DatasetDict()
    for split in SPLITS:
        table = hf.Dataset.from_file(str(folder / f"{split}.arrow"))
        splits[split] = table.add_column("length", np.full(len(table), form.tokens))
    fingerprint = hashlib.sha256(f"{facts['content']} {json.dumps(form)}".encode()).hexdigest()[:20]
    return ImageDatasets(splits, facts["class_names"], form, fingerprint, notices + facts["notices"])


def read_image_format(settings: DataSettings) -> tuple[ImageFormat, list[str]]:
    """Read off the model's config, and its preprocessor_config.json if it has one, what it wants to see."""
    processor, notices = {}, []
    if settings.model.endswith(".json"):
        try:
            config = AutoConfig.from_pretrained(settings.model)
        except (OSError, ValueError, KeyError, StrictDataclassError) as error:
            raise DatasetError(f"{settings.model} is no model config ({_brief(error)})") from error
    else:
        with reachable(settings.model, "model") as options:
            config = AutoConfig.from_pretrained(settings.model, **options)
            try:
                processor, _ = ImageProcessingMixin.get_image_processor_dict(settings.model, **options)
            except OSError as error:
                if "preprocessor_config" not in str(error):
                    raise
                notices.append(f"{settings.model} has no preprocessor_config.json: pixels are scaled to -1 … 1 for it")
    if getattr(config, "num_channels", 3) != 3:
        raise DatasetError(f"{settings.model} reads {config.num_channels} channels, images have 3: choose another")
    shown = processor.get("crop_size") if processor.get("do_center_crop") else None
    whole = processor.get("size") if processor.get("do_resize", True) else None
    sizes = [_side(size) for size in (settings.image_size, shown, whole, getattr(config, "image_size", None))]
    size = next((size for size in sizes if size is not None), None)
    if size is None:
        raise DatasetError(f"{settings.model} does not say how large its images are: set --image_size")
    patch = _side(getattr(config, "patch_size", None)) or 16
    if size < patch:
        raise DatasetError(f"--image_size {size} is smaller than a patch of {settings.model}, {patch}: raise it")
    resize_to = size if settings.resize_to is None else settings.resize_to
    if resize_to < size:
        raise DatasetError(f"--resize_to {resize_to}: no square of {size} can be cut out of it; raise it to {size}")
    mean = std = 0.5
    if not processor.get("do_normalize", True):
        mean, std = 0.0, 1.0
    elif processor:
        mean, std = (processor.get(name) or 0.5 for name in ("image_mean", "image_std"))
    scale = 255 * processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 255
    mean, std = (tuple((np.broadcast_to(value, 3) / scale).tolist()) for value in (mean, std))
    resample = "bicubic" if processor.get("resample") == Image.Resampling.BICUBIC else "bilinear"
    tokens = (size // patch) ** 2 + 1
    return ImageFormat(size, resize_to, mean, std, resample, settings.random_flip, tokens), notices


def _side(size: int | dict | list | None) -> int | None:
    """Pixels of a side, in any of the forms in which configs give them."""
    if isinstance(size, dict):
        return size.get("height") or size.get("shortest_edge")
    return size[0] if isinstance(size, (list, tuple)) else size


def _find_images(settings: DataSettings) -> list:
    """Return what identifies the images: their kind and their files (path, size and time of change)."""
    name = settings.dataset
    if name in ("imdb", "synthetic"):
        raise DatasetError(
            f"--dataset {name} holds texts: --task image-classification needs a folder with a folder for each class, "
            f"an archive ({', '.join(ARCHIVES)}) of one, or a name on the Hub"
        )
    if settings.validation_file or settings.test_file:
        raise DatasetError(
            "--validation_file and --test_file are for texts: put images into the folders train, validation and test "
            "of --dataset"
        )
    path, packed = _find_file(name, settings.data_dir), name.lower().endswith(ARCHIVES)
    if path is None and not packed and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return ["hub", name]
    if path is None:
        raise DatasetError(f"there is no file or folder {name} here or in {settings.data_dir}")
    if not path.is_dir():
        if not packed:
            raise DatasetError(f"{path} is neither a folder nor an archive ({', '.join(ARCHIVES)}) of images")
        return ["archive", _stamp(path)]
    digest = hashlib.sha256()
    try:
        for file in _walk(path)[0]:
            status = (path / file).stat()
            digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape"))
    except OSError as error:
        raise DatasetError(f"cannot read {path} ({_brief(error)})") from error
    return ["folder", str(path.resolve()), digest.hexdigest()]


def _walk(folder: Path) -> tuple[list[str], list[str]]:
    """Return the images and the folders below a folder, by their paths from there, as far down as they may lie."""

    def stop(error: OSError):
        raise error

    files, folders = [], []
    for path, below, names in os.walk(folder, onerror=stop, followlinks=True):
        here = PurePosixPath(Path(path).relative_to(folder).as_posix())
        below[:] = [name for name in below if _shown(here / name)] if len(here.parts) < 5 else []
        folders += [str(here / name) for name in below]
        files += [str(here / name) for name in names if _is_image(here / name)]
    return sorted(files), sorted(folders)


def _shown(path: PurePosixPath) -> bool:
    """Tell files and folders of the user's from those that file managers add."""
    return not any(part.startswith(".") or part == "__MACOSX" for part in path.parts)


def _is_image(path: PurePosixPath) -> bool:
    return path.suffix.lower() in IMAGES and _shown(path)


def _layout(files: list[str], folders: list[str], where: str | Path) -> dict[str, list[tuple[str, str]]]:
    """Tell splits and classes from the paths of images: for each split, its files with the names of their classes.

    The paths are `<class>/<file>` or `<split>/<class>/<file>`; a folder that holds all else is looked through.
    """
    if not files:
        raise DatasetError(f"{where} holds no image ({', '.join(IMAGES)})")
    paths = {name: PurePosixPath(name).parts for name in files}
    empty = {PurePosixPath(name).parts for name in folders}
    while len({path[0] for path in paths.values()} | {path[0] for path in empty}) == 1 and any(
        len(path) > 2 for path in paths.values()
    ):
        paths = {name: path[1:] for name, path in paths.items()}
        empty = {path[1:] for path in empty if len(path) > 1}
    tops = {path[0] for path in empty}
    split_of = {top: FOLDER_SPLITS.get(top.lower()) for top in tops}
    is_split = any(split == "train" for split in split_of.values()) and not any(
        len(path) == 2 and split_of[path[0]] == "train" for path in paths.values()
    )
    depth = 3 if is_split else 2
    form = "<split>/<class>/<image>" if is_split else "<class>/<image>"
    if wrong := [name for name, path in paths.items() if len(path) != depth]:
        some = ", ".join(wrong[:3]) + (", …" if len(wrong) > 3 else "")
        raise DatasetError(
            f"{where}: {len(wrong):,} of {len(files):,} images do not lie in the folder of a class ({some}): move them "
            f"so that all paths are {form}"
        )
    if is_split and (strange := sorted(top for top in tops if split_of[top] is None)):
        raise DatasetError(f"{where}: the folder {strange[0]} beside train is no split: name it validation or test")
    empty -= {path[:-1] for path in paths.values()}
    for path in sorted(empty):
        if len(path) == depth - 1 and (not is_split or split_of[path[0]] == "train"):
            raise DatasetError(f"{where}: the folder {'/'.join(path)} holds no image: fill or remove it")
    found = {}
    for name, path in sorted(paths.items()):
        found.setdefault(split_of[path[0]] if is_split else "train", []).append((name, path[-2]))
    if "train" not in found:
        raise DatasetError(f"{where} holds no training image")
    return found


def _read_images(
    settings: DataSettings, source: list, scratch: Path
) -> tuple[hf.Dataset, dict[str, hf.Dataset], list[str]]:
    """Return all image files, the splits that the source has, and the names of the classes.

    The splits have the columns `row` (of the table of files) and `label`, so that no image moves when they are cut.
    """
    kind, name = source[0], settings.dataset
    splits, tables, start = {}, [], 0
    if kind == "hub":
        for split, table in _load_hub(name, scratch / "hub").items():
            where = f"{name} ({split})"
            if settings.label_column not in table.column_names:
                found = ", ".join(table.column_names)
                raise DatasetError(f"{where} has no column {settings.label_column!r}, only {found}: set --label_column")
            images = table.select_columns([_image_column(table, where, settings)])
            images = images.rename_columns({images.column_names[0]: "image"})
            tables.append(images.cast_column("image", hf.Image(decode=False)))
            labels = table.select_columns([settings.label_column])
            labels = labels.rename_columns({settings.label_column: "label"})
            _check_labels(labels, where, settings)
            splits[split] = labels.add_column("row", np.arange(start, start + len(table)))
            start += len(table)
        files = hf.concatenate_datasets(tables)
    else:
        path = _find_file(name, settings.data_dir)
        if kind == "folder":
            found = _layout(*_walk(path), path)
            names = [file for some in found.values() for file, _ in some]
            places = pa.array([str(path / file) for file in names])
            images = pa.StructArray.from_arrays([pa.nulls(len(names), pa.binary()), places], fields=list(FILE))
            files = hf.Dataset(pa.table({"image": images}))
            rows = {file: row for row, file in enumerate(names)}
        else:
            files, rows, folders = _read_archive(path, scratch / "files.arrow")
            found = _layout(list(rows), folders, path)
        for split, some in found.items():
            columns = {"row": [rows[file] for file, _ in some], "label": [label for _, label in some]}
            splits[split] = hf.Dataset.from_dict(columns)
    return files, *_number_labels(splits, "images")


def _image_column(table: hf.Dataset, where: str, settings: DataSettings) -> str:
    images = [name for name, feature in table.features.items() if isinstance(feature, hf.Image)]
    if settings.image_column in images:
        return settings.image_column
    if settings.image_column not in table.column_names and len(images) == 1:
        return images[0]
    if not images:
        raise DatasetError(f"{where} has no column of images, only {', '.join(table.column_names)}")
    raise DatasetError(
        f"{where} has no column of images {settings.image_column!r}, only {', '.join(images)}: set --image_column"
    )


def _read_archive(path: Path, target: Path) -> tuple[hf.Dataset, dict[str, int], list[str]]:
    """Copy the image files of an archive, as they are, into one Arrow file; return it, its rows' names, and folders.

    A compressed archive can only be read from its beginning to its end, while splits are read in an order of their own.
    """
    rows, folders, count = {}, set(), itertools.count()

    def images() -> Iterator[dict]:
        try:
            for name, read in _members(path):
                member = PurePosixPath(name)
                if member.is_absolute() or ".." in member.parts:
                    raise DatasetError(f"{path} is not to be trusted: it holds {name!r}")
                above = member if read is None else member.parent
                folders.update(str(folder) for folder in (above, *above.parents) if folder.parts and _shown(folder))
                if read and _is_image(member):
                    rows[str(member)] = next(count)  # of two of one name the later counts, as on unpacking
                    yield {"image": {"bytes": read(), "path": str(member)}}
        except (*DAMAGES, zipfile.BadZipFile, RuntimeError) as error:  # the last of a password or an unknown packing
            raise DatasetError(f"{path} is damaged ({_brief(error)}): get it or pack it again") from error

    _write(target, pa.schema({"image": FILE}), images())
    return hf.Dataset.from_file(str(target)), rows, sorted(folders)


def _members(path: Path) -> Iterator[tuple[str, Callable[[], bytes] | None]]:
    """Go through an archive: the names of files with what reads them, those of folders with None."""
    if path.name.lower().endswith(".zip"):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                yield entry.filename, None if entry.is_dir() else partial(archive.read, entry)
    else:
        with tarfile.open(path) as archive:
            for entry in archive:
                if entry.isdir() or entry.isfile():
                    yield entry.name, None if entry.isdir() else archive.extractfile(entry).read
                archive.members.clear()  # which `tarfile` would keep
            archive.fileobj.seek(archive.offset)  # `tarfile` passes over a fault in any header but the first
            if archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("it has no end")


def _decode_splits(settings: DataSettings, source: list, form: ImageFormat, scratch: Path) -> Path:
    """Read, split and decode, and write pixels and facts into a folder in `scratch`, which is returned."""
    target = scratch / "pixels"
    target.mkdir()
    files, splits, class_names = _read_images(settings, source, scratch)
    splits = _cut(splits, settings)
    content, bad, kept = hashlib.sha256(json.dumps(class_names).encode()), [], {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about odd images that it reads all the same
        for split in SPLITS:
            kept[split] = []
            pixels = _decode_rows(files, splits[split], form, bad)
            _write(target / f"{split}.arrow", PIXELS, _hashed(pixels, content, kept[split]))
    notices = _leave_out(bad, sum(map(len, splits.values())), "images cannot be decoded", settings)
    if bad:
        if empty := [split for split in SPLITS if not kept[split]]:
            raise DatasetError(f"no image of the {empty[0]} split can be decoded")
        if len(set(kept["train"])) < 2:
            raise DatasetError("all training images that can be decoded have the same label")
    facts = {"class_names": class_names, "content": content.hexdigest(), "notices": notices}
    (target / "facts.json").write_text(json.dumps(facts, ensure_ascii=False), encoding="utf-8")
    return target


def _decode_rows(files: hf.Dataset, rows: hf.Dataset, form: ImageFormat, bad: list) -> Iterator[dict]:
    """Yield what is stored of each image in turn; what cannot be decoded is added to `bad` instead, with the reason."""
    decode = partial(_try_decode, side=form.resize_to, resample=Image.Resampling[form.resample.upper()])
    with ThreadPoolExecutor() as pool, hf.utils.tqdm(total=len(rows), desc="Decoding", unit="image") as progress:
        for batch in rows.iter(32):
            images = [image or dict.fromkeys(("bytes", "path")) for image in files[batch["row"]]["image"]]
            data = [_encoded(image) for image in images]
            large = sum(map(len, data)) > 2**14 * len(data)  # threads only delay each other where there is little to do
            decoded = (pool.map if large else map)(decode, data)
            for image, label, pixels in zip(images, batch["label"], decoded, strict=True):
                if isinstance(pixels, np.ndarray):
                    height, width, _ = pixels.shape
                    yield {"image": pixels.tobytes(), "height": height, "width": width, "labels": label}
                else:
                    bad.append((image["path"] or "an image without a name", _brief(pixels)))
            progress.update(len(images))


def _encoded(image: dict) -> bytes:
    if image["bytes"] is not None or image["path"] is None:
        return image["bytes"] or b""
    try:
        return Path(image["path"]).read_bytes()
    except OSError as error:
        raise DatasetError(f"cannot read {image['path']} ({_brief(error)})") from error


def _hashed(rows: Iterator[dict], content, labels: list[int]) -> Iterator[dict]:
    for row in rows:
        labels.append(row["labels"])
        content.update(np.array([row["height"], row["width"], row["labels"]], "<i8").tobytes() + row["image"])
        yield row


def _write(path: Path, schema: pa.Schema, rows: Iterable[dict]) -> None:
    """Write rows as they come into an Arrow file; 32 MB of images, or 1,024 rows of text, are in memory at once."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        batch, size = [], 0
        for row in rows:
            batch.append(row)
            size += len(row["image"] if "height" in row else row["image"]["bytes"]) if "image" in row else 2**15
            if size >= 2**25:
                writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))
                batch, size = [], 0
        writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))


def _try_decode(data: bytes, side: int, resample: Image.Resampling) -> np.ndarray | Exception:
    try:
        return _decode(data, side, resample)
    except PIL.UnidentifiedImageError:
        return ValueError("no image of a kind that is read" if data else "an empty file")
    except Exception as error:  # Pillow's readers raise errors of many kinds
        return error


def _decode(data: bytes, side: int, resample: Image.Resampling) -> np.ndarray:
    """Return (height, width, 3) bytes, upright and on white; an image larger than `side` is made that square."""
    with Image.open(BytesIO(data), formats=IMAGE_FORMATS) as image:
        image.draft(None, (2 * side, 2 * side))  # a much larger JPEG is decoded at half, a quarter, … of its size
        image.load()
        with suppress(SyntaxError):  # an EXIF part that is none
            image = ImageOps.exif_transpose(image)
        if image.mode[0] in "IF":  # more than 8 bits, which Pillow would clip
            levels = np.asarray(image)
            if image.mode == "F" or levels.min() < 0 or levels.max() > 65535:
                raise ValueError(f"its pixels (mode {image.mode}) are not 8 or 16 bits deep")
            image = Image.fromarray(((levels.astype(np.int32) + 128) // 257).astype(np.uint8))
        elif image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB")
        if max(image.size) > side:
            image = image.resize((side, side), resample)
        return np.asarray(image)


# ----------------------------------------------------------------------------------------------------------------------
# Synthetic reviews: nothing to download
# ----------------------------------------------------------------------------------------------------------------------

MEDIAN_WORDS, LOG_SIGMA, MOST_WORDS = 58, 0.64, 700  # a third of IMDb's median, its spread (0.645 of the logarithm)
P_LEAN = 0.72  # how often most aspects are judged as the film as a whole is
P_ASPECT = 0.8  # how often one aspect is judged as most of them are
P_NEGATED = 0.2  # how often a judgement is the negation of the opposite one
P_FILLER = 0.5  # how often a sentence is neutral
P_OPENING, P_ADVICE = 0.4, 0.3
LABEL_NOISE = 0.03  # how often the label is the wrong one

ADJECTIVES = (  # negative, positive
    "bad awful dull boring clumsy forgettable tedious weak lifeless dreadful silly predictable terrible tiresome",
    "good great superb brilliant charming clever moving memorable gripping wonderful delightful strong fresh witty",
)
WORDS = {
    "film": "film|movie|picture",
    "very": "|||really |quite |rather |truly |simply |very ",
    "not": "not |hardly |never |far from |anything but |by no means ",
    "not_a": "not |hardly |by no means |far from |anything but ",
    "is": "is|was|seems|felt",
    "aspect": "acting|plot|music|script|photography|dialogue|pacing|editing|direction|ending|opening|cast|humour|"
    "soundtrack|camera work|set design|romance|villain|lead actress|supporting cast",
    "who": "young teacher|retired detective|lonely widow|failed musician|country doctor|taxi driver|war reporter|"
    "small-time thief|shy student|ship's cook|former boxer|village priest",
    "place": "Lisbon|a mining town|Chicago|a Norwegian harbour|a border village|Naples|the desert|Montreal|Kyoto|"
    "an island|post-war Berlin|the suburbs",
    "event": "inherits an old house|finds a bag of money|meets an old friend|loses a brother|takes a new job|"
    "receives an unsigned letter|witnesses a crime|misses a train|adopts a dog|opens a restaurant",
    "when": "on a Tuesday evening|last weekend|on a long flight|at a small festival|with my sister|on television|"
    "with two friends|after work|on a rainy afternoon|in a half-empty cinema",
    "number": "two|three|four|five|six|seven|eight|nine|ten|twelve|twenty",
}
FILLERS = (
    "I saw it {when}.|The story is about a {who} who {event} in {place}.|It runs for {number} quarters of an hour.|"
    "A {who} from {place} {event}, and a {who} gets involved.|Most of it was shot in {place} over {number} weeks.|"
    "The director has made {number} other films, one of them set in {place}.|My neighbour, a {who}, told me about it.|"
    "Then, {number} years later, the {who} {event}.|There is a book behind it, which I read {when}.|"
    "Halfway through, the {who} leaves for {place} and {event}.|The scene with the {who} comes after {number} minutes."
)
ASPECTS = (
    "The {aspect} {is} {a}.|I found the {aspect} {a}.|To me the {aspect} {is} {a}, and the {aspect} {is} {a}.|"
    "The {aspect} {is} {a}, but the {aspect} {is} {b}.|While the {aspect} {is} {b}, the {aspect} {is} {a}.|"
    "Some will call the {aspect} {a}.|The {aspect} in the scene with the {who} {is} {a}."
)
VERDICTS = (
    "All in all, this is {an} {film}.|As a whole, the {film} {is} {a}.|In the end, it is {an} {film}.|"
    "Although the {aspect} {is} {b}, the {film} as a whole {is} {a}.|Overall, I would call the {film} {a}.|"
    "The {film} as a whole {is} {a}, even if the {aspect} {is} {b}.|My verdict on the {film} as a whole: {a}.|"
    "The {aspect} {is} {b}, and yet, all in all, it is {an} {film}."
)
OPENINGS = (
    "This is {an} {film}.|On the whole I found this {film} {a}.|Let me say it at once: as a whole, the {film} is {a}."
)
ADVICE = (  # negative, positive
    "Save your money.|Do not go and see it.|I will not watch it again.|I cannot recommend it.|Give it a miss.",
    "Do not miss it.|Go and see it.|I will watch it again.|I can recommend it.|It is worth the money.",
)


def synthetic_reviews(count: int, seed: int) -> tuple[list[str], list[int]]:
    """Make English film reviews and their labels (0 negative, 1 positive); more of a seed begin with the same.

    A review praises some aspects of a film and damns others, tells neutral things in between, and ends with a verdict
    on the film as a whole, which alone decides the label. The aspects only lean its way, the same words serve both, and
    either may be negated ("hardly a good film", "never dull"), so that counting words goes wrong in a quarter of the
    reviews. The number of words is log-normal with the spread of IMDb's and a third of its median.
    """
    rng = random.Random(seed)
    texts, labels = [], []
    for _ in range(count):
        opinion = rng.randrange(2)
        texts.append(_review(rng, opinion))
        labels.append(opinion ^ (rng.random() < LABEL_NOISE))
    return texts, labels


def _review(rng: random.Random, opinion: int) -> str:
    words = min(rng.lognormvariate(0.0, LOG_SIGMA) * MEDIAN_WORDS, MOST_WORDS)
    lean = opinion ^ (rng.random() >= P_LEAN)
    sentences = [_sentence(rng, OPENINGS, opinion)] if rng.random() < P_OPENING else []
    sentences.append(_sentence(rng, VERDICTS, opinion))
    if rng.random() < P_ADVICE:
        sentences[-1] += " " + rng.choice(ADVICE[opinion].split("|"))
    while sum(map(len, sentences)) < 5.6 * words:
        filler = rng.random() < P_FILLER
        judged = lean ^ (rng.random() >= P_ASPECT)
        sentences.insert(-1, _sentence(rng, FILLERS if filler else ASPECTS, judged))
    return " ".join(sentences)


def _sentence(rng: random.Random, templates: str, opinion: int) -> str:
    """Fill in a template: {a} is a judgement that holds `opinion`, {an} one before a noun, {b} the opposite one."""

    def fill(found: re.Match[str]) -> str:
        name = found[1]
        if name not in ("a", "an", "b"):
            return rng.choice(WORDS[name].split("|"))
        negated = rng.random() < P_NEGATED
        adjective = rng.choice(ADJECTIVES[opinion ^ (name == "b") ^ negated].split())
        start = rng.choice(WORDS["not_a" if name == "an" else "not"].split("|")) if negated else ""
        adjective = adjective if negated else rng.choice(WORDS["very"].split("|")) + adjective
        if name == "an":
            start += "an " if adjective[0] in "aeiou" else "a "
        return start + adjective

    return re.sub(r"\{(\w+)\}", fill, rng.choice(templates.split("|")))
