"""The page and the charts: their content in light mode, in dark mode and on a narrow screen."""

import re
import shutil
import subprocess
from base64 import b64decode
from pathlib import Path

import pytest
from scipy.stats import binomtest
from support.recorded_runs import BLOG, compare, record, write_run

from fabric_ladder.comparing.charts import find_curves, save_charts, smooth
from fabric_ladder.comparing.matching import wilson_interval
from fabric_ladder.comparing.page import to_html
from fabric_ladder.comparing.sources import read_sources


@pytest.mark.parametrize(("hits", "n"), [(0, 10), (5, 10), (10, 10), (8737, 10000), (1, 1)])
def test_wilsons_interval(hits, n):
    expected = binomtest(hits, n).proportion_ci(0.95, "wilson")
    assert wilson_interval(hits / n, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_smoothing():
    assert smooth([1, 2, 3], [5.0, 5.0, 5.0], 2) == pytest.approx([5, 5, 5])
    assert smooth([0, 10], [0.0, 3.0], 10) == pytest.approx([0, 2])  # the older value has half the weight
    assert smooth([0, 10], [1.0, 3.0], 0) == [1, 3]


def charts_of(page):
    """Return the light and the dark SVG files of a page by their alternative texts."""
    found = re.findall(r'srcset="data:image/svg\+xml;base64,(.*?)"><img src="data:.*?;base64,(.*?)" alt="(.*?)"', page)
    return {text: (b64decode(light).decode(), b64decode(dark).decode()) for dark, light, text in found}


def test_a_long_run_has_a_small_chart_with_its_peak_and_the_same_page_each_time(tmp_path):
    folder = Path(write_run(tmp_path, record()))
    rows = [f"1,5e-5,{9.0 if step == 5000 else 0.4 + step % 7 / 50},{step},{step},{step}" for step in range(1, 10_000)]
    (folder / "metrics.csv").write_text("\n".join(["epoch,learning_rate,loss,samples,seconds,step", *rows]) + "\n")
    comparison = compare(read_sources([str(folder)]))
    page = to_html(comparison)
    assert len(page) < 2_000_000
    assert page == to_html(comparison)
    assert max(find_curves(comparison.rows, "losses")[0][0].thin) == 9.0


def test_charts_of_runs_with_few_figures(tmp_path):
    (tmp_path / "log.txt").write_text("# $\\frac{ & _x\n" + (BLOG / "compile.txt").read_text())
    comparison = compare(read_sources([str(tmp_path / "log.txt")]))
    save_charts(comparison, tmp_path / "charts")
    assert {path.name for path in (tmp_path / "charts").iterdir()} == {"time.png", "accuracy.png"}
    page = to_html(comparison)
    assert "Training loss" not in page
    assert "Peak memory" not in page


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Make a page with every part: seeds, differences, epochs, classes and unusual names."""
    root = tmp_path_factory.mktemp("page")
    classes = {"names": ["sport", "<b>trade</b>", "art"], "confusion": [[300, 20, 13], [15, 250, 30], [5, 40, 327]]}
    classes |= {"accuracy": [0.9, 0.85, 0.88], "macro_f1": 0.8765}
    for number, seed in enumerate((1, 2, 3), start=1):
        content = record(seed=seed, minutes=40, accuracy=0.90 + 0.01 * seed, epochs=3)
        content["results"]["classes"] = classes
        write_run(root, content, number, epochs=3)
        content = record("3_torch_compile", seed=seed, minutes=30 + seed, accuracy=0.925, compile=True, epochs=3)
        write_run(root, content, number, epochs=3)
    write_run(root, record("5_low_precision", minutes=20, memory=4e9, precision="bf16-true", seed=1))
    (root / "odd").mkdir()
    (root / "odd" / "log.txt").write_text("# <script>alert(1)</script>&'\"\n" + (BLOG / "compile.txt").read_text())
    path = root / "report.html"
    path.write_text(to_html(compare(read_sources([str(root)]))), encoding="utf-8")
    return path


def test_the_page_loads_nothing_and_runs_nothing(page):
    text = page.read_text()
    assert not re.search(r"https?:|@import|url\(", text)
    assert all(link.startswith("data:") for link in re.findall(r"""(?:src|href|srcset)=["']?([^"'> ]*)""", text))
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert len(text) < 1_000_000


def test_the_content_of_the_page(page):
    text = page.read_text()
    assert "<li>epochs 3 / 1</li>" in text
    assert "40.00 ± 0.00 min" in text
    assert "92.50 ± 0.00 % (+0.50 ≈)" in text  # the spread of 2_grad_accum is 1.00
    charts = charts_of(text)
    loss, validation, time, memory, accuracy = charts
    assert "2_grad_accum ends at 0.2" in loss
    assert "3_torch_compile ends at 90;" in validation
    assert "3_torch_compile 32.00 ± 1.00 min (0.80 x)" in time
    assert "5_low_precision 4.00 GB (0.50 x)" in memory
    assert "2_grad_accum 92.00 ± 1.00 % (90.15 to 93.53)" in accuracy
    for light, dark in charts.values():
        assert "#1b2230" in light
        assert "#e8ecf3" in dark
    assert "&lt;b&gt;trade&lt;/b&gt;" in text
    assert "<td>750</td>" in text  # the sum of three seeds
    assert "<td>84.7%</td>" in text
    assert "Macro-F1 87.65 %" in text
    assert re.search(r"<th>epochs</th>\s*<td>3</td>\s*<td>3</td>\s*<td>1</td>", text)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 500)])
def test_the_page_in_a_browser(page, tmp_path, scheme, width):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    picture = tmp_path / "page.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},2000", f"--screenshot={picture}"]
    options.append(f"--blink-settings=preferredColorScheme={int(scheme == 'light')}")
    subprocess.run([browser, *options, page.as_uri()], capture_output=True, timeout=120, check=True)
    image = pytest.importorskip("PIL.Image").open(picture).convert("RGB")
    assert image.size == (width, 2000)
    red, _, _ = image.getpixel((2, 2))
    assert red < 60 if scheme == "dark" else red > 200
    assert len(image.getcolors(2**24)) > 50  # the charts are drawn
