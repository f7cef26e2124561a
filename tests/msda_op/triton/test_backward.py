"""What the kernels compile to on every architecture: native atomics, in relaxed order. Needs no GPU."""

import json
import os
import re
import subprocess
import sys

import pytest

ARCHITECTURES = (80, 89, 90, 100)

# Runs without the interpreter, which replaces the kernels when Triton is imported. argv: compute capability.
COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from msda_op.triton.backward import backward_kernel
from msda_op.triton.forward import forward_kernel
from msda_op.triton.launch import choose_tile

tile = choose_tile(head_dim=32, num_points=4)
sizes = dict(M=8, D=32, L=4, K=4, BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k, BLOCK_D=tile.block_d)
ptx = {}
for kernel in (forward_kernel, backward_kernel):
    for dtype in ("fp32", "fp16", "bf16"):
        types = dict.fromkeys(("value", "attention_weights", "output", "grad_output", "grad_weights"), "*" + dtype)
        types |= dict.fromkeys(("sampling_locations", "grad_value", "grad_locations"), "*fp32")
        types |= dict.fromkeys(("spatial_shapes", "level_start_index"), "*i64")
        types |= dict.fromkeys(("num_queries", "value_length"), "i32")
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(kernel.arg_names)
            if signature[name].startswith("*")
        }
        compiled = triton.compile(
            ASTSource(kernel, signature, constexprs=sizes, attrs=aligned),
            target=GPUTarget("cuda", int(sys.argv[1]), 32),
            options={"num_warps": tile.num_warps},
        )
        ptx[kernel.__name__ + " " + dtype] = compiled.asm["ptx"]
print(json.dumps(ptx))
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_atomics_are_native_and_relaxed(architecture: int, tmp_path: os.PathLike) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    finished = subprocess.run(
        [sys.executable, "-c", COMPILE, str(architecture)], env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    variants = json.loads(finished.stdout)
    assert len(variants) == 6
    for name, ptx in variants.items():
        atomics = set(re.findall(r"\b(?:atom|red)\.[\w.:]*(?:add|cas|exch)[\w.]*", ptx))
        if name.startswith("forward"):
            assert atomics == set(), name
            continue
        assert atomics != set(), name
        vector = ".v4" if architecture >= 90 else ""
        for atomic in atomics:
            assert "relaxed" in atomic, (name, atomic)
            assert atomic.endswith(f"add{vector}.f32"), (name, atomic)
