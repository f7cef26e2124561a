import numpy as np
import pytest

from coco.file_names import FileNames


def test_strings_come_back_whatever_their_length_and_script():
    names = ["a.jpg", "", "Bär/图.png", "c" * 300]
    packed = FileNames(names)
    assert len(packed) == 4
    assert [packed[place] for place in range(4)] == names
    with pytest.raises(IndexError):
        packed[4]


def test_it_holds_arrays_alone():
    packed = FileNames(["a", "b"])
    assert all(isinstance(value, np.ndarray) for value in vars(packed).values())
    assert len(FileNames([])) == 0
