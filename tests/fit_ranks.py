"""One process of a training run, started by torchrun or alone: python fit_ranks.py OUT BATCH_SIZE NEUTRAL."""

import sys

import datasets
import numpy as np
import torch

from mmcl import Hadamard, MultimodalModel, fit
from mmcl.encoders import categories, vectors

NAMES = ("a", "b", "c")


def main(out: str, batch_size: int, neutral: bool) -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 4, (2, 256))
    rows = {"a": np.eye(4)[a].tolist(), "b": np.eye(4)[b].tolist(), "c": ((a + b) % 4).tolist()}
    torch.manual_seed(0)
    encoders = {"a": vectors(4, 16, 32), "b": vectors(4, 16, 32), "c": categories([0, 1, 2, 3], 16)}
    model = MultimodalModel(encoders, Hadamard(NAMES, 16, neutral=neutral))
    data = datasets.Dataset.from_dict(rows)
    fit(model, data, steps=6, batch_size=batch_size, lr=1e-2, groups={"c": "equal"}, out=out, progress=False)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True")
