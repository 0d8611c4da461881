"""Draws the picture of the idea that stands in README.md.

python eval/idea.py        # writes eval/results/idea.png
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

RESULTS = Path(__file__).parent / "results"
ITEM, QUERY, PLAIN, INK = "#2563a8", "#d97b29", "#6b7280", "#1f2937"


def box(axis: Axes, x: float, y: float, text: str, colour: str, width: float = 1.9, height: float = 0.8) -> None:
    shape = "round,pad=0.02,rounding_size=0.12"
    axis.add_patch(
        FancyBboxPatch((x - width / 2, y - height / 2), width, height, shape, fc=colour + "18", ec=colour, lw=1.6)
    )
    axis.text(x, y, text, ha="center", va="center", fontsize=11.5, color=INK)


def arrow(axis: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axis.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, color=colour, lw=1.6))


def draw() -> Figure:
    figure = Figure(figsize=(12.6, 4.3))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, 14.2), ylim=(0, 4.9))
    axis.axis("off")
    for y, raw, letter, colour in ((4.0, "image", "i", ITEM), (2.7, "audio", "a", ITEM), (0.85, "text", "t", QUERY)):
        box(axis, 1.2, y, raw, colour)
        box(axis, 4.0, y, f"encoder $g_{letter}$", colour)
        arrow(axis, (2.2, y), (3.0, y), colour)
    box(axis, 7.2, 3.35, "item  $g_i \\odot g_a$\nfused once", ITEM, 2.4, 1.1)
    box(axis, 7.2, 0.85, "query  $w \\odot g_t$", QUERY, 2.4)
    arrow(axis, (5.0, 4.0), (5.95, 3.6), ITEM)
    arrow(axis, (5.0, 2.7), (5.95, 3.1), ITEM)
    arrow(axis, (5.0, 0.85), (5.95, 0.85), QUERY)
    box(axis, 10.3, 3.35, "FAISS index\none vector a tuple", ITEM, 2.3, 1.1)
    arrow(axis, (8.45, 3.35), (9.1, 3.35), ITEM)
    box(axis, 10.3, 0.85, "one inner product\na tuple", PLAIN, 2.3, 1.0)
    arrow(axis, (8.45, 0.85), (9.1, 0.85), QUERY)
    arrow(axis, (10.3, 2.75), (10.3, 1.4), ITEM)
    box(axis, 13.0, 0.85, "score\n$\\langle w,\\; g_i \\odot g_a \\odot g_t\\rangle$", PLAIN, 2.1, 1.0)
    arrow(axis, (11.5, 0.85), (11.9, 0.85), PLAIN)
    axis.text(10.3, 4.45, "any modalities may be the tuple, any the query", ha="center", fontsize=10.5, color=PLAIN)
    return figure


if __name__ == "__main__":
    RESULTS.mkdir(exist_ok=True)
    draw().savefig(RESULTS / "idea.png", dpi=120)
    print(RESULTS / "idea.png")
