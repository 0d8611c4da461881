"""Rows of one Milvus collection, in requests of bounded size, always read as they are after the latest write."""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from numbers import Integral
from typing import Any

import numpy as np

from mmcl.index.milvus_client import Connection
from mmcl.index.milvus_collection import ID, METADATA, VECTOR
from mmcl.index.milvus_factory import METRIC, Plan

MAX_ROWS = 16384
"""Of one request, and the largest k."""
MESSAGE = 16 * 2**20
"""Bytes of one request; Milvus takes up to 64 MiB."""
ROW = MESSAGE // MAX_ROWS
METADATA_BYTES = 16 * 2**10
"""Reckoned for an item's metadata in an answer."""

Found = list[tuple[Any, float, dict[str, Any]]]
"""(id, score, metadata as stored) of one query, best first."""


class Rows:
    """Reads and writes of a collection; ids are of its kind.

    Args:
        connection: to its server.
        collection: its name.
        named: whether ids are str.
        width: of the vectors.
    """

    def __init__(self, connection: Connection, collection: str, named: bool, width: int):
        self.connection, self.collection, self.named, self.width = connection, collection, named, width

    def call(self, method: str, **arguments: Any) -> Any:
        """The client's `method` for this collection."""
        return self.connection.call(method, collection_name=self.collection, **arguments)

    def query(self, expression: str, *fields: str) -> list[dict[str, Any]]:
        return self.call("query", filter=expression, output_fields=list(fields), consistency_level="Strong")

    def count(self, expression: str = "") -> int:
        """How many there are, or satisfy an expression."""
        return int(self.query(expression, "count(*)")[0]["count(*)"])

    def ids(self, expression: str = "") -> list[Any]:
        """Of all, or of those that satisfy an expression."""
        everything = f'{ID} != ""' if self.named else f"{ID} >= 0"
        return [row[ID] for row in self.query(expression or everything, ID)]

    def fetch(self, keys: list[Any], *fields: str) -> dict[Any, dict[str, Any]]:
        """{id: its fields} of those of some ids that are there."""
        least = METADATA_BYTES + 4 * self.width if fields else 0
        sizes = [max(size, least) for size in id_sizes(keys)]
        answers = (self.query(one_of(keys[part]), ID, *fields) for part in batches(sizes))
        return {row[ID]: row for row in chain.from_iterable(answers)}

    def is_id(self, key: object) -> bool:
        """Whether it is of the kind of the ids: True == 1 and 1.0 == 1 would find integers otherwise."""
        if self.named:
            return isinstance(key, str) and not any("\ud800" <= character <= "\udfff" for character in key)
        return isinstance(key, Integral) and not isinstance(key, bool) and 0 <= int(key) < 2**63

    def there(self, keys: list[Any], *fields: str) -> dict[Any, dict[str, Any]]:
        """`fetch` of keys of any type."""
        return self.fetch([key for key in keys if self.is_id(key)], *fields)

    def known(self, keys: list[Any], *fields: str) -> list[dict[str, Any]]:
        """Fields of all these ids, in their order; KeyError names one that is not there."""
        found = self.there(keys, *fields)
        for key in keys:
            if not self.is_id(key) or key not in found:
                raise KeyError(f"no item {key!r}; ids of this index are {'str' if self.named else 'integers'}")
        return [found[key] for key in keys]

    def write(self, keys: list[Any], vectors: np.ndarray, texts: list[str]) -> None:
        """Store rows, in place of those that have their ids; an insert of a known id would store it twice."""
        sizes = [max(ROW, 4 * self.width + len(text.encode())) for text in texts]
        for part in batches(sizes):
            rows = zip(keys[part], vectors[part], texts[part], strict=True)
            self.call("upsert", data=[{ID: key, VECTOR: vector, METADATA: text} for key, vector, text in rows])

    def delete(self, keys: list[Any]) -> None:
        for part in batches(id_sizes(keys)):
            self.call("delete", filter=one_of(keys[part]))

    def search(self, queries: np.ndarray, k: int, expression: str, plan: Plan, given: Mapping[str, Any]) -> list[Found]:
        """The k nearest of each query, never fewer than there are.

        Queries that get fewer are searched again, with the most effort that the index takes and then one by one.
        """
        found = self.nearest(queries, k, expression, plan.search(given, k))
        wider = partial(self.nearest, parameters=plan.widest(k))
        attempts: list[Callable[..., list[Found]]] = [wider, self.scan] if plan.type.effort else [self.scan]
        for attempt in attempts:
            if all(len(hits) == k for hits in found):
                break
            wanted = min(k, self.count(expression))
            short = [row for row, hits in enumerate(found) if len(hits) < wanted]
            again = attempt(queries[short], k, expression) if short else []
            for row, hits in zip(short, again, strict=True):
                found[row] = hits
        return found

    def nearest(self, queries: np.ndarray, k: int, expression: str, parameters: dict[str, int]) -> list[Found]:
        """What Milvus finds for each query, which may be fewer than there are."""
        found: list[Found] = []
        step = max(1, MAX_ROWS // k)
        for start in range(0, len(queries), step):
            answer = self.call(
                "search",
                data=list(queries[start : start + step]),
                anns_field=VECTOR,
                filter=expression,
                limit=k,
                output_fields=[METADATA],
                search_params={"metric_type": METRIC, "params": parameters},
                consistency_level="Strong",
            )
            found += [[(hit[ID], hit["distance"], hit["entity"][METADATA]) for hit in hits] for hits in answer]
        return found

    def scan(self, queries: np.ndarray, k: int, expression: str) -> list[Found]:
        """The nearest of all that satisfy an expression, block by block, by float32 products computed here."""
        best: list[Found] = [[] for _ in queries]
        keys = self.ids(expression)
        for part in batches([METADATA_BYTES + 4 * self.width] * len(keys)):
            rows = list(self.fetch(keys[part], VECTOR, METADATA).values())
            if not rows:
                continue
            scores = queries @ np.array([row[VECTOR] for row in rows], np.float32).T
            for at, values in enumerate(scores.tolist()):
                more = ((row[ID], value, row[METADATA]) for row, value in zip(rows, values, strict=True))
                best[at] = heapq.nlargest(k, chain(best[at], more), key=lambda hit: hit[1])
        return best


def batches(sizes: Sequence[int], limit: int = MESSAGE) -> Iterator[slice]:
    """Consecutive slices of at most `limit` bytes, or one row each, given the bytes of every row."""
    total, start = 0, 0
    for row, size in enumerate(sizes):
        if row > start and total + size > limit:
            yield slice(start, row)
            total, start = 0, row
        total += size
    if len(sizes) > start:
        yield slice(start, len(sizes))


def id_sizes(keys: list[Any]) -> list[int]:
    """Bytes reckoned for each id in a request, so that none has more than `MAX_ROWS`."""
    return [max(ROW, 4 * len(key)) if isinstance(key, str) else ROW for key in keys]


def one_of(keys: list[Any]) -> str:
    """The expression that is true of these ids. pymilvus's own, of `ids=`, does not escape quotes."""
    return f"{ID} in [{', '.join(map(literal, keys))}]"


def literal(key: int | str) -> str:
    """An id in Milvus's language."""
    if not isinstance(key, str):
        return str(int(key))
    for character, written in {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}.items():
        key = key.replace(character, written)
    return f'"{key}"'
