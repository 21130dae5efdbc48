"""`local_utilities.py` gives the scripts of the posts' memory series their data loaders of CIFAR-10."""

import io
import pickle
import shutil
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from support.helpers import ROOT, finished, real_file, run_script

import local_utilities as module
from fabric_ladder.errors import UserError
from local_utilities import get_dataloaders_cifar10

SCRIPT = '''
import sys

import torch

sys.modules["fabric_ladder"] = None  # the two files are enough
from local_utilities import IMDBDataset, download_dataset, get_dataloaders_cifar10


class Resize:
    """Stands for torchvision's transforms, which get a PIL image too."""

    def __init__(self, *size):
        self.size = size

    def __call__(self, image):
        pixels = torch.frombuffer(bytearray(image.resize(self.size).tobytes()), dtype=torch.uint8)
        return pixels.view(*self.size, 3).permute(2, 0, 1) / 255


if __name__ == "__main__":
    transforms = {"train_transforms": Resize(16, 16), "test_transforms": Resize(16, 16)}
    loaders = get_dataloaders_cifar10(batch_size=64, num_workers=1, validation_fraction=0.1, **transforms)
    print("batches:", *map(len, loaders))
    features, targets = next(iter(loaders[0]))
    print(*features.shape, *targets.shape)
'''


@pytest.mark.slow
def test_a_script_of_the_posts_shape_reads_the_part_of_cifar_10(tmp_path):
    data = real_file("cifar10_subset.tar.gz", "images of CIFAR-10").resolve().parent
    (tmp_path / "script.py").write_text(SCRIPT)
    for name in ("local_utilities.py", "local_dataset_utilities.py"):
        shutil.copy(ROOT / name, tmp_path)
    process = run_script(tmp_path / "script.py", cwd=tmp_path, fresh=True, PYTHONPATH="", FABRIC_LADDER_DATA=data)
    printed = finished(process).splitlines()
    assert printed[0].endswith("cifar10_subset.tar.gz: 4,660 training, 846 test images")
    assert printed[1] == "batches: 65 8 14"  # 4,194 images without the last, smaller batch; 466; 846
    assert printed[2] == "64 3 16 16 64"


def write_published(path, images):
    """Write an archive with the layout of the published one: five training batches and a test batch."""
    with tarfile.open(path, "w:gz") as tar:
        for number, name in enumerate([*(f"data_batch_{part}" for part in range(1, 6)), "test_batch"]):
            part = images[10 * number : 10 * number + 10]
            batch = {"data": part.transpose(0, 3, 1, 2).reshape(10, -1), "labels": list(range(10))}
            content = pickle.dumps(batch)
            entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


@pytest.fixture
def images(tmp_path, monkeypatch):
    monkeypatch.setenv("FABRIC_LADDER_DATA", str(tmp_path))
    return np.random.default_rng(0).integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)


def test_the_published_archive_is_read_in_its_order_and_only_with_its_checksum(tmp_path, images, monkeypatch):
    archive = tmp_path / "cifar-10-python.tar.gz"
    write_published(archive, images)
    with pytest.raises(UserError, match=r"cifar-10-python\.tar\.gz has a wrong checksum: delete it"):
        get_dataloaders_cifar10(batch_size=4)
    with archive.open("rb") as file:
        monkeypatch.setattr(module, "CIFAR10_SHA256", module.hashlib.file_digest(file, "sha256").hexdigest())
    train, validation, test = get_dataloaders_cifar10(batch_size=4, validation_fraction=0.1)
    assert (len(train), len(validation), len(test)) == (11, 2, 3)
    pixels = [torch.cat([features for features, _ in loader]) for loader in (validation, test)]
    for mine, expected in zip(pixels, (images[45:50], images[50:]), strict=True):
        assert (255 * mine).round().byte().permute(0, 2, 3, 1).equal(torch.from_numpy(expected))
    assert [int(label) for _, labels in test for label in labels] == list(range(10))
    assert len(get_dataloaders_cifar10(batch_size=4)) == 2


def test_a_folder_with_a_folder_for_each_class_is_mixed(tmp_path, images):
    for number, image in enumerate(images):
        path = tmp_path / "cifar10_subset" / ("test" if number % 3 == 2 else "train") / "abcde"[number // 12]
        path.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path / f"{number}.png")
    train, validation, test = get_dataloaders_cifar10(batch_size=8, validation_fraction=0.2)
    assert [len(loader.dataset) for loader in (train, validation, test)] == [32, 8, 20]
    assert len({int(label) for _, labels in validation for label in labels}) > 2
    shutil.rmtree(tmp_path / "cifar10_subset" / "test")
    with pytest.raises(UserError, match="cifar10_subset needs images train/"):
        get_dataloaders_cifar10(batch_size=8)


def test_without_images_and_network_one_line_names_the_remedy(tmp_path, images, monkeypatch):
    with pytest.raises(UserError, match=r"cifar-10-python.tar.gz does not exist: save https://"):
        get_dataloaders_cifar10(batch_size=8, download=False)
    for name in ("http_proxy", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(
        UserError, match=r"CIFAR-10 is not in .* cannot be downloaded \(URLError\): save https://www.cs"
    ):
        get_dataloaders_cifar10(batch_size=8)
