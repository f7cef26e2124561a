"""Arguments, files and pictures of the benchmark; measuring itself needs a GPU."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from msda_op.triton import launch_table
from msda_op.triton.launch_table import LaunchKey, LaunchShape, read_table
from parity.inference_benchmark import Job, build_detector
from parity.presets import Preset, make_preset_inputs
from parity.speed import Workload
from parity.step_benchmark import StepCase
from parity.step_table import StepTable
from parity.timing import DeviceTime, Summary
from scripts import benchmark
from scripts.benchmark import SCHEMA, build_parser, main, plot_rows, write_results


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["op", "--presets", "encoder,huge"], "names must be of encoder, decoder, dino, large, got 'huge'"),
        (["op", "--dtypes", "fp8"], "names must be of bf16, fp16, fp32, got 'fp8'"),
        (["sweep", "--batches", "4,0"], "counts must be positive numbers, got '4,0'"),
        (["inference", "--models", "yolo"], "names must be of one_stage, refine, two_stage, dino, got 'yolo'"),
        (["inference", "--size", "800"], "size must be height and width, got '800'"),
        (["step", "--against", "official"], "--against official needs --checkout, got none"),
        (["step", "--against", "mmdet"], "invalid choice: 'mmdet'"),
        (["step", "--switches", "--sizes", "50"], "argument --sizes: not allowed with argument --switches"),
        (["step", "--sizes", "0"], "counts must be positive numbers, got '0'"),
        (["step", "--sizes", "50", "--plot", "a.png"], "--plot must come without --sizes and --data-workers"),
        (["loader", "--workers", "-1,2"], "expected one argument"),
        (["loader", "--workers", "two"], "worker counts must be numbers from 0 on, got 'two'"),
        (["variants", "--repeats", "2"], "repeats must be a number from 5 on, got '2'"),
        ([], "arguments are required"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data=cocoo", "Could not find 'data/cocoo'"),
        ("data.workers=3", "Could not override 'data.workers'"),
        ("data.root", "Error parsing override 'data.root' missing EQUAL"),
        ("data.num_val=${nothing}", "Interpolation key 'nothing' not found"),
        ("data.batch_size=0", "data.batch_size must be an integer of at least 1, got 0"),
        ("data.image_size=-1", "data.eval_transform.size must be an integer of at least 1, got -1"),
        ("data=coco data.root=/nowhere", "annotation files and image folders must exist"),
    ],
)
def test_a_loader_of_wrong_settings_is_refused_in_a_line(
    word: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["loader", *word.split(), "--out", str(tmp_path / "loader.json")]) == 2
    refusal = capsys.readouterr().err
    assert refusal.startswith("error: ")
    assert message in refusal
    assert refusal.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
def test_a_peer_that_cannot_be_measured_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(case: StepCase, device: torch.device, table: StepTable) -> Iterator[dict[str, Any]]:
        yield {"number": 0}
        raise ValueError("--checkout must hold the official code,\ngot none")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(benchmark, "read_gpu_state", lambda: None)
    monkeypatch.setattr(benchmark, "measure_table", refuse)
    monkeypatch.setattr(benchmark, "format_step", str)
    out = tmp_path / "step.json"
    assert main(["step", "--out", str(out)]) == 2
    assert capsys.readouterr().err == "error: --checkout must hold the official code, got none\n"
    assert json.loads(out.read_text())["rows"] == [{"number": 0}]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("command", ["op", "sweep", "variants", "inference", "step"])
def test_a_machine_without_a_gpu_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command])
    assert "must run on an NVIDIA GPU, got none" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["op", "--plot", "times.png"])
    assert "--plot needs matplotlib, got none" in capsys.readouterr().err


def test_defaults_cover_what_the_op_is_for() -> None:
    options = build_parser().parse_args(["op"])
    assert options.presets == ["encoder", "decoder", "dino", "large"]
    assert options.batches == [1, 4, 32]
    assert options.dtypes == ["bf16", "fp16", "fp32"]
    assert (options.repeats, options.out) == (20, Path("results/op.json"))


def test_the_loader_is_timed_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_DETR_CACHE", str(tmp_path))
    sizes = ["data.num_train=4", "data.num_val=1", "data.image_size=48", "data.batch_size=2"]
    out = tmp_path / "loader.json"
    assert main(["loader", *sizes, "--workers", "0", "--seconds", "0.1", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["img_per_s"] > 0
    assert row["limit"] in capsys.readouterr().out


def test_results_are_written_whole_and_folders_made(tmp_path: Path) -> None:
    path = tmp_path / "results" / "op.json"
    for rows in ([], [{"status": "refused"}]):
        write_results(path, {"schema": SCHEMA, "rows": rows})
        assert json.loads(path.read_text()) == {"schema": SCHEMA, "rows": rows}


def test_plot_shows_timed_rows_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    timed: dict[str, Any] = {"preset": "encoder", "batch": 4, "dtype": "bf16", "status": "timed"}
    times = {"forward_device_ms_median": 0.2, "backward_device_ms_median": 0.6}
    rows = [timed | times | {"implementation": name} for name in ("ours", "theirs")]
    plot_rows([*rows, timed | {"implementation": "wrong", "status": "refused"}], tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


class InstantStopwatch:
    """A queue on which everything is done at once, and takes a millisecond."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def flush_caches(self) -> None: ...

    def spin(self, cycles: int) -> None: ...

    def synchronize(self) -> None: ...

    def reached(self, stamp: float) -> bool:
        return False

    def mark(self) -> float:
        self.now_ms += 1
        return self.now_ms

    def elapsed_ms(self, begin: float, end: float) -> float:
        return end - begin


class InstantMeter:
    """Runs each call once and gives fixed numbers."""

    def __init__(self, repeats: int) -> None:
        self._summary = Summary(1.0, 1.0, 1.0, repeats)

    def device_time(self, call: Callable[[], Any]) -> DeviceTime:
        call()
        return DeviceTime(self._summary, None, False)

    def host_time(self, call: Callable[[], Any]) -> Summary:
        return self._summary

    def wall_time(self, call: Callable[[], Any]) -> Summary:
        return self._summary

    def graph_time(self, call: Callable[[], Any]) -> Summary:
        return self._summary

    def kernel_times(self, call: Callable[[], Any]) -> dict[str, float]:
        return {}

    def peak_mib(self, call: Callable[[], Any]) -> float:
        return 1.0

    def gpu_state(self) -> None:
        return None


@pytest.fixture
def measured_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a tiny workload on the CPU under the commands, and clocks that need no device."""
    preset = Preset("tiny", ((4, 6), (2, 3)), num_queries=5, num_heads=2, head_dim=8, num_points=4)
    inputs = make_preset_inputs(preset, 2, torch.float32, torch.device("cpu"), seed=0)
    monkeypatch.setattr(benchmark, "draw_workloads", lambda options: iter([Workload(preset, 2, "fp32", inputs)]))
    monkeypatch.setattr(benchmark, "CudaStopwatch", InstantStopwatch)
    monkeypatch.setattr(benchmark, "CudaMeter", InstantMeter)
    monkeypatch.setattr(benchmark, "measure_copy_bandwidth", lambda stopwatch: 4e12)
    monkeypatch.setattr(benchmark, "read_gpu_state", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
@pytest.mark.usefixtures("measured_without_a_gpu")
def test_op_times_ours_twice_and_the_fused_form_and_each_row_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "op.json", tmp_path / "op.png"
    pytest.importorskip("matplotlib")
    assert main(["op", "--out", str(out), "--plot", str(picture)]) == 0
    content = json.loads(out.read_text())
    assert set(content) == {"schema", "environment", "gpu", "missing_peers", "copy_gb_s", "rows", "repeated"}
    names = [row["implementation"] for row in content["rows"]]
    fused = ["msda_op triton, fused", "softmax + locations + msda_op triton"]
    ours = ["msda_op triton", "msda_op triton, deterministic", "msda_op reference", "msda_op triton"]
    assert names == [*ours, *fused]
    assert {row["status"] for row in content["rows"]} == {"timed"}
    assert content["repeated"][0]["relative_difference"] == {"forward_device_ms": 0.0, "backward_device_ms": 0.0}
    assert "deformops: not installed" in capsys.readouterr().out
    assert picture.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
@pytest.mark.usefixtures("measured_without_a_gpu")
def test_sweep_writes_the_table_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, out = tmp_path / "table.json", tmp_path / "sweep.json"
    monkeypatch.setattr(launch_table, "TABLE_PATH", table)
    monkeypatch.setattr("parity.sweep.candidate_shapes", lambda block_k, block_d: [LaunchShape(8, 1)])
    assert main(["sweep", "--out", str(out), "--repeats", "5"]) == 0
    assert not table.exists()
    assert main(["sweep", "--out", str(out), "--repeats", "5", "--kernels", "hopper|^back"]) == 0
    assert [row["kernel"] for row in json.loads(out.read_text())["rows"]] == ["backward"]
    assert main(["sweep", "--out", str(out), "--repeats", "5", "--write"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["kernel"], row["block_q"], row["num_warps"]) for row in rows] == [
        ("forward", 8, 1),
        ("backward", 8, 1),
    ]
    entries = read_table(table)
    assert {entry.key for entry in entries} == {LaunchKey(90, row["kernel"], 4, 4, 8, "few") for row in rows}
    assert all(entry.measured_on.startswith("a card, commit ") for entry in entries)


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
@pytest.mark.parametrize("extra", [[], ["--switches"], ["--sizes", "3"], ["--data-workers", "1"]])
def test_step_passes_its_options_on_and_writes_every_row(
    extra: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def measure_nothing(case: StepCase, device: torch.device, table: StepTable) -> Iterator[dict[str, Any]]:
        seen.append((case, device.type, table))
        yield from ({"number": number} for number in range(2))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(benchmark, "read_gpu_state", lambda: None)
    monkeypatch.setattr(benchmark, "measure_table", measure_nothing)
    monkeypatch.setattr(benchmark, "format_step", lambda row: f"row {row['number']}")
    out = tmp_path / "step.json"
    words = ["op=reference", "--batches", "1,2", "--size", "64x96", "--repeats", "5", "--out", str(out)]
    assert main(["step", *words, *extra]) == 0
    assert [case for case, _, _ in seen] == [StepCase(("op=reference",), batch, 64, 96, 12) for batch in (1, 2)]
    table = StepTable(
        repeats=5,
        switches="--switches" in extra,
        sizes=3 if "--sizes" in extra else None,
        data_workers=1 if "--data-workers" in extra else None,
    )
    assert [each for _, _, each in seen] == [table, table]
    assert json.loads(out.read_text())["rows"] == [{"number": 0}, {"number": 1}] * 2
    assert capsys.readouterr().out == "row 0\nrow 1\n" * 2


class FixedMeter:
    """Runs each call once and gives fixed numbers."""

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats

    def wall_ms(self, call: Callable[[], Any]) -> list[float]:
        call()
        return [5.0] * self._repeats

    def busy_ms(self, call: Callable[[], Any]) -> float:
        return 2.0

    def peak_mib(self, call: Callable[[], Any]) -> float:
        return 1.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
def test_inference_writes_a_row_for_every_model_precision_and_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [f"model.transformer.{key}=1" for key in ("num_encoder_layers", "num_decoder_layers")]
    small += [f"model.transformer.{key}=32" for key in ("d_model", "dim_feedforward", "num_queries")]
    small += ["backbone=resnet18", "op=reference", "data.eval_transform.size=64", "data.eval_transform.max_size=96"]

    def build_small(job: Job, overrides: Sequence[str], device: torch.device, traced: bool) -> Any:
        assert device.type == "cuda"
        return build_detector(job, [*small, *overrides], torch.device("cpu"), traced)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(benchmark, "read_gpu_state", lambda: None)
    monkeypatch.setattr(benchmark, "build_detector", build_small)
    monkeypatch.setattr(benchmark, "CudaInferenceMeter", FixedMeter)
    out = tmp_path / "inference.json"
    words = ["--models", "one_stage,dino", "--precisions", "bf16,fp32", "--batches", "1,2", "--contenders", "eager"]
    words += ["--size", "64x96", "--set", "detector.top_k=7", "--repeats", "5", "--out", str(out)]
    assert main(["inference", *words]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["model"], row["precision"], row["batch_size"]) for row in rows] == [
        *product(("one_stage", "dino"), ("bf16", "fp32"), (1, 2))
    ]
    assert {row["status"] for row in rows} == {"timed"}
    assert [row["wall_ms_per_image"] for row in rows] == [5.0, 2.5] * 4


@pytest.mark.gpu
def test_commands_run_and_their_files_hold_what_they_promise(tmp_path: Path) -> None:
    sizes = ["--presets", "decoder", "--batches", "1", "--dtypes", "bf16", "--repeats", "5"]
    for command in ("op", "sweep", "variants"):
        out = tmp_path / f"{command}.json"
        assert main([command, *sizes, "--out", str(out)]) == 0
        content = json.loads(out.read_text())
        assert content["schema"] == SCHEMA
        assert content["environment"]["gpus"]
        assert content["rows"]
    rows = json.loads((tmp_path / "op.json").read_text())["rows"]
    ours = [row for row in rows if row["implementation"] == "msda_op triton"]
    assert [row["status"] for row in ours] == ["timed", "timed"]
    assert 0 < ours[0]["forward_device_ms_median"] < ours[0]["forward_wall_ms_median"]


@pytest.mark.gpu
def test_inference_times_what_answers_as_eager_does(tmp_path: Path) -> None:
    out = tmp_path / "inference.json"
    arguments = ["inference", "--models", "one_stage", "--batches", "1", "--size", "256x320", "--repeats", "5"]
    assert main([*arguments, "--contenders", "eager,graph", "--out", str(out)]) == 0
    eager, graph = json.loads(out.read_text())["rows"]
    assert (eager["status"], graph["status"]) == ("timed", "timed")
    assert graph["difference"]["bitwise_equal"]
    assert graph["busy_ms"] < graph["wall_ms_p50"] < eager["wall_ms_p50"]
