"""A file that an index reads as searches need it."""

import os
from pathlib import Path


class MappedFile:
    """Held open, so that a change shows wherever the file has gone since, and under whatever name.

    Args:
        file: just checked.
    """

    def __init__(self, file: Path):
        self.file = file.absolute()
        self._opened = open(file, "rb")  # noqa: SIM115 - open as long as this lives
        self._state = self._present_state()

    def refuse_changed(self) -> None:
        """ValueError where someone wrote into it: what would be made of it is not what was checked."""
        if self._present_state() != self._state:
            raise ValueError(f"{self.file} was changed after it was opened; load a copy that is whole")

    def _present_state(self) -> tuple[int, int]:
        found = os.fstat(self._opened.fileno())
        return found.st_size, found.st_mtime_ns


class MayBeMapped:
    """What a backend is that reads its vectors from a file as searches need them, or holds them in memory."""

    mapped: MappedFile | None = None
    """The file; None: in memory."""

    @property
    def memory_mapped(self) -> bool:
        return self.mapped is not None

    def refuse_changed(self) -> None:
        """ValueError where someone wrote into the file."""
        if self.mapped is not None:
            self.mapped.refuse_changed()
