"""Rows of the speed benchmark. An implementation is judged on the inputs it is timed on, and refused if it fails."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msda_op.reference import ms_deform_attn_reference
from parity.cases import INPUT_NAMES, OpInputs
from parity.comparisons import Comparison, Op, compare_results, evaluate
from parity.peers import Peer
from parity.presets import Preset
from parity.roofline import Traffic, predict_traffic
from parity.timing import Meter, summary_fields

Row = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """One set of inputs on which implementations are timed.

    Args:
        preset: sizes.
        batch: B.
        dtype_name: "bf16", "fp16" or "fp32".
        inputs: drawn by `parity.presets.make_preset_inputs`.
    """

    preset: Preset
    batch: int
    dtype_name: str
    inputs: OpInputs

    @property
    def traffic(self) -> Traffic:
        """Bytes that a call must move."""
        return predict_traffic(self.preset, self.batch, self.inputs.value.element_size())


class Judge:
    """Holds the exact results of a workload's first and last batch item, and compares implementations with them.

    The whole batch runs, as it will be timed; float64 results of two items are enough to see an item mixed up with
    another, an overflow of an index and a race, and fit in memory.
    """

    def __init__(self, inputs: OpInputs, reference: Op = ms_deform_attn_reference) -> None:
        batch = inputs.value.shape[0]
        self._items = sorted({0, batch - 1})
        self._inputs = inputs
        chosen = replace(inputs, **{name: getattr(inputs, name)[self._items] for name in (*INPUT_NAMES, "grad_output")})
        self._expected = evaluate(reference, chosen.double(), INPUT_NAMES)
        self._competitor = evaluate(reference, chosen, INPUT_NAMES)

    def compare(self, peer: Peer) -> tuple[Comparison, ...]:
        """Runs an implementation forward and backward and compares output and gradients, by the 2x / 3x rule."""
        actual = evaluate(peer.op, self._inputs, INPUT_NAMES)
        return compare_results(
            self._expected, self._competitor, {name: tensor[self._items] for name, tensor in actual.items()}
        )

    def relative_errors(self, comparisons: tuple[Comparison, ...]) -> dict[str, float]:
        """Returns each mean error divided by the mean size of the exact numbers."""
        return {each.name: each.mean_error / self._expected[each.name].abs().mean().item() for each in comparisons}


def measure_row(peer: Peer, workload: Workload, judge: Judge, meter: Meter) -> Row:
    """Judges an implementation and, if it passes, times it.

    Returns:
        A row of plain JSON values: `status` is "timed", "refused" (inaccurate; `reason` says where, nothing is timed)
        or "failed" (it raised; `reason` is its message). Times in ms, of passes and of their kernels by name, memory in
        MiB, bandwidths in GB/s. What can be captured has the times of a CUDA graph too, of the forward pass and of
        both.
    """
    row: Row = {
        "preset": workload.preset.name,
        "batch": workload.batch,
        "dtype": workload.dtype_name,
        "implementation": peer.name,
    }
    try:
        comparisons = judge.compare(peer)
    except (RuntimeError, ValueError) as error:  # what a kernel that cannot run this case raises, out of memory too
        return row | {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    row["relative_errors"] = judge.relative_errors(comparisons)
    wrong = [each for each in comparisons if not each.passed]
    if wrong:
        reason = "; ".join(
            f"{each.name} max error {each.max_error:.2e} of {each.max_limit:.2e} allowed, "
            f"mean {each.mean_error:.2e} of {each.mean_limit:.2e}"
            for each in wrong
        )
        return row | {"status": "refused", "reason": reason}
    return row | {"status": "timed", "reason": None} | _measure(peer, workload, meter)


def compare_repeats(rows: list[Row]) -> Row:
    """Returns by how much two rows of one implementation on one workload differ: what a difference must exceed.

    Args:
        rows: the two rows, both timed.
    """
    first, second = rows
    names = ("forward_device_ms_median", "backward_device_ms_median")
    differences = {name.removesuffix("_median"): abs(second[name] / first[name] - 1) for name in names}
    kept = {name: first[name] for name in ("preset", "batch", "dtype", "implementation")}
    return kept | {"relative_difference": differences}


def _measure(peer: Peer, workload: Workload, meter: Meter) -> Row:
    inputs = workload.inputs
    value, locations, weights = leaves = [getattr(inputs, name).detach().requires_grad_() for name in INPUT_NAMES]

    def run_forward() -> Tensor:
        return peer.op(value, inputs.spatial_shapes, locations, weights)

    def run_both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(run_forward(), leaves, inputs.grad_output)

    row: Row = {"peak_mib": meter.peak_mib(run_both)}
    if peer.captured:
        row |= summary_fields("forward_graph_ms", meter.graph_time(run_forward))
        row |= summary_fields("both_graph_ms", meter.graph_time(run_both))
    output = run_forward()

    def run_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, leaves, inputs.grad_output, retain_graph=True)

    state_before = meter.gpu_state()
    dropped = False
    for name, call in (("forward", run_forward), ("backward", run_backward)):
        device = meter.device_time(call)
        row |= summary_fields(f"{name}_device_ms", device.ms)
        row |= summary_fields(f"{name}_wall_ms", meter.wall_time(call))
        row |= summary_fields(f"{name}_host_ms", meter.host_time(call))
        row[f"{name}_clock_mhz"] = None if device.clock_mhz is None else asdict(device.clock_mhz)
        row[f"{name}_kernels_ms"] = meter.kernel_times(call)
        row |= _bandwidths(name, asdict(workload.traffic), device.ms.median)
        dropped = dropped or device.clocks_dropped
    return row | {"clocks_dropped": dropped, "gpu_before": state_before, "gpu_after": meter.gpu_state()}


def _bandwidths(name: str, traffic: Mapping[str, int], milliseconds: float) -> Row:
    """Returns the predicted bytes of a pass and the rates at which the measured time moves them."""
    needed, gathers = traffic[name], traffic[f"{name}_gathers"]
    return {
        f"{name}_bytes": needed,
        f"{name}_gather_bytes": gathers,
        f"{name}_gb_s": needed / milliseconds / 1e6,
        f"{name}_gather_gb_s": gathers / milliseconds / 1e6,
    }


def fuse_workload(workload: Workload) -> tuple[Workload, Tensor]:
    """Returns a workload for the fused op that samples about the same places, and its reference points `[B, Q, L, 2]`.

    Offsets in pixels stand in the place of locations, and logits in that of attention weights, both in the dtype of
    value, as a projection under autocast writes them. The bytes predicted for it stay those of the plain op.
    """
    inputs = workload.inputs
    locations = inputs.sampling_locations
    points = locations[:1].mean(dim=(2, 4))
    sizes_wh = locations.new_tensor([(w, h) for h, w in inputs.spatial_shapes])
    offsets = (locations - points[:, :, None, :, None]) * sizes_wh[:, None]
    dtype = inputs.value.dtype
    fused = replace(
        inputs,
        sampling_locations=offsets.to(dtype),
        attention_weights=inputs.attention_weights.float().clamp(min=1e-6).log().to(dtype),
    )
    # A copy for each item, as a model has them: all are the same, so that any items can be judged alone.
    return replace(workload, inputs=fused), points.repeat(workload.batch, 1, 1, 1)


def run_workload(
    workload: Workload,
    peers: list[Peer],
    meter: Meter,
    report: Callable[[Row], None],
    reference: Op = ms_deform_attn_reference,
) -> list[Row]:
    """Measures every implementation on one workload.

    Args:
        workload: what to run.
        peers: implementations, in this order.
        meter: how to measure.
        report: called with each row as soon as it is there.
        reference: what they are judged by.
    """
    judge = Judge(workload.inputs, reference)
    rows = []
    for peer in peers:
        rows.append(measure_row(peer, workload, judge, meter))
        report(rows[-1])
    return rows


def format_row(row: Row, copy_gb_s: float) -> str:
    """Returns a row as text: device, wall and host times in ms, memory, and bandwidth as a share of a copy's.

    Args:
        row: of `measure_row`.
        copy_gb_s: bandwidth of a copy on the same device.
    """
    name = f"{row['preset']:8s} B{row['batch']:<3d} {row['dtype']:5s} {row['implementation']:32s}"
    if row["status"] != "timed":
        return f"{name} {row['status'].upper()} {row['reason']}"
    parts = [name]
    for each in ("forward", "backward"):
        median, p20, p80 = (row[f"{each}_device_ms_{column}"] for column in ("median", "p20", "p80"))
        share = row[f"{each}_gb_s"] / copy_gb_s
        wall, host = row[f"{each}_wall_ms_median"], row[f"{each}_host_ms_median"]
        parts.append(
            f"{each} {median:.4f} [{p20:.4f}, {p80:.4f}] wall {wall:.4f} host {host:.4f} ms, {share:.0%} of a copy"
        )
    if "forward_graph_ms_median" in row:
        parts.append(f"graph {row['forward_graph_ms_median']:.4f}, both {row['both_graph_ms_median']:.4f} ms")
    parts.append(f"peak {row['peak_mib']:.0f} MiB")
    if row["clocks_dropped"]:
        parts.append("WARNING clocks dropped between repeats: time it again on a cool, idle card")
    return " | ".join(parts)


def plot_rows(rows: list[Row], path: Path) -> None:
    """Draws device times of timed rows: a panel for each workload, a bar for each implementation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [row for row in rows if row["status"] == "timed"]
    panels = list(dict.fromkeys((row["preset"], row["batch"], row["dtype"]) for row in timed))
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(8, 2.2 * len(panels)), squeeze=False)
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        shown = {row["implementation"]: row for row in timed if (row["preset"], row["batch"], row["dtype"]) == panel}
        forward = [row["forward_device_ms_median"] for row in shown.values()]
        backward = [row["backward_device_ms_median"] for row in shown.values()]
        axis.barh(list(shown), forward, label="forward")
        axis.barh(list(shown), backward, left=forward, label="backward")
        axis.set_title("{}, batch {}, {}".format(*panel), fontsize=9)
        axis.set_xlabel("device time, ms", fontsize=8)
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
