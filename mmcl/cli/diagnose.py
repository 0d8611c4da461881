"""mmcl diagnose"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mmcl.cli.common import JsonOption, quiet_libraries, show

LEAST_P = 1e-6


def diagnose(
    source: Annotated[str, typer.Argument(help="Data (a file, a folder, a hub id), or a folder of embedding shards.")],
    modality: Annotated[
        list[str] | None, typer.Option(help="NAME or NAME=COLUMN; repeat it. Default: all, if 5 at most.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Of a source with several.")] = None,
    method: Annotated[
        Literal["auto", "counts", "encoders"], typer.Option(help="Counts are for categories; auto: where possible.")
    ] = "auto",
    rows: Annotated[int, typer.Option(min=1, help="Of more, so many are drawn at random.")] = 20_000,
    level: Annotated[float, typer.Option(min=0.5, max=0.9999, help="Of the intervals.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is random.")] = 0,
    as_json: bool = JsonOption,
) -> None:
    """How much the modalities share in pairs, how much beyond, and which score that asks for.

    Examples:

        mmcl diagnose demo/train.parquet --modality image --modality audio --modality text

        mmcl diagnose runs/digits/embeddings

        mmcl diagnose people.csv --modality city --modality job --modality music=genre
    """
    from mmcl.data import load_data
    from mmcl.diagnose import diagnose

    quiet_libraries()
    columns = dict(column_of(value) for value in modality or ())
    if len(columns) < len(modality or ()):
        raise typer.BadParameter(f"a modality is named twice in {modality}", param_hint="--modality")
    data: Any = source if any(Path(source).glob("*_emb")) else load_data(source, split)
    found = diagnose(data, columns or None, method, rows, level, seed, progress=not as_json)
    lines = [
        f"{found.rows:,} rows: " + ", ".join(f"{name} {kind}" for name, kind in found.kinds.items()),
        *(line(name, getattr(found, name), found.method) for name in ("total", "pairwise", "beyond")),
        "",
        found.advice,
        found.limits,
    ]
    show(asdict(found), as_json, lines)


def column_of(value: str) -> tuple[str, str]:
    """NAME=COLUMN, or NAME for a column of that name."""
    name, equals, column = value.partition("=")
    if not name or (equals and not column):
        raise typer.BadParameter(f"{value!r} is not NAME or NAME=COLUMN", param_hint="--modality")
    return name, column or name


def line(name: str, found: Any, method: str) -> str:
    """One estimate and its interval."""
    called = {"total": "all dependence", "pairwise": "in pairs", "beyond": "beyond pairs"}[name]
    sign = ">=" if method == "encoders" else "= "
    nats = max(0.0, found.nats)
    p_value = f"p {found.p_value:.2g}" if found.p_value >= LEAST_P else f"p < {LEAST_P:g}"
    return f"{called:<15}{sign} {nats:7.4f} nats  [{found.low:.4f}, {found.high:.4f}]  {p_value}"
