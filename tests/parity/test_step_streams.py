"""Steps on many sizes, and on the batches of a loader."""

import json
import multiprocessing
from pathlib import Path

import pytest
import torch
from PIL import Image

from models.compilation import Region
from parity.step_benchmark import StepCase, SyntheticStep, TrainingBatch
from parity.step_streams import (
    ROUNDS,
    build_data,
    draw_padded,
    draw_sizes,
    format_stream,
    measure_data,
    measure_sizes,
    pad_size,
    print_aside,
)

WORDS = ("model=deformable_detr_tiny", "backbone=resnet18", "op=reference")
SMALL_SCALES = ("data.train_transform.scales=[64,80,96]", "data.train_transform.max_size=128", "data.size_divisor=32")
CPU = torch.device("cpu")


def test_sizes_are_those_of_multi_scale_training() -> None:
    sizes = draw_sizes([480, 640, 800], 1333, 50)
    assert len(set(sizes)) == 50
    assert sizes == draw_sizes([480, 640, 800], 1333, 50), "the same on every machine"
    assert {min(size) for size in sizes} >= {480, 640}
    assert max(max(size) for size in sizes) <= 1333
    assert 10 < sum(height > width for height, width in sizes) < 40
    assert all(min(height, width) in (480, 640, 800) or max(height, width) > 1330 for height, width in sizes)


def test_progress_does_not_mix_with_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    print_aside("round 1 of 4")
    assert capsys.readouterr() == ("", "round 1 of 4\n")


def test_more_sizes_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="sizes must be at most those that the augmentation makes, got 50 of"):
        draw_sizes([8], 12, 50)


def test_sizes_are_padded_up() -> None:
    assert pad_size((800, 1333), 64) == (832, 1344)
    assert pad_size((800, 1333), 1) == (800, 1333)


def test_padding_is_masked_and_black() -> None:
    images, padding_mask, targets = draw_padded(StepCase((), 2, 1, 1, boxes=3), (5, 7), (8, 8))
    assert images.shape == (2, 3, 8, 8)
    assert (~padding_mask).sum(dim=(1, 2)).tolist() == [35, 35]
    assert not padding_mask[:, :5, :7].any()
    assert images[:, :, 5:].sum() == images[:, :, :, 7:].sum() == 0 < images[:, :, :5, :7].sum()
    assert targets.counts == (3, 3)


def test_a_row_of_many_sizes() -> None:
    case = StepCase((*WORDS, *SMALL_SCALES, "compile=false"), 1, 8, 8, 2)
    step = SyntheticStep(case, CPU)
    seen = []
    take = step.take
    step.take = lambda batch: (seen.append(tuple(batch[0].shape[2:])), take(batch))[1]  # type: ignore[method-assign]
    lines: list[str] = []
    row = measure_sizes(step, case, count=5, warmup=1, repeats=3, progress=lines.append)
    assert json.loads(json.dumps(row)) == row
    assert (row["sizes"], row["size_divisor"], row["batch"], row["boxes"]) == (5, 32, 1, 2)
    assert 1 < row["padded_sizes"] <= 5
    fixed, *stream, last = seen
    assert fixed == last == tuple(row["fixed_size_hw"])
    assert len(stream) == ROUNDS * 5
    areas = sorted(height * width for height, width in stream)
    assert fixed[0] * fixed[1] == areas[len(areas) // 2]
    assert row["times_fixed"] == pytest.approx(row["sizes_ms"]["median"] / row["fixed_ms"]["median"])
    assert row["first_round_ms"]["largest"] <= row["sizes_ms"]["largest"]
    assert (row["recompilations"], row["captures"], row["eager_passes"]) == (0, 0, 0)
    assert "5 sizes" in format_stream(row)
    assert "0 recompilations, 0 captures, 0 eager passes" in format_stream(row)
    assert sum(line.startswith("padded size ") for line in lines) == row["padded_sizes"]
    assert sum(line.startswith("round ") for line in lines) == ROUNDS


@pytest.mark.gpu
def test_graphs_are_captured_once_a_padded_size() -> None:
    words = ("model=deformable_detr_tiny", "backbone=resnet18", "op=triton", "precision=bf16", "cuda_graphs=true")
    case = StepCase((*words, *SMALL_SCALES), 2, 8, 8, 2)
    row = measure_sizes(SyntheticStep(case, torch.device("cuda")), case, count=6, warmup=2, repeats=5)
    assert row["captures"] == row["padded_sizes"] - 1, "the fixed size was captured in the warm-up"
    assert row["eager_passes"] == 0
    assert row["sizes_ms"]["median"] < row["first_round_ms"]["largest"]


@pytest.mark.parametrize("dynamic", [True, False])
def test_recompilations_are_counted(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_sizes(region: Region, backend: str) -> None:
        region._compiled = torch.compile(region.compute, backend="eager", dynamic=dynamic)

    monkeypatch.setattr(Region, "compile_sizes", compile_sizes)
    torch._dynamo.reset()
    case = StepCase((*WORDS, *SMALL_SCALES, "compile=true"), 1, 8, 8, 2)
    row = measure_sizes(SyntheticStep(case, CPU), case, count=4, warmup=1, repeats=1)
    torch._dynamo.reset()
    assert row["padded_sizes"] >= 3
    assert (row["recompilations"] <= 1) == dynamic, "positions for every size anew unless sizes are symbols"


def test_one_scale_is_no_multi_scale_training() -> None:
    case = StepCase((*WORDS, "data/augmentation@data.train_transform=none"), 1, 64, 64, 2)
    with pytest.raises(ValueError, match=r"data.train_transform must be multi-scale to have 5 sizes, got coco\."):
        measure_sizes(SyntheticStep(case, CPU), case, count=5, warmup=0, repeats=1)


def write_data(folder: Path) -> tuple[str, ...]:
    """Writes six images of different sizes with a box each, and returns the words that train on them."""
    images, annotations = [], []
    for number in range(1, 7):
        pixels = torch.randint(256, (40 + number, 60, 3), dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(folder / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "height": 40 + number, "width": 60})
        box = {"bbox": [5, 5, 20, 20], "area": 400, "iscrowd": 0}
        annotations.append({"id": number, "image_id": number, "category_id": 1, **box})
    content = {"categories": [{"id": 1, "name": "thing"}], "images": images, "annotations": annotations}
    (folder / "instances.json").write_text(json.dumps(content))
    files = (f"data.{split}_{kind}" for split in ("train", "val") for kind in ("json=instances.json", "images=."))
    return (f"data.root={folder}", *files, "data.train_transform.scales=[48,64]", "data.train_transform.max_size=96")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_beside_its_batches_on_the_device(num_workers: int, tmp_path: Path) -> None:
    case = StepCase((*WORDS, *write_data(tmp_path), "data.repeat_train=2"), 2, 8, 8, 2)
    step = SyntheticStep(case, CPU)
    seen: list[tuple[float, torch.Size]] = []
    lines: list[str] = []
    take = step.take

    def take_noted(batch: TrainingBatch) -> None:
        seen.append((batch[0].double().sum().item(), batch[0].shape))
        take(batch)

    step.take = take_noted  # type: ignore[method-assign]
    before = set(multiprocessing.active_children())
    row = measure_data(step, case, build_data(case, num_workers), steps=5, lead=2, progress=lines.append)
    assert not set(multiprocessing.active_children()) - before
    assert json.loads(json.dumps(row)) == row
    assert (row["batch"], row["num_workers"], row["steps"]) == (2, num_workers, 3)
    assert row["share"] == pytest.approx(row["loader_images_per_s"] / row["device_images_per_s"])
    first_met, loaded, kept = seen[: row["padded_sizes"]], seen[row["padded_sizes"] : -3], seen[-3:]
    assert len(set(loaded)) == len(loaded) == 5
    assert kept == loaded[2:], "the same batches from the device, from where the clock starts"
    assert {shape for _, shape in first_met} == {shape for _, shape in loaded}, "every size has been met before"
    assert len({shape for _, shape in first_met}) == len(first_met) > 1, "and each once"
    assert set(first_met) <= set(loaded)
    assert sum(line.startswith("padded size ") for line in lines) == row["padded_sizes"]
    assert f"with {num_workers} workers" in format_stream(row)
    assert str(tmp_path.parent) not in json.dumps(row), "folders of this machine say nothing to others"


def test_too_few_batches_are_refused(tmp_path: Path) -> None:
    case = StepCase((*WORDS, *write_data(tmp_path), "data.repeat_train=2"), 2, 8, 8, 2)
    step = SyntheticStep(case, CPU)
    with pytest.raises(ValueError, match=r"steps must be above 2, .*, and at most the 6 batches of an epoch, got 7"):
        measure_data(step, case, build_data(case, num_workers=0), steps=7, lead=2)
    with pytest.raises(ValueError, match="steps must be above 3"):
        measure_data(step, case, build_data(case, num_workers=1), steps=3)
