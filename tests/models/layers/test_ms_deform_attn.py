import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import msda_op
from models.layers.ms_deform_attn import MSDeformAttn
from msda_op import call_memory
from parity.tolerances import GRADIENT, OUTPUT

SHAPES = ((3, 5), (2, 2))
NUM_PIXELS = 19


class OpCounter(TorchDispatchMode):
    """Counts calls of operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def build(**overrides: object) -> MSDeformAttn:
    settings = {"d_model": 16, "num_heads": 4, "num_levels": 2, "num_points": 3, "backend": "reference", "fused": True}
    return MSDeformAttn(**settings | overrides)


def randomized(fused: bool = True) -> MSDeformAttn:
    attention = build(fused=fused)
    torch.manual_seed(0)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return attention


def inputs(reference_size: int = 2) -> tuple[Tensor, Tensor, Tensor, tuple[tuple[int, int], ...], Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, features = torch.randn(2, 7, 16, generator=generator), torch.randn(2, NUM_PIXELS, 16, generator=generator)
    reference_points = torch.rand(2, 7, 2, reference_size, generator=generator)
    return query, reference_points, features, SHAPES, torch.zeros(2, NUM_PIXELS, dtype=torch.bool)


def test_offsets_at_initialisation() -> None:
    attention = build(num_heads=8)
    assert attention.sampling_offsets.weight.abs().max() == 0
    bias = attention.sampling_offsets.bias.view(8, 2, 3, 2)
    for head in range(8):
        x, y = math.cos(2 * math.pi * head / 8), math.sin(2 * math.pi * head / 8)
        scale = max(abs(x), abs(y))
        for point in range(3):
            expected = torch.tensor([x / scale, y / scale]) * (point + 1)
            torch.testing.assert_close(bias[head, :, point], expected.expand(2, 2), atol=1e-5, rtol=0)


def test_weights_at_initialisation_are_equal_and_projections_xavier(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = build(fused=False)
    seen = {}

    def record(value: Tensor, shapes: Any, starts: None, locations: Tensor, weights: Tensor, backend: str) -> Tensor:
        seen["weights"] = weights
        return torch.zeros(*locations.shape[:2], 16)

    monkeypatch.setattr(msda_op, "ms_deform_attn", record)
    attention(*inputs())
    torch.testing.assert_close(seen["weights"], torch.full((2, 7, 4, 2, 3), 1 / 6))
    assert attention.attention_weights.weight.abs().max() == 0
    assert attention.attention_weights.bias.abs().max() == 0
    for projection in (attention.value_proj, attention.output_proj):
        bound = math.sqrt(6 / 32)
        assert 0.8 * bound < projection.weight.abs().max() <= bound
        assert projection.bias.abs().max() == 0


def test_padded_values_count_as_zero() -> None:
    attention = randomized()
    query, reference_points, features, shapes, padding_mask = inputs()
    padding_mask[:, 4] = True
    output = attention(query, reference_points, features, shapes, padding_mask)
    changed = features.clone()
    changed[:, 4] = 100
    torch.testing.assert_close(attention(query, reference_points, changed, shapes, padding_mask), output)
    unmasked = attention(query, reference_points, changed, shapes, torch.zeros_like(padding_mask))
    assert (unmasked - output).abs().max() > 0.1


@pytest.mark.parametrize("reference_size", [2, 4])
def test_locations_and_weights_stay_float32_under_autocast(
    reference_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}
    original = msda_op.ms_deform_attn

    def record(value: Tensor, shapes: Any, starts: None, locations: Tensor, weights: Tensor, backend: str) -> Tensor:
        seen.update(value=value.dtype, locations=locations.dtype, weights=weights.dtype)
        return original(value, shapes, starts, locations, weights, backend=backend)

    monkeypatch.setattr(msda_op, "ms_deform_attn", record)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = randomized(fused=False)(*inputs(reference_size))
    assert output.shape == (2, 7, 16)
    assert seen == {"value": torch.bfloat16, "locations": torch.float32, "weights": torch.float32}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("reference_size", [2, 4])
def test_fused_op_gives_the_same_results(reference_size: int, autocast: bool) -> None:
    results = []
    for fused in (True, False):
        attention, tensors = randomized(fused), inputs(reference_size)
        tensors[1].requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            output = attention(*tensors)
        output.float().square().sum().backward()
        results.append([output, tensors[1].grad, *(parameter.grad for parameter in attention.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_fused_op_gets_offsets_and_logits_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    original = msda_op.fused_ms_deform_attn

    def record(value: Tensor, shapes: Any, starts: None, *others: Tensor, backend: str) -> Tensor:
        seen["dtypes"] = [tensor.dtype for tensor in (value, *others)]
        return original(value, shapes, starts, *others, backend=backend)

    monkeypatch.setattr(msda_op, "fused_ms_deform_attn", record)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        randomized()(*inputs())
    assert seen["dtypes"] == [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]


def differentiate(backend: str, dtype: torch.dtype, autocast: bool, device: str) -> list[Tensor]:
    attention = randomized().to(device, dtype)
    attention.backend = backend
    query, reference_points, features, shapes, padding_mask = inputs()
    query, features = (tensor.to(device, dtype).requires_grad_() for tensor in (query, features))
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        output = attention(query, reference_points.to(device), features, shapes, padding_mask.to(device))
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    output.backward(upstream.to(device, output.dtype))
    return [output, *(tensor.grad for tensor in (query, features, *attention.parameters()) if tensor.grad is not None)]


@pytest.mark.parametrize("autocast", [False, True])
def test_triton_kernels_get_the_parts_of_the_joint_product(autocast: bool) -> None:
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    expected = differentiate("reference", torch.float64, False, device)
    competitor, actual = (
        differentiate(backend, torch.float32, autocast, device) for backend in ("reference", "triton")
    )
    assert len(actual) == len(competitor) == len(expected) == 11
    rounded = torch.bfloat16 if autocast else torch.float32
    for index, (found, other, exact) in enumerate(zip(actual, competitor, expected, strict=True)):
        error, allowed = ((tensor.double() - exact).abs().max().item() for tensor in (found, other))
        bound = GRADIENT if index else OUTPUT
        assert error <= bound.limit(allowed, exact.abs().max().item(), rounded)


def test_the_op_gets_parts_of_the_product_and_contiguous_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    original = msda_op.fused_ms_deform_attn

    def record(value: Tensor, shapes: Any, starts: None, *others: Tensor, backend: str) -> Tensor:
        seen.extend((value, *others))
        return original(value, shapes, starts, *others, backend=backend)

    monkeypatch.setattr(msda_op, "fused_ms_deform_attn", record)
    randomized()(*inputs())
    value, reference_points, offsets, logits = seen
    assert value.is_contiguous()
    assert reference_points.is_contiguous()
    assert (offsets.shape, logits.shape) == ((2, 7, 4, 2, 3, 2), (2, 7, 4, 2, 3))
    assert offsets.stride(1) == logits.stride(1) == 72
    assert offsets.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
    assert logits.storage_offset() == 48


@pytest.mark.parametrize("joint", [True, False])
def test_gradients_of_the_product_are_written_where_it_wants_them(joint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from msda_op import eager
    from msda_op.triton import launch
    from msda_op.triton.hopper.support import CAPABILITY

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and torch.cuda.get_device_capability() != CAPABILITY:
        pytest.skip("made for compute capability 9.0")
    monkeypatch.setattr(launch, "_capability_of", lambda tensor: CAPABILITY)
    monkeypatch.setattr(call_memory, "_ways", {})
    if not joint:
        monkeypatch.setattr(eager, "are_joint", lambda *parts: False)
    attention = MSDeformAttn(d_model=64, num_heads=2, num_levels=2, num_points=4, backend="triton", fused=True)
    generator = torch.Generator().manual_seed(0)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    attention.to(device)
    query, features = torch.randn(2, 7, 64, generator=generator), torch.randn(2, NUM_PIXELS, 64, generator=generator)
    reference_points, mask = torch.rand(2, 7, 2, 2, generator=generator), torch.zeros(2, NUM_PIXELS, dtype=torch.bool)
    query, *rest = (tensor.to(device) for tensor in (query, reference_points, features, mask))
    query.requires_grad_()
    gradients = []
    for backend in ("triton", "reference"):
        attention.backend = backend
        output = attention(query, *rest[:2], SHAPES, rest[2])
        with OpCounter() as counter:
            gradients += torch.autograd.grad(output.square().sum(), query)
        if backend == "triton":
            assert counter.counts.get("cat", 0) == (0 if joint else 1)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


def test_every_parameter_and_input_gets_a_gradient() -> None:
    attention = randomized()
    query, reference_points, features, shapes, padding_mask = inputs()
    for tensor in (query, reference_points, features):
        tensor.requires_grad_()
    output = attention(query, reference_points, features, shapes, padding_mask)
    output.backward(torch.randn_like(output))
    for tensor in (query, reference_points, features, *attention.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"d_model": 18}, "d_model must be a multiple of num_heads=4, got 18"),
        ({"backend": "trition"}, "backend must be one of auto, triton, reference, cuda, got 'trition'"),
    ],
)
def test_wrong_settings_are_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**overrides)
