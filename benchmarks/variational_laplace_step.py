"""Time of a training step of variational Laplace beside MAP [GR tab. 2], by hand and ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from _by_hand import MeanField, Sampled, bayesian_names
from _harness import Case, Contestant, Numbers, ratio, run
from _nets import images, mlp, resnet18, vectors
from pyro.infer.autoguide import AutoDelta
from torch import Tensor, nn
from torch.func import functional_call
from training_step import SCALE, hand_step, make_bnn, our_step

import tyxe

Step = Callable[[], None]


class VariationalLaplace(MeanField):
    """The net once, at the means; the penalty's gradient goes through a first backward pass."""

    def pseudo_labels(self, log_probs: Tensor) -> Tensor:
        """Draw labels from the net's own predictions."""
        return torch.multinomial(log_probs.detach().exp(), 1)[:, 0]

    def data_term(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return `mean cross-entropy + 1/(2 S) sum sigma^2 gt^2`, and the variances."""
        means = dict(zip(self.names, self.locs, strict=True))
        log_probs = functional_call(self.net, means, (x,)).log_softmax(-1)
        drawn = F.nll_loss(log_probs, self.pseudo_labels(log_probs), reduction="sum")
        gradients = torch.autograd.grad(drawn, self.locs, create_graph=True)
        scales = torch._foreach_exp(self.rhos)
        scaled = [g.reshape(-1) for g in torch._foreach_mul(gradients, scales)]
        penalty = torch.stack([torch.dot(g, g) for g in scaled]).sum()
        with torch.no_grad():
            variances = torch._foreach_mul(scales, scales)
        return F.nll_loss(log_probs, y) + penalty / (2 * len(x)), list(variances)


def map_by_hand(net: nn.Module, x: Tensor, y: Tensor, num_points: int) -> Step:
    """Return a plain step with the gradient of a N(0, 1) prior, `w / N`."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    weights = [net.get_parameter(name) for name in bayesian_names(net)]

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            gradients = [weight.grad for weight in weights]
            torch._foreach_add_(gradients, weights, alpha=1 / num_points)
        optimizer.step()

    return step


def map_bnn(net: nn.Module, num_points: int) -> tyxe.VariationalBNN:
    """Return the net with a point mass about its values."""
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm2d])
    likelihood = tyxe.likelihoods.Categorical(num_points)
    return tyxe.VariationalBNN(net, prior, likelihood, AutoDelta)


def contestants(
    make_net: Callable[[], nn.Module], x: Tensor, y: Tensor, num_points: int
) -> list[Contestant]:
    """Return MAP, variational inference and variational Laplace, each by hand and ours."""

    def smooth() -> nn.Module:
        return tyxe.util.replace_activations_(make_net(), nn.ReLU, nn.Softplus)

    by_hand = {
        "MAP": map_by_hand(smooth(), x, y, num_points),
        "VI": hand_step(Sampled(smooth(), num_points, SCALE), x, y),
        "VL": hand_step(VariationalLaplace(smooth(), num_points, SCALE), x, y),
    }
    ours = {
        "MAP": our_step(map_bnn(smooth(), num_points), nullcontext, x, y),
        "VI": our_step(make_bnn(smooth(), num_points), nullcontext, x, y),
        "VL": our_step(make_bnn(smooth(), num_points), tyxe.poutine.variational_laplace, x, y),
    }
    found = []
    for name in ours:
        limit, who = f"{name}, by hand", "plain" if name == "MAP" else "by hand"
        found.append(Contestant(limit, by_hand[name], who))
        found.append(Contestant(f"{name}, ours", ours[name], "ours", limit))
    return found


def against_map(numbers: Numbers) -> Mapping[str, Any]:
    """Return the ratios of the library's own steps."""
    return {
        "VL to MAP, both ours (the paper's: 2.75)": ratio(numbers, "VL, ours", "MAP, ours"),
        "VI to MAP, both ours (the paper's: 1.03)": ratio(numbers, "VI, ours", "MAP, ours"),
    }


def mlp_case(smoke_test: bool) -> Case:
    """Return the MLP's case."""
    x, y = vectors(8 if smoke_test else 128, smoke_test)
    found = contestants(lambda: mlp(smoke_test), x, y, num_points=60_000)
    title = "MLP 784-400-400-10 with Softplus, batch 128"
    return Case("mlp", title, "step", 60, found, findings=against_map)


def resnet_case(smoke_test: bool) -> Case:
    """Return the ResNet's case."""
    x, y = images(2 if smoke_test else 32, smoke_test)
    found = contestants(lambda: resnet18(smoke_test), x, y, num_points=50_000)
    title = "ResNet-18 with Softplus on 32 x 32 images, batch 32"
    return Case("resnet18", title, "step", 5, found, findings=against_map)


if __name__ == "__main__":
    run(
        "Seconds of one training step of MAP, of variational inference by plain draws and of "
        "variational Laplace with Adam, and ratios to MAP and to the same method by hand.",
        {"mlp": mlp_case, "resnet18": resnet_case},
    )
