"""The error of data that its owner can mend."""


class DataError(ValueError):
    """A fault of the data or of the settings that name it, told in one line.

    An error of a loader's worker arrives as its whole traceback in one message; the last line is what happened.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message.strip().splitlines()[-1].removeprefix(f"{__name__}.{type(self).__name__}: "))


class NonFiniteDetectionsError(ValueError):
    """Detections hold NaN or infinity: the model has diverged."""
