"""Images are decoded, cached, prepared for the model and cut into batches."""

import io
import json
import struct
import zlib
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from support.data_files import (
    PETS,
    SPLITS,
    VIT,
    assert_mapped,
    files_of,
    load_in,
    noise,
    packed,
    save_image,
    stored,
    write_pets,
)
from support.helpers import settings_for

from fabric_ladder import build_dataloaders
from fabric_ladder.data import images
from fabric_ladder.data.cutting import MicroBatchPlan
from fabric_ladder.data.images import decode, read_image_format
from fabric_ladder.data.load import load_datasets
from fabric_ladder.data.loaders import ImageCollator
from fabric_ladder.errors import UserError
from fabric_ladder.settings import DataSettings

TASK = "image-classification"
LOAD = load_in, {"model": VIT, "task": TASK}


def decoded(image, side=64, **options):
    """Save an image as a file and return the pixels that the cache stores for it."""
    file = io.BytesIO()
    image.save(file, **{"format": "PNG"} | options)
    return decode(file.getvalue(), side, Image.Resampling.BILINEAR, [])


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
    "palette": (palette(), {}, RAINBOW[GREY % 4]),
    "palette with a hole": (palette(3), {}, np.vstack([RAINBOW[:3], [[255] * 3]])[GREY % 4]),
    "16-bit grey": (Image.fromarray(GREY.astype(np.uint16) * 257), {}, rgb(GREY)),
    "32-bit grey": (Image.fromarray(GREY.astype(np.int32) * 257), {"format": "TIFF"}, rgb(GREY)),
    "grey, half transparent": (
        Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(HALF)]), {}, rgb(255 - (255 - GREY) * (128 / 255))
    ),
    "colours, transparent": (Image.fromarray(noise(0)[:16, :16]).convert("RGBA"), {}, noise(0)[:16, :16]),
    "no EXIF part": (COLOURS, {"exif": b"Exif\0\0garbage"}, np.asarray(COLOURS)),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_three_colours_on_white(mode):
    image, options, expected = MODES[mode]
    got = decoded(image, **options)
    assert got.dtype == np.uint8
    assert got.shape == expected.shape
    assert np.abs(got.astype(float) - expected).max() <= 1


def test_images_are_turned_upright():
    image = Image.fromarray(noise(1, (20, 30)))
    np.testing.assert_array_equal(decoded(image), np.asarray(image))
    for orientation, undone in enumerate((0, 3, 1, 5, 4, 6, 2), 2):
        exif = Image.Exif()
        exif[0x0112] = orientation
        np.testing.assert_array_equal(decoded(image, exif=exif), np.asarray(image.transpose(Image.Transpose(undone))))


def test_large_images_are_stored_small_and_small_ones_as_they_are(tmp_path, load):
    sizes = [(40, 20), (33, 33), (32, 32), (7, 5), (32, 31)]
    for number, size in enumerate(sizes * 4):
        save_image(tmp_path / "pets" / PETS[number % 2] / f"{number}.png", noise(number, size))
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
    """A JPEG is decoded at reduced size. The result must equal Pillow's own resizing within rounding."""
    smooth = Image.fromarray(noise(3, (30, 40))).resize((640, 480), Image.BICUBIC)
    file = io.BytesIO()
    smooth.save(file, "JPEG", quality=95)
    expected = np.asarray(Image.open(file).convert("RGB").resize((64, 64), Image.BILINEAR), int)
    assert np.abs(decoded(smooth, format="JPEG", quality=95) - expected).mean() < 1


def test_a_second_call_decodes_nothing_and_writes_nothing(tmp_path, load, monkeypatch):
    write_pets(tmp_path / "pets")
    dataset = packed(tmp_path / "pets", tmp_path / "a.zip")
    first = load(dataset)
    before = files_of(tmp_path / "cache")
    assert not [name for name in before if "unfinished" in name.name]
    monkeypatch.delattr(images, "decode")
    second = load(dataset)
    for values in ({"image_size": 24, "resize_to": 32}, {"random_flip": True}):
        other = load(dataset, **values)  # the images are not decoded again, but the data are different
        assert other.fingerprint != first.fingerprint
        assert stored(other, "train") == stored(first, "train")
    assert files_of(tmp_path / "cache") == before
    assert second.fingerprint == first.fingerprint
    assert [stored(second, split) for split in SPLITS] == [stored(first, split) for split in SPLITS]
    assert_mapped(second, tmp_path)


CONFIG = {"model_type": "vit", "image_size": 48, "patch_size": 8}

FORMATS = {
    "config alone": ({}, {}, (48, 48, (0.5,) * 3, (0.5,) * 3, "bilinear", 37)),
    "processor": (
        {"size": {"height": 64, "width": 64}, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6],
         "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255},
        {}, (64, 64, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic", 65),
    ),
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
    found, notices = read_image_format(DataSettings(task=TASK, model=str(tmp_path), **values))
    size, resize_to, mean, std, resample, tokens = expected
    assert (found.size, found.resize_to, found.resample, found.tokens) == (size, resize_to, resample, tokens)
    assert found.mean == pytest.approx(mean)
    assert found.std == pytest.approx(std)
    assert [("no preprocessor_config.json" in notice) for notice in notices] == ([] if processor else [True])


def test_models_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"num_channels": 1}))
    with pytest.raises(UserError, match="reads 1 channels, images have 3"):
        read_image_format(DataSettings(task=TASK, model=str(path)))
    path.write_text(json.dumps({"model_type": "resnet"}))
    with pytest.raises(UserError, match="lacks the size of images: set --image_size"):
        read_image_format(DataSettings(task=TASK, model=str(path)))
    assert read_image_format(DataSettings(task=TASK, model=str(path), image_size=64))[0].tokens == 17


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write images of several sizes."""
    home = tmp_path_factory.mktemp("images")
    for number in range(60):
        size = [(32, 32), (20, 30), (50, 45), (32, 32)][number % 4]
        save_image(home / "pets" / PETS[number % 3] / f"{number}.png", noise(number, size))
    return home


@pytest.fixture
def collator(folder, tmp_path):
    """Make the collator of a split, by name and settings."""

    def make(name="train", **values):
        values = {"model": VIT, "task": TASK, "data_dir": str(folder), "dataset": "pets", "batch_size": 16} | values
        settings = settings_for(tmp_path, cache_dir=str(folder / "cache"), **values)
        return ImageCollator(load_datasets(settings), name, settings), settings

    return make


def shown(make, row, epoch=None):
    return make.micro_batch(MicroBatchPlan([row], 1, 1.0), epoch).inputs["pixel_values"][0]


@pytest.mark.parametrize(("resample", "tolerance"), [(2, 1), (3, 2)])
def test_pixels_are_those_of_pillow_and_numpy(collator, tmp_path, resample, tolerance):
    """Compute all steps by hand: enlarge, crop the centre and normalise."""
    mean, std = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    processor = {"size": 40, "image_mean": mean, "image_std": std, "resample": resample}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    make, _ = collator("test", model=str(tmp_path), resize_to=46)
    rows = list(range(len(make)))
    batch = make.micro_batch(MicroBatchPlan(rows, len(rows), 1.0))
    assert batch.inputs["pixel_values"].shape == (12, 3, 40, 40)
    assert batch.inputs["pixel_values"].dtype == torch.float32
    assert batch.inputs["pixel_values"].is_contiguous()
    assert batch.inputs["labels"].tolist() == make.split["labels"][:]
    assert batch.tokens == batch.padded == 12 * 26
    filler = make.micro_batch(MicroBatchPlan([3], 0, 0.0))
    assert (filler.tokens, filler.padded, filler.items) == (0, 26, 0)
    assert len({(row["height"], row["width"]) for row in make.split}) == 3
    for pixels, row in zip(batch.inputs["pixel_values"], make.split, strict=True):
        image = Image.fromarray(np.frombuffer(row["image"], np.uint8).reshape(row["height"], row["width"], 3))
        image = np.asarray(image.resize((46, 46), Image.Resampling(resample)))[3:43, 3:43] / 255
        expected = torch.from_numpy((image - mean) / std).permute(2, 0, 1)
        assert (pixels - expected).abs().max() <= tolerance / 255 / min(std) + 1e-6


def test_cuts_and_mirrors_are_parts_of_the_image_and_differ_by_epoch(collator):
    make, _ = collator(resize_to=36, random_flip=True)
    plain, _ = collator(resize_to=36, image_size=36)
    seen = []
    for row in range(len(make)):
        whole = shown(plain, row)
        for epoch in (0, 1):
            part = shown(make, row, epoch)
            assert torch.equal(part, shown(make, row, epoch))
            seen += [
                (epoch, top, left, mirrored)
                for mirrored in (False, True)
                for top in range(5)
                for left in range(5)
                if torch.equal(part.flip(2) if mirrored else part, whole[:, top : top + 32, left : left + 32])
            ]
        assert torch.equal(shown(make, row), whole[:, 2:34, 2:34]), "evaluation takes the centre without mirroring"
    assert len(seen) == 2 * len(make)
    together = make.micro_batch(MicroBatchPlan(list(range(len(make))), len(make), 1.0), 1).inputs["pixel_values"]
    assert all(torch.equal(pixels, shown(make, row, 1)) for row, pixels in enumerate(together))
    first, second = ([cut[1:] for cut in seen if cut[0] == epoch] for epoch in (0, 1))
    assert sum(one == other for one, other in zip(first, second, strict=True)) < 6
    assert {cut[1] for cut in seen} == {cut[2] for cut in seen} == set(range(5))
    assert 0.3 < np.mean([cut[3] for cut in seen]) < 0.7
    other, _ = collator(resize_to=36, random_flip=True, seed=7)
    assert sum(torch.equal(shown(make, row, 0), shown(other, row, 0)) for row in range(len(make))) < 6


def colours_of_16_bits(pixels):
    """Return a PNG with 16 bits per colour, which Pillow cannot write."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0),
        b"IDAT": zlib.compress(rows),
        b"IEND": b"",
    }
    chunks = (struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
              for kind, data in parts.items())  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize("bits", [12, 16])
def test_colours_of_12_bits_in_16_are_refused(tmp_path, load, bits):
    for number in range(20):
        pixels = np.random.default_rng(number).integers(0, 2**bits, (8, 8, 3))
        path = tmp_path / "pets" / PETS[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(colours_of_16_bits(pixels))
    if bits == 12:
        with pytest.raises(UserError, match="convert them to 8 bits per colour"):
            load("pets")
        return
    stored = {row["image"] for rows in load("pets").splits.values() for row in rows}
    assert (pixels >> 8).astype(np.uint8).tobytes() in stored


def test_workers_change_no_sample_and_images_are_not_padded(folder, tmp_path, fabric):
    def batches(num_workers):
        settings = settings_for(
            tmp_path, cache_dir=str(folder / "cache"), model=VIT, task=TASK, data_dir=str(folder), dataset="pets",
            resize_to=36, random_flip=True, num_workers=num_workers, pad_to_multiple_of=64, eval_batch_tokens=210,
        )  # fmt: skip
        train_loader, _, test_loader = build_dataloaders(fabric, load_datasets(settings), settings)
        assert [part.items for part in test_loader] == [12], "210 tokens hold 12 images without padding"
        train_loader.sampler.epoch = 1
        return [part.inputs["pixel_values"] for batch in train_loader for part in batch.micro_batches]

    for alone, worker in zip(batches(0), batches(2), strict=True):
        assert alone.equal(worker)
