from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from models.deformable_detr import input_projections
from models.layers.group_norm import NormedConvolution, normalise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def make_projection() -> Callable[[], NormedConvolution]:
    def make() -> NormedConvolution:
        torch.manual_seed(0)
        norm = nn.GroupNorm(4, 16)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        return NormedConvolution(nn.Conv2d(8, 16, 1), norm).to(DEVICE)

    return make


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the interpreter run the kernels where there is no GPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr("models.layers.group_norm.can_fuse", lambda x: x.dtype != torch.float64)


def make_maps(channels: int, memory_format: torch.memory_format = torch.channels_last) -> Tensor:
    x = torch.randn(2, channels, 5, 7, generator=torch.Generator().manual_seed(1))
    return x.to(DEVICE).contiguous(memory_format=memory_format)


def is_fused(output: Tensor) -> bool:
    return type(output.grad_fn).__name__ == "_GroupNormBackward"


def test_a_sequence_of_its_parts_has_the_same_state_and_results(
    make_projection: Callable[[], NormedConvolution],
) -> None:
    projection = make_projection()
    projection.fused = False
    sequence = nn.Sequential(nn.Conv2d(8, 16, 1), nn.GroupNorm(4, 16)).to(DEVICE)
    assert list(projection.state_dict()) == list(sequence.state_dict())
    sequence.load_state_dict(projection.state_dict())
    assert torch.equal(projection(make_maps(8)), sequence(make_maps(8)))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("autocast", [False, True])
def test_kernels_normalise_in_the_dtype_of_the_convolution(
    autocast: bool, make_projection: Callable[[], NormedConvolution]
) -> None:
    results = []
    for fused in (True, False):
        projection = make_projection()
        projection.fused = fused
        x = make_maps(8).requires_grad_()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            output = projection(x)
        assert is_fused(output) == fused
        if fused:
            assert output.dtype == (torch.bfloat16 if autocast else torch.float32)
            assert output.is_contiguous(memory_format=torch.channels_last)
        upstream = make_maps(16).to(output.dtype)
        leaves = [x, *projection.parameters()]
        results.append([output.detach(), *torch.autograd.grad(output, leaves, upstream)])
    tolerance = 3e-2 if autocast else 1e-5
    for index, (one, other) in enumerate(zip(*results, strict=True)):
        if index != 3:  # the convolution's bias, of which the norm leaves little but rounding
            torch.testing.assert_close(one.float(), other.float(), atol=tolerance * float(other.abs().max()), rtol=0)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_kernels_do_not_take_is_left_to_the_norm() -> None:
    norm = nn.GroupNorm(4, 16).to(DEVICE)
    assert is_fused(normalise(make_maps(16), norm))
    assert not is_fused(normalise(make_maps(16, torch.contiguous_format), norm))
    assert not is_fused(normalise(make_maps(16).double(), norm.double()))
    assert not is_fused(normalise(make_maps(16), nn.BatchNorm2d(16).to(DEVICE)))
    assert not is_fused(normalise(make_maps(16).requires_grad_(), nn.GroupNorm(4, 16, affine=False)))
    assert normalise(make_maps(16)[:0], nn.GroupNorm(4, 16).to(DEVICE)).shape == (0, 16, 5, 7)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_norm_of_another_kind_in_its_place_normalises_by_itself(
    make_projection: Callable[[], NormedConvolution],
) -> None:
    class Doubling(nn.GroupNorm):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * input

    projection = make_projection()
    features = projection[0](make_maps(8))
    for other, factor in ((nn.Identity(), 1), (Doubling(4, 16), 2)):
        projection[1] = other
        assert torch.equal(projection(make_maps(8)), factor * features)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_every_level_of_the_neck_is_fused() -> None:
    projections = input_projections((8, 16), 32, 4).to(DEVICE)
    maps = [make_maps(8), make_maps(16)]
    outputs = [project(level) for project, level in zip(projections[:2], maps, strict=True)]
    outputs.append(projections[2](maps[-1]))
    outputs.append(projections[3](outputs[-1]))
    assert all(is_fused(output) for output in outputs)
    tokens = torch.cat([output.flatten(2).transpose(1, 2) for output in outputs], dim=1)
    tokens.square().sum().backward()
    for projection in projections:
        assert all(parameter.grad.isfinite().all() for parameter in projection.parameters())
        assert projection[1].weight.grad.abs().max() > 0


@pytest.mark.gpu
def test_the_projection_fuses_on_a_gpu(make_projection: Callable[[], NormedConvolution]) -> None:
    projection = make_projection().to(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16):
        output = projection(make_maps(8))
    assert is_fused(output)
    assert output.dtype == torch.bfloat16
    compiled = torch.compile(projection, backend="eager")
    assert not is_fused(compiled(make_maps(8)))
