"""Recall against speed of an index, measured with true queries, and the cheapest setting that is good enough."""

import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from mmcl.index.choose import check_recall
from mmcl.index.devices import CPU, GPU_K
from mmcl.index.faiss_params import QUANTIZER, known_parameters
from mmcl.index.faiss_rows import best_of, nearest, nothing_found
from mmcl.index.sources import open_source
from mmcl.index.tuple_index import TupleIndex

BLOCK = 65536
REPEATS = 3
MARGIN, LEAST_QUERIES = 1.64, 20
"""Standard errors that a recall has to lie above its target: other queries then reach it, too, 19 times out of 20. Of
fewer queries than this the standard error tells nothing: they may all find everything by luck."""
TIE = 1e-5
"""Of a score: what float32 may lose of it."""
QUANTIZER_EFFORT = QUANTIZER + "efSearch"
EFFORTS = {
    "nprobe": [2**power for power in range(17)],
    "efSearch": [2**power for power in range(4, 13)],
    QUANTIZER_EFFORT: [2**power for power in range(4, 13)],
    "k_factor": [1.0, *(2.0**power for power in range(2, 9))],
}
"""Values that a sweep tries, as far as they can matter."""


class Truth(NamedTuple):
    """Of each query."""

    ids: np.ndarray
    """(nq, k), of the highest scores."""
    least: np.ndarray
    """(nq,), what the k-th of them scores, less what float32 may lose."""


@dataclass(frozen=True)
class Point:
    """One setting: share of the true best k that it finds, and seconds for a batch of queries."""

    parameters: dict[str, Any]
    recall: float
    error: float
    """The standard error of `recall`, from how the queries differ."""
    seconds: float
    queries_per_second: float


@dataclass(frozen=True)
class TuneResult:
    """All settings that were tried, and the one that was taken."""

    points: list[Point]
    chosen: Point
    reached: bool
    """Whether it reaches the target, with `MARGIN` standard errors to spare; else it is the one of highest recall."""
    k: int
    recall_target: float
    queries: int
    batch: int
    factory: str
    count: int

    def save(self, folder: str | Path) -> list[Path]:
        """Write recall.json and recall.png into a folder; returns both paths."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        told, picture = folder / "recall.json", folder / "recall.png"
        told.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        draw(self, picture)
        return [told, picture]


def tune(
    index: TupleIndex,
    queries: Any,
    k: int = 10,
    recall_target: float = 0.95,
    *,
    items: Any = None,
    batch: int = 256,
    encoded: Any = None,
) -> TuneResult:
    """Measure an index over the efforts that its searches can take, and set `index.search_parameters` to the cheapest.

    Args:
        index: in this process. One that has no such efforts (Flat, PQ16) is measured as it is.
        queries: {query modality: rows}, some hundred true ones: items asking for items say little about queries.
        k: of recall@k.
        recall_target: what the setting has to reach, with a margin for how much these queries can tell (`MARGIN`).
        items: what the index was built from, where it holds codes alone: the truth is in the full vectors.
        batch: queries timed at once.
        encoded: as in `TupleIndex.search`.
    Raises: ValueError for no queries, an empty index, and codes without `items`.
    """
    vectors = index._fusion.queries(queries, index.model, encoded)
    return tune_vectors(index, vectors, k, recall_target, items, batch, encoded)


def tune_vectors(
    index: TupleIndex,
    vectors: np.ndarray,
    k: int = 10,
    recall_target: float = 0.95,
    items: Any = None,
    batch: int = 256,
    encoded: Any = None,
) -> TuneResult:
    """`tune` with (nq, width) query vectors."""
    if not len(vectors) or not len(index):
        raise ValueError(f"tuning takes queries and items; there are {len(vectors)} queries and {len(index)} items")
    for name, value in (("k", k), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    check_recall(recall_target)
    k = min(int(k), len(index))
    truth = true_best(index, vectors, k, items, encoded)
    settings = list(grid(index, k))
    timed = vectors[:batch]
    shares = [found_shares(index, vectors, k, setting, truth) for setting in settings]
    seconds: dict[int, list[float]] = {number: [] for number in range(len(settings))}
    for _ in range(REPEATS):  # in turns, so that a busy minute does not fall on one setting alone
        for number, setting in enumerate(settings):
            start = time.perf_counter()
            searched(index, timed, k, setting)
            seconds[number].append(time.perf_counter() - start)
    points = []
    for number, setting in enumerate(settings):
        spent, found = float(np.median(seconds[number])), shares[number]
        points.append(Point(setting, float(found.mean()), standard_error(found), spent, len(timed) / spent))
    good = [number for number, found in enumerate(shares) if surely_reaches(found, recall_target)]
    cheapest = min((points[number] for number in good), key=lambda point: point.seconds, default=None)
    best = cheapest or max(points, key=lambda point: point.recall)
    index.search_parameters = dict(best.parameters)
    about = index.info()
    return TuneResult(
        points, best, bool(good), k, float(recall_target), len(vectors), len(timed), about["factory"], len(index)
    )


def searched(index: TupleIndex, vectors: np.ndarray, k: int, setting: dict[str, Any]) -> Any:
    """Hits of query vectors with just these parameters."""
    return index._tuples.search(vectors, k, None, setting)


def found_shares(
    index: TupleIndex, vectors: np.ndarray, k: int, setting: dict[str, Any], truth: Truth
) -> Float[np.ndarray, " nq"]:
    """What share of each query's true best k a setting finds. Any item that scores as high as the k-th is right."""
    hits = searched(index, vectors, k, setting)
    if hits.exact:
        return (hits.scores >= truth.least[:, None]).mean(axis=1, dtype=np.float64)
    pairs = zip(hits.ids.tolist(), truth.ids.tolist(), strict=True)
    return np.array([len(set(found) & set(right)) / k for found, right in pairs])


def standard_error(shares: Float[np.ndarray, " nq"]) -> float:
    """Of the mean; 0 of a single query, which cannot tell."""
    return float(shares.std(ddof=1)) / math.sqrt(len(shares)) if len(shares) > 1 else 0.0


def surely_reaches(shares: Float[np.ndarray, " nq"], recall_target: float) -> bool:
    """Whether the mean lies above the target by so much that it is no luck."""
    return len(shares) >= LEAST_QUERIES and bool(shares.mean() - MARGIN * standard_error(shares) >= recall_target)


def grid(index: TupleIndex, k: int) -> Iterator[dict[str, Any]]:
    """Settings of the efforts that this type of index has; one without any where it has none."""
    inner = faiss_index(index)
    known = {} if inner is None else known_parameters(inner)
    lists = most_lists(index)
    limits = {"nprobe": lists, QUANTIZER_EFFORT: lists, "efSearch": len(index), "k_factor": len(index) / k}
    names = [name for name in EFFORTS if name in known]
    least = {"nprobe": limits["nprobe"] / 256}
    values = [[v for v in EFFORTS[name] if least.get(name, 1) <= v <= limits[name]] or [1] for name in names]
    seen: list[dict[str, Any]] = []
    for chosen in itertools.product(*values):
        setting = dict(zip(names, chosen, strict=True))
        if QUANTIZER_EFFORT in setting:  # a graph of lists looks at as many as it returns
            setting[QUANTIZER_EFFORT] = max(setting[QUANTIZER_EFFORT], setting["nprobe"])
        if setting not in seen:
            seen.append(setting)
            yield setting


def faiss_index(index: TupleIndex) -> Any:
    """The FAISS index inside, or None: Exact has none, and Milvus is tuned by its own means."""
    return getattr(getattr(getattr(index._tuples, "snapshot", None), "base", None), "index", None)


def most_lists(index: TupleIndex) -> int:
    """How many inverted lists a search can probe; 1 where there are none."""
    inner = faiss_index(index)
    lists = getattr(None if inner is None else inner_lists(inner), "nlist", 1)
    return lists if index.device == CPU else min(lists, GPU_K)


def inner_lists(index: Any) -> Any:
    """The IVF inside an index, or None."""
    from mmcl.index.faiss_factory import parts
    from mmcl.index.faiss_setup import load_faiss

    return next((part for part in parts(index) if isinstance(part, load_faiss().IndexIVF)), None)


def true_best(index: TupleIndex, vectors: np.ndarray, k: int, items: Any, encoded: Any) -> Truth:
    """The highest scores, from full vectors, block by block."""
    best, start = nothing_found(len(vectors), k), 0
    for block in full_vectors(index, items, encoded):
        scores, rows = nearest(vectors, block, min(k, len(block)))
        best, start = best_of([best, (scores, start + rows)], k), start + len(block)
    last = best[0][:, -1]
    return Truth(index.ids()[best[1]], last - TIE * np.abs(last))


def full_vectors(index: TupleIndex, items: Any, encoded: Any) -> Iterator[np.ndarray]:
    """Float32 vectors of all items in the order of `index.ids()`: its own where it has them, else those of `items`."""
    names = index.ids()
    if items is None:
        if not index.info()["exact"]:
            raise ValueError(
                f"factory {index.info()['factory']!r} holds codes alone, and cannot say what the best are; pass the "
                "items that it was built from as items="
            )
        for start in range(0, len(names), BLOCK):
            yield index.vectors(names[start : start + BLOCK])
        return
    source = open_source(items, index.score, index.model, index.modalities, encoded)
    if source.count != len(names):
        raise ValueError(f"the index has {len(names)} items, items= has {source.count}")
    yield from index._fusion.items(source, [])


def draw(result: TuneResult, path: Path) -> None:
    """Recall against queries a second; the best settings joined, the chosen one marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    rates = [point.queries_per_second for point in result.points]
    recalls = [point.recall for point in result.points]
    axis.scatter(rates, recalls, s=18, color="#9aa5b1", label="settings tried")
    front = sorted(pareto(result.points), key=lambda point: point.queries_per_second)
    axis.plot([p.queries_per_second for p in front], [p.recall for p in front], color="#0072b2", label="best of them")
    axis.axhline(result.recall_target, color="#555555", linestyle="--", linewidth=1)
    chosen = result.chosen
    axis.scatter([chosen.queries_per_second], [chosen.recall], s=90, color="#d55e00", marker="*", zorder=3)
    told = ", ".join(f"{name} = {value:g}" for name, value in chosen.parameters.items()) or "as it is"
    axis.annotate(told, (chosen.queries_per_second, chosen.recall), (6, -14), textcoords="offset points", fontsize=9)
    axis.set(xscale="log", xlabel=f"queries a second, {result.batch} at once", ylabel=f"recall@{result.k}")
    axis.set_title(f"{result.factory}, {result.count:,} items, {result.queries} queries", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(loc="lower left", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def pareto(points: list[Point]) -> list[Point]:
    """Those that no other beats in both recall and speed."""
    best, found = -1.0, []
    for point in sorted(points, key=lambda point: (point.seconds, -point.recall)):
        if point.recall > best:
            best = point.recall
            found.append(point)
    return found
