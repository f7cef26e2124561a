"""Calls of the op, from `python -m scripts.benchmark op`."""

from collections.abc import Sequence

from scripts.figures.tables import NEW_LINE, Cells, Content, Kind, ResultsFile, Section, format_times, rows_with

OURS, FUSED, COMPOSED = "msda_op triton", "msda_op triton, fused", "softmax + locations + msda_op triton"
"""Implementations as `parity.peers` names them: ours, and the two that take raw offsets and logits."""
FRONT_OTHERS = {"original CUDA op": "original CUDA op", "msda_op reference": "PyTorch `grid_sample`"}
FRONT_CALL = ("encoder", "bf16")
"""Preset and dtype of what the table in front has."""
SECTION = Section(
    "One call of the op",
    "GPU time of forward + backward in ms, and how many times ours the sum is. Levels are those of an 800 x 1333 image "
    "(`large`: 1333 x 2000); an `encoder` has a query for each of their 22,223 pixels, a `decoder` 300 queries, `dino` "
    "1,100. `msda_op reference` is `grid_sample` in PyTorch. Refused: errors against float64 are beyond the bounds of "
    "`parity/tolerances.py`, so that nothing was timed.",
    ("call", "ours", "others"),
)


def make_rows(content: Content) -> list[Cells]:
    """Returns a row a workload and boundary of the op: ours, which was measured first, and every other one."""
    calls: dict[str, dict[str, Content]] = {}
    for row in _op_rows(content):
        fused = row["implementation"] in (FUSED, COMPOSED)
        call = f"{row['preset']}, batch {row['batch']}, {row['dtype']}{', from offsets and logits' if fused else ''}"
        calls.setdefault(call, {}).setdefault(row["implementation"], row)
    cells: list[Cells] = []
    for call, found in calls.items():
        ours = found.get(OURS) or found.get(FUSED)
        if ours is None or ours["status"] != "timed":
            continue
        others = [_describe_peer(row, _total_ms(ours)) for row in found.values() if row is not ours]
        cells.append((call, _format_passes(ours), "; ".join(others)))
    return cells


def make_front(files: Sequence[ResultsFile]) -> list[Cells]:
    """Returns a row for the sum of both passes of `FRONT_CALL`, in the first batch of each file."""
    return [cells for file in files for cells in file.sign(_front_rows(file.content))]


def _front_rows(content: Content) -> list[Cells]:
    calls = [row for row in _op_rows(content) if (row["preset"], row["dtype"]) == FRONT_CALL]
    calls = [row for row in calls if row["batch"] == calls[0]["batch"]]
    times = {row["implementation"]: _total_ms(row) for row in calls[::-1] if row["status"] == "timed"}
    if OURS not in times:
        return []
    others = [
        f"{told} {times[name]:.2f} ms ({format_times(times[name], times[OURS])})"
        for name, told in FRONT_OTHERS.items()
        if name in times
    ]
    what = f"the op, {', '.join(FRONT_CALL)}, batch {calls[0]['batch']}, forward and backward"
    return [(what, f"{times[OURS]:.2f} ms", NEW_LINE.join(others))]


def _op_rows(content: Content) -> list[Content]:
    """Rows of implementations, timed or not; none in a file where none was timed."""
    return rows_with(content, "implementation") if rows_with(content, "forward_device_ms_median") else []


def _describe_peer(row: Content, ours_ms: float) -> str:
    """Name, times and their ratio to ours, or why there is none."""
    name = row["implementation"].replace(f"{OURS}, ", "ours, ")
    if row["status"] != "timed":
        return f"{name} {row['status']}"
    return f"{name} {_format_passes(row)} ({format_times(_total_ms(row), ours_ms)})"


def _total_ms(row: Content) -> float:
    return float(row["forward_device_ms_median"] + row["backward_device_ms_median"])


def _format_passes(row: Content) -> str:
    return f"{row['forward_device_ms_median']:#.3g} + {row['backward_device_ms_median']:#.3g}"


OP = Kind(SECTION, make_rows, make_front)
