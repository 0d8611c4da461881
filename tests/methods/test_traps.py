"""What goes wrong in each method when it is written from memory."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mmcl.losses import barlow_twins, byol_regression, nt_xent, sup_con
from mmcl.methods import BYOL, CPC, MoCo, SimCLR, SimSiam, SwAV
from mmcl.methods.base import follow, frozen_copy, unit
from mmcl.methods.clusters import clustered


class TestMomentum:
    def test_a_target_of_0_an_online_of_2_and_momentum_9_tenths(self):
        online, target = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.constant_(online.weight, 2.0)
        nn.init.zeros_(target.weight)
        follow(target, online, 0.9)
        assert target.weight.item() == pytest.approx(0.2)

    def test_half_of_what_was_is_gone_after_693_steps(self):
        assert math.log(0.5) / math.log(0.999) == pytest.approx(692.800549, abs=1e-6)
        online, target = nn.Linear(1, 1, bias=False).double(), nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(online.weight)
        nn.init.ones_(target.weight)
        for _ in range(693):
            follow(target, online, 0.999)
        assert target.weight.item() == pytest.approx(0.5, abs=1e-3)

    @pytest.mark.parametrize("name", ["byol", "moco"])
    def test_the_target_is_in_no_optimiser_and_not_frozen_for_ever(self, name, make, batch):
        method = make(name, momentum=0.9)
        target = method.target_encoder if name == "byol" else method.key_encoder
        moved_by_an_optimiser = {id(each) for each in method.trained_parameters()}
        assert not moved_by_an_optimiser & {id(each) for each in target.parameters()}
        assert {id(each) for each in method.encoder.parameters()} <= moved_by_an_optimiser
        before = [each.clone() for each in target.parameters()]
        optimiser = torch.optim.SGD(list(method.trained_parameters()), lr=0.1)
        views, rows, labels = batch()
        method(views, rows=rows, labels=labels).backward()
        optimiser.step()
        assert all(torch.equal(a, b) for a, b in zip(before, target.parameters())), "only after_step moves it"
        method.after_step()
        for was, online, now in zip(before, method.encoder.parameters(), target.parameters()):
            torch.testing.assert_close(now.data, 0.9 * was + 0.1 * online.data)

    def test_running_means_of_the_target_are_those_of_the_online_network(self, make, batch):
        method = make("byol")
        method(batch()[0])
        method.after_step()
        for mine, theirs in zip(method.target_encoder.buffers(), method.encoder.buffers()):
            assert torch.equal(mine, theirs)
        assert method.encoder[1].num_batches_tracked > 0

    def test_a_copy_shares_nothing(self):
        module = nn.Linear(2, 2)
        copied = frozen_copy(module)
        assert copied.weight.data_ptr() != module.weight.data_ptr()
        assert not copied.weight.requires_grad


class TestMoCo:
    def test_the_loss_is_taken_with_the_queue_of_before_the_step(self, make, batch):
        method = make("moco", norm="none", temperature=0.2)
        method.eval()  # batch statistics aside
        (first, second), *_ = batch()
        queue = method.queue.clone()
        loss = method([first, second])
        assert torch.equal(method.queue, queue), "nothing goes in before the step"
        query = unit(method.head(method.encoder(first)))
        key = unit(method.key_head(method.key_encoder(second)))
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.T], dim=1) / 0.2
        assert logits.shape == (8, 1 + 12)
        torch.testing.assert_close(loss, F.cross_entropy(logits, torch.zeros(8, dtype=torch.long)))
        method.after_step()
        torch.testing.assert_close(method.queue[:8], key.detach())
        assert torch.equal(method.queue[8:], queue[8:])

    @pytest.mark.parametrize("sizes", [[5, 5, 5, 5], [12], [7, 8], [30], [11, 1, 1]])
    def test_the_queue_holds_the_last_keys_in_a_ring(self, sizes, make):
        method, seen = make("moco"), []
        for number, size in enumerate(sizes):
            keys = torch.full((size, 5), float(number)) + torch.arange(size).unsqueeze(1) / 100
            method.enqueue(keys)
            seen += keys.tolist()
        last = seen[-12:]
        kept = [row for row in method.queue.tolist() if any(row == each for each in seen)]
        assert sorted(kept) == sorted(last)
        assert int(method.place) == (sum(min(size, 12) for size in sizes)) % 12

    def test_a_queue_of_65536_is_replaced_in_256_steps_of_256(self):
        method = MoCo(nn.Identity(), 2, dim=2, queue=65536, layers=0)
        start = method.queue.clone()
        for step in range(256):
            assert (method.queue[-1] == start[-1]).all(), step
            method.enqueue(torch.zeros(256, 2))
        assert (method.queue == 0).all()
        assert int(method.place) == 0

    def test_queue_and_keys_are_no_parameters_and_have_no_gradient(self, make, batch):
        method = make("moco")
        assert "queue" in method.state_dict()
        assert "queue" not in dict(method.named_parameters())
        method(batch()[0]).backward()
        assert not any(each.requires_grad for each in method._pending)
        assert all(each.grad is None for each in method.key_encoder.parameters())

    def test_shuffled_keys_come_back_in_their_order(self, make, batch):
        view = batch(9)[0][0]
        plain = make("moco", key_batches=1).keys(view)
        torch.testing.assert_close(make("moco", key_batches=1, seed=5).keys(view), plain)
        method = make("moco", key_batches=3)
        method.eval()
        torch.testing.assert_close(method.keys(view), unit(method.key_head(method.key_encoder(view))))

    def test_parts_have_batch_statistics_of_their_own(self, make, batch):
        view = batch(12)[0][0]
        assert not torch.allclose(make("moco", key_batches=3).keys(view), make("moco", key_batches=1).keys(view))


class TestViews:
    def test_simclr_is_nt_xent_of_normalised_rows(self, make, batch):
        method, views = make("simclr"), batch()[0]
        method.eval()
        z = [unit(method.head(method.encoder(view))) for view in views]
        torch.testing.assert_close(method(views), nt_xent(*z, temperature=0.5))

    def test_three_views_are_each_others_positives(self, make, batch):
        method, views = make("simclr", norm="none"), batch(views=3)[0]
        method.eval()
        z = torch.cat([unit(method.head(method.encoder(view))) for view in views])
        torch.testing.assert_close(method(views), sup_con(z, torch.arange(8).repeat(3), 0.5))

    def test_an_image_without_a_label_has_its_own_views(self, make, batch):
        views = batch(4)[0]
        unlabelled = make("sup_con", temperature=0.5)(views, labels=torch.full((4,), -1))
        torch.testing.assert_close(unlabelled, make("simclr")(views))
        labels = torch.tensor([0, -1, 0, -1])
        z = make("sup_con").project(views)
        as_known = torch.tensor([0, 7, 0, 8])
        torch.testing.assert_close(
            make("sup_con", temperature=0.1)(views, labels=labels), sup_con(torch.cat(z), as_known.repeat(2), 0.1)
        )

    def test_sup_con_without_labels_is_refused(self, make, batch):
        with pytest.raises(ValueError, match="SupCon needs labels"):
            make("sup_con")(batch()[0])

    def test_barlow_twins_sees_the_head(self, make, batch):
        method, views = make("barlow_twins"), batch()[0]
        method.eval()
        z = [method.head(method.encoder(view)) for view in views]
        torch.testing.assert_close(method(views), barlow_twins(*z))


class TestPredictors:
    def test_byol_is_the_mean_of_both_directions(self, make, batch):
        method, views = make("byol"), batch()[0]
        method.eval()
        p = [method.predictor(method.head(method.encoder(view))) for view in views]
        t = [method.target_head(method.target_encoder(view)) for view in views]
        torch.testing.assert_close(method(views), (byol_regression(p[0], t[1]) + byol_regression(p[1], t[0])) / 2)

    def test_no_gradient_flows_through_simsiams_target(self, make, batch):
        """With a predictor of constants the loss can only reach the encoder through the target, so not at all."""
        method = make("simsiam")
        method.predictor = Constant(method.predictor)
        method(batch()[0]).backward()
        assert all(each.grad is None for each in method.encoder.parameters())


class Constant(nn.Module):
    def __init__(self, predictor):
        super().__init__()
        self.predictor = predictor

    def forward(self, z):
        return self.predictor(z.detach())


class TestClusters:
    def test_k_means_of_four_numbers(self):
        values = torch.tensor([[0.0], [0.2], [3.0], [3.2]])
        labels = clustered(values, 2, None, 0)
        centres = sorted(values[labels == each].mean().item() for each in (0, 1))
        assert centres == pytest.approx([0.1, 3.1])

    def test_no_cluster_is_empty(self):
        for seed in range(5):
            rows = torch.randn(30, 4, generator=torch.Generator().manual_seed(seed))
            assert torch.bincount(clustered(rows, 12, None, seed), minlength=12).min() > 0

    def test_the_classifier_is_drawn_anew_with_each_clustering(self, make):
        method = make("deep_cluster")
        first, weights = method.assigned.clone(), method.classifier.weight.clone()
        method.start_epoch(lambda: torch.randn(40, 6, generator=torch.Generator().manual_seed(9)))
        assert not torch.equal(method.assigned, first)
        assert not torch.equal(method.classifier.weight, weights)
        assert [id(p) for p in method.fresh_parameters()] == [id(p) for p in method.classifier.parameters()]

    def test_numbers_of_clusters_do_not_matter_to_the_loss_at_the_start(self, make, batch):
        """A permutation of the cluster ids with the classifier's rows is the same loss."""
        method, (views, rows, _) = make("deep_cluster"), batch()
        method.eval()
        before = method(views, rows=rows)
        order = torch.tensor([2, 0, 3, 1])
        method.assigned.copy_(torch.argsort(order)[method.assigned])
        with torch.no_grad():
            method.classifier.weight.copy_(method.classifier.weight[order])
            method.classifier.bias.copy_(method.classifier.bias[order])
        torch.testing.assert_close(method(views, rows=rows), before)

    def test_before_a_clustering_there_is_no_loss(self, make, batch):
        views, rows, _ = batch()
        method = make("deep_cluster")
        method.assigned.fill_(-1)
        with pytest.raises(ValueError, match="start_epoch first"):
            method(views, rows=rows)

    def test_prototypes_have_norm_one_after_each_step(self, make, batch):
        method = make("swav")
        optimiser = torch.optim.SGD(list(method.trained_parameters()), lr=5.0)
        for seed in range(3):
            torch.testing.assert_close(method.prototypes.weight.norm(dim=1), torch.ones(7))
            method(batch(seed=seed)[0]).backward()
            optimiser.step()
            method.after_step()
        torch.testing.assert_close(method.prototypes.weight.norm(dim=1), torch.ones(7))

    def test_small_crops_of_another_size_predict_and_have_no_code(self):
        encoder = nn.Sequential(nn.Conv2d(1, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        method = SwAV(encoder, 6, dim=4, prototypes=5)
        views = [torch.randn(8, 1, size, size) for size in (9, 9, 5, 5, 5)]
        loss = method(views)
        loss.backward()
        assert loss.isfinite()


class TestMemoryBank:
    def test_the_negatives_are_other_rows(self, make, batch):
        """With every entry a vector of its own, the loss names which ones were drawn."""
        method = make("memory_bank", negatives=1000, norm="none")
        method.eval()
        (first, _), rows, _ = batch()
        z = unit(method.head(method.encoder(first)))
        others = [row for row in range(40) if row not in rows.tolist()]
        logits = torch.cat([(z * method.bank[rows]).sum(1, keepdim=True), z @ method.bank[others].T], dim=1) / 0.1
        torch.testing.assert_close(
            method([first], rows=rows), F.cross_entropy(logits, torch.zeros(8, dtype=torch.long))
        )

    def test_entries_follow_their_rows_after_the_step(self, make, batch):
        method, (views, rows, _) = make("memory_bank", momentum=0.25), batch()
        method.eval()
        bank = method.bank.clone()
        method(views, rows=rows)
        assert torch.equal(method.bank, bank)
        method.after_step()
        z = torch.stack([unit(method.head(method.encoder(view))) for view in views]).mean(0)
        torch.testing.assert_close(method.bank[rows], unit(0.25 * bank[rows] + 0.75 * z).detach())
        untouched = [row for row in range(40) if row not in rows.tolist()]
        assert torch.equal(method.bank[untouched], bank[untouched])

    def test_a_batch_of_all_rows_is_refused(self, make, batch):
        with pytest.raises(ValueError, match="no negative"):
            make("memory_bank")([torch.randn(40, 12)], rows=torch.arange(40))


class TestCPC:
    def test_a_context_has_seen_nothing_of_what_follows(self, make, batch):
        method, view = make("cpc"), batch()[0][0]
        changed = view.clone()
        changed[:, 8:] += 1  # steps 4 and 5 of 6
        _, before = method.contexts(view)
        _, after = method.contexts(changed)
        assert torch.equal(before[:, :4], after[:, :4])
        assert not torch.equal(before[:, 4:], after[:, 4:])

    def test_the_loss_is_info_nce_of_the_steps_ahead(self, make, batch):
        method, view = make("cpc"), batch()[0][0]
        latents, contexts = method.contexts(view)
        losses = []
        for ahead in (1, 2):
            guess = method.predict[ahead - 1](contexts[:, : 6 - ahead]).reshape(-1, 6)
            logits = guess @ latents[:, ahead:].reshape(-1, 6).T
            losses.append(F.cross_entropy(logits, torch.arange(len(logits))))
        torch.testing.assert_close(method([view]), torch.stack(losses).mean())

    def test_sequences_that_are_too_short_are_refused(self, make, batch):
        with pytest.raises(ValueError, match="6 steps leave nothing to predict 6 ahead"):
            make("cpc", ahead=6)(batch()[0])
        with pytest.raises(ValueError, match=r"must give \(n, steps, 6\)"):
            CPC(nn.Linear(12, 6), 6)(batch()[0])


def test_methods_take_any_encoder():
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    views = [torch.randn(6, 3, 8, 8) for _ in range(2)]
    for kind in (SimCLR, BYOL, SimSiam):
        kind(convolution, 4, dim=3)(views).backward()
