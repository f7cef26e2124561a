"""The report says what the document says, in the order of the page, and the page needs nothing from outside."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from parity.page import Banner, Code, Figure, Heading, Paragraph, Table, render_html, render_markdown
from parity.plots import Series, draw_curves, draw_intervals, draw_stacks
from parity.report import build_report, write_report
from parity.results import Check, LevelResult, Verdict, build_document

MANIFEST = {
    "level": "sensitivity",
    "op": "triton",
    "against": "reference",
    "precision": "32-true",
    "device": "cpu",
    "preset": "quick",
    "config_hash": "abc",
    "image_ids_hash": "def",
    "num_images": {"train": 2},
    "first_seed": 42,
    "environment": {"gpus": [], "packages": {"torch": "2.0"}, "commit": "c0ffee"},
    "settings": {"margin": 0.05, "fault": None},
}
LEVEL = LevelResult(
    "sensitivity",
    "Does it see?",
    (Check("one level dropped", Verdict.FAIL, "seen by <no> level"),),
    {"sizes tried": [1.0]},
    {
        "levels": ["op", "model"],
        "rows": [
            {"fault": "one level dropped", "smallest": {"op": 0.01, "model": None}, "required": ["op", "model"]},
            {"fault": "x", "smallest": {}, "required": []},
        ],
    },
)


class Collector(HTMLParser):
    """Collects tags, and attributes that load something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href") and not value.startswith("data:")]


def points_of(svg: str, tag: str) -> list[list[tuple[float, ...]]]:
    shapes = ElementTree.fromstring(svg).iter(tag)
    return [[tuple(map(float, pair.split(","))) for pair in shape.get("points", "").split()] for shape in shapes]


def test_curves_are_drawn_to_scale_and_gaps_left_out():
    svg = draw_curves([Series("a", [0.0, 1.0, None, 2.0], 0)], "loss", band=([0.0] * 4, [2.0] * 4))
    (line,) = points_of(svg, "polyline")
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    assert line[0][1] - line[1][1] == pytest.approx(line[1][1] - line[2][1], abs=0.2)
    (band,) = points_of(svg, "polygon")
    assert len(band) == 8
    assert {y for _, y in band} == {line[0][1], line[-1][1]}


def test_a_logarithm_has_no_zero():
    (line,) = points_of(draw_curves([Series("a", [0.0, 0.1, 0.01, 0.001], 0)], "difference", log=True), "polyline")
    assert len(line) == 3
    assert line[1][1] - line[0][1] == pytest.approx(line[2][1] - line[1][1], abs=0.2)
    assert draw_curves([Series("a", [0.0, 0.0], 0)], "difference", log=True) == ""


def test_stacks_are_as_wide_as_their_parts():
    root = ElementTree.fromstring(draw_stacks({"A": {"x": 1.0, "y": 3.0}, "B": {"x": 1.0, "y": -1.0}}, "time"))
    widths = [float(bar.get("width")) for bar in root.iter("rect")][:4]
    assert widths[1] == pytest.approx(3 * widths[0], abs=0.2)
    assert widths[3] == 0
    assert "4 ms" in "".join(root.itertext())


def test_intervals_stand_around_their_middle():
    root = ElementTree.fromstring(draw_intervals([("B - A", -1.0, 0.0, 2.0)], [-3.0, 3.0], "difference"))
    line = next(element for element in root.iter("line") if "s0" in element.get("class"))
    dot = float(next(root.iter("circle")).get("cx"))
    left, right = float(line.get("x1")), float(line.get("x2"))
    assert right - dot == pytest.approx(2 * (dot - left), abs=0.5)


def test_verdict_comes_first_and_failures_are_said():
    blocks = build_report(json.loads(json.dumps(build_document([LEVEL], MANIFEST))))
    assert isinstance(blocks[0], Heading)
    assert blocks[1] == Banner("FAIL", "sensitivity failed. triton against reference, 32-true on a CPU, preset quick.")
    table = next(block for block in blocks if isinstance(block, Table) and block.header[0] == "fault")
    assert table.header == ("fault", "op", "model", "must be seen by")
    assert table.rows == [("one level dropped", "0.01", "not seen", "op, model"), ("x", "n/a", "n/a", "")]


def test_the_page_is_whole_and_escaped(tmp_path):
    write_report(build_document([LEVEL], MANIFEST), tmp_path)
    page = (tmp_path / "report.html").read_text()
    collector = Collector()
    collector.feed(page)
    assert collector.loads == []
    assert "script" not in collector.tags
    assert not re.search(r"url\(|@import|https?://", page)
    assert "seen by &lt;no&gt; level" in page
    assert "| one level dropped | FAIL | seen by <no> level |" in (tmp_path / "report.md").read_text()


def test_means_of_ap_are_over_the_roundings_of_an_op():
    aps = {"A": 10.0, "A'": 90.0, "A+1": 20.0, "B": 30.0, "B+1": 50.0}
    metrics = {arm: {"AP": ap, "APl": None if arm == "B" else ap} for arm, ap in aps.items()}
    categories = [{"name": "cell", "num_boxes": 0, **dict.fromkeys(metrics)}]
    data = {"metrics": metrics, "categories": categories, "num_images": 3, "agreement": 99.0}
    level = LevelResult("evaluation", "Same?", (Check("AP", Verdict.PASS, "equal"),), {}, data)
    tables = [block for block in build_report(build_document([level], MANIFEST)) if isinstance(block, Table)]
    metrics_table, categories_table = (table for table in tables if table.header[0] in ("metric", "category"))
    assert metrics_table.rows[0] == ("AP", "10.00", "90.00", "30.00", "15.00", "40.00")
    assert metrics_table.rows[1] == ("APl", "10.00", "90.00", "-", "15.00", "-")
    assert categories_table.rows[0] == ("cell", "0", "-", "-", "-")


def test_every_block_is_rendered():
    figure = Figure("<svg></svg>", "A plot.")
    blocks = [Heading("H", 3), Paragraph("P"), Banner("PASS", "B"), Table(("a",), [("x|y",)]), figure, Code("C", "1")]
    markdown, page = render_markdown(blocks), render_html("title", blocks)
    assert "### H" in markdown
    assert "x\\|y" in markdown
    assert "A plot. See `report.html`" in markdown
    assert "<h3>H</h3>" in page
    assert "<svg></svg><figcaption>A plot.</figcaption>" in page
    assert "<summary>C</summary><pre>1</pre>" in page
