"""What can a score express? Three joints, three scores, exact answers; and what to train on one's own categories.

Each joint has eight values a modality and is known in full, so that the KL of a model from it is a finite sum: no
sampling, no test set. A sum of pairs comes down to a floor that proportional fitting tells beforehand, and not below.

    python examples/expressivity_in_a_minute.py
"""

import torch
from torch import nn

from mmcl import Hadamard, SumOfPairs
from mmcl.metrics.expressivity import joint_kl, pairwise_floor, score_table
from mmcl.metrics.interaction import interaction_of_categories
from mmcl.synthetic.joints import random_pairwise, random_tensor, softened_sum

DIM, STEPS = 64, 500


def best_kl(score, joint):
    """Fit the score and a free unit row a value to the whole table; what is left, in nats."""
    score, table = score.double(), joint.table
    counts = dict(zip(joint.modalities, table.shape, strict=True))
    rows = nn.ParameterDict({name: torch.randn(n, DIM, dtype=torch.float64) for name, n in counts.items()})
    optimizer = torch.optim.Adam([*score.parameters(), *rows.parameters()], lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        scores = score_table(score, {name: nn.functional.normalize(row, dim=1) for name, row in rows.items()})
        loss = joint_kl(joint, scores)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return float(loss.detach())


def main():
    torch.manual_seed(0)
    print(f"{'joint':16} {'dependence':>10} {'floor':>8} {'sum of pairs':>13} {'H-CLIP':>8}   KL in nats, d = {DIM}")
    for make in (softened_sum, random_tensor, random_pairwise):
        joint = make()
        pairs, product = (
            best_kl(kind(joint.modalities, DIM, temperature=0.3), joint) for kind in (SumOfPairs, Hadamard)
        )
        shown = (joint.total_correlation(), abs(pairwise_floor(joint)), pairs, product)
        print(f"{make.__name__:16} {shown[0]:10.4f} {shown[1]:8.4f} {shown[2]:13.4f} {shown[3]:8.4f}")

    print("\nThe same asked of 4,000 rows of data, without the table:")
    for make in (softened_sum, random_tensor, random_pairwise):
        rows = make().sample(4000, torch.Generator().manual_seed(0))  # or columns of your own: {"genre": [...], ...}
        beyond = interaction_of_categories(rows).beyond
        advice = "train H-CLIP" if beyond.low > 0 else "no sign of more than pairs: a sum of pairs may do"
        found = f"{max(beyond.nats, 0):.3f} ({beyond.low:.3f} to {beyond.high:.3f}) nats"
        print(f"{make.__name__:16} beyond pairs {found}: {advice}")


if __name__ == "__main__":
    main()
