"""The names that the scripts of the posts' memory series import: CIFAR-10 in data loaders, and the IMDb reviews.

A copy of this file and of local_dataset_utilities.py next to such a script is enough. torchvision is not needed here.
"""

import hashlib
import io
import pickle
import random
import re
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from local_dataset_utilities import (  # noqa: F401, the scripts import the reviews from here
    IMDBDataset,
    UserError,
    data_folder,
    download_dataset,
    download_file,
    load_dataset_into_to_dataframe,
    partition_dataset,
)

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR10_SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
Pairs = list[tuple[np.ndarray, int]]  # images of 32 x 32 x 3 bytes, and the numbers of their classes


class Cifar10(Dataset):
    """Images and their classes; the transform makes a tensor from a PIL image, by default of numbers from 0 to 1."""

    def __init__(self, pairs: Pairs, transform=None):
        self.pairs = pairs
        self.transform = transform or _to_tensor

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        image, label = self.pairs[index]
        return self.transform(Image.fromarray(image)), label


def _to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def get_dataloaders_cifar10(
    batch_size, num_workers=0, validation_fraction=None, train_transforms=None, test_transforms=None, download=True
) -> tuple[DataLoader, ...]:
    """Return loaders of training, validation and test images; no validation loader without `validation_fraction`.

    The last training images validate. The training loader shuffles, and leaves out the last, smaller batch.

    Raises:
        UserError: There are no images, or the archive has a wrong checksum or cannot be downloaded.
    """
    train, test = _read(download)
    first = len(train) - int((validation_fraction or 0) * len(train))
    sizes = {"batch_size": batch_size, "num_workers": num_workers}
    loaders = [DataLoader(Cifar10(train[:first], train_transforms), shuffle=True, drop_last=True, **sizes)]
    if validation_fraction is not None:
        loaders.append(DataLoader(Cifar10(train[first:], test_transforms), **sizes))
    return *loaders, DataLoader(Cifar10(test, test_transforms), **sizes)


def _read(download: bool) -> tuple[Pairs, Pairs]:
    """Return the training and the test images of the published archive or of `cifar10_subset`; else download them."""
    archive = data_folder() / "cifar-10-python.tar.gz"
    if not archive.exists():
        for name in ("cifar10_subset", "cifar10_subset.tar.gz"):
            if (data_folder() / name).exists():
                return _read_folders(data_folder() / name)
        if not download:
            raise UserError(f"{archive} does not exist: save {CIFAR10_URL} there, or leave out download=False")
        download_file(CIFAR10_URL, CIFAR10_SHA256, data_folder(), "CIFAR-10")
    with archive.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != CIFAR10_SHA256:  # an unknown pickle can run any code
            raise UserError(f"{archive} has a wrong checksum: delete it and download it again")
    train, test = [], []
    with tarfile.open(archive) as tar:
        for member in sorted((member for member in tar if "_batch" in member.name), key=lambda member: member.name):
            batch = pickle.load(tar.extractfile(member), encoding="latin1")
            images = batch["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            (test if "test_batch" in member.name else train).extend(zip(images, batch["labels"], strict=True))
    return train, test


def _read_folders(source: Path) -> tuple[Pairs, Pairs]:
    """Return the images of a folder or archive with paths <train or test>/<class>/*.png, mixed by a fixed seed."""
    if source.is_dir():
        files = {path.relative_to(source).as_posix(): path.read_bytes() for path in source.rglob("*.png")}
    else:
        with tarfile.open(source) as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}
    found = [re.fullmatch(r"(?:.*/)?(train|test)/([^/]+)/[^/]+\.png", name) for name in sorted(files)]
    classes = sorted({each[2] for each in found if each})
    splits = {"train": [], "test": []}
    for each in filter(None, found):
        image = np.array(Image.open(io.BytesIO(files[each[0]])).convert("RGB"))
        splits[each[1]].append((image, classes.index(each[2])))
    if not all(splits.values()):
        raise UserError(f"{source} needs images train/<class>/*.png and test/<class>/*.png: add them or delete it")
    print(f"A part of CIFAR-10 from {source}: {len(splits['train']):,} training, {len(splits['test']):,} test images")
    for pairs in splits.values():
        random.Random(1).shuffle(pairs)
    return splits["train"], splits["test"]
