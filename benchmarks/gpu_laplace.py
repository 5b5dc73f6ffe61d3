"""Time of a Laplace approximation of a ResNet-18 on a GPU: its curvature, and its predictions.

`gpu.py` has these cases among its own; as a script they are measured by themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from _gpu import FINISHED, device
from _harness import SECONDS, Case, Contestant, Numbers, Quantity, summary
from _harness import run as run_cases
from _nets import images, resnet18
from torch import Tensor, nn

import tyxe
from tyxe.linalg import Kronecker

BATCH, DRAWS = 128, 16
# Structure and curvature of each row, and its name.
FITS = {
    "Kronecker, Fisher": ("kron", "fisher"),
    "Kronecker, exact": ("kron", "ggn"),
    "diagonal, Fisher": ("diag", "fisher"),
    "diagonal, exact": ("diag", "ggn"),
}
EIGENVECTORS = "eigenvectors of the Kronecker factors"
Batches = list[tuple[Tensor, Tensor]]


def data(count: int, smoke_test: bool, device: torch.device) -> Batches:
    """Return random images and labels in batches."""
    x, y = images(4 if smoke_test else count, smoke_test)
    size = 2 if smoke_test else BATCH
    return list(zip(x.to(device).split(size), y.to(device).split(size), strict=True))


def laplace(net: nn.Module, batches: Batches, **how: Any) -> tyxe.LaplaceBNN:
    """Return the BNN over all linear maps of a net, or over some modules."""
    rules = how.pop("rules", {"hide_module_types": [nn.BatchNorm2d]})
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), **rules)
    points = sum(len(y) for _, y in batches)
    return tyxe.LaplaceBNN(net, prior, tyxe.likelihoods.Categorical(points), **how)


def epoch(net: nn.Module, batches: Batches) -> None:
    """Run forward and backward of a plain net on all batches."""
    for x, y in batches:
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()


def eigenvectors(factors: list[tuple[Tensor, Tensor]]) -> None:
    """Form all Kronecker products of a net."""
    for pair in factors:
        Kronecker.from_factors(*pair)


def single_precision(factors: list[tuple[Tensor, Tensor]]) -> None:
    """Find the eigenvectors in float32."""
    for pair in factors:
        for factor in pair:
            torch.linalg.eigh(factor)


def curvature_case(smoke_test: bool, device: torch.device, quantity: Quantity = SECONDS) -> Case:
    """Return a plain epoch, the curvature in each structure, and the eigenvectors by themselves."""
    net = resnet18(smoke_test).to(device).eval()
    batches = data(512, smoke_test, device)
    found = [Contestant("plain PyTorch", functools.partial(epoch, net, batches), "plain")]
    for name, (structure, curvature) in FITS.items():
        bnn = laplace(net, batches, structure=structure, curvature=curvature)
        fit = functools.partial(bnn.fit_curvature, batches, progress=False)
        found.append(Contestant(name, fit, "ours"))
    bnn = laplace(net, batches, structure="kron", curvature="fisher")
    bnn.fit_curvature(batches, progress=False)
    blocks = bnn.state.curvature.operator.blocks.values()
    factors = [block._factors for block in blocks if isinstance(block, Kronecker)]
    run = functools.partial(eigenvectors, factors)
    found.append(Contestant(EIGENVECTORS, run, "ours"))
    run = functools.partial(single_precision, factors)
    found.append(Contestant("eigenvectors, float32", run, "plain"))
    title = f"Curvature of a ResNet-18, {sum(len(y) for _, y in batches)} images"
    return Case("laplace_curvature", title, "pass", 3, found, True, quantity, without_eigenvectors)


def without_eigenvectors(numbers: Numbers) -> Mapping[str, Any]:
    """Return the Kronecker rows without their eigenvectors, in plain epochs."""
    found = {}
    for name in ("Kronecker, Fisher", "Kronecker, exact"):
        rounds = zip(numbers[name], numbers[EIGENVECTORS], numbers["plain PyTorch"], strict=True)
        epochs = summary((own - eigen) / plain for own, eigen, plain in rounds)
        found[f"{name}, without eigenvectors, in plain epochs"] = epochs
    return found


@torch.no_grad()
def forward(net: nn.Module, x: Tensor) -> None:
    """Run a plain forward."""
    net(x)


def predictions_case(smoke_test: bool, device: torch.device, quantity: Quantity = SECONDS) -> Case:
    """Return a plain forward, and predictions of each kind."""
    net = resnet18(smoke_test).to(device).eval()
    batches = data(512, smoke_test, device)
    all_layers = laplace(net, batches, structure="kron", curvature="fisher")
    head = [*net.children()][-1]
    last = laplace(net, batches, structure="full", rules={"expose_modules": [head]})
    for bnn in (all_layers, last):
        bnn.fit_curvature(batches, progress=False)
    x = batches[0][0]
    draws = 2 if smoke_test else DRAWS
    drawn = {"predictive": "bnn", "num_predictions": draws}
    runs: dict[str, Callable[[], Any]] = {
        "all layers, Kronecker, glm": lambda: all_layers.predict(x, link="probit"),
        f"all layers, Kronecker, {draws} draws": lambda: all_layers.predict(x, **drawn),
        "last layer, full, glm": lambda: last.predict(x, link="probit"),
        "last layer, full, 64 draws": lambda: last.predict(x, predictive="bnn", num_predictions=64),
    }
    found = [Contestant("plain PyTorch", functools.partial(forward, net, x), "plain")]
    found += [Contestant(name, void(function), "ours") for name, function in runs.items()]
    title = f"Predictions of {len(x)} images by a Laplace approximation of a ResNet-18"
    return Case("laplace_predictions", title, "batch", 7, found, True, quantity)


def void(function: Callable[[], Any]) -> Callable[[], None]:
    """Return a function without its result."""

    def call() -> None:
        function()

    return call


CASES = {"laplace_curvature": curvature_case, "laplace_predictions": predictions_case}

if __name__ == "__main__":
    run_cases(
        "Seconds of the curvature and of predictions of a Laplace approximation of a ResNet-18, on "
        "a GPU where there is one, and ratios to a plain epoch or forward.",
        {
            name: functools.partial(make, device=device(), quantity=FINISHED)
            for name, make in CASES.items()
        },
    )
