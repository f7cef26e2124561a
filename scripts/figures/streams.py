"""Training steps on batches that change, from `python -m scripts.benchmark step` with `--sizes` or `--data-workers`."""

from collections.abc import Sequence

from scripts.figures.steps import FAST_WORDS, FRONT_WORDS
from scripts.figures.tables import Cells, Content, Kind, ResultsFile, Section, format_words, rows_with

EVENTS = ("recompilations", "captures", "eager_passes")
DATA_SECTION = Section(
    "Training steps on real data",
    "Images per second of training from the full loader, and on the same batches when they lie in GPU memory. "
    "Meanwhile: what torch.compile compiled again, captures of CUDA graphs, and passes without one, on sizes that had "
    "all been trained on before.",
    ("settings", "batch", "from the loader", "from GPU memory", "share", "meanwhile"),
)
SIZES_SECTION = Section(
    "Training steps on many sizes",
    "Each of the sizes of multi-scale training is met several times, in random order; beside them one size of their "
    "median area. Median times of a step in ms. A size that is new costs a capture.",
    ("settings", "batch", "ms", "ms when first met", "ms of one size", "times", "meanwhile"),
)


def make_data_rows(content: Content) -> list[Cells]:
    """Returns a row a number of workers and batch."""
    return [
        (
            format_words(row["overrides"]),
            f"{row['batch']} of {row['padded_sizes']} padded sizes",
            f"{row['loader_images_per_s']:.1f}, {row['num_workers']} workers",
            f"{row['device_images_per_s']:.1f}",
            f"{100 * row['share']:.1f} %",
            _format_events(row),
        )
        for row in rows_with(content, "loader_images_per_s")
    ]


def make_size_rows(content: Content) -> list[Cells]:
    """Returns a row a batch."""
    return [_size_cells(row) for row in rows_with(content, "sizes_ms")]


def make_data_front(files: Sequence[ResultsFile]) -> list[Cells]:
    """Returns a row for the first measurement of each file."""
    return [cells for file in files for cells in file.sign([_front_cells(file.content)])]


def _size_cells(row: Content) -> Cells:
    first = row["first_round_ms"]
    height, width = row["fixed_size_hw"]
    return (
        format_words(row["overrides"]),
        f"{row['batch']} of {row['sizes']} sizes, padded to {row['padded_sizes']}",
        f"{row['sizes_ms']['median']:.1f}",
        f"{first['median']:.0f}, at most {first['largest']:.0f}",
        f"{row['fixed_ms']['median']:.1f}, {height} x {width}",
        f"{row['times_fixed']:.2f} x",
        _format_events(row),
    )


def _front_cells(content: Content) -> Cells:
    row = rows_with(content, "loader_images_per_s")[0]
    words = [word for word in row["overrides"] if word.startswith(FRONT_WORDS + FAST_WORDS)]
    what = f"training on real data, {format_words(words)}, batch {row['batch']}, {row['num_workers']} loader workers"
    beside = f"the same batches in GPU memory {row['device_images_per_s']:.1f} images/s"
    return what, f"{row['loader_images_per_s']:.1f} images/s, {100 * row['share']:.1f} % of that beside", beside


def _format_events(row: Content) -> str:
    return ", ".join(f"{row[kind]} {kind.replace('_', ' ')}" for kind in EVENTS)


REAL_DATA = Kind(DATA_SECTION, make_data_rows, make_data_front)
MANY_SIZES = Kind(SIZES_SECTION, make_size_rows)
