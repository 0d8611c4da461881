"""One rank of a distributed run, started by test_gather: `python ranks.py RANK WORLD FOLDER`."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn import functional as F

from mmcl.losses import barlow_twins, contrastive_loss, nt_xent, sup_con, swav_swapped
from mmcl.scores import Hadamard, SumOfPairs

NAMES = ("image", "audio", "text")
SIZES = {2: (5, 3), 3: (5, 3, 1), 4: (5, 0, 3, 1)}
CASES = {
    "each": {},
    "tuples": {"guess": [("image", "text"), ("audio",)]},
    "shuffled": {"candidates": "shuffled"},
    "groups": {"groups": True},
    "blockwise": {"block_size": 4, "groups": True, "guess": [("image", "text")], "candidates": "shuffled"},
}
VIEWS = {
    "nt_xent": lambda image, text, ids, **options: nt_xent(image, text, **options),
    "nt_xent by blocks": lambda image, text, ids, **options: nt_xent(image, text, block_size=2, **options),
    "sup_con": lambda image, text, ids, **options: sup_con(image, ids - 1, **options),
    "sup_con by blocks": lambda image, text, ids, **options: sup_con(image, ids, block_size=2, **options),
    "barlow_twins": lambda image, text, ids, **options: barlow_twins(image, text, lambd=0.1, **options),
    "swav": lambda image, text, ids, **options: swav_swapped(image, text, **options),
}
"""Losses of two views, which the rows of two modalities stand for here, and of labels."""


def build():
    """Linear towers and a score of every kind of part, in double precision, the same on every rank."""
    torch.manual_seed(0)
    towers = nn.ModuleDict({name: nn.Linear(4, 3) for name in NAMES})
    score = SumOfPairs(NAMES, 3, temperature=0.5) + Hadamard(NAMES, 3, temperature=0.5)
    return nn.ModuleDict({"towers": towers, "score": score}).double()


def batch(count):
    """Raw rows and groups of the global batch."""
    generator = torch.Generator().manual_seed(1)
    rows = {name: torch.randn(count, 4, generator=generator, dtype=torch.float64) for name in NAMES}
    return rows, {name: torch.randint(0, 3, (count,), generator=generator) for name in NAMES}


def value_and_gradients(case, part, count, gather):
    """The loss of one part of the batch, and its gradients by the name of the parameter."""
    model, (rows, groups) = build(), batch(count)
    options = dict(CASES.get(case, {}))
    if options.pop("groups", False):
        options["groups"] = {name: ids[part] for name, ids in groups.items()}
    embeddings = {name: F.normalize(model["towers"][name](rows[name][part]), dim=1) for name in NAMES}
    if case in VIEWS:
        loss = VIEWS[case](embeddings["image"], embeddings["text"], groups["image"][part], gather=gather)
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    generator = torch.Generator().manual_seed(2)
    loss = contrastive_loss(model["score"], embeddings, gather=gather, generator=generator, **options)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def run(rank, world, folder):
    torch.set_num_threads(1)
    where = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", where, timedelta(seconds=120), world_size=world, rank=rank)
    sizes = SIZES[world]
    part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    results = {}
    for case in (*CASES, *VIEWS):
        loss, gradients = value_and_gradients(case, part, sum(sizes), gather=True)
        for gradient in gradients.values():  # as DistributedDataParallel does
            distributed.all_reduce(gradient)
            gradient /= world
        results[case] = (loss, gradients)
    torch.save(results, folder / f"rank{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
