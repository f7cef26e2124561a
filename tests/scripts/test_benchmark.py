"""Arguments, files and pictures of the benchmark; measuring itself needs a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import benchmark
from scripts.benchmark import SCHEMA, build_parser, main, plot_rows, write_results


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["op", "--presets", "encoder,huge"], "names must be of encoder, decoder, dino, large, got 'huge'"),
        (["op", "--dtypes", "fp8"], "names must be of bf16, fp16, fp32, got 'fp8'"),
        (["sweep", "--batches", "4,0"], "counts must be positive numbers, got '4,0'"),
        (["variants", "--repeats", "2"], "repeats must be a number from 5 on, got '2'"),
        ([], "arguments are required"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("command", ["op", "sweep", "variants"])
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
