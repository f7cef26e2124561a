"""Tensors of a call as the kernels take them: rows that lie apart stay, everything else is copied."""

import pytest
import torch
from torch import Tensor

from msda_op.triton.hopper.call import align_rows, are_joint, empty_parts, prepare_call, row_stride

B, Q, M, L, K = 2, 5, 2, 2, 4
HEAD, ROW = L * K, M * L * K


def parts_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    offsets, logits = rows.split((2 * ROW, ROW), dim=-1)
    return offsets.view(*rows.shape[:2], M, L, K, 2), logits.view(*rows.shape[:2], M, L, K)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(B, Q), (1, Q), (B, 1), (1, 1)])
def test_parts_of_a_product_stay_where_they_are(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    offsets, logits = parts_of(torch.rand(*sizes, 3 * ROW).to(dtype))
    assert align_rows(offsets, 2) is offsets
    assert align_rows(logits, HEAD) is logits
    if sizes != (1, 1):  # whose only row is contiguous
        assert row_stride(offsets) == row_stride(logits) == 3 * ROW
        assert are_joint(offsets, logits)


def test_kernels_are_told_the_distance_of_rows() -> None:
    value, tables = torch.rand(B, 6, M, 32), (torch.tensor(((2, 2), (1, 2))), torch.tensor((0, 4)))
    offsets, logits = parts_of(torch.rand(B, Q, 3 * ROW))
    reference = torch.rand(B, Q, L, 2)
    for given, distances in (
        ((offsets, logits), (3 * ROW, 3 * M)),
        ((offsets.contiguous(), logits.contiguous()), (2 * ROW, M)),
    ):
        call = prepare_call(value, tables, reference, *given, "BLNC", True)
        assert (call.samples["OFFSET_STRIDE"], call.samples["WEIGHT_HEADS"]) == distances


def test_what_kernels_cannot_read_is_copied() -> None:
    rows = torch.rand(B, Q, 3 * ROW)
    offsets, logits = parts_of(rows)
    skewed = torch.rand(B * Q * 3 * ROW + 1)[1:].view(B, Q, 3 * ROW)
    odd = torch.rand(B, Q, 3 * ROW + 1)[..., : 3 * ROW]
    for tensor, unit in (
        (parts_of(skewed)[0], 2),  # starts at 4 bytes
        (parts_of(odd)[0], 2),  # pairs would start at odd elements
        (parts_of(odd)[1], HEAD),
        (offsets.transpose(2, 3), 2),
        (logits[:, ::2, :, :, ::2], HEAD),
        (torch.rand(Q, B, 3 * ROW).transpose(0, 1)[..., :ROW].unflatten(-1, (M, L, K)), HEAD),  # items between rows
        (offsets[:, :1].expand(-1, Q, -1, -1, -1, -1), 2),
        (torch.rand(1, Q, 2**14)[..., :ROW].unflatten(-1, (M, L, K)), HEAD),  # too far apart to count in int32
    ):
        copied = align_rows(tensor, unit)
        assert copied.is_contiguous()
        assert copied.data_ptr() != tensor.data_ptr()
        assert torch.equal(copied, tensor)


def test_only_parts_of_rows_of_both_are_joint() -> None:
    offsets, logits = parts_of(torch.rand(B, Q, 3 * ROW))
    assert not are_joint(offsets.contiguous(), logits)
    assert not are_joint(offsets, logits.contiguous())
    assert not are_joint(offsets.half(), logits)
    wider = torch.rand(B, Q, 4 * ROW)
    assert not are_joint(*parts_of(wider[..., : 3 * ROW]))


def test_empty_parts_fill_one_tensor() -> None:
    offsets, logits = parts_of(torch.rand(B, Q, 3 * ROW).bfloat16())
    grad_offsets, grad_logits = empty_parts(offsets, logits)
    assert grad_offsets.untyped_storage().data_ptr() == grad_logits.untyped_storage().data_ptr()
    assert grad_offsets.untyped_storage().nbytes() == 2 * B * Q * 3 * ROW
    grad_offsets.copy_(offsets)
    grad_logits.copy_(logits)
    assert torch.equal(grad_offsets, offsets)
    assert torch.equal(grad_logits, logits)
    assert are_joint(grad_offsets, grad_logits)
