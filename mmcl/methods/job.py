"""What a recipe with a [method] asks for."""

import inspect
from pathlib import Path
from typing import Any

import torch

from mmcl.data import load_data, named_labels, refuse_missing_column, undecoded
from mmcl.jobs import called
from mmcl.methods import METHODS
from mmcl.methods.encoders import WaveEncoder, torchvision_encoder
from mmcl.methods.training import PretrainResult, pretrain
from mmcl.methods.views import AudioSource, ImageSource
from mmcl.recipes import MethodRecipe, beside, read_recipe, source_beside
from mmcl.tables import lookup


def pretrain_job(
    recipe: str | Path, resume: bool = False, log: str | None = None, progress: bool = True
) -> PretrainResult:
    """Build and train the method of a recipe; the encoder is in out/model.

    Raises: ValueError or KeyError naming the key of the recipe, or the row of the data, that is wrong.
    """
    plan = read_recipe(recipe, MethodRecipe)
    data = plan.data
    dataset = load_data(source_beside(recipe, data.source), data.split)
    sequence = plan.method == "cpc"
    source = called(
        AudioSource if sequence else ImageSource, {"dataset": dataset, "column": data.column, **plan.views}, "[views]"
    )
    with torch.random.fork_rng():
        torch.manual_seed(plan.train.seed)
        if sequence:
            encoder = called(WaveEncoder, plan.encoder, "[encoder]")
            width = encoder.width
        else:
            encoder, width = called(torchvision_encoder, {"size": source.size, **plan.encoder}, "[encoder]")
        kind = lookup(METHODS, plan.method, "method")
        given = {"encoder": encoder, "width": width, **plan.options}
        if "size" in inspect.signature(kind.__init__).parameters:
            given["size"] = len(source)
        method = called(kind, given, "[options]")
    labels = None if data.labels is None else label_numbers(dataset, data.labels)
    out = beside(recipe, plan.out)
    return pretrain(method, source, labels, out, resume, log, progress, **plan.train.model_dump())


def label_numbers(dataset: Any, column: str) -> list[int]:
    """Numbers of a label column's values; -1 where it is missing (None), or -1 itself."""
    refuse_missing_column(dataset, column, "labels")
    values = undecoded(dataset)[column][:]
    if named_labels(dataset, column) is not None:
        return [-1 if value is None else int(value) for value in values]
    known = sorted({value for value in values if value is not None and value != -1}, key=str)
    numbers = {value: number for number, value in enumerate(known)}
    return [numbers.get(value, -1) for value in values]
