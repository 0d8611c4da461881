"""What a recipe asks for, done by the same functions that a program calls."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmcl.data import load_data, modality_columns, named_labels
from mmcl.encoders import ENCODERS
from mmcl.model import MultimodalModel
from mmcl.recipes import IndexRecipe, TrainRecipe, beside, read_recipe, source_beside
from mmcl.scores import SCORES, Score, load_score
from mmcl.shards import MANIFEST, EmbeddingShards, open_shards, verify_shards
from mmcl.tables import lookup
from mmcl.training import FitResult, fit


def train_job(recipe: str | Path, resume: bool = False, log: str | None = None, progress: bool = True) -> FitResult:
    """Build, train and save the model of a train recipe.

    Raises: ValueError or KeyError naming the key of the recipe, or the row of the data, that is wrong.
    """
    plan = read_recipe(recipe, TrainRecipe)
    data = plan.data
    dataset = load_data(source_beside(recipe, data.source), data.split, data.streaming)
    validation = None
    if data.validation or data.validation_split:
        source = data.validation or data.source
        validation = load_data(source_beside(recipe, source), data.validation_split, data.streaming)
    with torch.random.fork_rng():
        torch.manual_seed(plan.train.seed)
        try:
            model = build_model(recipe, plan, dataset)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{recipe}: {error.args[0]}") from error
    return fit(
        model,
        dataset,
        data.columns,
        out=beside(recipe, plan.out),
        groups=data.groups,
        validation=validation,
        resume=resume,
        log=log,
        progress=progress,
        **plan.train.model_dump(),
    )


def build_model(recipe: str | Path, plan: TrainRecipe, dataset: Any) -> MultimodalModel:
    """The untrained model of a recipe; modalities stand in the order of its [encoders] tables."""
    options = dict(plan.score)
    kind = lookup(SCORES, str(options.pop("name", None)), "score")
    score = called(kind, {"modalities": tuple(plan.encoders), **options}, "[score]")
    columns = modality_columns(dataset, score.modalities, plan.data.columns)
    encoders = {}
    for name, table in plan.encoders.items():
        options = {"dim": score.dim, **table}
        encoder = str(options.pop("name", None))
        if "source" in options:
            options["source"] = source_beside(recipe, options["source"])
        if encoder == "categories" and "values" not in options:
            options["values"] = distinct_values(dataset, columns[name], name)
        encoders[name] = called(lookup(ENCODERS, encoder, "encoder"), options, f"[encoders.{name}]")
    return MultimodalModel(encoders, score)


def called(function: Any, options: dict[str, Any], where: str) -> Any:
    """`function(**options)`; an unknown or missing option is a ValueError that lists those it takes."""
    import inspect

    signature = inspect.signature(function)
    try:
        signature.bind(**options)
    except TypeError as error:
        known = [name for name in signature.parameters if name != "self"]
        raise ValueError(f"{where}: {error}; {function.__name__} takes {known}") from None
    try:
        return function(**options)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: {error.args[0]}") from error


def distinct_values(dataset: Any, column: str, name: str) -> list[Any]:
    """The categories of a column, sorted; ValueError names the first row without one."""
    names = named_labels(dataset, column)
    if names is not None:
        return names
    if not hasattr(dataset, "__len__"):
        raise ValueError(f"[encoders.{name}]: a stream's categories cannot be listed beforehand; give values = [...]")
    values = dataset[column][:]
    if None in values:
        raise ValueError(f"{name} (column {column!r}): row {values.index(None)} is missing (None)")
    return sorted(set(values))


def index_job(recipe: str | Path, out: str | None = None, progress: bool = True) -> Any:
    """Build and save the index of an index recipe; returns it."""
    from mmcl.index import TupleIndex

    plan = read_recipe(recipe, IndexRecipe)
    if (plan.model is None) == (plan.score is None):
        raise ValueError(f"{recipe}: give either `model`, a model's folder, or `score`, a score.safetensors")
    source: Any
    if plan.model is not None:
        source = MultimodalModel.from_pretrained(beside(recipe, plan.model))
    else:
        source = load_score(beside(recipe, str(plan.score)))
    folder = beside(recipe, plan.embeddings)
    if (Path(folder) / MANIFEST).is_file():
        verify_shards(folder)
    score = source if isinstance(source, Score) else source.score
    shards = open_shards(folder, known=score.modalities)
    ids = None if plan.ids is None else shards.column(plan.ids)
    target = Path(out or index_folder(recipe, plan))
    options: dict[str, Any] = {"ids": ids, "modalities": plan.modalities, "device": plan.device}
    options |= {"bank": None if plan.bank is None else bank_of(shards, plan)}
    options |= {"factory": plan.factory, "memory_budget": plan.memory_budget, "recall_target": plan.recall_target}
    if plan.backend == "faiss":
        return TupleIndex.build(source, folder, **options, out=target, progress=progress)
    uri = plan.uri if plan.uri is None or "://" in plan.uri else beside(recipe, plan.uri)
    options |= {"backend": plan.backend, "uri": uri, "collection": plan.collection}
    index = TupleIndex.build(source, folder, **options, token=os.environ.get("MILVUS_TOKEN"), replace=True)
    index.save(target)
    return index


def tune_job(
    path: Path, queries: Path, modalities: list[str], items: Path | None, k: int, target: float, count: int, out: Any
) -> tuple[Any, list[Path]]:
    """Tune an index on disk with queries from embedding shards; returns the result and the files of its curve."""
    from mmcl.index import TupleIndex
    from mmcl.index.tune import tune

    index = TupleIndex.load(path)
    asked = random_rows(open_shards(queries, known=index.score.modalities), modalities, count)
    result = tune(index, asked, k, target, items=items)
    index.save(path)
    return result, result.save(out or Path(path).parent / "tuning" / Path(path).name)


def bank_of(shards: EmbeddingShards, plan: IndexRecipe) -> dict[str, np.ndarray]:
    """plan.bank random rows of the embeddings that are not stored; ValueError where all are."""
    stored = shards.modalities if plan.modalities is None else plan.modalities
    names = [name for name in shards.modalities if name not in stored]
    if not names:
        raise ValueError("bank: all modalities of the embeddings are stored, and none is left to ask; see `modalities`")
    return random_rows(shards, names, plan.bank or 0)


def random_rows(shards: EmbeddingShards, names: list[str], count: int) -> dict[str, np.ndarray]:
    """{modality: (at most count, d)} rows drawn from all shards without replacement, the same ones every time."""
    chosen = shards.select(names)
    counts = chosen.shard_rows()
    rows = np.sort(np.random.default_rng(0).permutation(sum(counts))[:count])
    parts, start = [], 0
    for number, count in enumerate(counts):
        wanted = rows[(rows >= start) & (rows < start + count)] - start
        parts.append(chosen.read_rows(number, wanted))
        start += count
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def add_job(path: str | Path, embeddings: str | Path, ids: str | None, upsert: bool) -> tuple[Any, int]:
    """Add a folder of embedding shards to an index on disk; returns the index, and how many items it held before."""
    from mmcl.index import TupleIndex

    if upsert and ids is None:
        raise ValueError("--upsert needs --ids, the metadata column that says which items are replaced")
    index = TupleIndex.load(path)
    before = len(index)
    shards = open_shards(embeddings, known=index.score.modalities)
    names = None if ids is None else shards.column(ids)
    (index.upsert if upsert else index.add)(embeddings, ids=names)
    index.save(path)
    return index, before


def index_folder(recipe: str | Path, plan: IndexRecipe) -> str:
    """Where a recipe's index lies."""
    return beside(recipe, plan.out or f"built/{Path(recipe).stem}")
