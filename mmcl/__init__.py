"""mmcl: multimodal contrastive learning for any number of modalities. See README.md."""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "Score": "mmcl.scores",
    "SumOfPairs": "mmcl.scores",
    "SumOfScores": "mmcl.scores",
    "Hadamard": "mmcl.scores",
    "MultimodalModel": "mmcl.model",
    "TupleIndex": "mmcl.index",
    "TupleIndexes": "mmcl.index",
    "ZeroShotClassifier": "mmcl.zero_shot",
    "embed": "mmcl.embedding",
    "fit": "mmcl.training",
}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from mmcl.embedding import embed as embed
    from mmcl.index import TupleIndex as TupleIndex
    from mmcl.index import TupleIndexes as TupleIndexes
    from mmcl.model import MultimodalModel as MultimodalModel
    from mmcl.scores import Hadamard as Hadamard
    from mmcl.scores import Score as Score
    from mmcl.scores import SumOfPairs as SumOfPairs
    from mmcl.scores import SumOfScores as SumOfScores
    from mmcl.training import fit as fit
    from mmcl.zero_shot import ZeroShotClassifier as ZeroShotClassifier


def __getattr__(name: str):
    """Import each public name on first use, so that `import mmcl` costs nothing (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'mmcl' has no attribute {name!r}; it has {sorted(_HOME)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
