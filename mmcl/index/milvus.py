"""Tuples kept in Milvus: ids, vectors and metadata in one collection."""

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from mmcl.index.hits import Hits, split_by
from mmcl.index.milvus_about import About, place, read_about
from mmcl.index.milvus_client import Connection
from mmcl.index.milvus_collection import (
    MAX_ID_BYTES,
    METADATA,
    VECTOR,
    Saving,
    check_collection,
    check_name,
    create_collection,
    filter_expression,
    load_collection,
    make_room,
)
from mmcl.index.milvus_columns import bring
from mmcl.index.milvus_factory import Plan, plan_of
from mmcl.index.milvus_ids import begin_above, claim
from mmcl.index.milvus_rows import MAX_ROWS, Found, Rows
from mmcl.index.milvus_values import read_documents


class MilvusTuples:
    """Vectors by id in a Milvus collection, ranked by raw inner product. `create` or `open` one.

    Fields: `id` (INT64 or VARCHAR, primary), `vector` (FLOAT_VECTOR), `metadata` (JSON, see `milvus_values`).
    """

    def __init__(self, rows: Rows, plan: Plan, about: About):
        self._rows, self._plan, self._about = rows, plan, about
        self._connection = rows.connection
        self.collection, self.width, self.named = rows.collection, rows.width, rows.named
        self._writer = uuid.uuid4().hex
        self._next_id = 0
        """All others know that automatic ids begin here or above."""

    @classmethod
    def create(
        cls,
        uri: Any,
        collection: Any,
        width: int,
        named: bool,
        factory: Any = "auto",
        token: str | None = None,
        replace: bool = False,
    ) -> "MilvusTuples":
        """A new, empty collection.

        Args:
            uri: a path that ends in ".db" for Milvus Lite in this process; or http://host:port of a server or cluster.
            collection: its name.
            width: of the vectors.
            named: whether ids are str.
            factory: "Flat" (also "auto"), "IVF{nlist},Flat", "IVF{nlist},SQ8", "HNSW{M}"; except on Milvus Lite
                "IVF{nlist},PQ{m}".
            token: "user:password" or an API key.
            replace: drop a collection of this name first, if it is one of ours.
        Raises: ValueError where there is such a collection, or the factory string is none of these; ConnectionError.
        """
        check_name(collection)
        connection = Connection(uri, token)
        try:
            plan = plan_of(factory, width, connection.is_lite)
            make_room(connection, collection, replace)
            about = About(plan.factory, pa.schema([]))
            create_collection(connection, collection, width, named, plan, about)
            return cls(Rows(connection, collection, named, width), plan, about)
        except BaseException:
            connection.close()
            raise

    @classmethod
    def open(cls, uri: Any, collection: Any, width: int, token: str | None = None) -> "MilvusTuples":
        """A collection that `create` made.

        Raises: ValueError where it is not there, or not ours, or differs in schema, width or index; FileNotFoundError
            where there is no such folder; ConnectionError.
        """
        check_name(collection)
        connection = Connection(uri, token, must_exist=True)
        try:
            if not connection.call("has_collection", collection_name=collection):
                raise ValueError(f"there is no {place(connection, collection)}")
            about = read_about(connection, collection)
            plan = plan_of(about.factory, width, connection.is_lite)
            named = check_collection(connection, collection, width, plan)
            load_collection(connection, collection, plan)
            return cls(Rows(connection, collection, named, width), plan, about)
        except BaseException:
            connection.close()
            raise

    def __len__(self) -> int:
        return self._rows.count()

    def __contains__(self, key: object) -> bool:
        return bool(self._rows.there([key]))

    def __repr__(self) -> str:
        return f"MilvusTuples({place(self._connection, self.collection)}, factory={self.factory!r})"

    @property
    def factory(self) -> str:
        return self._plan.factory

    @property
    def exact(self) -> bool:
        """Whether scores are inner products of the very vectors that were added."""
        return self._plan.type.exact

    @property
    def device(self) -> str:
        """Where searches run; Milvus itself decides."""
        return "cpu"

    def move(self, device: str) -> None:
        """ValueError for a GPU: only the server's own configuration would bring one in."""
        if device.startswith("cuda"):
            raise ValueError(f"device {device!r}: Milvus searches where it runs; use device='cpu'")

    @property
    def columns(self) -> list[str]:
        """Of the metadata."""
        return self._about.columns.names

    def info(self) -> dict[str, Any]:
        """What it is, JSON-serialisable."""
        return {
            "uri": self._connection.name,
            "collection": self.collection,
            "server": self._connection.version,
            "factory": self.factory,
            "index_type": self._plan.type.name,
            "metric": "inner product",
            "exact": self.exact,
            "width": self.width,
            "count": len(self),
            "columns": self.columns,
        }

    @property
    def stored_bytes(self) -> int:
        """Of the vectors."""
        return 4 * self.width * len(self)

    def saving(self) -> Saving:
        """What a saved index keeps of them."""
        return Saving(self)

    def verify(self, width: int) -> None:
        """ValueError where the collection is not, or no longer, what it should be for vectors of this width."""
        check_collection(self._connection, self.collection, width, self._plan)

    def check_parameters(self, parameters: Mapping[str, Any]) -> None:
        """ValueError for a search parameter that this type does not have."""
        self._plan.check_parameters(parameters)

    def search(self, queries: np.ndarray, k: int, where: Any, parameters: Mapping[str, Any]) -> Hits:
        """The k items of largest inner product with each of (nq, width) float32 queries.

        Args:
            k: at most 16,384, which is Milvus's limit.
            where: a DuckDB expression over the metadata, or None.
            parameters: nprobe of IVF types, efSearch of HNSW; checked.
        Raises: ValueError for a larger k, for another width, and for a filter that Milvus cannot answer.
        """
        if k > MAX_ROWS:
            raise ValueError(f"k = {k} is more than Milvus returns for one query: {MAX_ROWS}")
        self._check_width(queries)
        expression = self._expression(where)
        return self._hits(self._rows.search(queries, k, expression, self._plan, parameters), k)

    def get(self, ids: Iterable[Any]) -> list[dict[str, Any]]:
        """Metadata of ids; KeyError names one that is not there."""
        rows = [row[METADATA] for row in self._rows.known(list(ids), METADATA)]
        return read_documents(rows, self._columns_of(rows))

    def vectors(self, ids: Iterable[Any]) -> np.ndarray:
        """(n, width) float32 vectors as they were added; KeyError names an id that is not there."""
        rows = [row[VECTOR] for row in self._rows.known(list(ids), VECTOR)]
        return np.array(rows, np.float32).reshape(-1, self.width)

    def ids(self) -> np.ndarray:
        """(n,) ids of all items, ascending: Milvus does not keep the order in which they were stored."""
        return np.array(sorted(self._rows.ids()), object if self.named else np.int64)

    def add(self, ids: np.ndarray | None, vectors: np.ndarray, metadata: pa.Table) -> None:
        """Store new items.

        Args:
            ids: (n,) int64, or object array of str, without duplicates; None: the integers behind the largest that
                was ever there, and other than those that other processes get at the same time. Ids that two processes
                give themselves at the same time are not told apart: the later items replace the earlier.
            vectors: (n, width) float32.
            metadata: n rows, or no columns.
        Raises: ValueError naming an id that is there already or is of the other kind, or a metadata column that does
            not fit; nothing is stored then.
        """
        with self._connection.writing:
            ids = self._next_ids(len(vectors)) if ids is None else ids
            self._check_kind(ids)
            there = self._rows.there(ids.tolist())
            for row, key in enumerate(ids.tolist() if there else ()):
                if key in there:
                    raise ValueError(f"id {key!r} (row {row}) is in the index already; upsert replaces it")
            self.upsert(ids, vectors, metadata)

    def upsert(self, ids: np.ndarray, vectors: np.ndarray, metadata: pa.Table) -> None:
        """Store items, in place of those that have their ids. ValueError as in `add`."""
        with self._connection.writing:
            self._check_kind(ids)
            self._check_width(vectors)
            if len(vectors) != len(ids):
                raise ValueError(f"{len(ids)} ids need {len(ids)} vectors, got {len(vectors)}")
            self._about, texts = bring(self._connection, self.collection, self._writer, ids, metadata)
            beyond = int(ids.max()) + 1 if len(ids) and not self.named else 0
            if beyond > self._next_id:
                self._next_id = begin_above(self._connection, self.collection, self._writer, beyond)
            self._rows.write(ids.tolist(), vectors, texts)

    def remove(self, ids: Iterable[Any]) -> None:
        """Take items out; KeyError naming an id that is not there, and nothing is removed then."""
        with self._connection.writing:
            keys = list(ids)
            self._rows.known(keys)
            self._rows.delete(keys)

    def compact(self) -> None:
        """Write out what is in memory and build its index; Milvus then merges its segments without the removed rows."""
        with self._connection.writing:
            self._rows.call("flush")
            self._rows.call("compact")

    def drop(self) -> None:
        """Remove the collection with all that it holds, and close the connection."""
        with self._connection.writing:
            self._rows.call("drop_collection")
        self.close()

    def close(self) -> None:
        """Close the connection; a Milvus Lite folder may then be opened by another process."""
        self._connection.close()

    def _hits(self, found: list[Found], k: int) -> Hits:
        ids = np.full((len(found), k), "" if self.named else -1, object if self.named else np.int64)
        scores = np.full(ids.shape, -np.inf, np.float32)
        for row, hits in enumerate(found):
            ids[row, : len(hits)] = [key for key, _, _ in hits]
            scores[row, : len(hits)] = [score for _, score, _ in hits]
        counts = np.array([len(hits) for hits in found], np.int64)
        rows = [metadata for hits in found for _, _, metadata in hits]
        columns = self._columns_of(rows)
        return Hits(ids, scores, counts, lambda: split_by(read_documents(rows, columns), counts), self.exact)

    def _expression(self, where: Any) -> str:
        """A filter in Milvus's language; "" for none."""
        return "" if where is None else filter_expression(where, self._refreshed())

    def _refreshed(self) -> About:
        """What the collection's properties say now: another process may have added columns."""
        self._about = read_about(self._connection, self.collection)
        return self._about

    def _columns_of(self, rows: list[dict[str, Any]]) -> pa.Schema:
        """The schema that reads these rows."""
        known = set(self.columns)
        return (self._about if all(known >= row.keys() for row in rows) else self._refreshed()).columns

    def _next_ids(self, count: int) -> np.ndarray:
        if self.named:
            raise ValueError("the ids of this index are strings; give one for each new item as ids=[...]")
        start = claim(self._connection, self.collection, self._writer, count) if count else 0
        self._next_id = max(self._next_id, start + count)
        return np.arange(start, start + count, dtype=np.int64)

    def _check_kind(self, ids: np.ndarray) -> None:
        if len(ids) and (ids.dtype == object) != self.named:
            theirs, ours = ("strings", "integers")[:: 1 if ids.dtype == object else -1]
            raise ValueError(f"the ids of this index are {ours}, these are {theirs}: {ids.tolist()[0]!r}")
        for key in ids.tolist() if self.named else ():
            if len(key) > MAX_ID_BYTES // 4 and len(key.encode()) > MAX_ID_BYTES:
                raise ValueError(f"the id {key[:40]!r}... is {len(key.encode())} bytes; Milvus takes {MAX_ID_BYTES}")

    def _check_width(self, vectors: np.ndarray) -> None:
        if vectors.ndim != 2 or vectors.shape[1] != self.width:
            raise ValueError(f"expected vectors of width {self.width}, got shape {vectors.shape}")
