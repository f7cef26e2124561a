import mmap

import pytest

from coco.datamodule import SyntheticDataModule
from coco.transforms import evaluation_transform
from parity.loader_benchmark import STAGES, measure_loader, private_memory_mib, time_stages


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    resize = evaluation_transform(size=64, max_size=64)
    module = SyntheticDataModule(
        cache_dir=str(tmp_path_factory.mktemp("cache")),
        num_train=6,
        num_val=2,
        image_size=48,
        data_seed=0,
        train_transform=resize,
        eval_transform=resize,
        batch_size=2,
        eval_batch_size=1,
        num_workers=0,
        size_divisor=1,
        limit_train=None,
        fraction=1.0,
        repeat_train=1,
        limit_val=None,
        seed=0,
    )
    module.prepare_data()
    return module


def test_rows_say_how_fast_and_what_limits(data):
    rows = list(measure_loader(data, [0, 1], seconds=0.3))
    assert [row.num_workers for row in rows] == [0, 1]
    assert all(row.img_per_s > 0 for row in rows)
    assert rows[0].growth_mib is None
    assert abs(rows[1].growth_mib) < 50
    assert all(row.limit for row in rows)
    assert set(rows[0].as_json()["stage_ms"]) == set(STAGES)


def test_stages_are_timed_apart(data):
    spent = time_stages(data.train_dataset, 2, 1, num_images=4)
    assert all(value >= 0 for value in spent.values())
    assert spent["read"] > 0


def test_private_memory_sees_an_allocation():
    before = private_memory_mib()
    with mmap.mmap(
        -1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    ) as block:  # memory of its own, not what the process has freed before
        block.write(b"x" * len(block))
        assert private_memory_mib() - before > 7
