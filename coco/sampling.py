"""Which image comes when, and how it is augmented: functions of seed, epoch and place, so that a run can be resumed."""

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from coco.dataset import Sample


class Draws(Dataset[Sample]):
    """Numbers every augmented image of a training: draw d shows image d modulo their number.

    The augmentation of a draw follows from the seed and the draw alone, whichever process makes it and whatever was
    drawn before; that is what makes a run independent of the number of workers, and a resumed one equal to one that
    was never stopped.

    Args:
        dataset: The images.
        repeats: How often an epoch goes over them.
        seed: Seed of the augmentation.

    Attributes:
        num_images: Number of the images.
        repeats: As given.
    """

    def __init__(self, dataset: Dataset[Sample], *, repeats: int, seed: int) -> None:
        self._dataset = dataset
        self.num_images = len(dataset)  # type: ignore[arg-type]  # a map-style data set has a length
        self.repeats = repeats
        self._seed = seed

    def __len__(self) -> int:
        return self.num_images * self.repeats

    def __getitem__(self, draw: int) -> Sample:
        generator = torch.default_generator
        state = generator.get_state()
        digest = hashlib.blake2b(f"{self._seed},{draw}".encode(), digest_size=4).digest()
        generator.manual_seed(int.from_bytes(digest, "little"))
        try:
            return self._dataset[draw % self.num_images]
        finally:
            generator.set_state(state)


class DrawSampler(DistributedSampler[Sample]):
    """Shuffles the draws of an epoch over all processes; the order is a function of seed, epoch and rank.

    Each repeat of the images is shuffled by itself, as an epoch of its own would be: none comes again before all have
    come.

    Args:
        draws: What to sample from.
        num_replicas: Number of processes.
        rank: This process.
        seed: Seed of the order.

    Attributes:
        first: Place in this process's part of the next epoch at which to begin, for that epoch alone.
    """

    def __init__(self, draws: Draws, *, num_replicas: int, rank: int, seed: int) -> None:
        super().__init__(draws, num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed)
        self._draws = draws
        self.first = 0

    def __iter__(self) -> Iterator[int]:  # type: ignore[override]  # the base class says samples and yields indices
        first, self.first = self.first, 0
        num_images, num_draws = self._draws.num_images, len(self._draws)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        passes = [
            num_images * repeat + torch.randperm(num_images, generator=generator)
            for repeat in range(self._draws.repeats)
        ]
        order = torch.cat(passes).tolist() * math.ceil(self.total_size / num_draws)  # all processes draw equally many
        mine = order[self.rank : self.total_size : self.num_replicas]
        for draw in mine[first:]:
            yield self.epoch * num_draws + draw


class TrainingLoader(DataLoader[Sample]):
    """A loader whose epoch can begin after its first batches.

    Attributes:
        num_done: Returns how many batches of the epoch are done already; asked when an epoch's first batch is.
    """

    num_done: Callable[[], int] = staticmethod(lambda: 0)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator over the base class's iterator
        if isinstance(self.sampler, DrawSampler):
            self.sampler.first = self.num_done() * (self.batch_size or 1)
        yield from super().__iter__()
