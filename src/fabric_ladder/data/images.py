"""Find the image format of a model, decode images once, and keep their pixels in the cache."""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path

import datasets as hf
import numpy as np
import PIL
import pyarrow as pa
from PIL import Image, ImageOps
from transformers import ImageProcessingMixin, PretrainedConfig

from fabric_ladder.data.cache import make_once, progress_bar, write_rows
from fabric_ladder.data.hub import load_config, reachable
from fabric_ladder.data.image_files import find_images, read_images
from fabric_ladder.data.rows import note_bad_samples
from fabric_ladder.data.splits import SPLITS, ImageDatasets, ImageFormat
from fabric_ladder.data.summary import ReadData, complete, name_copies
from fabric_ladder.data.text_sources import content_problem
from fabric_ladder.errors import UserError, first_line, refused
from fabric_ladder.settings import DataSettings

IMAGE_CACHE_FORMAT = 6  # raise it whenever the same inputs would give other pixels or labels
# Pillow decodes other formats with external programs
IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "WEBP", "TIFF", "AVIF", "JPEG2000")
WHITE = 65535  # the brightest level of 16 bits
PIXELS = pa.schema({"image": pa.binary(), "height": pa.int32(), "width": pa.int32(), "labels": pa.int64()})
CHOICES = (  # settings that change the stored pixels, in addition to the format
    "label_column bad_samples train_samples validation_samples test_samples split_seed".split()
)


def load_images(settings: DataSettings) -> ImageDatasets:
    """Read, split and decode images; see `prepare`."""
    image_format, notices = read_image_format(settings)
    path, source = find_images(settings)
    inputs = [IMAGE_CACHE_FORMAT, PIL.__version__, source, image_format.resize_to, image_format.resample]
    inputs += [getattr(settings, name) for name in CHOICES]
    folder, facts = make_once(settings, "images", inputs, partial(_decode_splits, settings, path, source, image_format))
    splits = hf.DatasetDict()
    for split in SPLITS:
        table = hf.Dataset.from_file(str(folder / f"{split}.arrow"))
        splits[split] = table.add_column("length", np.full(len(table), image_format.tokens))
    fingerprint = hashlib.sha256(f"{facts['content']} {json.dumps(image_format)}".encode()).hexdigest()[:20]
    commit = source[-1] if path is None else None
    notices += facts["notices"]
    return ImageDatasets(splits, facts["class_names"], image_format, fingerprint, notices, commit, facts["summary"])


def read_image_format(settings: DataSettings) -> tuple[ImageFormat, list[str]]:
    """Return a model's image format, from its config and preprocessor_config.json, and notices.

    Raises:
        UserError: The model cannot be loaded, does not read colours, or does not fit the sizes in the settings.
    """
    config, processor, notices = _read_configs(settings.model)
    config = getattr(config, "vision_config", config)
    if getattr(config, "num_channels", 3) != 3:
        raise UserError(f"{settings.model} reads {config.num_channels} channels, images have 3: choose another")
    shown = processor.get("crop_size") if processor.get("do_center_crop") else None
    whole = processor.get("size") if processor.get("do_resize", True) else None
    sizes = [side(size) for size in (settings.image_size, shown, whole, getattr(config, "image_size", None))]
    size = next((size for size in sizes if size is not None), None)
    if size is None:
        raise UserError(f"the config of {settings.model} lacks the size of images: set --image_size")
    patch = side(getattr(config, "patch_size", None)) or 16
    if size < patch:
        raise UserError(f"--image_size {size} is smaller than a patch of {settings.model}, {patch}: raise it")
    resize_to = size if settings.resize_to is None else settings.resize_to
    if resize_to < size:
        raise UserError(f"--resize_to {resize_to} is smaller than the image size {size}: raise it to {size}")
    mean = std = 0.5
    if not processor.get("do_normalize", True):
        mean, std = 0.0, 1.0
    elif processor:
        mean, std = (processor.get(name) or 0.5 for name in ("image_mean", "image_std"))
    with refused(f"the preprocessor_config.json of {settings.model} cannot be used"):
        scale = 255 * processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 255
        mean, std = (tuple((np.broadcast_to(value, 3) / scale).tolist()) for value in (mean, std))
    resample = "bicubic" if processor.get("resample") == Image.Resampling.BICUBIC else "bilinear"
    tokens = (size // patch) ** 2 + 1
    return ImageFormat(size, resize_to, mean, std, resample, settings.random_flip, tokens), notices


def _read_configs(model: str) -> tuple[PretrainedConfig, dict, list[str]]:
    """Return a model's config, its preprocessor_config.json, and a notice if it lacks the latter."""
    config = load_config(model)
    if model.endswith(".json"):
        return config, {}, []
    with reachable(model, "image preprocessor") as options:
        try:
            processor = ImageProcessingMixin.get_image_processor_dict(model, **options)[0]
        except OSError as error:
            if "preprocessor_config" not in str(error):
                raise
            return config, {}, [f"{model} has no preprocessor_config.json: pixels are scaled to -1 … 1 for it"]
    return config, processor, []


def side(size: int | dict | list | None) -> int | None:
    """Return the pixels of a side, in any form that configs use."""
    if isinstance(size, dict):
        return size.get("height") or size.get("shortest_edge")
    return size[0] if isinstance(size, (list, tuple)) else size


def _decode_splits(
    settings: DataSettings, path: Path | None, key: list, image_format: ImageFormat, scratch: Path
) -> tuple[Path, dict]:
    """Read, split and decode into a folder in `scratch`; return it and the facts about it."""
    target = scratch / "pixels"
    target.mkdir()
    files, (splits, class_names, summary, notices) = read_image_splits(settings, path, key, scratch)
    resample = Image.Resampling[image_format.resample.upper()]
    levels, bad, kept, hashes = [], [], {}, {}
    content = hashlib.sha256(json.dumps(class_names).encode())
    decode = partial(_try_decode, side=image_format.resize_to, resample=resample, levels=levels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about odd images that it can read
        for split, rows in splits.items():
            decoded = _decode_rows(files, rows, decode, content, bad, hashes.setdefault(split, []))
            kept[split] = len(write_rows(target / f"{split}.arrow", PIXELS, decoded))
    if dark := name_darkness(levels):
        raise UserError(dark)
    notices += note_bad_samples(bad, sum(map(len, splits.values())), "images cannot be decoded", settings)
    notices += name_copies(
        {split: [(partial(_name, files, rows), np.array(hashes[split]))] for split, rows in splits.items()}, "images"
    )
    if empty := [split for split, rows in kept.items() if not rows]:
        raise UserError(f"no image of the {empty[0]} split can be decoded")
    return target, {"class_names": class_names, "content": content.hexdigest(), "notices": notices, "summary": summary}


def read_image_splits(
    settings: DataSettings, path: Path | None, key: list, scratch: Path
) -> tuple[hf.Dataset, ReadData]:
    """Return a table of all image files, and the splits, whose column `row` has the rows of that table."""
    notices = []
    files, read, class_names = read_images(settings, path, key, scratch, notices)
    return files, complete(settings, read, class_names, notices, (), path.name if path else settings.dataset)


def _decode_rows(
    files: hf.Dataset, rows: hf.Dataset, decode: Callable, content, bad: list, hashes: list[int]
) -> Iterator[dict]:
    """Yield the stored row of each image, and add it to the hash `content`.

    `bad` gets the images that cannot be decoded, with the reason, and `hashes` the hash of each file.
    """
    with ThreadPoolExecutor() as pool, progress_bar("Decoding", total=len(rows)) as bar:
        for batch in rows.iter(32):
            images = [image or {"bytes": b"", "path": None} for image in files[batch["row"]]["image"]]
            data = [_encoded(image) for image in images]
            hashes += map(hash, data)
            large = sum(map(len, data)) > 2**14 * len(data)  # for small images, threads cost more than they save
            decoded = (pool.map if large else map)(decode, data)
            for image, label, pixels in zip(images, batch["label"], decoded, strict=True):
                if isinstance(pixels, np.ndarray):
                    (height, width, _), pixels = pixels.shape, pixels.tobytes()
                    content.update(np.array([height, width, label], "<i8").tobytes() + pixels)
                    yield {"image": pixels, "height": height, "width": width, "labels": label}
                else:
                    bad.append((image["path"] or "an image without a name", first_line(pixels)))
            bar.update(len(images))


def _name(files: hf.Dataset, rows: hf.Dataset, place: int) -> str:
    path = (files[rows[place]["row"]]["image"] or {}).get("path") or "an image without a name"
    return "/".join(Path(path).parts[-2:])


def _encoded(image: dict) -> bytes:
    if image["bytes"] is not None or image["path"] is None:
        return image["bytes"] or b""
    with refused(f"cannot read {image['path']}"):
        return Path(image["path"]).read_bytes()


def _try_decode(data: bytes, **options) -> np.ndarray | Exception:
    try:
        return decode(data, **options)
    except PIL.UnidentifiedImageError:
        return ValueError(content_problem(data[:40]) or "not an image in a known format" if data else "an empty file")
    except Exception as error:  # Pillow's readers raise many types of errors
        return error


def decode(data: bytes, side: int, resample: Image.Resampling, levels: list[int]) -> np.ndarray:
    """Return bytes (height, width, 3), upright and on white; larger images are resized to a square of `side` pixels.

    Images of more than 8 bits add their brightest level to `levels`.
    """
    with Image.open(BytesIO(data), formats=IMAGE_FORMATS) as image:
        image.draft(None, (2 * side, 2 * side))  # decode a much larger JPEG at a half or less of its size
        deep = ";16" in str(image.tile)  # of the parts of the file, which are forgotten once they are decoded
        image.load()
        if deep and image.mode[0] not in "IF":
            levels.append(257 * max(high for _, high in image.convert("RGB").getextrema()))
        with suppress(SyntaxError):  # a broken EXIF part
            image = ImageOps.exif_transpose(image)
        if image.mode[0] in "IF":  # more than 8 bits, which Pillow would clip
            grey = np.asarray(image)
            if image.mode == "F" or grey.min() < 0 or grey.max() > WHITE:
                raise ValueError(f"its pixels (mode {image.mode}) are not 8 or 16 bits deep")
            levels.append(int(grey.max()))
            image = Image.fromarray(((grey.astype(np.int32) * 255 + WHITE // 2) // WHITE).astype(np.uint8))
        elif image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB")
        if max(image.size) > side:
            image = image.resize((side, side), resample)
        return np.asarray(image)


def name_darkness(levels: list[int]) -> str | None:
    """Return what is wrong with images of 16 bits that are all dark, given the brightest level of each."""
    used = f"the images of 16 bits ({len(levels):,}) use less than half of the {WHITE:,} levels, as those of 12 bits do"
    return f"{used}: convert them to 8 bits per colour" if 0 < max(levels, default=WHITE) <= WHITE // 2 else None
