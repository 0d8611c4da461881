"""Filters: where it pays to look at every row that a condition leaves. 200,000 x 128, 10 results.

    python eval/benchmarks/filters.py                # eval/results/filters.json and filters.png
    python eval/benchmarks/filters.py --count 20000 --shares 0.01 0.5 --out figures

For each type and each share of rows that a filter leaves, the same search twice: "looked at", where all rows that are
left are read back and compared, and "searched", where the type searches as it does without a filter and leaves the
others out. Rows are left at random, or as the half-space farthest from the queries ("far": a graph or a list near a
query holds hardly any of them). Times are minima of interleaved rounds; recall is against exact search among what is
left. `faiss_backend.EXACT_SHARE` and `EXACT_SHARE_OF_SCANS` are read off these figures.
"""

import argparse
import json
import os
import platform
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np

RESULTS = Path(__file__).parent.parent / "results"
WIDTH, K, BATCHES = 128, 10, (1, 32, 256)
TYPES: dict[str, dict[str, Any]] = {
    "Flat": {},
    "SQ8": {},
    "HNSW32": {"efSearch": 64},
    "IVF{},Flat": {"nprobe": 32},
    "IVF{},SQ8": {"nprobe": 32},
    "RR128,IVF{},PQ128x4fs,RFlat": {"nprobe": 32, "k_factor": 8.0},
}
SHARES = (0.001, 0.01, 0.05, 0.1, 0.2, 0.5)
WAYS = {"looked at": 1.0, "searched": 0.0}
"""{way: the share of rows up to which all are looked at that makes the backend go this way}."""


def vectors(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows around common centres, and queries near some of them."""
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((max(20, count // 100), WIDTH), dtype=np.float32)
    rows = centres[generator.integers(0, len(centres), count)]
    rows = rows + 0.7 * generator.standard_normal((count, WIDTH), dtype=np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    near = rows[generator.integers(0, count, max(BATCHES))]
    return rows, near + 0.05 * generator.standard_normal(near.shape, dtype=np.float32)


def left(rows: np.ndarray, queries: np.ndarray, share: float, kind: str) -> np.ndarray:
    """(n,) bool: the rows that the filter leaves."""
    if kind == "random":
        return np.random.default_rng(1).random(len(rows)) < share
    towards = rows @ queries[0]
    return towards <= np.quantile(towards, share)


def compared(backend: Any, rows: np.ndarray, queries: np.ndarray, keep: np.ndarray, given: dict, rounds: int) -> dict:
    """{way: {"recall", "milliseconds": {batch: least of all rounds}}}."""
    from mmcl.index import faiss_backend
    from mmcl.index.faiss_rows import nearest

    true = np.flatnonzero(keep)[nearest(queries, np.ascontiguousarray(rows[keep]), K)[1]]
    found: dict[str, Any] = {way: {"milliseconds": {}} for way in WAYS}
    for batch in BATCHES:
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, share in WAYS.items():
                faiss_backend.EXACT_SHARE = faiss_backend.EXACT_SHARE_OF_SCANS = share
                faiss_backend.EXACT_ROWS = 0
                start = time.perf_counter()
                _, numbers = backend.search(queries[:batch], K, given, keep)
                seconds[way].append(time.perf_counter() - start)
                hit = [len(set(a) & set(b)) / K for a, b in zip(numbers, true[:batch], strict=True)]
                found[way]["recall"] = round(float(np.mean(hit)), 4)
        for way in WAYS:
            found[way]["milliseconds"][batch] = round(1000 * min(seconds[way]), 3)
    return found


def measured(count: int, shares: list[float], rounds: int) -> list[dict[str, Any]]:
    """A row for each type, kind of filter and share."""
    from mmcl.index.faiss_backend import FaissBackend

    rows, queries = vectors(count)
    lists = 2 ** int(np.log2(2.5 * count**0.5))
    found = []
    for pattern, given in TYPES.items():
        factory = pattern.format(lists)
        backend = FaissBackend.build(factory, WIDTH, [rows])
        for kind in ("random", "far"):
            for share in shares:
                keep = left(rows, queries, share, kind)
                ways = compared(backend, rows, queries, keep, given, rounds)
                found.append({"factory": factory, "kind": kind, "share": share, **ways})
                print(json.dumps(found[-1]), flush=True)
    return found


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Recall and time of both ways over the share that is left."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from mmcl.index.faiss_backend import EXACT_SHARE, EXACT_SHARE_OF_SCANS

    factories = list(dict.fromkeys(row["factory"] for row in rows))
    figure, axes = plt.subplots(
        2, len(factories), figsize=(2.6 * len(factories), 5.6), layout="constrained", sharey="row", squeeze=False
    )
    ways = {"looked at": ("every row left is compared", "#2563a8"), "searched": ("the index is searched", "#d97b29")}
    kinds = {"random": ("rows left at random", "-"), "far": ("rows left far from the queries", "--")}
    for column, factory in zip(axes.T, factories, strict=True):
        column[0].set_title(factory.replace("RR128,", "RR128,\n"), fontsize=10)
        for kind, (left, style) in kinds.items():
            part = [row for row in rows if (row["factory"], row["kind"]) == (factory, kind)]
            shares = [row["share"] for row in part]
            for way, (told, colour) in ways.items():
                label = f"{told}, {left}"
                column[0].plot(shares, [row[way]["recall"] for row in part], style, color=colour, label=label)
                times = [row[way]["milliseconds"][BATCHES[1]] for row in part]
                column[1].plot(shares, times, style, color=colour, label=label)
        for axis in column:
            switch = EXACT_SHARE_OF_SCANS if factory == "Flat" else EXACT_SHARE
            axis.axvline(switch, color="#6b7280", lw=1, ls=":", label="where mmcl changes from one to the other")
            axis.set_xscale("log")
            axis.spines[["top", "right"]].set_visible(False)
        column[1].set(yscale="log", xlabel="share of rows left")
    axes[0, 0].set_ylabel("recall@10")
    axes[1, 0].set_ylabel("ms, 32 queries")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=10, loc="outside lower center", ncol=3)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), help="of rows that a filter leaves")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.count < 5000 or not all(K / options.count <= share <= 1 for share in options.shares):
        parser.error(f"--count must be 5000 or more, and each of --shares leave {K} rows or more")
    from mmcl.index import faiss_backend

    used = {name: getattr(faiss_backend, name) for name in ("EXACT_SHARE", "EXACT_SHARE_OF_SCANS", "EXACT_ROWS")}
    rows = measured(options.count, options.shares, options.rounds)
    vars(faiss_backend).update(used)
    options.out.mkdir(parents=True, exist_ok=True)
    draw(rows, options.out / "filters.png")
    summary = {
        "command": " ".join(["python eval/benchmarks/filters.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} threads",
        "date": date.today().isoformat(),
        "count": options.count,
        "width": WIDTH,
        "rounds": options.rounds,
        "used": used,
        "rows": rows,
    }
    (options.out / "filters.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
