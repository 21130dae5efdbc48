"""IMDb, read through `local_dataset_utilities.py`.

That module holds the download and the reader, because it also works alone with the blog's scripts. It imports this
package, so this package loads it by name, here and nowhere else.
"""

import importlib
from pathlib import Path

import numpy as np
import pandas as pd


def find_imdb(data_dir: str) -> Path | None:
    """Return the archive or the unpacked folder of IMDb; None if it is yet to be downloaded."""
    return _reader().find_dataset(data_dir)


def imdb_key(data_dir: str) -> list:
    """Return what identifies the reviews in the cache: the size of the archive, or the folder with its times.

    An archive that is yet to be downloaded has the same key, so several processes can wait for one download.
    """
    found = find_imdb(data_dir)
    if found is None:
        return [_reader().IMDB_BYTES]
    if found.is_file():
        return [found.stat().st_size]
    folders = [folder for folder in (found, found / "train", found / "test") if folder.exists()]
    return [[str(folder.resolve()), folder.stat().st_mtime_ns] for folder in folders]


def read_imdb(data_dir: str) -> tuple[pd.DataFrame, list[np.ndarray]]:
    """Return all reviews (columns `text` and `label`) and the row numbers of each split; download them if needed.

    Raises:
        UserError: The reviews cannot be downloaded, or the archive or folder is damaged.
    """
    return _reader().read_split(data_dir)


def _reader():
    return importlib.import_module("local_dataset_utilities")
