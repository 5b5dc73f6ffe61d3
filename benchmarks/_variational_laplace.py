"""For variational_laplace.py: nets, data, and one fit with its scores."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import torch
import torch.nn.functional as F
from pyro.infer.autoguide import AutoDelta
from sklearn.datasets import load_digits
from torch import Tensor, nn

import tyxe
from tyxe import metrics
from tyxe.guides import AutoNormal, PretrainedInitializer, scale_below_prior

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples"))

from _data import colour, images  # noqa: E402

HANDLERS: dict[str, Callable[[], AbstractContextManager]] = {
    "VL": tyxe.poutine.variational_laplace,
    "VI": nullcontext,
    "MAP": nullcontext,
}
DRAWS = 10
LOG_RATIO = -3.0
Pair = tuple[Tensor, Tensor]


# --------------------------------------------------------------------------- nets


def cnn(side: int = 28) -> nn.Sequential:
    """Return two strided convolutions and two linear layers; 27,338 weights on 28 x 28 pixels."""
    kernel, stride = (6, 4) if side == 28 else (3, 2)
    positions = (-(-side // stride) + 1) // 2
    return nn.Sequential(
        *(nn.Conv2d(1, 8, kernel, stride, padding=1), nn.Softplus()),
        *(nn.Conv2d(8, 24, 3, stride=2, padding=1), nn.Softplus()),
        *(nn.Flatten(), nn.Linear(24 * positions**2, 64), nn.Softplus(), nn.Linear(64, 10)),
    )


class PreactBlock(nn.Module):
    """Norm, Softplus and convolution, twice, beside a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(out)
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.shortcut = None
        if stride != 1 or channels != out:
            self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        first = F.softplus(self.norm1(x))
        short = x if self.shortcut is None else self.shortcut(first)
        return short + self.conv2(F.softplus(self.norm2(self.conv1(first))))


def preact_resnet18(width: int = 64) -> nn.Sequential:
    """Return the PreactResNet-18 for small images, with Softplus; `width` is 64 in the paper."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False)]
    channels = width
    for stage in range(4):
        for stride in (1 if stage == 0 else 2, 1):
            layers.append(PreactBlock(channels, width * 2**stage, stride))
            channels = width * 2**stage
    head = [nn.BatchNorm2d(channels), nn.Softplus(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(channels, 10))


# --------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Data:
    """Training, validation and test pairs, and images of another set."""

    train: Pair
    validation: Pair
    test: Pair
    other: Tensor

    def to(self, device: str) -> Data:
        """Return it on a device."""
        pairs = [(x.to(device), y.to(device)) for x, y in (self.train, self.validation, self.test)]
        return Data(*pairs, self.other.to(device))


class Batches:
    """A loader that shuffles tensors, and may crop and flip images at random.

    Args:
        data: images and labels.
        size: of a batch.
        augment: pad images by 4 pixels, crop them back and flip half of them.
    """

    def __init__(self, data: Pair, size: int, augment: bool) -> None:
        self.x, self.y = data
        self.size, self.augment = size, augment

    def __len__(self) -> int:
        return -(-len(self.x) // self.size)

    def __iter__(self) -> Iterator[Pair]:
        for rows in torch.randperm(len(self.x), device=self.x.device).split(self.size):
            x = self.x[rows]
            yield (augmented(x) if self.augment else x), self.y[rows]


def augmented(x: Tensor) -> Tensor:
    """Return random crops of zero-padded images, half of them mirrored."""
    padded, (height, width) = F.pad(x, (4, 4, 4, 4)), x.shape[-2:]
    tops, lefts = torch.randint(9, (2, len(x))).tolist()
    crops = [
        p[:, top : top + height, left : left + width]
        for p, top, left in zip(padded, tops, lefts, strict=True)
    ]
    found = torch.stack(crops)
    return torch.where(torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5, found, found.flip(-1))


def digits() -> tuple[Pair, Pair, Tensor]:
    """Return scikit-learn's digits 0 to 7 in two parts, and the other two digits."""
    bunch = load_digits()
    x, y = torch.tensor(bunch.images[:, None] / 16, dtype=torch.float), torch.tensor(bunch.target)
    (known,), (unknown,) = torch.where(y <= 7), torch.where(y > 7)
    train, test = known[:900], known[900:]
    return (x[train], y[train]), (x[test], y[test]), x[unknown]


def sources(name: str) -> tuple[Pair, Pair, Tensor]:
    """Return the training and test part of a set, and images of the other."""
    if name == "digits":
        return digits()
    if name == "cifar10":
        parts = [colour("cifar10_subset", "CIFAR10", split) for split in ("train", "test")]
        return parts[0], parts[1], colour("svhn_subset", "SVHN", "test")[0]
    other = {"mnist": "fashion_mnist", "fashion_mnist": "mnist"}[name]
    return images(name, "train"), images(name, "test"), images(other, "test")[0]


def load(name: str, settings: dict[str, Any]) -> Data:
    """Return a set as the settings cut it, standardised by its training images."""
    (x, y), (x_test, y_test), other = sources(name)
    held_out, test = settings["validation images"], settings["test images"]
    train = min(settings["training images"] or len(x), len(x) - held_out)
    dims = (0, 2, 3)
    mean, scale = x[:train].mean(dims, keepdim=True), x[:train].std(dims, keepdim=True)
    x, x_test, other = ((each - mean) / scale for each in (x, x_test, other))
    return Data(
        (x[:train], y[:train]),
        (x[-held_out:], y[-held_out:]),
        (x_test[:test], y_test[:test]),
        other[:test],
    )


# --------------------------------------------------------------------------- one fit


def make_bnn(method: str, net: nn.Module, num_points: int) -> tyxe.VariationalBNN:
    """Return the net with a guide about its own values; norms have no posterior."""
    start = PretrainedInitializer.from_net(net)
    scale = scale_below_prior(LOG_RATIO)
    guide = functools.partial(AutoNormal, init_loc_fn=start, init_scale=scale)
    if method == "MAP":
        guide = functools.partial(AutoDelta, init_loc_fn=start)
    prior = tyxe.priors.LayerwiseNormalPrior("radford", hide_module_types=[nn.BatchNorm2d])
    return tyxe.VariationalBNN(net, prior, tyxe.likelihoods.Categorical(num_points), guide)


def fit(
    bnn: tyxe.VariationalBNN,
    data: Pair,
    settings: dict[str, Any],
    method: str,
    beta: float,
    multiplier: float,
) -> tyxe.bnn.History:
    """Fit with Adam, whose rate falls by ten at half and at three quarters of the epochs."""
    epochs = settings["epochs"]

    def cut(bnn: tyxe.VariationalBNN, epoch: int, _: float) -> None:
        if epoch + 1 in (epochs // 2, 3 * epochs // 4):
            for group in bnn.optimizer.param_groups:
                group["lr"] /= 10

    adam = functools.partial(torch.optim.Adam, lr=settings["learning rate"])
    loader = Batches(data, settings["batch size"], settings["augmentation"])
    factors = None if method == "MAP" else {"scale": multiplier}
    with HANDLERS[method]():
        return bnn.fit(loader, adam, epochs, cut, beta=beta, lr_multipliers=factors, progress=False)


def scores(bnn: tyxe.VariationalBNN, data: Data, draws: int) -> dict[str, float]:
    """Return validation NLL, and the test set's metrics."""
    predict = functools.partial(bnn.predict, num_predictions=draws, batch_size=1_000)
    seen, test, other = (predict(x) for x in (data.validation[0], data.test[0], data.other))
    probs, labels = test.softmax(-1), data.test[1]
    found = {
        "validation NLL": F.cross_entropy(seen, data.validation[1]),
        "NLL": F.cross_entropy(test, labels),
        "accuracy": metrics.accuracy(probs, labels),
        "ECE": metrics.expected_calibration_error(probs, labels),
        "AUROC": metrics.ood_auroc(probs.amax(-1), other.softmax(-1).amax(-1)),
    }
    return {key: round(value.item(), 5) for key, value in found.items()}


def expected_log_likelihood(bnn: tyxe.VariationalBNN, data: Pair) -> float:
    """Return the mean over images and draws of the log-likelihood, nats."""
    logits = bnn.predict(data[0], num_predictions=DRAWS, aggregate=False, batch_size=1_000)
    return -F.cross_entropy(logits.flatten(0, 1), data[1].repeat(DRAWS)).item()


def growth(bnn: tyxe.VariationalBNN, before: dict[str, Tensor]) -> dict[str, float]:
    """Return the mean of `log sigma - log s` of each site, `s` the prior's."""
    guide = bnn.net_guide
    return {
        name: round((guide.get_scale(name) / scale).log().mean().item() + LOG_RATIO, 3)
        for name, scale in before.items()
    }


def cell(
    data: Data, settings: dict[str, Any], method: str, beta: float, multiplier: float, seed: int
) -> dict[str, Any]:
    """Run one fit; return its curves, per training image, and its scores."""
    pyro.set_rng_seed(seed)
    net = preact_resnet18(settings["width"]) if settings["width"] else cnn(data.other.shape[-1])
    points, device = len(data.train[0]), data.other.device
    bnn = make_bnn(method, net, points).to(device)
    guide = bnn.net_guide
    sites = [] if method == "MAP" else list(guide.get_detached_distributions())
    before = {name: guide.get_scale(name).detach().clone() for name in sites}
    start = time.process_time()
    history = fit(bnn, data.train, settings, method, beta, multiplier)
    found: dict[str, Any] = {
        "weights": sum(p.numel() for p in net.parameters()),
        "steps": settings["epochs"] * -(-points // settings["batch size"]),
        "seconds": round(time.process_time() - start, 1),
        "ELBO by epoch": [round(-loss / points, 5) for loss in history.loss],
        "log-likelihood": round(history.log_likelihood[-1] / points, 5),
        "KL": round(history.kl[-1] / points, 5),
        "scores": {"mean": scores(bnn, data, 0)},
    }
    if method != "MAP":
        found["scores"]["draws"] = scores(bnn, data, DRAWS)
        by_draws = expected_log_likelihood(bnn, data.train)
        found["log-likelihood by draws"] = round(by_draws, 5)
        found["log sigma over prior"] = growth(bnn, before)
    return found
