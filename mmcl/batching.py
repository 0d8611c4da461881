"""Batches for training: read rows, prepare them by the model's encoders, find groups of equal answers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as count_from
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mmcl.arrays import refuse_unknown
from mmcl.data import (
    EQUAL,
    as_names,
    column_rows,
    group_ids,
    has_transform,
    modality_columns,
    named_labels,
    refuse_missing_column,
    undecoded,
)
from mmcl.encoders.base import FEATURES
from mmcl.inputs import Inputs, map_inputs, take_rows
from mmcl.model import MultimodalModel

FEATURE_ROWS = 256
STREAM_BUFFER = 10_000
"""Rows among which a stream is shuffled."""


@dataclass(frozen=True)
class Batch:
    """Rows of a dataset, prepared for a model."""

    rows: list[int]
    """Positions in the dataset (of a stream: since its start)."""
    inputs: dict[str, Inputs]
    groups: dict[str, Tensor]


class BatchMaker(Dataset):
    """Makes batches of a dataset's rows: read, prepare by the model's encoders, find groups of equal answers.

    Args:
        model: whose encoders prepare the raw values (on the CPU).
        dataset: `datasets.Dataset` or `datasets.IterableDataset`.
        columns: {modality: column}; default: columns named as the modalities.
        groups: {modality: "equal" or a column}: rows that share the raw value, or that column's, are one answer.
        cache: prepare every distinct raw value once and keep it in memory; for data that fit.
        modalities: those to read; default: all of the model's.
    """

    def __init__(
        self,
        model: MultimodalModel,
        dataset: Any,
        columns: Mapping[str, str] | None = None,
        groups: Mapping[str, str] | None = None,
        cache: bool = False,
        modalities: Sequence[str] | None = None,
    ):
        self.model = model
        self.dataset = undecoded(dataset)
        if cache and has_transform(self.dataset):
            raise ValueError("cache_inputs would freeze the dataset's transform; leave one of them out")
        self.columns = modality_columns(dataset, modalities or model.modalities, columns)
        refuse_unknown(groups or {}, model.modalities, "groups")
        self.groups = {n: self.columns[n] if column == EQUAL else column for n, column in (groups or {}).items()}
        for name, column in self.groups.items():
            refuse_missing_column(dataset, column, f"groups of {name!r}")
        self.labels = {column: named_labels(self.dataset, column) for column in self.columns.values()}
        self.count: int | None = len(dataset) if hasattr(dataset, "__len__") else None
        self.cached: dict[str, tuple[Inputs, Any]] = {}
        """{modality: (inputs, position of each row among them)}."""
        if cache and self.count is None:
            raise ValueError("a stream cannot be cached; leave cache_inputs out")
        if cache:
            self.cached = {name: self._prepare_all(name) for name in self.columns}
        self.read = self._still_read()

    def __getitem__(self, rows: list[int]) -> Batch:
        """The batch of these rows of a map-style dataset."""
        return self.batch(rows, {} if self.read is None else self.read[rows])

    def batch(self, rows: list[int], values: Mapping[str, list]) -> Batch:
        """The batch of raw values {column: list}, whose positions are `rows`."""
        inputs = {}
        for name, column in self.columns.items():
            if name in self.cached:
                kept, position = self.cached[name]
                inputs[name] = take_rows(kept, position[rows])
            else:
                inputs[name] = self.prepare(name, values[column], rows)
        return Batch(rows, inputs, {name: self._groups(name, values, rows) for name in self.groups})

    def keep_features(self) -> None:
        """Run each frozen backbone over all rows, where the model is now, and keep its features in place of inputs.

        Raises: ValueError where no encoder is frozen, or the rows are no fixed ones: a stream, a transform.
        """
        frozen = [name for name in self.columns if self.model.encoders[name].frozen]
        if not frozen:
            raise ValueError(f"cache_features: none of the encoders of {list(self.columns)} is frozen")
        if self.count is None or has_transform(self.dataset):
            raise ValueError("cache_features needs rows that stay as they are: no stream, and no transform")
        for name in frozen:
            rows = self.dataset.select_columns([self.columns[name]])
            parts = [self._features(name, *each) for each in column_rows(rows, FEATURE_ROWS)]
            self.cached[name] = {FEATURES: torch.cat(parts)}, np.arange(self.count)
        self.read = self._still_read()

    @torch.no_grad()
    def _features(self, name: str, rows: list[int], values: Mapping[str, list]) -> Tensor:
        encoder, device = self.model.encoders[name], self.model.device
        inputs = map_inputs(lambda part: part.to(device), self.prepare(name, values[self.columns[name]], rows))
        return encoder.features(inputs).cpu()

    def _still_read(self) -> Any:
        """The columns that batches are made of, or None."""
        read = (column for name, column in self.columns.items() if name not in self.cached)
        wanted = {*self.groups.values(), *read}
        return self.dataset.select_columns(sorted(wanted)) if wanted else None

    def _groups(self, name: str, values: Mapping[str, list], rows: Sequence[int]) -> Tensor:
        column = self.groups[name]
        for row, value in zip(rows, values[column], strict=True):
            if value is None:
                raise ValueError(f"groups of {name!r} (column {column!r}): row {row} is missing (None)")
        return group_ids(values[column])

    def prepare(self, name: str, values: list, rows: Sequence[int]) -> Inputs:
        """Inputs of one modality; ValueError names modality, column and the dataset's row."""
        column = self.columns[name]
        where = name if column == name else f"{name} (column {column!r})"
        return self.model.prepare(name, as_names(values, self.labels[column]), rows, where)

    def _prepare_all(self, name: str) -> tuple[Inputs, Tensor]:
        """(inputs of the distinct values, position of each row among them)."""
        values = self.dataset[self.columns[name]][:]
        _, first, position = np.unique(group_ids(values).numpy(), return_index=True, return_inverse=True)
        return self.prepare(name, [values[row] for row in first], first.tolist()), torch.from_numpy(position)


def planned_steps(
    count: int | None, epochs: int, steps: int | None, batch_size: int, accumulate: int, world: int
) -> tuple[int | None, int]:
    """(optimiser steps an epoch, steps in all). ValueError for a stream without `steps`, or too few rows."""
    if count is None:
        if steps is None:
            raise ValueError("a stream has no length: give `steps`")
        return None, steps
    batches = count // (batch_size * world)
    if not batches:
        need = f"batch_size {batch_size}" + (f" on {world} processes" if world > 1 else "")
        raise ValueError(f"the dataset has {count} rows, too few for {need}")
    per_epoch = max(1, batches // accumulate)
    return per_epoch, steps or max(1, batches * epochs // accumulate)


def batches(
    maker: BatchMaker, batch_size: int, seed: int, workers: int, rank: int, world: int, start: int
) -> Iterator[Batch]:
    """Batches without end, from number `start` on; `workers` processes prepare them."""
    if maker.count is None:
        return islice(stream_batches(maker, batch_size, seed, rank, world), start, None)
    order = islice(shuffled_batches(maker.count, batch_size, seed, rank, world), start, None)
    if not workers:
        return map(maker.__getitem__, order)
    loader: DataLoader = DataLoader(
        Guarded(maker),
        sampler=order,
        batch_size=None,
        num_workers=workers,
        collate_fn=keep,
        multiprocessing_context="fork",
        generator=torch.Generator(),  # its own, so that the global one is not touched
    )
    return map(unguarded, loader)


class Guarded(Dataset):
    """A worker's batches, or the error in place of one: raised there, it would come back with the worker's trace."""

    def __init__(self, maker: BatchMaker):
        self.maker = maker

    def __getitem__(self, rows: list[int]) -> Batch | ValueError:
        try:
            return self.maker[rows]
        except ValueError as error:
            return ValueError(str(error))


def unguarded(batch: Batch | ValueError) -> Batch:
    """The batch, or the error that a worker met."""
    if isinstance(batch, ValueError):
        raise batch
    return batch


def keep(batch: Any) -> Any:
    """The batch as it was made, with no collation."""
    return batch


def shuffled_batches(count: int, batch_size: int, seed: int, rank: int = 0, world: int = 1) -> Iterator[list[int]]:
    """Rows of every batch of this rank, epoch after epoch without end; each epoch is a new order of all rows.

    The rows that do not fill a global batch (batch_size * world) are left out of their epoch, others in each.
    """
    batches = count // (batch_size * world)
    for epoch in count_from() if batches else ():
        order = np.random.default_rng([seed, epoch]).permutation(count)
        for batch in range(batches):
            start = (batch * world + rank) * batch_size
            yield order[start : start + batch_size].tolist()


def stream_batches(maker: BatchMaker, batch_size: int, seed: int, rank: int, world: int) -> Iterator[Batch]:
    """Full batches of this rank's part of a stream, shuffled in a buffer, pass after pass without end."""
    from datasets.distributed import split_dataset_by_node

    stream = maker.dataset.shuffle(seed=seed, buffer_size=STREAM_BUFFER)
    stream = split_dataset_by_node(stream, rank, world) if world > 1 else stream
    done = 0
    for epoch in count_from():
        stream.set_epoch(epoch)
        before = done
        for values in stream.iter(batch_size=batch_size, drop_last_batch=True):
            yield maker.batch(list(range(done, done + batch_size)), values)
            done += batch_size
        if done == before:
            raise ValueError(f"the stream has fewer rows than batch_size {batch_size}")
