"""Any torch module can be an encoder: three sensors, trained and asked with a module of one's own.

Each sensor sees a dial in one of eight positions; the third dial stands at the sum of the other two. So no two of the
three tell anything about each other, and any two determine the third.

    python examples/bring_your_own_encoders.py
"""

import datasets
import numpy as np
import torch
from torch import nn

from mmcl import Hadamard, MultimodalModel, SumOfPairs, TupleIndex, fit

NAMES = ("first", "second", "third")


class Gated(nn.Module):
    """Your encoder: it maps (n, 2) to (n, dim). Unit norm is mmcl's part."""

    def __init__(self, dim: int):
        super().__init__()
        self.inside = nn.Linear(2, 128)
        self.outside = nn.Linear(64, dim)

    def prepare(self, values):
        """Raw rows to a tensor. Leave it out where you pass tensors yourself."""
        return torch.as_tensor(np.asarray(values, dtype=np.float32))

    def forward(self, x):
        return self.outside(nn.functional.glu(self.inside(x)))


def readings(count: int, seed: int) -> datasets.Dataset:
    """Noisy (cos, sin) of three dials, and the third one's position."""
    rng = np.random.default_rng(seed)
    first, second = rng.integers(0, 8, (2, count))
    columns = {}
    for name, position in zip(NAMES, (first, second, first + second), strict=True):
        angle = position * np.pi / 4 + 0.1 * rng.normal(size=count)
        columns[name] = np.stack([np.cos(angle), np.sin(angle)], axis=1).tolist()
    return datasets.Dataset.from_dict({**columns, "position": (first + second) % 8})


def main() -> None:
    train, test = readings(8192, seed=0), readings(512, seed=1)
    for score in (Hadamard(NAMES, dim=32), SumOfPairs(NAMES, dim=32)):
        torch.manual_seed(0)
        model = MultimodalModel({name: Gated(32) for name in NAMES}, score)
        fit(model, train, groups={"third": "position"}, epochs=8, batch_size=128, lr=5e-3, progress=False)
        index = TupleIndex.build(model, {"third": test["third"][:]}, metadata={"position": test["position"][:]})
        hits = index.search({"first": test["first"][:], "second": test["second"][:]}, k=1)
        found = [rows[0]["position"] for rows in hits.metadata]
        right = np.mean(np.array(found) == np.array(test["position"]))
        print(f"{type(score).__name__:<11} finds the third dial for {right:.0%} of the queries (chance 12.5%)")


if __name__ == "__main__":
    main()
