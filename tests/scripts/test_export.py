"""From a training run to detections without it: train, export, predict, as a user types it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from PIL import ExifTags, Image

from models.export.agreement import compare_results, read_results
from models.export.certificate import Tolerance
from scripts.export import run_export
from scripts.predict import main

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "debug=smoke",
    "trainer=cpu",
    "logger=csv",
    "callbacks.progress=null",
    "data.image_size=64",
    "data.num_train=4",
    "data.num_val=2",
    "data.eval_batch_size=1",  # alone: the validation reads the padding of a batch, a prediction does not
    "model.transformer.d_model=32",
    "model.transformer.num_encoder_layers=1",
    "model.transformer.num_decoder_layers=1",
    "model.transformer.num_queries=20",
    "model.transformer.dim_feedforward=32",
]


def start_export(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.export", *words]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)


@pytest.fixture
def predict(workspace, capsys, monkeypatch):
    """Runs the command in this process, in the workspace; returns exit status, output and messages."""

    def command(source, model: str, *options: str) -> tuple[int, str, str]:
        monkeypatch.chdir(workspace)
        status = main([str(source), "--model", model, "--workers", "0", *map(str, options)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


def export(workspace: Path, *overrides: str) -> None:
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = compose("export", overrides=list(overrides))
    run_export(config)


@pytest.fixture(scope="module")
def workspace(run_command, tmp_path_factory):
    """A folder with a short training run in `run` and its synthetic data in `synthetic`."""
    folder = tmp_path_factory.mktemp("export")
    words = [*TINY, f"hydra.run.dir={folder / 'run'}"]
    result = run_command(str(ROOT / "train.py"), *words, folder=folder, TRITON_DETR_CACHE=str(folder))
    assert result.returncode == 0, result.stderr
    (folder / "last.ckpt").symlink_to(folder / "run" / "checkpoints" / "last.ckpt")
    return folder


def export_onnx(workspace: Path) -> None:
    """Exports the training run to `onnx`, for the first test that wants it."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    if not (workspace / "onnx").exists():
        exported = start_export(workspace, "ckpt=last.ckpt", "format=onnx", "out=onnx")
        assert exported.returncode == 0, exported.stderr
        assert "bucket 64x64 against eager fp32: " in exported.stdout


@pytest.fixture
def photos(tmp_path):
    """A plain photo, one that a camera turned, and a broken one."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "plain.png")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    (tmp_path / "more").mkdir()
    Image.fromarray(pixels).save(tmp_path / "more" / "turned.jpg", exif=exif)
    (tmp_path / "notes.txt").write_text("no image, and not named like one")
    return tmp_path


def test_an_artefact_finds_what_its_checkpoint_finds(workspace, predict):
    export_onnx(workspace)
    (annotations,) = workspace.glob("synthetic/*/annotations/instances_val.json")
    images = annotations.parent.parent / "val"
    found = {}
    for model, options in {"last.ckpt": ["--batch-size", "2"], "onnx": ["--made-of", "last.ckpt"]}.items():
        out = workspace / f"found_{model}"
        status, output, messages = predict(images, model, "--out", out, "--annotations", annotations, *options)
        assert status == 0, messages
        assert output.startswith("AP ")
        found[model] = json.loads((out / "detections.json").read_text())
        assert len(list((out / "pictures").iterdir())) == 2
    ours, theirs = found.values()
    assert len(ours) == len(theirs) == 2 * 100
    for mine, its in zip(ours, theirs, strict=True):
        assert (mine["image_id"], mine["file_name"]) == (its["image_id"], its["file_name"])
        assert abs(mine["score"] - its["score"]) < 1e-3
    validated = json.loads((workspace / "run" / "detections_val.json").read_text())
    np.testing.assert_allclose(
        sorted(row["score"] for row in ours), sorted(row["score"] for row in validated), atol=1e-4
    )
    assert {row["image_id"] for row in ours} == {row["image_id"] for row in validated}
    status, _, messages = predict(images, "onnx", "--precision", "bf16")
    assert status == 1
    assert "--precision must come with a checkpoint, got an artefact" in messages


def test_a_folder_of_photos(predict, photos):
    status, _, messages = predict(photos, "last.ckpt", "--out", photos / "out", "--score", "0")
    assert status == 0, messages
    rows = json.loads((photos / "out" / "detections.json").read_text())
    assert {row["file_name"] for row in rows} == {str(photos / "plain.png"), str(photos / "more" / "turned.jpg")}
    assert {row["image_id"] for row in rows} == {1, 2}
    assert rows[0].keys() == {"image_id", "category_id", "bbox", "score", "file_name"}
    assert f"pictures in {photos / 'out' / 'pictures'}" in messages
    with Image.open(photos / "out" / "pictures" / "more" / "turned.jpg") as picture:
        assert picture.size == (240, 360), "turned upright"
    with Image.open(photos / "out" / "pictures" / "plain.png.jpg") as picture:
        assert picture.size == (360, 240)


def test_pictures_of_equal_names_do_not_take_the_place_of_each_other(predict, photos):
    for name in ("a", "b"):
        (photos / name).mkdir()
        (photos / name / "same.JPG").hardlink_to(photos / "more" / "turned.jpg")
    status, _, messages = predict(photos / "[ab]" / "*.JPG", "last.ckpt", "--out", photos / "out")
    assert status == 0, messages
    pictures = photos / "out" / "pictures"
    found = {str(path.relative_to(pictures)) for path in pictures.rglob("*.*")}
    assert found == {"a/same.JPG", "b/same.JPG"}


def test_a_bad_file_is_named_skipped_and_told_by_the_exit_status(predict, photos):
    (photos / "broken.png").write_bytes(b"\x89PNG and no more")
    status, _, messages = predict(photos / "*.png", "last.ckpt", "--out", photos / "out", "--no-pictures")
    assert status == 1
    assert f"skipped {photos / 'broken.png'}: image file must be readable" in messages
    assert "1 images, 1 skipped" in messages
    assert json.loads((photos / "out" / "detections.json").read_text())
    assert not (photos / "out" / "pictures").exists()


def test_a_link_to_nowhere_is_named_and_skipped(predict, photos):
    (photos / "gone.png").symlink_to(photos / "nowhere.png")
    status, _, messages = predict(photos, "last.ckpt", "--out", photos / "out", "--no-pictures")
    assert status == 1
    assert f"skipped {photos / 'gone.png'}: image file must be readable" in messages
    assert "2 images, 1 skipped" in messages


def test_detections_are_compared_with_earlier_ones(predict, photos):
    options = [photos, "last.ckpt", "--no-pictures", "--out"]
    assert predict(*options, photos / "fp32")[0] == 0
    compare = ["--compare", photos / "fp32" / "detections.json"]
    status, output, _ = predict(*options, photos / "again", *compare)
    assert status == 0
    assert re.fullmatch(r"largest differences: bitwise equal; \d\d+ detections compared, at most 0 unpaired\n", output)
    status, output, _ = predict(*options, photos / "half", "--precision", "bf16", *compare)
    assert status == 0
    assert re.match(r"largest differences: scores \d\.\de-\d\d, boxes \d\.\de[-+]\d\d px; \d+ detections", output)
    status, output, messages = predict(photos / "plain.png", *options[1:], photos / "other", *compare)
    assert (status, output) == (1, "")
    assert "error: results must hold as many detections of the same images, got 2 images and 1" in messages


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "0"], "number must be a whole one from 1 on, got '0'"),
        (["--workers", "-1"], "number must be a whole one from 0 on, got '-1'"),
        (["--score", "1.5"], "score must be a number from 0 to 1, got '1.5'"),
        (["--score", "high"], "invalid parse_score value: 'high'"),
        (["--precision", "bf17"], "invalid choice: 'bf17'"),
    ],
)
def test_wrong_options_are_refused(options, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(["plain.png", "--model", "last.ckpt", *options])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_nothing_but_bad_files_is_an_error(predict, photos):
    (photos / "plain.png").write_bytes(b"")
    status, _, messages = predict(photos / "plain.png", "last.ckpt", "--out", photos / "out")
    assert status == 1
    assert "0 images, 1 skipped" in messages


@pytest.mark.parametrize(
    ("source", "model", "options", "message"),
    [
        ("nothing*.jpg", "last.ckpt", [], "source must be an image, a folder with images or a pattern"),
        ("plain.png", "absent.ckpt", [], "no such file exists"),
        ("plain.png", "synthetic", [], "artefact must be a folder with manifest.json"),
        ("plain.png", "last.ckpt", ["--made-of", "last.ckpt"], "--made-of must come with an artefact"),
        ("plain.png", "last.ckpt", ["--device", "cpu", "--op", "cuda"], "cuda"),
        ("plain.png", "last.ckpt", ["--compare", "absent.json"], "results must be a file of detections"),
        ("plain.png", "last.ckpt", ["--out", "last.ckpt"], "out must be a folder that can be made, got 'last.ckpt'"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(predict, photos, source, model, options, message):
    status, _, messages = predict(photos / source, model, "--out", photos / "out", *options)
    assert status == 1
    assert messages.startswith("error: ")
    assert message in messages
    assert not (photos / "out").exists()


def test_annotations_with_other_category_ids_are_matched_by_name(workspace, predict, tmp_path):
    (path,) = workspace.glob("synthetic/*/annotations/instances_val.json")
    images, content = path.parent.parent / "val", json.loads(path.read_text())
    assert predict(images, "last.ckpt", "--out", tmp_path / "same", "--annotations", path, "--no-pictures")[0] == 0
    for row in content["categories"]:
        row["id"] = 1000 - row["id"]
    for row in content["annotations"]:
        row["category_id"] = 1000 - row["category_id"]
    annotations = tmp_path / "renumbered.json"
    annotations.write_text(json.dumps(content))
    options = ["--annotations", annotations, "--no-pictures"]
    assert predict(images, "last.ckpt", "--out", tmp_path / "renumbered", *options)[0] == 0
    found = [json.loads((tmp_path / name / "detections.json").read_text()) for name in ("same", "renumbered")]
    assert found[0] == [{**row, "category_id": 1000 - row["category_id"]} for row in found[1]]
    content["categories"][0]["name"] = "cat"
    annotations.write_text(json.dumps(content))
    status, _, messages = predict(images, "last.ckpt", "--out", tmp_path / "refused", *options)
    assert status == 1
    assert re.match(r"error: the data must have the 6 categories of last.ckpt, got 6 without \w+, with the", messages)
    assert "give an annotation file with categories of these names or leave --annotations out" in messages


@pytest.mark.parametrize(("model", "options"), [("last.ckpt", ["--batch-size", "4"]), ("onnx", [])])
def test_odd_images_are_survived(workspace, predict, tmp_path, model, options):
    if "ODD_INPUTS_DIR" not in os.environ:
        pytest.skip("needs ODD_INPUTS_DIR")
    images = Path(os.environ["ODD_INPUTS_DIR"]) / "images"
    if model == "onnx":
        export_onnx(workspace)
    status, _, messages = predict(images, model, "--out", tmp_path, *options)
    assert status == 1
    assert "9 images, 2 skipped" in messages
    for name in ("broken.png", "truncated_jpeg.jpg"):
        assert f"skipped {images / name}" in messages


def test_onnx_finds_what_its_checkpoint_finds_in_real_images(workspace, predict, tmp_path):
    if "COCO_SUBSET_DIR" not in os.environ:
        pytest.skip("needs COCO_SUBSET_DIR")
    export_onnx(workspace)
    (tmp_path / "images").mkdir()
    for image in sorted((Path(os.environ["COCO_SUBSET_DIR"]) / "val2017").iterdir())[:20]:
        (tmp_path / "images" / image.name).symlink_to(image)
    found = []
    for model in ("last.ckpt", "onnx"):
        status, _, messages = predict(tmp_path / "images", model, "--out", tmp_path / model, "--no-pictures")
        assert status == 0, messages
        found.append(read_results(tmp_path / model / "detections.json"))
    assert len({row["image_id"] for row in found[0]}) == 20
    bounds = Tolerance(score=1e-3, box_px=0.1, min_score=0.0)
    assert compare_results(*found).within(bounds)
    found[1][0] = {**found[1][0], "score": found[1][0]["score"] + 2e-3}
    assert not compare_results(*found).within(bounds)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "ckpt or model.weights must be given"),
        (["ckpt=absent.ckpt"], "no such file exists"),
        (["ckpt=last.ckpt", "op=triton"], "op must be reference for ONNX"),
        (["ckpt=last.ckpt", "precision=bf16"], "precision must be fp32 for ONNX"),
        (["ckpt=last.ckpt", "buckets=[[0,64]]"], "buckets must be pairs of height and width"),
        (
            ["ckpt=last.ckpt", "buckets=[800,1333]"],
            "buckets must be pairs of height and width in pixels, got .800, 1333",
        ),
        (["ckpt=last.ckpt", "buckets=800"], "buckets must be pairs of height and width in pixels, got .800"),
        (["ckpt=last.ckpt", "batch_size=0"], "batch_size must be a whole number from 1 on, got 0"),
        (["ckpt=last.ckpt", "batch_size=two"], "batch_size must be a whole number from 1 on, got two"),
        (["ckpt=last.ckpt", "size_divisor=0"], "size_divisor must be a whole number from 1 on, got 0"),
        (["ckpt=last.ckpt", "out=run"], "out must be a new folder or an artefact"),
    ],
)
def test_wrong_exports_are_refused(workspace, monkeypatch, overrides, message):
    monkeypatch.chdir(workspace)
    with pytest.raises(ValueError, match=message):
        export(workspace, "format=onnx", *overrides)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_graphs_need_a_gpu_and_an_error_is_a_line(run_command, workspace):
    result = run_command("-m", "scripts.export", "ckpt=last.ckpt", folder=workspace)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: format=cuda_graph must run on an NVIDIA GPU, got none")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "precision"), [("cuda_graph", "bf16"), ("cuda_graph", "fp32"), ("aoti", "fp32")])
def test_artefacts_of_a_gpu_find_what_the_checkpoint_finds(workspace, predict, name, precision):
    out = f"{name}_{precision}"
    options = [f"format={name}", f"precision={precision}", f"out={out}", "batch_size=2"]
    exported = start_export(workspace, "ckpt=last.ckpt", *options)
    assert exported.returncode == 0, exported.stderr
    (images,) = workspace.glob("synthetic/*/val")
    found = []
    for model, settings in ((out, []), ("last.ckpt", ["--precision", precision, "--batch-size", "2"])):
        status, _, messages = predict(images, model, "--out", f"found_{model}", "--no-pictures", *settings)
        assert status == 0, messages
        rows = json.loads((workspace / f"found_{model}" / "detections.json").read_text())
        found.append(np.array(sorted(row["score"] for row in rows)))
    np.testing.assert_allclose(found[0], found[1], atol=0 if name == "cuda_graph" else 1e-3)
