"""Training steps on random images, from `python -m scripts.benchmark step` without `--sizes` and `--data-workers`."""

import math
from collections.abc import Sequence

from scripts.figures.tables import (
    NEW_LINE,
    Cells,
    Content,
    Kind,
    ResultsFile,
    Section,
    format_gib,
    format_times,
    format_words,
    rows_with,
)

COCO_IMAGES = 118_287
PUBLISHED_EPOCHS = 50
FRONT_WORDS = ("model=", "precision=")
"""What tells one step of the table in front from another."""
FAST_WORDS = ("cuda_graphs=", "compile=")
"""Of what makes ours fast, what is off by default and said there too."""
CODE = {"official": "official code", "hf": "transformers", "hf with msda_op": "transformers with msda_op"}
"""Code as `parity.step_peer` names it, and as a person does."""
STEP_SECTION = Section(
    "A training step",
    "Forward, loss, backward and update on random images that lie on the GPU; largest batches by trying, or about, "
    f"extrapolated from two. `{PUBLISHED_EPOCHS} epochs`: of the {COCO_IMAGES:,} training images of COCO at this rate, "
    "if the loader keeps up.",
    ("code", "settings", "batch", "ms", "images/s", "peak memory, largest batch", f"{PUBLISHED_EPOCHS} epochs"),
)
SWITCHES_SECTION = Section(
    "What makes a training step fast",
    "The step with these settings, and with what makes it fast turned off, one by one and then together; in brackets "
    "how many times the first. Kernels: the milliseconds that they take, to which a crowded host adds nothing.",
    ("settings", "batch", "ms", "ms without"),
)


def make_rows(content: Content) -> list[Cells]:
    """Returns a row a training step, but for those with something turned off."""
    return [_step_cells(row) for _, row, without in _with_switches(content) if not without]


def make_switch_rows(content: Content) -> list[Cells]:
    """Returns a row a batch whose steps were timed with something turned off, too."""
    batches: dict[str, tuple[Content, list[str]]] = {}
    for base, row, without in _with_switches(content):
        if without:
            ratio = f" ({_step_ms(row) / _step_ms(base):.2f} x)"
            times = f"{format_words(without)} {_format_ms(row, ratio)}"
            batches.setdefault(_format_batch(row), (base, []))[1].append(times)
    return [
        (format_words(base["overrides"]), batch, _format_ms(base), NEW_LINE.join(times))
        for batch, (base, times) in batches.items()
    ]


def make_front(files: Sequence[ResultsFile]) -> list[Cells]:
    """Returns a row for the first step of each file, if beside other code or if no file has it beside other code."""
    beside: list[Cells] = []
    alone: dict[Cells, list[Cells]] = {}
    compared: set[Cells] = set()
    for file in files:
        ours, *rest = rows_with(file.content, "step_ms")
        others = [row for row in rest if row["who"] != ours["who"] and _format_batch(row) == _format_batch(ours)]
        name = tuple(word for word in ours["overrides"] if word.startswith(FRONT_WORDS))
        rows = file.sign([_front_cells(ours, others)])
        if others:
            beside += rows
            compared.add(name)
        else:
            alone.setdefault(name, rows)
    return [*beside, *(cells for name, rows in alone.items() if name not in compared for cells in rows)]


def _with_switches(content: Content) -> list[tuple[Content, Content, list[str]]]:
    """Steps: the first one of its code and batch, the step, and the words in which it only turns off what that one has.

    Such words follow those of the first step; a step with others behind them is one of its own.
    """
    first: dict[tuple[str, str], Content] = {}
    found = []
    for row in rows_with(content, "step_ms"):
        base = first.setdefault((row["who"], _format_batch(row)), row)
        kept = len(base["overrides"])
        more = row["overrides"][kept:] if row["overrides"][:kept] == base["overrides"] else []
        found.append((base, row, more if all(word.endswith("=false") for word in more) else []))
    return found


def _format_ms(row: Content, behind: str = "") -> str:
    kernels = f", kernels {row['busy_ms']:.1f}" if "busy_ms" in row else ""
    return f"{_step_ms(row):.1f}{behind}{kernels}"


def _step_cells(row: Content) -> Cells:
    largest = {card: f"about {batch}" for card, batch in row.get("largest_batch", {}).items()}
    largest |= {card: str(batch) for card, batch in row.get("largest_batch_found", {}).items()}
    found = [f"{batch} in {card} GiB" for card, batch in largest.items()]
    return (
        _name_code(row),
        format_words(row["overrides"]),
        _format_batch(row),
        f"{_step_ms(row):.0f}",
        f"{row['images_per_s']:.1f}",
        ", ".join(filter(None, (_format_peak(row), *found))),
        f"{PUBLISHED_EPOCHS * COCO_IMAGES / row['images_per_s'] / 3600:.0f} h",
    )


def _front_cells(ours: Content, others: Sequence[Content]) -> Cells:
    words = [word for word in ours["overrides"] if word.startswith(FRONT_WORDS + FAST_WORDS)]
    times = [
        f"{_name_code(row)} {_format_result(row)} ({format_times(_step_ms(row), _step_ms(ours))})" for row in others
    ]
    return f"a training step, {format_words(words)}, {_format_batch(ours)}", _format_result(ours), NEW_LINE.join(times)


def _name_code(row: Content) -> str:
    who: str = row["who"]
    return CODE.get(who, who)


def _step_ms(row: Content) -> float:
    return float(row["step_ms"]["median"])


def _format_batch(row: Content) -> str:
    height, width = row["size_hw"]
    return f"{row['batch']} of {height} x {width}"


def _format_result(row: Content) -> str:
    memory = _format_peak(row)
    return f"{_step_ms(row):.0f} ms{f' and {memory}' if memory else ''}"


def _format_peak(row: Content) -> str:
    return format_gib(row.get("peak_gib", math.nan))


STEP = Kind(STEP_SECTION, make_rows, make_front)
STEP_SWITCHES = Kind(SWITCHES_SECTION, make_switch_rows)
