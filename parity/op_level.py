"""L0: are the op's output and its three gradients right?"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from parity.arms import Experiment
from parity.cases import DEFAULT_CASES, LARGE_CASES, Case, make_inputs
from parity.comparisons import Comparison, Op, compare_op
from parity.faults import find_fault
from parity.interception import op_of
from parity.recording import Progress
from parity.results import Check, LevelResult, judge
from parity.tolerances import GRADIENT, OUTPUT

QUESTION = "Are the output and the three gradients right, against float64?"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run_op_level(experiment: Experiment, progress: Progress) -> LevelResult:
    """Compares the op with float64 and with the reference in the same precision, on all cases and dtypes.

    The original CUDA op, if it is the one under test, has float32 alone.
    """
    settings = experiment.settings.op
    cases = (*DEFAULT_CASES, *(LARGE_CASES if settings.large else ()))
    names = ["fp32"] if experiment.op == "cuda" else list(settings.dtypes)
    op = op_under_test(experiment)
    checks, rows = [], []
    for dtype_name in names:
        progress(f"op {experiment.op}, {dtype_name}: {len(cases)} cases")
        found = compare_cases(op, cases, dtype_name, experiment.device, settings.seeds)
        failed = [f"{case}: {each.name}" for case, each in found if not each.passed]
        detail = f"{len(found)} tensors of {len(cases)} cases within their bounds"
        if failed:
            detail = f"{len(failed)} of {len(found)} tensors out of bounds: {'; '.join(failed[:5])}"
        checks.append(Check(f"op in {dtype_name}", judge(not failed), detail))
        rows += [{"dtype": dtype_name, "case": case, **asdict(each), "passed": each.passed} for case, each in found]
    margins = {"output": f"{OUTPUT.factor:g} x the reference's error", "gradients": f"{GRADIENT.factor:g} x"}
    return LevelResult("op", QUESTION, tuple(checks), margins, {"rows": rows, "worst": _worst(rows)})


def op_under_test(experiment: Experiment) -> Op:
    """Returns the op under test, broken where `parity.fault` names a fault of the op itself."""
    op = op_of(experiment.op)
    fault = None if experiment.fault is None else find_fault(experiment.fault)
    return op if fault is None or fault.damage is None else fault.break_op(op, 1.0)


def compare_cases(
    op: Op, cases: Sequence[Case], dtype_name: str, device: torch.device, num_seeds: int
) -> list[tuple[str, Comparison]]:
    """Compares an op on cases in one dtype; returns each comparison with the name of its case."""
    return [
        (case.name, comparison)
        for case in cases
        for seed in range(num_seeds)
        for comparison in compare_op(op, make_inputs(case, _DTYPES[dtype_name], device, seed), case.gradients)
    ]


def _worst(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns for each tensor and dtype the row whose largest error comes closest to its limit."""
    worst: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        share = row["max_error"] / row["max_limit"] if row["max_limit"] else 0.0
        key = (row["name"], row["dtype"])
        if key not in worst or share > worst[key]["share_of_limit"]:
            worst[key] = {**row, "share_of_limit": share}
    return list(worst.values())
