"""What factory="auto" goes by: recall and speed of types on fused vectors, and its own choice within a quarter of the
raw size.

    python eval/benchmarks/auto_factory.py                # eval/results/auto_factory.json and .png, about an hour
    python eval/benchmarks/auto_factory.py --quick --out figures
    python eval/benchmarks/auto_factory.py --part auto --kinds tight      # one piece of it, put among those there are

Three parts: "auto", its choice for 500,000 vectors, without queries and tuned with 512 true ones, asked with 512
others; "types", what a choice can be among; "large", whether the coordinate of "MIPS," helps lists and graphs of
500,000.

Vectors are H-CLIP's products of two modalities' unit embeddings; queries are of the third. Four kinds: "trained", where
queries point to the products of their tuples' centres, as training makes them; "tight", where items lie in tight groups
that queries know nothing of; "latent", where all three modalities are different maps of one latent vector; "random",
without any structure, the worst case. Speed is that of 256 queries at once against exact search in the same process, in
turns, minima.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent.parent / "results"
WIDTH, K, BATCHES = 128, 10, (1, 32, 256)
TYPES = (
    "RR128,IVF{},PQ128x4fs,RFlat",
    "IVF{},PQ64x4fs,RFlat",
    "MIPS,IVF{},PQ64x4fs,RFlat",
    "IVF{},Flat",
    "IVF{},SQ6",
    "HNSW32",
    "MIPS,HNSW32",
)
LARGE = ("RR128,IVF{},PQ128x4fs,RFlat", "MIPS,RR129,IVF{},PQ129x4fs,RFlat", "HNSW32", "MIPS,HNSW32")
KINDS = {
    "auto": ("trained", "tight", "latent", "random"),
    "types": ("trained", "latent", "random"),
    "large": ("trained", "latent"),
}
TARGETS = (0.9, 0.95)


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def draw(kind: str, count: int, queries: int, seed: int = 0) -> dict[str, np.ndarray]:
    """{"image", "audio": (count, WIDTH), "text": (queries, WIDTH)} unit rows."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    if kind == "random":
        return {
            "image": unit(normal(count, WIDTH)),
            "audio": unit(normal(count, WIDTH)),
            "text": unit(normal(queries, WIDTH)),
        }
    if kind == "latent":
        maps, z, asked = [normal(16, WIDTH) for _ in range(3)], normal(count, 16), normal(queries, 16)
        made = [
            unit(np.tanh(at @ each / 2) + 0.1 * normal(len(at), WIDTH))
            for at, each in zip((z, z, asked), maps, strict=True)
        ]
        return dict(zip(("image", "audio", "text"), made, strict=True))
    centres = [normal(2000, WIDTH) for _ in range(2)]
    groups, asked = rng.integers(0, 2000, count), rng.integers(0, 2000, queries)
    spread = 0.5 if kind == "tight" else 1.0
    image, audio = (unit(each[groups] + spread * normal(count, WIDTH)) for each in centres)
    texts = normal(2000, WIDTH) if kind == "tight" else centres[0] * centres[1]
    return {"image": image, "audio": audio, "text": unit(texts[asked] + spread * normal(queries, WIDTH))}


def make_score() -> Any:
    from mmcl import Hadamard

    return Hadamard(("image", "audio", "text"), WIDTH, temperature=0.07)


def recall(found: np.ndarray, truth: np.ndarray) -> float:
    return float(np.mean([len(set(a) & set(b)) / K for a, b in zip(found.tolist(), truth.tolist(), strict=True)]))


def compare(kind: str, count: int, types: tuple[str, ...]) -> list[dict[str, Any]]:
    """One row a type: the least effort that reaches each target, and its speed over exact search."""
    from mmcl import TupleIndex
    from mmcl.index.choose import list_count
    from mmcl.index.tune import tune

    rows = draw(kind, count, 512)
    items = {name: rows[name] for name in ("image", "audio")}
    text = {"text": rows["text"]}
    flat = TupleIndex.build(make_score(), items, factory="Flat")
    found = []
    for factory in types:
        factory = factory.format(list_count(count))
        start = time.perf_counter()
        index = TupleIndex.build(make_score(), items, factory=factory)
        built = time.perf_counter() - start
        result = tune(index, text, items=items)
        base = min(seconds(flat, {"text": rows["text"][:256]}, {}) for _ in range(3))
        row = {"kind": kind, "count": count, "factory": factory, "build_seconds": built}
        row |= {"bytes": index.info()["bytes"], "targets": {}}
        for target in TARGETS:
            good = [point for point in result.points if point.recall >= target]
            point = min(good, key=lambda p: p.seconds) if good else max(result.points, key=lambda p: p.recall)
            speed = base / point.seconds
            row["targets"][str(target)] = {"recall": point.recall, "times_flat": speed, "parameters": point.parameters}
        row["curve"] = [[point.recall, base / point.seconds] for point in result.points]
        found.append(row)
        print(
            kind,
            factory,
            {t: f"{v['recall']:.3f} x{v['times_flat']:.1f}" for t, v in row["targets"].items()},
            flush=True,
        )
    return found


def seconds(index: Any, queries: dict[str, np.ndarray], parameters: dict[str, Any]) -> float:
    start = time.perf_counter()
    index.search(queries, k=K, **parameters)
    return time.perf_counter() - start


def choose(kind: str, count: int, rounds: int) -> list[dict[str, Any]]:
    """factory="auto" within a quarter of the raw size: as it is built, and tuned by true queries; asked with others."""
    from mmcl import TupleIndex
    from mmcl.index.choose import memory_size

    rows = draw(kind, count, 1024)
    items = {name: rows[name] for name in ("image", "audio")}
    budget = count * WIDTH * 4 // 4
    flat = TupleIndex.build(make_score(), items, factory="Flat")
    start = time.perf_counter()
    index = TupleIndex.build(make_score(), items, memory_budget=budget)
    built = time.perf_counter() - start
    asked = {"text": rows["text"][:512]}
    truth, found = flat.search(asked, k=K).ids, []
    for queries in (None, {"text": rows["text"][512:]}):
        start = time.perf_counter()
        if queries is not None:
            index.tuned(queries, 0.95)
        tuned = time.perf_counter() - start
        row = {
            "kind": kind,
            "count": count,
            "budget": budget,
            "queries": "none" if queries is None else "512 true ones",
        }
        row |= {"recall": recall(index.search(asked, k=K).ids, truth), "times_flat": {}}
        for batch in BATCHES:
            part = {"text": rows["text"][:batch]}
            pairs = [(seconds(flat, part, {}), seconds(index, part, {})) for _ in range(rounds)]
            row["times_flat"][str(batch)] = min(a for a, _ in pairs) / min(b for _, b in pairs)
        info = index.info()
        row |= {"build_seconds": built, "tuning_seconds": tuned}
        row |= {"memory": memory_size(info["factory"], count, WIDTH, mapped=info["mapped"])}
        row |= {name: info[name] for name in ("factory", "search_parameters", "mapped", "reason")}
        told = {batch: f"x{speed:.1f}" for batch, speed in row["times_flat"].items()}
        print(kind, "auto:", row["factory"], row["search_parameters"], f"recall {row['recall']:.3f}", told, flush=True)
        found.append(row)
    return found


def draw_figure(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    figure, axes = plt.subplots(
        1, len(kinds), figsize=(4.4 * len(kinds), 3.8), sharey=True, layout="constrained", squeeze=False
    )
    colours = ("#000000", "#cc79a7", "#0072b2", "#56b4e9", "#009e73", "#d55e00", "#e69f00")
    for axis, kind in zip(axes[0], kinds, strict=True):
        for row, colour in zip([row for row in rows if row["kind"] == kind], colours, strict=True):
            best, front = 0.0, []
            for share, speed in sorted(row["curve"], key=lambda point: -point[1]):
                if share > best:
                    best = share
                    front.append((speed, share))
            axis.plot(*zip(*front, strict=True), marker="o", markersize=3, color=colour, label=row["factory"])
        axis.axhline(0.95, color="#555555", linestyle="--", linewidth=1, label="recall 0.95")
        axis.axvline(1, color="#555555", linestyle=":", linewidth=1, label="exact search (Flat)")
        count = next(row["count"] for row in rows if row["kind"] == kind)
        axis.set(xscale="log", xlabel="times the speed of exact search", ylim=(0.3, 1.01))
        axis.set_title(f"{count:,} {kind} vectors")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(f"recall@{K}")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=9, frameon=False, loc="outside right center")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=list(KINDS), action="append", help="default: all")
    kinds = sorted({kind for some in KINDS.values() for kind in some})
    parser.add_argument("--kinds", nargs="*", choices=kinds, help="of vectors; default: those of each part")
    parser.add_argument("--count", type=int, default=20_000, help="vectors of `types`")
    parser.add_argument("--large-count", type=int, default=500_000, help="vectors of `auto` and `large`")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="20,000 vectors everywhere, 3 rounds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.quick:
        given.count, given.large_count, given.rounds = 20_000, 20_000, 3
    import torch

    torch.set_num_threads(2)
    measure: dict[str, Callable[[str], list[dict[str, Any]]]] = {
        "auto": lambda kind: choose(kind, given.large_count, given.rounds),
        "types": lambda kind: compare(kind, given.count, TYPES),
        "large": lambda kind: compare(kind, given.large_count, LARGE),
    }
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "auto_factory.json"
    results = json.loads(file.read_text()) if file.is_file() and given.part else {}
    for part in given.part or list(KINDS):
        for kind in given.kinds or KINDS[part]:
            others = [row for row in results.get(part, []) if row["kind"] != kind]
            made = {
                "date": str(date.today()),
                "command": " ".join(["python eval/benchmarks/auto_factory.py", *sys.argv[1:]]),
            }
            results[part] = others + [{**row, **made} for row in measure[part](kind)]
            results |= {"machine": f"{platform.machine()}, 2 threads", "width": WIDTH}
            file.write_text(json.dumps(results, indent=2) + "\n")
    if "types" in results:
        draw_figure(results["types"], given.out / "auto_factory.png")


if __name__ == "__main__":
    main()
