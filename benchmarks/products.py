"""Curvature without its matrix: products, their eigenpairs, and that of single weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pyro.distributions as dist
import torch
from _harness import Case, Contestant, laplace_torch, run
from _nets import images, mlp, resnet18, vectors
from gpu_laplace import Batches, epoch
from memory import recorded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tyxe
from tyxe.curvature import CurvatureProducts

NORMAL = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm2d])
VECTORS, RANK, WEIGHTS = 4, 20, 1000


def net_and_data(count: int, smoke_test: bool) -> tuple[nn.Module, Batches]:
    """Return a ResNet-18 in eval mode, and random images in one batch."""
    x, y = images(2 if smoke_test else count, smoke_test)
    return resnet18(smoke_test).eval(), [(x, y)]


def laplace(net: nn.Module, batches: Batches, prior: Any = NORMAL, **how: Any) -> tyxe.LaplaceBNN:
    """Return the BNN, without a curvature."""
    likelihood = tyxe.likelihoods.Categorical(len(batches[0][1]))
    return tyxe.LaplaceBNN(net, prior, likelihood, **how)


def void(function: Callable[[], Any], units: int = 1) -> Callable[[], int]:
    """Return a function that does so many units of work, without its result."""

    def call() -> int:
        function()
        return units

    return call


def product_case(smoke_test: bool) -> Case:
    """Return products with the GGN, beside gradients of the loss."""
    net, batches = net_and_data(8, smoke_test)
    values = {n: p for n, p in net.named_parameters() if p.dim() > 1}

    def forward(at: Any, inputs: Any) -> Any:
        return torch.func.functional_call(net, at, inputs)

    likelihood = tyxe.likelihoods.Categorical(8)
    ggn = CurvatureProducts(forward, values, likelihood, lambda: batches)
    vectors = torch.randn(VECTORS, ggn.blocks.size)
    found = [
        Contestant("a gradient", functools.partial(epoch, net, batches), "plain"),
        Contestant("a product", void(lambda: ggn @ vectors[0]), "ours"),
        Contestant(
            f"a product, of {VECTORS} in a pass", void(lambda: ggn @ vectors, VECTORS), "ours"
        ),
    ]
    return Case("product", "ResNet-18, 8 images of 32 x 32", "gradient or product", 9, found)


class Counted:
    """A loader that counts how often its data are passed through."""

    def __init__(self, batches: Batches) -> None:
        self.batches, self.passes = batches, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        yield from self.batches


def low_rank(smoke_test: bool, net: nn.Module, batches: Batches) -> tyxe.LaplaceBNN:
    """Return the BNN of the largest eigenpairs, without a curvature."""
    options = tyxe.LaplaceOptions(rank=2 if smoke_test else RANK)
    return laplace(net, batches, structure="lowrank", options=options)


def low_rank_case(smoke_test: bool) -> Case:
    """Return the largest eigenpairs, beside forwards."""
    net, batches = net_and_data(4, smoke_test)
    loader, (x, _) = Counted(batches), batches[0]
    bnn = low_rank(smoke_test, net, batches)
    bnn.fit_curvature(loader, progress=False)
    fit = functools.partial(bnn.fit_curvature, batches, progress=False)
    # Two more look at the first batch.
    weights = sum(site.numel() for site in bnn.net_guide.values().values())
    peak, _ = recorded(lambda: bnn.fit_curvature(batches, progress=False))
    passes = {"passes": float(loader.passes), "peak, in nets": peak / (4 * weights)}
    found = [
        Contestant("a forward", void(torch.no_grad()(lambda: net(x))), "plain"),
        Contestant(f"{bnn.options.rank} eigenpairs", fit, "ours", facts=passes),
    ]
    return Case("lowrank", f"ResNet-18, {len(x)} images of 32 x 32", "call", 3, found)


def linearised_case(smoke_test: bool) -> Case:
    """Return linearised predictions by the largest eigenpairs, beside forwards."""
    net, batches = net_and_data(4, smoke_test)
    bnn = low_rank(smoke_test, net, batches)
    bnn.fit_curvature(batches, progress=False)
    x, _ = images(2 if smoke_test else 100, smoke_test)
    found = [
        Contestant("a forward", void(torch.no_grad()(lambda: net(x))), "plain"),
        Contestant("linearised, 10 classes", void(lambda: bnn.functional_variance(x)), "ours"),
    ]
    return Case("linearised", f"ResNet-18, {len(x)} images of 32 x 32", "call", 3, found)


def subnetwork_case(smoke_test: bool) -> Case:
    """Return curvatures of single weights of one layer and of all, and a diagonal."""
    net, batches = net_and_data(64, smoke_test)
    count = 5 if smoke_test else WEIGHTS
    found = [Contestant("a gradient", functools.partial(epoch, net, batches), "plain")]
    chosen = {
        f"{count} weights of the last layer": "last",
        f"{count} weights of all layers": "random",
    }
    for name, by in chosen.items():
        prior = tyxe.priors.SubnetworkPrior(NORMAL, count, by=by)
        bnn = laplace(net, batches, prior, structure="full")
        take = functools.partial(bnn.fit_curvature, batches, progress=False)
        found.append(Contestant(name, take, "ours"))
    diagonal = laplace(net, batches, structure="diag")
    take = functools.partial(diagonal.fit_curvature, batches, progress=False)
    found.append(Contestant("diagonal of all weights", take, "ours"))
    title = f"ResNet-18, exact curvature, {len(batches[0][1])} images of 32 x 32"
    return Case("subnetwork", title, "pass", 3, found, False)


def peer_case(smoke_test: bool) -> Case:
    """Return curvatures of single weights of an MLP, ours and laplace-torch's."""
    net, batches = mlp(smoke_test).eval(), [vectors(5 if smoke_test else 64, smoke_test)]
    count = 5 if smoke_test else WEIGHTS
    found = [Contestant("a gradient", functools.partial(epoch, net, batches), "plain")]
    known = laplace_torch()
    loader = DataLoader(TensorDataset(*batches[0]), len(batches[0][1]))
    places = torch.arange(sum(p.numel() for p in net.parameters()))
    drawn = places[torch.randperm(len(places))[:count]].sort().values
    chosen = {"last": places[-count:], "random": drawn}
    for name, by in {"the last layer": "last", "all layers": "random"}.items():
        prior = tyxe.priors.SubnetworkPrior(NORMAL, count, by=by)
        bnn = laplace(net, batches, prior, structure="full")
        take = functools.partial(bnn.fit_curvature, batches, progress=False)
        found.append(Contestant(f"{count} weights of {name}, ours", take, "ours"))
        if known is not None:
            package, version = known
            theirs = package.Laplace(
                net, "classification", "subnetwork", "full", subnetwork_indices=chosen[by]
            )
            take = functools.partial(theirs.fit, loader)
            found.append(Contestant(f"{count} weights of {name}, {version}", take, "laplace-torch"))
    title = f"MLP 784-400-400-10, exact curvature, {len(batches[0][1])} rows"
    return Case("subnetwork_peer", title, "pass", 5, found, False)


if __name__ == "__main__":
    run(
        "Seconds of products with a curvature, of its largest eigenpairs, and of that of some "
        "single weights, and ratios to gradients and forwards of the plain net.",
        {
            "product": product_case,
            "lowrank": low_rank_case,
            "linearised": linearised_case,
            "subnetwork": subnetwork_case,
            "subnetwork_peer": peer_case,
        },
    )
