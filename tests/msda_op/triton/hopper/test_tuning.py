"""Launch shapes: the measured sizes take theirs, everything else takes a neighbour's."""

import pytest

from msda_op.triton.hopper.tuning import LAUNCH_SHAPES, choose_launch_shape, choose_scatter

# Query pairs over items and heads: encoder, decoder with 300 queries, decoder with 1100; batch 4, 8 heads.
ENCODER, DECODER, MANY_QUERIES = 4 * 8 * 11112, 4 * 8 * 150, 4 * 8 * 550


@pytest.mark.parametrize("stage", ["forward", "backward", "fused backward"])
def test_measured_sizes(stage) -> None:
    assert choose_launch_shape(stage, ENCODER) == LAUNCH_SHAPES[90, stage, "many"]
    assert choose_launch_shape(stage, DECODER) == LAUNCH_SHAPES[90, stage, "few"]
    assert choose_launch_shape(stage, MANY_QUERIES) == LAUNCH_SHAPES[90, stage, "some"]
    assert choose_launch_shape(stage, ENCODER, capability=103) == LAUNCH_SHAPES[90, stage, "many"]


def test_records_from_half_a_million_samples() -> None:
    assert choose_scatter(4 * 300 * 8 * 16) == "atomics"
    assert choose_scatter(4 * 22223 * 8 * 16) == "records"
