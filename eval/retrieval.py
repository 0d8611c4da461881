"""Retrieval in every direction between subsets of the modalities, against brute force and through the index.

    python eval/retrieval.py                       # the demo's digits; writes retrieval.json, .png into eval/results
    python eval/retrieval.py --quick --out figures
    python eval/retrieval.py recipe.toml --out figures

A recipe (see `protocols.py` for the common part):

    factories = ["Flat", "Exact"]       # types of index to search with
    absent = true                       # also directions in which some modalities stand on neither side
    [groups]                            # values that are one answer: a column a modality, or "equal" raw values
    image = "product"                   # (the default)

Items are the distinct tuples of the rows' values of the item modalities, each stored once; queries likewise. Where
query and items together name all modalities, an item is right for a query if they occur together in some row, by their
groups. Where a modality is absent, it decides what goes together and nobody says what it is: a query is then asked once
for each answer that it has in the rows, and that answer alone is right.

Recall@k is the share of queries with a right item among the first k, as in CLIP_benchmark. Brute force is the whole
matrix of query and item vectors' products in float64, block by block; equal scores count against the query. `mrr` looks
at all places there, `mrr@10` at ten, as the index does. The index's scores are compared with the matrix.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from protocol_figures import draw_retrieval
from protocols import (
    DEMO_SCORES,
    QUICK_SCORES,
    RESULTS,
    DemoData,
    Rows,
    Subject,
    data_of,
    embedded,
    ended,
    joined,
    opened,
    write_results,
)
from retrieval_task import Direction, RetrievalRecipe, direction, directions, group_codes, taken

from mmcl.index import TupleIndex
from mmcl.metrics import best_ranks, mrr_from_hits, recall_from_hits
from mmcl.scores import Score

KS = (1, 5, 10)
DEPTH = max(KS)
BLOCK = 512
"""Queries whose scores with all items are held at once."""
EXACT = ("Flat", "Exact")
"""Types whose answers must be those of brute force."""
TOLERANCE = 1e-5
"""Of a score, relative to sum_k |q_k t_k|: what float32 costs."""
EXPECTED = {
    "hadamard and tied, each direction between one and two modalities: recall@1 at least": 0.85,
    "hadamard and tied, mean of these directions: recall@1 at least": 0.95,
    "sum_of_pairs, mean of all directions: recall@1 at most": 0.2,
    "Flat and Exact: answers are those of brute force": True,
}
"""Some directions ask no more than the ten words, or the few clips that were held out."""


@dataclass(frozen=True)
class BruteForce:
    """ranks: (queries,) of the best right item; found: (queries, 10) whether each of the first is right; its scores."""

    ranks: np.ndarray
    scores: np.ndarray
    chance: float
    """Recall@1 of items drawn at random."""


def brute_force(queries: np.ndarray, items: np.ndarray, task: Direction) -> BruteForce:
    """All products of (nq, D) and (n, D), a block of queries at a time."""
    ranks, scores, chance = [], [], []
    depth = min(DEPTH, len(items))
    for start in range(0, len(queries), BLOCK):
        block = queries[start : start + BLOCK] @ items.T
        relevant = task.relevant(start, start + BLOCK)
        ranks.append(best_ranks(block, relevant))
        chance.append(relevant.mean(axis=1))
        scores.append(-np.sort(np.partition(-block, depth - 1, axis=1)[:, :depth], axis=1))
    return BruteForce(np.concatenate(ranks), np.concatenate(scores), float(np.concatenate(chance).mean()))


def through_index(
    index: TupleIndex,
    asked: Mapping[str, torch.Tensor],
    queries: np.ndarray,
    items: np.ndarray,
    task: Direction,
    brute: BruteForce,
) -> dict[str, Any]:
    """Metrics of what an index returns, and how it compares with brute force.

    share_of_true_first_10: how many of what it returned are among the true first ten. agrees: every place holds an item
    of the score that is due there, and the index says that score.
    """
    hits = index.search(asked, k=brute.scores.shape[1], encoded=True)
    right, true, same = (np.zeros(hits.ids.shape, bool) for _ in range(3))
    for start in range(0, len(queries), BLOCK):
        part = slice(start, start + BLOCK)
        ids, there = hits.ids[part], hits.ids[part] >= 0  # -1 pads a list that is too short
        rows, vectors = queries[part, None, :], items[ids]
        scores = (rows * vectors).sum(axis=2)
        slack = TOLERANCE * (np.abs(rows) * np.abs(vectors)).sum(axis=2).max(axis=1, keepdims=True)
        right[part] = np.take_along_axis(task.relevant(start, start + BLOCK), ids, axis=1) & there
        true[part] = (scores >= brute.scores[part, -1:] - slack) & there
        as_told = np.abs(scores - hits.scores[part]) <= slack
        same[part] = as_told & (scores >= brute.scores[part] - slack) & there
    return {
        "factory": index.info()["factory"],
        "metrics": named(task, {f"recall@{k}": recall_from_hits(right, min(k, right.shape[1])) for k in KS})
        | named(task, {f"mrr@{DEPTH}": mrr_from_hits(right, right.shape[1])}),
        "share_of_true_first_10": float(true.mean()),
        "agrees": bool(same.all()),
    }


def named(task: Direction, metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics under CLIP_benchmark's names: what is retrieved, then the measure."""
    return {f"{joined(task.items)}_retrieval_{name}": value for name, value in metrics.items()}


def protocol(
    subject: Subject, dataset: str, rows: Rows, groups: Mapping[str, np.ndarray], factories: Sequence[str], absent: bool
) -> list[dict[str, Any]]:
    """A record a direction."""
    score = subject.model.score
    about = {"dataset": dataset, "model": subject.name, "pretrained": subject.source, "task": "zeroshot_retrieval"}
    records = []
    for query, items in directions(score.modalities, absent):
        record = {**about, "query": list(query), "items": list(items)}
        left_out = tuple(name for name in score.modalities if name not in (*query, *items))
        if left_out and (reason := needs(score, rows, query, left_out)):
            records.append({**record, "metrics": None, "not_possible": reason})
            continue
        records.append(record | judged(score, rows, direction(rows, groups, query, items), factories))
    return records


def needs(score: Score, rows: Rows, query: Sequence[str], absent: tuple[str, ...]) -> str | None:
    """Why a score cannot do without these modalities; None where it can."""
    try:
        score.query_vectors(taken(rows, query, np.array([0])), absent=absent)
    except KeyError as error:
        return str(error.args[0])
    return None


@torch.no_grad()
def judged(score: Score, rows: Rows, task: Direction, factories: Sequence[str]) -> dict[str, Any]:
    """All figures of one direction."""
    asked, stored = taken(rows, task.query, task.query_rows), taken(rows, task.items, task.item_rows)
    absent = [name for name in score.modalities if name not in (*task.query, *task.items)]
    doubled = [{name: part.double() for name, part in side.items()} for side in (asked, stored)]
    queries = score.query_vectors(doubled[0], absent=absent).cpu().numpy()
    items = score.item_vectors(doubled[1]).cpu().numpy()
    brute = brute_force(queries, items, task)
    metrics = {f"recall@{k}": float((brute.ranks <= k).mean()) for k in KS}
    metrics["mrr"] = float((1 / brute.ranks).mean())
    metrics[f"mrr@{DEPTH}"] = float(np.where(brute.ranks <= DEPTH, 1 / brute.ranks, 0).mean())
    indexes = []
    for factory in factories:
        index = TupleIndex.build(score, stored, factory=factory)
        found = through_index(index, asked, queries, items, task, brute)
        indexes.append({"asked_for": factory, **found})
    return {
        "metrics": named(task, metrics),
        "queries_asked": len(queries),
        "items_stored": len(items),
        "chance_recall@1": brute.chance,
        "indexes": indexes,
    }


DEMO_FACTORIES = (*EXACT, "HNSW32")
DEMO_GROUPS = {"image": "image_digit", "audio": "audio_digit"}


def demo_records(seed: int, quick: bool) -> list[dict[str, Any]]:
    """Every direction of every score on the demo's held-out tuples: images and sounds of one digit are one answer."""
    demo = DemoData(seed, 500 if quick else 2000)
    records = []
    for subject in demo.subjects(QUICK_SCORES if quick else DEMO_SCORES):
        rows = embedded(subject.model, demo.test, None, subject.model.modalities)
        groups = group_codes(demo.test, rows, DEMO_GROUPS)
        records += protocol(subject, "mmcl/digits", rows, groups, DEMO_FACTORIES, absent=True)
    return records


def recipe_records(path: str) -> list[dict[str, Any]]:
    """Every direction on a user's data."""
    recipe, subject = opened(path, RetrievalRecipe)
    data = data_of(path, recipe.data.source, recipe.data.split)
    rows = embedded(subject.model, data, recipe.data.columns, subject.model.modalities)
    groups = group_codes(data, rows, recipe.groups)
    return protocol(subject, recipe.name, rows, groups, recipe.factories, recipe.absent)


def place(record: Mapping[str, Any]) -> str:
    """Model and direction, in words."""
    return f"{record['model']}, {joined(record['query'])} to {joined(record['items'])}"


def first(record: Mapping[str, Any]) -> float:
    """recall@1 of brute force."""
    return record["metrics"][f"{joined(record['items'])}_retrieval_recall@1"]


def disagreements(records: Sequence[dict[str, Any]]) -> list[str]:
    """Exact types whose answers are not those of brute force: a fault, whatever the data."""
    return [
        f"{place(record)}: {found['asked_for']} differs from brute force"
        for record in records
        for found in record.get("indexes", ())
        if found["asked_for"] in EXACT and not found["agrees"]
    ]


def missed(records: Sequence[dict[str, Any]]) -> list[str]:
    """What of EXPECTED the demo's records miss, in words."""
    each, mean, pairs, _ = EXPECTED.items()
    found: dict[str, list[float]] = {}
    misses = []
    for record in records:
        if record["metrics"] is None:
            continue
        found.setdefault(record["model"], []).append(first(record))
        if record["model"] != "sum_of_pairs" and first(record) < each[1]:
            misses.append(f"{place(record)}: {first(record):.4f}; {each[0]} {each[1]}")
    for model, values in found.items():
        if model == "sum_of_pairs" and np.mean(values) > pairs[1]:
            misses.append(f"{model}: {np.mean(values):.4f}; {pairs[0]} {pairs[1]}")
        if model != "sum_of_pairs" and np.mean(values) < mean[1]:
            misses.append(f"{model}: {np.mean(values):.4f}; {mean[0]} {mean[1]}")
    return misses


def line(record: dict[str, Any]) -> str:
    """One record, as the run prints it."""
    where = f"{record['model']:14} {joined(record['query']):11} to {joined(record['items']):11}"
    if record["metrics"] is None:
        return f"{where} not possible: {record['not_possible'].partition(';')[0]}"
    kind = f"{joined(record['items'])}_retrieval_"
    shown = "  ".join(f"{name.removeprefix(kind)} {value:.4f}" for name, value in record["metrics"].items())
    same = ", ".join(f"{each['asked_for']} {each['share_of_true_first_10']:.3f}" for each in record["indexes"])
    return f"{where} {shown}  (chance {record['chance_recall@1']:.4f}; true first ten: {same})"


def run(options: argparse.Namespace) -> bool:
    """Whether exact indexes agree with brute force and, of the demo, all that was expected came out."""
    started = time.perf_counter()
    own = options.recipe is not None
    records = recipe_records(options.recipe) if own else demo_records(options.seed, options.quick)
    for record in records:
        print(line(record))
    misses = disagreements(records) + ([] if own else missed(records))
    summary: dict[str, Any] = {"seconds": round(time.perf_counter() - started, 1)}
    summary |= {"missed": misses} if own else {"expected": EXPECTED, "missed": misses}
    write_results(options.out, "retrieval", {**summary, "results": records})
    draw_retrieval(records).savefig(options.out / "retrieval.png", dpi=110)
    for miss in misses:
        print(f"missed: {miss}", file=sys.stderr)
    return not misses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", help="TOML; default: the demo's data and models")
    parser.add_argument("--quick", action="store_true", help="of the demo: fewer rows, two of three scores")
    parser.add_argument("--seed", type=int, default=0, help="of the demo")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    sys.exit(ended(lambda: run(options)))


if __name__ == "__main__":
    main()
