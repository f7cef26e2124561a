"""A manifest, and what the loader refuses."""

import json
import shutil
import subprocess
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from torch._inductor.package import package_aoti

from models.environment import package_versions
from models.export import artefact
from models.export.aoti import AotiFormat
from models.export.artefact import (
    MANIFEST,
    Manifest,
    architecture_of,
    check_machine,
    check_origin,
    make_certificate,
    read_manifest,
)
from models.export.build import export_detector
from models.export.certificate import Difference, Measurement, Tolerance, collect_answers, contrasting_inputs
from models.export.cuda_graph import WEIGHTS_FILE, CudaGraphFormat, GraphedDetector
from models.export.predictor import load_artefact
from models.export.programs import program_name
from models.export.recipe import Precision, Source, build_module
from models.export.weights import save_weights

CPU = torch.device("cpu")
TOLERANCE = Tolerance(score=1e-3, box_px=0.1, min_score=0.0)


class HostGraphs(CudaGraphFormat):
    """The graphs' format on a machine without a GPU; its programs are eager."""

    device = CPU

    def write(self, source, module, buckets, batch_size, folder):
        save_weights(source.weights, folder / WEIGHTS_FILE)
        return {bucket: collect_answers(module, bucket, batch_size, CPU) for bucket in buckets}


def export(source, folder, writer=None, **changes):
    settings = {
        "precision": Precision(torch.float32, False),
        "backend": "reference",
        "fused": True,
        "buckets": ((64, 64),),
        "size_divisor": 64,
        "batch_size": 1,
        "tolerance": TOLERANCE,
    }
    return export_detector(source, writer or HostGraphs(memory_cap_mib=100), folder, **(settings | changes))


@pytest.fixture
def folder(source, tmp_path):
    export(source, tmp_path / "artefact")
    return tmp_path / "artefact"


def change_manifest(folder, **changes):
    content = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(content | changes))


def test_a_manifest_says_what_the_artefact_is(folder, source):
    manifest = read_manifest(folder)
    assert manifest.recipe == source.recipe
    assert [category["name"] for category in manifest.recipe.categories] == ["cup", "fork", "plate"]
    assert manifest.weights_hash == source.weights_hash
    assert manifest.architecture == architecture_of(CPU)
    assert manifest.packages == package_versions()
    assert manifest.certificate["measurements"][0]["difference"]["bitwise_equal"]
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


def test_an_artefact_loads_where_it_was_made(folder, source):
    predictor = load_artefact(folder, device=CPU, origin=source)
    assert isinstance(predictor._program, GraphedDetector)
    assert predictor.place((65, 200)) == (128, 256), "outside its buckets a graphed detector is eager"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 99}, "manifest must have schema 1, got 99"),
        ({"surplus": 1}, "must have the keys of its schema, got others or too few: \\['surplus'\\]"),
        ({"architecture": "sm_52"}, "must run on the architecture of its export, sm_52, got"),
        ({"device": "cuda"}, "must run on the device type of its export, cuda, got cpu"),
        ({"packages": {"torch": "1.0", "triton": "1.0"}}, "torch must have the version of the export, 1.0, got"),
        ({"format": "tensorrt"}, "format must be one of cuda_graph, aoti, onnx, got 'tensorrt'"),
        ({"weights_hash": "0" * 32}, "must hold the weights of the manifest"),
    ],
    ids=["schema", "keys", "architecture", "device", "version", "format", "hash"],
)
def test_a_mismatch_is_refused_in_words(folder, changes, message):
    change_manifest(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load_artefact(folder, device=CPU, origin=None)


def test_weights_that_were_exchanged_are_refused(folder, source):
    other = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in source.weights.items()}
    safetensors.torch.save_file(other, folder / "weights.safetensors")
    with pytest.raises(ValueError, match=r"weights.safetensors must be the file .*, got another .*; weights .* stale"):
        load_artefact(folder, device=CPU, origin=None)
    (folder / "weights.safetensors").unlink()
    with pytest.raises(ValueError, match="got none"):
        read_manifest(folder)


def side_by_side(tensor):
    """Lays the channels of a pixel side by side in memory, as training does with the kernels of convolutions."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


@pytest.mark.parametrize("channels_last", [True, False], ids=["channels_last", "row_major"])
def test_weights_that_lie_channels_last_are_saved_and_answer_as_eager_does(source, tmp_path, channels_last):
    backbone = {**source.recipe.model["backbone"], "channels_last": channels_last}
    recipe = replace(source.recipe, model={**source.recipe.model, "backbone": backbone})
    weights = {name: side_by_side(tensor) for name, tensor in source.weights.items()}
    assert not weights["backbone.0.body.conv1.weight"].is_contiguous()
    export(Source(recipe, weights, source.weights_hash), tmp_path)
    loaded = load_artefact(tmp_path, device=CPU, origin=source)._program._module
    eager = build_module(
        Source(recipe, source.weights, source.weights_hash),
        precision=Precision(torch.float32, False),
        backend="reference",
        fused=True,
        device=CPU,
        traced=False,
    )
    kernels = [dict(module.named_parameters())["model.backbone.0.body.conv1.weight"] for module in (loaded, eager)]
    assert kernels[0].stride() == kernels[1].stride()
    assert kernels[0].is_contiguous() is not channels_last
    for inputs in contrasting_inputs((64, 64), 1):
        assert all(torch.equal(one, other) for one, other in zip(loaded(*inputs), eager(*inputs), strict=True))


class CrashingPackages(AotiFormat):
    """Packages whose compiled code reads from address 0 when it is loaded."""

    def write_packages(self, module, buckets, batch_size, folder):
        code, library, metadata = (folder.parent / f"crash.wrapper{end}" for end in (".cpp", ".so", "_metadata.json"))
        code.write_text("__attribute__((constructor)) void crash() { *(volatile int *)0; }")
        metadata.write_text(json.dumps({"AOTI_DEVICE_KEY": "cpu"}))
        subprocess.run(["g++", "-shared", code, "-o", library], check=True)
        for bucket in buckets:
            package_aoti(str(folder / program_name(bucket, self.name)), list(map(str, (code, library, metadata))))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_program_that_crashes_is_named_and_leaves_no_artefact(folder, source):
    message = r"detector_64x64.pt2 must load and answer .* got SIGSEGV \(see '.*detector_64x64.log'\); set op="
    with pytest.raises(ValueError, match=message):
        export(source, folder, CrashingPackages(device="cpu", inductor={}))
    assert "in aoti_load_package" in (folder / "detector_64x64.log").read_text()
    with pytest.raises(ValueError, match=r"artefact must be a folder with manifest\.json"):
        load_artefact(folder, device=CPU, origin=source)
    export(source, folder)
    assert {path.name for path in folder.iterdir()} == {MANIFEST, WEIGHTS_FILE}


def test_an_artefact_of_an_earlier_checkpoint_is_stale(folder, source):
    later = Source(source.recipe, source.weights, "f" * 32)
    with pytest.raises(ValueError, match="it is stale, export the checkpoint anew"):
        check_origin(read_manifest(folder), later)


def test_a_folder_without_a_manifest_is_no_artefact(tmp_path):
    with pytest.raises(ValueError, match=r"must be a folder with manifest.json"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(ValueError, match="manifest must be JSON"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"manifest must be JSON, got .*manifest.json"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text("[]")
    with pytest.raises(ValueError, match="manifest must be a JSON object, got a list"):
        read_manifest(tmp_path)


def test_another_gpu_is_refused(folder, monkeypatch):
    monkeypatch.setattr(artefact, "architecture_of", lambda device: "sm_90")
    with pytest.raises(ValueError, match="got sm_90; export on this machine"):
        check_machine(read_manifest(folder), CPU)


def test_an_export_replaces_an_artefact_and_nothing_else(folder, source):
    export(source, folder)
    (folder / "thesis.txt").write_text("text")
    with pytest.raises(ValueError, match=r"out must be a new folder or an artefact, got .* with thesis.txt"):
        export(source, folder)
    assert (folder / "thesis.txt").read_text() == "text"


@pytest.mark.parametrize("name", ["weights.pth", "detector_notes.txt", "detector_64x64.onnx.bak"])
def test_files_named_nearly_like_those_of_an_artefact_stay(source, tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=f"out must be a new folder or an artefact, got .* with {name}"):
        export(source, tmp_path)
    assert (tmp_path / name).read_text() == "mine"
    with pytest.raises(ValueError, match="out must be a folder, got the file"):
        export(source, tmp_path / name)


def measured(**changes):
    difference = Difference(
        **({"score": 0.0, "box_px": 0.0, "compared": 9, "unpaired": 0, "bitwise_equal": True} | changes)
    )
    return Measurement((64, 64), difference, depends_on_input=True)


@pytest.mark.parametrize("changes", [{"score": 2e-3}, {"box_px": 0.2}, {"unpaired": 1}])
def test_a_program_beyond_the_tolerance_is_not_certified(changes):
    with pytest.raises(ValueError, match=r"the program of bucket 64x64 must keep Tolerance"):
        make_certificate(TOLERANCE, [measured(), measured(**changes, bitwise_equal=False)], needs_equality=False)


def test_a_graph_must_equal_eager_and_any_program_look_at_its_input():
    with pytest.raises(ValueError, match="must equal the eager detector bit for bit"):
        make_certificate(TOLERANCE, [measured(score=1e-9, bitwise_equal=False)], needs_equality=True)
    with pytest.raises(ValueError, match="must depend on its input"):
        make_certificate(TOLERANCE, [Measurement((64, 64), measured().difference, False)], needs_equality=False)


def test_a_failed_export_leaves_nothing_that_loads(source, tmp_path):
    with pytest.raises(ValueError, match="must keep"):
        export(source, tmp_path / "artefact", tolerance=Tolerance(score=-1.0, box_px=0.1, min_score=0.0))
    with pytest.raises(ValueError, match="must be a folder with"):
        read_manifest(tmp_path / "artefact")
