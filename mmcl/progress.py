"""What a training run reports: a progress bar, a history of records, TensorBoard where asked for."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

Record = dict[str, float | int]
"""Figures by name, and the `step` they belong to."""


class Reporter:
    """Collects losses between records; use it as a context manager around the loop.

    Args:
        total: optimiser steps.
        out: the run's folder, for TensorBoard.
        log: None or "tensorboard".
        show: show a progress bar; where the output is no terminal, its last state.
        main: whether this process reports.
    """

    def __init__(self, total: int, out: str | Path | None, log: str | None, show: bool, main: bool):
        if log not in (None, "tensorboard"):
            raise ValueError(f"unknown log {log!r}; choose 'tensorboard' or leave it out")
        if log and out is None:
            raise ValueError("log='tensorboard' needs `out`, the folder it writes into")
        self.total, self.show, self.main = total, show and main, main
        self.history: list[Record] = []
        self.writer = tensorboard_writer(Path(out) / "tensorboard") if log and out is not None and main else None
        self.bar: Any = None
        self._sum: float | Tensor = 0.0
        self._batches, self._rows = 0, 0
        self._since = time.perf_counter()

    def __enter__(self) -> "Reporter":
        self._since = time.perf_counter()
        if self.show:
            self.bar = progress_bar("{task.fields[loss]}  {task.fields[rate]}")
            self.bar.start()
            done = int(self.history[-1]["step"]) if self.history else 0
            self.task = self.bar.add_task("training", total=self.total, completed=done, loss="", rate="")
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.writer is not None:
            self.writer.close()

    def add(self, loss: Tensor, rows: int) -> None:
        """One batch's loss; kept as a tensor, so that nothing waits for the device."""
        self._sum = self._sum + loss.double()
        self._batches += 1
        self._rows += rows

    def record(self, step: int, lr: float) -> None:
        """Close the interval since the last record. ValueError where its mean loss is not finite."""
        loss = float(self._sum) / max(1, self._batches)
        if not math.isfinite(loss):
            raise ValueError(f"the loss became {loss} by step {step}; lower the rate, or look at the data")
        rate = self._rows / max(1e-9, time.perf_counter() - self._since)
        self._append({"step": step, "loss": loss, "lr": lr, "rows_per_second": rate})
        if self.bar is not None:
            self.bar.update(self.task, completed=step, loss=f"loss {loss:.4f}", rate=f"{rate:,.0f} rows/s")
        self._sum, self._batches, self._rows = 0.0, 0, 0
        self._since = time.perf_counter()

    def add_validation(self, step: int, values: dict[str, float]) -> None:
        """Figures of the validation data, as one more record."""
        self._append({"step": step, **{f"validation_{name}": value for name, value in values.items()}})
        if self.bar is not None:
            told = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
            self.bar.console.print(f"step {step}: validation {told}", highlight=False)
        self._since = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to report as if never interrupted."""
        return {"history": self.history, "sum": float(self._sum), "batches": self._batches, "rows": self._rows}

    def load_state(self, state: dict[str, Any]) -> None:
        """Undo `state`."""
        self.history = list(state["history"])
        self._sum, self._batches, self._rows = state["sum"], state["batches"], state["rows"]

    def _append(self, record: Record) -> None:
        self.history.append(record)
        if self.writer is not None:
            for name, value in record.items():
                self.writer.add_scalar(name, value, int(record["step"]))


@contextmanager
def counting(what: str, total: int | None, done: int, show: bool) -> Iterator[Callable[[int], None]]:
    """A bar over rows (of an unknown number for a stream); the yielded function advances it."""
    with progress_bar("", show) as bar:
        task = bar.add_task(what, total=total, completed=done)
        yield lambda rows: bar.advance(task, rows)


def progress_bar(figures: str, show: bool = True) -> Any:
    """A rich bar with counts, `figures` of the task and time left, on stderr: stdout belongs to results."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(figures),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        disable=not show,
    )


def tensorboard_writer(folder: Path) -> Any:
    """A SummaryWriter; ImportError says which extra brings it."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("log='tensorboard' needs TensorBoard: pip install 'mmcl[tensorboard]'") from error
    return SummaryWriter(str(folder))
