"""Measures the op on this machine's GPU.

    python -m scripts.benchmark op        our op beside every peer that can be imported
    python -m scripts.benchmark sweep     launch shapes of the kernels, or of some: --presets decoder --dtypes bf16
                                          --kernels "hopper .*backward"; --write keeps the fastest of the plain ones
    python -m scripts.benchmark variants  what coalescing, unrolling, float32 atomics and careful timing are worth
    python -m scripts.benchmark step      a training step by phase; takes the overrides of train.py; --sizes 50 for
                                          multi-scale training, --data-workers 12 for the full loader
    python -m scripts.benchmark inference detectors, eager, compiled, as CUDA graphs and as AOTInductor packages
    python -m scripts.benchmark loader    batches of training data, any overrides of train.py; needs no GPU

Each command prints a table and writes its rows as JSON, with GPU, driver, clocks, versions and commit.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from models.environment import cut_folders, describe_environment
from parity.inference_benchmark import (
    CONTENDERS,
    MODELS,
    TRACED,
    CudaInferenceMeter,
    Job,
    build_detector,
    plot_dispatch,
)
from parity.inference_benchmark import format_row as format_inference
from parity.inference_benchmark import measure_row as measure_inference
from parity.peers import find_peers, fused_implementations, fused_reference, own_implementations
from parity.presets import PRESETS, make_preset_inputs
from parity.speed import Row, Workload, compare_repeats, format_row, fuse_workload, plot_rows, run_workload
from parity.step_benchmark import StepCase, plot_steps
from parity.step_peer import HUGGING_FACE, OFFICIAL, PEERS
from parity.step_table import StepTable, measure_table
from parity.step_table import format_row as format_step
from parity.timing import CudaMeter, CudaStopwatch, Summary, measure_copy_bandwidth, measure_device_time, read_gpu_state

SCHEMA = 1
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PRECISIONS = ("bf16", "fp16", "tf32", "fp32")
_SEED = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, or 2 after a line that says which argument or setting is wrong."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if getattr(options, "plot", None) and find_spec("matplotlib") is None:
        parser.error(
            "--plot needs matplotlib, got none; install it or leave the option out and plot the JSON elsewhere"
        )
    if options.run is run_step and options.against == OFFICIAL and options.checkout is None:
        parser.error("--against official needs --checkout, got none; give the folder of its code")
    if options.run is run_step and options.against == HUGGING_FACE and find_spec("transformers") is None:
        parser.error("--against hf needs the package transformers, got none; pip install 'transformers>=5'")
    if options.run is run_step and options.plot and (options.sizes or options.data_workers):
        parser.error("--plot must come without --sizes and --data-workers, which time no phases; leave it out")
    if options.run is not run_loader and not torch.cuda.is_available():
        parser.error("a benchmark must run on an NVIDIA GPU, got none; run it on a machine with one")
    try:
        options.run(options)
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="op|sweep|variants|inference|step|loader")

    op = commands.add_parser("op", help="our op beside its peers")
    _add_workloads(op, presets="encoder,decoder,dino,large", batches="1,4,32", dtypes="bf16,fp16,fp32")
    op.add_argument("--plot", type=Path, help="picture of the device times (needs matplotlib)")
    op.set_defaults(run=run_op, out=Path("results/op.json"))

    sweep = commands.add_parser("sweep", help="launch shapes of the plain kernels and, on Hopper GPUs, of theirs")
    _add_workloads(sweep, presets="encoder,decoder", batches="4", dtypes="bf16,fp32")
    sweep.add_argument(
        "--kernels", default="", help="regular expression of what to time, for example 'hopper .*backward'"
    )
    sweep.add_argument("--write", action="store_true", help="put the fastest of the plain kernels into the table")
    sweep.set_defaults(run=run_sweep, out=Path("results/sweep.json"), plot=None)

    variants = commands.add_parser("variants", help="instructive variants")
    _add_workloads(variants, presets="encoder", batches="4", dtypes="bf16")
    variants.set_defaults(run=run_variants, out=Path("results/variants.json"), plot=None)

    inference = commands.add_parser("inference", help="whole detectors, from raw images to boxes")
    inference.add_argument("--models", type=parse_names(list(MODELS)), default="one_stage,two_stage,dino")
    inference.add_argument("--contenders", type=parse_names(CONTENDERS), default=",".join(CONTENDERS))
    inference.add_argument("--precisions", type=parse_names(PRECISIONS), default="bf16")
    inference.add_argument("--batches", type=parse_counts, default="1,8")
    inference.add_argument("--size", type=parse_size, default="800x1333", help="height and width of the images")
    inference.add_argument("--set", action="append", default=[], help="override of configs/export.yaml, repeatable")
    inference.add_argument("--repeats", type=parse_repeats, default="100", help="calls that are timed")
    inference.add_argument("--plot", type=Path, help="picture of kernels and dispatch (needs matplotlib)")
    inference.add_argument("--out", type=Path, default=Path("results/inference.json"), help="results file")
    inference.set_defaults(run=run_inference)
    step = commands.add_parser("step", help="a training step by phase")
    step.add_argument("overrides", nargs="*", help="as for train.py: model=..., op=..., precision=..., backbone=...")
    step.add_argument("--batches", type=parse_counts, default="4")
    step.add_argument("--size", type=parse_size, default="800x1333", help="height x width of the images")
    step.add_argument("--boxes", type=parse_count, default="12", help="targets of each image")
    step.add_argument("--repeats", type=parse_repeats, default="20", help="measured steps")
    kinds = step.add_mutually_exclusive_group()
    kinds.add_argument(
        "--switches",
        action="store_true",
        help="with each of what makes it fast turned off, a row each; pass cuda_graphs=true compile=true",
    )
    kinds.add_argument(
        "--against",
        choices=PEERS,
        help="the official code or transformers, also with our op in it, beside ours, in turn",
    )
    kinds.add_argument("--sizes", type=parse_count, help="steps on so many sizes of images beside one of their area")
    kinds.add_argument(
        "--data-workers",
        type=parse_count,
        help="the full loader with so many processes beside the same batches on the GPU; pass data.root=...",
    )
    step.add_argument("--data-steps", type=parse_count, default="200", help="batches of the loader")
    step.add_argument("--checkout", type=Path, help="folder of the official code")
    step.add_argument("--dense", type=parse_count, help="also the peak with so many targets in one image")
    step.add_argument(
        "--largest-batch",
        type=parse_count,
        help="also find the largest batch of 24 and 80 GiB by trying, up to this, without graphs; and a row with "
        "gradient checkpointing",
    )
    step.add_argument("--plot", type=Path, help="picture of the phases (needs matplotlib)")
    step.add_argument("--out", type=Path, help="results file")
    step.set_defaults(run=run_step, out=Path("results/step.json"))

    loader = commands.add_parser("loader", help="batches of training data")
    loader.add_argument("overrides", nargs="*", help="of train.py, for example data=coco data.root=/path/to/coco")
    loader.add_argument("--workers", type=parse_worker_counts, default="0,1,2,4", help="numbers of loader processes")
    loader.add_argument("--seconds", type=float, default=10.0, help="time for each of them")
    loader.add_argument("--out", type=Path, help="results file")
    loader.set_defaults(run=run_loader, out=Path("results/loader.json"), plot=None)
    return parser


def parse_names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Returns a reader of comma-separated names that refuses unknown ones."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"names must be of {', '.join(known)}, got {unknown[0]!r}; correct it")
        return names

    return parse


def parse_counts(text: str) -> list[int]:
    """Reads comma-separated positive numbers.

    Raises:
        argparse.ArgumentTypeError: if one is not.
    """
    words = text.split(",")
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"counts must be positive numbers, got {text!r}; pass for example 1,4")
    return [int(word) for word in words]


def parse_count(text: str) -> int:
    """Reads one positive number."""
    (count,) = parse_counts(text)
    return count


def parse_worker_counts(text: str) -> list[int]:
    """Reads comma-separated numbers of processes, 0 for none."""
    words = text.split(",")
    if not all(word.isdigit() for word in words):
        raise argparse.ArgumentTypeError(f"worker counts must be numbers from 0 on, got {text!r}; pass for example 0,4")
    return [int(word) for word in words]


def parse_repeats(text: str) -> int:
    """Reads how often to measure; percentiles want at least five."""
    if not text.isdigit() or int(text) < 5:
        raise argparse.ArgumentTypeError(f"repeats must be a number from 5 on, got {text!r}; pass for example 20")
    return int(text)


def parse_size(text: str) -> tuple[int, int]:
    """Reads height and width, e.g. 800x1333."""
    words = text.split("x")
    if len(words) != 2 or not all(word.isdigit() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"size must be height and width, got {text!r}; pass for example 800x1333")
    return int(words[0]), int(words[1])


def run_step(options: argparse.Namespace) -> None:
    """Times a training step on random images, for every batch."""
    rows: list[Row] = []
    content = describe_run() | {"rows": rows}
    table = StepTable(**{field.name: getattr(options, field.name) for field in fields(StepTable)})
    height, width = options.size
    for batch in options.batches:
        case = StepCase(tuple(options.overrides), batch, height, width, options.boxes)
        for row in measure_table(case, torch.device("cuda"), table):
            print(format_step(row), flush=True)
            rows.append(row)
            write_results(options.out, content)
    if options.plot is not None:
        plot_steps(rows, options.plot)


def run_op(options: argparse.Namespace) -> None:
    """Times every implementation on every workload; the first one twice, which shows what a difference must exceed."""
    found, missing = find_peers()
    for package, reason in missing.items():
        print(f"{package}: {reason}")
    peers = [*own_implementations(), *found]
    peers.append(peers[0])
    roof = measure_copy_bandwidth(CudaStopwatch())
    meter = CudaMeter(options.repeats)
    rows: list[Row] = []
    content = describe_run() | {"missing_peers": missing, "copy_gb_s": roof / 1e9, "rows": rows, "repeated": []}

    def report(row: Row) -> None:
        print(format_row(row, roof / 1e9), flush=True)
        rows.append(row)
        write_results(options.out, content)

    for workload in draw_workloads(options):
        first, *_, again = run_workload(workload, peers, meter, report)
        if first["status"] == again["status"] == "timed":
            content["repeated"].append(compare_repeats([first, again]))
        fused, points = fuse_workload(workload)
        run_workload(fused, fused_implementations(points), meter, report, fused_reference(points))
    write_results(options.out, content)
    if options.plot is not None:
        plot_rows(rows, options.plot)


def run_sweep(options: argparse.Namespace) -> None:
    """Times the plain kernels in every launch shape, and on a Hopper GPU its kernels in some."""
    from msda_op.triton.launch_table import TABLE_PATH, write_table
    from parity.hopper_sweep import hopper_sweeps, sweep_shapes
    from parity.sweep import plain_launches, sweep_launch, table_entry

    stopwatch = CudaStopwatch()
    capability = torch.cuda.get_device_capability()
    architecture = 10 * capability[0] + capability[1]
    content = describe_run() | {"rows": []}
    measured_on = f"{torch.cuda.get_device_name()}, commit {content['environment']['commit']}"
    entries, chosen = [], re.compile(options.kernels).search

    def measure(call: Callable[[], Any]) -> Summary:
        return measure_device_time(call, stopwatch, options.repeats).ms

    for workload in draw_workloads(options):
        launches, swept = plain_launches(workload.inputs), {}
        for kernel in ("forward", "backward"):
            if not chosen(kernel):
                continue
            swept[kernel] = sweep_launch(launches[kernel], measure)
            best = swept[kernel][0]
            entries.append(table_entry(kernel, launches[kernel], workload.inputs, best, architecture, measured_on))
        for kernel, sweep in hopper_sweeps(workload.inputs, capability).items():
            if chosen(f"hopper {kernel}"):
                swept[f"hopper {kernel}"] = sweep_shapes(sweep, workload.inputs.value, measure)
        name = {"preset": workload.preset.name, "batch": workload.batch, "dtype": workload.dtype_name}
        for kernel, rows in swept.items():
            for row in rows:
                content["rows"].append(name | {"kernel": kernel} | row)
                print("  ".join(f"{key} {text}" for key, text in content["rows"][-1].items()), flush=True)
        write_results(options.out, content)
    if options.write:
        write_table(TABLE_PATH, entries)
        print(f"{len(entries)} entries written to {TABLE_PATH}")


def run_variants(options: argparse.Namespace) -> None:
    """Times the instructive variants."""
    from parity.variants import (
        backward_shapes,
        coalescing_and_unrolling,
        half_atomics,
        norm_gradients,
        timing_pitfalls,
    )

    stopwatch, repeats = CudaStopwatch(), options.repeats
    content = describe_run() | {"rows": []}
    for workload in draw_workloads(options):
        inputs = workload.inputs
        tensors = (inputs.value, inputs.spatial_shapes, inputs.sampling_locations, inputs.attention_weights)
        rows = [
            *coalescing_and_unrolling(inputs.value.device, inputs.value.dtype, stopwatch, repeats),
            *half_atomics(inputs, stopwatch, repeats),
            *backward_shapes(inputs, stopwatch, repeats),
            *norm_gradients(inputs.grad_output.flatten(0, 1), stopwatch, repeats),
            *timing_pitfalls(partial(own_implementations()[0].op, *tensors), stopwatch, repeats),
        ]
        name = {"preset": workload.preset.name, "batch": workload.batch, "dtype": workload.dtype_name}
        for row in rows:
            content["rows"].append(name | row)
            print("  ".join(f"{key} {text}" for key, text in row.items()), flush=True)
        write_results(options.out, content)


def run_inference(options: argparse.Namespace) -> None:
    """Times every contender on every detector and batch, beside an eager detector that is built as its own is.

    Two are built for a batch: for contenders that are compiled, and for others.
    """
    meter = CudaInferenceMeter(options.repeats)
    rows: list[Row] = []
    content = describe_run() | {"rows": rows}
    for model, precision, batch in product(options.models, options.precisions, options.batches):
        job = Job(model, precision, options.size, batch)
        detectors = {
            traced: build_detector(job, options.set, torch.device("cuda"), traced)
            for traced in {name in TRACED for name in options.contenders}
        }
        for name in options.contenders:
            rows.append(measure_inference(name, job, *detectors[name in TRACED], meter))
            print(format_inference(rows[-1]), flush=True)
            write_results(options.out, content)
    if options.plot is not None:
        plot_dispatch(rows, options.plot)


def run_loader(options: argparse.Namespace) -> None:
    """Times the training loader of a configuration."""
    from hydra import compose, initialize_config_dir
    from hydra.utils import instantiate

    from models.settings import check_numbers
    from parity.loader_benchmark import measure_loader

    with initialize_config_dir(str(Path(__file__).resolve().parent.parent / "configs"), version_base="1.3"):
        cfg = compose("train", overrides=options.overrides)
    check_numbers(cfg)
    data = instantiate(cfg.data)
    data.check()
    data.prepare_data()
    overrides = cut_folders(options.overrides)
    content: dict[str, Any] = {"schema": SCHEMA, "environment": describe_environment(), "overrides": overrides}
    content["rows"] = []
    for row in measure_loader(data, options.workers, options.seconds):
        content["rows"].append(row.as_json())
        print("  ".join(f"{key} {value}" for key, value in row.as_json().items()), flush=True)
        write_results(options.out, content)


def draw_workloads(options: argparse.Namespace) -> Iterator[Workload]:
    """Yields the workloads asked for, one at a time, since large ones do not fit next to each other."""
    for name, batch, dtype in product(options.presets, options.batches, options.dtypes):
        inputs = make_preset_inputs(PRESETS[name], batch, DTYPES[dtype], torch.device("cuda"), _SEED)
        yield Workload(PRESETS[name], batch, dtype, inputs)


def describe_run() -> dict[str, Any]:
    """Returns what a results file says beside its rows."""
    return {"schema": SCHEMA, "environment": describe_environment(), "gpu": read_gpu_state()}


def write_results(path: Path, content: dict[str, Any]) -> None:
    """Writes a results file, whole, so that an interrupted run keeps the rows it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _add_workloads(parser: argparse.ArgumentParser, presets: str, batches: str, dtypes: str) -> None:
    parser.add_argument("--presets", type=parse_names(list(PRESETS)), default=presets, help=f"of {', '.join(PRESETS)}")
    parser.add_argument("--batches", type=parse_counts, default=batches)
    parser.add_argument("--dtypes", type=parse_names(list(DTYPES)), default=dtypes, help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--repeats", type=parse_repeats, default="20", help="measurements of each time")
    parser.add_argument("--out", type=Path, help="results file")


if __name__ == "__main__":
    sys.exit(main())
