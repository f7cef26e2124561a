"""ONNX through the reference op, in onnxruntime."""

import pytest
import torch

from models.export import onnx as onnx_export
from models.export.artefact import read_manifest
from models.export.build import export_detector
from models.export.certificate import Tolerance, compare_detections, contrasting_inputs, measure
from models.export.inference import INPUT_NAMES
from models.export.onnx import OnnxFormat
from models.export.predictor import load_artefact
from models.export.recipe import Precision, build_module

CPU = torch.device("cpu")
FP32 = Precision(torch.float32, False)
TOLERANCE = Tolerance(score=1e-3, box_px=0.1, min_score=0.0)


@pytest.fixture(scope="module")
def artefact(source, tmp_path_factory):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("onnx") / "artefact"
    manifest = export_detector(
        source,
        OnnxFormat(opset=20),
        folder,
        precision=FP32,
        backend="reference",
        fused=True,
        buckets=((64, 64), (64, 128)),
        size_divisor=64,
        batch_size=2,
        tolerance=TOLERANCE,
    )
    return manifest, folder, onnx


def test_it_is_onnx_with_grid_sample_and_nothing_foreign(artefact):
    _, folder, onnx = artefact
    model = onnx.load(folder / "detector_64x128.onnx")
    onnx.checker.check_model(model)
    assert {entry.version for entry in model.opset_import if entry.domain == ""} == {20}
    assert {node.domain for node in model.graph.node} <= {"", "pkg.torch.ops", "pkg.onnxscript.torch_lib.common"}
    assert "GridSample" in {node.op_type for node in model.graph.node}
    assert tuple(value.name for value in model.graph.input) == INPUT_NAMES


def test_the_certificate_says_what_was_measured(artefact):
    manifest, folder, _ = artefact
    assert read_manifest(folder) == manifest
    assert [each["bucket"] for each in manifest.certificate["measurements"]] == [[64, 64], [64, 128]]
    for each in manifest.certificate["measurements"]:
        assert each["depends_on_input"]
        assert each["difference"]["score"] <= TOLERANCE.score
        assert each["difference"]["box_px"] <= TOLERANCE.box_px


def test_programs_answer_as_eager_does(artefact, source):
    module = build_module(source, precision=FP32, backend="reference", fused=True, device=CPU, traced=True)
    programs = onnx_export.load_programs(artefact[1], ((64, 64), (64, 128)), 2)
    for bucket, program in programs.items():
        assert measure(program, module, bucket, 2, CPU, 0.0).difference.within(TOLERANCE)
        inputs = contrasting_inputs(bucket, 2)
        assert not compare_detections(module(*inputs[0]), program(*inputs[1])).within(TOLERANCE)


def test_predictor_fills_batches_and_refuses_what_fits_no_bucket(artefact, source):
    predictor = load_artefact(artefact[1], device=CPU, origin=source)
    image = torch.randint(256, (3, 60, 100), dtype=torch.uint8)
    alone = predictor([image], [(120, 200)])
    pair = predictor([image, image.flip(2)], [(120, 200), (60, 100)])
    assert alone.scores.shape == (1, 9)
    torch.testing.assert_close(pair.scores[0], alone.scores[0])
    assert predictor.place((60, 60)) == (64, 64)
    with pytest.raises(ValueError, match="image must fit a bucket"):
        predictor.place((65, 64))
    with pytest.raises(ValueError, match="images must be 1 to 2, got 3"):
        predictor([image] * 3, [(1, 1)] * 3)
    with pytest.raises(ValueError, match="images must share a place"):
        predictor([image, image[:, :, :50]], [(1, 1)] * 2)


def test_what_onnx_cannot_hold_is_refused():
    for opset in (17, 21):
        with pytest.raises(ValueError, match=f"opset must be 18 to 20, got {opset}"):
            OnnxFormat(opset=opset)
    for precision in (Precision(torch.bfloat16, True), Precision(torch.float32, True)):
        with pytest.raises(ValueError, match=f"precision must be fp32 for ONNX, got {precision.name}"):
            OnnxFormat(opset=20).check(precision, "reference")
    with pytest.raises(ValueError, match="op must be reference for ONNX"):
        OnnxFormat(opset=20).check(FP32, "triton")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(onnx_export, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="got no onnx, onnxscript, onnxruntime; pip install"):
        OnnxFormat(opset=20).check(FP32, "reference")
