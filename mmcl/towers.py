"""How a model's encoders run while it trains: compiled, with activations made again, with frozen features kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from mmcl.model import MultimodalModel


@contextmanager
def compiled_towers(model: MultimodalModel) -> Iterator[None]:
    """Backbones through `torch.compile` inside; the model, its names of weights and its pickles stay as they are."""
    towers: list[Any] = [encoder.backbone for encoder in model.encoders.values()]
    for tower in towers:
        tower.compile()
    try:
        yield
    finally:
        for tower in towers:
            tower._compiled_call_impl = None


@contextmanager
def checkpointed_towers(model: MultimodalModel) -> Iterator[None]:
    """Inside, towers of transformers and open_clip keep the activations between their layers alone.

    Raises: ValueError where no encoder that learns has such a tower.
    """
    towers = [part for name in learning(model) for part in checkpointable(model.encoders[name].backbone)]
    if not towers:
        raise ValueError(
            f"checkpoint_activations: no encoder that learns ({learning(model)}) is a tower of transformers or "
            "open_clip; chunk_size makes activations again for encoders of any kind"
        )
    for tower in towers:
        set_checkpointing(tower, True)
    try:
        yield
    finally:
        for tower in towers:
            set_checkpointing(tower, False)


def learning(model: MultimodalModel) -> list[str]:
    """Modalities whose backbone is not frozen."""
    return [name for name, encoder in model.encoders.items() if not encoder.frozen]


def checkpointable(backbone: nn.Module) -> list[Any]:
    """The outermost parts of a backbone that can make their layers' activations again."""
    found: list[Any] = []
    covered: set[nn.Module] = set()
    for part in backbone.modules():  # outer parts come first
        able = getattr(part, "supports_gradient_checkpointing", False) or hasattr(part, "set_grad_checkpointing")
        if able and part not in covered:
            found.append(part)
            covered.update(part.modules())
    return found


def set_checkpointing(tower: Any, on: bool) -> None:
    if hasattr(tower, "set_grad_checkpointing"):
        tower.set_grad_checkpointing(on)
        return
    name = "activation" if hasattr(tower, "activation_checkpointing_enable") else "gradient"  # older transformers
    if on:
        getattr(tower, f"{name}_checkpointing_enable")({"use_reentrant": False})
    else:
        getattr(tower, f"{name}_checkpointing_disable")()
