"""Whole detectors, from `python -m scripts.benchmark inference`."""

from collections.abc import Sequence

from scripts.figures.tables import NEW_LINE, Cells, Content, Kind, ResultsFile, Section, format_times, rows_with

EAGER, GRAPH = "eager", "graph"
FrontTimes = dict[str, tuple[float, float]]
"""Milliseconds as a graph and eagerly, by detector."""

SECTION = Section(
    "Inference",
    "From uint8 images on the GPU to boxes, median wall time of a call in ms.",
    ("detector", "batch", "time"),
)


def make_rows(content: Content) -> list[Cells]:
    """Returns a row a detector and batch: every form that was timed."""
    calls: dict[tuple[str, str], list[str]] = {}
    for row in rows_with(content, "contender"):
        call = (f"{row['model']}, {row['precision']}", _format_batch(row))
        time = f"{row['wall_ms_p50']:.1f}" if row["status"] == "timed" else row["status"]
        calls.setdefault(call, []).append(f"{row['contender']} {time}")
    return [(*call, ", ".join(times)) for call, times in calls.items()]


def make_front(files: Sequence[ResultsFile]) -> list[Cells]:
    """Returns a row for each precision and batch that is the first of a file: its detectors as graphs and eagerly.

    Of several such files it is the one with the most detectors.
    """
    calls: dict[str, list[tuple[ResultsFile, FrontTimes]]] = {}
    for file in files:
        call, times = _front_times(file.content)
        if times:
            calls.setdefault(call, []).append((file, times))
    fullest = {call: max(found, key=lambda each: len(each[1])) for call, found in calls.items()}
    return [cells for call, (file, times) in fullest.items() for cells in file.sign([_front_cells(call, times)])]


def _front_times(content: Content) -> tuple[str, FrontTimes]:
    """Returns the first precision and batch, and the detectors that were timed both ways in it."""
    rows = rows_with(content, "contender")
    call = f"{rows[0]['precision']}, {_format_batch(rows[0])}"
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["status"] == "timed" and f"{row['precision']}, {_format_batch(row)}" == call:
            times.setdefault(row["model"], {})[row["contender"]] = row["wall_ms_p50"]
    return call, {
        model: (forms[GRAPH], forms[EAGER]) for model, forms in times.items() if forms.keys() >= {GRAPH, EAGER}
    }


def _front_cells(call: str, times: FrontTimes) -> Cells:
    graphs = NEW_LINE.join(f"{model} {graph:.1f} ms" for model, (graph, _) in times.items())
    eager = NEW_LINE.join(f"eager {eager:.1f} ms ({format_times(eager, graph)})" for graph, eager in times.values())
    return f"inference as a CUDA graph, {call}", graphs, eager


def _format_batch(row: Content) -> str:
    height, width = row["size_hw"]
    return f"{row['batch_size']} of {height} x {width}"


INFERENCE = Kind(SECTION, make_rows, make_front)
