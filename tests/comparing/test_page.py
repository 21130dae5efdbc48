"""The content of the page, which loads nothing from outside."""

import re
from base64 import b64decode

import pytest
from scipy.stats import binomtest
from support.recorded_runs import BLOG, compare, record, write_run

from fabric_ladder.comparing.page import to_html
from fabric_ladder.comparing.sources import read_sources
from fabric_ladder.runs.intervals import wilson_interval


def test_wilsons_interval():
    for hits, n in ((0, 10), (8737, 10000), (33, 33)):
        expected = binomtest(hits, n).proportion_ci(0.95, "wilson")
        assert wilson_interval(hits / n, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_charts_of_runs_with_few_figures(tmp_path):
    (tmp_path / "log.txt").write_text("# $\\frac{ & _x\n" + (BLOG / "compile.txt").read_text())
    comparison = compare(read_sources([str(tmp_path / "log.txt")]))
    page = to_html(comparison)
    assert page.count("<img") == 2  # time and accuracy
    assert "Training loss" not in page
    assert "Peak memory" not in page


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Make a page with every part: seeds, differences, epochs, classes and unusual names."""
    root = tmp_path_factory.mktemp("page")
    classes = {"names": ["sport", "<b>trade</b>", "art"], "confusion": [[300, 20, 13], [15, 250, 30], [5, 40, 327]]}
    classes |= {"accuracy": [0.9, 0.85, 0.88], "macro_f1": 0.8765}
    for seed in (1, 2, 3):
        content = record(seed=seed, minutes=40, accuracy=0.90 + 0.01 * seed, epochs=3)
        content["results"]["classes"] = classes
        write_run(root, content, seed, epochs=3)
        content = record("3_torch_compile", seed=seed, minutes=30 + seed, accuracy=0.925, compile=True, epochs=3)
        write_run(root, content, seed, epochs=3)
    write_run(root, record("5_low_precision", minutes=20, memory=4e9, precision="bf16-true", seed=1))
    log = root / "log.txt"
    log.write_text("# <script>alert(1)</script>&'\"\n" + (BLOG / "compile.txt").read_text())
    comparison = compare(read_sources([str(root), str(log)]))
    page = to_html(comparison)
    assert page == to_html(comparison), "the same runs give the same page"
    return page


def test_the_page_loads_nothing_and_runs_nothing(page):
    assert not re.search(r"https?:|@import|url\(", page)
    assert all(link.startswith("data:") for link in re.findall(r"""(?:src|href|srcset)=["']?([^"'> ]*)""", page))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert len(page) < 1_000_000


def test_the_content_of_the_page(page):
    warning = re.search('<p class="warning">(.*?)</p>', page)[1]
    assert "epochs 3 / 1" in warning
    assert "40.00 ± 0.00 min" in page
    assert "92.50 ± 0.00 % (+0.50 ≈)" in page  # the spread of 2_grad_accum is 1.00
    found = re.findall(r'<img src="data:image/svg\+xml;base64,(.*?)" alt="(.*?)">', page)
    charts = {title: b64decode(content).decode() for content, title in found}
    loss, validation, accuracy, memory, time = charts.values()
    assert all("epochs 3 / 1" in chart for chart in charts.values())
    assert all("3_torch_compile" in chart for chart in (loss, validation))
    assert all("mean of the seeds, band: their range" in chart for chart in (loss, validation))
    assert ">32.00 ± 1.00 min (0.80 x)<" in time
    assert ">4.00 GB (0.50 x)<" in memory
    assert ">92.00 ± 1.00 %, 90.15 to 93.53<" in accuracy
    assert "&lt;b&gt;trade&lt;/b&gt;" in page
    assert "<td>750</td>" in page  # the sum of three seeds
    assert "<td>84.7%</td>" in page
    assert "Macro-F1 87.65 %" in page
    assert re.search(r"<th>epochs</th>\s*<td>3</td>\s*<td>3</td>\s*<td>1</td>", page)


def test_the_page_begins_with_what_was_read(tmp_path):
    content = record()
    content["data"]["read"] = ["tickets.csv: 400 rows · text 'body', label 'topic' · a<b 210, login 190"]
    page = to_html(compare(read_sources([write_run(tmp_path, content)])))
    line = "tickets.csv: 400 rows · text &#x27;body&#x27;, label &#x27;topic&#x27; · a&lt;b 210, login 190"
    assert 0 < page.index(line) < page.index("<table")


def test_the_page_names_what_all_runs_share_and_draws_no_curve_of_one_validation(tmp_path):
    for number, name in enumerate(("2_grad_accum", "4_mixed_precision")):
        content = record(name, model="runs/2_grad_accum/7/model", dataset="/home/me/tickets.csv")
        content |= {"begun": f"2026-11-{27 + number}T10:00:00+0000"}
        write_run(tmp_path, content)
    page = to_html(compare(read_sources([str(tmp_path)])))
    title = "tickets.csv · runs/2_grad_accum/7/model: 2_grad_accum against 4_mixed_precision"
    assert f"<title>{title}</title>" in page
    for name, value in {
        "data set": "tickets.csv",
        "samples": "100 training samples, 1,000 test samples",
        "device": "cuda: NVIDIA A100",
        "versions": "Python 3.11.7, torch 2.13.0, transformers 5.23.0",
        "date": "2026-11-27 / 2026-11-28",
    }.items():
        assert re.search(rf"<th>{name}</th>\s*<td>{value}</td>", page), name
    assert "Training loss" in page
    assert "Validation accuracy" not in page
