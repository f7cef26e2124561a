"""The report of a run, from its JSON document alone: verdict first, then what a reader needs to believe it."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from parity.page import Banner, Block, Code, Figure, Heading, Paragraph, Table, render_html, render_markdown
from parity.plots import Series, draw_curves, draw_intervals, draw_stacks
from parity.results import check_document, write_json, write_text_atomically

Document = Mapping[str, Any]

_BASE, _OTHER, _CONTROL, _ALLOWED = 0, 1, 2, 3
_PLOTTED = ("loss", "gradient of all")


def write_report(document: Document, folder: Path) -> None:
    """Writes `results.json`, `report.md` and `report.html` into a folder."""
    write_json(folder / "results.json", document)
    # What was written is what is drawn: JSON has no NaN.
    read_back = check_document(json.loads((folder / "results.json").read_text()), "results.json")
    blocks = build_report(read_back)
    title = f"Parity of {read_back['manifest']['op']} with {read_back['manifest']['against']}"
    write_text_atomically(folder / "report.md", render_markdown(blocks))
    write_text_atomically(folder / "report.html", render_html(title, blocks))


def build_report(document: Document) -> list[Block]:
    """Returns the blocks of the report in the order of the page."""
    manifest = document["manifest"]
    levels = {level["level"]: level for level in document["levels"]}
    verdict = document["verdict"]
    blocks: list[Block] = [
        Heading(f"Does {manifest['op']} train like {manifest['against']}?", 1),
        Banner(verdict, _summarize(document)),
        Table(
            ("level", "verdict", "question"),
            [(name, level["verdict"], level["question"]) for name, level in levels.items()],
        ),
    ]
    for name, section in _SECTIONS.items():
        if name in levels:
            level = levels[name]
            blocks += [Heading(_TITLES[name]), Banner(level["verdict"], level["question"])]
            blocks += section(level["data"], manifest)
            blocks += [_checks(level), Paragraph(_margins(level["margins"]))]
    return [*blocks, *_manifest(manifest)]


def _summarize(document: Document) -> str:
    manifest = document["manifest"]
    names = {word: [level["level"] for level in document["levels"] if level["verdict"] == word] for word in _WORDS}
    parts = [f"{', '.join(found)} {_WORDS[word]}" for word, found in names.items() if found]
    where = f"{manifest['precision']} on {', '.join(manifest['environment']['gpus']) or 'a CPU'}"
    fault = manifest["settings"]["fault"]
    broken = "" if fault is None else f" {manifest['op']} was given a fault on purpose: {fault}."
    ops = f"{manifest['op']} against {manifest['against']}"
    return f"{'; '.join(parts)}. {ops}, {where}, preset {manifest['preset']}.{broken}"


_WORDS = {"PASS": "passed", "FAIL": "failed", "INCONCLUSIVE": "proved nothing"}


def _checks(level: Document) -> Table:
    rows = [(check["name"], check["verdict"], check["detail"]) for check in level["checks"]]
    return Table(("check", "verdict", "what was found"), rows)


def _margins(margins: Mapping[str, Any]) -> str:
    return "Declared before the run: " + "; ".join(f"{name}: {value}" for name, value in margins.items()) + "."


def _trajectory(data: Document, manifest: Document) -> list[Block]:
    blocks = _segment(data)
    if "trained" in data:
        blocks += [Heading("From trained weights", 3), *_segment(data["trained"])]
    return blocks


def _segment(data: Document) -> list[Block]:
    base, other = data["base"], data["other"]
    blocks: list[Block] = []
    for comparison in data["comparisons"]:
        name = comparison["name"]
        if name in _PLOTTED:
            blocks += _plot_curve(name, comparison, base, other, data["controls"])
    rows = [
        (arm, "never" if step is None else str(step), ", ".join(f"{100 * share:.1f} %" for share in shares))
        for (arm, step), shares in zip(data["divergence"].items(), data["changed_assignments"].values(), strict=True)
    ]
    blocks.append(Table(("arm", "diverges from A at step", "changed assignments, layer by layer"), rows))
    return blocks


def _plot_curve(
    name: str, comparison: Document, base: Document, other: Document, controls: list[Document]
) -> list[Block]:
    curve = base["curves"][name]
    pair = [Series(base["name"], curve, _BASE), Series(other["name"], other["curves"][name], _OTHER)]
    envelope = _clip_band(curve, comparison["envelope"])
    distances = [
        [_distance(left, right) for left, right in zip(curve, control["curves"][name], strict=False)]
        for control in controls
    ]
    lines = [Series("controls", distance, _CONTROL) for distance in distances]
    lines.append(Series("allowed", comparison["envelope"], _ALLOWED))
    lines.append(Series(f"|A - {other['name']}|", comparison["differences"], _OTHER))
    return [
        Figure(draw_curves(pair, name, band=envelope), f"{name} of each step; the band is the envelope."),
        Figure(
            draw_curves(lines, f"difference of {name}", log=True),
            f"Difference of the {name} from A: the controls' own, what is allowed, and the other op's.",
        ),
    ]


def _ensemble(data: Document, manifest: Document) -> list[Block]:
    test = data["test"]
    blocks: list[Block] = []
    if test["mean"] is not None:
        row = ("B - A", test["low"], test["mean"], test["high"])
        svg = draw_intervals([row], [-test["margin"], 0.0, test["margin"]], "paired difference")
        blocks.append(Figure(svg, "Interval of the paired difference of the outcomes; dashed: the margins and zero."))
    if data["band"]:
        band = data["band"]
        svg = draw_curves(
            [Series("mean of B - A", band["mean"], _OTHER)],
            "difference",
            band=(band["low"], band["high"]),
            band_name="interval",
        )
        blocks.append(Figure(svg, "Difference of the losses over the steps, with its bootstrap band over the seeds."))
    seeded = enumerate(data["outcomes"], manifest["first_seed"])
    rows = [(str(seed), _number(base, 5), _number(other, 5)) for seed, (base, other) in seeded]
    blocks.append(Table(("seed", "outcome of A", "outcome of B"), rows))
    power = ", ".join(f"{pairs} pairs: {100 * share:.0f} %" for pairs, share in data["power"].items())
    blocks.append(
        Paragraph(
            "Power of this test with a margin of one standard deviation of the paired difference and no true "
            f"difference (simulated): {power}."
        )
    )
    return blocks


def _model(data: Document, manifest: Document) -> list[Block]:
    header = ("tensor", "relative difference", "allowed", "cosine", "verdict")

    def rows(items: list[Document]) -> list[tuple[str, ...]]:
        return [
            (
                item["name"],
                _number(item["error"]),
                _number(item["limit"]),
                "-" if item["cosine"] is None else f"{item['cosine']:.9f}",
                "PASS" if item["passed"] else "FAIL",
            )
            for item in items
        ]

    return [
        Heading(f"The {len(data['worst_gradients'])} worst of {data['num_gradients']} gradients", 3),
        Paragraph(
            f"{data['num_rounding_gradients']} gradients are left out here: they are nothing but rounding, and the "
            "controls change them by more than their own size."
        ),
        Table(header, rows(data["worst_gradients"])),
        Heading("Outputs and loss terms", 3),
        Table(header, rows(data["tensors"])),
        Heading("The attention module by itself", 3),
        Table(header, rows(data["module"])),
    ]


def _op(data: Document, manifest: Document) -> list[Block]:
    rows = [
        (
            row["name"],
            row["dtype"],
            row["case"],
            _number(row["max_error"]),
            _number(row["competitor_max_error"]),
            _number(row["max_limit"]),
            f"{100 * row['share_of_limit']:.0f} %",
        )
        for row in data["worst"]
    ]
    header = ("tensor", "dtype", "worst case", "error", "error of the reference", "allowed", "share of the allowed")
    return [
        Paragraph("Largest absolute error against float64, in the case that comes closest to its bound."),
        Table(header, rows),
    ]


def _sensitivity(data: Document, manifest: Document) -> list[Block]:
    levels = data["levels"]
    rows = []
    for row in data["rows"]:
        cells = []
        for level in levels:
            size = row["smallest"].get(level, "n/a")
            cells.append("n/a" if size == "n/a" else "not seen" if size is None else f"{size:g}")
        rows.append((row["fault"], *cells, ", ".join(row["required"])))
    text = (
        "The smallest share of each fault that a level still fails (1 is the whole fault), and the levels that must "
        "fail the whole one. The op level runs in the precision of training, the model level in float32 always."
    )
    return [Paragraph(text), Table(("fault", *levels, "must be seen by"), rows)]


def _evaluation(data: Document, manifest: Document) -> list[Block]:
    sides = {side: [arm for arm in data["metrics"] if arm.partition("+")[0] == side] for side in ("A", "B")}
    arms = ("A", "A'", "B")
    metrics = [
        (
            name,
            *(_points(data["metrics"][arm][name]) for arm in arms),
            *(_mean_points(data["metrics"][arm][name] for arm in side) for side in sides.values()),
        )
        for name in data["metrics"]["A"]
    ]
    categories = [
        (row["name"], str(row["num_boxes"]), *(_points(row[arm]) for arm in arms)) for row in data["categories"]
    ]
    return [
        Paragraph(
            f"COCO metrics in points on {data['num_images']} images, which may be those of the training: the question "
            "is whether both ops find the same, not how well the detector generalises. Means are over "
            f"{len(sides['A'])} and {len(sides['B'])} roundings. Smallest agreement of B's best detections with A's as "
            f"the ground truth: {data['agreement']:.2f} points."
        ),
        Table(("metric", *arms, "A, mean", "B, mean"), metrics),
        Heading("AP by category", 3),
        Table(("category", "boxes", *arms), categories),
    ]


def _speed(data: Document, manifest: Document) -> list[Block]:
    ops = {"A": manifest["against"], "A'": manifest["against"], "B": manifest["op"]}
    stacks = {f"{arm} ({ops[arm]})": phases for arm, phases in data["phases"].items()}
    ratios = [(name, ratio["low"], ratio["ratio"], ratio["high"]) for name, ratio in data["ratios"].items()]
    rows = [
        (
            f"{arm} ({ops[arm]})",
            *(f"{times[name]:.4g}" for name in ("median", "p20", "p80")),
            "-" if data["peak_memory_mib"][arm] is None else f"{data['peak_memory_mib'][arm]:.0f}",
        )
        for arm, times in data["step_ms"].items()
    ]
    phases = list(next(iter(data["phases"].values())))
    split = [(phase, *(f"{data['phases'][arm][phase]:.3g}" for arm in data["phases"])) for phase in phases]
    return [
        Figure(draw_stacks(stacks, "step time by phase"), "Milliseconds of a step by phase (steps timed with stamps)."),
        Figure(draw_intervals(ratios, [1.0], "ratio of step times"), "Ratio of median step times with its interval."),
        Table(("arm", "step ms, median", "p20", "p80", "memory of a step, MiB"), rows),
        Table(("phase, ms", *data["phases"]), split),
        Paragraph(f"GPU before: {data['gpu_before'] or 'none'}; after: {data['gpu_after'] or 'none'}."),
    ]


_TITLES = {
    "trajectory": "Loss curves",
    "ensemble": "Outcomes over seeds",
    "model": "One step of the model",
    "op": "The op by itself",
    "sensitivity": "What each level can see",
    "evaluation": "AP",
    "speed": "Time of a step",
}
_SECTIONS: dict[str, Callable[[Document, Document], list[Block]]] = {
    "trajectory": _trajectory,
    "ensemble": _ensemble,
    "model": _model,
    "op": _op,
    "sensitivity": _sensitivity,
    "evaluation": _evaluation,
    "speed": _speed,
}


def _manifest(manifest: Document) -> list[Block]:
    environment = manifest["environment"]
    shown = (
        "op",
        "against",
        "precision",
        "device",
        "preset",
        "config_hash",
        "image_ids_hash",
        "num_images",
        "first_seed",
    )
    rows = [(name, str(manifest[name])) for name in shown]
    rows += [(name, str(value)) for name, value in environment.items() if name != "packages"]
    rows += [(name, version) for name, version in environment["packages"].items()]
    return [
        Heading("Manifest"),
        Table(("", ""), rows),
        Code("All settings and margins", json.dumps(manifest["settings"], indent=1)),
    ]


def _clip_band(curve: list[float | None], widths: list[float | None]) -> tuple[list[float | None], list[float | None]]:
    """Returns both ends of a band around a curve, no farther from it than the curve's own range."""
    known = [value for value in curve if value is not None]
    reach = max(known, default=0.0) - min(known, default=0.0)
    pairs = list(zip(curve, widths, strict=False))
    low, high = (
        [None if value is None or width is None else value + sign * min(width, reach) for value, width in pairs]
        for sign in (-1, 1)
    )
    return low, high


def _distance(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else abs(first - second)


def _number(value: float | None, digits: int = 3) -> str:
    return "not finite" if value is None else f"{value:.{digits}g}"


def _mean_points(values: Iterable[float | None]) -> str:
    """Mean of the points of several arms, undefined where one is."""
    return _points(fmean(math.nan if value is None else value for value in values))


def _points(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.2f}"
