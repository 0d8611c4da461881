"""A small encoder, and views that fit it."""

import pytest
import torch
from torch import nn

from mmcl.methods import METHODS

WIDTH, ROWS, DIM = 6, 40, 5
SIZED = ("memory_bank", "deep_cluster")
OPTIONS = {
    "simclr": {"dim": DIM},
    "memory_bank": {"dim": DIM, "negatives": 12},
    "moco": {"dim": DIM, "queue": 12},
    "byol": {"dim": DIM},
    "simsiam": {"dim": DIM},
    "barlow_twins": {"dim": DIM},
    "deep_cluster": {"clusters": 4, "reduced": 3},
    "swav": {"dim": DIM, "prototypes": 7},
    "sup_con": {"dim": DIM},
    "triplet": {"dim": DIM},
    "cpc": {"context": 5, "ahead": 2},
}


class Frames(nn.Module):
    """(n, 12) -> (n, 6 steps, WIDTH)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, WIDTH)

    def forward(self, x):
        return self.linear(x.view(len(x), 6, 2))


def encoder_of(name):
    return (
        Frames()
        if name == "cpc"
        else nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, WIDTH))
    )


@pytest.fixture
def make():
    """make(name, **options): a method over a small encoder, with its clusters assigned where it needs them."""

    def build(name, **options):
        torch.manual_seed(0)
        given = OPTIONS[name] | options | ({"size": ROWS} if name in SIZED else {})
        method = METHODS[name](encoder_of(name), WIDTH, **given)
        method.start_epoch(lambda: torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3)))
        return method

    return build


@pytest.fixture
def batch():
    """batch(n, seed): views, rows and labels of n images."""

    def draw(count=8, seed=0, views=2):
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randn(count, 12, generator=generator) for _ in range(views)]
        rows = torch.randperm(ROWS, generator=generator)[:count]
        labels = torch.randint(-1, 3, (count,), generator=generator)
        return inputs, rows, labels

    return draw
