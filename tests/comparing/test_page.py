"""The page and the pictures: what they show, and that everybody can read them."""

import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest
from support.recorded_runs import BLOG, compare, record, write_run

from fabric_ladder.comparing.charts import find_curves, smooth, to_png
from fabric_ladder.comparing.matching import wilson_interval
from fabric_ladder.comparing.page import to_html
from fabric_ladder.comparing.sources import read_sources


@pytest.mark.parametrize(("hits", "n"), [(0, 10), (5, 10), (10, 10), (8737, 10000), (1, 1)])
def test_wilsons_interval(hits, n):
    expected = binomtest(hits, n).proportion_ci(0.95, "wilson")
    assert wilson_interval(hits / n, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_smoothing():
    assert smooth([1, 2, 3], [5.0, 5.0, 5.0], 2) == pytest.approx([5, 5, 5])
    assert smooth([0, 10], [0.0, 3.0], 10) == pytest.approx([0, 2])  # the older weighs half
    assert smooth([0, 10], [1.0, 3.0], 0) == [1, 3]


def test_a_long_run_s_chart_is_small_keeps_its_peak_and_is_the_same_each_time(tmp_path):
    folder = Path(write_run(tmp_path, record()))
    rng = random.Random(0)
    rows = [
        f"1,5e-5,{9.0 if step == 5000 else rng.uniform(0.4, 0.6)},{step},{step},{step}" for step in range(1, 10_000)
    ]
    (folder / "metrics.csv").write_text("\n".join(["epoch,learning_rate,loss,samples,seconds,step", *rows]) + "\n")
    comparison = compare(read_sources([str(folder)]))
    page = to_html(comparison)
    assert len(page) < 400_000
    assert page == to_html(comparison)
    raw = re.search(r'id="thin-loss-0">\s*<path d="([^"]*)"', page).group(1)
    heights = [float(height) for height in re.findall(r"[ML] \S+ (\S+)", raw)]
    assert len(heights) < 3000
    middle = sorted(heights)[len(heights) // 2]
    assert min(heights) < middle - 100  # of about 190 that the chart is high


def test_pictures_of_runs_with_hardly_any_figures(tmp_path):
    (tmp_path / "log.txt").write_text("# $\\frac{ & _x\n" + (BLOG / "compile.txt").read_text())
    comparison = compare(read_sources([str(tmp_path / "log.txt")]))
    assert to_png(comparison).keys() == {"time.png", "accuracy.png"}
    page = to_html(comparison)
    assert "Training loss" not in page
    assert "Peak memory" not in page


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page with every part: seeds, differences, epochs, classes, odd names."""
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


def test_the_page_asks_no_host_for_anything(page):
    text = page.read_text()
    assert not re.search(r"https?:(?!//www.w3.org/2000/svg)|(?<!:)//\w|@import|url\((?!data:|#)", text)
    links = set(re.findall(r"""(?:src|href)=["']?([^"'> ]*)""", text))
    assert {link for link in links if not link.startswith("#")} == {"data:,"}
    assert text.count("<script") == 1  # its own
    assert "&lt;script&gt;alert(1)" in text
    assert len(text) < 400_000


def test_what_the_page_shows(page):
    text = page.read_text()
    tables, captions = text.count("<table"), text.count("<caption>")
    assert tables == captions == 4
    charts = re.findall(r'<svg class="(\w+)" role="img" aria-label="([^"]+)"', text)
    curves = ["loss", "loss_log", "loss_minutes", "loss_log_minutes", "validation", "validation_minutes"]
    assert [name for name, _ in charts] == [*curves, "time", "memory", "accuracy"]
    told = dict(charts)
    assert "2_grad_accum ends at 0.2" in told["loss"]
    assert told["loss_minutes"].startswith("Thick lines of training loss against minutes, linear scale: ")
    assert "3_torch_compile ends at 90;" in told["validation"]
    assert "5_low_precision ends at 70." in told["validation_minutes"]
    assert "3_torch_compile 32.00 ± 1.00 min (0.80 x)" in told["time"]
    assert "5_low_precision 4.00 GB (0.50 x)" in told["memory"]
    assert "2_grad_accum 92.00 ± 1.00 % (90.15 to 93.53)" in told["accuracy"]
    assert len(re.findall(r'(?<= id=")[^"]+', text)) == len(set(re.findall(r'(?<= id=")[^"]+', text)))
    assert re.findall(r"<h(\d)", text) == ["1", *"2" * (text.count("<h2"))]
    assert '<span class="against">+0.50 ≈</span>' in text  # the spread of 2_grad_accum is 1.00
    assert "sum of seeds 1, 2, 3 (n = 3). Macro-F1 87.65 %." in text
    assert '<th scope="row">&lt;b&gt;trade&lt;/<wbr>b&gt;</th>' in text
    assert '<span class="share" style="--share:38%">750</span>' in text  # 45 % of the colour x 250 / 295
    assert "<td>84.7%</td>" in text


HARNESS = """<body style="margin:0">
<iframe id="f" src="report.html" style="border:0;width:{width}px;height:900px"></iframe>
<script>addEventListener("load", () => {{
  const page = f.contentDocument, view = f.contentWindow, root = page.documentElement, out = {{}};
  const shown = name => page.querySelector("svg." + name).getClientRects().length > 0;
  const widths = name => [...page.querySelectorAll(`g[id^="${{name}}-"]`)].map(x => x.getBoundingClientRect().width);
  out.overflow = root.scrollWidth - root.clientWidth;
  out.background = view.getComputedStyle(page.body).backgroundColor;
  const names = ["loss", "loss_log", "loss_minutes", "loss_log_minutes", "validation", "validation_minutes"];
  const choose = value => page.querySelectorAll(`[value=${{value}}]`).forEach(button => button.click());
  out.charts = [names.filter(shown)];
  out.lines = widths("loss");
  const svg = page.querySelector("svg.loss"), edge = svg.getBoundingClientRect();
  const values = page.getElementById("values");
  const at = {{ bubbles: true, clientX: edge.left + edge.width / 4, clientY: edge.top + edge.height / 2 }};
  svg.dispatchEvent(new view.PointerEvent("pointermove", at));
  out.told = [...values.children].map(line => line.textContent);
  out.box = values.getBoundingClientRect().right <= root.clientWidth;
  svg.dispatchEvent(new view.PointerEvent("pointerleave"));
  out.gone = values.hidden;
  choose("logarithmic"); choose("minutes");
  out.charts.push(names.filter(shown));
  out.bars = [...widths("time"), ...widths("memory")];
  out.intervals = widths("interval");
  out.ink = view.getComputedStyle(page.querySelector("svg.accuracy text")).fill;
  out.cut = [...page.querySelectorAll("h1, h2, .runs td, .time svg text, .peak-memory svg text")].filter(
    x => x.getClientRects().length && x.getBoundingClientRect().right > root.clientWidth + 1).length;
  out.requests = view.performance.getEntriesByType("resource").length;
  const place = document.createElement("pre");
  place.textContent = JSON.stringify(out);
  document.body.replaceChildren(place);
}})</script>"""


def chromium(tmp_path, *options):
    """Run headless Chromium, without any network where the system allows it; return its stdout and messages."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    alone = ["unshare", "-n"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        alone = []
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
    quiet += ("--disable-background-networking", "--disable-component-update", "--hide-scrollbars")
    quiet += ("--enable-logging=stderr", "--allow-file-access-from-files")
    profile = tmp_path / f"profile{len(list(tmp_path.iterdir()))}"
    command = [*alone, browser, *quiet, f"--user-data-dir={profile}", *options]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    shutil.rmtree(profile, ignore_errors=True)
    return process.stdout, process.stderr


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_in_a_browser(page, tmp_path, scheme, width):
    (page.parent / "harness.html").write_text(HARNESS.format(width=width))
    look = f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"
    size = f"--window-size={max(width, 500)},1000"
    printed, messages = chromium(tmp_path, look, size, "--dump-dom", (page.parent / "harness.html").as_uri())
    assert "CONSOLE" not in messages
    seen = json.loads(re.search(r"<pre>(.*?)</pre>", printed).group(1))
    assert (seen["overflow"], seen["requests"], seen["cut"]) == (0, 0, 0)
    assert seen["charts"] == [["loss", "validation"], ["loss_log_minutes", "validation_minutes"]]
    x = int(re.fullmatch(r"(\d+) samples seen", seen["told"][0]).group(1))
    curves, _ = find_curves(compare(read_sources([str(page.parent)])).rows, "losses", "samples")
    for line, curve in zip(seen["told"][1:], curves, strict=True):
        assert float(line.split(" ")[0]) == pytest.approx(np.interp(x, curve.x, curve.thick), abs=0.01)
    assert [line.split(" ")[1] for line in seen["told"][1:]] == ["2_grad_accum"] * 3 + ["3_torch_compile"] * 3 + [
        "5_low_precision"
    ]
    assert (seen["box"], seen["gone"]) == (True, True)
    assert len(seen["lines"]) == 7
    assert min(seen["lines"]) > 150
    assert len(seen["bars"]) == 7  # the blog's run has a time and no memory
    assert min(seen["bars"]) > 10
    assert len(seen["intervals"]) == 3
    red = int(re.match(r"rgb\((\d+)", seen["background"]).group(1))
    assert red < 60 if scheme == "dark" else red > 200
    ink = int(re.match(r"rgb\((\d+)", seen["ink"]).group(1))
    assert ink > 150 if scheme == "dark" else ink < 120
    picture = tmp_path / f"{scheme}_{width}.png"
    narrow = page.parent / "narrow.html"  # a window is never narrower than 500 pixels
    narrow.write_text(
        f'<body style="margin:0"><iframe src="report.html" style="border:0;width:{width}px;height:3600px">'
    )
    target = page if width > 500 else narrow
    chromium(tmp_path, look, f"--window-size={width},{2400 if width > 500 else 3600}", f"--screenshot={picture}",
             target.as_uri())  # fmt: skip
    assert picture.stat().st_size > 50_000


def test_the_page_on_paper(page, tmp_path):
    chromium(tmp_path, f"--print-to-pdf={tmp_path / 'report.pdf'}", page.as_uri())
    content = (tmp_path / "report.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 4


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_accessibility_checker_finds_nothing(page, tmp_path, scheme):
    checker = os.environ.get("FABRIC_LADDER_AXE")
    if not checker:
        pytest.skip("needs axe-core: set FABRIC_LADDER_AXE to its axe.min.js (npm install axe-core)")
    text = re.sub("<meta http-equiv.*", "", page.read_text()).replace("<details>", "<details open>")
    run = """axe.run().then(found => {
        const within = node => !node.html.startsWith("<text"); // of these in a picture axe-core cannot tell the colours
        const open = found.incomplete.map(each => ({...each, nodes: each.nodes.filter(within)}));
        const problems = [...found.violations, ...open.filter(each => each.nodes.length)];
        document.body.textContent = JSON.stringify(problems.map(each => [each.id, each.nodes])) + found.passes.length;
    })"""
    checked = tmp_path / "checked.html"
    checked.write_text(text + f'<script src="{Path(checker).resolve().as_uri()}"></script><script>{run}</script>')
    look = f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"
    printed, _ = chromium(tmp_path, look, "--virtual-time-budget=60000", "--dump-dom", checked.as_uri())
    problems, passed = re.search(r"<body>(.*\])(\d+)</body>", printed, re.DOTALL).groups()
    assert problems == "[]"
    assert int(passed) > 20
