"""Launch shapes of the Hopper path: one table, and a rule for what is not in it."""

from typing import Literal, NamedTuple

Pass = Literal["forward", "count", "backward", "fused backward"]
Regime = Literal["few", "some", "many"]
Scatter = Literal["atomics", "records"]


class LaunchShape(NamedTuple):
    """Warps of a program, pairs of queries that each warp takes one after the other, registers that a lane may use.

    None leaves the registers to ptxas.
    """

    warps: int
    iterations: int
    registers: int | None = None


# (compute capability, pass, regime) -> launch shape. "many" is the encoder of Deformable-DETR, "few" its decoder with
# 300 queries, "some" a decoder with 1100; batch 4 at 800x1333 in bfloat16. The backward cannot be autotuned on live
# data: every trial would add to the gradients once more.
LAUNCH_SHAPES: dict[tuple[int, Pass, Regime], LaunchShape] = {
    (90, "forward", "few"): LaunchShape(4, 1, 56),
    (90, "forward", "some"): LaunchShape(1, 1),
    (90, "forward", "many"): LaunchShape(4, 4),
    (90, "count", "few"): LaunchShape(4, 1),
    (90, "count", "some"): LaunchShape(1, 1),
    (90, "count", "many"): LaunchShape(4, 4),
    (90, "backward", "few"): LaunchShape(4, 1),
    (90, "backward", "some"): LaunchShape(1, 1),
    (90, "backward", "many"): LaunchShape(4, 4, 124),
    (90, "fused backward", "few"): LaunchShape(4, 1),
    (90, "fused backward", "some"): LaunchShape(1, 1),
    (90, "fused backward", "many"): LaunchShape(4, 4, 124),
}

# Registers are given where ptxas alone chooses badly, judged by its output and not yet by the clock: it spills one to
# reach 40 in the short forward, and its choice for the long backward varies from 72 registers and 2 loads on their way
# to 156 and 16. With 124 it spills nothing and sends 7 to 13 loads ahead, on Triton 3.6 and 3.8 alike. Levels that may
# be thin take 4 registers more, and 8 more with boxes, where Triton 3.6 spills under them.
THIN_REGISTERS = 128
THIN_BOX_REGISTERS = 136

# Of float32 the same backward has no more loads on their way than others can hide: with 96 registers, where ptxas takes
# 102 to 106, five programs share a processor instead of four, and nothing spills. Thin levels leave them to ptxas.
FLOAT32_REGISTERS = 96

# Registers of the reduction, of one warp a program, by whether value is float32: those with which it spills nothing and
# sends the loads of a step ahead, at once. ptxas alone sends some of them right before their use.
REDUCE_REGISTERS = {False: 80, True: 104}

# Most pairs of queries (over items and heads) of a regime. Below the first bound the card is not full anyway; a
# single warp a program then spreads best; above the second a warp hides its loads behind its own next pair.
_FEW_PAIRS = 10_000
_SOME_PAIRS = 100_000

# Samples from which sorting them into buckets beats adding them to memory one by one.
_MIN_RECORDS = 500_000


def choose_launch_shape(stage: Pass, num_pairs: int, capability: int = 90) -> LaunchShape:
    """Returns the launch shape for a number of query pairs; unknown architectures take that of the H200."""
    regime: Regime = "few" if num_pairs <= _FEW_PAIRS else "some" if num_pairs <= _SOME_PAIRS else "many"
    return LAUNCH_SHAPES.get((capability, stage, regime), LAUNCH_SHAPES[90, stage, regime])


def choose_scatter(num_samples: int) -> Scatter:
    """Returns the faster way to the gradient of value for `num_samples` = B * Q * M * L * K."""
    return "records" if num_samples >= _MIN_RECORDS else "atomics"
