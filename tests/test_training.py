import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

import mmcl.training as training
from mmcl import Hadamard, MultimodalModel, SumOfPairs, fit
from mmcl.encoders import categories, vectors
from mmcl.training import parameter_groups, warmup_then_cosine

NAMES = ("a", "b", "c")
WORDS = ["0", "1", "2", "3"]


@pytest.fixture(scope="module")
def data():
    """c is the word of (a + b) mod 4: no two of the three tell anything about each other."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 4, (2, 640))
    rows = {"a": np.eye(4)[a].tolist(), "b": np.eye(4)[b].tolist(), "c": [WORDS[(i + j) % 4] for i, j in zip(a, b)]}
    return datasets.Dataset.from_dict(rows)


def make(score=None, **options):
    torch.manual_seed(0)
    encoders = {"a": vectors(4, 16, 32, **options), "b": vectors(4, 16, 32), "c": categories(WORDS, 16)}
    return MultimodalModel(encoders, score or Hadamard(NAMES, 16))


def train(model, data, **options):
    options = {"epochs": 2, "batch_size": 64, "lr": 1e-2, "groups": {"c": "equal"}, "progress": False, **options}
    return fit(model, data, **options)


def same_weights(a, b):
    return all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


def test_hadamard_learns_what_no_pair_tells(data):
    model = make()
    result = train(model, data, epochs=12, validation=data, validation_rows=200)
    assert result.steps == 120
    assert result.history[-1]["validation_c_recall_at_1"] > 0.95
    pairs = make(SumOfPairs(NAMES, 16))
    history = train(pairs, data, epochs=12, validation=data, validation_rows=200).history
    assert history[-1]["validation_c_recall_at_1"] < 0.5


def test_same_seed_same_weights_and_the_callers_generators_are_untouched(data):
    first, second, third = make(noise=0.1, dropout=0.1), make(noise=0.1, dropout=0.1), make(noise=0.1, dropout=0.1)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    train(first, data)
    assert torch.equal(torch.rand(3), expected)
    train(second, data)
    train(third, data, seed=1)
    assert same_weights(first, second)
    assert not same_weights(first, third)


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2, "workers": 1}, {"cache_inputs": True}, {"precision": "bf16"}]
)
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(data, tmp_path, monkeypatch, options):
    options = {"checkpoint_every": 3, **options}
    whole = make(noise=0.1, dropout=0.1)
    straight = train(whole, data, **options)

    added = []

    def interrupt_at_step_seven(self, loss, rows, kept=training.Reporter.add):
        kept(self, loss, rows)
        added.append(rows)
        if len(added) == 6 * options.get("accumulate", 1) + 1:  # the first batch of step seven
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(training.Reporter, "add", interrupt_at_step_seven)
    run = {"out": tmp_path / "run", **options}
    broken = make(noise=0.1, dropout=0.1)
    with pytest.raises(KeyboardInterrupt, match=r"stopped after step 7 of \d+; checkpoint .*--resume"):
        train(broken, data, **run)
    monkeypatch.undo()
    torch.rand(17)  # whatever else draws from the generator
    resumed = make(noise=0.1, dropout=0.1)
    result = train(resumed, data, resume=True, **run)
    assert same_weights(whole, resumed)
    assert result.steps == straight.steps
    expected = [{k: v for k, v in record.items() if k != "rows_per_second"} for record in straight.history]
    assert [{k: v for k, v in record.items() if k != "rows_per_second"} for record in result.history] == expected
    saved = MultimodalModel.from_pretrained(tmp_path / "run" / "model")
    assert same_weights(saved, whole)
    assert json.loads((tmp_path / "run" / "history.json").read_text()) == result.history


def test_resuming_with_other_settings_names_the_first_that_differs(data, tmp_path):
    train(make(), data, out=tmp_path, epochs=1)
    with pytest.raises(ValueError, match=r"holds a run already; pass resume=True"):
        train(make(), data, out=tmp_path, epochs=1)
    with pytest.raises(ValueError, match=r"made with lr = 0.01, now it is 0.02"):
        train(make(), data, out=tmp_path, epochs=1, lr=2e-2, resume=True)
    with pytest.raises(ValueError, match="made with rows = 640, now it is 128"):
        train(make(), data.select(range(128)), out=tmp_path, epochs=1, resume=True)
    with pytest.raises(ValueError, match="needs `out`"):
        train(make(), data, resume=True)
    finished = train(make(), data, out=tmp_path, epochs=1, resume=True)
    assert finished.steps == 10


def test_a_checkpoint_holds_no_pickle_beyond_tensors(data, tmp_path):
    train(make(), data, out=tmp_path, epochs=1)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "state.pt"]
    assert torch.load(folder / "state.pt", weights_only=True)["step"] == 10


def test_accumulated_batches_are_averaged(data):
    """Two batches a step give the mean of their gradients: no more negatives, the same scale."""
    model, other = make(), make()
    maker = training.BatchMaker(model, data, groups={"c": "equal"})
    objective = training.Objective(model, "contrastive", {}, maker.groups, gather=False)
    source = training.batches(maker, 64, 0, 0, 0, 1, 0)
    total = sum(objective(*training.to_device(next(source), torch.device("cpu")), 0) for _ in range(2)) / 2
    total.backward()
    expected = model.score.weight.grad
    seen = []
    other.score.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    train(other, data, steps=1, accumulate=2, clip_norm=0)
    torch.testing.assert_close(sum(seen), expected)


def test_decay_stays_off_w_scales_neutral_vectors_and_biases():
    model = make(Hadamard(NAMES, 16, neutral=True))
    decayed, others = (group["params"] for group in parameter_groups(model, 0.1))
    names = {id(p): name for name, p in model.named_parameters()}
    assert all(names[id(p)].startswith("towers.") and p.ndim == 2 for p in decayed)
    kept = {names[id(p)] for p in others}
    assert {"score.logit_scale", "score.weight", "score.neutral"} <= kept
    assert len(decayed) + len(others) == len(list(model.parameters()))


def test_scales_never_leave_their_cap(data):
    model = make(Hadamard(NAMES, 16, temperature=0.01))
    train(model, data, epochs=1, lr=0.1)
    assert model.score.logit_scale.item() <= np.log(100) + 1e-6


def test_the_rate_warms_up_and_falls_to_zero():
    factor = warmup_then_cosine(100, 0.1)
    rates = [factor(step) for step in range(101)]
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert max(rates) == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0.0)


@pytest.mark.parametrize("loss", ["contrastive", "joint"])
def test_every_loss_trains_and_takes_its_options(data, loss):
    options = {"contrastive": {"candidates": "shuffled", "block_size": 16}, "joint": {"negatives": 2}}[loss]
    groups = {"c": "equal"} if loss == "contrastive" else None
    history = train(make(), data, loss=loss, loss_options=options, groups=groups, epochs=6).history
    assert history[-1]["loss"] < history[0]["loss"] - 0.2


def test_pairwise_loss_trains_a_sum_of_pairs_and_groups_are_refused(data):
    assert train(make(SumOfPairs(NAMES, 16)), data, loss="pairwise", groups=None).steps == 20
    with pytest.raises(ValueError, match="groups go with loss 'contrastive', not with 'pairwise'"):
        train(make(SumOfPairs(NAMES, 16)), data, loss="pairwise")


def test_bf16_keeps_scores_in_float32(data):
    model = make()
    result = train(model, data, precision="bf16")
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert np.isfinite(result.history[-1]["loss"])
    assert train(make(), data, precision="no").steps == 20  # another precision in the same process


def test_a_stream_trains_for_a_number_of_steps(data):
    assert train(make(), data.to_iterable_dataset(num_shards=2), steps=4).steps == 4
    with pytest.raises(ValueError, match="give `steps`"):
        train(make(), data.to_iterable_dataset())


def test_tensorboard_gets_the_history(data, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(make(), data, out=tmp_path, log="tensorboard", epochs=1)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [10]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epoch": 3}, ValueError, r"unknown key 'epoch'; the keys there are \['accumulate'.*'epochs'"),
        ({"epochs": 0}, ValueError, "epochs = 0: Input should be greater"),
        ({"batch_size": 1}, ValueError, "batch_size = 1"),
        ({"loss_options": {"gues": 1}}, ValueError, r"unknown option 'gues' of loss 'contrastive'; it takes \['guess'"),
        ({"loss_options": {"groups": {}}}, ValueError, "unknown option 'groups'"),
        ({"loss": "clip"}, KeyError, "unknown loss 'clip'; choose from"),
        ({"columns": {"a": "x"}}, KeyError, "no column 'x' for modality 'a'"),
        ({"batch_size": 1000}, ValueError, "640 rows, too few for batch_size 1000"),
        ({"log": "wandb", "out": "x"}, ValueError, "unknown log 'wandb'"),
        ({"lr": 1e30, "clip_norm": 0}, ValueError, r"the loss became nan by step"),
    ],
)
def test_bad_settings_are_refused_by_name(data, tmp_path, monkeypatch, options, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        train(make(), data, **options)


def test_a_wholly_frozen_model_is_refused(data):
    model = make()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter requires gradients"):
        train(model, data)


@pytest.mark.slow
@pytest.mark.parametrize(("neutral", "chunk_size"), [(False, []), (True, []), (True, ["10"])])
def test_two_processes_train_as_one_on_the_global_batch(tmp_path, neutral, chunk_size):
    """With encoders and losses in chunks on two, and whole on one."""
    worker = str(Path(__file__).with_name("fit_ranks.py"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", worker]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = {"env": environment, "check": True, "capture_output": True, "timeout": 300}
    subprocess.run([*launch, str(tmp_path / "two"), "32", str(neutral), *chunk_size], **options)
    subprocess.run([sys.executable, worker, str(tmp_path / "one"), "64", str(neutral)], **options)
    two = MultimodalModel.from_pretrained(tmp_path / "two" / "model").state_dict()
    one = MultimodalModel.from_pretrained(tmp_path / "one" / "model").state_dict()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=2e-5, msg=name)
    assert len(json.loads((tmp_path / "two" / "history.json").read_text())) == 1
