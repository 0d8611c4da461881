"""Encoders in chunks: the whole batch's loss and gradients, dropout included, in the memory of a chunk."""

import subprocess
import sys

import datasets
import pytest
import torch
from torch import nn

from mmcl import Hadamard, MultimodalModel, fit
from mmcl.chunks import encode_in_chunks
from mmcl.encoders import vectors
from mmcl.inputs import take_rows
from mmcl.losses import contrastive_loss

NAMES = ("a", "b", "c")


def make(dropout=0.0):
    torch.manual_seed(0)
    encoders = {name: vectors(5, 4, 8, dropout=dropout) for name in NAMES}
    return MultimodalModel(encoders, Hadamard(NAMES, 4)).double()


def batch(count=11):
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(count, 5, generator=generator, dtype=torch.float64) for name in NAMES}


def gradients(model, embeddings):
    loss = contrastive_loss(model.score, embeddings)
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("chunk_size", [1, 4, 5, 11, 100])
def test_value_and_gradients_are_those_of_the_whole_batch(chunk_size):
    model, inputs = make(), batch()
    expected = gradients(model, model(inputs))
    found = gradients(model, encode_in_chunks(model, inputs, chunk_size))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_dropout_is_replayed():
    """The same masks when activations are made again; otherwise the gradients were those of another function."""
    model, inputs = make(dropout=0.5).train(), batch()
    torch.manual_seed(7)
    parts = [model({name: rows[start : start + 4] for name, rows in inputs.items()}) for start in (0, 4, 8)]
    expected = gradients(model, {name: torch.cat([part[name] for part in parts]) for name in NAMES})
    after = torch.rand(1)
    torch.manual_seed(7)
    found = gradients(model, encode_in_chunks(model, inputs, 4))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    assert torch.rand(1) == after, "the generator goes on as if nothing had been made again"


class Masked(nn.Module):
    """Takes a dict of tensors, and a field that is none."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(5, 4), []

    def forward(self, inputs):
        self.seen.append((len(inputs["rows"]), inputs["how"]))
        return self.layer(inputs["rows"] * inputs["mask"])


def test_dicts_are_cut_row_by_row_and_other_fields_stay():
    module, how = Masked(), {"language": "en"}
    inputs = {"rows": torch.randn(7, 5), "mask": torch.ones(7, 1), "how": how}

    def encode(part):
        return {name: module(rows) for name, rows in part.items()}

    found = encode_in_chunks(encode, {"text": inputs, "image": inputs}, 3)
    assert module.seen == [(3, how), (3, how), (3, how), (3, how), (1, how), (1, how)]
    assert module.seen[0][1] is how
    torch.testing.assert_close(found["text"], module(take_rows(inputs, slice(None))))


def test_bad_chunks_are_refused():
    model, inputs = make(), batch()
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        encode_in_chunks(model, inputs, 0)
    with pytest.raises(ValueError, match="a has 11, c has 10"):
        encode_in_chunks(model, {**inputs, "c": inputs["c"][:10]}, 4)
    with torch.no_grad():
        assert not encode_in_chunks(model, inputs, 4)["a"].requires_grad


def test_training_in_chunks_is_training():
    rows = {name: each.tolist() for name, each in batch(64).items()}
    data = datasets.Dataset.from_dict(rows)
    models = [make().float() for _ in range(2)]
    for model, chunk_size in zip(models, (None, 5), strict=True):
        fit(model, data, steps=4, batch_size=16, lr=1e-2, chunk_size=chunk_size, progress=False)
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)
    with pytest.raises(ValueError, match="chunk_size"):
        fit(make(), data, chunk_size=0)


PEAK = """
import sys, torch
from pathlib import Path
from torch import nn
from mmcl import Hadamard, MultimodalModel
from mmcl.chunks import encode_in_chunks
from mmcl.losses import contrastive_loss
torch.set_num_threads(1)
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))
def tower():
    return nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(4 if not _ else 256, 256), nn.Tanh())],
                         nn.Linear(256, 8))
names = ("a", "b", "c")
model = MultimodalModel({name: tower() for name in names}, Hadamard(names, 8))
def step(count):
    inputs = {name: torch.randn(count, 4) for name in names}
    contrastive_loss(model.score, encode_in_chunks(model, inputs, 64)).backward()
step(65)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
step(int(sys.argv[1]))
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process is read from /proc")
def test_memory_grows_with_the_chunk_not_with_the_batch():
    """Activations of 8,192 rows would take 192 MiB; those of a chunk take 2."""
    peaks = [
        float(
            subprocess.run([sys.executable, "-c", PEAK, str(count)], capture_output=True, text=True, check=True).stdout
        )
        for count in (512, 8192)
    ]
    assert peaks[1] < 100
