"""The table of measured launch shapes."""

import json
from pathlib import Path

import pytest

from msda_op.triton import launch_table
from msda_op.triton.launch_table import (
    MANY_QUERIES,
    SCHEMA,
    TABLE_PATH,
    Entry,
    LaunchKey,
    LaunchShape,
    choose_regime,
    choose_shape,
    read_table,
    write_table,
)

KEY = LaunchKey(90, "backward", 2, 4, 32, "many")
SHAPE = LaunchShape(block_q=4, num_warps=1)


def test_shipped_table_is_sound() -> None:
    for entry in read_table(TABLE_PATH):
        assert entry.key.kernel in ("forward", "backward")
        assert entry.key.regime in ("few", "many")
        assert entry.shape.block_q & (entry.shape.block_q - 1) == 0
        assert entry.shape.num_warps in (1, 2, 4, 8)
        assert entry.milliseconds > 0
        assert entry.measured_on
        assert choose_shape(entry.key) == entry.shape


@pytest.mark.parametrize(
    ("block_k", "block_d", "expected"), [(4, 32, (4, 1)), (4, 8, (16, 1)), (4, 64, (2, 1)), (16, 256, (1, 8))]
)
def test_rule_fills_a_warp_and_grows_only_for_wide_heads(block_k: int, block_d: int, expected: tuple[int, int]) -> None:
    for architecture in (None, 75):  # the interpreter, and a card that nobody has measured
        assert choose_shape(LaunchKey(architecture, "forward", 2, block_k, block_d, "few")) == expected


def test_backward_takes_half_as_much_where_atomics_are_scalar() -> None:
    key = LaunchKey(None, "backward", 3, 4, 32, "many")  # no value has elements of 3 bytes: never in the table
    assert choose_shape(key) == choose_shape(key._replace(architecture=90)) == (4, 1)
    assert choose_shape(key._replace(architecture=89)) == (2, 1)
    assert choose_shape(key._replace(architecture=80, block_d=256)) == (1, 4)


def test_a_measured_shape_comes_before_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_table, "_measured_shapes", lambda: {KEY: LaunchShape(32, 8)})
    assert choose_shape(KEY) == (32, 8)
    assert choose_shape(KEY._replace(regime="few")) == (4, 1)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    entries = [Entry(KEY, SHAPE, 1.25, "a card"), Entry(KEY._replace(kernel="forward"), SHAPE, 0.5, "a card")]
    write_table(path, entries)
    assert sorted(read_table(path)) == sorted(entries)


def test_a_new_measurement_replaces_the_old_one_of_its_key_alone(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    other = Entry(KEY._replace(architecture=80), SHAPE, 3.0, "an older card")
    write_table(path, [Entry(KEY, SHAPE, 1.25, "a card"), other])
    faster = Entry(KEY, LaunchShape(2, 1), 1.0, "a card")
    write_table(path, [faster])
    assert sorted(read_table(path)) == sorted([faster, other])


def test_other_schemas_and_repeated_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"schema": SCHEMA + 1, "entries": []}))
    with pytest.raises(ValueError, match=f"schema of .* must be {SCHEMA}, got {SCHEMA + 1}"):
        read_table(path)
    write_table(path.with_name("one.json"), [Entry(KEY, SHAPE, 1.0, "a card")])
    content = json.loads(path.with_name("one.json").read_text())
    path.write_text(json.dumps(content | {"entries": 2 * content["entries"]}))
    with pytest.raises(ValueError, match=r"must have keys of their own, got LaunchKey\(architecture=90"):
        read_table(path)


def test_regime_changes_where_a_card_is_full() -> None:
    assert choose_regime(4, 300) == choose_regime(1, MANY_QUERIES - 1) == "few"
    assert choose_regime(1, MANY_QUERIES) == choose_regime(4, 22223) == "many"
    assert choose_regime(0, 300) == "few"
