"""Launch shapes of the plain kernels: the data table `launch_table.json`, and the rule for what is not in it.

`python -m scripts.benchmark sweep --write` measures them and writes the table. `triton.autotune` would choose at run
time, but it runs a kernel many times on the live tensors of a training step, and each run of the backward kernel adds
to the gradient of value once more.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

TABLE_PATH = Path(__file__).with_name("launch_table.json")
SCHEMA = 1

# Queries of one head over the whole batch from which on a card is full, however small its tiles are.
MANY_QUERIES = 16384

# Elements of a [BLOCK_Q, BLOCK_K, BLOCK_D] tile that one warp keeps in registers (16 a lane).
_WARP_ELEMENTS = 512
_MAX_WARPS = 8


class LaunchKey(NamedTuple):
    """What a launch shape depends on.

    Args:
        architecture: compute capability, e.g. 90; None for the interpreter.
        kernel: which pass.
        element_bytes: of value.
        block_k: points of a tile, a power of two.
        block_d: channels of a tile, a power of two.
        regime: "many" where B*Q reaches `MANY_QUERIES` (an encoder), else "few" (a decoder).
    """

    architecture: int | None
    kernel: Literal["forward", "backward"]
    element_bytes: int
    block_k: int
    block_d: int
    regime: Literal["few", "many"]


class LaunchShape(NamedTuple):
    """Queries of a tile and the warps that share it.

    Stages of software pipelining are not here: Triton pipelines no loop of these kernels, and 1 to 4 stages give the
    same PTX.
    """

    block_q: int
    num_warps: int


class Entry(NamedTuple):
    """A row of the table: the shape for a key, its median device time in ms and what it was measured on."""

    key: LaunchKey
    shape: LaunchShape
    milliseconds: float
    measured_on: str


def choose_regime(batch: int, num_queries: int) -> Literal["few", "many"]:
    """Returns the regime of a call of B items with Q queries."""
    return "many" if batch * num_queries >= MANY_QUERIES else "few"


def choose_shape(key: LaunchKey) -> LaunchShape:
    """Returns the measured shape for a key, or by rule one that fills one warp.

    With one warp the reductions over points and channels need no shared memory and no barrier; several share a query
    only where it has more elements. The backward kernel takes half as many where twice the shape spills: below sm_90,
    where it adds scalars, each at an address in registers of its own (255 registers; half the shape needs about 110),
    and in float32 from sm_100 on, where ptxas keeps it to 72 registers.
    """
    measured = _measured_shapes().get(key)
    if measured is not None:
        return measured
    elements = _WARP_ELEMENTS
    if key.kernel == "backward" and key.architecture is not None:
        spills = key.architecture < 90 or (key.architecture >= 100 and key.element_bytes == 4)
        elements = _WARP_ELEMENTS // 2 if spills else _WARP_ELEMENTS
    query_elements = key.block_k * key.block_d
    block_q = max(1, elements // query_elements)
    return LaunchShape(block_q, min(_MAX_WARPS, max(1, block_q * query_elements // elements)))


def read_table(path: Path) -> list[Entry]:
    """Reads a table.

    Raises:
        ValueError: if the file has another schema, or two rows for one key.
    """
    content = json.loads(path.read_text())
    if content["schema"] != SCHEMA:
        raise ValueError(f"schema of {path} must be {SCHEMA}, got {content['schema']}; write the table anew by a sweep")
    entries = [
        Entry(LaunchKey(**row["key"]), LaunchShape(**row["shape"]), row["milliseconds"], row["measured_on"])
        for row in content["entries"]
    ]
    keys = [entry.key for entry in entries]
    if len(set(keys)) < len(keys):
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"entries of {path} must have keys of their own, got {repeated} twice; delete one")
    return entries


def write_table(path: Path, entries: Sequence[Entry]) -> None:
    """Adds entries to a table, in place of those with the same key."""
    merged = {entry.key: entry for entry in (read_table(path) if path.exists() else [])}
    merged |= {entry.key: entry for entry in entries}
    content = {"schema": SCHEMA, "entries": [_to_json(merged[key]) for key in sorted(merged)]}
    path.write_text(json.dumps(content, indent=1) + "\n")


@lru_cache(maxsize=1)
def _measured_shapes() -> dict[LaunchKey, LaunchShape]:
    return {entry.key: entry.shape for entry in read_table(TABLE_PATH)}


def _to_json(entry: Entry) -> dict[str, Any]:
    return {**entry._asdict(), "key": entry.key._asdict(), "shape": entry.shape._asdict()}
