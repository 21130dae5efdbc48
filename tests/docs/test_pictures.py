"""docs/pictures: every technique page shows its two pictures, and the program draws them."""

import pytest
from PIL import Image
from support.helpers import ROOT

PAGES = sorted((ROOT / "docs" / "techniques").glob("[!0]*.md"))  # 0_pytorch shows its diff
PICTURES = ROOT / "docs" / "pictures"
THEMES = {"light": (255, 255, 255), "dark": (13, 17, 23)}


@pytest.fixture(scope="module")
def program():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PICTURES))
        import draw
    return draw


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_technique_page_shows_its_light_and_its_dark_picture(page):
    text = page.read_text(encoding="utf-8")
    for theme in THEMES:
        picture = PICTURES / f"{page.stem}_{theme}.png"
        assert f"](../pictures/{picture.name}#gh-{theme}-mode-only)" in text
        assert picture.stat().st_size < 60_000


def test_every_picture_on_disk_has_a_function(program):
    drawn = {f"{name}_{theme}.png" for name in program.PICTURES for theme in THEMES}
    others = {"ladder.png", "minilm_loss.png"}  # evidence_tables.py draws the first, compare_runs.py the second
    assert {path.name for path in PICTURES.glob("*.png")} - others == drawn


@pytest.mark.parametrize("name", ["readme", "16_bf16_that_learns"])
def test_the_program_draws_each_picture(program, name, tmp_path):
    program.draw(name, tmp_path)
    for theme, ground in THEMES.items():
        image = Image.open(tmp_path / f"{name}_{theme}.png").convert("RGB")
        assert image.width == 1020
        assert image.getpixel((0, 0)) == ground
        assert len(image.getcolors(100)) > 10


def test_a_recorded_step_has_the_predicted_peak(program):
    step = program.record(16)
    peak = max(sum(sample.values()) for sample in step.samples) / 1e9
    parts = program.predicted("bloom-560m", "5_low_precision", "--micro_batch_size 16")
    assert peak == pytest.approx(sum(parts.values()), rel=1e-3)
