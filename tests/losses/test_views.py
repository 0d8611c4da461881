"""nt_xent and sup_con: against loops, by blocks, and against the libraries that users come from."""

import math

import pytest
import torch
from torch.nn import functional as F

from mmcl.losses import barlow_twins, byol_regression, moco, nt_xent, sup_con, swav_swapped, triplet

D = torch.float64


def unit(count, width=5, seed=0):
    return F.normalize(torch.randn(count, width, dtype=D, generator=torch.Generator().manual_seed(seed)), dim=1)


def loop_sup_con(rows, labels, tau):
    """From the definition: a row at a time."""
    losses = []
    for i, row in enumerate(rows):
        others = [j for j in range(len(rows)) if j != i]
        positives = [j for j in others if labels[j] == labels[i] >= 0]
        if not positives:
            losses.append(None)
            continue
        log_all = math.log(sum(math.exp(float(row @ rows[j]) / tau) for j in others))
        losses.append(sum(log_all - float(row @ rows[j]) / tau for j in positives) / len(positives))
    return losses


LABELS = {
    "two of each": [0, 1, 2, 0, 1, 2],
    "three views": [4, 9, 4, 9, 4, 9],
    "uneven": [3, 3, 3, 0, 0, 5, 3],
    "partly missing": [-1, 2, -1, 2, 2, -1, 0],
}


@pytest.mark.parametrize("case", LABELS)
@pytest.mark.parametrize("tau", [0.1, 0.7])
@pytest.mark.parametrize("block_size", [None, 1, 2, 4])
def test_sup_con_equals_a_loop(case, tau, block_size):
    labels, rows = LABELS[case], unit(len(LABELS[case]))
    expected = loop_sup_con(rows, labels, tau)
    each = sup_con(rows, torch.tensor(labels), tau, reduction="none", block_size=block_size)
    assert each.tolist() == pytest.approx([0 if value is None else value for value in expected], abs=1e-12)
    anchors = [value for value in expected if value is not None]
    mean = sup_con(rows, labels, tau, block_size=block_size)
    assert float(mean) == pytest.approx(sum(anchors) / len(anchors), abs=1e-12)


@pytest.mark.parametrize("block_size", [None, 1, 3])
def test_nt_xent_is_sup_con_of_images(block_size):
    a, b = unit(4, seed=1), unit(4, seed=2)
    labels = torch.arange(4).repeat(2)
    for tau in (0.1, 0.5):
        expected = loop_sup_con(torch.cat([a, b]), labels.tolist(), tau)
        each = nt_xent(a, b, tau, reduction="none", block_size=block_size)
        assert each.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_gradients_by_blocks_are_the_dense_ones(block_size):
    a, b = unit(5, seed=3).requires_grad_(), unit(5, seed=4).requires_grad_()
    tau = torch.tensor(0.3, dtype=D, requires_grad=True)
    labels = torch.tensor([0, 0, 1, -1, 0])
    for loss in (
        lambda **options: nt_xent(a, b, tau, **options),
        lambda **options: sup_con(a, labels, tau, **options),
        lambda **options: nt_xent(a, b, tau, reduction="none", **options).square().sum(),
    ):
        inputs = [a, b, tau] if loss().requires_grad else []
        dense = torch.autograd.grad(loss(), inputs, allow_unused=True)
        blocks = torch.autograd.grad(loss(block_size=block_size), inputs, allow_unused=True)
        for one, other in zip(dense, blocks, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda a, b: nt_xent(a, b, block_size=block_size), (a, b))
    assert torch.autograd.gradcheck(lambda a: sup_con(a, labels, block_size=block_size), (a,))


def test_labels_that_cannot_be_used_are_refused():
    rows = unit(4)
    for labels, message in (
        ([0, 1, 2, 3], "no row shares its label"),
        ([-1, -1, -1, -1], "no row shares its label"),
        ([0, 0, 1], r"\(4,\) integers, got \(3,\)"),
        ([0.0, 0.0, 1.0, 1.0], r"\(4,\) integers, got \(4,\) torch.float"),
        ([0, 0, -2, 1], "row 2 is -2"),
    ):
        with pytest.raises(ValueError, match=message):
            sup_con(rows, torch.tensor(labels))


class TestParity:
    """With lightly and pytorch-metric-learning, in value and gradient, where they are right."""

    a, b = unit(6, 8, 5), unit(6, 8, 6)

    def agree(self, ours, theirs, places=1e-6):
        values, gradients = [], []
        for loss in (ours, theirs):
            a, b = (each.clone().requires_grad_() for each in (self.a, self.b))
            value = loss(a, b)
            values.append(float(value))
            gradients.append(torch.autograd.grad(value, (a, b), allow_unused=True))
        assert values[0] == pytest.approx(values[1], abs=places)
        for one, other in zip(*gradients, strict=True):
            one, other = (torch.zeros_like(self.a) if each is None else each for each in (one, other))
            torch.testing.assert_close(one, other, atol=places, rtol=1e-5)

    def test_nt_xent(self):
        from lightly.loss import NTXentLoss
        from pytorch_metric_learning.losses import NTXentLoss as Other
        from pytorch_metric_learning.losses import SelfSupervisedLoss

        def ours(a, b):  # both libraries normalise the rows that they get
            return nt_xent(F.normalize(a, dim=1), F.normalize(b, dim=1), 0.4)

        self.agree(ours, NTXentLoss(temperature=0.4))
        self.agree(ours, lambda a, b: SelfSupervisedLoss(Other(temperature=0.4))(a, b))

    def test_moco(self):
        from lightly.loss import NTXentLoss

        bank = NTXentLoss(temperature=0.2, memory_bank_size=(9, 8))
        queue = F.normalize(torch.randn(9, 8), dim=1)
        bank.memory_bank.bank = queue.clone()
        theirs = bank(self.a.float(), self.b.float().detach())
        ours = moco(self.a.float(), self.b.float(), queue, 0.2)
        assert float(ours) == pytest.approx(float(theirs), abs=1e-5)

    def test_barlow_twins(self):
        from lightly.loss import BarlowTwinsLoss

        theirs = BarlowTwinsLoss(lambda_param=0.005)  # adds 1e-5 to each variance: with rows this long, of no weight
        self.agree(lambda a, b: barlow_twins(1e3 * a, 1e3 * b), lambda a, b: theirs(1e3 * a, 1e3 * b), places=1e-5)

    def test_byol_is_two_times_lightlys(self):
        from lightly.loss import NegativeCosineSimilarity

        negative = NegativeCosineSimilarity()
        self.agree(byol_regression, lambda a, b: 2 + 2 * negative(a, b.detach()))

    def test_swav(self):
        from lightly.loss import SwaVLoss

        theirs = SwaVLoss(temperature=0.1, sinkhorn_iterations=3, sinkhorn_epsilon=0.05)
        self.agree(swav_swapped, lambda a, b: theirs([a, b], []), places=1e-5)

    @pytest.mark.parametrize("labels", [[0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 4]])
    def test_sup_con(self, labels):
        from pytorch_metric_learning.losses import SupConLoss

        labels = torch.tensor(labels)

        def ours(a, b):
            return sup_con(F.normalize(a, dim=1), labels, 0.3)

        self.agree(ours, lambda a, b: SupConLoss(temperature=0.3)(a, labels))

    def test_triplet(self):
        c = unit(6, 8, 7)
        ours = triplet(self.a, self.b, c, margin=0.5)
        theirs = torch.nn.TripletMarginWithDistanceLoss(
            distance_function=lambda x, y: (x - y).square().sum(1), margin=0.5
        )(self.a, self.b, c)
        assert float(ours) == pytest.approx(float(theirs), abs=1e-12)
