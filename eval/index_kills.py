"""An index whose writer is killed (SIGKILL) at random points, most of them in the middle of a save: what is left?

python eval/index_kills.py              # 50 kills, half a minute; writes eval/results/index_kills.json
python eval/index_kills.py --kills 5 --out figures

A second process loads the index, and in round after round replaces, adds and removes items, compacts every third time
and saves. It tells each step as it begins. The first process kills it, and then checks that

- the index loads, and `verify` passes;
- it is of the last round whose `save` had returned, or of the one that was being saved: every id, metadata and vector;
- the next save works, and leaves one version's folder;
- an index that was loaded with memory_map=True before still answers as it did.

So for several types, and for two indexes side by side, which are then both of the same round.
"""

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from mmcl.index import TupleIndex, TupleIndexes, local
from mmcl.index.fusion import Fusion
from mmcl.scores import Hadamard

RESULTS = Path(__file__).parent / "results"
FACTORIES = ("Flat", "IVF8,Flat", "HNSW16")
TOGETHER = "side by side"
"""Name of the folder of several indexes: "Flat" ones that store each modality."""
ITEMS, CHANGED, DIM = 500, 40, 32
FIRST_EXTRA, KEPT_EXTRA = 1000, 4
IN_A_SAVE = 0.6
"""Share of the kills that must fall between the first write of a version and the switch to it."""
MIDDLE_FIRST, MIDDLE_LAST = "first write", "renamed"
ELSEWHERE = ("load", "add", "compact", "save", MIDDLE_LAST, "saved")
"""Steps after which the other kills come."""
AIMED = 0.8
"""Share of those that are aimed there; some come too late."""
SCORE = Hadamard(("text", "image"), DIM, temperature=1.0)
QUERIES = {name: np.random.default_rng(0).standard_normal((8, DIM)) for name in SCORE.modalities}
Index = TupleIndex | TupleIndexes


def changed(number: int) -> list[int]:
    """Ids that a round replaces; 0 is always among them."""
    start = 7 * number % (ITEMS - CHANGED)
    return sorted({0, *range(start, start + CHANGED)})


def state(number: int) -> dict[int, int]:
    """{id: the round in which it was stored} after this many rounds."""
    rounds = dict.fromkeys(range(ITEMS), 0)
    for each in range(1, number + 1):
        rounds |= dict.fromkeys(changed(each), each)
        rounds[FIRST_EXTRA + each] = each
        rounds.pop(FIRST_EXTRA + each - KEPT_EXTRA, None)
    return rounds


def embeddings(rounds: dict[int, int], modalities: Iterable[str]) -> dict[str, np.ndarray]:
    """Every id has another row in every round, and of every modality."""

    def rows(name: str) -> np.ndarray:
        number = SCORE.modalities.index(name)
        return np.float32([np.random.default_rng((*place, number)).standard_normal(DIM) for place in rounds.items()])

    return {name: rows(name) for name in modalities}


def load(path: Path, memory_map: bool = False) -> Index:
    """The index at `path`, or the indexes."""
    return (TupleIndexes if path.name == TOGETHER else TupleIndex).load(path, memory_map=memory_map)


def parts_of(index: Index) -> list[TupleIndex]:
    """The indexes side by side, or the only one."""
    return [index] if isinstance(index, TupleIndex) else [index.storing(names) for names in index.stored]


def one_round(index: Index, number: int) -> None:
    """From the state of the round before to this one's; `compact` and `save` are others."""
    replaced = dict.fromkeys(changed(number), number)
    index.upsert(embeddings(replaced, index.modalities), list(replaced), {"round": list(replaced.values())})
    extra = FIRST_EXTRA + number
    index.add(embeddings({extra: number}, index.modalities), [extra], {"round": [number]})
    if extra - KEPT_EXTRA in index:
        index.remove(extra - KEPT_EXTRA)


def write_on(path: str, log: Connection) -> None:
    """Round after round, telling each step as it begins, until killed."""

    def tell(step: str) -> None:
        log.send_bytes(step.encode())

    write, replace = Fusion.write, os.replace

    def first_write(fusion: Fusion, folder: Path) -> None:
        tell(MIDDLE_FIRST)
        write(fusion, folder)

    def rename(source: Any, target: Any) -> None:
        replace(source, target)
        tell(MIDDLE_LAST)

    Fusion.write, os.replace = first_write, rename  # type: ignore[method-assign]
    local.FOLD_ROWS = 2 * CHANGED
    tell("load")
    index = load(Path(path))
    number = index.get(0)["round"]
    while True:
        number += 1
        tell("add")
        one_round(index, number)
        if number % 3 == 0:
            tell("compact")
            index.compact()
        tell("save")
        index.save(path)
        tell("saved")


@dataclass
class Killed:
    """A writer that is dead."""

    steps: list[str]
    """What it told."""
    spans: list[float]
    """Seconds from the first write to the switch, of the saves that came so far."""

    @property
    def last(self) -> str:
        """What it was at."""
        return self.steps[-1] if self.steps else "start"


def kill_a_writer(path: Path, aimed: bool, span: float, chance: random.Random) -> Killed:
    """Start a writer and kill it: in the middle of a save where `aimed`, else after any step.

    Args:
        span: how long the middle of a save takes, in seconds.
    """
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    writer = context.Process(target=write_on, args=(str(path), theirs), daemon=True)
    writer.start()
    theirs.close()
    steps, spans, started = [], [], 0.0
    at = MIDDLE_FIRST if aimed else chance.choice(ELSEWHERE)
    times = 1 if at == "load" else chance.randint(1, 3)
    while True:
        step = ours.recv_bytes().decode()
        steps.append(step)
        if step == MIDDLE_FIRST and steps[-2] != MIDDLE_FIRST:
            started = time.perf_counter()
        if step == MIDDLE_LAST and steps[-2] == MIDDLE_FIRST:
            spans.append(time.perf_counter() - started)
        if steps.count(at) == times:
            break
    time.sleep(chance.uniform(0, span) if aimed else chance.choice((0, span / 5)))
    writer.kill()
    writer.join()
    while True:
        try:
            steps.append(ours.recv_bytes().decode())
        except EOFError:
            return Killed(steps, spans)


def check(condition: bool, told: str) -> None:
    """RuntimeError where it does not hold."""
    if not condition:
        raise RuntimeError(told)


def check_index(index: Index, number: int) -> None:
    """RuntimeError where the index, or one side by side, is not what it was after this round."""
    rounds = state(number)
    keys = list(rounds)
    for part in parts_of(index):
        ids = part.ids().tolist()
        check(len(part) == len(ids) == len(rounds) and set(ids) == set(keys), f"round {number}: the ids differ")
        check([row["round"] for row in part.get(keys)] == list(rounds.values()), f"round {number}: metadata differs")
        vectors = SCORE.item_vectors(embeddings(rounds, part.modalities)).detach().numpy()
        check(np.array_equal(part.vectors(keys), vectors), f"round {number}: vectors differ")
        queries = {name: QUERIES[name] for name in part.query_modalities}
        hits = part.search(queries, k=len(part))
        scores = SCORE.query_vectors(queries).detach().numpy() @ vectors.T
        check(np.allclose(hits.scores, -np.sort(-scores, axis=1), atol=1e-3), f"round {number}: scores differ")


def check_folder(path: Path) -> None:
    """RuntimeError where an index has more, or less, than one version's folder."""
    for folder in [entry for entry in path.iterdir() if entry.is_dir()] if path.name == TOGETHER else [path]:
        found = [entry.name for entry in folder.iterdir() if entry.is_dir()]
        check(len(found) == 1, f"the next save left {found} in {folder}")


def one_kill(path: Path, aimed: bool, span: float, chance: random.Random) -> dict[str, Any]:
    """Kill a writer of what is at `path` and check what it left; where it was, and how the index opened."""
    reader = load(path, memory_map=True)
    before = reader.get(0)["round"]
    killed = kill_a_writer(path, aimed, span, chance)
    index = load(path)
    index.verify()
    number = index.get(0)["round"]
    saved = before + killed.steps.count("saved")
    check(number in (saved, saved + 1), f"round {number} is there, {saved} had been saved")
    check_index(index, number)
    index.save(path)
    check_folder(path)
    check_index(load(path), number)
    check_index(reader, before)
    in_save = killed.last == MIDDLE_FIRST and number == saved
    opened = "old" if number == saved else "new"
    return {"of": path.name, "at": killed.last, "in_save": in_save, "opened": opened, "spans": killed.spans}


def run(kills: int, seed: int, folder: Path) -> list[dict[str, Any]]:
    """What `one_kill` says of at least `kills` kills, enough of them in the middle of a save."""
    chance, done, spans = random.Random(seed), [], [0.05]
    paths = [*(folder / f"index {number}" for number in range(len(FACTORIES))), folder / TOGETHER]
    rounds = state(0)
    columns = {"round": list(rounds.values())}
    for factory, path in zip(FACTORIES, paths, strict=False):
        TupleIndex.build(SCORE, embeddings(rounds, ["image"]), list(rounds), columns, factory=factory).save(path)
    together = embeddings(rounds, SCORE.modalities)
    TupleIndexes.build(SCORE, together, list(rounds), columns, factory="Flat").save(paths[-1])
    while len(done) < kills or sum(kill["in_save"] for kill in done) < IN_A_SAVE * kills:
        check(len(done) < 4 * kills, "too few of the kills fell into a save")
        kill = one_kill(paths[len(done) % len(paths)], chance.random() < AIMED, statistics.median(spans), chance)
        spans += kill.pop("spans")
        done.append(kill)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["mmcl.index.tuple_index", "pyarrow.parquet"])
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        done = run(options.kills, options.seed, Path(folder))
    summary = {
        "command": "python " + " ".join(["eval/index_kills.py", *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "seconds": round(time.perf_counter() - started, 1),
        "kills": len(done),
        "between the first write and the switch": sum(kill["in_save"] for kill in done),
        "of indexes side by side": sum(kill["of"] == TOGETHER for kill in done),
        "at": dict(Counter(kill["at"] for kill in done)),
        "opened": dict(Counter(kill["opened"] for kill in done)),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "index_kills.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
