"""mmcl index tune"""

from pathlib import Path
from typing import Annotated

import typer

from mmcl.cli.common import JsonOption, show


def tune(
    path: Annotated[Path, typer.Argument(help="Folder of an index.")],
    queries: Annotated[Path, typer.Option(help="Folder of embedding shards that hold queries.")],
    modality: Annotated[list[str], typer.Option(help="Query modality; repeat it for several.")],
    items: Annotated[Path | None, typer.Option(help="Shards of the items, where the index holds codes alone.")] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="Of recall@k.")] = 10,
    target: Annotated[float, typer.Option(min=0.0, max=1.0, help="Recall to reach.")] = 0.95,
    count: Annotated[int, typer.Option(min=1, help="Queries, drawn at random.")] = 512,
    out: Annotated[Path | None, typer.Option(help="Folder of the curve; default: beside the index.")] = None,
    as_json: bool = JsonOption,
) -> None:
    """Measure recall against speed with true queries, and keep the cheapest setting that reaches the target.

    Example:

        mmcl index tune indexes/built/digits --queries runs/digits/embeddings --modality text
    """
    from mmcl.jobs import tune_job

    result, files = tune_job(path, queries, modality, items, k, target, count, out)
    chosen = result.chosen
    told = ", ".join(f"{name}={value:g}" for name, value in chosen.parameters.items()) or "nothing to set"
    lines = [
        f"{told}: recall@{result.k} {chosen.recall:.4f}, {chosen.queries_per_second:,.0f} queries/s",
        *([] if result.reached else [f"no setting surely reaches {target:g}; this one comes closest"]),
        f"curve: {files[0]} and {files[1]}; the setting is kept in {path}",
    ]
    about = {"parameters": chosen.parameters, "recall": chosen.recall, "reached": result.reached}
    about |= {"queries_per_second": chosen.queries_per_second, "curve": [str(file) for file in files]}
    show(about, as_json, lines)
