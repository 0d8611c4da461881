"""What an index costs, term by term: see `sizing.py`, which plans with it, and `sizing_runs.py`, which measures it."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from mmcl.index.choose import memory_size

K, K_FACTOR, THREADS = 10, 8.0, 2
"""Answers a query; candidates an answer that full vectors rank anew; threads that were measured with."""
ITERATIONS = 10
"""Of the k-means that places lists; FAISS's own number."""


class Case(NamedTuple):
    """One index on one machine, and the effort of a search in it."""

    count: int
    width: int
    lists: int = 0
    effort: int = 0
    """nprobe of lists, efSearch of graphs."""
    k_factor: float = K_FACTOR
    cache: float = 0
    """Bytes of vectors that the processor keeps at hand."""

    @property
    def missed(self) -> float:
        """The share of full vectors that have to come from memory."""
        return max(0.0, 1 - self.cache / (4 * self.count * self.width))

    @property
    def scanned(self) -> float:
        """Rows in the lists that a search visits."""
        return self.effort * self.count / self.lists

    @property
    def trained(self) -> int:
        """Rows that the lists are placed by, as `mmcl.index.disk_build.training_rows` counts them."""
        wanted = max(256 * 256, 40 * self.lists, min(256 * self.lists, 2**27 // (4 * self.width)))
        return min(self.count, wanted)


Terms = dict[str, Callable[[Case], float]]
"""{what is counted: how many of it there are}; each has a coefficient."""


class Kind(NamedTuple):
    """A type of index."""

    factory: str
    """With {lists} and {width}."""
    search: Terms
    """Seconds a query."""
    build: Terms
    """Seconds."""
    effort: str | None = None
    """The search parameter that finds more."""
    mapped: bool = False
    """Whether full vectors stay on the disk."""

    def named(self, case: Case) -> str:
        return self.factory.format(lists=case.lists, width=case.width)


STREAM: Terms = {"1": lambda c: 1, "rows * width": lambda c: c.count * c.width}
LISTS: Terms = {
    "1": lambda c: 1,
    "(10 * trained rows + rows) * lists * width": lambda c: (ITERATIONS * c.trained + c.count) * c.lists * c.width,
}
GRAPH: Terms = {
    "rows * log2(rows) * width": lambda c: c.count * math.log2(c.count) * c.width,
    "rows * log2(rows)": lambda c: c.count * math.log2(c.count),
    "rows * log2(rows) * width * missed": lambda c: c.count * math.log2(c.count) * c.width * c.missed,
}
SCAN: Terms = {"1": lambda c: 1, "rows * width": lambda c: c.count * c.width, "rows": lambda c: c.count}
PROBE: Terms = {
    "1": lambda c: 1,
    "lists * width": lambda c: c.lists * c.width,
    "nprobe": lambda c: c.effort,
    "nprobe * rows / lists * width": lambda c: c.scanned * c.width,
}
WHOLE: Terms = PROBE | {"nprobe * rows / lists * width * missed": lambda c: c.scanned * c.width * c.missed}
RANK: Terms = PROBE | {
    "k_factor * k * width": lambda c: c.k_factor * K * c.width,
    "k_factor * k * width * missed": lambda c: c.k_factor * K * c.width * c.missed,
}
WALK: Terms = {
    "1": lambda c: 1,
    "efSearch * log2(rows) * width": lambda c: c.effort * math.log2(c.count) * c.width,
    "efSearch * log2(rows)": lambda c: c.effort * math.log2(c.count),
    "efSearch * log2(rows) * width * missed": lambda c: c.effort * math.log2(c.count) * c.width * c.missed,
}
CODED = "RR{width},IVF{lists},PQ{width}x4fs,RFlat"
TYPES = {
    "Flat": Kind("Flat", SCAN, STREAM),
    "Exact": Kind("Exact", SCAN, STREAM),
    "IVF,Flat": Kind("IVF{lists},Flat", WHOLE, LISTS, "nprobe"),
    "IVF,PQ4,RFlat": Kind(CODED, RANK, LISTS, "nprobe"),
    "IVF,PQ4,RFlat on disk": Kind(CODED, RANK, LISTS, "nprobe", mapped=True),
    "HNSW": Kind("HNSW32", WALK, GRAPH, "efSearch"),
}


def memory_terms(kind: Kind) -> Terms:
    """Bytes in memory."""
    return {
        "1": lambda c: 1,
        "memory_size": lambda c: memory_size(kind.named(c), c.count, c.width, kind.mapped),
        "rows": lambda c: c.count,
    }


def disk_terms(kind: Kind) -> Terms:
    """Bytes of the saved folder. "Exact" saves float32 rows alone."""
    return {
        "1": lambda c: 1,
        "memory_size": lambda c: memory_size(kind.named(c).replace("Exact", "Flat"), c.count, c.width),
        "rows": lambda c: c.count,
    }


def quantities(kind: Kind) -> dict[str, Terms]:
    """{what is predicted: its terms}. Seconds are those of all threads together on their processors."""
    return {"memory": memory_terms(kind), "disk": disk_terms(kind), "build": kind.build, "search": kind.search}


CLOCK = "_clock"
"""Behind "build" and "search": seconds on the clock, with `THREADS` threads."""


def predicted(measured: dict[str, Any], name: str, quantity: str, case: Case) -> float:
    """Bytes or seconds of a type, from the coefficients in `measured`.

    Args:
        quantity: "memory", "disk", "build", "search", "build_clock" or "search_clock".
    """
    known, counted = measured["types"][name], quantity.removesuffix(CLOCK)
    case = case._replace(cache=measured["cache_bytes"])
    terms = quantities(TYPES[name])[counted]
    found = sum(known[counted][term] * count(case) for term, count in terms.items())
    return found * known["clock"][counted] if quantity.endswith(CLOCK) else found
