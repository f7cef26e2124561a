"""What the kernels compile to on sm_90: the instructions they are made for, no spills. Needs no GPU."""

import json
import os
import re
import subprocess
import sys

import pytest

# Runs without the interpreter, which replaces the kernels when Triton is imported.
COMPILE = """
import json, re, subprocess, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from msda_op.triton.hopper.backward import backward_kernel
from msda_op.triton.hopper.buckets import count_kernel, plan_kernel, scan_kernel, seat_kernel
from msda_op.triton.hopper.deterministic import sort_kernel
from msda_op.triton.hopper.forward import forward_kernel
from msda_op.triton.hopper.reduce import reduce_kernel
from msda_op.triton.hopper.tuning import FLOAT32_REGISTERS, LAUNCH_SHAPES, REDUCE_REGISTERS
from msda_op.triton.hopper.tuning import THIN_BOX_REGISTERS, THIN_REGISTERS

tools = Path(triton.__file__).parent / "backends/nvidia/bin"
report = {}


def compile_kernel(name, kernel, types, warps=1, registers=None, **constants):
    integers = ("num_queries", "batch_stride", "head_stride", "sector_bits", "capacity")
    integers += ("bound", "programs", "colour", "level_samples", "first_plane", "num_parts")
    tables = ("bins", "windows", "counters", "starts", "records")
    types = dict.fromkeys(integers, "i32") | dict.fromkeys(tables, "*i32") | {"places": "*fp32"} | types
    types = dict.fromkeys(("spatial_shapes", "level_start_index"), "*i64") | types
    signature = {name: types.get(name) or "constexpr" for name in kernel.arg_names}
    constants = {name: constants.get(name) for name in kernel.arg_names if signature[name] == "constexpr"}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "maxnreg": registers},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        options = dict(capture_output=True, text=True, check=True)
        usage = subprocess.run([tools / "cuobjdump", "-res-usage", file.name], **options).stdout
        sass = subprocess.run([tools / "nvdisasm", "-c", file.name], **options).stdout
    report[name] = {
        "ptx": compiled.asm["ptx"],
        "stack": int(re.search(r"STACK:([0-9]+)", usage)[1]),
        "sass": re.findall(r"/[*][0-9a-f]{4,5}[*]/ +(?:@!?U?P[0-9] +)?([A-Z][A-Z0-9_.]+)", sass),
    }


sizes = dict(M=8, D=32, L=4, K=4, PIXEL_STRIDE=256, THIN=False)
dense = dict(OFFSET_STRIDE=256, WEIGHT_HEADS=8, JOINT=False)
joint = dict(OFFSET_STRIDE=384, WEIGHT_HEADS=24, JOINT=True)
calls = [("bf16", 0, "few"), ("bf16", 0, "some"), ("bf16", 0, "many"), ("bf16", 2, "few"), ("bf16", 2, "many")]
calls += [("bf16", 4, "many"), ("fp16", 0, "many"), ("fp16", 2, "few"), ("fp16", 2, "many")]
calls += [("fp32", 0, "few"), ("fp32", 0, "many"), ("fp32", 2, "many")]
for dtype, reference, regime in calls:
    types = dict.fromkeys(("value", "weights", "output", "grad_output", "grad_weights"), "*" + dtype)
    types |= {"offsets": "*" + dtype, "grad_offsets": "*" + dtype} if reference else {"grad_locations": "*fp32"}
    types["grad_value"] = "*fp32"
    label = f"{dtype} {reference} {regime}"
    strides = joint if reference else dense
    shape = LAUNCH_SHAPES[90, "forward", regime]
    launch = dict(WARPS=shape.warps, ITERATIONS=shape.iterations, REFERENCE=reference, **strides, **sizes)
    nothing = types | dict.fromkeys(("bins", "counters"))
    name = f"forward {label}"
    compile_kernel(name, forward_kernel, nothing, shape.warps, shape.registers, COUNT=False, **launch)
    if regime == "many":
        name = f"counting {label}"
        compile_kernel(name, forward_kernel, types, shape.warps, shape.registers, COUNT=True, **launch)
    shape = LAUNCH_SHAPES[90, "fused backward" if reference else "backward", regime]
    launch = dict(WARPS=shape.warps, ITERATIONS=shape.iterations, REFERENCE=reference, **strides, **sizes)
    if regime == "many":
        scatter = "records"
        count = LAUNCH_SHAPES[90, "count", regime]
        launch |= dict(WARPS=count.warps, ITERATIONS=count.iterations)
        compile_kernel("count " + label, count_kernel, types, count.warps, count.registers, **launch)
        launch |= dict(WARPS=shape.warps, ITERATIONS=shape.iterations)
    else:
        scatter = "atomics"
        types |= dict.fromkeys(("bins", "counters", "records"))
    name = f"{scatter} {label}"
    registers = FLOAT32_REGISTERS if dtype == "fp32" and scatter == "records" else shape.registers
    compile_kernel(name, backward_kernel, types, shape.warps, registers, SCATTER=scatter, **launch)
    if shape.registers is not None and dtype == "bf16":
        launch["THIN"], name = True, f"records of thin levels {label}"
        registers = THIN_BOX_REGISTERS if reference == 4 else THIN_REGISTERS
        compile_kernel(name, backward_kernel, types, shape.warps, registers, SCATTER=scatter, **launch)
for dtype in ("bf16", "fp16", "fp32"):
    types = {"grad_output": "*" + dtype, "target": "*fp32"}
    for stage in ("buckets",) if dtype == "fp32" else ("buckets", "parts", "colour"):
        types["parts"] = None if stage == "buckets" else "*fp32"
        name = f"reduce {dtype} {stage}"
        compile_kernel(name, reduce_kernel, types, 1, REDUCE_REGISTERS[dtype == "fp32"], STAGE=stage, **sizes)
compile_kernel("plan", plan_kernel, {}, 2, LIMIT=768, BLOCK=64, **sizes)
compile_kernel("scan", scan_kernel, {}, 4, BLOCK=1024, **sizes)
compile_kernel("seat", seat_kernel, {}, 4, BLOCK=1024, **sizes)
compile_kernel("sort", sort_kernel, {"records": "*i64"}, BLOCK=512, **sizes)
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    finished = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def count(kernel: dict, prefix: str) -> int:
    return sum(instruction.startswith(prefix) for instruction in kernel["sass"])


def test_nothing_spills(report: dict[str, dict]) -> None:
    assert len(report) == 52
    assert {name: kernel["stack"] for name, kernel in report.items() if kernel["stack"]} == {}
    assert not any(count(kernel, "STL") + count(kernel, "LDL") for kernel in report.values())


def test_atomics_are_native_relaxed_and_wide(report: dict[str, dict]) -> None:
    for name, kernel in report.items():
        atomics = set(re.findall(r"\b(?:atom|red)\.[\w.:]*(?:add|cas|exch)[\w.]*", kernel["ptx"]))
        assert all("relaxed" in atomic for atomic in atomics), name
        floats = {atomic for atomic in atomics if "f32" in atomic}
        adds_rows = name.startswith(("atomics", "reduce")) and "parts" not in name
        assert floats == ({"red.relaxed.gpu.global.add.v4.f32"} if adds_rows else set()), name
        counts = name.startswith(("records", "count"))  # and "counting"
        assert {atomic.rsplit(".", 1)[-1] for atomic in atomics - floats} <= ({"s32", "u32"} if counts else set()), name
        assert count(kernel, "ATOMG") == int(name.startswith("records")), name


def test_gathers_are_sixteen_wide_loads_and_dot_products_are_on_tensor_cores(report: dict[str, dict]) -> None:
    for name, kernel in report.items():
        gathers = count(kernel, "LDG.E.128.CONSTANT")
        if "fp32" in name:
            continue
        if name.startswith(("forward", "records", "atomics")):
            boxes = (2 if "many" in name else 1) if " 4 " in name else 0
            assert gathers == 16 + boxes, name
            assert count(kernel, "HMMA") == (0 if name.startswith("forward") else 16), name
        if name.startswith("forward"):
            assert count(kernel, "SHFL") == (31 if re.search(" [24] ", name) else 23), name
            assert count(kernel, "BAR") == 0, name
        if name.startswith("reduce"):
            assert (count(kernel, "MOVM"), count(kernel, "HMMA")) == (16, 16), name
            assert gathers == (12 if "colour" in name else 4), name  # eight of a part


def test_float32_is_exact_arithmetic_on_wide_loads(report: dict[str, dict]) -> None:
    for name, kernel in report.items():
        if "fp32" not in name or name.startswith("count"):
            continue
        gathers = count(kernel, "LDG.E.128.CONSTANT")
        if name.startswith("reduce"):
            assert (count(kernel, "HMMA.1688.F32.TF32"), count(kernel, "HMMA"), count(kernel, "MOVM")) == (24, 24, 0)
        else:
            assert count(kernel, "HMMA") == 0, name
            assert gathers >= 32, name
        if name.startswith("forward"):
            assert gathers == 32, name
            assert count(kernel, "SHFL") == (60 if " 2 " in name else 52), name


def test_loads_of_the_backward_leave_before_their_first_use(report: dict[str, dict]) -> None:
    for name in [name for name in report if name.startswith("records") and "fp32" not in name]:
        sass = report[name]["sass"]
        first_use = next(index for index, instruction in enumerate(sass) if instruction.startswith("HMMA"))
        atomic = next(index for index, instruction in enumerate(sass) if instruction.startswith("ATOMG"))
        assert sum(instruction.startswith("LDG.E.128") for instruction in sass[atomic:first_use]) >= 6


def test_loads_of_the_float32_reduction_leave_before_their_first_use(report: dict[str, dict]) -> None:
    """Those of a step's gradient rows and of the next records; where each waits for its turn, a step takes thrice."""
    sass = report["reduce fp32 buckets"]["sass"]
    gathers = [index for index, instruction in enumerate(sass) if instruction.startswith("LDG.E.128")]
    products = [index for index, instruction in enumerate(sass) if instruction.startswith("HMMA")]
    assert gathers[-1] < products[2]
