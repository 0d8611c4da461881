"""From measurements to coefficients, and to what those predict: see `sizing_runs.py`."""

from typing import Any

import numpy as np
from scipy.optimize import nnls
from sizing_costs import CLOCK, K_FACTOR, TYPES, Case, Terms, predicted, quantities

from mmcl.index.choose import list_count

CACHES = tuple(2.0 ** (20 + half / 2) for half in range(6, 19))
"""Bytes that are tried as what the processor keeps at hand: 8 to 512 MiB."""
Observations = list[tuple[Case, dict[str, Any], float]]


def case_of(count: int, width: int, setting: dict[str, Any] | None = None, cache: float = 0) -> Case:
    case, setting = Case(count, width, list_count(count), cache=cache), setting or {}
    effort = setting.get("nprobe", setting.get("efSearch", 0))
    return case._replace(effort=effort, k_factor=setting.get("k_factor", K_FACTOR))


def observations(rows: list[dict[str, Any]], quantity: str, cache: float = 0) -> Observations:
    """(case, setting, measured) of one type's rows."""
    found = []
    for row in rows:
        value = row[quantity]
        for setting, measured in value if quantity.startswith("search") else [({}, value)]:
            found.append((case_of(row["count"], row["width"], setting, cache), setting, measured))
    return found


def fitted(rows: list[dict[str, Any]], cache: float) -> dict[str, Any]:
    """{type: {quantity: {term: coefficient}}}, and under "clock" the seconds on the clock for one on a processor."""
    found: dict[str, Any] = {}
    for name, own in by_type(rows).items():
        terms = quantities(TYPES[name])
        found[name] = {each: coefficients(terms[each], observations(own, each, cache)) for each in terms}
        found[name]["clock"] = {"build": on_the_clock(own, "build", 0), "search": on_the_clock(own, "search", 0.5)}
    return found


def by_type(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """{type: its rows}."""
    return {name: [row for row in rows if row["type"] == name] for name in dict.fromkeys(row["type"] for row in rows)}


def on_the_clock(rows: list[dict[str, Any]], quantity: str, part: float) -> float:
    """Seconds on the clock for one of all threads together: of builds, of which there is one each, where others on the
    machine disturbed least; of searches, which are minima already, in the middle."""
    clock, processor = (observations(rows, quantity + end) for end in (CLOCK, ""))
    return float(np.quantile([one[2] / other[2] for one, other in zip(clock, processor, strict=True)], part))


def cache_of(rows: list[dict[str, Any]]) -> float:
    """Of `CACHES`, the bytes with which the times of searches are told best.

    Of the largest vectors at least half have to be missed, else larger ones would be told from next to nothing.
    """
    largest = max(4 * row["count"] * row["width"] for row in rows)

    def misses(cache: float) -> float:
        total = 0.0
        for name, own in by_type(rows).items():
            terms, found = quantities(TYPES[name])["search"], observations(own, "search", cache)
            known = coefficients(terms, found)
            told = [sum(known[term] * count(case) for term, count in terms.items()) / value for case, _, value in found]
            total += float(np.square(np.array(told) - 1).sum())
        return total

    return min([0.0, *(cache for cache in CACHES if 2 * cache <= largest)], key=misses)


def coefficients(terms: Terms, found: Observations) -> dict[str, float]:
    """Least squares of the relative error, none of them negative."""
    design = np.array([[count(case) / value for count in terms.values()] for case, _, value in found])
    scale = np.maximum(np.abs(design).max(axis=0), np.finfo(float).tiny)
    solved = nnls(design / scale, np.ones(len(found)))[0] / scale
    return dict(zip(terms, map(float, solved), strict=True))


def compared(measured: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every measurement of these rows beside what the coefficients say."""
    found = []
    for row in rows:
        for quantity in (*quantities(TYPES[row["type"]]), "build" + CLOCK, "search" + CLOCK):
            for case, setting, value in observations([row], quantity):
                guess = predicted(measured, row["type"], quantity, case)
                about = {"type": row["type"], "count": case.count, "width": case.width, "quantity": quantity}
                about |= {"setting": setting, "predicted": guess, "measured": value}
                found.append(about | {"error": guess / value - 1})
    return found


def recall_table(rows: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """{type: [[share of lists or efSearch, recall], ...]} of the largest size that was fitted, rising."""
    found: dict[str, list[list[float]]] = {}
    for row in sorted(rows, key=lambda row: row["count"] * row["width"]):
        effort = TYPES[row["type"]].effort
        if effort is not None:
            whole = list_count(row["count"]) if effort == "nprobe" else 1
            found[row["type"]] = [[setting[effort] / whole, recall] for setting, recall in row["recall"]]
    return found


def derived(rows: list[dict[str, Any]], later: list[dict[str, Any]]) -> dict[str, Any]:
    """What follows from the measurements of the sizes that are fitted, and of those that are held back."""
    cache = cache_of(rows)
    found = {"cache_bytes": cache, "recall": recall_table(rows), "types": fitted(rows, cache)}
    return {**found, "held_back": compared(found, later)}


def left_out(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is predicted of each size by a fit to all others."""
    found = []
    for size in dict.fromkeys((row["count"], row["width"]) for row in rows):
        own = [row for row in rows if (row["count"], row["width"]) == size]
        found += derived([row for row in rows if row not in own], own)["held_back"]
    return found
