"""What all commands share: errors in one line, exit codes, JSON output, values given as NAME=VALUE."""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

JsonOption = typer.Option(False, "--json", help="Print JSON on stdout, nothing else.")


class Commands(TyperGroup):
    """Faults of the input end in one line on stderr and exit code 1, Ctrl-C in 130; MMCL_DEBUG=1 shows the trace."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            typer.echo(f"Interrupted: {interrupt}" if str(interrupt) else "Interrupted", err=True)
            raise typer.Exit(130) from None
        except (ValueError, KeyError, TypeError, OSError, ImportError) as error:
            if os.environ.get("MMCL_DEBUG"):
                raise
            message = error.args[0] if isinstance(error, KeyError) and error.args else error
            typer.echo(f"Error: {message}", err=True)
            raise typer.Exit(1) from None


def show(result: dict[str, Any], as_json: bool, lines: Iterable[str]) -> None:
    """The result as JSON, or as lines to read."""
    if as_json:
        json.dump(result, sys.stdout, indent=2, ensure_ascii=False, default=str)
        sys.stdout.write("\n")
        return
    for line in lines:
        typer.echo(line)


def named_values(pairs: Iterable[str], option: str) -> dict[str, list[str]]:
    """NAME=VALUE, NAME=VALUE ... as {name: [values]}; exit code 2 where one is not of that form."""
    values: dict[str, list[str]] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE with both, such as text=seven", param_hint=option)
        values.setdefault(name, []).append(value)
    return values


def raw_values(model: Any, pairs: Iterable[str], option: str) -> dict[str, Any]:
    """Query values as the model's encoders take them: text, paths of images and sounds, [numbers], a .npy file."""
    values = {name: [parsed(value) for value in given] for name, given in named_values(pairs, option).items()}
    return {name: [category(model, name, value) for value in given] for name, given in values.items()}


def category(model: Any, name: str, value: Any) -> Any:
    """What a word of the command line stands for where the modality's categories are numbers; else the word itself."""
    config = getattr(model.encoders.get(name), "config", None) or {}
    known = {str(each): each for each in config.get("values", ())}
    return known.get(value, value) if isinstance(value, str) else value


def parsed(value: str) -> Any:
    """A JSON list of numbers as such, a .npy file's row, else the string itself."""
    if value.startswith("["):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{value[:40]!r} is no JSON list of numbers: {error}") from None
    if value.endswith(".npy"):
        import numpy as np

        return np.load(Path(value), allow_pickle=False).tolist()
    return value


def quiet_libraries() -> None:
    """No progress bars of libraries between our own lines."""
    import datasets
    from transformers.utils import logging

    datasets.disable_progress_bars()
    logging.disable_progress_bar()
