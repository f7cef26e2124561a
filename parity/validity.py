"""Conditions without which two arms compare nothing: the same start and data, the op named, a loss that moves."""

import math

from parity.recording import Recording
from parity.results import Check, guard


def check_arms(first: Recording, second: Recording, min_loss_change: float) -> list[Check]:
    """Checks all conditions of a comparison of two arms of equal seed.

    Args:
        first: the arm that is compared with.
        second: the arm under test.
        min_loss_change: smallest change of a loss, as share of its mean, that is not flat.
    """
    recordings = (first, second)
    return [
        check_same_start(first, second),
        check_same_data(first, second),
        *(check_op_ran(recording) for recording in recordings),
        *(check_loss_moved(recording, min_loss_change) for recording in recordings),
    ]


def check_same_start(first: Recording, second: Recording) -> Check:
    """Checks that two arms start from the same weights; a nudged arm, by design, does not."""
    same = first.initial_weights == second.initial_weights
    detail = "the same initial weights" if same else "refused: the arms start from different weights"
    return guard(f"start of {_names(first, second)}", same, detail)


def check_same_data(first: Recording, second: Recording) -> Check:
    """Checks that two arms saw the same batch at every step."""
    name = f"data of {_names(first, second)}"
    for step, (left, right) in enumerate(zip(first.data_hashes, second.data_hashes, strict=False)):
        if left != right:
            return guard(name, False, f"refused: the arms saw different data at step {step}")
    if len(first.data_hashes) != len(second.data_hashes):
        return guard(name, False, "refused: the arms have different numbers of steps")
    return guard(name, True, f"the same batch at each of {len(first.data_hashes)} steps")


def check_op_ran(recording: Recording) -> Check:
    """Checks by the profiler's names and the call counter that the op of an arm, and no other, did its work."""
    arm, evidence = recording.arm, recording.evidence
    name = f"op of arm {arm.name}"
    calls = min(recording.attention_calls, default=0)
    ours, sampler = evidence.get("msda_op", 0), evidence.get("grid_sampler", 0)
    kernels = [key for key in evidence if key.startswith("kernel ")]
    ran = {
        "triton": ours >= calls and sampler == 0,
        "reference": sampler >= calls and ours == 0,
        "cuda": bool(kernels) and ours == 0 and sampler == 0,
    }[arm.op]
    seen = f"{calls} calls of attention in each step; in the first {ours} of msda_op, {sampler} of grid_sampler"
    seen += f", {', '.join(kernels)}" if kernels else ""
    if calls and ran:
        return guard(name, True, f"{arm.op} ran: {seen}")
    return guard(name, False, f"refused: the op {arm.op} did not run: {seen}")


def check_loss_moved(recording: Recording, min_loss_change: float) -> Check:
    """Checks that a loss curve is not flat: two flat curves agree whatever the ops do."""
    name = f"loss of arm {recording.arm.name}"
    finite = [value for value in recording.loss if math.isfinite(value)]
    if len(finite) < 2:
        return guard(name, False, f"refused: {len(finite)} finite losses, too few for a curve")
    change = (max(finite) - min(finite)) / max(abs(sum(finite) / len(finite)), 1e-30)
    moved = change >= min_loss_change
    words = "moves by" if moved else "refused: flat, it moves by"
    return guard(name, moved, f"{words} {100 * change:.2g} % of its mean ({100 * min_loss_change:g} % needed)")


def _names(first: Recording, second: Recording) -> str:
    return f"arms {first.arm.name} and {second.arm.name}"
