"""What the instructions of `primitives` do, written for Triton's interpreter (TRITON_INTERPRET=1).

A tensor of the kernels holds one element a thread, 32 threads a warp; the interpreter keeps it as one numpy array.
Memory goes through `tl`, which the interpreter replaces while a kernel runs; what crosses lanes is spelled out in
numpy. In the fragments of `mma.m16n8k16` (PTX ISA, "Matrix fragments") lane = 4 * g + t.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

_LANE = np.arange(32)
_G, _T = _LANE >> 2, _LANE & 3
_A_PLACES = ((0, 0), (8, 0), (0, 8), (8, 8))  # (row, column) added to (g, 2t) in the four registers of A
_C_PLACES = ((0, 0), (0, 1), (8, 0), (8, 1))

# The shared memory of the one warp of a program. A fresh window is full of NaN (in either half format).
_shared = np.zeros(0, np.uint16)


def _array(tensor: Any) -> np.ndarray:
    return tensor.handle.data


def _tensor(array: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    array = np.ascontiguousarray(array)
    return tl.tensor(TensorHandle(array, dtype), tl.block_type(dtype, list(array.shape)))


def _words(pointer: tl.tensor) -> tl.tensor:
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


def _value(constant: Any) -> Any:
    return getattr(constant, "value", constant)


def _round_to_half(numbers: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns the bits (uint16) of float32 numbers rounded to nearest even."""
    if _value(dtype) == tl.float16:
        with np.errstate(over="ignore"):
            return numbers.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FFF), rounded)


def _widen(bits: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns float32 numbers of 16-bit patterns."""
    bits = np.ascontiguousarray(bits.astype(np.uint16))
    if _value(dtype) == tl.float16:
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _split(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    bits = np.ascontiguousarray(pairs).view(np.uint32)
    return (bits & 0xFFFF).astype(np.uint16), (bits >> 16).astype(np.uint16)


def _join(low: np.ndarray, high: np.ndarray) -> tl.tensor:
    return _tensor((low.astype(np.uint32) | (high.astype(np.uint32) << 16)).view(np.int32), tl.int32)


def load_words4(pointer: tl.tensor) -> tuple[tl.tensor, ...]:
    return tuple(tl.load(_words(pointer) + word) for word in range(4))


def load_words2(pointer: tl.tensor) -> tuple[tl.tensor, ...]:
    return tuple(tl.load(_words(pointer) + word) for word in range(2))


def store_words4(pointer: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, mask: tl.tensor) -> None:
    for word, number in enumerate((a, b, c, d)):
        tl.store(_words(pointer) + word, number, mask=mask)


def store_words2(pointer: tl.tensor, a: tl.tensor, b: tl.tensor, mask: tl.tensor) -> None:
    for word, number in enumerate((a, b)):
        tl.store(_words(pointer) + word, number, mask=mask)


def add_floats4(pointer: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, mask: tl.tensor) -> None:
    for word, number in enumerate((a, b, c, d)):
        tl.atomic_add(pointer + word, number, mask=mask, sem="relaxed")


def shuffle(x: tl.tensor, source: tl.tensor) -> tl.tensor:
    data = _array(x)
    sources = np.broadcast_to(_array(source), data.shape) & 31
    first_of_warp = np.arange(data.size) & ~31
    return _tensor(data[first_of_warp + sources], x.dtype)


def shuffle_xor(x: tl.tensor, distance: Any) -> tl.tensor:
    data = _array(x)
    return _tensor(data[np.arange(data.size) ^ _value(distance)], x.dtype)


def match_any(x: tl.tensor) -> tl.tensor:
    warps = _array(x).reshape(-1, 32)
    equal = warps[:, :, None] == warps[:, None, :]
    return _tensor(
        (equal * (1 << np.arange(32, dtype=np.uint64))).sum(-1).astype(np.uint32).view(np.int32).ravel(), tl.int32
    )


def count_bits(x: tl.tensor) -> tl.tensor:
    return _tensor(np.array([int(bits).bit_count() for bits in _array(x).view(np.uint32)], np.int32), tl.int32)


def lowest_bit(x: tl.tensor) -> tl.tensor:
    return _tensor(
        np.array([(int(b) & -int(b)).bit_length() - 1 for b in _array(x).view(np.uint32)], np.int32), tl.int32
    )


def pack_halves(low: tl.tensor, high: tl.tensor, dtype: Any) -> tl.tensor:
    return _join(_round_to_half(_array(low), dtype), _round_to_half(_array(high), dtype))


def multiply_matrices(
    a0: tl.tensor,
    a1: tl.tensor,
    a2: tl.tensor,
    a3: tl.tensor,
    b0: tl.tensor,
    b1: tl.tensor,
    c0: tl.tensor,
    c1: tl.tensor,
    c2: tl.tensor,
    c3: tl.tensor,
    dtype: Any,
) -> tuple[tl.tensor, ...]:
    a_registers = [_array(register).reshape(-1, 32) for register in (a0, a1, a2, a3)]
    b_registers = [_array(register).reshape(-1, 32) for register in (b0, b1)]
    c_registers = [_array(register).reshape(-1, 32) for register in (c0, c1, c2, c3)]
    warps = len(c_registers[0])
    a, b, c = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8)), np.zeros((warps, 16, 8))
    for register, (row, column) in zip(a_registers, _A_PLACES, strict=True):
        for half, bits in enumerate(_split(register)):
            a[:, _G + row, 2 * _T + column + half] = _widen(bits, dtype)
    for register, row in zip(b_registers, (0, 8), strict=True):
        for half, bits in enumerate(_split(register)):
            b[:, 2 * _T + row + half, _G] = _widen(bits, dtype)
    for register, (row, column) in zip(c_registers, _C_PLACES, strict=True):
        c[:, _G + row, 2 * _T + column] = register
    with np.errstate(invalid="ignore"):
        product = (c + a @ b).astype(np.float32)
    return tuple(_tensor(product[:, _G + row, 2 * _T + column].ravel(), tl.float32) for row, column in _C_PLACES)


def multiply_tensor_floats(
    a0: tl.tensor,
    a1: tl.tensor,
    a2: tl.tensor,
    a3: tl.tensor,
    b0: tl.tensor,
    b1: tl.tensor,
    c0: tl.tensor,
    c1: tl.tensor,
    c2: tl.tensor,
    c3: tl.tensor,
) -> tuple[tl.tensor, ...]:
    def matrices(register: tl.tensor) -> np.ndarray:
        return (_array(register).reshape(-1, 32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)

    warps = _array(c0).size // 32
    a, b, c = np.zeros((warps, 16, 8)), np.zeros((warps, 8, 8)), np.zeros((warps, 16, 8))
    for register, (row, column) in zip((a0, a1, a2, a3), ((0, 0), (8, 0), (0, 4), (8, 4)), strict=True):
        a[:, _G + row, _T + column] = matrices(register)
    for register, row in zip((b0, b1), (0, 4), strict=True):
        b[:, _T + row, _G] = matrices(register)
    for register, (row, column) in zip((c0, c1, c2, c3), _C_PLACES, strict=True):
        c[:, _G + row, 2 * _T + column] = _array(register).reshape(-1, 32)
    with np.errstate(invalid="ignore"):
        product = (c + a @ b).astype(np.float32)
    return tuple(_tensor(product[:, _G + row, 2 * _T + column].ravel(), tl.float32) for row, column in _C_PLACES)


def transpose_matrix(x: tl.tensor) -> tl.tensor:
    warps = _array(x).reshape(-1, 32)
    matrix = np.zeros((len(warps), 8, 8), np.uint16)
    for half, bits in enumerate(_split(warps)):
        matrix[:, _G, 2 * _T + half] = bits
    matrix = matrix.swapaxes(1, 2)
    return _join(matrix[:, _G, 2 * _T].ravel(), matrix[:, _G, 2 * _T + 1].ravel())


def allocate_window(lane: tl.tensor) -> tl.tensor:
    global _shared
    _shared = np.full(1024, 0x7FFF, np.uint16)
    return _tensor(np.zeros_like(_array(lane)), tl.int32)


def clear_shared(address: tl.tensor) -> None:
    for start in _array(address) // 2:
        _shared[start : start + 8] = 0


def store_shared(address: tl.tensor, bits: tl.tensor, mask: tl.tensor) -> None:
    chosen = _array(mask).astype(bool)
    _shared[_array(address)[chosen] // 2] = (_array(bits)[chosen] & 0xFFFF).astype(np.uint16)


def load_matrices(address: tl.tensor) -> tuple[tl.tensor, ...]:
    rows = _array(address).reshape(4, 8) // 2
    return tuple(_join(_shared[row[_G] + 2 * _T], _shared[row[_G] + 2 * _T + 1]) for row in rows)


def synchronize_warp(lane: tl.tensor) -> None:
    """Lanes of an array advance together."""
