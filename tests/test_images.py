"""Images: from folders, archives and tables to pixels, and from pixels to batches."""

import csv
import io
import json
import re
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import datasets as hf
import numpy as np
import pytest
import torch
from helpers import MODELS, SRC, finished, real_file, relative_error, run_script, settings_for
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification

import local_dataset_utilities as module
from fabric_ladder import build_dataloaders
from fabric_ladder.batching import EffectiveBatchSampler, ImageCollator, Part
from local_dataset_utilities import DatasetError, DataSettings, load_datasets

MODEL = str(MODELS / "vit-small.json")
TASK = "image-classification"
SPLITS = ("train", "validation", "test")
PETS = ("cat", "dog", "eel")


def noise(number, size=(32, 32)):
    """Pixels (height, width, 3) that no other number gives."""
    return np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)


def save(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(path, **options)
    return path


def write(folder, counts, start=0, size=(32, 32)):
    """Write so many PNGs into each class's folder; return the bytes of their pixels with their classes."""
    written = Counter()
    for label, count in counts.items():
        for _ in range(count):
            written[noise(start, size).tobytes(), label] += 1
            save(folder / label / f"{start}.png", noise(start, size))
            start += 1
    return written


def pictures(folder, each=10):
    return write(folder, dict.fromkeys(PETS, each))


def stored(datasets, split):
    """The bytes of a split's pixels with their classes."""
    part = datasets.splits[split][:]
    return Counter(zip(part["image"], (datasets.class_names[label] for label in part["labels"]), strict=True))


@pytest.fixture
def load(tmp_path):
    """Load images with a cache of the test's own."""

    def load(dataset, **values):
        folders = {"cache_dir": str(tmp_path / "cache"), "data_dir": str(tmp_path)}
        return load_datasets(DataSettings(dataset=str(dataset), **({"model": MODEL, "task": TASK} | folders | values)))

    return load


# ----------------------------------------------------------------------------------------------------------------------
# Folders, archives and tables
# ----------------------------------------------------------------------------------------------------------------------


def test_a_folder_of_classes_is_split_like_texts(tmp_path, load):
    written = pictures(tmp_path / "pets")
    got = load("pets")
    assert got.class_names == list(PETS)
    assert [len(got.splits[split]) for split in SPLITS] == [21, 3, 6]
    assert sum((stored(got, split) for split in SPLITS), Counter()) == written
    row = got.splits["train"][0]
    assert set(row) == {"image", "height", "width", "labels", "length"}
    assert (row["height"], row["width"], row["length"]) == (32, 32, 17)
    assert got.notices == []
    few = load("pets", train_samples=9, test_samples=2)
    assert [len(few.splits[split]) for split in SPLITS] == [9, 3, 2]
    assert stored(few, "train") <= stored(got, "train")
    assert stored(load("pets", split_seed=2), "test") != stored(got, "test")


@pytest.mark.parametrize("names", [("train", "validation", "test"), ("Train", "val", "TEST"), ("train", "test")])
@pytest.mark.parametrize("home", ["pets", "pets/all"])
def test_folders_of_splits_are_taken_as_they_are(tmp_path, load, names, home):
    sizes = {"cat": 9, "dog": 6}
    written = {name: write(tmp_path / home / name, sizes, start=100 * place) for place, name in enumerate(names)}
    for junk in ("../Thumbs.db", "notes.txt", "cat/.hidden.png", "cat/list.csv", "../.git/x/a.png", "../.DS_Store"):
        path = tmp_path / home / names[0] / junk
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no image")
    got = load("pets")
    assert stored(got, "test") == written[names[-1]]
    if len(names) == 3:
        assert [stored(got, split) for split in SPLITS] == list(written.values())
    else:
        assert [len(got.splits[split]) for split in SPLITS] == [13, 2, 15]


def packed(folder, target, prefix=""):
    """Pack a folder's files in an order of their own, as other programs do."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    np.random.default_rng(0).shuffle(files)
    names = {path: prefix + path.relative_to(folder.parent).as_posix() for path in files}
    if target.suffix == ".zip":
        with zipfile.ZipFile(target, "w") as archive:
            archive.mkdir("__MACOSX/train/cat")
            for path, name in names.items():
                archive.write(path, name)
                archive.writestr(f"__MACOSX/{name}", b"no image")
    else:
        with tarfile.open(target, "w" if target.suffix == ".tar" else "w:gz") as archive:
            for path, name in names.items():
                archive.add(path, name)
    return target


@pytest.mark.parametrize(("name", "prefix"), [("a.tar", ""), ("a.tar.gz", "./"), ("a.TGZ", ""), ("a.zip", "")])
def test_an_archive_reads_like_the_folder(tmp_path, load, name, prefix):
    for place, split in enumerate(("train", "test")):
        write(tmp_path / "pets" / split, {"dog": 12, "cat": 8}, start=100 * place)
    (tmp_path / "pets" / "read.me").write_text("not read")
    folder, archive = load("pets"), load(packed(tmp_path / "pets", tmp_path / name, prefix).name)
    assert [stored(archive, split) for split in SPLITS] == [stored(folder, split) for split in SPLITS]
    assert archive.fingerprint == folder.fingerprint, "the same images in the same order"
    assert not list((tmp_path / "cache").rglob("*.png"))


def test_of_two_files_of_one_name_in_an_archive_the_later_counts(tmp_path, load):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number in range(24):
            path = save(tmp_path / "one.png", noise(number))
            archive.add(path, f"{PETS[number % 2]}/{number % 12}.png")
    got = load("a.tar")
    images = [image for split in SPLITS for image, _ in stored(got, split)]
    assert sorted(images) == sorted(noise(number).tobytes() for number in range(12, 24))


@pytest.mark.parametrize("name", ["../evil.png", "/evil.png"])
@pytest.mark.parametrize("kind", ["a.tar.gz", "a.zip"])
def test_a_hostile_archive_is_refused(tmp_path, load, name, kind):
    path = tmp_path / kind
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, b"evil")
    else:
        with tarfile.open(path, "w:gz") as archive:
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(DatasetError, match=f"not to be trusted: it holds '{re.escape(name)}'"):
        load(path)


@pytest.mark.parametrize("kind", ["a.tar", "a.tar.gz", "a.zip"])
@pytest.mark.parametrize("broken", ["half", "noise", "nothing"])
def test_a_damaged_archive_is_refused(tmp_path, load, kind, broken):
    pictures(tmp_path / "pets")
    path = packed(tmp_path / "pets", tmp_path / kind)
    whole = path.read_bytes()
    path.write_bytes({"half": whole[: len(whole) // 2], "noise": b"noise" * 999, "nothing": b""}[broken])
    with pytest.raises(DatasetError, match=re.escape(f"{kind} is damaged (")) as error:
        load(path)
    assert "\n" not in str(error.value)


HUB = {"img": hf.Image(), "label": hf.ClassLabel(names=["frog", "cat", "ship"])}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A data set in Parquet files as on the Hub, and where it is looked for instead."""
    read = hf.load_dataset
    monkeypatch.setattr(module, "_hub_answers", lambda: True)
    monkeypatch.setattr(hf, "load_dataset", lambda name, **options: read(str(tmp_path / "hub" / name), **options))

    def hub(features=HUB, labels=(0, 1, 2), **sizes):
        start = 0
        for split, size in sizes.items():
            images = [Image.fromarray(noise(number)) for number in range(start, start + size)]
            columns = {name: images for name, feature in features.items() if isinstance(feature, hf.Image)}
            columns |= {"label": [labels[number % 3] for number in range(size)]}
            path = tmp_path / "hub" / "org" / "name" / f"{split}-00000-of-00001.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            hf.Dataset.from_dict(columns, features=hf.Features(features)).to_parquet(path)
            start += size
        return "org/name"

    return hub


@pytest.mark.parametrize("column", ["img", "image"])
def test_a_hub_data_set_is_decoded(load, hub, column):
    got = load(hub(train=40, test=9), image_column=column)
    assert got.class_names == ["frog", "cat", "ship"]
    assert [len(got.splits[split]) for split in SPLITS] == [36, 4, 9]
    expected = Counter((noise(40 + number).tobytes(), ["frog", "cat", "ship"][number % 3]) for number in range(9))
    assert stored(got, "test") == expected


def test_hub_labels_may_be_strings(load, hub):
    got = load(hub({"image": hf.Image(), "label": hf.Value("string")}, labels=("b", "a", "c"), train=30))
    assert got.class_names == ["a", "b", "c"]
    assert [len(got.splits[split]) for split in SPLITS] == [21, 3, 6]


@pytest.mark.parametrize(
    ("features", "values", "pattern"),
    [
        ({"a": hf.Image(), "b": hf.Image()}, {}, r"no column of images 'image', only a, b: set --image_column"),
        ({"image": hf.Value("string")}, {}, r"no column of images, only label"),
        ({"image": hf.Image()}, {"label_column": "kind"}, r"no column 'kind', only image, label: set --label_column"),
    ],
)
def test_hub_columns_that_are_not_there_are_named(load, hub, features, values, pattern):
    features = {name: feature for name, feature in features.items() if isinstance(feature, hf.Image)}
    name = hub(features | {"label": hf.Value("int64")}, train=9)
    with pytest.raises(DatasetError, match=rf"org/name \(train\) has {pattern}"):
        load(name, **values)


def test_the_real_archive(load, cifar):
    got = load(cifar)
    assert [len(got.splits[split]) for split in SPLITS] == [4194, 466, 846]
    assert got.class_names == "airplane automobile bird cat deer dog frog horse ship truck".split()
    with tarfile.open(cifar) as archive:
        names = [name for name in archive.getnames() if re.search(r"/test/.*\.png", name)][::50]
        expected = [
            (np.asarray(Image.open(archive.extractfile(name)).convert("RGB")).tobytes(), name.split("/")[2])
            for name in names
        ]
    assert set(expected) <= set(stored(got, "test"))


@pytest.fixture(scope="session")
def cifar():
    """The real part of CIFAR-10."""
    return real_file("cifar10_subset.tar.gz", "real images")


# ----------------------------------------------------------------------------------------------------------------------
# Decoding
# ----------------------------------------------------------------------------------------------------------------------


def decoded(image, side=64, **options):
    """The pixels that are stored of an image which is saved as a file."""
    file = io.BytesIO()
    image.save(file, **{"format": "PNG"} | options)
    return module._decode(file.getvalue(), side, Image.Resampling.BILINEAR)


GREY = np.arange(256, dtype=np.uint8).reshape(16, 16)
COLOURS = Image.fromarray(noise(0))


def palette(transparency=None):
    image = Image.fromarray(GREY % 4, "P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 9, 9])
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


def rgb(grey):
    return np.stack([grey] * 3, axis=-1)


RAINBOW = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [9, 9, 9]], np.uint8)
HALF = np.full((16, 16), 128, np.uint8)
MODES = {
    "colours": (COLOURS, {}, np.asarray(COLOURS)),
    "grey": (Image.fromarray(GREY), {}, rgb(GREY)),
    "black and white": (Image.fromarray(GREY).point(lambda level: 255 * (level > 99), "1"), {}, rgb(255 * (GREY > 99))),
    "palette": (palette(), {}, RAINBOW[GREY % 4]),
    "GIF": (palette(), {"format": "GIF"}, RAINBOW[GREY % 4]),
    "palette with a hole": (palette(3), {}, np.vstack([RAINBOW[:3], [[255] * 3]])[GREY % 4]),
    "16-bit grey": (Image.fromarray(GREY.astype(np.uint16) * 257), {}, rgb(GREY)),
    "32-bit grey": (Image.fromarray(GREY.astype(np.int32) * 257), {"format": "TIFF"}, rgb(GREY)),
    "grey, half transparent": (
        Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(HALF)]), {}, rgb(255 - (255 - GREY) * (128 / 255))
    ),
    "colours, transparent": (Image.fromarray(noise(0)[:16, :16]).convert("RGBA"), {}, noise(0)[:16, :16]),
    "CMYK": (Image.new("CMYK", (16, 16), (0, 255, 255, 0)), {"format": "TIFF"}, np.full((16, 16, 3), [255, 0, 0])),
    "WEBP": (COLOURS, {"format": "WEBP", "lossless": True}, np.asarray(COLOURS)),
    "no EXIF part": (COLOURS, {"exif": b"Exif\0\0garbage"}, np.asarray(COLOURS)),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_three_colours_on_white(mode):
    image, options, expected = MODES[mode]
    got = decoded(image, **options)
    assert got.dtype == np.uint8
    assert got.shape == expected.shape
    assert np.abs(got.astype(float) - expected).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(orientation):
    image = Image.fromarray(noise(1, (20, 30)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    undone = [None, *map(Image.Transpose, (0, 3, 1, 5, 4, 6, 2))]  # of the orientations 1 to 8
    turn = undone[orientation - 1]
    expected = image if turn is None else image.transpose(turn)
    np.testing.assert_array_equal(decoded(image, exif=exif), np.asarray(expected))


def test_large_images_are_stored_small_and_small_ones_as_they_are(tmp_path, load):
    sizes = [(40, 20), (33, 33), (32, 32), (7, 5), (32, 31)]
    for number, size in enumerate(sizes * 4):
        save(tmp_path / "pets" / PETS[number % 2] / f"{number}.png", noise(number, size))
    got = load("pets")
    for split in SPLITS:
        for row in got.splits[split]:
            assert len(row["image"]) == row["height"] * row["width"] * 3
    shapes = Counter((row["height"], row["width"]) for split in SPLITS for row in got.splits[split])
    assert shapes == {(32, 32): 12, (7, 5): 4, (32, 31): 4}
    large = Image.fromarray(noise(0, (40, 20))).resize((32, 32), Image.BILINEAR)
    assert large.tobytes() in {row["image"] for split in SPLITS for row in got.splits[split]}
    assert (40, 20) in {(row["height"], row["width"]) for row in load("pets", resize_to=40).splits["train"]}


def test_a_photograph_is_shrunk_as_by_pillow_alone():
    """A JPEG is decoded at a fraction of its size, which must not show."""
    smooth = Image.fromarray(noise(3, (30, 40))).resize((640, 480), Image.BICUBIC)
    file = io.BytesIO()
    smooth.save(file, "JPEG", quality=95)
    expected = np.asarray(Image.open(file).convert("RGB").resize((64, 64), Image.BILINEAR), int)
    assert np.abs(decoded(smooth, format="JPEG", quality=95) - expected).mean() < 1


# ----------------------------------------------------------------------------------------------------------------------
# What cannot be used
# ----------------------------------------------------------------------------------------------------------------------

BROKEN = {
    "text": (b"no image", "no image of a kind that is read"),
    "empty": (b"", "an empty file"),
    "half": (None, r".+"),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("archive", [False, True])
def test_broken_images_are_refused_or_counted(tmp_path, load, kind, archive):
    pictures(tmp_path / "pets", each=20)
    content, problem = BROKEN[kind]
    if content is None:
        content = (tmp_path / "pets" / "cat" / "0.png").read_bytes()[:1500]
    for number in range(5):
        (tmp_path / "pets" / "cat" / f"{number}.png").write_bytes(content)
    dataset = packed(tmp_path / "pets", tmp_path / "a.tar.gz") if archive else "pets"
    with pytest.raises(DatasetError) as error:
        load(dataset)
    pattern = rf"5 of 60 images cannot be decoded \((\S*cat/\d\.png: {problem}; ){{3}}…\)"
    assert re.fullmatch(pattern + ": mend or remove them, or leave them out with --bad_samples skip", str(error.value))
    assert not list((tmp_path / "cache").rglob("*.arrow"))
    for _ in range(2):  # the second time from the cache
        got = load(dataset, bad_samples="skip")
        (notice,) = got.notices
        assert re.fullmatch(pattern + " and are left out", notice)
        assert sum(len(got.splits[split]) for split in SPLITS) == 55
        labels = sum((Counter(got.splits[split]["labels"][:]) for split in SPLITS), Counter())
        assert labels == {0: 15, 1: 20, 2: 20}


def test_a_split_without_any_good_image_is_refused(tmp_path, load):
    write(tmp_path / "pets" / "train", dict.fromkeys(PETS, 4))
    for name in PETS:
        path = tmp_path / "pets" / "test" / name / "a.jpg"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"no image")
    with pytest.raises(DatasetError, match="no image of the test split can be decoded"):
        load("pets", bad_samples="skip")


def test_good_images_of_one_class_are_not_enough(tmp_path, load):
    write(tmp_path / "pets" / "train", {"cat": 4, "dog": 4})
    write(tmp_path / "pets" / "val", {"cat": 4})
    write(tmp_path / "pets" / "test", {"cat": 4})
    for path in (tmp_path / "pets" / "train" / "dog").iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(DatasetError, match="all training images that can be decoded have the same label"):
        load("pets", bad_samples="skip")


def test_nothing_but_images_is_opened():
    """Pillow would hand PostScript to another program."""
    with pytest.raises(OSError, match="cannot identify"):
        module._decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF\n", 32, Image.Resampling.BILINEAR)


def test_a_photograph_that_pillow_does_not_know_is_not_passed_over(tmp_path, load):
    pictures(tmp_path / "pets")
    (tmp_path / "pets" / "cat" / "phone.HEIC").write_bytes(b"\0\0\0\x18ftypheic")
    with pytest.raises(DatasetError, match=r"1 of 31 images cannot be decoded \(\S*phone\.HEIC: no image of a kind"):
        load("pets")


REFUSED = {
    "nothing": ([], {}, r"pets holds no image \(\.png, "),
    "no image": (["cat/a.txt", "dog/b.csv"], {}, r"pets holds no image \(\.png, "),
    "one class": (["cat/a.png", "cat/b.png"], {}, "all training images have the same label, 'cat'"),
    "too few": (["cat/a.png", "dog/b.png"], {}, "2 images are too few to be split"),
    "empty class": (["cat/a.png", "dog/b.png", "eel/"], {}, "the folder eel holds no image: fill or remove it"),
    "class without images": (["cat/a.png", "dog/b.txt"], {}, "the folder dog holds no image: fill or remove it"),
    "empty training class": (
        ["train/cat/a.png", "train/dog/", "test/cat/b.png", "test/dog/c.png"], {},
        "the folder train/dog holds no image",
    ),
    "unknown class": (
        ["train/cat/a.png", "train/dog/b.png", "test/cat/c.png", "test/eel/d.png"], {},
        r"the test images have labels that the training images lack: \['eel'\]",
    ),
    "empty training": (["train/", "test/cat/c.png", "test/dog/d.png"], {}, "pets holds no training image"),
    "beside classes": (
        ["cat/a.png", "dog/b.png", "c.png"], {},
        r"1 of 3 images do not lie in the folder of a class \(c\.png\): move them so that all paths are <class>/<im",
    ),
    "too deep": (["cat/a.png", "cat/small/b.png", "dog/c.png"], {}, r"1 of 3 .* \(cat/small/b\.png\): move them"),
    "in a split": (
        ["train/cat/a.png", "train/dog/b.png", "test/c.png"], {}, r"\(test/c\.png\).* are <split>/<class>/<image>"
    ),
    "unlike splits": (
        ["train/cat/a.png", "train/dog/b.png", "extra/cat/c.png"], {},
        "the folder extra beside train is no split: name it validation or test",
    ),
    "texts": ([], {"dataset": "imdb"}, "imdb holds texts: --task image-classification needs a folder with a folder"),
    "synthetic texts": ([], {"dataset": "synthetic"}, "synthetic holds texts"),
    "file": (["a.csv"], {"dataset": "pets/a.csv"}, r"a\.csv is neither a folder nor an archive \(\.tar, "),
    "no such archive": ([], {"dataset": "b.tar.gz"}, r"no file or folder b\.tar\.gz here or in "),
    "test file": (["cat/a.png"], {"test_file": "b.csv"}, "--validation_file and --test_file are for texts"),
    "no room for a crop": (["cat/a.png"], {"resize_to": 31}, "--resize_to 31: no square of 32 can be cut out of it"),
    "no room for a patch": (["cat/a.png"], {"image_size": 3}, r"--image_size 3 is smaller than a patch of .*, 8: "),
    "no config": (["a.json"], {"model": "{a}"}, r"a\.json is no model config"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path, load, name):
    files, values, pattern = REFUSED[name]
    (tmp_path / "pets").mkdir()
    for number, file in enumerate(files):
        path = tmp_path / "pets" / file
        if file.endswith("/"):
            path.mkdir(parents=True)
        elif file.endswith(".png"):
            save(path, noise(number))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
    values = {key: str(tmp_path / "pets" / "a.json") if value == "{a}" else value for key, value in values.items()}
    with pytest.raises(DatasetError, match=pattern) as error:
        load(values.pop("dataset", "pets"), **values)
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache").rglob("*.arrow"))


def test_an_archive_names_its_empty_folders_too(tmp_path, load):
    pictures(tmp_path / "pets")
    (tmp_path / "pets" / "fox").mkdir()
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "pets", "pets")
    with pytest.raises(DatasetError, match=r"a\.tar\.gz: the folder fox holds no image"):
        load("a.tar.gz")


def test_a_folder_of_images_without_the_task_is_told_what_to_add(tmp_path, load):
    pictures(tmp_path / "pets")
    with pytest.raises(DatasetError, match="for images add --task image-classification"):
        load("pets", task="text-classification", model=str(MODELS / "bloom-quickstart.json"))


# ----------------------------------------------------------------------------------------------------------------------
# The cache
# ----------------------------------------------------------------------------------------------------------------------


def files_of(folder):
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("archive", [False, True])
def test_a_second_call_decodes_nothing_and_writes_nothing(tmp_path, load, monkeypatch, archive):
    pictures(tmp_path / "pets")
    dataset = packed(tmp_path / "pets", tmp_path / "a.zip") if archive else "pets"
    first = load(dataset)
    before = files_of(tmp_path / "cache")
    assert not [name for name in before if "unfinished" in name.name]
    monkeypatch.delattr(module, "_decode")
    second = load(dataset)
    for values in ({"image_size": 24, "resize_to": 32}, {"random_flip": True}):
        other = load(dataset, **values)  # not decoded anew, and yet no longer the same data
        assert other.fingerprint != first.fingerprint
        assert stored(other, "train") == stored(first, "train")
    assert files_of(tmp_path / "cache") == before
    assert second.fingerprint == first.fingerprint
    assert [stored(second, split) for split in SPLITS] == [stored(first, split) for split in SPLITS]
    mapped = [Path(file["filename"]) for split in SPLITS for file in second.splits[split].cache_files]
    assert len(mapped) == 3
    assert all(file.is_relative_to(tmp_path / "cache") for file in mapped)


def test_a_changed_image_is_read_again(tmp_path, load):
    pictures(tmp_path / "pets")
    first = load("pets")
    assert load("pets", cache_dir=str(tmp_path / "other")).fingerprint == first.fingerprint
    save(tmp_path / "pets" / "cat" / "0.png", noise(999))
    assert load("pets").fingerprint != first.fingerprint
    save(tmp_path / "pets" / "cat" / "0.png", noise(0))
    assert load("pets").fingerprint == first.fingerprint, "of the content, not of the path or the time"


# ----------------------------------------------------------------------------------------------------------------------
# What the model wants to see
# ----------------------------------------------------------------------------------------------------------------------

CONFIG = {"model_type": "vit", "image_size": 48, "patch_size": 8}
FORMATS = {
    "config alone": ({}, {}, (48, 48, (0.5,) * 3, (0.5,) * 3, "bilinear", 37)),
    "processor": (
        {"size": {"height": 64, "width": 64}, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6],
         "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255},
        {}, (64, 64, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic", 65),
    ),
    "number": ({"size": 32}, {}, (32, 32, (0.5,) * 3, (0.5,) * 3, "bilinear", 17)),
    "shortest edge": ({"size": {"shortest_edge": 40}}, {}, (40, 40, (0.5,) * 3, (0.5,) * 3, "bilinear", 26)),
    "crop": (
        {"size": {"shortest_edge": 64}, "do_center_crop": True, "crop_size": {"height": 56, "width": 56}},
        {}, (56, 56, (0.5,) * 3, (0.5,) * 3, "bilinear", 50),
    ),
    "not resized": ({"size": 32, "do_resize": False}, {}, (48, 48, (0.5,) * 3, (0.5,) * 3, "bilinear", 37)),
    "not normalised": (
        {"do_normalize": False, "image_mean": [0.1] * 3}, {}, (48, 48, (0.0,) * 3, (1.0,) * 3, "bilinear", 37)
    ),
    "not rescaled": (
        {"do_rescale": False, "image_mean": 102, "image_std": 51}, {},
        (48, 48, (0.4,) * 3, (0.2,) * 3, "bilinear", 37),
    ),
    "settings win": (
        {"size": 32}, {"image_size": 16, "resize_to": 20}, (16, 20, (0.5,) * 3, (0.5,) * 3, "bilinear", 5)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_size_and_normalisation_are_the_models(tmp_path, name):
    processor, values, expected = FORMATS[name]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    if processor:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    form, notices = module.read_image_format(DataSettings(task=TASK, model=str(tmp_path), **values))
    size, resize_to, mean, std, resample, tokens = expected
    assert (form.size, form.resize_to, form.resample, form.tokens) == (size, resize_to, resample, tokens)
    assert form.mean == pytest.approx(mean)
    assert form.std == pytest.approx(std)
    assert [("no preprocessor_config.json" in notice) for notice in notices] == ([] if processor else [True])


def test_models_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"num_channels": 1}))
    with pytest.raises(DatasetError, match="reads 1 channels, images have 3"):
        module.read_image_format(DataSettings(task=TASK, model=str(path)))
    path.write_text(json.dumps({"model_type": "resnet"}))
    with pytest.raises(DatasetError, match="does not say how large its images are: set --image_size"):
        module.read_image_format(DataSettings(task=TASK, model=str(path)))
    assert module.read_image_format(DataSettings(task=TASK, model=str(path), image_size=64))[0].tokens == 17


# ----------------------------------------------------------------------------------------------------------------------
# Batches
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of several sizes."""
    home = tmp_path_factory.mktemp("images")
    for number in range(60):
        size = [(32, 32), (20, 30), (50, 45), (32, 32)][number % 4]
        save(home / "pets" / PETS[number % 3] / f"{number}.png", noise(number, size))
    return home


@pytest.fixture
def collator(folder, tmp_path):
    """Make a split's collator, by name and settings."""

    def make(name="train", **values):
        values = {"model": MODEL, "task": TASK, "data_dir": str(folder), "dataset": "pets", "batch_size": 16} | values
        settings = settings_for(tmp_path, cache_dir=str(folder / "cache"), **values)
        return ImageCollator(load_datasets(settings), name, settings), settings

    return make


def shown(make, row, epoch=None):
    return make.micro_batch(Part([row], 1, 1.0), epoch).inputs["pixel_values"][0]


@pytest.mark.parametrize(("resample", "tolerance"), [(2, 1), (3, 2)])
def test_pixels_are_those_of_pillow_and_numpy(collator, tmp_path, resample, tolerance):
    """All of it by hand: enlarging, cutting out the centre, normalising."""
    mean, std = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    processor = {"size": 40, "image_mean": mean, "image_std": std, "resample": resample}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    make, _ = collator("test", model=str(tmp_path), resize_to=46)
    rows = list(range(len(make)))
    batch = make.micro_batch(Part(rows, len(rows), 1.0))
    assert batch.inputs["pixel_values"].shape == (12, 3, 40, 40)
    assert batch.inputs["pixel_values"].dtype == torch.float32
    assert batch.inputs["pixel_values"].is_contiguous()
    assert batch.inputs["labels"].tolist() == make.split["labels"][:]
    assert len({(row["height"], row["width"]) for row in make.split}) == 3
    for pixels, row in zip(batch.inputs["pixel_values"], make.split, strict=True):
        image = Image.fromarray(np.frombuffer(row["image"], np.uint8).reshape(row["height"], row["width"], 3))
        image = np.asarray(image.resize((46, 46), Image.Resampling(resample)))[3:43, 3:43] / 255
        expected = torch.from_numpy((image - mean) / std).permute(2, 0, 1)
        assert (pixels - expected).abs().max() <= tolerance / 255 / min(std) + 1e-6


def test_a_batch_counts_patches_as_tokens(collator):
    make, _ = collator()
    batch = make.micro_batch(Part([3, 5], 2, 1.0))
    assert (batch.tokens, batch.padded) == (34, 34)
    filler = make.micro_batch(Part([3], 0, 0.0))
    assert (filler.tokens, filler.padded, filler.items) == (0, 17, 0)


def test_cuts_and_mirrors_are_parts_of_the_image_and_differ_by_epoch(collator):
    make, _ = collator(resize_to=36, random_flip=True)
    plain, _ = collator(resize_to=36, image_size=36)
    places = []
    for row in range(len(make)):
        whole = shown(plain, row)
        for epoch in (0, 1):
            part = shown(make, row, epoch)
            assert torch.equal(part, shown(make, row, epoch))
            places += [
                (epoch, top, left, mirrored)
                for mirrored in (False, True)
                for top in range(5)
                for left in range(5)
                if torch.equal(part.flip(2) if mirrored else part, whole[:, top : top + 32, left : left + 32])
            ]
        assert torch.equal(shown(make, row), whole[:, 2:34, 2:34]), "the centre, not mirrored, in evaluation"
    assert len(places) == 2 * len(make)
    first, second = ([place[1:] for place in places if place[0] == epoch] for epoch in (0, 1))
    assert sum(one == other for one, other in zip(first, second, strict=True)) < 6
    assert {place[1] for place in places} == {place[2] for place in places} == set(range(5))
    assert 0.3 < np.mean([place[3] for place in places]) < 0.7
    other, _ = collator(resize_to=36, random_flip=True, seed=7)
    assert sum(torch.equal(shown(make, row, 0), shown(other, row, 0)) for row in range(len(make))) < 6


def by_row(collator, epoch=1, ranks=1, **values):
    """Pixels and labels of an epoch's rows, in the order of the steps, from all ranks."""
    make, settings = collator(resize_to=36, random_flip=True, **values)
    lengths = np.asarray(make.split["length"][:])
    steps = []
    for rank in range(ranks):
        sampler = EffectiveBatchSampler(lengths, np.ones_like(lengths), settings, rank, ranks)
        sampler.epoch = epoch
        for step, plan in enumerate(sampler):
            steps += [{}] if rank == 0 else []
            for part, micro_batch in zip(plan.parts, make[plan].micro_batches, strict=True):
                inputs = micro_batch.inputs
                if part.items:
                    assert not set(part.rows) & set(steps[step])
                    steps[step] |= dict(zip(part.rows, zip(*inputs.values(), strict=True), strict=True))
    return steps


CUTS = [{"micro_batch_size": 1}, {"micro_batch_size": 5}, {"micro_batch_tokens": 60}]


@pytest.mark.parametrize("values", [*CUTS, {"ranks": 2}, {"ranks": 3}])
def test_cut_and_ranks_change_no_sample(collator, values):
    alone, other = by_row(collator), by_row(collator, **values)
    make, _ = collator(resize_to=36, random_flip=True)
    assert [sorted(step) for step in alone] == [sorted(step) for step in other]
    for one, two in zip(alone, other, strict=True):
        for row, (pixels, label) in one.items():
            assert torch.equal(pixels, shown(make, row, epoch=1))
            assert torch.equal(pixels, two[row][0])
            assert label == two[row][1]


def test_workers_change_no_sample_in_any_epoch(folder, tmp_path, fabric):
    def epochs(num_workers):
        settings = settings_for(
            tmp_path, cache_dir=str(folder / "cache"), model=MODEL, task=TASK, data_dir=str(folder), dataset="pets",
            resize_to=36, random_flip=True, num_workers=num_workers, micro_batch_size=4, pad_to_multiple_of=64,
            eval_batch_tokens=210,
        )  # fmt: skip
        train_loader, val_loader, test_loader = build_dataloaders(fabric, load_datasets(settings), settings)
        seen = []
        for epoch in range(2):
            train_loader.sampler.epoch = epoch
            seen.append([micro_batch for batch in train_loader for micro_batch in batch.micro_batches])
        evaluated = [*val_loader, *test_loader]
        assert sum(micro_batch.items for micro_batch in evaluated) == 6 + 12
        assert max(len(micro_batch.inputs["labels"]) for micro_batch in evaluated) == 12, (
            "210 tokens hold as many, with nothing to pad"
        )
        return seen

    alone, workers = epochs(0), epochs(2)
    for one, other in zip(alone, workers, strict=True):
        assert len(one) == 11
        for first, second in zip(one, other, strict=True):
            assert all(torch.equal(first.inputs[name], second.inputs[name]) for name in first.inputs)
    assert not any(
        torch.equal(first.inputs["pixel_values"], second.inputs["pixel_values"])
        for first, second in zip(*alone, strict=True)
    )


@pytest.mark.parametrize("values", CUTS)
def test_the_cut_changes_no_gradient(collator, values):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=4, num_labels=3, **sizes))

    def gradient(**values):
        make, settings = collator(random_flip=True, resize_to=36, **values)
        lengths = np.asarray(make.split["length"][:])
        plan = next(iter(EffectiveBatchSampler(lengths, np.ones_like(lengths), settings, 0, 1)))
        model.zero_grad()
        for micro_batch in make[plan].micro_batches:
            (model(**micro_batch.inputs).loss * micro_batch.weight).backward()
        # as one vector: a bias in front of a softmax has a gradient of zero, which no relative error can measure
        return [torch.cat([parameter.grad.flatten() for parameter in model.parameters()])]

    assert relative_error(gradient(), gradient(**values)) < 1e-5


def test_a_rung_trains_on_a_folder_of_images(tmp_path):
    """Three plain colours, which a few steps tell apart."""
    rng = np.random.default_rng(0)
    for name, colour in zip(PETS, ([200, 40, 40], [40, 200, 40], [40, 40, 200]), strict=True):
        for number in range(60):
            pixels = np.clip(rng.normal(colour, 30, (32, 32, 3)), 0, 255).astype(np.uint8)
            save(tmp_path / "colours" / name / f"{number}.png", pixels)
    (tmp_path / "colours" / "cat" / "0.png").write_bytes(b"no image")
    arguments = f"--task {TASK} --dataset colours --model {MODEL} --from_scratch true --random_flip true".split()
    arguments += "--resize_to 36 --batch_size 16 --micro_batch_size 8 --log_every 32 --threads 1".split()
    arguments += "--learning_rate 1e-3 --bad_samples skip".split()
    config = tmp_path / "none.yaml"
    config.write_text("")
    process = run_script(SRC / "2_grad_accum.py", "--config", config, *arguments, cwd=tmp_path)
    stdout = finished(process)
    assert "colours · vit-small.json · seed 123 · batch 16 = 2 x 8 · 32-true · cpu" in stdout
    assert re.search(r"^Epoch: 0001/0001 \| Batch 0008/0008 \| Samples 00125/00125 \| Loss: ", stdout, re.MULTILINE)
    assert re.search(r"^Throughput [\d.]+ samples/s, \d+ tokens/s, padding 0\.0%$", stdout, re.MULTILINE)
    accuracy = float(re.search(r"^Test accuracy ([\d.]+)%$", stdout, re.MULTILINE)[1])
    assert accuracy > 60
    with open(tmp_path / "runs" / "2_grad_accum" / "1" / "metrics.csv", newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
    assert losses[-1] < losses[0]
