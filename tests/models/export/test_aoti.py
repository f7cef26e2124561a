"""Compiled packages: they answer as eager does, and run without this project's code."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest
import torch
from torch import nn

from models.export.aoti import AotiFormat, has_library, link_options
from models.export.build import export_detector
from models.export.certificate import Tolerance, contrasting_inputs, measure
from models.export.inference import InferenceModule
from models.export.predictor import load_artefact
from models.export.recipe import Precision
from models.export.trial import answer_apart
from models.layers.ms_deform_attn import MSDeformAttn
from models.normalization import ImageNormalizer
from models.structures import DetectorOutput

BUCKET = (32, 64)
FP32 = Precision(torch.float32, False)
SOON = {"cpp.vec_isa_ok": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
"""Options for a GPU that spare trials of the CPU's vector instructions, and optimisation of what launches kernels."""
STRANGER = """
import sys, torch
program = torch._inductor.aoti_load_package(sys.argv[1])
saved = torch.load(sys.argv[2])
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = saved["allow_tf32"]
answers = program(*saved["inputs"])
for expected, actual in zip(saved["expected"], answers, strict=True):
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=1e-3, atol=float(sys.argv[3]))
assert not {"models", "msda_op", "coco"} & set(sys.modules)
print("same")
"""


class OneLayer(nn.Module):
    """The least that has the op inside: one strided convolution, one attention, heads. Compiles in half a minute."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Conv2d(3, 16, 8, stride=8)
        self.attention = MSDeformAttn(
            d_model=16, num_heads=2, num_levels=1, num_points=2, backend="reference", fused=True
        )
        nn.init.normal_(self.attention.sampling_offsets.weight, std=0.3)
        self.heads = nn.Linear(16, 3 + 4)

    def forward(self, batch):
        features = self.backbone(batch.images)
        shapes = ((features.shape[2], features.shape[3]),)
        flat = features.flatten(2).transpose(1, 2)
        padding_mask = nn.functional.interpolate(batch.padding_mask[:, None].float(), size=shapes[0]).flatten(1).bool()
        points = torch.full((flat.shape[0], flat.shape[1], 1, 2), 0.5, device=flat.device)
        predicted = self.heads(self.attention(flat, points, flat, shapes, padding_mask))
        return DetectorOutput(predicted[None, ..., :3], predicted[None, ..., 3:].sigmoid(), None)


@pytest.fixture(scope="module")
def static_compiler(tmp_path_factory):
    """Has g++ link the C++ library statically unless it is told otherwise, where it has one to link."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++, which AOTInductor compiles with")
    if not has_library("g++", "libstdc++.a"):
        yield
        return
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "g++"
    links = 'case " $* " in *" -shared "*) set -- "$@" -static-libstdc++;; esac'
    script.write_text(f'#!/bin/sh\n{links}\nexec {shutil.which("g++")} "$@"\n')
    script.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        yield


@pytest.fixture(scope="module")
def compiled(static_compiler, tmp_path_factory):
    torch.manual_seed(0)
    normalizer = ImageNormalizer(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    module = InferenceModule(model=OneLayer(), normalizer=normalizer, top_k=5, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("aoti")
    programs = AotiFormat(device="cpu", inductor={}).compile(module, (BUCKET,), 1, folder)
    return module, programs[BUCKET], folder / "detector_32x64.pt2"


def run_without_this_project(package, inputs, expected, folder, tolerance):
    allow_tf32 = torch.backends.cuda.matmul.allow_tf32  # a switch of the process, not of the package
    torch.save({"inputs": inputs, "expected": expected, "allow_tf32": allow_tf32}, folder / "saved.pt")
    command = [sys.executable, "-I", "-c", STRANGER, str(package), str(folder / "saved.pt"), str(tolerance)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_a_package_answers_as_eager_does(compiled):
    module, program, _ = compiled
    found = measure(program, module, BUCKET, 1, torch.device("cpu"), 0.0)
    assert found.difference.within(Tolerance(score=1e-3, box_px=0.1, min_score=0.0)), found
    assert found.depends_on_input


def test_a_package_runs_without_this_project(compiled, tmp_path):
    module, _, package = compiled
    inputs = contrasting_inputs(BUCKET, 1)[0]
    result = run_without_this_project(package, inputs, module(*inputs), tmp_path, 1e-3)
    assert result.stdout == "same\n", result.stderr
    scores, labels, boxes_xyxy = module(*inputs)
    wrong = run_without_this_project(package, inputs, (scores + 0.1, labels, boxes_xyxy), tmp_path, 1e-3)
    assert wrong.returncode == 1


def test_another_process_gives_the_same_answers(compiled):
    _, program, package = compiled
    inputs = contrasting_inputs(BUCKET, 1)
    answers = answer_apart(package, inputs, torch.device("cpu"))
    for each, other, answer in zip(inputs, reversed(inputs), answers, strict=True):
        assert all(torch.equal(*pair) for pair in zip(program(*each), answer, strict=True))
        assert not torch.equal(program(*other)[0], answer[0])
    assert not package.with_suffix(".log").exists()


@pytest.mark.parametrize(
    "change",
    [lambda images, a, b: (images[..., :-1], a, b), lambda images, a, b: (images.float(), a, b)],
    ids=["shape", "dtype"],
)
def test_other_inputs_are_refused(compiled, change):
    with pytest.raises(ValueError, match="inputs must be"):
        compiled[1](*change(*contrasting_inputs(BUCKET, 1)[0]))


def test_packages_share_the_cpp_library_of_the_process(compiled):
    """Another copy inside crashes where it meets that of PyTorch."""
    with zipfile.ZipFile(compiled[2]) as package:
        (library,) = (package.read(name) for name in package.namelist() if name.endswith(".wrapper.so"))
    assert b"libstdc++.so.6\0" in library


def test_a_compiler_without_the_library_keeps_its_own_way(tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho libstdc++.so.6\n")
    compiler.chmod(0o755)
    assert link_options(str(compiler)) == {}


def test_a_missing_compiler_is_refused():
    nowhere = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with nowhere, pytest.raises(ValueError, match="a C\\+\\+ compiler must be installed"):
        AotiFormat(device="cpu", inductor={}).check(FP32, "reference")


def test_what_cannot_be_compiled_is_refused():
    on_cpu = AotiFormat(device="cpu", inductor={})
    for backend in ("triton", "cuda"):
        with pytest.raises(ValueError, match="op must be triton or reference on a GPU and reference on a CPU"):
            on_cpu.check(FP32, backend)
    with pytest.raises(ValueError, match="precision must be fp32 or bf16 on a CPU"):
        on_cpu.check(Precision(torch.float16, True), "reference")
    on_cpu.check(FP32, "auto")
    with pytest.raises(ValueError, match="device must be auto, cpu or, with a GPU, cuda, got tpu"):
        AotiFormat(device="tpu", inductor={})


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [(FP32, Tolerance(1e-3, 0.1, 0.0)), (Precision(torch.bfloat16, True), Tolerance(5e-2, 8.0, 0.3))],
    ids=["fp32", "bf16"],
)
def test_the_kernels_travel_inside_the_package(source, tmp_path, monkeypatch, precision, tolerance):
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")  # as SOON, for the processes that load
    manifest = export_detector(
        source,
        AotiFormat(device="cuda", inductor=SOON),
        tmp_path / "artefact",
        precision=precision,
        backend="triton",
        fused=True,
        buckets=((64, 128),),
        size_divisor=64,
        batch_size=2,
        tolerance=tolerance,
    )
    assert manifest.architecture.startswith("sm_")
    cuda = torch.device("cuda")
    predictor = load_artefact(tmp_path / "artefact", device=cuda, origin=source)
    inputs = tuple(tensor.cuda() for tensor in contrasting_inputs((64, 128), 2)[0])
    expected = predictor._program(*inputs)
    package = tmp_path / "artefact" / "detector_64x128.pt2"
    result = run_without_this_project(package, inputs, expected, tmp_path, 1e-4)
    assert result.stdout == "same\n", result.stderr
