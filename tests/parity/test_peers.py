"""How peers are found and called; stand-ins take the place of their packages."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from msda_op.levels import read_shapes
from msda_op.reference import ms_deform_attn_reference
from parity import peers
from parity.cases import INPUT_NAMES
from parity.comparisons import compare_op
from parity.peers import find_peers, own_implementations
from parity.presets import Preset, make_preset_inputs

PRESET = Preset("tiny", ((4, 6), (2, 3)), num_queries=7, num_heads=2, head_dim=4, num_points=2)
CPU = torch.device("cpu")


def attend(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    assert starts.tolist() == [0, 24]
    return ms_deform_attn_reference(value, read_shapes(shapes), locations, weights)


def attend_in_float32(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    assert value.dtype == weights.dtype == torch.float32
    return attend(value, shapes, starts, locations, weights)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with the interfaces of the peers, each computing by the reference."""

    def msda(*tensors: Tensor, backend: str, fp32acc: bool) -> Tensor:
        *others, weights = tensors
        assert backend == "triton"
        assert weights.shape[3:] == (4,)
        return attend(*others, weights.unflatten(3, (2, 2)))

    def apply(*arguments: Tensor | int) -> Tensor:
        *tensors, step = arguments
        assert tensors[0].shape[0] % step == 0
        return attend_in_float32(*tensors)

    functions = {
        "deformops.registry": {"msda": msda, "Backend": SimpleNamespace(TRITON="triton")},
        "mmcv.ops.multi_scale_deform_attn": {"MultiScaleDeformableAttnFunction": SimpleNamespace(apply=apply)},
        "msda_triton": {"multi_scale_deformable_attention": attend},
    }
    for path, members in functions.items():
        module = ModuleType(path)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, path, module)
    installed = ("deformops", "mmcv", "msda_triton")
    monkeypatch.setattr(peers, "find_spec", lambda name: object() if name in installed else None)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_found_peers_are_called_as_they_want_and_are_accurate(dtype: torch.dtype) -> None:
    found, missing = find_peers()
    assert [peer.name for peer in found] == [
        "deformops, float32 accumulator",
        "deformops, native accumulator",
        "mmcv",
        "msda_triton",
    ]
    assert missing == {"torch_ms_deform_attn or MultiScaleDeformableAttention": "not installed"}
    inputs = make_preset_inputs(PRESET, 3, dtype, CPU, seed=0)
    for peer in found:
        # Locations rounded to bfloat16 are wrong, and the comparison must say so.
        expected = dtype == torch.float32 or peer.name != "msda_triton"
        results = compare_op(peer.op, inputs, INPUT_NAMES)
        assert all(result.passed for result in results) == expected, (peer.name, results)


def test_a_package_that_cannot_be_imported_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> ModuleType:
        raise ImportError(f"undefined symbol in {name}")

    monkeypatch.setattr(peers, "find_spec", lambda name: object() if name == "mmcv" else None)
    monkeypatch.setattr(peers, "import_module", fail)
    found, missing = find_peers()
    assert found == []
    assert missing["mmcv"] == "cannot be imported: undefined symbol in mmcv.ops.multi_scale_deform_attn"
    assert missing["deformops"] == "not installed"


def test_own_implementations_are_accurate_and_ours_comes_first() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ours, in_order, reference = own_implementations()
    assert ours.name == "msda_op triton"
    inputs = make_preset_inputs(PRESET, 2, torch.float32, device, seed=0)
    for peer in (ours, in_order, reference):
        assert all(result.passed for result in compare_op(peer.op, inputs, INPUT_NAMES))
