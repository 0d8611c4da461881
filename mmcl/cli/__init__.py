"""The command `mmcl`. Each group is one file, and imports what it runs only when it runs."""

import typer

from mmcl.cli import demo, diagnose, embed, index, listing, train, zero_shot
from mmcl.cli.common import Commands

app = typer.Typer(
    name="mmcl",
    cls=Commands,
    help="Multimodal contrastive learning: train encoders, index tuples, retrieve with one dot product.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("diagnose")(diagnose.diagnose)
app.command("train")(train.train)
app.command("embed")(embed.embed)
app.add_typer(index.app, name="index")
app.command("zero-shot")(zero_shot.zero_shot)
app.command("list")(listing.list_names)


@app.callback(invoke_without_command=True)
def version(show: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    """Exit codes: 0 done, 1 the input was wrong or could not be used, 2 the command was, 130 interrupted."""
    if show:
        from mmcl import __version__

        typer.echo(__version__)
        raise typer.Exit()


def main() -> None:
    """Entry point of the console script."""
    app()
