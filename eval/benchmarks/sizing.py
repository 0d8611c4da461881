"""Sizing past one machine: memory, machines, build hours and queries a second for any number of tuples.

    python eval/benchmarks/sizing.py --count 3e8 --width 512 --memory 64GB       # a plan, from what was measured
    python eval/benchmarks/sizing.py --count 3e8 --width 512 --memory 64GB --recall 0.9 --threads 16
    python eval/benchmarks/sizing.py                 # measures anew: eval/results/sizing.json, .png and sizing.md
    python eval/benchmarks/sizing.py --quick --out figures

Every cost is a sum of terms that are counted (rows scanned, lists compared, ...) times coefficients that were measured
(see `sizing_runs.py`). Sizes that had no part in fitting them are predicted and measured beside. The formulas for a
Milvus cluster are those of Milvus' own sizing tool; nothing of a cluster was measured. See `sizing.md`.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from sizing_costs import K_FACTOR, THREADS, TYPES, Case, K, Kind, predicted

from mmcl.index.choose import list_count, parse_bytes, shown

RESULTS = Path(__file__).parent.parent / "results"
FILLED = 0.9
"""The share of a machine's memory that is planned with, as Milvus' documents have it for theirs."""
LEAST_ROWS = 640


class Plan(NamedTuple):
    """A type of index over so many machines."""

    name: str
    factory: str
    """On each machine."""
    parameters: str
    recall: float
    bytes_a_tuple: float
    """In memory."""
    machines: int
    memory: float
    """Bytes on each, with the process itself."""
    disk: float
    """Bytes on each."""
    build_hours: float
    queries_per_second: float


def plan(measured: dict[str, Any], name: str, asked: argparse.Namespace) -> Plan:
    """The fewest machines that hold `asked.count` tuples in this type.

    Each holds an equal part as an index of its own, answers every query, and the best scores of all count.
    Raises: ValueError where the memory of a machine holds hardly anything, naming the least.
    """
    kind = TYPES[name]
    own = measured["process_bytes"]
    usable = FILLED * asked.memory - own

    def part(machines: int) -> Case:
        count = -(-asked.count // machines)
        return Case(count, asked.width, list_count(count))

    def size(case: Case) -> float:
        return predicted(measured, name, "memory", case) + asked.metadata * case.count

    least = Case(LEAST_ROWS, asked.width, list_count(LEAST_ROWS))
    if size(least) > usable:
        wanted = (size(least) + own) / FILLED
        raise ValueError(f"a machine of {shown(asked.memory)} holds no part of an index; the least is {shown(wanted)}")
    machines = 1
    while size(part(machines)) > usable:  # the part that is a machine's share, then one by one
        machines = max(machines + 1, int(machines * size(part(machines)) / usable * 0.98))
    case = part(machines)
    effort, recall = chosen_effort(measured, name, case.lists, asked)
    case = case._replace(effort=effort)
    share = THREADS / asked.threads
    seconds = predicted(measured, name, "search_clock", case) * share
    seconds += cold_share(kind, case, usable - size(case)) * K_FACTOR * K * measured["read_seconds"] / asked.threads
    return Plan(
        name,
        kind.named(case),
        f"{kind.effort}={effort}" if kind.effort else "",
        recall,
        size(case) / case.count,
        machines,
        size(case) + own,
        predicted(measured, name, "disk", case) + asked.metadata * case.count,
        predicted(measured, name, "build_clock", case) * share / 3600,
        1 / seconds,
    )


def chosen_effort(measured: dict[str, Any], name: str, lists: int, asked: argparse.Namespace) -> tuple[int, float]:
    """(nprobe or efSearch, recall): the least that was measured to reach the recall, or the most there was.

    Of lists the share counts that is probed, whatever their number; --share sets it, and then the recall is unknown.
    """
    kind, known = TYPES[name], measured["recall"].get(name, [[0, 1.0]])
    effort, recall = next((each for each in known if each[1] >= asked.recall), known[-1])
    if kind.effort == "nprobe" and asked.share:
        effort, recall = asked.share, math.nan
    return max(1, round(effort * lists)) if kind.effort == "nprobe" else int(effort), recall


def cold_share(kind: Kind, case: Case, spare: float) -> float:
    """The share of full vectors on the disk that the rest of the memory cannot keep."""
    return max(0.0, 1 - max(spare, 0) / (4 * case.count * case.width)) if kind.mapped else 0.0


class Cluster(NamedTuple):
    """What Milvus' sizing tool asks for."""

    name: str
    memory: float
    """Bytes of one replica when loaded."""
    nodes: int
    node_gib: int
    node_cores: int
    segments: int
    storage: float
    """Bytes in the object store."""


GIB, SPARE = 2**30, 1.15
MILVUS: dict[str, Callable[[int, int, int], float]] = {
    "Flat": lambda n, w, lists: 4 * n * w,
    "IVF,Flat": lambda n, w, lists: 4 * n * w + 4 * lists * w,
    "IVF,SQ8": lambda n, w, lists: n * w + 4 * lists * w,
    "HNSW32": lambda n, w, lists: (1 + 2 * 32 / w) * 4 * n * w,
}
"""Bytes of an index: `memoryAndDiskCalculator` in src/utils/sizingTool.ts of github.com/milvus-io/milvus.io, at
06a9d686; so are the nodes, and the two segments and 15 % to spare."""
NODES = ((8, 8, 2), (96, 16, 4), (512, 32, 8), (2048, 64, 16), (math.inf, 128, 32))
"""Query nodes: below so many GiB in all, nodes of so many GiB and cores."""


def cluster(name: str, asked: argparse.Namespace) -> Cluster:
    """Query nodes for one type; every replica needs all of them again."""
    segment = asked.segment * 2**20
    raw = 4 * asked.count * asked.width
    lists = list_count(min(asked.count, max(LEAST_ROWS, segment // (4 * asked.width))))
    memory = (MILVUS[name](asked.count, asked.width, lists) + 2 * segment) * SPARE + asked.metadata * asked.count
    gib, cores = next((gib, cores) for below, gib, cores in NODES if memory < below * GIB)
    nodes = math.ceil(memory / GIB / gib) * asked.replicas
    return Cluster(name, memory, nodes, gib, cores, math.ceil(raw / segment), raw + memory)


def aligned(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    every = [[*header], *([*row] for row in rows)]
    widths = [max(len(row[column]) for row in every) for column in range(len(every[0]))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in every]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def number(value: float) -> str:
    """Three figures, with separators."""
    return f"{float(f'{value:.3g}'):,.{0 if value >= 100 else 1 if value >= 10 else 2}f}" if value >= 0.01 else "< 0.01"


PLAN_HEADER = ("type", "factory on each machine", "effort", "recall", "bytes a tuple", "machines", "memory each")
PLAN_HEADER += ("disk each", "build hours", "queries/s")
CLUSTER_HEADER = ("Milvus index", "memory loaded", "query nodes", "segments", "object storage")


def plan_row(p: Plan) -> tuple[str, ...]:
    recall = "not known" if math.isnan(p.recall) else f"{p.recall:.3f}"
    sizes = (number(p.bytes_a_tuple), f"{p.machines:,}", tera(p.memory), tera(p.disk))
    return (p.name, p.factory, p.parameters, recall, *sizes, number(p.build_hours), number(p.queries_per_second))


def cluster_row(c: Cluster) -> tuple[str, ...]:
    nodes = f"{c.nodes:,} of {c.node_gib} GiB, {c.node_cores} cores"
    return (c.name, tera(c.memory), nodes, f"{c.segments:,}", tera(c.storage))


def tera(size: float) -> str:
    """Bytes as people read them, above 1000 GB too."""
    return f"{size / 1e12:.3g} TB" if size >= 1e12 else shown(size)


def told(measured: dict[str, Any], asked: argparse.Namespace) -> str:
    """The whole plan as text."""
    found = [plan_row(plan(measured, name, asked)) for name in TYPES]
    nodes = [cluster_row(cluster(name, asked)) for name in MILVUS]
    return "\n\n".join([aligned(PLAN_HEADER, found), aligned(CLUSTER_HEADER, nodes), caution(measured)])


def caution(measured: dict[str, Any]) -> str:
    """What of a plan was measured, and what was not."""
    sizes = [(row["count"], row["width"]) for part in ("rows", "held_back_rows") for row in measured[part]]
    fitted = max((row["count"], row["width"]) for row in measured["rows"])
    return (
        f"Measured up to {max(sizes)[0]:,} x {max(sizes)[1]} with {THREADS} threads; beyond, the same formulas. "
        f"Recall is that of the\nprotocol's vectors at {fitted[0]:,} x {fitted[1]}; a graph's falls as rows are added. "
        "Nothing of Milvus was measured.\nSee eval/benchmarks/sizing.md for what to check first."
    )


def real(text: str) -> float:
    """A number, or nan for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def whole(text: str) -> int:
    """A number above 0 such as 300000000 or 3e8."""
    value = real(text)
    if not 1 <= value < 1e15 or value != int(value):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0 such as 3e8, got {text!r}")
    return int(value)


def share_of(text: str) -> float:
    value = real(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text!r}")
    return value


def memory_of(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be bytes such as 64GB or 512GiB, got {text!r}") from None


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=whole, help="tuples, such as 3e8; without it everything is measured anew")
    parser.add_argument("--width", type=whole, default=512, help="of the fused vectors")
    parser.add_argument("--memory", type=memory_of, default=parse_bytes("64GB"), help="of a machine, such as 64GB")
    parser.add_argument("--recall", type=share_of, default=0.95, help="of the best 10, on the vectors of the protocol")
    parser.add_argument("--share", type=share_of, help="of the lists that are probed, where yours was measured")
    parser.add_argument("--threads", type=whole, default=THREADS, help="of a machine; time is taken as proportional")
    parser.add_argument("--metadata", type=float, default=0.0, help="bytes a tuple")
    parser.add_argument("--replicas", type=whole, default=1, help="of a Milvus cluster")
    parser.add_argument("--segment", type=whole, default=1024, help="MiB of a Milvus segment")
    parser.add_argument("--quick", action="store_true", help="measure small sizes only, in a minute or two")
    parser.add_argument("--keep", action="store_true", help="do not measure again what sizing.json has already")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where measurements go")
    given = parser.parse_args(arguments)
    if given.count is not None and given.count < LEAST_ROWS:
        parser.error(f"argument --count: must be {LEAST_ROWS} or more, got {given.count}: lists need rows to train on")
    if not 0 <= given.metadata < math.inf:
        parser.error(f"argument --metadata: must be bytes a tuple, 0 or more, got {given.metadata}")
    return given


def main() -> None:
    given = parsed()
    if given.count is None:
        import sizing_runs

        sizing_runs.measure_and_write(given.out, given.quick, given.keep, sys.argv[1:])
        return
    measured = json.loads((RESULTS / "sizing.json").read_text(encoding="utf-8"))
    try:
        print(told(measured, given))
    except ValueError as error:
        sys.exit(f"sizing.py: error: argument --memory: {error}")


if __name__ == "__main__":
    main()
