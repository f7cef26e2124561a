"""Rows of steps on real data and on many sizes."""

import torch

from parity.step_benchmark import StepCase, SyntheticStep
from parity.step_streams import format_stream, measure_sizes
from scripts.figures.streams import MANY_SIZES, REAL_DATA
from scripts.figures.tables import ResultsFile

MODEL = ("model=deformable_detr_tiny", "backbone=resnet18", "op=reference", "compile=false")
SCALES = ("data.train_transform.scales=[64,80,96]", "data.train_transform.max_size=128", "data.size_divisor=32")
DATA = {"who": "triton-detr", "overrides": ["model=dino_4scale", "data=coco", "data.root=coco"], "batch": 2}
DATA |= {"num_workers": 6, "steps": 100, "padded_sizes": 7, "recompilations": 0, "captures": 0, "eager_passes": 0}
DATA |= {"loader_images_per_s": 95.12, "device_images_per_s": 100.0, "share": 0.9512}


def test_a_row_of_many_sizes_as_the_benchmark_measures_it():
    case = StepCase((*MODEL, *SCALES), 1, 8, 8, 2)
    row = measure_sizes(SyntheticStep(case, torch.device("cpu")), case, 2, 1, 2, progress=lambda line: None)
    ((settings, batch, *_, times, events),) = MANY_SIZES.rows({"rows": [row]})
    assert settings == f"`{' '.join((*MODEL, *SCALES))}`"
    assert batch == f"1 of 2 sizes, padded to {row['padded_sizes']}"
    assert times == f"{row['times_fixed']:.2f} x"
    assert events in format_stream(row)
    assert REAL_DATA.rows({"rows": [row]}) == []


def test_the_first_row_of_real_data_stands_in_front():
    content = {"rows": [DATA, DATA | {"num_workers": 12}]}
    assert [cells[2] for cells in REAL_DATA.rows(content)] == ["95.1, 6 workers", "95.1, 12 workers"]
    assert all(cells[-1] in format_stream(DATA) for cells in REAL_DATA.rows(content))
    ((what, ours, beside, *_),) = REAL_DATA.front([ResultsFile(content, "data.json")])
    assert what == "training on real data, `model=dino_4scale`, batch 2, 6 loader workers"
    assert ours == "95.1 images/s, 95.1 % of that beside"
    assert beside == "the same batches in GPU memory 100.0 images/s"
    assert MANY_SIZES.rows(content) == []
