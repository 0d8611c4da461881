"""Arrays that grow at the end, while earlier snapshots of them stay as they were."""

import numpy as np

SPARE = 1.5


class Growing:
    """An array of rows that only ever gets longer; appending makes a new snapshot that shares the old one's memory.

    Only the newest snapshot may be appended to: memory behind its end is the next one's. Appending n rows one by one
    copies each of them a constant number of times.
    """

    def __init__(self, rows: np.ndarray):
        self._buffer, self._count = rows, len(rows)

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> np.ndarray:
        """(n, ...) view; not to be written to."""
        return self._buffer[: self._count]

    def appended(self, rows: np.ndarray) -> "Growing":
        """A snapshot with these rows behind its own."""
        if not len(rows):
            return self
        count = self._count + len(rows)
        buffer = self._buffer
        if count > len(buffer):
            buffer = np.empty((max(count, int(SPARE * len(buffer)) + 16), *buffer.shape[1:]), buffer.dtype)
            buffer[: self._count] = self.rows
        buffer[self._count : count] = rows
        grown = Growing(buffer)
        grown._count = count
        return grown
