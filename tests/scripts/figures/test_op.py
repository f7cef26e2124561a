"""What the op's rows say of its calls, and which of them stand in front."""

import torch

from parity.peers import fused_implementations, own_implementations
from parity.presets import PRESETS
from scripts.figures.op import COMPOSED, FUSED, OP, OURS
from scripts.figures.tables import ResultsFile

CALL = {"preset": "encoder", "dtype": "bf16", "status": "timed"}


def call(implementation, batch, milliseconds):
    times = {"forward_device_ms_median": milliseconds, "backward_device_ms_median": milliseconds}
    return CALL | {"implementation": implementation, "batch": batch} | times


def test_what_is_said_of_the_op_is_so():
    note = OP.section.note
    assert own_implementations()[0].name == OURS
    assert tuple(peer.name for peer in fused_implementations(torch.empty(0))) == (FUSED, COMPOSED)
    assert f"{PRESETS['encoder'].num_queries:,}" in note
    assert f"{PRESETS['dino'].num_queries:,}" in note
    assert f"`decoder` {PRESETS['decoder'].num_queries} queries" in note


def test_times_of_different_batches_are_not_set_side_by_side():
    refused = CALL | {"implementation": "original CUDA op", "batch": 1, "status": "refused"}
    rows = [call(OURS, 1, 1.0), refused, call(OURS, 4, 4.0), call("original CUDA op", 4, 40.0)]
    (cells,) = OP.front([ResultsFile({"rows": rows}, "op.json")])
    assert cells[:3] == ("the op, encoder, bf16, batch 1, forward and backward", "2.00 ms", "")


def test_a_file_without_ours_has_nothing_in_front():
    assert OP.front([ResultsFile({"rows": [call("original CUDA op", 4, 40.0)]}, "op.json")]) == []
    assert OP.rows({"rows": [{"preset": "encoder", "kernel": "forward"}]}) == []
