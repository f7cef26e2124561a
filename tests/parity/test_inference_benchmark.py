"""Rows and picture of the inference benchmark; timing itself needs a GPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.export.certificate import Tolerance
from models.export.inference import InferenceModule
from parity.inference_benchmark import (
    PERCENTILES,
    Job,
    build_contender,
    build_detector,
    format_row,
    measure_row,
    plot_dispatch,
)

JOB = Job("one_stage", "fp32", (64, 96), 2)
SMALL = [
    "op=reference",
    "backbone=resnet18",
    "model.transformer.d_model=32",
    "model.transformer.num_encoder_layers=1",
    "model.transformer.num_decoder_layers=1",
    "model.transformer.num_queries=12",
    "model.transformer.dim_feedforward=32",
    "data.eval_transform.size=64",
    "data.eval_transform.max_size=96",
]


class FixedMeter:
    """Runs each call once and gives fixed numbers."""

    def wall_ms(self, call: Callable[[], Any]) -> list[float]:
        call()
        return [float(number) for number in range(101)]

    def busy_ms(self, call: Callable[[], Any]) -> float:
        return 20.0

    def peak_mib(self, call: Callable[[], Any]) -> float:
        return 5.0


@pytest.fixture(scope="module")
def detector() -> tuple[InferenceModule, Tolerance]:
    return build_detector(JOB, SMALL, torch.device("cpu"), traced=False)


def test_what_answers_as_eager_is_timed(detector: tuple[InferenceModule, Tolerance]) -> None:
    row = measure_row("eager", JOB, *detector, FixedMeter())
    assert row["status"] == "timed"
    assert [row[f"wall_ms_p{round(100 * share)}"] for share in PERCENTILES] == [20, 50, 80, 90, 99]
    assert (row["wall_ms_per_image"], row["busy_ms"], row["peak_mib"], row["repeats"]) == (25, 20, 5, 101)
    assert row["difference"]["bitwise_equal"]
    assert "wall 50.00 ms (p20 20.00, p80 80.00, p99 99.00), busy 20.00 ms, 25.00 ms an image" in format_row(row)
    assert json.loads(json.dumps(row)) == row


@pytest.mark.parametrize(("name", "change"), [("aoti", 0.01), ("graph", 1e-7)])
def test_what_answers_otherwise_is_refused(
    detector: tuple[InferenceModule, Tolerance], name: str, change: float
) -> None:
    module, tolerance = detector

    def build(name: str, module: InferenceModule, job: Job) -> Any:
        def program(*inputs: torch.Tensor) -> Any:
            scores, labels, boxes = module(*inputs)
            return scores + change, labels, boxes

        return program

    row = measure_row(name, JOB, module, tolerance, FixedMeter(), build)
    assert row["status"] == "refused"
    assert "wall_ms_p50" not in row
    assert "refused: answers otherwise than eager" in format_row(row)


def test_what_does_not_run_is_a_row_too(detector: tuple[InferenceModule, Tolerance]) -> None:
    def build(name: str, module: InferenceModule, job: Job) -> Any:
        raise RuntimeError("out of memory\nmore lines")

    row = measure_row("graph", JOB, *detector, FixedMeter(), build)
    assert format_row(row).endswith("failed: RuntimeError: out of memory")


def test_a_compiled_detector_answers_as_eager(
    detector: tuple[InferenceModule, Tolerance], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **options: compile_with(module, backend="eager", **options))
    row = measure_row("compiled", JOB, *detector, FixedMeter(), build_contender)
    assert row["status"] == "timed", row


def test_earlier_detectors_do_not_count_as_recompilations(
    detector: tuple[InferenceModule, Tolerance], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch leaves a function eager that it has compiled eight times, without saying so to a benchmark."""
    calls = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append("reset"))
    monkeypatch.setattr(torch, "compile", lambda module, **options: calls.append("compile"))
    for _ in range(2):
        build_contender("compiled", detector[0], JOB)
    assert calls == ["reset", "compile"] * 2


def test_plot_shows_timed_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    timed = {"model": "dino", "precision": "bf16", "batch_size": 1, "status": "timed", "busy_ms": 5.0}
    rows = [timed | {"contender": name, "wall_ms_p50": wall} for name, wall in (("eager", 20.0), ("graph", 5.5))]
    plot_dispatch([*rows, timed | {"contender": "aoti", "status": "refused"}], tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
