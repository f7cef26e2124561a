"""Reading of PTX and SASS, and each thing that a shipped kernel must not do."""

import json
from collections import Counter

import pytest

from parity.assembly import Atomic, Sass, parse_atomic, parse_sass, read_ptx, report_kernel

CLEAN = "@%p1 atom.global.gpu.relaxed.add.v4.f32 {%r1, %r2, %r3, %r4}, [ %rd1 + 0 ], {%r5, %r6, %r7, %r8};"

RESOURCES = """
Resource usage:
 Function backward_kernel:
  REG:136 STACK:8 SHARED:1024 LOCAL:0 CONSTANT[0]:448 TEXTURE:0 SURFACE:0 SAMPLER:0
"""

CODE = """
.text.backward_kernel:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;             /* 0x0000df00ff017b82 */
                                                                       /* 0x000e220000000800 */
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;    /* 0x0000000402048981 */
        /*0020*/                   LDG.E.128 R8, desc[UR4][R2.64] ;    /* 0x0000000402088981 */
        /*0030*/               @P1 REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R4 ;
        /*0040*/                   STL [R1], R4 ;                      /* 0x0000000401007387 */
        /*0050*/             @!UP2 BAR.SYNC.DEFER_BLOCKING 0x0 ;       /* 0x0000000000007b1d */
        /*0060*/                   EXIT ;                              /* 0x000000000000794d */
"""


def sass(*opcodes: str, stack_bytes: int = 0) -> Sass:
    return Sass(Counter(opcodes), registers=40, stack_bytes=stack_bytes, shared_bytes=0)


def problems(ptx: str = CLEAN, machine_code: Sass | None = None, architecture: int = 90, row_bytes: int = 128) -> str:
    machine_code = machine_code or sass("REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU")
    report = report_kernel("backward_kernel", "a", architecture, 1, 512, row_bytes, ptx, machine_code)
    return "; ".join(report.problems)


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("atom.global.gpu.relaxed.add.v4.f32", Atomic("atom", "global", "relaxed", "gpu", "add", "f32", 4)),
        ("red.relaxed.gpu.global.add.noftz.v8.bf16", Atomic("red", "global", "relaxed", "gpu", "add", "bf16", 8)),
        ("atom.global.acq_rel.gpu.add.noftz.f16x2", Atomic("atom", "global", "acq_rel", "gpu", "add", "f16", 2)),
        ("red.global.add.noftz.v4.bf16x2", Atomic("red", "global", "relaxed", "gpu", "add", "bf16", 8)),
        ("atom.shared::cta.add.u32", Atomic("atom", "shared::cta", "relaxed", "gpu", "add", "u32", 1)),
        ("atom.relaxed.sys.cas.b32", Atomic("atom", "generic", "relaxed", "sys", "cas", "b32", 1)),
        ("red.global.add.L2::cache_hint.v2.f32", Atomic("red", "global", "relaxed", "gpu", "add", "f32", 2)),
    ],
)
def test_atomics_are_read(instruction: str, expected: Atomic) -> None:
    assert parse_atomic(instruction) == expected


def test_unknown_atomics_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must name one operation and one type, got 'atom\.global\.gpu'"):
        parse_atomic("atom.global.gpu")


def test_atomics_of_a_text_are_counted() -> None:
    counted = read_ptx(f"{CLEAN}\n{CLEAN}\n ld.global.b32 %r1, [%rd1]; // redo")
    assert counted[parse_atomic("atom.global.gpu.relaxed.add.v4.f32")] == 2


def test_machine_code_is_read() -> None:
    code = parse_sass(RESOURCES, CODE)
    assert (code.registers, code.stack_bytes, code.shared_bytes) == (136, 8, 1024)
    assert code.count("LDG") == {"LDG.E.128": 2}
    assert code.count("REDG") == {"REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU": 1}
    assert code.count("STL", "LDL").total() == 1
    assert code.count("BAR").total() == 1
    assert code.opcodes.total() == 7


def test_text_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="texts must hold resources and instructions"):
        parse_sass("cuobjdump fatal", CODE)
    with pytest.raises(ValueError, match="texts must hold resources and instructions"):
        parse_sass(RESOURCES, "nvdisasm fatal")


def test_a_clean_kernel_has_no_problems() -> None:
    assert problems() == ""


def test_compare_and_swap_is_seen_in_ptx_and_in_machine_code() -> None:
    assert "compare-and-swap" in problems("atom.global.relaxed.gpu.cas.b16 %r1, [%rd1], %r2, %r3;")
    assert "compare-and-swap" in problems(machine_code=sass("ATOMG.E.CAS.STRONG.GPU"))


@pytest.mark.parametrize("ordering", ["acq_rel", "acquire", "release"])
def test_orderings_with_fences_are_seen(ordering: str) -> None:
    assert f"{ordering} ordering" in problems(CLEAN.replace("relaxed", ordering))


def test_spills_are_seen() -> None:
    assert "spill of 8 bytes" in problems(machine_code=sass("EXIT", stack_bytes=8))
    assert "spill" in problems(machine_code=sass("LDL.LU"))


def test_scalar_atomics_are_a_problem_only_where_vectors_exist() -> None:
    scalar = "atom.global.gpu.relaxed.add.f32 %r1, [ %rd1 + 0 ], %r2;"
    assert "scalar atom global add f32" in problems(scalar)
    assert problems(scalar, architecture=89) == ""
    assert problems(scalar, row_bytes=20) == ""
    assert problems("red.shared.add.f32 [%r1], %r2;") == ""
    assert problems("atom.global.gpu.relaxed.add.u32 %r1, [%rd1], %r2;") == ""


def test_report_is_ready_for_json() -> None:
    report = report_kernel("backward_kernel", "a, b", 90, 1, 512, 128, CLEAN, parse_sass(RESOURCES, CODE))
    content = json.loads(json.dumps(report.to_json()))
    assert content["ptx_atomics"] == {"atom global add f32x4 relaxed gpu": 1}
    assert content["loads"] == {"LDG.E.128": 2}
    assert content["shared_bytes"] == 1024
    assert content["problems"] == ["spill of 8 bytes a thread: take a smaller tile or more warps"]
