"""Which type of index: by the number of items, their width, a memory budget and the recall that searches should have.

What "auto" goes by was measured on fused vectors of width 128 (`python eval/benchmarks/auto_factory.py`). Lists of full
vectors are slower than exact search at a recall of 0.95 and 256 queries at once; lists of 4-bit codes are not, best
where the vectors were rotated before: products of embeddings have heavy tails, which a rotation spreads over all
coordinates. Codes alone rank fused vectors badly, so they only propose, and full vectors, which may stay on the disk,
decide. The coordinate of "MIPS," helped neither lists nor graphs, of 20,000 and of 200,000: on the latter, trained,
lists were 2.8 times as fast as exact search with it and without, graphs 0.4 times with it and 5.8 times without.

Graphs on the raw inner product are never chosen: at 20,000 they were slower than lists of codes, at 200,000 twice as
fast, they take more memory than the vectors themselves, and what they find depends on the data. Measure them with true
queries (`mmcl index tune`).
"""

import re
from dataclasses import dataclass, field
from itertools import product
from numbers import Integral, Real
from typing import Any

from mmcl.index.devices import AUTO, CPU, GPU_K

FLAT_ROWS = 1_000_000
"""Up to so many rows exact search is fast enough to be the answer."""
MOST_LISTS = 65536
TRAINING_ROWS = 40
"""A list: with fewer, k-means places them badly."""
ID_BYTES = 8
FLOAT = 4
CANDIDATES = {1: 8.0, 2: 64.0, 4: 256.0}
"""{coordinates a code: candidates a result that full vectors rank anew}."""
BLOCK_ROWS, SPARE_SHARE, SPARE_BYTES = 32, 0.39, 1500
"""A list of codes for fast scans is filled up to blocks of so many rows, and allocated in powers of two: 0.39 more on
the average, of which pages that are never touched cost nothing (measured)."""
UNITS = {"": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
UNITS |= {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True)
class Choice:
    """A type of index."""

    factory: str
    parameters: dict[str, Any] = field(default_factory=dict)
    """Of searches until the effort is measured (see `mmcl.index.calibrate`): all lists."""
    bytes: int = 0
    """In memory, beside ids and metadata."""
    mapped: bool = False
    """Whether it takes so little only where its full vectors stay on the disk."""
    reason: str = ""


def choose_factory(
    count: int, width: int, memory_budget: int | None = None, recall_target: Any = 0.95, device: str = "cpu"
) -> Choice:
    """The type of the highest quality that fits.

    Args:
        count, width: of the vectors.
        memory_budget: bytes; None: no limit.
        recall_target: share of the true best 10 to be found.
        device: "cpu", or what `check_device` returns.
    Raises: ValueError where nothing fits, naming the least budget that would do and its type; and for a recall that is
        none.
    """
    check_recall(recall_target)
    options = candidates(count, width, float(recall_target), device)
    fitting = [each for each in options if memory_budget is None or each.bytes <= memory_budget]
    if fitting:
        return fitting[0]
    least = min(options, key=lambda each: each.bytes)
    where = "" if device == CPU else f" on device {device!r}"
    raise ValueError(
        f"no type of index keeps {count:,} vectors of width {width} in {shown(memory_budget)}{where}; the least is "
        f"{shown(least.bytes)}, with factory {least.factory!r}"
    )


def check_recall(recall_target: Any) -> None:
    """ValueError for a recall that is none."""
    if isinstance(recall_target, bool) or not isinstance(recall_target, Real) or not 0 < float(recall_target) <= 1:
        raise ValueError(f"recall_target must be above 0 and at most 1, got {recall_target!r}")


def candidates(count: int, width: int, recall_target: float, device: str) -> list[Choice]:
    """Types from the most exact to the smallest, those first that suit the number of rows."""
    flat = memory_size("Flat", count, width)
    why = f"{count:,} vectors take {shown(flat)}: exact search, all in memory"
    exact = Choice("Flat", {}, flat, False, why if count <= FLAT_ROWS else f"recall {recall_target:g} is exact search")
    lists = list_count(count)
    if count < lists * TRAINING_ROWS:
        return [exact]
    found = [coded_choice(count, width, lists, *each) for each in product((False, True), CANDIDATES)]
    if device != CPU:  # GPUs have no codes for fast scans; "auto" goes back to the CPU for them
        found = [whole_choice(count, width, lists), *(found if device == AUTO else [])]
    return [*found, exact] if count > FLAT_ROWS and recall_target < 1 else [exact, *found]


def coded_choice(count: int, width: int, lists: int, mapped: bool, coordinates: int) -> Choice:
    """Rotated vectors as 4-bit codes of so many coordinates each in inverted lists, and full vectors behind them."""
    codes = -(-width // coordinates)
    factory = f"RR{codes * coordinates},IVF{lists},PQ{codes}x4fs,RFlat"
    size = memory_size(factory, count, width, mapped)
    where = "on the disk" if mapped else "in memory as well"
    why = (
        f"codes of {codes} x 4 bits in {lists} lists propose candidates, full vectors {where} rank them: "
        f"{shown(size)} for {count:,} vectors"
    )
    return Choice(factory, {"nprobe": lists, "k_factor": CANDIDATES[coordinates]}, size, mapped, why)


def whole_choice(count: int, width: int, lists: int) -> Choice:
    """Full vectors in inverted lists."""
    factory = f"IVF{lists},Flat"
    size = memory_size(factory, count, width)
    why = f"full vectors in {lists} lists: {shown(size)} for {count:,} vectors"
    return Choice(factory, {"nprobe": min(lists, GPU_K)}, size, False, why)


def memory_size(factory: str, count: int, width: int, mapped: bool = False) -> int:
    """Bytes of an index in memory, without its ids and metadata.

    Args:
        factory: "Flat", "Exact", "SQ8", "PQ16", "HNSW32", or "IVF64," and "Flat", "SQ8", "PQ16" or "PQ16x4fs", with
            ",RFlat" or ",Refine(SQ8)" behind, "MIPS," or "RR64," before it.
        mapped: whether the full vectors of "RFlat" (of "Exact", its float32 rows) stay on the disk.
    Raises: ValueError for another factory.
    """
    width += factory.startswith("MIPS,")
    total = lists = 0
    for part in factory.removeprefix("MIPS,").split(","):
        known = re.fullmatch(r"(RR|IVF|HNSW|PQ|SQ|Flat|RFlat|Refine\(SQ|Exact)(\d*)\)?(?:x(\d+))?(fs)?", part)
        if known is None:
            raise ValueError(f"the size of factory {factory!r} is not known: {part!r}")
        kind, number, bits, fast = known[1], int(known[2] or 0), int(known[3] or 8), bool(known[4])
        if kind == "RR":
            total += number * width * FLOAT
        elif kind == "IVF":
            lists = number
            total += number * width * FLOAT + count * ID_BYTES
        elif kind == "HNSW":
            # links of the lowest level, those above it a (number - 1)th of the rows have, and the vectors
            total += count * (2 * number * 4 + 16) + count * number * 4 // max(number - 1, 1)
            total += count * width * FLOAT if factory.endswith(part) else 0
        elif kind == "PQ":
            bytes_a_row = -(-number * bits // 8) if not fast else -(-number // 2)
            padded = -(-width // number) * number
            total += count * bytes_a_row + 2**bits * padded * FLOAT
            total += lists * spare_bytes(bytes_a_row, count / lists) if lists and fast else 0
        else:
            total += count * stored_width(kind, number, width, mapped)
    return int(total)


def stored_width(kind: str, number: int, width: int, mapped: bool) -> int:
    """Bytes of one vector, coordinate by coordinate."""
    sizes = {"Flat": FLOAT * width, "RFlat": 0 if mapped else FLOAT * width, "Exact": (2 if mapped else 6) * width}
    return sizes[kind] if kind in sizes else -(-width * number // 8)


def spare_bytes(bytes_a_row: int, rows: float) -> float:
    """What a list of so many fast codes takes beyond the codes themselves."""
    unfilled = bytes_a_row * BLOCK_ROWS / 2
    return unfilled + min(SPARE_SHARE * (rows * bytes_a_row + unfilled), SPARE_BYTES)


def list_count(count: int) -> int:
    """Inverted lists: four times the square root of the rows or more, as far as training allows; a power of two."""
    lists = 16
    while lists < MOST_LISTS and lists * lists < 16 * count and 2 * lists * TRAINING_ROWS <= count:
        lists *= 2
    return lists


def parse_bytes(budget: Any) -> int:
    """A number of bytes, from one or from text such as "64MB" or "2 GiB"; ValueError for anything else."""
    if isinstance(budget, Integral) and not isinstance(budget, bool) and int(budget) > 0:
        return int(budget)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", budget.lower()) if isinstance(budget, str) else None
    unit = match[2] + ("" if match[2].endswith("b") or not match[2] else "b") if match else None
    if match is None or unit not in UNITS or float(match[1]) <= 0:
        raise ValueError(f"memory_budget must be bytes above 0 such as 64_000_000, '64MB' or '2GiB', got {budget!r}")
    return int(float(match[1]) * UNITS[unit])


def shown(size: Any) -> str:
    """Bytes as people read them."""
    if size is None:
        return "any memory"
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= one:
            return f"{size / one:.3g} {unit}"
    return f"{size:g} bytes"
