"""mmcl demo"""

from pathlib import Path
from typing import Annotated, Any

import typer

from mmcl.cli.common import JsonOption, quiet_libraries, show


def demo(
    out: Annotated[Path, typer.Option(help="Folder of results, pictures, model and index.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Of the split, the draws and the training.")] = 0,
    as_json: bool = JsonOption,
) -> None:
    """Handwritten digit x spoken digit -> the word of their sum: three scores side by side, in about a minute.

    Needs the extra `demo`, which brings the speech synthesis.

    Examples:

        mmcl demo --out demo --seed 0

        mmcl demo --json
    """
    from mmcl.demo import run_demo

    quiet_libraries()
    results = run_demo(out, seed, progress=not as_json, say=lambda line: typer.echo(line, err=True))
    if not as_json:
        print_table(results)
    show(results, as_json, [f"{out / 'demo.png'}, {out / 'results.json'}, {out / 'model'}, {out / 'index'}"])


def print_table(results: dict[str, Any]) -> None:
    """The figures as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Images and voices never trained on; chance {results['chance']:.2f}")
    for heading in ("score", "zero-shot accuracy", "recall@1", "recall@10", "control", "training"):
        table.add_column(heading, justify="left" if heading == "score" else "right")
    for name, figures in results["scores"].items():
        values = [f"{figures[key]:.3f}" for key in ("zero_shot_accuracy", "recall_at_1", "recall_at_10")]
        control = results["control"].get(name)
        told = "" if control is None else f"{control:.3f}"
        table.add_row(name, *values, told, f"{results['train_seconds'][name]:.1f} s")
    Console().print(table)
    for query, hits in results["asked"].items():
        told = ", ".join(f"{hit['image_digit']} + {hit['audio_digit']} = {hit['text']}" for hit in hits)
        typer.echo(f'text "{query}" finds (image + speech): {told}')
