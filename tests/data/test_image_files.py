"""Images from folders, archives and the Hub: their splits and classes, and the inputs that are refused."""

import re
import tarfile
from collections import Counter

import datasets as hf
import pytest
from PIL import Image
from support.data_files import PETS, SPLITS, VIT, load_in, noise, packed, save_image, stored, write_images, write_pets

from fabric_ladder.data import hub as hub_module
from fabric_ladder.data import image_files
from fabric_ladder.errors import UserError

TASK = "image-classification"
LOAD = load_in, {"model": VIT, "task": TASK}


def test_a_folder_of_classes_is_split_like_texts(tmp_path, load):
    written = write_pets(tmp_path / "pets")
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


@pytest.mark.parametrize(("home", "names"), [("pets", ("Train", "val", "TEST")), ("pets/all", ("train", "test"))])
def test_folders_of_splits_stay_whole(tmp_path, load, names, home):
    sizes = {"cat": 9, "dog": 6}
    written = {name: write_images(tmp_path / home / name, sizes, 100 * number) for number, name in enumerate(names)}
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


@pytest.mark.parametrize(("name", "prefix"), [("a.TGZ", "./"), ("a.zip", "")])
def test_an_archive_reads_like_the_folder(tmp_path, load, name, prefix):
    for number, split in enumerate(("train", "test")):
        write_images(tmp_path / "pets" / split, {"dog": 12, "cat": 8}, start=100 * number)
    (tmp_path / "pets" / "read.me").write_text("not read")
    folder, archive = load("pets"), load(packed(tmp_path / "pets", tmp_path / name, prefix).name)
    assert [stored(archive, split) for split in SPLITS] == [stored(folder, split) for split in SPLITS]
    assert archive.fingerprint == folder.fingerprint, "the same images in the same order"
    assert not list((tmp_path / "cache").rglob("*.png"))


def test_a_damaged_archive_is_refused(tmp_path, load):
    """A half, bytes that are no archive, and an end within a header, which `tarfile` takes for the end."""
    write_pets(tmp_path / "pets")
    for name, reason in (("a.tar.gz", "[^\n]+"), ("a.zip", "[^\n]+"), ("a.tar", "ReadError: its end is missing")):
        path = packed(tmp_path / "pets", tmp_path / name)
        whole = path.read_bytes()
        if name == "a.tar":
            with tarfile.open(path) as archive:
                whole = whole[: archive.getmembers()[-1].offset + 100]
        path.write_bytes({"a.tar.gz": whole[: len(whole) // 2], "a.zip": b"noise" * 999}.get(name, whole))
        with pytest.raises(UserError, match=rf"{name} cannot be unpacked: download it or pack it again \({reason}\)$"):
            load(path)


def test_a_split_without_any_good_image_and_a_folder_named_like_an_image_are_refused(tmp_path, load):
    write_images(tmp_path / "pets" / "train", dict.fromkeys(PETS, 4))
    for name in PETS:
        path = tmp_path / "pets" / "test" / name / "a.jpg"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"no image")
    with pytest.raises(UserError, match="no image of the test split can be decoded"):
        load("pets", bad_samples="skip")
    (tmp_path / "pets" / "train" / "cat" / "folder.png").mkdir()
    with pytest.raises(UserError, match=r"^cannot read \S*cat/folder\.png \("):
        load("pets")


HUB = {"img": hf.Image(), "label": hf.ClassLabel(names=["frog", "cat", "ship"])}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Make a data set in Parquet files as on the Hub, and load it from this folder instead."""
    read = hf.load_dataset
    monkeypatch.setattr(hub_module, "_hub_answers", lambda: True)
    monkeypatch.setattr(image_files, "find_commit", lambda settings: "a" * 40)

    def load(name, revision, **options):
        return read(str(tmp_path / "hub" / name), **options)

    monkeypatch.setattr(hf, "load_dataset", load)

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


def test_a_hub_data_set_is_decoded(load, hub):
    got = load(hub(train=40, test=9))
    assert got.class_names == ["frog", "cat", "ship"]
    assert [len(got.splits[split]) for split in SPLITS] == [36, 4, 9]
    expected = Counter((noise(40 + number).tobytes(), ["frog", "cat", "ship"][number % 3]) for number in range(9))
    assert stored(got, "test") == expected


def test_missing_hub_columns_are_refused(load, hub):
    two = hub({"a": hf.Image(), "b": hf.Image(), "label": hf.Value("int64")}, train=9)
    with pytest.raises(UserError, match=r"org/name \(train\) must have one column of images, .* 'image'; it has a, b"):
        load(two)
    with pytest.raises(UserError, match=r"has no column 'kind', only img, label: .* --label_column"):
        load(hub(train=9), label_column="kind")


def test_broken_images_are_refused_or_counted(tmp_path, load):
    """Two files are texts, two are empty, and one image is cut."""
    write_pets(tmp_path / "pets", each=20)
    half = (tmp_path / "pets" / "cat" / "0.png").read_bytes()[:1500]
    for number, content in enumerate((b"no image", b"", half, b"no image")):
        (tmp_path / "pets" / "cat" / f"{number}.png").write_bytes(content)
    (tmp_path / "pets" / "cat" / "4.png").rename(tmp_path / "pets" / "cat" / "phone.HEIC").write_bytes(b"\0ftypheic")
    with pytest.raises(UserError) as error:
        load("pets")
    problem = "(not an image in a known format|an empty file|.*truncated.*)"
    pattern = rf"5 of 60 images cannot be decoded \((\S*cat/(\d\.png|phone\.HEIC): {problem}; ){{3}}…\)"
    assert re.fullmatch(pattern + ": fix or remove them, or leave them out with --bad_samples skip", str(error.value))
    assert not list((tmp_path / "cache").rglob("*.arrow"))
    for _ in range(2):  # the second load reads the cache
        got = load("pets", bad_samples="skip")
        (notice,) = got.notices
        assert re.fullmatch(pattern + " and are left out", notice)
        assert sum(len(got.splits[split]) for split in SPLITS) == 55
        labels = sum((Counter(got.splits[split]["labels"][:]) for split in SPLITS), Counter())
        assert labels == {0: 15, 1: 20, 2: 20}


REFUSED = {
    "column": (["cat/a.png"], {"label_column": "breed"}, "--label_column is for a --dataset on the Hub; pets has"),
    "only a test": (
        ["test/cat/a.png", "test/dog/b.png"], {}, "pets holds no training image, only test: add a folder train"
    ),
    "one class": (["cat/a.png", "cat/b.png"], {}, "all training images have the same label, 'cat'"),
    "too few": (["cat/a.png", "dog/b.png"], {}, "2 images are too few to be split"),
    "unknown class": (
        ["train/cat/a.png", "train/dog/b.png", "test/cat/c.png", "test/eel/d.png"], {},
        r"the test images have labels that the training images lack: \['eel'\]",
    ),
    "next to classes": (
        ["cat/a.png", "dog/b.png", "c.png"], {},
        r"1 of 3 images are not in the folder of a class \(c\.png\): move them so that all paths are <class>/<im",
    ),
    "in a split": (
        ["train/cat/a.png", "train/dog/b.png", "test/c.png"], {}, r"\(test/c\.png\).* are <split>/<class>/<image>"
    ),
    "unlike splits": (
        ["train/cat/a.png", "train/dog/b.png", "extra/cat/c.png"], {},
        "the folder extra is not a split: name it validation or test",
    ),
    "texts": ([], {"dataset": "imdb"}, "imdb holds texts: --task image-classification needs a folder with a folder"),
    "file": (["a.csv"], {"dataset": "pets/a.csv"}, r"a\.csv is neither a folder nor an archive \(\.tar, "),
    "test file": (["cat/a.png"], {"test_file": "b.csv"}, "--validation_file and --test_file are for texts"),
    "no room for a crop": (["cat/a.png"], {"resize_to": 31}, "--resize_to 31 is smaller than the image size 32"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_folders_and_options_are_refused_in_one_line(tmp_path, load, name):
    files, values, pattern = REFUSED[name]
    (tmp_path / "pets").mkdir()
    for number, file in enumerate(files):
        path = tmp_path / "pets" / file
        if file.endswith(".png"):
            save_image(path, noise(number))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
    with pytest.raises(UserError, match=pattern) as error:
        load(**{"dataset": "pets"} | values)
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache").rglob("*.arrow"))
