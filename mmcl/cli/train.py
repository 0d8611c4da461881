"""mmcl train"""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mmcl.cli.common import JsonOption, quiet_libraries, show


def train(
    recipe: Annotated[Path, typer.Argument(help="A train recipe (TOML); its keys: `mmcl list recipes`.")],
    resume: Annotated[bool, typer.Option(help="Go on from the run's last checkpoint.")] = False,
    log: Annotated[Literal["tensorboard"] | None, typer.Option(help="Where to log: into OUT/tensorboard.")] = None,
    as_json: bool = JsonOption,
) -> None:
    """Train the model that a recipe describes; with the key `method` in it, one encoder by a contrastive method.

    Ctrl-C writes a checkpoint and ends with exit code 130; go on with --resume.

    Examples:

        mmcl train recipe.toml

        mmcl train recipe.toml --log tensorboard

        mmcl train recipe.toml --resume
    """
    from mmcl.recipes import MethodRecipe, TrainRecipe, beside, names_method, read_recipe

    quiet_libraries()
    result: Any
    if names_method(recipe):
        from mmcl.methods.job import pretrain_job

        result, out = pretrain_job(recipe, resume, log, not as_json), read_recipe(recipe, MethodRecipe).out
    else:
        from mmcl.jobs import train_job

        result, out = train_job(recipe, resume, log, not as_json), read_recipe(recipe, TrainRecipe).out
    model = str(Path(beside(recipe, out)) / "model")
    last = {name: value for record in result.history[-2:] for name, value in record.items()}
    lines = [
        f"{result.steps} steps",
        *(f"{name} {value:.4g}" for name, value in last.items() if name not in ("step", "lr")),
    ]
    show({"steps": result.steps, "model": model, **last}, as_json, [", ".join(lines), f"model in {model}"])
