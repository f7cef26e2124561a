"""Choice of the backend, and the public function from end to end."""

import pytest
import torch

import msda_op
from msda_op import choose_backend, ms_deform_attn, require_backend
from msda_op.backends import resolve_backend
from msda_op.options import DEFAULT_OPTIONS

SHAPES = ((3, 4), (1, 2))


def op_tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(2, 14, 2, 4, generator=generator).to(dtype)
    return value, torch.rand(2, 5, 2, 2, 3, 2, generator=generator), torch.rand(2, 5, 2, 2, 3, generator=generator)


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cuda", torch.float32, "triton"),
        ("cuda", torch.float16, "triton"),
        ("cuda", torch.bfloat16, "triton"),
        ("cuda", torch.float64, "reference"),
        ("cpu", torch.float32, "reference"),
        ("cpu", torch.bfloat16, "reference"),
    ],
)
def test_auto_follows_device_and_dtype(device: str, dtype: torch.dtype, expected: str) -> None:
    assert choose_backend(torch.device(device), dtype) == expected


def test_unknown_backend_lists_the_right_ones() -> None:
    value, locations, weights = op_tensors()
    with pytest.raises(ValueError, match="backend must be one of auto, triton, reference, cuda, got 'tirton'"):
        ms_deform_attn(value, SHAPES, None, locations, weights, backend="tirton")


def test_backends_that_run_anywhere() -> None:
    require_backend("auto", "cpu")
    require_backend("reference", "cpu")
    require_backend("triton", "cuda")


def test_triton_without_gpu_or_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(RuntimeError, match=r"must run on an NVIDIA GPU, got device type 'cpu'.*TRITON_INTERPRET=1"):
        require_backend("triton", "cpu")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    require_backend("triton", "cpu")


def test_triton_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msda_op.backends._HAS_TRITON", False)
    with pytest.raises(RuntimeError, match="needs the triton package, got none; install it"):
        require_backend("triton", "cuda")


def test_reference_takes_every_form_of_the_level_table() -> None:
    value, locations, weights = op_tensors()
    expected = ms_deform_attn(value, SHAPES, None, locations, weights)
    for shapes, starts in (
        (torch.tensor(SHAPES), torch.tensor([0, 12])),
        (torch.tensor(SHAPES, dtype=torch.int32), torch.tensor([0, 12], dtype=torch.int32)),
        (SHAPES, (0, 12)),
        ([[3, 4], [1, 2]], torch.tensor([0, 12])),
    ):
        assert torch.equal(ms_deform_attn(value, shapes, starts, locations, weights), expected)
    assert expected.shape == (2, 5, 8)


def test_arguments_are_validated_first() -> None:
    value, locations, weights = op_tensors()
    with pytest.raises(ValueError, match="spatial_shapes must add up to S = 14"):
        ms_deform_attn(value, ((3, 4), (1, 1)), None, locations, weights)


def test_float64_value_is_refused_by_name_outside_the_reference() -> None:
    value, locations, weights = op_tensors(torch.float64)
    assert ms_deform_attn(value, SHAPES, None, locations, weights).dtype == torch.float64
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"value must be float32, float16 or bfloat16 for backend 'triton'"):
            ms_deform_attn(value, SHAPES, None, locations, weights, backend="triton")


def test_package_offers_its_public_names() -> None:
    assert all(hasattr(msda_op, name) for name in msda_op.__all__)


@pytest.fixture
def installed_original(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msda_op.compat.require_original_op", lambda device_type: None)


@pytest.mark.usefixtures("installed_original")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"padding_mode": "border"}, r"backend must be 'triton' or 'reference' for options .*padding_mode='border'"),
        ({"value_layout": "BNLC"}, r"backend must be 'triton' or 'reference' for options .*value_layout='BNLC'"),
        ({"deterministic": True}, r"deterministic must be False or None for backend 'cuda'.*pass backend='triton'"),
    ],
)
def test_original_op_refuses_what_it_does_not_have(changes: dict[str, object], message: str) -> None:
    value, locations, weights = op_tensors()
    if "value_layout" in changes:
        value = value.transpose(1, 2)
    with pytest.raises(ValueError, match=message):
        ms_deform_attn(value, SHAPES, None, locations, weights, backend="cuda", **changes)


@pytest.mark.usefixtures("installed_original")
def test_original_op_follows_the_deterministic_mode_of_pytorch() -> None:
    value, _, _ = op_tensors()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match=r"backend must be deterministic under torch\.use_deterministic"):
            resolve_backend("cuda", value, DEFAULT_OPTIONS, None)
        assert resolve_backend("cuda", value, DEFAULT_OPTIONS, False) == "cuda"
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="got 'cuda', whose atomics add in any order"):
            resolve_backend("cuda", value, DEFAULT_OPTIONS, None)
    finally:
        torch.use_deterministic_algorithms(False)
