"""Train an encoder on pictures without labels, then classify with ten labels a class.

python examples/features_without_labels.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from mmcl.methods import RandomViews, SimCLR, TensorSource, features, pretrain
from mmcl.metrics import linear_probe

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
train, test = slice(0, 1300), slice(1300, None)

torch.manual_seed(0)
encoder = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.Conv2d(64, 128, 3, stride=2, padding=1, bias=False),
    nn.BatchNorm2d(128),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
)
method = SimCLR(encoder, width=128, dim=16)
augment = RandomViews(crop=0.25, degrees=15.0, shift=0.15, stretch=0.2, brightness=0.3, noise=0.1)
source = TensorSource(images, augment)

# ten rows of each digit are all that the probe is told
chosen = torch.cat([torch.from_numpy(labels[train] == digit).nonzero()[:10, 0] for digit in range(10)])
for name in ("as drawn", "trained"):
    h = features(method, source)
    accuracy = linear_probe(h[chosen], labels[chosen], h[test], labels[test])
    print(f"{name:9} linear probe with ten labels a class: {accuracy:.3f}")
    if name == "as drawn":
        pretrain(method, TensorSource(images[train], augment), epochs=60)
