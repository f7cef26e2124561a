"""Instructions of one warp, as inline PTX: one register of each lane in, one out.

The kernels of this package work on tensors of 32 * num_warps elements, one a thread. Such a tensor is one register of
each lane, needs no layout, and can be handed to any instruction below. Under TRITON_INTERPRET=1 the function of the
same name in `emulation` takes the place of each.

Loads go through the read-only path (`nc`): nothing may read with them what its own kernel writes. Stores and adds take
a mask. Operations without a result return a zero that nobody needs, since inline assembly must return something.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from triton import knobs

if knobs.runtime.interpret:
    from msda_op.triton.hopper import emulation


def primitive(function: Callable) -> Callable:
    """Returns `function` as a jit function, or its emulation while the interpreter runs."""
    return getattr(emulation, function.__name__) if knobs.runtime.interpret else triton.jit(function)


@primitive
def load_words4(pointer):
    """16 bytes at a pointer aligned to 16, as four int32 (LDG.128)."""
    return tl.inline_asm_elementwise(
        "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        [pointer.to(tl.int64)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@primitive
def load_words2(pointer):
    """8 bytes at a pointer aligned to 8, as two int32 (LDG.64)."""
    return tl.inline_asm_elementwise(
        "ld.global.nc.v2.b32 {$0, $1}, [$2];",
        "=r,=r,l",
        [pointer.to(tl.int64)],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@primitive
def store_words4(pointer, a, b, c, d, mask):
    """Four int32 to a pointer aligned to 16 (STG.128)."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $6, 0; @p st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0; }",
        "=r,l,r,r,r,r,r",
        [pointer.to(tl.int64), a, b, c, d, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@primitive
def store_words2(pointer, a, b, mask):
    """Two int32 to a pointer aligned to 8 (STG.64)."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $4, 0; @p st.global.v2.b32 [$1], {$2, $3}; mov.u32 $0, 0; }",
        "=r,l,r,r,r",
        [pointer.to(tl.int64), a, b, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@primitive
def add_floats4(pointer, a, b, c, d, mask):
    """Atomically adds four float32 at a pointer aligned to 16, relaxed, without reading back (RED.128, sm_90)."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $6, 0; "
        "@p red.relaxed.gpu.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0; }",
        "=r,l,f,f,f,f,r",
        [pointer.to(tl.int64), a, b, c, d, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@primitive
def shuffle(x, source):
    """The 4-byte `x` of lane `source` of the same warp (SHFL.IDX)."""
    return tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;",
        "=r,r,r",
        [x.to(tl.int32, bitcast=True), source],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    ).to(x.dtype, bitcast=True)


@primitive
def shuffle_xor(x, distance: tl.constexpr):
    """The 4-byte `x` of lane ^ distance (SHFL.BFLY)."""
    return tl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;",
        "=r,r,r",
        [x.to(tl.int32, bitcast=True), distance],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    ).to(x.dtype, bitcast=True)


@primitive
def match_any(x):
    """Bit mask of the lanes of the warp that hold the same int32 (MATCH.ANY)."""
    return tl.inline_asm_elementwise(
        "match.any.sync.b32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
    )


@primitive
def count_bits(x):
    """Number of bits set (POPC)."""
    return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)


@primitive
def lowest_bit(x):
    """Position of the lowest bit set, of a number other than 0 (BREV, FLO)."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; brev.b32 t, $1; clz.b32 $0, t; }", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
    )


@primitive
def pack_halves(low, high, dtype: tl.constexpr):
    """Two float32 rounded to a pair of `dtype`, `low` in the lower half of the int32 (F2FP)."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )


@primitive
def multiply_matrices(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, dtype: tl.constexpr):
    """C[16, 8] + A[16, 16] B[16, 8] over the warp, halves of `dtype` in, float32 out (HMMA.16816.F32)."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )


@primitive
def multiply_tensor_floats(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """C[16, 8] + A[16, 8] B[8, 8] over the warp, of the first 11 bits of float32, float32 out (HMMA.1688.F32.TF32)."""
    return tl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@primitive
def transpose_matrix(x):
    """Transpose of the 8 x 8 halves of the warp: lane 4g + t holds columns 2t, 2t + 1 of row g (MOVM)."""
    return tl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
    )


@primitive
def allocate_window(lane):
    """Address of 2 KiB of uninitialised shared memory; for programs of one warp, once a kernel."""
    return tl.inline_asm_elementwise(
        "{ .shared .align 128 .b8 msda_window[2048]; .reg .u32 t; mov.u32 t, msda_window; add.u32 $0, t, $1; }",
        "=r,r",
        [lane * 0],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@primitive
def clear_shared(address):
    """16 bytes of zeros (STS.128)."""
    return tl.inline_asm_elementwise(
        "{ .reg .u32 z; mov.u32 z, 0; st.shared.v4.b32 [$1], {z, z, z, z}; mov.u32 $0, 0; }",
        "=r,r",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@primitive
def store_shared(address, bits, mask):
    """The lower 16 of `bits` (STS.U16)."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b16 h; setp.ne.s32 p, $3, 0; cvt.u16.u32 h, $2; "
        "@p st.shared.b16 [$1], h; mov.u32 $0, 0; }",
        "=r,r,r,r",
        [address, bits, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@primitive
def load_matrices(address):
    """Four 8 x 8 matrices of halves; lane i gives the address of row i & 7 of matrix i >> 3 (LDSM.M88.4)."""
    return tl.inline_asm_elementwise(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r",
        [address],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@primitive
def synchronize_warp(lane):
    """Makes what the lanes of a warp stored visible to each other (WARPSYNC)."""
    return tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, $1;", "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1
    )
