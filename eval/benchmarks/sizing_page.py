"""What `sizing.py` measured, as a picture and as the tables of `sizing.md`, each between two marks there.

python eval/benchmarks/sizing_page.py              # both anew, from eval/results/sizing.json
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sizing import CLUSTER_HEADER, MILVUS, PLAN_HEADER, aligned, cluster, cluster_row, number, parsed, plan, plan_row
from sizing_costs import CLOCK, TYPES, quantities
from sizing_fit import left_out

PAGE, RESULTS = Path(__file__).with_name("sizing.md"), Path(__file__).parent.parent / "results"
COUNTS = (10**6, 10**7, 10**8, 10**9, 10**10)
MACHINE = ["--width", "512", "--memory", "256GB", "--threads", "16"]
UNITS = {"memory": (1e6, "MB"), "disk": (1e6, "MB"), "build": (1, "s"), "search": (1e-3, "ms")}
UNITS |= {each + CLOCK: UNITS[each] for each in ("build", "search")}
COLOURS = ("#000000", "#cc79a7", "#0072b2", "#56b4e9", "#009e73", "#d55e00", "#e69f00")
Measured = dict[str, Any]


def errors(measured: Measured) -> str:
    """What was predicted of the sizes that had no part in the fit. Of searches the worst setting."""
    worst: dict[Any, Any] = {}
    for row in measured["held_back"]:
        key = (row["type"], row["count"], row["width"], row["quantity"])
        if key not in worst or abs(row["error"]) > abs(worst[key]["error"]):
            worst[key] = row
    rows = []
    for (name, count, width, quantity), row in worst.items():
        one, unit = UNITS[quantity]
        setting = ", ".join(f"{key}={value:g}" for key, value in row["setting"].items())
        values = [f"{number(row[each] / one)} {unit}" for each in ("predicted", "measured")]
        rows.append((name, f"{count:,} x {width}", quantity, setting, *values, f"{row['error']:+.0%}"))
    return aligned(("type", "size", "of", "worst setting", "predicted", "measured", "error"), rows)


def turns(measured: Measured) -> str:
    """The error in the middle of all sizes, each left out of the fit in turn; of a size the worst setting."""
    found = left_out(measured["rows"] + measured["held_back_rows"])
    rows = []
    for name in TYPES:
        worst = []
        for quantity in UNITS:
            own = [row for row in found if (row["type"], row["quantity"]) == (name, quantity)]
            sizes = [
                max(
                    (each for each in own if (each["count"], each["width"]) == size),
                    key=lambda each: abs(each["error"]),
                )
                for size in dict.fromkeys((each["count"], each["width"]) for each in own)
            ]
            worst.append(f"{np.median([abs(each['error']) for each in sizes]):.0%}")
        rows.append((name, *worst))
    return aligned(("type", *(each.replace("_", " ") for each in UNITS)), rows)


def formulas(measured: Measured) -> str:
    """Every coefficient beside what it is multiplied with."""
    rows = []
    for name, kind in TYPES.items():
        for quantity, terms in quantities(kind).items():
            known = measured["types"][name][quantity]
            told = " + ".join(f"{known[term]:.3g} * {term}" for term in terms if known[term])
            unit = "bytes" if quantity in ("memory", "disk") else "s" if quantity == "build" else "s a query"
            rows.append((name, quantity, unit, f"`{told.replace(' * 1 ', ' ').removesuffix(' * 1')}`"))
        for quantity, ratio in measured["types"][name]["clock"].items():
            rows.append((name, quantity + CLOCK, "the same", f"`{ratio:.3g} * {quantity}`"))
    return aligned(("type", "of", "in", "formula"), rows)


def recalls(measured: Measured) -> str:
    """Recall@10 by the share of lists that is probed, or by efSearch: of the largest size fitted, and held back."""
    later = max(measured["held_back_rows"], key=lambda row: row["count"])["count"]
    rows = []
    for name, known in measured["recall"].items():
        row = next(row for row in measured["held_back_rows"] if (row["type"], row["count"]) == (name, later))
        for (effort, recall), (_, further) in zip(known, row["recall"], strict=True):
            told = f"1/{1 / effort:.0f} of the lists" if TYPES[name].effort == "nprobe" else f"efSearch {effort:g}"
            rows.append((name, told, f"{recall:.3f}", f"{further:.3f}"))
    before = max(row["count"] for row in measured["rows"])
    return aligned(("type", "effort", f"recall, {before:,} rows", f"recall, {later:,} rows (held back)"), rows)


def plans(measured: Measured) -> str:
    """A table for each number of tuples."""
    told = []
    for count in COUNTS:
        asked = parsed(["--count", str(count), *MACHINE])
        found = [plan_row(plan(measured, name, asked)) for name in TYPES]
        told.append(f"**{count:,} tuples**\n\n{aligned(PLAN_HEADER, found)}")
    return "\n\n".join(told)


def clusters(measured: Measured) -> str:
    """The same for Milvus."""
    rows = []
    for count in COUNTS:
        asked = parsed(["--count", str(count), *MACHINE])
        rows += [(f"{count:,}", *cluster_row(cluster(name, asked))) for name in MILVUS]
    return aligned(("tuples", *CLUSTER_HEADER), rows)


def about(measured: Measured) -> str:
    """Where and when."""
    return (
        f"Measured {measured['date']} on {measured['machine']}, {measured['batch']} queries at once, k = "
        f"{measured['k']}. The process itself takes {number(measured['process_bytes'] / 1e6)} MB; a cold read of a "
        f"page from this disk {number(measured['read_seconds'] * 1e6)} microseconds; the cache that tells times "
        f"best is {number(measured['cache_bytes'] / 1e6)} MB."
    )


BLOCKS: dict[str, Callable[[Measured], str]] = {
    "about": about,
    "errors": errors,
    "turns": turns,
    "formulas": formulas,
    "recalls": recalls,
    "plans": plans,
    "clusters": clusters,
}


def filled(page: str, measured: Measured) -> str:
    """The page with every table as these measurements have it. KeyError for a mark that names no table."""

    def block(match: "re.Match[str]") -> str:
        return f"<!-- {match[1]} -->\n{BLOCKS[match[1]](measured)}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", block, page, flags=re.DOTALL)


def draw(measured: Measured, file: Path) -> None:
    """Predictions beside measurements, and machines by the number of tuples."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for place, quantity in enumerate(UNITS):
        for name, colour in zip(TYPES, COLOURS, strict=False):
            found = [row for row in measured["held_back"] if (row["type"], row["quantity"]) == (name, quantity)]
            at = place + (list(TYPES).index(name) - 2.5) * 0.12
            ratios = [row["predicted"] / row["measured"] for row in found]
            left.plot([at] * len(found), ratios, "o", ms=4, color=colour, label=name if place == 0 else None)
    tolerance = measured["tolerance"]
    left.axhspan(1 - tolerance, 1 + tolerance, color="#999999", alpha=0.2)
    left.axhline(1, color="#555555", lw=1)
    left.set_xticks(range(len(UNITS)), [each.replace("_", "\n") for each in UNITS])
    left.set(ylabel="predicted / measured", title="sizes that had no part in the fit", ylim=(0.25, 1.5))
    counts = np.geomspace(COUNTS[0], COUNTS[-1], 25)
    for broad, name, colour in zip(range(6, 0, -1), TYPES, COLOURS, strict=False):  # some lie on others
        found = [plan(measured, name, parsed(["--count", f"{int(count)}", *MACHINE])) for count in counts]
        right.plot(counts, [each.machines for each in found], color=colour, lw=0.9 * broad, label=name)
    right.set(xscale="log", yscale="log", xlabel="tuples of width 512", ylabel="machines of 256 GB")
    right.legend(frameon=False, fontsize=8)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def write(out: Path) -> None:
    """sizing.png beside sizing.json; sizing.md where it stands, or beside it where that is elsewhere."""
    measured = json.loads((out / "sizing.json").read_text(encoding="utf-8"))
    draw(measured, out / "sizing.png")
    place = PAGE if out.resolve() == RESULTS.resolve() else out / "sizing.md"
    place.write_text(filled(PAGE.read_text(encoding="utf-8"), measured), encoding="utf-8")


if __name__ == "__main__":
    write(RESULTS)
