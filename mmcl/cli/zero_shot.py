"""mmcl zero-shot"""

from typing import Annotated

import typer

from mmcl.cli.common import JsonOption, category, quiet_libraries, raw_values, show


def zero_shot(
    model: Annotated[str, typer.Argument(help="Folder of a trained model, or its hub id.")],
    classes: Annotated[str, typer.Option(help="Class names, separated by commas.")],
    query: Annotated[list[str], typer.Option(help="MODALITY=VALUE: text, a file, or [numbers]; repeat it.")],
    template: Annotated[list[str] | None, typer.Option(help="Such as 'a photo of a {}'; repeat it.")] = None,
    target: Annotated[str, typer.Option(help="The modality that class names are values of.")] = "text",
    as_json: bool = JsonOption,
) -> None:
    """Classify by comparing with class names, from any of the other modalities.

    Examples:

        mmcl zero-shot demo/model --classes zero,one,two --query image=digit.png --query audio=digit.wav

        mmcl zero-shot runs/a/model --classes cat,dog --template "a photo of a {}" --query image=pet.jpg
    """
    from mmcl.model import MultimodalModel
    from mmcl.zero_shot import ZeroShotClassifier

    quiet_libraries()
    names = [name.strip() for name in classes.split(",")]
    loaded = MultimodalModel.from_pretrained(model)
    meant = {name: category(loaded, target, name) for name in names}
    if any(not isinstance(value, str) for value in meant.values()):  # classes that are numbers
        classifier = ZeroShotClassifier(loaded, meant, target=target)
    else:
        classifier = ZeroShotClassifier(loaded, names, template or ["{}"], target=target)
    rows = classifier.probabilities(raw_values(loaded, query, "--query"), encoded=False).tolist()
    ranked = [sorted(zip(names, row, strict=True), key=lambda pair: -pair[1]) for row in rows]
    result = {"predictions": [{"class": best[0][0], "probabilities": dict(best)} for best in ranked]}
    lines = [", ".join(f"{name} {share:.3f}" for name, share in best[:5]) for best in ranked]
    show(result, as_json, lines)
