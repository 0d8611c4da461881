"""The measurements behind `sizing.py`, the fit, and what it predicts of sizes that it has not seen.

Vectors are H-CLIP's products of two modalities' unit embeddings around 2000 common centres; queries, of the third
modality, point to the products of those centres, as training makes them. One process builds all types of one size on
the disk (`out=`). Then a process for each type loads its index, tells how much memory that took, and searches whenever
it is asked: 256 queries at once, all types and settings in turn, again and again. Times are minima over the rounds,
coefficients are fitted to the relative error, and none is negative. They are of the processor's time of all threads
together, which others on the machine disturb less than the clock; the clock is measured beside.
"""

import ctypes
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sizing_costs import K_FACTOR, THREADS, TYPES, K
from sizing_fit import case_of, derived

from mmcl.index.choose import list_count

MODALITIES, CENTRES, BATCH = ("image", "audio", "text"), 2000, 256
FITTED = ((50_000, 128), (100_000, 64), (100_000, 128), (200_000, 64), (200_000, 96), (200_000, 128), (400_000, 128))
HELD_BACK = ((800_000, 128),)
TOLERANCE = 0.25
QUICK, QUICK_HELD_BACK = ((8_000, 64), (16_000, 32), (16_000, 64), (32_000, 64)), ((64_000, 64),)
SHARES, TIMED_SHARES = [2.0**-step for step in range(8, -1, -1)], (1 / 64, 1 / 16, 1 / 4)
EFFORTS, TIMED_EFFORTS = [16, 32, 64, 128, 256, 512, 1024], (32, 128, 512)
MORE_CANDIDATES = 8 * K_FACTOR
READS, PAGE = 2000, 4096
PAGE_COUNTS = (10**6, 10**7, 10**8, 10**9, 10**10)
BLUE, ORANGE, GREY = "#2563a8", "#d97b29", "#6b7280"


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def write_data(folder: Path, count: int, width: int) -> None:
    """Unit embeddings, a file for each modality."""
    rng = np.random.default_rng(0)
    image, audio = rng.standard_normal((2, CENTRES, width), dtype=np.float32)
    groups, asked = rng.integers(0, CENTRES, count), rng.integers(0, CENTRES, BATCH)
    for name, centres, chosen in (("image", image, groups), ("audio", audio, groups), ("text", image * audio, asked)):
        noise = rng.standard_normal((len(chosen), width), dtype=np.float32)
        np.save(folder / f"{name}.npy", unit(centres[chosen] + noise))


def settings(name: str, lists: int, timed: bool = True) -> list[dict[str, Any]]:
    """Efforts of a search: those that are timed, or those whose recall is measured."""
    effort = TYPES[name].effort
    if effort is None:
        return [{}]
    if effort == "efSearch":
        return [{effort: each} for each in (TIMED_EFFORTS if timed else EFFORTS)]
    found = [{effort: max(1, round(share * lists))} for share in (TIMED_SHARES if timed else SHARES)]
    if "RFlat" not in TYPES[name].factory:
        return found
    several = [{**each, "k_factor": K_FACTOR} for each in found]
    return [*several, {**several[1], "k_factor": MORE_CANDIDATES}] if timed else several


def resident() -> tuple[int, int]:
    """Bytes of this process that no file backs, and all it has in memory, without what is only kept for later."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return tuple(1024 * int(lines[name].split()[0]) for name in ("RssAnon", "VmRSS"))  # type: ignore[return-value]


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """(what it returns, seconds of all its threads on the processor, seconds on the clock)."""
    clock, processor = time.perf_counter(), time.process_time()
    found = work()
    return found, time.process_time() - processor, time.perf_counter() - clock


def build_all(place: str, *names: str) -> None:
    """The process that builds: {factory: seconds, bytes on the disk} as JSON."""
    import torch

    from mmcl import Hadamard, TupleIndex

    torch.set_num_threads(THREADS)
    folder = Path(place)
    items = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in MODALITIES[:2]}
    count, width = items["image"].shape
    score = Hadamard(MODALITIES, width, temperature=0.07)
    first = {name: np.array(rows[:1000]) for name, rows in items.items()}
    TupleIndex.build(score, first, factory="Flat", out=folder / "first")  # what only a first build costs
    for factory in dict.fromkeys(TYPES[name].named(case_of(count, width)) for name in names):
        make = partial(TupleIndex.build, score, items, factory=factory, out=folder / factory)
        _, seconds, clock = timed(make)
        size = sum(file.stat().st_size for file in (folder / factory).rglob("*") if file.is_file())
        print(json.dumps({"factory": factory, "build": seconds, "build_clock": clock, "disk": size}), flush=True)


def serve(place: str, name: str) -> None:
    """The process that searches: tells its memory, then for every setting on stdin the seconds of a batch."""
    import torch

    from mmcl import TupleIndex

    torch.set_num_threads(THREADS)
    folder = Path(place)
    queries = {"text": np.load(folder / "text.npy")}
    rows = np.load(folder / "image.npy", mmap_mode="r")
    TupleIndex.load(folder / "first").search(queries, k=K)
    before, whole = resident()
    start = case_of(*rows.shape)
    index = TupleIndex.load(folder / TYPES[name].named(start), memory_map=TYPES[name].mapped)
    index.search({"text": queries["text"][:2]}, k=K)
    print(json.dumps({"memory": resident()[0] - before, "process_bytes": whole}), flush=True)
    for line in sys.stdin:
        setting = json.loads(line)
        index.search(queries, k=K, **setting)  # what other processes had in the caches makes way
        found, seconds, clock = timed(lambda setting=setting: index.search(queries, k=K, **setting).ids)
        about = {"search": seconds / BATCH, "search_clock": clock / BATCH}
        print(json.dumps(about | {"ids": found.tolist()}), flush=True)


@contextmanager
def served(folder: Path, names: list[str]) -> Iterator[tuple[dict[str, dict[str, Any]], Any]]:
    """({type: what its process told of itself}, how to ask one of them)."""
    workers = {name: child(["--serve", str(folder), name]) for name in names}

    def ask(name: str, setting: dict[str, Any]) -> dict[str, Any]:
        worker = workers[name]
        print(json.dumps(setting), file=worker.stdin, flush=True)
        time.sleep(0.01)  # threads that wait by spinning go to sleep
        return answer(worker, name)

    try:
        yield {name: answer(worker, name) for name, worker in workers.items()}, ask
    finally:
        for worker in workers.values():
            worker.communicate()


def child(arguments: list[str]) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, *arguments]
    calm = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # threads that wait cost no time on the processor
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=calm)


def answer(worker: Any, name: str) -> dict[str, Any]:
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError(f"the process of {name} ended with status {worker.wait()}; its error stands above")
    return dict(json.loads(line))


def measure(names: list[str], count: int, width: int, rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One size: a row for each type, and what belongs to the machine."""
    with tempfile.TemporaryDirectory(prefix="mmcl-sizing-") as place:
        folder = Path(place)
        write_data(folder, count, width)
        builder = child(["--build", place, *names])
        lines = builder.communicate()[0].splitlines()
        if builder.returncode:
            raise RuntimeError(f"building {count:,} x {width} ended with status {builder.returncode}")
        built = {each.pop("factory"): each for each in map(json.loads, lines)}
        lists = list_count(count)
        with served(folder, names) as (about, ask):
            truth = ask("Flat", {})["ids"]
            rows = []
            for name in names:
                recall = [(each, share_found(ask(name, each)["ids"], truth)) for each in settings(name, lists, False)]
                row = {"type": name, "count": count, "width": width, "memory": about[name]["memory"]}
                row |= built[TYPES[name].named(case_of(count, width))]
                row |= {"recall": recall}
                row |= {part: [[each, np.inf] for each in settings(name, lists)] for part in ("search", "search_clock")}
                rows.append(row)
            for _ in range(rounds):
                for row in rows:
                    for at, setting in enumerate(settings(row["type"], lists)):
                        found = ask(row["type"], setting)
                        for part in ("search", "search_clock"):
                            row[part][at][1] = min(row[part][at][1], found[part])
        machine = {"process_bytes": max(each["process_bytes"] for each in about.values())}
        return rows, machine | {"read_seconds": seconds_a_read(next(folder.glob("HNSW*/**/index.faiss"), None))}


def share_found(found: list[list[int]], truth: list[list[int]]) -> float:
    return float(np.mean([len(set(a) & set(b)) / K for a, b in zip(found, truth, strict=True)]))


def seconds_a_read(file: Path | None) -> float | None:
    """Seconds to read a page that is not in memory, one after the other; None where there is no file."""
    if file is None:
        return None
    opened = os.open(file, os.O_RDONLY)
    try:
        os.fsync(opened)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_RANDOM)
        places = np.random.default_rng(0).permutation(file.stat().st_size // PAGE)[:READS] * PAGE
        start = time.perf_counter()
        for place in places.tolist():
            os.pread(opened, PAGE, place)
        return (time.perf_counter() - start) / len(places)
    finally:
        os.close(opened)


def run(names: list[str], sizes: Any, held_back: Any, rounds: int, known: dict[str, Any]) -> dict[str, Any]:
    """Measure what is not in `known` yet (see `kept`), fit, predict."""
    rows, machine = list(known.get("rows", [])), known.get("machine", {})
    for count, width in (*sizes, *held_back):
        if not any((row["count"], row["width"]) == (count, width) for row in rows):
            made, machine = measure(names, count, width, rounds)
            rows += [{**row, "date": str(date.today())} for row in made]
            print(f"{count:,} x {width}: {sum(row['build_clock'] for row in made):.0f} s of builds", file=sys.stderr)
    early, late = ([row for row in rows if (row["count"], row["width"]) in part] for part in (sizes, held_back))
    return {**machine, **derived(early, late), "rows": early, "held_back_rows": late}


def kept(file: Path) -> dict[str, Any]:
    """What an earlier run measured."""
    if not file.is_file():
        return {}
    found = json.loads(file.read_text(encoding="utf-8"))
    machine = {name: found[name] for name in ("process_bytes", "read_seconds")}
    return {"rows": found["rows"] + found["held_back_rows"], "machine": machine}


def measure_and_write(out: Path, quick: bool, keep: bool, arguments: list[str]) -> None:
    """The whole protocol; writes sizing.json and sizing.png, and the tables of sizing.md where they belong."""
    import sizing_page

    sizes, held_back, rounds = (QUICK, QUICK_HELD_BACK, 3) if quick else (FITTED, HELD_BACK, 5)
    results = run(list(TYPES), sizes, held_back, rounds, kept(out / "sizing.json") if keep else {})
    about = {"command": " ".join(["python eval/benchmarks/sizing.py", *arguments]), "date": str(date.today())}
    about |= {"machine": f"{platform.machine()}, {THREADS} threads", "batch": BATCH, "k": K, "tolerance": TOLERANCE}
    out.mkdir(parents=True, exist_ok=True)
    (out / "sizing.json").write_text(json.dumps({**about, **results}, indent=1) + "\n", encoding="utf-8")
    sizing_page.write(out)


if __name__ == "__main__":
    work, *rest = sys.argv[1:]
    {"--build": build_all, "--serve": serve}[work](*rest)
