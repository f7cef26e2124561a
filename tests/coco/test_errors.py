import pytest
from torch.utils.data import DataLoader

from coco.errors import DataError, explain_dead_worker


class Faulty:
    """Raises the given error for its only item."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise self.error


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_a_worker_is_one_line(num_workers):
    with pytest.raises(DataError) as caught:
        next(iter(DataLoader(Faulty(DataError("image must be whole, got a.jpg; replace it")), num_workers=num_workers)))
    assert str(caught.value) == "image must be whole, got a.jpg; replace it"


def test_a_dead_worker_is_explained_and_nothing_else():
    dead = RuntimeError("DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that ...")
    assert "--shm-size" in explain_dead_worker(dead)
    assert "data.num_workers=0" in explain_dead_worker(dead)
    assert "\n" not in explain_dead_worker(dead)
    assert explain_dead_worker(RuntimeError("CUDA error")) is None
