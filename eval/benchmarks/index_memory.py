"""Memory of a build that is larger than memory: 2,000,000 x 128 from 20 shards, and with fewer and more shards.

    python eval/benchmarks/index_memory.py             # eval/results/index_memory.json and index_memory.png
    python eval/benchmarks/index_memory.py --shards 2 4 --rows 20000 --factory IVF256,PQ16 --out figures

Shards of two modalities in float16, as clip-retrieval writes them, lie in a temporary folder. Each build runs in a
process of its own; what it holds (RssAnon of /proc/PID/status, every 10 ms) counts from where mmcl, torch and FAISS are
imported. It must stay under 700 MiB, and be the same for any number of shards.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent.parent / "results"
MODALITIES = ("image", "audio", "text")
STORED = {"image": "img", "audio": "audio"}
GROUPS = 1000
LIMIT, GROWTH = 700, 1.1
"""MiB, and peak with the most shards / peak with the fewest."""
EVERY = 0.01
BLUE, ORANGE, GREY = "#2563a8", "#d97b29", "#6b7280"


def write_shard(folder: Path, number: int, rows: int, width: int) -> None:
    """Unit rows around common centres, from the shard's number alone."""
    generator = np.random.default_rng(number)
    groups = generator.integers(0, GROUPS, rows)
    for seed, name in enumerate(STORED.values()):
        centres = np.random.default_rng(1000 + seed).standard_normal((GROUPS, width), dtype=np.float32)
        noisy = centres[groups] + generator.standard_normal((rows, width), dtype=np.float32)
        noisy /= np.linalg.norm(noisy, axis=1, keepdims=True)
        (folder / f"{name}_emb").mkdir(exist_ok=True)
        np.save(folder / f"{name}_emb" / f"{name}_emb_{number}.npy", noisy.astype(np.float16))


def first_shards(folder: Path, count: int) -> Path:
    """A folder of links to the first shards of another."""
    part = folder / f"first-{count}"
    for name in STORED.values():
        (part / f"{name}_emb").mkdir(parents=True)
        for number in range(count):
            file = f"{name}_emb/{name}_emb_{number}.npy"
            os.symlink(folder / file, part / file)
    return part


def build(folder: Path, factory: str, width: int, out: Path) -> None:
    """The measured process: tells when it has imported all, when training ends, and when the index is there."""
    import torch

    import mmcl
    from mmcl.index import disk_build
    from mmcl.index.disk_source import shard_blocks
    from mmcl.index.faiss_setup import load_faiss
    from mmcl.index.sources import checked_block, fused_block
    from mmcl.shards import open_shards

    score = mmcl.Hadamard(MODALITIES, width, temperature=0.07)
    shards = open_shards(folder, known=MODALITIES).select(list(STORED))
    ready = dict.fromkeys(STORED, True)

    def fuse(embeddings: dict[str, np.ndarray], row: int) -> np.ndarray:
        return fused_block(score, checked_block(embeddings, ready, score, None, row), row).numpy()

    fill = disk_build.fill

    def filling(*args: Any) -> Generator[Any, None, None]:
        print("trained", flush=True)
        yield from fill(*args)

    disk_build.fill = filling
    print(json.dumps({"faiss": load_faiss().__version__, "torch": torch.__version__, "threads": os.cpu_count()}))
    print("imported", flush=True)
    sys.stdin.readline()
    disk_build.build_on_disk(factory, score.width, shard_blocks(shards, fuse), out)
    print("built", flush=True)


def resident(pid: int) -> dict[str, float]:
    """MiB that belong to the process alone, and MiB of files that it has mapped."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    return {name: int(lines[name].split()[0]) / 1024 if name in lines else 0.0 for name in ("RssAnon", "RssFile")}


def measured(folder: Path, factory: str, width: int, out: Path) -> dict[str, Any]:
    """One build, watched from outside."""
    command = [sys.executable, __file__, "--build", str(folder), "--factory", factory, "--width", str(width)]
    with subprocess.Popen([*command, "--out", str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        versions = json.loads(child.stdout.readline())
        child.stdout.readline()
        os.set_blocking(child.stdout.fileno(), False)
        before = resident(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        start, times, anonymous, mapped, phases = time.perf_counter(), [], [], [], {}
        while "built" not in phases:
            now = time.perf_counter() - start
            if child.poll() is not None:
                sys.exit(f"the build of {factory} failed")
            found = resident(child.pid)
            times.append(now)
            anonymous.append(found["RssAnon"] - before["RssAnon"])
            mapped.append(found["RssFile"] - before["RssFile"])
            for line in (child.stdout.read() or b"").decode().split():
                phases[line] = now
            time.sleep(EVERY)
    trained = np.array(times) <= phases["trained"]
    return {
        **versions,
        "imports": round(before["RssAnon"], 1),
        "peak": round(max(anonymous), 1),
        "peak_training": round(float(np.array(anonymous)[trained].max()), 1),
        "peak_filling": round(float(np.array(anonymous)[~trained].max()), 1),
        "peak_mapped_files": round(max(mapped), 1),
        "seconds_training": round(phases["trained"], 1),
        "seconds_filling": round(phases["built"] - phases["trained"], 1),
        "index_bytes": (out / "index.faiss").stat().st_size,
        "samples": len(times),
        "curve": (times, anonymous),
    }


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {os.cpu_count()} threads, Linux {platform.release()}"


def draw(runs: dict[int, dict[str, Any]], rows: int, width: int, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2), layout="constrained")
    for number, (shards, run) in enumerate(runs.items()):
        times, held = run["curve"]
        left.plot(times, held, color=BLUE, lw=1.2, alpha=(number + 1) / len(runs), label=f"{shards} shards")
    left.axhline(LIMIT, color=ORANGE, lw=1.2, ls="--")
    left.set(xlabel="seconds", ylabel="MiB held beyond the imports", ylim=(0, LIMIT * 1.05))
    left.legend(frameon=False, loc="center right")
    counts = np.array(list(runs)) * rows / 1e6
    right.plot(counts, counts * 1e6 * width * 4 / 2**20, color=GREY, marker="o", label="all vectors in float32")
    right.plot(counts, [run["peak"] for run in runs.values()], color=BLUE, marker="o", label="build on disk, peak")
    right.axhline(LIMIT, color=ORANGE, lw=1.2, ls="--", label="limit")
    right.set(xlabel="million rows", ylabel="MiB", ylim=(0, None))
    right.legend(frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[5, 10, 20, 40])
    parser.add_argument("--rows", type=int, default=100_000, help="of a shard")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--factory", default="OPQ16,IVF2048,PQ16")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        build(options.build, options.factory, options.width, options.out)
        return
    runs: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number in range(max(options.shards)):
            write_shard(folder, number, options.rows, options.width)
        for count in options.shards:
            part = first_shards(folder, count)
            runs[count] = measured(part, options.factory, options.width, part / "index")
            print(count, {name: value for name, value in runs[count].items() if name != "curve"}, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    draw(runs, options.rows, options.width, options.out / "index_memory.png")
    peaks = [runs[count]["peak"] for count in sorted(runs)]
    summary = {
        "command": "python " + " ".join(["eval/benchmarks/index_memory.py", *sys.argv[1:]]),
        "machine": machine(),
        "date": date.today().isoformat(),
        "factory": options.factory,
        "width": options.width,
        "rows_a_shard": options.rows,
        "expected": {"peak MiB at most": LIMIT, "peak with the most shards / with the fewest at most": GROWTH},
        "runs": {count: {name: value for name, value in run.items() if name != "curve"} for count, run in runs.items()},
    }
    (options.out / "index_memory.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if max(peaks) <= LIMIT and peaks[-1] <= GROWTH * peaks[0] else 1)


if __name__ == "__main__":
    main()
