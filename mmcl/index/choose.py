"""Which type of index: by the number of items, their width, a memory budget and the recall that searches should have.

What "auto" goes by was measured on fused vectors (`python eval/benchmarks/auto_factory.py --count 20000`): inverted
lists do better on the raw inner product than with the coordinate of "MIPS,", so they go without it. Graphs are slower
than lists at the same recall, with that coordinate and without, and are never chosen: only a measurement with true
queries shows what they find (`mmcl index tune`). Codes alone rank fused vectors badly, so they only propose, and full
vectors, which may stay on the disk, decide.
"""

import re
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

FLAT_ROWS = 1_000_000
"""Up to so many rows exact search is fast enough to be the answer."""
MOST_LISTS = 65536
TRAINING_ROWS = 40
"""A list: with fewer, k-means places them badly."""
ID_BYTES = 8
FLOAT = 4
PROBED = {0.99: 0.5, 0.95: 0.2, 0.9: 0.12, 0.8: 0.06}
"""Share of the lists that is probed for a recall: enough where queries point to what was trained to fit them. Vectors
without any such structure would take half of all lists and gain nothing over exact search."""
CANDIDATES = {2: 32.0, 4: 128.0, 8: 256.0}
"""{coordinates a code: candidates a result that full vectors rank anew}."""
UNITS = {"": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
UNITS |= {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True)
class Choice:
    """A type of index."""

    factory: str
    parameters: dict[str, Any] = field(default_factory=dict)
    """Of a search, unless it gives others."""
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
    if isinstance(recall_target, bool) or not isinstance(recall_target, Real) or not 0 < float(recall_target) <= 1:
        raise ValueError(f"recall_target must be above 0 and at most 1, got {recall_target!r}")
    options = list(candidates(count, width, float(recall_target)))
    fitting = [each for each in options if memory_budget is None or each.bytes <= memory_budget]
    if fitting:
        return fitting[0]
    least = min(options, key=lambda each: each.bytes)
    raise ValueError(
        f"no type of index keeps {count:,} vectors of width {width} in {shown(memory_budget)}; the least is "
        f"{shown(least.bytes)}, with factory {least.factory!r}"
    )


def candidates(count: int, width: int, recall_target: float) -> list[Choice]:
    """Types from the most exact to the smallest."""
    flat = memory_size("Flat", count, width)
    found = [Choice("Flat", {}, flat, False, f"{count:,} vectors take {shown(flat)}: exact search, all in memory")]
    lists = list_count(count)
    if count > FLAT_ROWS:
        found[0] = Choice("Flat", {}, flat, False, f"recall {recall_target:g} asks for exact search")
    probed = {"nprobe": max(1, round(lists * share_probed(recall_target)))}
    told = f"{lists} lists for {count:,} vectors, {probed['nprobe']} of them probed for recall {recall_target:g}"
    factory = f"IVF{lists},Flat"
    size = memory_size(factory, count, width)
    whole = Choice(factory, probed, size, False, f"{told}; vectors as they are, {shown(size)}")
    if count > FLAT_ROWS and recall_target < 1:
        found.insert(0, whole)
    if count < lists * TRAINING_ROWS:
        return found
    for coordinates, factor in CANDIDATES.items():
        codes = -(-width // coordinates)
        factory = f"IVF{lists},PQ{codes}x4fs,RFlat"
        size = memory_size(factory, count, width, mapped=True)
        why = (
            f"{told}; codes of {codes} x 4 bits in memory ({shown(size)}), full vectors on the disk rank the best anew"
        )
        found.append(Choice(factory, {**probed, "k_factor": factor}, size, True, why))
    return found


def memory_size(factory: str, count: int, width: int, mapped: bool = False) -> int:
    """Bytes of an index in memory, without its ids and metadata.

    Args:
        factory: "Flat", "Exact", "SQ8", "PQ16", "HNSW32", or "IVF64," and "Flat", "SQ8", "PQ16" or "PQ16x4fs", with
            ",RFlat" or ",Refine(SQ8)" behind, "MIPS," before it.
        mapped: whether the full vectors of "RFlat" (of "Exact", its float32 rows) stay on the disk.
    Raises: ValueError for another factory.
    """
    width += factory.startswith("MIPS,")
    total = 0
    for part in factory.removeprefix("MIPS,").split(","):
        known = re.fullmatch(r"(IVF|HNSW|PQ|SQ|Flat|RFlat|Refine\(SQ|Exact)(\d*)\)?(?:x(\d+))?(fs)?", part)
        if known is None:
            raise ValueError(f"the size of factory {factory!r} is not known: {part!r}")
        kind, number, bits, fast = known[1], int(known[2] or 0), int(known[3] or 8), bool(known[4])
        if kind == "IVF":
            total += number * width * FLOAT + count * ID_BYTES
        elif kind == "HNSW":
            # links of the lowest level, those above it a (number - 1)th of the rows have, and the vectors
            total += count * (2 * number * 4 + 16) + count * number * 4 // max(number - 1, 1)
            total += count * width * FLOAT if factory.endswith(part) else 0
        elif kind == "PQ":
            bytes_a_row = -(-number * bits // 8) if not fast else -(-number // 2)
            padded = -(-width // number) * number
            total += count * bytes_a_row + 2**bits * padded * FLOAT
        else:
            total += count * stored_width(kind, number, width, mapped)
    return int(total)


def stored_width(kind: str, number: int, width: int, mapped: bool) -> int:
    """Bytes of one vector, coordinate by coordinate."""
    sizes = {"Flat": FLOAT * width, "RFlat": 0 if mapped else FLOAT * width, "Exact": (2 if mapped else 6) * width}
    return sizes[kind] if kind in sizes else -(-width * number // 8)


def list_count(count: int) -> int:
    """Inverted lists: four times the square root of the rows or more, as far as training allows; a power of two."""
    lists = 16
    while lists < MOST_LISTS and lists * lists < 16 * count and 2 * lists * TRAINING_ROWS <= count:
        lists *= 2
    return lists


def share_probed(recall_target: float) -> float:
    """The part of all lists that the recall takes."""
    return min((share for recall, share in PROBED.items() if recall >= recall_target), default=1.0)


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
