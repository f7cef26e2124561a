"""Sabotage: a tenth of a pixel in the source of one implementation makes the comparisons fail."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from msda_op import ms_deform_attn, naive, reference
from msda_op.reference import ms_deform_attn_reference
from msda_op.triton import backward, forward, sampling
from parity.cases import DEFAULT_CASES, INPUT_NAMES, make_inputs
from parity.comparisons import compare_op
from parity.tolerances import NAIVE_FLOAT64

CPU = torch.device("cpu")
CASE = DEFAULT_CASES[0]


def load_changed(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """Imports a copy of a module in whose source `old` reads `new`."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert old in source
    copy = folder / "changed.py"
    copy.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("changed", copy)
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    return changed


def distance_to_definition(definition: ModuleType) -> float:
    inputs = make_inputs(CASE, torch.float64, CPU, seed=0)
    arguments = (inputs.value, inputs.spatial_shapes, inputs.sampling_locations, inputs.attention_weights)
    return (definition.ms_deform_attn_naive(*arguments) - ms_deform_attn_reference(*arguments)).abs().max().item()


def test_definition(tmp_path: Path) -> None:
    assert distance_to_definition(naive) <= NAIVE_FLOAT64
    assert distance_to_definition(load_changed(naive, "- 0.5", "- 0.4", tmp_path)) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reference(dtype: torch.dtype, tmp_path: Path) -> None:
    changed = load_changed(reference, "2 * locations - 1", "2 * locations - 0.9", tmp_path)
    results = compare_op(changed.ms_deform_attn_reference, make_inputs(CASE, dtype, CPU, seed=0), INPUT_NAMES)
    assert not any(result.passed for result in results)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels refuse changed device functions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = load_changed(sampling, "- 0.5", "- 0.4", tmp_path)
    monkeypatch.setattr(forward, "locate", changed.locate)
    monkeypatch.setattr(backward, "locate", changed.locate)

    def op(value, shapes, locations, weights):  # type: ignore[no-untyped-def]
        return ms_deform_attn(value, shapes, None, locations, weights, backend="triton")

    results = compare_op(op, make_inputs(CASE, dtype, CPU, seed=0), INPUT_NAMES)
    assert not any(result.passed for result in results)
