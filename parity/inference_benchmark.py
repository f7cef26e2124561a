"""Times detectors in inference: eager, compiled, as a CUDA graph and as an AOTInductor package.

Wall time is what a caller waits for one call whose inputs lie on the device; busy time is the sum of its kernels. What
lies between them is dispatch, which a graph does away with. A contender is compared with the eager detector on the
inputs that it is timed on, and refused if it answers otherwise.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, cast

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from models.checkpoints import load_weights
from models.environment import allow_tf32
from models.export.aoti import AotiFormat
from models.export.buckets import Size
from models.export.certificate import Measurement, Program, Tolerance, contrasting_inputs, measure
from models.export.cuda_graph import GraphedDetector
from models.export.inference import InferenceModule
from models.export.recipe import Precision, Recipe, Source, build_module
from models.weight_hash import hash_weights
from parity.arms import ROOT, roughen_attention
from parity.timing import Call, percentile

CONTENDERS = ("eager", "compiled", "graph", "aoti")
TRACED = ("compiled", "aoti")
"""Contenders that a compiler makes of the detector."""
MODELS = {
    "one_stage": ("model=deformable_detr",),
    "refine": ("model=deformable_detr_refine",),
    "two_stage": ("model=deformable_detr_two_stage",),
    "dino": ("model=dino_4scale",),
}
PERCENTILES = (0.2, 0.5, 0.8, 0.9, 0.99)
_CATEGORIES = 80
_MEMORY_CAP_MIB = 65536
_ROUGHNESS = 0.02
_SEED = 0
_WARMUP = 5

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One detector in one shape.

    Attributes:
        model: one of `MODELS`.
        precision: an option of `configs/precision`.
        size_hw: height and width of the images in pixels.
        batch_size: images of a call.
    """

    model: str
    precision: str
    size_hw: Size
    batch_size: int


class Meter(Protocol):
    """What a row needs to know of a call; the tests bring one without a device."""

    def wall_ms(self, call: Call) -> list[float]:
        """Returns the wall time of each of many calls, in milliseconds."""

    def busy_ms(self, call: Call) -> float:
        """Returns the sum of the kernels' times of one call, in milliseconds."""

    def peak_mib(self, call: Call) -> float:
        """Returns how far memory rises above what was allocated before the call."""


def build_detector(
    job: Job, overrides: Sequence[str], device: torch.device, traced: bool
) -> tuple[InferenceModule, Tolerance]:
    """Builds a detector of a published size, with random weights unless `model.weights` is among the overrides.

    Random weights leave their initialisation in the attention, where all locations would lie on pixel centres.

    Args:
        job: model and precision; sets the process's switch for TF32.
        overrides: further ones, of `configs/export.yaml`.
        device: where it runs.
        traced: whether a contender is compiled from it.

    Returns:
        The detector and the tolerance of its precision.
    """
    words = ["data=coco", "backbone=resnet50", *MODELS[job.model], f"precision={job.precision}", *overrides]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = compose("export", overrides=[*words, f"num_classes={_CATEGORIES}"])
    precision = Precision.from_config(config.precision)
    allow_tf32(precision.allow_tf32)
    recipe = Recipe.from_config(_plain(config), [{"id": n, "name": str(n)} for n in range(_CATEGORIES)])
    torch.manual_seed(_SEED)
    model = cast(nn.Module, instantiate(recipe.model))
    if config.model.weights is None:
        roughen_attention(model, _ROUGHNESS, _SEED)
    else:
        load_weights(model, config.model.weights)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    module = build_module(
        Source(recipe, weights, hash_weights(weights)),
        precision=precision,
        backend=config.op.backend,
        fused=config.op.fused,
        device=device,
        traced=traced,
    )
    return module, Tolerance(**config.tolerance[precision.name])


def build_contender(name: str, module: InferenceModule, job: Job) -> Program:
    """Returns a detector in one of the forms of `CONTENDERS`."""
    if name == "compiled":
        torch.compiler.reset()  # it counts what was compiled of all detectors together, and in the end stays eager
        return cast(Program, torch.compile(module, dynamic=False))
    if name == "graph":
        return GraphedDetector(
            module, buckets=(job.size_hw,), batch_size=job.batch_size, memory_cap_mib=_MEMORY_CAP_MIB
        )
    if name == "aoti":
        writer = AotiFormat(device=module.device.type, inductor={})
        with tempfile.TemporaryDirectory() as folder:  # a loaded package does not need its file
            return writer.compile(module, (job.size_hw,), job.batch_size, Path(folder))[job.size_hw]
    return module


def measure_row(
    name: str,
    job: Job,
    eager: InferenceModule,
    tolerance: Tolerance,
    meter: Meter,
    build: Callable[[str, InferenceModule, Job], Program] = build_contender,
) -> Row:
    """Judges a contender and, if it passes, times it.

    Returns:
        A row of plain JSON values: `status` is "timed", "refused" (it answers otherwise; nothing is timed) or "failed"
        (it raised; `reason` is its message). Times in ms a call, memory in MiB.
    """
    row: Row = {**asdict(job), "size_hw": list(job.size_hw), "contender": name}
    try:
        program = build(name, eager, job)
        found = measure(program, eager, job.size_hw, job.batch_size, eager.device, tolerance.min_score)
    except (RuntimeError, ValueError) as error:  # what compiling and running raise, out of memory too
        return row | {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    row |= {"difference": asdict(found.difference), "depends_on_input": found.depends_on_input}
    if not _passes(name, found, tolerance):
        return row | {"status": "refused", "reason": f"answers otherwise than eager, beyond {tolerance}"}
    inputs = tuple(tensor.to(eager.device) for tensor in contrasting_inputs(job.size_hw, job.batch_size)[0])

    @torch.no_grad()
    def call() -> Any:
        return program(*inputs)

    for _ in range(_WARMUP):
        call()
    samples = meter.wall_ms(call)
    row |= {f"wall_ms_p{round(100 * share)}": percentile(samples, share) for share in PERCENTILES}
    row |= {"busy_ms": meter.busy_ms(call), "peak_mib": meter.peak_mib(call), "repeats": len(samples)}
    row["wall_ms_per_image"] = row["wall_ms_p50"] / job.batch_size
    return row | {"status": "timed"}


def format_row(row: Row) -> str:
    """Returns a row as one line."""
    name = f"{row['model']} {row['precision']} {row['size_hw'][0]}x{row['size_hw'][1]} batch {row['batch_size']}"
    if row["status"] != "timed":
        return f"{name:38} {row['contender']:9} {row['status']}: {row['reason'].splitlines()[0]}"
    return (
        f"{name:38} {row['contender']:9} wall {row['wall_ms_p50']:.2f} ms (p20 {row['wall_ms_p20']:.2f}, "
        f"p80 {row['wall_ms_p80']:.2f}, p99 {row['wall_ms_p99']:.2f}), busy {row['busy_ms']:.2f} ms, "
        f"{row['wall_ms_per_image']:.2f} ms an image, peak {row['peak_mib']:.0f} MiB"
    )


def plot_dispatch(rows: Sequence[Row], path: Path) -> None:
    """Draws a panel for each detector and batch, a bar for each contender: kernels, and what is waited for besides."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [row for row in rows if row["status"] == "timed"]
    panels = list(dict.fromkeys((row["model"], row["precision"], row["batch_size"]) for row in timed))
    figure, axes = pyplot.subplots(max(1, len(panels)), 1, figsize=(8, 2.2 * max(1, len(panels))), squeeze=False)
    for axis, panel in zip(axes[:, 0], panels, strict=False):
        shown = [row for row in timed if (row["model"], row["precision"], row["batch_size"]) == panel]
        names = [row["contender"] for row in shown]
        busy = [row["busy_ms"] for row in shown]
        rest = [max(0.0, row["wall_ms_p50"] - row["busy_ms"]) for row in shown]
        axis.barh(names, busy, label="kernels")
        axis.barh(names, rest, left=busy, label="dispatch and gaps")
        axis.invert_yaxis()
        axis.set_title("{}, {}, batch {}".format(*panel), fontsize=9)
        axis.set_xlabel("wall time of a call, ms", fontsize=8)
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


class CudaInferenceMeter:
    """`Meter` of the current CUDA device."""

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats

    def wall_ms(self, call: Call) -> list[float]:
        """Times calls one by one, each on an idle device."""
        samples = []
        for _ in range(self._repeats):
            torch.cuda.synchronize()
            begin = perf_counter()
            call()
            torch.cuda.synchronize()
            samples.append(1000 * (perf_counter() - begin))
        return samples

    def busy_ms(self, call: Call) -> float:
        """Sums the kernels of three calls as the profiler sees them, and divides by three."""
        calls = 3
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(calls):
                call()
            torch.cuda.synchronize()
        kernels = [
            event
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        ]
        return sum(event.time_range.elapsed_us() for event in kernels) / 1000 / calls

    def peak_mib(self, call: Call) -> float:
        """Reads the allocator; the memory that a graph keeps was allocated before."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20


def _passes(name: str, found: Measurement, tolerance: Tolerance) -> bool:
    equal = found.difference.bitwise_equal or name != "graph"
    return equal and found.depends_on_input and found.difference.within(tolerance)


def _plain(config: DictConfig) -> dict[str, Any]:
    keys = ("model", "data", "normalizer", "detector")
    return {key: OmegaConf.to_container(config[key], resolve=True) for key in keys}
