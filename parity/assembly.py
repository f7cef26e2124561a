"""What a compiled kernel does, read from its PTX and SASS, and what a shipped one must not do."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_PTX_ATOMIC = re.compile(r"\b(?:atom|red)\.[\w.:]+")
_SASS_OPCODE = re.compile(
    r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_.]+)?)", re.MULTILINE
)
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")

_ORDERINGS = ("relaxed", "acquire", "release", "acq_rel")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_WIDTHS = {"v2": 2, "v4": 4, "v8": 8}
_FLOATS = ("f16", "bf16", "f32", "f64")
_SASS_ATOMICS = ("RED", "REDG", "REDS", "ATOM", "ATOMG", "ATOMS")


@dataclass(frozen=True)
class Atomic:
    """One PTX atomic instruction.

    Args:
        kind: "atom" (returns the old number) or "red" (does not).
        space: "global", "shared", ... or "generic".
        ordering: of `_ORDERINGS`; PTX takes "relaxed" where none is written.
        scope: "cta", "cluster", "gpu" or "sys"; PTX takes "gpu" where none is written.
        operation: "add", "cas", "exch", ...
        element: PTX type of one element.
        width: elements of one instruction.
    """

    kind: str
    space: str
    ordering: str
    scope: str
    operation: str
    element: str
    width: int

    @property
    def adds_floats(self) -> bool:
        """Whether this is a floating-point addition."""
        return self.operation == "add" and self.element in _FLOATS

    def __str__(self) -> str:
        vector = f"x{self.width}" if self.width > 1 else ""
        return f"{self.kind} {self.space} {self.operation} {self.element}{vector} {self.ordering} {self.scope}"


def parse_atomic(instruction: str) -> Atomic:
    """Reads a PTX atomic such as `atom.global.gpu.relaxed.add.v4.f32`; the order of the qualifiers varies.

    Raises:
        ValueError: if it names no operation or no type.
    """
    kind, *words = instruction.strip(".").split(".")
    words = [word for word in words if word != "noftz" and not word.startswith("L2")]
    ordering = next((word for word in words if word in _ORDERINGS), "relaxed")
    scope = next((word for word in words if word in _SCOPES), "gpu")
    space = next((word for word in words if word.split("::")[0] in ("global", "shared")), "generic")
    vector = next((word for word in words if word in _WIDTHS), None)
    rest = [word for word in words if word not in (ordering, scope, space, vector)]
    if len(rest) != 2:
        raise ValueError(
            f"instruction must name one operation and one type, got {instruction!r}; extend parity/assembly.py"
        )
    operation, element = rest
    packed = 2 if element.endswith("x2") else 1
    width = packed * _WIDTHS.get(vector or "", 1)
    return Atomic(kind, space, ordering, scope, operation, element.removesuffix("x2"), width)


def read_ptx(ptx: str) -> Counter[Atomic]:
    """Counts the atomics of a PTX text."""
    return Counter(parse_atomic(instruction) for instruction in _PTX_ATOMIC.findall(ptx))


@dataclass(frozen=True)
class Sass:
    """Machine code of one kernel.

    Args:
        opcodes: how often each opcode with its suffixes stands in it.
        registers: of one thread.
        stack_bytes: of one thread; kernels without local arrays have a stack for spills alone.
        shared_bytes: allocated statically (Triton's own shared memory is dynamic and not in it).
    """

    opcodes: Counter[str]
    registers: int
    stack_bytes: int
    shared_bytes: int

    def count(self, *names: str) -> Counter[str]:
        """Counts the opcodes whose first word is one of `names`."""
        return Counter({code: number for code, number in self.opcodes.items() if code.split(".")[0] in names})


def parse_sass(resources: str, code: str) -> Sass:
    """Reads the outputs of `cuobjdump -res-usage` and of `nvdisasm` for one kernel.

    Raises:
        ValueError: if the resource line or the instructions are missing.
    """
    used, opcodes = _RESOURCES.search(resources), Counter(_SASS_OPCODE.findall(code))
    if used is None or not opcodes:
        raise ValueError(
            f"texts must hold resources and instructions of a kernel, got {resources[:80]!r} and {code[:80]!r}; "
            f"pass the outputs of cuobjdump and nvdisasm"
        )
    registers, stack, shared, local = map(int, used.groups())
    return Sass(opcodes, registers, stack + local, shared)


def disassemble(cubin: bytes, cuobjdump: str, nvdisasm: str) -> Sass:
    """Reads machine code with two tools that Triton brings, given by their paths."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        resources, code = (
            subprocess.run([*command, str(path)], capture_output=True, text=True, check=True).stdout
            for command in ([cuobjdump, "-res-usage"], [nvdisasm, "--no-dataflow"])
        )
        return parse_sass(resources, code)


@dataclass(frozen=True)
class KernelReport:
    """What one kernel compiles to on one architecture.

    Args:
        kernel: module and name of the function.
        variant: what it was launched for; several, joined by commas, where they share the machine code.
        architecture: compute capability, e.g. 90.
        num_warps: of one program.
        registers: of one thread.
        spill_bytes: stack of one thread.
        local_accesses: instructions that load or store the stack.
        shared_bytes: of one program.
        barriers: instructions that wait for the whole program.
        loads: global loads by opcode, e.g. `LDG.E.128`.
        ptx_atomics: by `str(Atomic)`.
        sass_atomics: by opcode.
        problems: what a shipped default must not do, in words; empty where nothing is wrong.
    """

    kernel: str
    variant: str
    architecture: int
    num_warps: int
    registers: int
    spill_bytes: int
    local_accesses: int
    shared_bytes: int
    barriers: int
    loads: dict[str, int]
    ptx_atomics: dict[str, int]
    sass_atomics: dict[str, int]
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as plain JSON values."""
        return {**asdict(self), "problems": list(self.problems)}


def report_kernel(
    kernel: str,
    variant: str,
    architecture: int,
    num_warps: int,
    shared_bytes: int,
    row_bytes: int,
    ptx: str,
    sass: Sass,
) -> KernelReport:
    """Sums up one compiled kernel and names its problems.

    Args:
        kernel: module and name of the function.
        variant: what it was launched for.
        architecture: compute capability, e.g. 90.
        num_warps: of one program.
        shared_bytes: of one program, as Triton's metadata says.
        row_bytes: bytes between the float32 rows that it adds up atomically; decides which vectors alignment permits.
        ptx: its PTX.
        sass: its machine code.
    """
    atomics = read_ptx(ptx)
    local = sass.count("LDL", "STL").total()
    return KernelReport(
        kernel=kernel,
        variant=variant,
        architecture=architecture,
        num_warps=num_warps,
        registers=sass.registers,
        spill_bytes=sass.stack_bytes,
        local_accesses=local,
        shared_bytes=max(shared_bytes, sass.shared_bytes),
        barriers=sass.count("BAR").total(),
        loads=dict(sorted(sass.count("LDG").items())),
        ptx_atomics={str(atomic): number for atomic, number in sorted(atomics.items(), key=lambda item: str(item[0]))},
        sass_atomics=dict(sorted(sass.count(*_SASS_ATOMICS).items())),
        problems=tuple(_find_problems(architecture, atomics, sass, row_bytes, local)),
    )


def _find_problems(
    architecture: int, atomics: Counter[Atomic], sass: Sass, row_bytes: int, local_accesses: int
) -> list[str]:
    problems = []
    loops = any(atomic.operation == "cas" for atomic in atomics)
    if loops or any("CAS" in opcode for opcode in sass.count(*_SASS_ATOMICS)):
        problems.append("compare-and-swap loop: this type has no native atomic here, add in float32")
    problems += [
        f"{atomic.ordering} ordering on {atomic}: fences; pass sem='relaxed'"
        for atomic in atomics
        if atomic.ordering != "relaxed"
    ]
    if sass.stack_bytes or local_accesses:
        problems.append(f"spill of {sass.stack_bytes} bytes a thread: take a smaller tile or more warps")
    # Vector reductions exist from sm_90 on; they need addresses aligned to at least two float32.
    if architecture >= 90 and row_bytes % 8 == 0:
        problems += [
            f"scalar {atomic}: a vector exists; keep channels contiguous in a thread and masks constant along them"
            for atomic in atomics
            if atomic.adds_floats and atomic.space != "shared" and atomic.width == 1
        ]
    return problems
