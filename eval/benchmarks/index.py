"""Types of index and peers side by side, and the two limits of the machine: matrix product and memory bandwidth.

    python eval/benchmarks/index.py                    # 200,000 x 256: eval/results/index.json and index.png
    python eval/benchmarks/index.py --quick --out figures

Every engine lives in a process of its own, as users run it (memory is what building it added), and asks wait for their
turn: one search at a time, all engines in turn, again and again. Times are minima over the rounds; recall is against
float64 brute force. Vectors are H-CLIP's products of two modalities' embeddings, queries are of the third.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent.parent / "results"
BATCHES = (1, 32, 256)
K = 10
GROUPS = 400
MODALITIES = ("image", "audio", "text")
TYPES = {
    "mmcl Flat": {"factory": "Flat"},
    "mmcl Exact": {"factory": "Exact"},
    "mmcl IVF,Flat": {"factory": "MIPS,IVF1024,Flat", "nprobe": 32},
    "mmcl IVF,PQ,RFlat": {"factory": "MIPS,IVF1024,PQ64x4fs,RFlat", "nprobe": 32, "k_factor": 8.0},
    "mmcl HNSW": {"factory": "MIPS,HNSW32", "efSearch": 128},
}


def draw(count: int, width: int, seed: int) -> dict[str, np.ndarray]:
    """{modality: (count, width)} unit rows that lie around common centres, as embeddings of related things do."""
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, GROUPS, count)
    rows = {}
    for number, name in enumerate(MODALITIES):
        centres = np.random.default_rng(1000 + number).normal(size=(GROUPS, width))
        noisy = centres[groups] + rng.normal(size=(count, width))
        rows[name] = (noisy / np.linalg.norm(noisy, axis=1, keepdims=True)).astype(np.float32)
    return rows


def make_score(width: int) -> Any:
    """The score whose vectors are indexed; w is ones times a number."""
    from mmcl import Hadamard

    return Hadamard(modalities=MODALITIES, dim=width, temperature=0.07)


class MmclEngine:
    """`TupleIndex`, as a user calls it."""

    def __init__(self, folder: Path, options: dict[str, Any]):
        from mmcl import TupleIndex

        options = dict(options)
        rows = {name: np.load(folder / f"{name}.npy") for name in MODALITIES[:2]}
        self.width = rows["image"].shape[1]
        self.index = TupleIndex.build(make_score(self.width), rows, factory=options.pop("factory"))
        self.options = options

    def prepare(self, folder: Path) -> np.ndarray:
        return np.load(folder / "text.npy")

    def search(self, queries: np.ndarray) -> np.ndarray:
        return self.index.search({"text": queries}, k=K, **self.options).ids


class VectorEngine:
    """A peer that takes the fused vectors themselves."""

    def __init__(self, folder: Path, options: dict[str, Any]):
        self.items = np.load(folder / "items.npy")
        self.build(**options)

    def prepare(self, folder: Path) -> np.ndarray:
        return np.load(folder / "queries.npy")

    def build(self) -> None: ...


class InstalledFaiss(VectorEngine):
    """FAISS as pip leaves it."""

    def build(self) -> None:
        import faiss

        self.index = faiss.IndexFlatIP(self.items.shape[1])
        self.index.add(self.items)
        del self.items

    def search(self, queries: np.ndarray) -> np.ndarray:
        return self.index.search(queries, K)[1]


class Usearch(VectorEngine):
    def build(self) -> None:
        from usearch.index import Index

        self.index = Index(ndim=self.items.shape[1], metric="ip", dtype="f32", connectivity=32, expansion_search=128)
        self.index.add(np.arange(len(self.items)), self.items)
        del self.items

    def search(self, queries: np.ndarray) -> np.ndarray:
        found = self.index.search(queries, K).keys
        return np.asarray(found).astype(np.int64).reshape(len(queries), -1)


class Hnswlib(VectorEngine):
    def build(self) -> None:
        import hnswlib

        self.index = hnswlib.Index(space="ip", dim=self.items.shape[1])
        self.index.init_index(len(self.items), ef_construction=40, M=16)
        self.index.set_num_threads(2)
        self.index.add_items(self.items, np.arange(len(self.items)))
        self.index.set_ef(128)
        del self.items

    def search(self, queries: np.ndarray) -> np.ndarray:
        return self.index.knn_query(queries, k=K)[0].astype(np.int64)


class MilvusLite(VectorEngine):
    """Through mmcl's own storage, FLAT."""

    def build(self) -> None:
        from mmcl.index.item_checks import check_metadata
        from mmcl.index.milvus import MilvusTuples

        self.folder = tempfile.TemporaryDirectory()
        self.tuples = MilvusTuples.create(str(Path(self.folder.name) / "t.db"), "b", self.items.shape[1], False, "Flat")
        for start in range(0, len(self.items), 20000):
            block = self.items[start : start + 20000]
            self.tuples.upsert(np.arange(start, start + len(block)), block, check_metadata(None, len(block)))
        del self.items

    def search(self, queries: np.ndarray) -> np.ndarray:
        return self.tuples.search(queries, K, None, {}).ids


class MatrixProduct(VectorEngine):
    """The limit of large batches: queries times items in float32, nothing more."""

    def build(self) -> None:
        import torch

        self.torch, self.rows = torch, torch.from_numpy(self.items)

    def search(self, queries: np.ndarray) -> None:
        self.torch.from_numpy(queries) @ self.rows.T


class Bandwidth(VectorEngine):
    """The limit of single queries: the sum of all bfloat16 vectors read as integers."""

    def build(self) -> None:
        import torch

        self.rows = torch.from_numpy(self.items).bfloat16().view(torch.int64)
        del self.items

    def search(self, queries: np.ndarray) -> None:
        self.rows.sum()


PEERS = {
    "FAISS as installed": InstalledFaiss,
    "usearch": Usearch,
    "hnswlib": Hnswlib,
    "Milvus Lite": MilvusLite,
    "matrix product": MatrixProduct,
    "memory bandwidth": Bandwidth,
}
LIMITS = ("matrix product", "memory bandwidth")


def anonymous_bytes() -> int:
    """Memory of this process that no file backs, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return 1024 * int(line.split()[1])
    return 0


def work(name: str, folder: Path) -> None:
    """An engine's process: build, then a search for every batch size that is asked for on stdin."""
    import torch

    torch.set_num_threads(2)
    before, start = anonymous_bytes(), time.perf_counter()
    engine = MmclEngine(folder, TYPES[name]) if name in TYPES else PEERS[name](folder, {})
    built = time.perf_counter() - start
    queries = engine.prepare(folder)
    found = engine.search(queries)
    if found is not None:
        np.save(folder / f"{name}.npy", found)
    print(json.dumps({"build_seconds": built, "bytes": anonymous_bytes() - before}), flush=True)
    for line in sys.stdin:
        batch = queries[: int(line)]
        start = time.perf_counter()
        engine.search(batch)
        print(time.perf_counter() - start, flush=True)


def write_data(folder: Path, count: int, width: int) -> np.ndarray:
    """Embeddings, fused vectors and queries as files; returns the (nq, K) exact answer."""
    import torch

    items, queries = draw(count, width, seed=1), draw(max(BATCHES), width, seed=2)
    score = make_score(width)
    with torch.no_grad():
        fused = score.item_vectors({name: items[name] for name in MODALITIES[:2]}).numpy()
        asked = score.query_vectors({"text": queries["text"]}).numpy()
    for name in MODALITIES[:2]:
        np.save(folder / f"{name}.npy", items[name])
    np.save(folder / "text.npy", queries["text"])
    np.save(folder / "items.npy", fused)
    np.save(folder / "queries.npy", asked)
    best = np.empty((len(asked), 0))
    rows = np.empty((len(asked), 0), np.int64)
    for start in range(0, count, 20000):
        scores = asked.astype(np.float64) @ fused[start : start + 20000].T.astype(np.float64)
        best = np.concatenate([best, scores], axis=1)
        rows = np.concatenate([rows, np.broadcast_to(np.arange(start, start + scores.shape[1]), scores.shape)], axis=1)
        order = np.argsort(-best, axis=1, kind="stable")[:, :K]
        best, rows = np.take_along_axis(best, order, axis=1), np.take_along_axis(rows, order, axis=1)
    return rows


def measure(names: list[str], count: int, width: int, rounds: int) -> dict[str, dict[str, Any]]:
    """{engine: figures}."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        truth = write_data(folder, count, width)
        workers, figures = {}, {}
        for name in names:
            command = [sys.executable, __file__, "--work", name, "--folder", str(folder)]
            workers[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            line = workers[name].stdout.readline()
            if not line:
                raise RuntimeError(f"{name} ended before it was built; run {' '.join(command)} to see why")
            figures[name] = json.loads(line) | {"seconds": {str(batch): [] for batch in BATCHES}}
            print(f"{name}: built in {figures[name]['build_seconds']:.1f} s", file=sys.stderr)
        for batch in BATCHES:
            for _ in range(rounds):
                for name, worker in workers.items():
                    worker.stdin.write(f"{batch}\n")
                    worker.stdin.flush()
                    figures[name]["seconds"][str(batch)].append(float(worker.stdout.readline()))
                    time.sleep(0.02)  # threads that wait by spinning go to sleep
        for name, worker in workers.items():
            worker.stdin.close()
            worker.wait()
            if (folder / f"{name}.npy").exists() and name not in LIMITS:
                found = np.load(folder / f"{name}.npy")
                hits = [len(set(a) & set(b)) / K for a, b in zip(found.tolist(), truth.tolist(), strict=True)]
                figures[name]["recall_at_10"] = float(np.mean(hits))
    for figure in figures.values():
        figure["seconds"] = {batch: min(times) for batch, times in figure["seconds"].items()}
        figure["queries_per_second"] = {batch: int(batch) / seconds for batch, seconds in figure["seconds"].items()}
    return figures


def draw_figure(results: dict[str, Any], path: Path) -> None:
    """Queries a second by batch size, with recall beside each name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in results["engines"] if name not in LIMITS]
    figure, axis = plt.subplots(figsize=(9, 0.62 * len(names) + 1.6), layout="constrained")
    colours = ("#0072b2", "#e69f00", "#009e73")
    for place, (batch, colour) in enumerate(zip(BATCHES, colours, strict=True)):
        rates = [results["engines"][name]["queries_per_second"][str(batch)] for name in names]
        at = np.arange(len(names)) + 0.26 * (place - 1)
        axis.barh(at, rates, 0.24, color=colour, label=f"batch {batch}")
    product = results["engines"]["matrix product"]["queries_per_second"]["256"]
    axis.axvline(product, color="black", linestyle="--", linewidth=1)
    axis.text(product, -0.75, " matrix product, batch 256", fontsize=8, va="center")
    labels = [f"{name}\nrecall {results['engines'][name]['recall_at_10']:.3f}" for name in names]
    axis.set_yticks(range(len(names)), labels, fontsize=8)
    axis.set(xscale="log", xlabel="queries a second (log)", ylim=(len(names) - 0.4, -1.1))
    axis.set_title(f"{results['count']:,} x {results['width']}, k = {K}, 2 threads", fontsize=10)
    axis.grid(axis="x", alpha=0.3)
    axis.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--engines", nargs="+", default=[*TYPES, *PEERS], choices=[*TYPES, *PEERS])
    parser.add_argument("--quick", action="store_true", help="5,000 x 64, 3 rounds, without Milvus")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        return work(given.work, given.folder)
    if given.quick:
        given.count, given.width, given.rounds = 20_000, 64, 3
    figures = measure(given.engines, given.count, given.width, given.rounds)
    about = {"command": "python eval/benchmarks/index.py " + " ".join(sys.argv[1:]), "date": str(date.today())}
    about |= {"machine": f"{platform.machine()}, 2 threads", "count": given.count, "width": given.width, "k": K}
    results = {**about, "rounds": given.rounds, "engines": figures}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "index.json").write_text(json.dumps(results, indent=2) + "\n")
    if "matrix product" in figures:
        draw_figure(results, given.out / "index.png")
    for name, figure in figures.items():
        rates = "  ".join(f"{batch:>3}: {rate:9,.0f}/s" for batch, rate in figure["queries_per_second"].items())
        print(f"{name:20s} recall {figure.get('recall_at_10', float('nan')):.4f}  {rates}")


if __name__ == "__main__":
    main()
