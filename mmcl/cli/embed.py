"""mmcl embed"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from mmcl.cli.common import JsonOption, named_values, quiet_libraries, show


def embed(
    model: Annotated[str, typer.Argument(help="Folder of a trained model, or its hub id.")],
    data: Annotated[str, typer.Argument(help="A data file (parquet, csv, jsonl, tar ...), a folder, or a hub id.")],
    out: Annotated[Path, typer.Option(help="Folder of the shards.")],
    split: Annotated[str | None, typer.Option(help="Split of a source with several.")] = None,
    column: Annotated[list[str] | None, typer.Option(help="MODALITY=COLUMN, where names differ; repeat it.")] = None,
    modality: Annotated[list[str] | None, typer.Option(help="Embed only this modality; repeat it.")] = None,
    key: Annotated[str | None, typer.Option(help="Column of unique values to join shards by.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows encoded at once.")] = 256,
    shard_size: Annotated[int, typer.Option(min=1, help="Rows a shard, rounded up to whole batches.")] = 10_000,
    dtype: Annotated[Literal["float32", "float16"], typer.Option(help="Of the files.")] = "float32",
    streaming: Annotated[bool, typer.Option(help="Read the data on the fly.")] = False,
    as_json: bool = JsonOption,
) -> None:
    """Embed a dataset into shards (clip-retrieval's layout). Run it again after an interruption: it goes on.

    Examples:

        mmcl embed runs/a/model data.parquet --out embeddings

        mmcl embed runs/a/model "shards/*.tar" --out embeddings --column image=jpg --column text=txt --streaming
    """
    from mmcl.data import load_data
    from mmcl.embedding import embed as embed_dataset
    from mmcl.model import MultimodalModel

    quiet_libraries()
    columns = {name: values[-1] for name, values in named_values(column or [], "--column").items()}
    shards = embed_dataset(
        MultimodalModel.from_pretrained(model),
        load_data(data, split, streaming),
        out,
        columns,
        modalities=modality,
        key=key,
        batch_size=batch_size,
        shard_size=shard_size,
        dtype=dtype,
        progress=not as_json,
    )
    rows, names = shards.rows(), list(shards.modalities)
    result = {"rows": rows, "modalities": names, "out": str(out), "fingerprint": shards.fingerprint}
    show(result, as_json, [f"{rows} rows of {', '.join(names)} in {out}"])
