"""One process of a run, started by torchrun or alone: python fit_ranks.py OUT BATCH_SIZE NEUTRAL [CHUNK_SIZE]."""

import sys

import datasets
import numpy as np
import torch

from mmcl import Hadamard, MultimodalModel, fit
from mmcl.encoders import categories, vectors

NAMES = ("a", "b", "c")


def main(out: str, batch_size: int, neutral: bool, chunk_size: int | None) -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 4, (2, 256))
    rows = {"a": np.eye(4)[a].tolist(), "b": np.eye(4)[b].tolist(), "c": ((a + b) % 4).tolist()}
    torch.manual_seed(0)
    encoders = {"a": vectors(4, 16, 32), "b": vectors(4, 16, 32), "c": categories([0, 1, 2, 3], 16)}
    model = MultimodalModel(encoders, Hadamard(NAMES, 16, neutral=neutral))
    data = datasets.Dataset.from_dict(rows)
    options = {"groups": {"c": "equal"}, "chunk_size": chunk_size, "loss_options": {"block_size": chunk_size}}
    fit(model, data, steps=6, batch_size=batch_size, lr=1e-2, out=out, progress=False, **options)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True", int(sys.argv[4]) if sys.argv[4:] else None)
