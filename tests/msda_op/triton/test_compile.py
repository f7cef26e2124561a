"""What the shipped kernels compile to on every architecture: native, relaxed, wide atomics. Needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
ARCHITECTURES = (80, 90, 100)
DTYPES = ("bf16", "fp32")
# With options that the plain kernels take on every architecture.
VARIANTS = r"^encoder (bf16|fp32) border, aligned, head-major, pair first (forward|backward value\+points\+scores)$"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Reports of the check, run as a user would; it leaves the interpreter that this process is in."""
    folder = tmp_path_factory.mktemp("compiled")
    targets = ",".join(map(str, ARCHITECTURES))
    command = [sys.executable, "-m", "scripts.compile_kernels_check", "--targets", targets]
    finished = subprocess.run(
        [*command, "--only", VARIANTS, "--json", str(folder / "reports.json")],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    content = json.loads((folder / "reports.json").read_text())
    assert finished.returncode == any(kernel["problems"] for kernel in content["kernels"]), finished.stderr
    return content["kernels"]


def test_each_variant_is_reported(kernels: list[dict[str, Any]]) -> None:
    assert len(kernels) == len(ARCHITECTURES) * len(DTYPES) * 2
    for architecture in ARCHITECTURES:
        variants = {kernel["variant"] for kernel in kernels if kernel["architecture"] == architecture}
        for dtype in DTYPES:
            for each in ("forward", "backward"):
                assert any(f"encoder {dtype}" in variant and each in variant for variant in variants)


def test_only_the_backward_adds_atomically(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        backward = "backward" in kernel["variant"]
        assert bool(kernel["ptx_atomics"]) == bool(kernel["sass_atomics"]) == backward, kernel


def test_atomics_are_native_relaxed_and_as_wide_as_the_architecture_allows(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        assert [problem for problem in kernel["problems"] if not problem.startswith("spill")] == [], kernel
        width = "x4" if kernel["architecture"] >= 90 else ""
        for atomic in kernel["ptx_atomics"]:
            assert atomic.split(" ", 1)[1] == f"global add f32{width} relaxed gpu", kernel


def test_rows_are_loaded_by_sixteen_bytes(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        assert any("128" in opcode for opcode in kernel["loads"]), kernel


def test_half_precision_does_not_spill(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        if "fp32" not in kernel["variant"]:
            assert kernel["spill_bytes"] == kernel["local_accesses"] == 0, kernel
