"""From the modalities' values to the vectors that an index stores and asks with."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from mmcl.arrays import refuse_bad_rows, same_length
from mmcl.index.bank import balance, bank_vectors, query_with_bank, with_bank
from mmcl.index.sources import Block, Source, fused_block
from mmcl.scores import Score, load_score
from mmcl.values import as_embeddings, as_query, encode, is_encoded

SCORE, BANK = "score.safetensors", "bank.npy"
FILES = (SCORE, BANK)


@dataclass(frozen=True)
class Fusion:
    """How tuples become vectors: a score, the modalities that are stored, and a bank of queries where there is one."""

    score: Score
    modalities: tuple[str, ...]
    bank: np.ndarray | None = None
    """(b, width) query vectors: items are ranked against how they answer these on the average."""
    bank_modalities: tuple[str, ...] = ()
    bank_scale: float = 1.0
    """A power of two: its coordinate is stored times this, and divided by it in queries; see `balance`."""

    @property
    def width(self) -> int:
        """Of the vectors, with the bank's coordinate."""
        return self.score.width + (self.bank is not None)

    @property
    def kind(self) -> str:
        """What inner products of the vectors are."""
        return "score" if self.bank is None else "pmi"

    @property
    def query_modalities(self) -> tuple[str, ...]:
        """Those that a search may name."""
        return tuple(name for name in self.score.modalities if name not in self.modalities)

    def items(self, source: Source, metadata: list[pa.Table]) -> Iterator[np.ndarray]:
        """(rows, width) float32 item vectors, block by block; metadata that comes along is collected into the list."""
        return self.fused(source.blocks, metadata)

    def fused(self, blocks: Iterable[Block], metadata: list[pa.Table], start: int = 0) -> Iterator[np.ndarray]:
        """The same of blocks whose rows count from `start`."""
        for embeddings, table in blocks:
            fused = fused_block(self.score, embeddings, start).numpy()
            start += len(fused)
            if table is not None:
                metadata.append(table)
            yield fused if self.bank is None else with_bank(fused, self.bank, self.bank_scale)

    def queries(self, queries: Any, model: Any, encoded: Any) -> np.ndarray:
        """(nq, width) float32 query vectors of {modality: embeddings or raw values}; see `TupleIndex.search`."""
        self._check_names(queries)
        rows = embedded(queries, self.score, model, encoded)
        absent = tuple(name for name in self.query_modalities if name not in rows)
        with torch.no_grad():
            vectors = self.score.query_vectors(rows, absent=absent).float()
        if not torch.isfinite(vectors).all():
            row = int((~torch.isfinite(vectors).all(dim=1)).nonzero()[0])
            raise ValueError(f"query row {row}: {list(rows)} fuse to a vector that is not finite in float32")
        return vectors.numpy() if self.bank is None else self.bank_queries(vectors.numpy())

    def embedded_queries(self, queries: Any, model: Any, encoded: Any) -> dict[str, torch.Tensor]:
        """{modality: (nq, d)} of queries that a search could ask, checked and encoded before there is an index."""
        self._check_names(queries, "queries")
        return embedded(queries, self.score, model, encoded)

    def bank_queries(self, vectors: np.ndarray) -> np.ndarray:
        """(nq, width): (nq, score.width) query vectors, or the bank's own, with what meets the bank's coordinate."""
        return query_with_bank(vectors, self.bank_scale)

    def with_bank(self, bank: Any, model: Any, encoded: Any) -> "Fusion":
        """The same with a bank {query modality: rows}."""
        self._check_names(bank, "the bank")
        rows = embedded(bank, self.score, model, encoded)
        absent = tuple(name for name in self.query_modalities if name not in rows)
        vectors = bank_vectors(self.score, rows, absent)
        names = tuple(name for name in self.query_modalities if name in rows)
        return Fusion(self.score, self.modalities, vectors, names, balance(self.score, self.modalities, vectors))

    def about(self) -> dict[str, Any]:
        """What the manifest says about it."""
        bank = None
        if self.bank is not None:
            bank = {"modalities": list(self.bank_modalities), "rows": len(self.bank)}
        about = {"modalities": list(self.modalities), "score": self.score.config(), "kind": self.kind}
        return {**about, "width": self.width, "bank": bank, "bank_scale": self.bank_scale}

    def write(self, folder: Path) -> None:
        """Write score and bank."""
        self.score.save(folder / SCORE)
        if self.bank is not None:
            with open(folder / BANK, "wb") as file:
                np.save(file, self.bank, allow_pickle=False)

    @classmethod
    def read(cls, folder: Path, manifest: Mapping[str, Any]) -> "Fusion":
        """Undo `write`."""
        fusion = cls(frozen_copy(load_score(folder / SCORE)), tuple(manifest["modalities"]))
        if manifest["bank"] is None:
            return fusion
        bank = np.load(folder / BANK, allow_pickle=False)
        names = tuple(manifest["bank"]["modalities"])
        return cls(fusion.score, fusion.modalities, bank, names, manifest.get("bank_scale", 1.0))

    def _check_names(self, queries: Any, what: str = "the query") -> None:
        """Modalities of a query: at least one, known, not stored; those of the bank where there is one."""
        choices = f"a search names some of {list(self.query_modalities)}"
        if not isinstance(queries, Mapping):
            raise ValueError(f"{what} must be {{modality: values}}, got {type(queries).__name__}; {choices}")
        for name in queries:
            if name in self.modalities:
                raise ValueError(f"modality {name!r} is stored in this index; {choices}")
            if name not in self.query_modalities:
                raise KeyError(f"unknown modality {name!r} in {what}; {choices}")
        if not queries:
            raise ValueError(f"{what} is empty; {choices}")
        if self.bank is not None and set(queries) != set(self.bank_modalities):
            raise ValueError(
                f"this index ranks against a bank of {list(self.bank_modalities)}; {what} names {list(queries)}, and "
                "must name just those"
            )


def embedded(values: Mapping[str, Any], score: Score, model: Any, encoded: Any) -> dict[str, torch.Tensor]:
    """{modality: (n, d) float32} of embeddings or raw values, checked row by row."""
    values = {name: as_query(value, name, model) for name, value in values.items()}
    ready = {name: is_encoded(value, name, score.dim, model, encoded) for name, value in values.items()}
    raw = {name: value for name, value in values.items() if not ready[name]}
    rows = {name: as_embeddings(values[name], name, score.dim) for name in values if ready[name]}
    rows |= encode(model, raw, score.dim) if raw else {}
    for name, part in rows.items():
        refuse_bad_rows(part, name)
    same_length(rows)
    return rows


def frozen_copy(score: Score) -> Score:
    """The score as an index keeps it, whatever training does to the original."""
    return copy.deepcopy(score).cpu().float().eval().requires_grad_(False)
