"""Each primitive against what its instruction is defined to do: emulations without a GPU, the instructions with one."""

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from msda_op.triton.hopper.primitives import (
    add_floats4,
    allocate_window,
    clear_shared,
    count_bits,
    load_matrices,
    load_words2,
    load_words4,
    lowest_bit,
    match_any,
    multiply_matrices,
    multiply_tensor_floats,
    pack_halves,
    shuffle,
    shuffle_xor,
    store_shared,
    store_words2,
    store_words4,
    synchronize_warp,
    transpose_matrix,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LANES = torch.arange(32)
HALVES = (torch.bfloat16, torch.float16)


def words(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, dtype=torch.int64).int().to(DEVICE)


def halves(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@triton.jit
def copy4_kernel(source, target, limit):
    lane = tl.arange(0, 32)
    a, b, c, d = load_words4(source + lane * 4)
    store_words4(target + lane * 4, a, b, c, d, lane < limit)


@triton.jit
def copy2_kernel(source, target, limit):
    lane = tl.arange(0, 32)
    a, b = load_words2(source + lane * 2)
    store_words2(target + lane * 2, a, b, lane < limit)


@pytest.mark.parametrize(("kernel", "width"), [(copy4_kernel, 4), (copy2_kernel, 2)])
def test_wide_loads_and_stores_keep_order_and_mask(kernel: Callable, width: int) -> None:
    source, target = words(32, width), torch.zeros(32, width, dtype=torch.int32, device=DEVICE)
    kernel[(1,)](source, target, 20, num_warps=1)
    assert torch.equal(target[:20], source[:20])
    assert target[20:].eq(0).all()


@triton.jit
def add4_kernel(target, limit):
    lane = tl.arange(0, 32)
    x = lane.to(tl.float32)
    add_floats4(target + (lane & 1) * 4, x, 2 * x, x + 0.5, x * 0 + 1, lane < limit)


def test_adds_of_lanes_that_meet_all_count() -> None:
    target = torch.ones(2, 4, device=DEVICE)
    add4_kernel[(1,)](target, 10, num_warps=1)
    assert target.tolist() == [[21.0, 41.0, 23.5, 6.0], [26.0, 51.0, 28.5, 6.0]]


@triton.jit
def exchange_kernel(source, sources, shuffled, crossed):
    thread = tl.arange(0, 64)
    x = tl.load(source + thread)
    tl.store(shuffled + thread, shuffle(x, tl.load(sources + thread)))
    tl.store(crossed + thread, shuffle_xor(x, 4))


def test_shuffles_stay_in_their_warp() -> None:
    x, sources = torch.randn(2, 32, device=DEVICE), (words(2, 32) & 31)
    shuffled, crossed = torch.empty_like(x), torch.empty_like(x)
    exchange_kernel[(1,)](x, sources, shuffled, crossed, num_warps=2)
    assert torch.equal(shuffled, x.gather(1, sources.long()))
    assert torch.equal(crossed, x[:, (LANES ^ 4).to(DEVICE)])


@triton.jit
def bits_kernel(source, matched, counted, lowest):
    thread = tl.arange(0, 64)
    x = tl.load(source + thread)
    group = match_any(x)
    tl.store(matched + thread, group)
    tl.store(counted + thread, count_bits(group))
    tl.store(lowest + thread, lowest_bit(group))


def test_match_names_the_equal_lanes_of_the_warp() -> None:
    x = words(2, 32) % 5
    matched, counted, lowest = (torch.empty_like(x) for _ in range(3))
    bits_kernel[(1,)](x, matched, counted, lowest, num_warps=2)
    for warp in range(2):
        for lane in range(32):
            equal = [other for other in range(32) if x[warp, other] == x[warp, lane]]
            assert matched[warp, lane].item() & 0xFFFFFFFF == sum(1 << other for other in equal)
            assert counted[warp, lane] == len(equal)
            assert lowest[warp, lane] == equal[0]


@triton.jit
def pack_kernel(low, high, target, like):
    lane = tl.arange(0, 32)
    tl.store(target + lane, pack_halves(tl.load(low + lane), tl.load(high + lane), like.dtype.element_ty))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_packing_rounds_to_nearest_even_with_the_first_below(dtype: torch.dtype) -> None:
    numbers = torch.randn(32, 2, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    numbers[0, 0] = 1 + torch.finfo(dtype).eps / 2  # halfway: down to even
    numbers[0, 1] = 1 + 1.5 * torch.finfo(dtype).eps  # halfway: up to even
    low, high = numbers.unbind(1)
    target = torch.empty(32, dtype=torch.int32, device=DEVICE)
    pack_kernel[(1,)](low.contiguous(), high.contiguous(), target, numbers.to(dtype), num_warps=1)
    assert torch.equal(target.view(dtype).view(32, 2), numbers.to(dtype))


@triton.jit
def multiply_kernel(a, b, c, target, like):
    lane = tl.arange(0, 32)
    a0, a1, a2, a3 = load_words4(a + lane * 4)
    b0, b1 = load_words2(b + lane * 2)
    c0 = tl.load(c + lane * 4)
    c1 = tl.load(c + lane * 4 + 1)
    c2 = tl.load(c + lane * 4 + 2)
    c3 = tl.load(c + lane * 4 + 3)
    d0, d1, d2, d3 = multiply_matrices(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, like.dtype.element_ty)
    tl.store(target + lane * 4, d0)
    tl.store(target + lane * 4 + 1, d1)
    tl.store(target + lane * 4 + 2, d2)
    tl.store(target + lane * 4 + 3, d3)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_matrix_product_on_its_fragments(dtype: torch.dtype) -> None:
    a, b = halves(16, 16, dtype=dtype), halves(16, 8, dtype=dtype, seed=1)
    c = halves(16, 8, dtype=torch.float32, seed=2)
    # Fragments as the PTX ISA draws them: blocks of 8 x 8 (16-bit A, B) and 8 x 8 (C), lane = row * 4 + column // 2.
    blocks_of_a = a.view(2, 8, 2, 4, 2).permute(1, 3, 2, 0, 4).contiguous()  # row, t, right, lower, pair
    blocks_of_b = b.view(2, 4, 2, 8).permute(3, 1, 0, 2).contiguous()  # column, t, lower, pair
    blocks_of_c = c.view(2, 8, 4, 2).permute(1, 2, 0, 3).contiguous()  # row, t, lower, pair
    target = torch.empty(8, 4, 2, 2, device=DEVICE)
    multiply_kernel[(1,)](
        blocks_of_a.view(torch.int32), blocks_of_b.view(torch.int32), blocks_of_c, target, a, num_warps=1
    )
    actual = target.permute(2, 0, 1, 3).reshape(16, 8)
    torch.testing.assert_close(actual.double(), a.double() @ b.double() + c.double(), rtol=0, atol=1e-5)


@triton.jit
def multiply_floats_kernel(a, b, c, target):
    lane = tl.arange(0, 32)
    a0, a1, a2, a3 = load_words4(a + lane * 4)
    b0, b1 = load_words2(b + lane * 2)
    c0 = tl.load(c + lane * 4)
    c1 = tl.load(c + lane * 4 + 1)
    c2 = tl.load(c + lane * 4 + 2)
    c3 = tl.load(c + lane * 4 + 3)
    d0, d1, d2, d3 = multiply_tensor_floats(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3)
    tl.store(target + lane * 4, d0)
    tl.store(target + lane * 4 + 1, d1)
    tl.store(target + lane * 4 + 2, d2)
    tl.store(target + lane * 4 + 3, d3)


@pytest.mark.parametrize(("bits", "bound"), [(11, 1e-5), (24, 6e-2)])
def test_product_of_tensor_floats_takes_eleven_bits(bits: int, bound: float) -> None:
    a, b = halves(16, 8, dtype=torch.float32), halves(8, 8, dtype=torch.float32, seed=1)
    c = halves(16, 8, dtype=torch.float32, seed=2)
    mask = -(1 << (24 - bits))
    a, b = ((x.view(torch.int32) & mask).view(torch.float32) for x in (a, b))
    blocks_of_a = a.view(2, 8, 2, 4).permute(1, 3, 2, 0).contiguous()  # row, t, right, lower
    blocks_of_b = b.view(2, 4, 8).permute(2, 1, 0).contiguous()  # column, t, lower
    blocks_of_c = c.view(2, 8, 4, 2).permute(1, 2, 0, 3).contiguous()  # row, t, lower, pair
    target = torch.empty(8, 4, 2, 2, device=DEVICE)
    multiply_floats_kernel[(1,)](
        blocks_of_a.view(torch.int32), blocks_of_b.view(torch.int32), blocks_of_c, target, num_warps=1
    )
    error = target.permute(2, 0, 1, 3).reshape(16, 8).double() - (a.double() @ b.double() + c.double())
    assert error.abs().max() <= bound


@triton.jit
def transpose_kernel(source, target):
    lane = tl.arange(0, 32)
    tl.store(target + lane, transpose_matrix(tl.load(source + lane)))


def test_transpose() -> None:
    matrix = halves(8, 8, dtype=torch.float16)
    target = torch.empty(32, dtype=torch.int32, device=DEVICE)
    transpose_kernel[(1,)](matrix.view(torch.int32), target, num_warps=1)
    assert torch.equal(target.view(torch.float16).view(8, 8), matrix.T)


@triton.jit
def shared_kernel(bits, target):
    lane = tl.arange(0, 32)
    window = allocate_window(lane)
    for row in tl.static_range(4):
        clear_shared(window + row * 512 + lane * 16)
    synchronize_warp(lane)
    # Lane i writes one number into row i of four 8 x 8 matrices of 16-byte rows, at column i % 8; odd lanes do not.
    store_shared(window + lane * 16 + (lane & 7) * 2, tl.load(bits + lane), (lane & 1) == 0)
    synchronize_warp(lane)
    m0, m1, m2, m3 = load_matrices(window + lane * 16)
    tl.store(target + lane, m0)
    tl.store(target + 32 + lane, m1)
    tl.store(target + 64 + lane, m2)
    tl.store(target + 96 + lane, m3)


def test_shared_window_is_cleared_written_under_a_mask_and_read_as_matrices() -> None:
    bits = words(32)
    target = torch.empty(4, 32, dtype=torch.int32, device=DEVICE)
    shared_kernel[(1,)](bits, target, num_warps=1)
    expected = torch.zeros(32, 8, dtype=torch.int16, device=DEVICE)
    for lane in range(0, 32, 2):
        expected[lane, lane % 8] = (bits[lane] & 0xFFFF).to(torch.int16)
    assert torch.equal(target.view(torch.int16).view(32, 8), expected)
