"""Files that other projects read wrongly in silence: each is read right, refused in one line, or named."""

import io
import zipfile

import numpy as np
import pytest
from PIL import Image
from support.data_files import SPLITS, VIT, load_in, noise, save_image, stored


def load_pets(folder, dataset="pets", **values):
    return load_in(folder, dataset, model=VIT, task="image-classification", **values)


def test_images_of_12_bits_are_scaled_by_the_largest_level(tmp_path):
    levels = np.arange(20)[:, None, None] * 10 + np.full((20, 16, 16), 3895)
    levels[:, 0] = 0
    for number, grey in enumerate(levels):
        image = Image.fromarray(grey.astype(np.uint16))
        save_image(tmp_path / "pets" / ("cat" if number % 2 else "dog") / f"{number}.png", image)
    got = load_pets(tmp_path)
    assert max(max(image) for split in SPLITS for image in got.splits[split]["image"][:]) == 255
    assert min(max(image) for split in SPLITS for image in got.splits[split]["image"][:]) == round(3895 * 255 / 4085)
    assert got.notices[-1].startswith("the images of 16 bits reach only 4,085 of 65,535: ")


@pytest.mark.parametrize(
    ("encoding", "names"), [("gbk", ("狗", "猫")), ("utf-8", ("café", "thé")), ("cp437", ("ä", "ö"))]
)
@pytest.mark.parametrize("slash", ["/", "\\"])
def test_a_zip_of_a_windows_program_is_read(tmp_path, encoding, names, slash):
    """Python marks names as UTF-8 unless they are ASCII, so they are written as ASCII of the same length first."""
    data = io.BytesIO()
    plain = [f"{'@' if name == names[0] else '#'}" * len(name.encode(encoding)) for name in names]
    with zipfile.ZipFile(data, "w") as archive:
        for number in range(20):
            png = save_image(tmp_path / "a.png", noise(number)).read_bytes()
            archive.writestr(f"pets|{plain[number % 2]}|{number}.png", png)
    raw = data.getvalue()
    for name, ascii_name in zip(names, plain, strict=True):
        raw = raw.replace(f"|{ascii_name}|".encode(), b"|" + name.encode(encoding) + b"|")
    for number in range(20):
        raw = raw.replace(f"|{number}.png".encode(), f"{slash}{number}.png".encode())
    (tmp_path / "pets.zip").write_bytes(raw.replace(b"pets|", b"pets" + slash.encode()))
    got = load_pets(tmp_path, "pets.zip")
    assert got.class_names == sorted(names)
    assert sum(sum(stored(got, split).values()) for split in SPLITS) == 20
    assert bool(got.notices) == (encoding != "utf-8")
