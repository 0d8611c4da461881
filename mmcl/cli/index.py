"""mmcl index build | search | add | remove | compact | info | verify"""

from pathlib import Path
from typing import Annotated, Any

import typer

from mmcl.cli.common import JsonOption, quiet_libraries, raw_values, show
from mmcl.cli.index_tune import tune

app = typer.Typer(help="Build and ask indexes of tuples.", no_args_is_help=True)
app.command()(tune)
IndexPath = Annotated[Path, typer.Argument(help="Folder of an index.")]


@app.command()
def build(
    recipe: Annotated[Path, typer.Argument(help="An index recipe (TOML); its keys: `mmcl list recipes`.")],
    out: Annotated[str | None, typer.Option(help="Folder of the index, in place of the recipe's.")] = None,
    as_json: bool = JsonOption,
) -> None:
    """Fuse embedding shards into an index, as a recipe says.

    Example:

        mmcl index build indexes/demo.toml
    """
    from mmcl.jobs import index_folder, index_job
    from mmcl.recipes import IndexRecipe, read_recipe

    quiet_libraries()
    index = index_job(recipe, out)
    folder = out or index_folder(recipe, read_recipe(recipe, IndexRecipe))
    show({"out": folder, **index.info()}, as_json, [f"{len(index)} tuples in {folder}"])


@app.command()
def search(
    path: IndexPath,
    query: Annotated[list[str], typer.Option(help="MODALITY=VALUE: text, a file, or [numbers]; repeat it.")],
    model: Annotated[str, typer.Option(help="Folder of the model that encodes the query.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Tuples to return.")] = 10,
    where: Annotated[str | None, typer.Option(help="A condition on the metadata, in SQL.")] = None,
    nprobe: Annotated[int | None, typer.Option(min=1, help="IVF lists to visit.")] = None,
    as_json: bool = JsonOption,
) -> None:
    """Find the tuples that score highest with a query.

    Examples:

        mmcl index search demo/index --model demo/model --query text=seven -k 5

        mmcl index search photos --model runs/a/model --query text="a dog barks" --query audio=bark.wav

        mmcl index search demo/index --model demo/model --query text=seven --where "image_digit < audio_digit"
    """
    from mmcl.index import TupleIndex
    from mmcl.model import MultimodalModel

    quiet_libraries()
    loaded = MultimodalModel.from_pretrained(model)
    index = TupleIndex.load(path, model=loaded)
    values = raw_values(loaded, query, "--query")
    options: dict[str, Any] = {} if nprobe is None else {"nprobe": nprobe}
    hits = index.search(values, k=k, where=where, encoded=False, **options)
    answers = list(hits)
    found = [[{"id": i, "score": float(s), **m} for i, s, m in answer] for answer in answers]
    lines = []
    for number, answer in enumerate(answers, start=1):
        lines += [f"query {number}"] if len(answers) > 1 else []
        for rank, (i, s, m) in enumerate(answer, start=1):
            lines.append("  ".join([f"{rank:>3}. {i}", f"{s:.4f}", *(f"{name}={value}" for name, value in m.items())]))
    show({"kind": hits.kind, "hits": found if len(found) > 1 else found[0]}, as_json, lines or ["no tuple found"])


@app.command()
def add(
    path: IndexPath,
    embeddings: Annotated[Path, typer.Argument(help="Folder of embedding shards (`mmcl embed`).")],
    ids: Annotated[str | None, typer.Option(help="A metadata column of ids; default: the next integers.")] = None,
    upsert: Annotated[bool, typer.Option(help="Replace the items that have these ids.")] = False,
    as_json: bool = JsonOption,
) -> None:
    """Store more tuples in an index.

    Example:

        mmcl index add indexes/built/digits runs/digits/more --ids key --upsert
    """
    from mmcl.jobs import add_job

    index, before = add_job(path, embeddings, ids, upsert)
    show(
        {"path": str(path), "before": before, "count": len(index)},
        as_json,
        [f"{path}: {before} tuples before, {len(index)} now"],
    )


@app.command()
def remove(
    path: IndexPath,
    ids: Annotated[list[str], typer.Argument(help="Ids of the tuples to take out.")],
    as_json: bool = JsonOption,
) -> None:
    """Take tuples out of an index.

    Example:

        mmcl index remove indexes/built/digits 17 23
    """
    from mmcl.index import TupleIndex

    index = TupleIndex.load(path)
    index.remove([index.id_of(text) for text in ids])
    index.save(path)
    show({"path": str(path), "removed": len(ids), "count": len(index)}, as_json, [f"{path}: {len(index)} tuples left"])


@app.command()
def compact(path: IndexPath, as_json: bool = JsonOption) -> None:
    """Free what removed tuples hold, and give added ones their place in the lists or the graph.

    Example:

        mmcl index compact indexes/built/digits
    """
    from mmcl.index import TupleIndex

    index = TupleIndex.load(path)
    index.compact()
    index.save(path)
    show({"path": str(path), "count": len(index)}, as_json, [f"{path}: {len(index)} tuples"])


@app.command()
def info(path: IndexPath, as_json: bool = JsonOption) -> None:
    """Say what an index holds.

    Example:

        mmcl index info demo/index --json
    """
    from mmcl.index import TupleIndex

    told = TupleIndex.load(path).info()
    show(told, as_json, [f"{name}: {value}" for name, value in told.items()])


@app.command()
def verify(path: IndexPath, as_json: bool = JsonOption) -> None:
    """Check every file of an index against its checksum; exit code 1 names the one that differs.

    Example:

        mmcl index verify demo/index
    """
    from mmcl.index import TupleIndex

    index = TupleIndex.load(path)
    index.verify()
    show(
        {"path": str(path), "count": len(index), "ok": True}, as_json, [f"{path}: {len(index)} tuples, all files right"]
    )
