"""Time of a training step with the penalty of earlier tasks, as they grow, to the plain step."""

from __future__ import annotations

from collections.abc import Callable

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from _harness import Case, Contestant, run
from _nets import dense
from torch import Tensor, nn

import tyxe

BATCH = 250
STEPS = 10
TASKS = (1, 5, 20, 50)
# By the name of the case: what it is called, structure, and how tasks add up.
WAYS = {
    "kron-sum": ("Kronecker factors, a term for each task", "kron", "sum"),
    "kron-modes": ("Kronecker factors, about each task's mode", "kron", "per_task"),
    "kron-average": ("Kronecker factors, averaged", "kron", "average"),
    "diag": ("diagonal", "diag", "sum"),
}
# A quadratic term of a layer: centre, and the factors of its matrix or its diagonal.
Term = tuple[Tensor, tuple[Tensor, ...]]


def make_net(smoke_test: bool) -> nn.Sequential:
    """Return the net: 784-100-100-10 with ReLU."""
    inputs, width = (4, 3) if smoke_test else (784, 100)
    return dense(inputs, width, width, 10)


def data(smoke_test: bool) -> tuple[Tensor, Tensor]:
    """Return one batch of random images, and labels."""
    count, inputs = (5, 4) if smoke_test else (BATCH, 784)
    return torch.rand(count, inputs), torch.randint(10, (count,))


def hand_terms(net: nn.Sequential, tasks: int, name: str) -> list[list[Term]]:
    """Return the terms of each layer after so many tasks, with random factors."""
    averaged = name in ("kron-average", "diag")
    found = []
    for layer in (module for module in net if isinstance(module, nn.Linear)):
        rows, columns = layer.out_features, layer.in_features + 1
        terms: list[Term] = []
        for _ in range(min(tasks, 1) if averaged else tasks):
            factors: tuple[Tensor, ...] = (torch.rand(rows, columns),)
            if name != "diag":
                factors = (torch.eye(rows), torch.eye(columns))
            terms.append((torch.zeros(rows, columns), factors))
        found.append(terms)
    return found


def penalty(net: nn.Sequential, terms: list[list[Term]], one_centre: bool) -> Tensor:
    """Return half the sum of quadratic forms, and that of the prior before the first task."""
    total = torch.zeros(())
    layers = [module for module in net if isinstance(module, nn.Linear)]
    for layer, own in zip(layers, terms, strict=True):
        weights = torch.cat([layer.weight, layer.bias[:, None]], 1)
        total = total + weights.square().sum() / 2
        difference = weights - own[0][0] if own else weights
        for centre, factors in own:
            if not one_centre:
                difference = weights - centre
            if len(factors) == 1:
                total = total + (factors[0] * difference.square()).sum() / 2
            else:
                total = total + (difference * (factors[0] @ difference @ factors[1])).sum() / 2
    return total


def hand_steps(
    net: nn.Sequential, batch: tuple[Tensor, Tensor], terms: list[list[Term]] | None, centres: bool
) -> Callable[[], int]:
    """Return steps of training, plain without terms."""
    x, y = batch
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)

    def train() -> int:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            if terms is not None:
                loss = loss + penalty(net, terms, not centres) / len(x)
            loss.backward()
            optimizer.step()
        return STEPS

    return train


def our_steps(tasks: int, name: str, smoke_test: bool) -> Callable[[], int]:
    """Return steps of a Laplace BNN whose prior is the posterior of so many tasks."""
    _, structure, accumulate = WAYS[name]
    x, y = data(smoke_test)
    bnn = tyxe.LaplaceBNN(
        make_net(smoke_test),
        tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        tyxe.likelihoods.Categorical(len(x)),
        structure=structure,
        curvature="fisher",
        options=tyxe.LaplaceOptions(accumulate=accumulate),
    )
    sites = tyxe.util.pyro_sample_sites(bnn.net)
    for _ in range(tasks):
        bnn.fit_curvature([data(smoke_test)], progress=False)
        posterior = bnn.net_guide.get_detached_distributions(sites)
        bnn.update_prior(tyxe.priors.DictPrior(posterior))
    optimizer = torch.optim.Adam(bnn.net_guide.parameters(), lr=1e-4)
    # The steps of `fit`, without the curvature that it takes at its end: at a point, no Gaussian.
    bnn.net_guide.state = None

    def train() -> int:
        for _ in range(STEPS):
            optimizer.zero_grad()
            terms = tyxe.bnn.elbo_terms(bnn.model, bnn.net_guide, x, y)
            ((terms.kl - terms.data) / len(x)).backward()
            optimizer.step()
        return STEPS

    return train


def case(name: str) -> Callable[[bool], Case]:
    """Return what builds the case of one way of adding tasks up."""

    def make(smoke_test: bool) -> Case:
        batch, net = data(smoke_test), make_net(smoke_test)
        contestants = [Contestant("plain", hand_steps(net, batch, None, False), "plain")]
        for tasks in (0, *(TASKS[:2] if smoke_test else TASKS)):
            limit = f"after {tasks} tasks, by hand"
            terms = hand_terms(net, tasks, name)
            by_hand = hand_steps(make_net(smoke_test), batch, terms, name == "kron-modes")
            ours = our_steps(tasks, name, smoke_test)
            contestants += [
                Contestant(limit, by_hand, "by hand"),
                Contestant(f"after {tasks} tasks, ours", ours, "ours", limit),
            ]
        return Case(name, f"784-100-100-10 after tasks: {WAYS[name][0]}", "step", 5, contestants)

    return make


if __name__ == "__main__":
    run(__doc__ or "", {name: case(name) for name in WAYS})
