"""For inducing_images.py: settings, images, corruptions, nets and scores."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from _data import colour, images
from sklearn.datasets import load_digits
from torch import nn

from tyxe import metrics

# "free" epochs have no KL; its weight then grows linearly over the "annealed" ones.
PUBLISHED = {
    "net": "resnet50",
    "training images": 50_000,
    "test images": 10_000,
    "batch": 100,
    "augmentation": True,
    "members": 5,
    "draws": 20,
    "deterministic": {"epochs": 200, "rate": 3e-4, "decay at": None},
    "weights": {"epochs": 200, "rate": 3e-4, "decay at": None, "free": 100, "annealed": 50},
    "inducing": {"epochs": 300, "rate": 1e-3, "decay at": 200, "free": 100, "annealed": 50},
    "pruned": {"epochs": 50, "rate": 1e-4, "decay at": None},
    "ablation": {"epochs": 100, "rate": 3e-4, "decay at": None, "free": 50, "annealed": 40},
    "max scale": 0.1,
    "scale multiplier": 1,
    "M": 64,
    "max lambda": {"diagonal": 0.03, "ensemble": 0.1},
    "seeds": 3,
    "ablation M": [16, 32, 64, 128],
    "ablation lambda": [0.0, 0.03, 0.1, 0.3],
    "ablation sigma": [0.0, 0.1, 0.3],
    "ablation seeds": 5,
}
REDUCED = PUBLISHED | {
    "net": 16,
    "training images": 3_000,
    "test images": 2_000,
    "augmentation": False,
    "scale multiplier": 10,
    "deterministic": {"epochs": 20, "rate": 1e-3, "decay at": 15},
    "weights": {"epochs": 30, "rate": 3e-3, "decay at": 24, "free": 10, "annealed": 5},
    "inducing": {"epochs": 40, "rate": 3e-3, "decay at": 32, "free": 10, "annealed": 5},
    "pruned": {"epochs": 8, "rate": 1e-3, "decay at": None},
    "ablation": {"epochs": 30, "rate": 3e-3, "decay at": 24, "free": 10, "annealed": 5},
    "M": 16,
    "ablation M": [2, 4, 8, 16],
    "ablation seeds": 1,
}
SMOKE = REDUCED | {
    "net": 2,
    "training images": 60,
    "test images": 40,
    "batch": 30,
    "augmentation": True,
    "members": 2,
    "draws": 2,
    **{
        name: REDUCED[name] | {"epochs": 2, "decay at": 1}
        for name in ("deterministic", "weights", "inducing", "pruned", "ablation")
    },
    "M": 2,
    "seeds": 1,
    "ablation M": [1, 2],
    "ablation lambda": [0.0, 0.1],
    "ablation sigma": [0.0, 0.1],
}
LEVELS = (1, 3, 5)


# --------------------------------------------------------------------------- images


class Images(NamedTuple):
    """Training and test pairs, images of other sets by name, and what normalises all."""

    train: tuple
    test: tuple
    unknown: dict
    mean: torch.Tensor
    scale: torch.Tensor

    def normalised(self, x):
        """Return images as the nets take them."""
        return (x - self.mean) / self.scale


def load(name, settings, device):
    """Return the first training images, and evenly spaced ones of the rest; all in [0, 1]."""
    train, test, unknown = SOURCES[name]()
    count = settings["test images"]
    train = [part[: settings["training images"]].to(device) for part in train]
    test = [part.to(device) for part in thinned(test, count)]
    unknown = {title: thinned([x], count)[0].to(device) for title, x in unknown.items()}
    dims = (0, 2, 3)
    mean, scale = train[0].mean(dims, keepdim=True), train[0].std(dims, keepdim=True)
    return Images(train, test, unknown, mean, scale)


def thinned(parts, count):
    """Return so many of the rows of each tensor, evenly spaced, or all."""
    return [part[:: max(len(part) // count, 1)][:count] for part in parts]


def fashion_mnist():
    """Return FashionMNIST, and test images of MNIST and notMNIST."""
    others = {"MNIST": "mnist", "notMNIST": "notmnist"}
    unknown = {title: images(name, "test")[0] for title, name in others.items()}
    return images("fashion_mnist", "train"), images("fashion_mnist", "test"), unknown


def cifar10():
    """Return CIFAR-10, a local subset if there is one, and test images of SVHN."""
    train, test = (colour("cifar10_subset", "CIFAR10", split) for split in ("train", "test"))
    return train, test, {"SVHN": colour("svhn_subset", "SVHN", "test")[0]}


def digits():
    """Return scikit-learn's digits 0 to 7 in two halves, and the digits 8 and 9."""
    bunch = load_digits()
    x = torch.tensor(bunch.images, dtype=torch.float)[:, None] / 16
    y = torch.tensor(bunch.target)
    known = y <= 7
    return (x[known][::2], y[known][::2]), (x[known][1::2], y[known][1::2]), {"8-9": x[~known]}


SOURCES = {"fashion_mnist": fashion_mnist, "cifar10": cifar10, "digits": digits}


class Batches:
    """A loader that shuffles tensors, and may crop and flip images at random."""

    def __init__(self, x, y, size, augment):
        self.x, self.y, self.size, self.augment = x, y, size, augment

    def __len__(self):
        return -(-len(self.x) // self.size)

    def __iter__(self):
        """Yield pairs, in a new order every time."""
        for rows in torch.randperm(len(self.x), device=self.x.device).split(self.size):
            yield augmented(self.x[rows]) if self.augment else self.x[rows], self.y[rows]


def augmented(x):
    """Return random windows of images reflected at their edges, half of them flipped."""
    (height, width), n = x.shape[-2:], len(x)
    padded = F.pad(x, (4, 4, 4, 4), mode="reflect")
    top, left = torch.randint(9, (2, n, 1, 1, 1), device=x.device)
    rows = (top + torch.arange(height, device=x.device)[:, None]).expand(-1, x.shape[1], -1, 1)
    columns = left + torch.arange(width, device=x.device)
    each = torch.arange(n, device=x.device).view(-1, 1, 1, 1)
    channels = torch.arange(x.shape[1], device=x.device)[:, None, None]
    found = padded[each, channels, rows, columns]
    return torch.where(torch.rand(n, 1, 1, 1, device=x.device) < 0.5, found, found.flip(-1))


# --------------------------------------------------------------------------- corruptions


def noisy(x, level):
    """Add Gaussian noise, the same at every call."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(level)).to(x)
    return (x + (0.04, 0.12, 0.25)[LEVELS.index(level)] * noise).clamp(0, 1)


def blurred(x, level):
    """Blur by a Gaussian, edges reflected."""
    sd = (0.5, 1.0, 1.6)[LEVELS.index(level)]
    radius = min(4, x.shape[-1] - 1)
    kernel = (-0.5 * (torch.arange(-radius, radius + 1).to(x) / sd) ** 2).exp()
    kernel = (kernel / kernel.sum()).expand(x.shape[1], 1, 1, -1)
    x = F.pad(x, (radius,) * 4, mode="reflect")
    x = F.conv2d(x, kernel, groups=x.shape[1])
    return F.conv2d(x, kernel.mT, groups=x.shape[1])


def brighter(x, level):
    """Add to all pixels."""
    return (x + (0.1, 0.25, 0.4)[LEVELS.index(level)]).clamp(0, 1)


def flattened(x, level):
    """Reduce the contrast about each image's mean."""
    mean = x.mean((-1, -2), keepdim=True)
    return mean + (0.7, 0.4, 0.2)[LEVELS.index(level)] * (x - mean)


CORRUPTIONS = {"noise": noisy, "blur": blurred, "brightness": brighter, "contrast": flattened}


# --------------------------------------------------------------------------- nets


class Block(nn.Module):
    """Two convolutions with norms, beside a shortcut."""

    def __init__(self, channels, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Identity()
        if stride != 1 or channels != out:
            convolution = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(out))

    def forward(self, x):
        """Run the block."""
        hidden = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(self.shortcut(x) + hidden)


def small_resnet(width, channels):
    """Return a residual net of three blocks, the first layer with a stride."""
    stem = nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False)
    layers = [stem, nn.BatchNorm2d(width), nn.ReLU()]
    for wide, out in ((1, 1), (1, 2), (2, 4)):
        layers.append(Block(wide * width, out * width, 1 if out == 1 else 2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def make_net(which, channels):
    """Return torchvision's ResNet with the stem that small images need, or a small one by width."""
    if isinstance(which, int):
        return small_resnet(which, channels).to(memory_format=torch.channels_last)
    import torchvision

    net = getattr(torchvision.models, which)(num_classes=10)
    net.conv1 = nn.Conv2d(channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
    net.maxpool = nn.Identity()
    return net


# --------------------------------------------------------------------------- scores


def scores(predict, data):
    """Return a row of the table from what maps images to class probabilities."""
    x, y = data.test
    probs = predict(x)
    found = {
        "accuracy %": 100 * metrics.accuracy(probs, y),
        "NLL": metrics.nll(probs, y),
        "ECE %": ece(probs, y),
        "Brier": metrics.brier_score(probs, y),
    }
    return {name: round(float(value), 4) for name, value in found.items()}


def scores_elsewhere(predict, data):
    """Return the scores of other and of corrupted images."""
    x, y = data.test
    known, found = predict(x).amax(-1), {}
    for name, other in data.unknown.items():
        found[f"AUROC {name}"] = metrics.ood_auroc(known, predict(other).amax(-1))
    for level in LEVELS:
        each = [predict(corrupt(x, level)) for corrupt in CORRUPTIONS.values()]
        accuracy, error = (
            torch.stack([score(p, y) for p in each]).mean() for score in (metrics.accuracy, ece)
        )
        found[f"level {level}: accuracy %"], found[f"level {level}: ECE %"] = 100 * accuracy, error
    return {name: round(float(value), 4) for name, value in found.items()}


def ece(probs, targets):
    """Return the expected calibration error in 10 bins, per cent."""
    return 100 * metrics.expected_calibration_error(probs, targets, num_bins=10)
