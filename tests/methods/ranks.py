"""One rank of a distributed run, started by test_ranks: `python ranks.py RANK WORLD FOLDER`."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn

from mmcl.methods import METHODS

SIZES = {2: (5, 3), 3: (4, 1, 3)}
OPTIONS = {
    "simclr": {"dim": 4, "norm": "none"},
    "sup_con": {"dim": 4, "norm": "none"},
    "barlow_twins": {"dim": 4, "norm": "none", "lambd": 0.1},
    "moco": {"dim": 4, "norm": "none", "queue": 11, "momentum": 0.5, "key_batches": 2},
    "memory_bank": {"dim": 4, "norm": "none", "size": 20, "negatives": 100},
    "swav": {"dim": 4, "norm": "none", "prototypes": 3},
    "byol": {"dim": 4, "norm": "none"},
    "simsiam": {"dim": 4, "norm": "none"},
    "deep_cluster": {"size": 20, "clusters": 3, "reduced": None},
}
STEPS = 3


def build(name):
    torch.manual_seed(0)
    return METHODS[name](nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), 5, **OPTIONS[name]).double()


def batch(step, count):
    """Views, rows and labels of the global batch."""
    generator = torch.Generator().manual_seed(step)
    views = [torch.randn(count, 6, generator=generator, dtype=torch.float64) for _ in range(2)]
    return views, torch.randperm(20, generator=generator)[:count], torch.randint(-1, 2, (count,), generator=generator)


def run_steps(name, part, count, world):
    """The loss and gradients of the last of a few steps, and the state after it."""
    method = build(name)
    method.start_epoch(lambda: torch.randn(20, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64))
    optimiser = torch.optim.SGD(list(method.trained_parameters()), lr=0.1)
    for step in range(STEPS):
        views, rows, labels = batch(step, count)
        optimiser.zero_grad()
        loss = method([view[part] for view in views], rows=rows[part], labels=labels[part])
        loss.backward()
        if world > 1:  # as DistributedDataParallel does
            for parameter in method.trained_parameters():
                distributed.all_reduce(parameter.grad)
                parameter.grad /= world
        gradients = {key: p.grad.clone() for key, p in method.named_parameters() if p.grad is not None}
        optimiser.step()
        method.after_step()
    return loss.detach(), gradients, method.state_dict()


def run(rank, world, folder):
    torch.set_num_threads(1)
    where = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", where, timedelta(seconds=120), world_size=world, rank=rank)
    sizes = SIZES[world]
    part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    torch.save({name: run_steps(name, part, sum(sizes), world) for name in OPTIONS}, folder / f"rank{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
