"""Time of a training step of a binary net beside the plain net's, by hand and ours."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _by_hand import _LocalLayer, bayesian_names
from _harness import Case, Contestant, run
from _nets import mlp, vectors
from torch import Tensor, nn
from training_step import hand_step, our_step, plain_step

import tyxe


class BinaryByHand:
    """Logits, optimiser, KL and the step, by local reparameterisation.

    What an engineer would write for this method alone: weights `+-1 / sqrt(fan_in)`, both values
    equally likely in the prior, the KL's gradient `sigmoid(phi) sigmoid(-phi) phi` added in place.

    Args:
        net: linear layers without biases; it is changed. Logits start at a multiple of its values.
        num_points: size of the data set.
    """

    def __init__(self, net: nn.Sequential, num_points: int) -> None:
        self.net, self.num_points = net, num_points
        self.names = bayesian_names(net)
        own = [net.get_parameter(name) for name in self.names]
        self.scales = [weight.shape[1] ** -0.5 for weight in own]
        self.layers = []
        for name in self.names:
            path = name.removesuffix(".weight")
            self.layers.append(_LocalLayer(net.get_submodule(path)))
            net.set_submodule(path, self.layers[-1])
        starts = zip(own, self.scales, strict=True)
        self.logits = [(w.detach() / s).requires_grad_() for w, s in starts]
        self.optimizer = torch.optim.Adam(self.logits, lr=1e-3, fused=True)

    def data_term(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the mean cross-entropy, and `4 pi (1 - pi)` of all weights."""
        squares = [scale**2 for scale in self.scales]
        positive = torch._foreach_sigmoid(self.logits)
        negative = torch._foreach_sigmoid(torch._foreach_neg(self.logits))
        means = torch._foreach_mul(torch._foreach_sub(positive, negative), self.scales)
        variances = torch._foreach_mul(torch._foreach_mul(positive, negative), 4.0)
        spreads = torch._foreach_mul(variances, squares)
        for layer, mean, spread in zip(self.layers, means, spreads, strict=True):
            layer.pairs["weight"] = (mean, spread)
        return F.cross_entropy(self.net(x), y), list(variances)

    def step(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Make one step; return cross-entropy and KL."""
        self.optimizer.zero_grad()
        nll, variances = self.data_term(x, y)
        nll.backward()
        kl = self.add_kl(variances)
        self.optimizer.step()
        return nll.detach(), kl

    @torch.no_grad()
    def add_kl(self, variances: list[Tensor]) -> Tensor:
        """Add the gradient of `KL / N`, which needs no graph; return the KL."""
        found = zip(self.logits, variances, strict=True)
        total = torch.zeros((), dtype=self.logits[0].dtype)
        for phi, variance in found:
            assert phi.grad is not None
            phi.grad.addcmul_(phi, variance, value=0.25 / self.num_points)
            # log 2 + pi log pi + (1 - pi) log (1 - pi)
            total += F.logsigmoid(phi).sum() + math.log(2) * phi.numel()
            total -= torch.dot(torch.sigmoid(-phi).view(-1), phi.view(-1))
        return total


def tanh_mlp(smoke_test: bool) -> nn.Sequential:
    """Return the MLP 784-400-400-10 of tanh units, without biases."""
    return mlp(smoke_test, act=nn.Tanh, bias=False)


def make_bnn(net: nn.Module, num_points: int, delta: float | None = None) -> tyxe.VariationalBNN:
    """Return the net with binary weights, whose logits start at a multiple of its values."""

    def guide(program: Callable[..., object]) -> tyxe.guides.AutoBernoulli:
        return tyxe.guides.AutoBernoulli(program, init_gain=1.0)

    prior = tyxe.priors.BinaryPrior(delta, scale="radford")
    return tyxe.VariationalBNN(net, prior, tyxe.likelihoods.Categorical(num_points), guide)


def contestants(smoke_test: bool) -> list[Contestant]:
    """Return the plain step, both ways of the Bernoulli posterior, and the Beta regulariser."""
    x, y = vectors(8 if smoke_test else 128, smoke_test)
    handler, num_points = tyxe.poutine.local_reparameterization, 60_000
    limit = "Bernoulli, by hand"
    found = [Contestant("plain PyTorch", plain_step(tanh_mlp(smoke_test), x, y), "plain")]
    hand = hand_step(BinaryByHand(tanh_mlp(smoke_test), num_points), x, y)
    found.append(Contestant(limit, hand, "by hand"))
    for name, delta in {"Bernoulli": None, "Beta": 1e-3}.items():
        step = our_step(make_bnn(tanh_mlp(smoke_test), num_points, delta), handler, x, y)
        found.append(Contestant(f"{name}, ours", step, "ours", limit if delta is None else None))
    return found


def mlp_case(smoke_test: bool) -> Case:
    """Return the MLP's case."""
    title = "MLP 784-400-400-10 of binary weights, batch 128"
    return Case("mlp", title, "step", 60, contestants(smoke_test))


if __name__ == "__main__":
    run(
        "Seconds of one training step of binary weights by local reparameterisation with Adam, and "
        "ratios to the plain step and to the same method by hand.",
        {"mlp": mlp_case},
    )
