"""Film reviews that need no file of the user: IMDb, which `local_dataset_utilities.py` reads, and synthetic ones."""

from pathlib import Path

import datasets as hf
import pyarrow as pa

import local_dataset_utilities as imdb
from fabric_ladder.data.cache import write_batches
from fabric_ladder.data.splits import SPLITS
from fabric_ladder.data.synthetic import synthetic_reviews
from fabric_ladder.settings import DataSettings

REVIEWS = ("imdb", "synthetic")  # both have the classes negative and positive
SYNTHETIC_SIZES = (4000, 500, 1000)


def review_key(settings: DataSettings) -> list:
    """Return what identifies the reviews in the cache.

    For IMDb this is the size of the archive, or the folder with its times of change. A missing archive has the same
    key, so several processes can wait for one download.
    """
    if settings.dataset == "synthetic":
        return ["synthetic"]
    found = imdb.find_dataset(settings.data_dir)
    if found is None or found.is_file():
        return ["imdb", found.stat().st_size if found else imdb.IMDB_BYTES]
    folders = [folder for folder in (found, found / "train", found / "test") if folder.exists()]
    return ["imdb", *([str(folder.resolve()), folder.stat().st_mtime_ns] for folder in folders)]


def read_reviews(settings: DataSettings, scratch: Path) -> dict[str, hf.Dataset]:
    """Return the splits of the reviews, with the columns `text` and `label` (0 negative, 1 positive).

    IMDb has the blog's splits, and is downloaded if needed.
    """
    if settings.dataset == "imdb":
        reviews = imdb.load_dataset_into_to_dataframe(settings.data_dir)
        parts = imdb.split_reviews(reviews[["label"]].reset_index(drop=True))
        table = pa.Table.from_pandas(reviews, preserve_index=False).replace_schema_metadata()
        mapped = write_batches(scratch / "imdb.arrow", table.schema, table.to_batches(1000))
        del reviews, table
        pa.default_memory_pool().release_unused()  # 150 MB; the mapped file replaces them
        return {split: mapped.select(part.index.to_numpy()) for split, part in zip(SPLITS, parts, strict=True)}
    splits = {}
    for number, (split, size) in enumerate(zip(SPLITS, SYNTHETIC_SIZES, strict=True)):
        count = max(size, getattr(settings, f"{split}_samples") or 0)
        texts, labels = synthetic_reviews(count, 3 * settings.split_seed + number)
        splits[split] = hf.Dataset.from_dict({"text": texts, "label": labels})
    return splits
