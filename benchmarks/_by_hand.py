"""Mean-field variational inference by hand, as fast as plain PyTorch lets us write it.

This is what an engineer would write for one method and one kind of net, without any library: the
limit that the library's own step is compared with. Posterior `N(loc, exp(rho)^2)` over the
parameters of linear and convolution layers, prior `N(0, 1)`; everything else (BatchNorm) is a
plain parameter. The loss is the mean cross-entropy + KL / N.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

# Keeps the square root's gradient finite where a whole receptive field is zero.
TINY = 1e-12


def bayesian_names(net: nn.Module) -> list[str]:
    """Return the names of the parameters of all linear and convolution layers."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in net.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
        for name, _ in module.named_parameters()
    ]


# --------------------------------------------------------------------------- training


class MeanField:
    """Parameters, optimiser, KL and the step; a subclass computes the data term.

    Args:
        net: is copied; means start at its values.
        num_points: size of the data set.
        scale: where standard deviations start.
    """

    def __init__(self, net: nn.Module, num_points: int, scale: float) -> None:
        self.net, self.num_points = copy.deepcopy(net), num_points
        self.names = bayesian_names(net)
        own = [self.net.get_parameter(name) for name in self.names]
        self.locs = [p.detach().clone().requires_grad_() for p in own]
        self.rhos = [torch.full_like(p, math.log(scale)).requires_grad_() for p in own]
        for parameter in own:
            parameter.requires_grad_(False)
        rest = [p for p in self.net.parameters() if p.requires_grad]
        parameters = [*self.locs, *self.rhos, *rest]
        self.optimizer = torch.optim.Adam(parameters, lr=1e-3, fused=True)

    def data_term(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the mean cross-entropy of one draw, and the variances of all weights."""
        raise NotImplementedError

    def step(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Make one step; return cross-entropy and KL."""
        self.optimizer.zero_grad()
        nll, variances = self.data_term(x, y)
        nll.backward()
        kl = self._add_kl(variances)
        self.optimizer.step()
        return nll.detach(), kl

    @torch.no_grad()
    def _add_kl(self, variances: list[Tensor]) -> Tensor:
        """Add the gradient of `KL / N`, which needs no graph: `loc / N` and `(var - 1) / N`."""
        locs, rhos = self.locs, self.rhos
        weight = 1.0 / self.num_points
        torch._foreach_add_([p.grad for p in locs], locs, alpha=weight)
        scale_grads = [p.grad for p in rhos]
        torch._foreach_add_(scale_grads, variances, alpha=weight)
        torch._foreach_add_(scale_grads, -weight)
        total = torch.zeros((), device=locs[0].device)
        for loc, rho, variance in zip(locs, rhos, variances, strict=True):
            squares = torch.dot(loc.view(-1), loc.view(-1)) + variance.sum() - loc.numel()
            total += 0.5 * squares - rho.sum()
        return total


class Sampled(MeanField):
    """One draw of all weights for the whole batch."""

    def data_term(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Run the net once with drawn weights."""
        scales = torch._foreach_exp(self.rhos)
        noise = [torch.randn_like(loc) for loc in self.locs]
        weights = torch._foreach_addcmul(self.locs, scales, noise)
        drawn = dict(zip(self.names, weights, strict=True))
        with torch.no_grad():
            variances = torch._foreach_mul(scales, scales)
        return F.cross_entropy(functional_call(self.net, drawn, (x,)), y), list(variances)


class _Layer(nn.Module):
    """Takes a layer's place; its parameters are pairs `(loc, spread)`, set in each step."""

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.map: Callable[..., Tensor] = F.linear
        if isinstance(layer, nn.Conv2d):
            self.map = functools.partial(F.conv2d, stride=layer.stride, padding=layer.padding)
        self.pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {"bias": (None, None)}


class _LocalLayer(_Layer):
    """Spreads are variances: outputs are drawn from their own Gaussians."""

    def forward(self, x: Tensor) -> Tensor:
        (weight, weight_var), (bias, bias_var) = self.pairs["weight"], self.pairs["bias"]
        mean = self.map(x, weight, bias)
        scale = self.map(x * x, weight_var, bias_var).add_(TINY).sqrt_()
        return torch.addcmul(mean, scale, torch.randn_like(scale))


class _FlippedLayer(_Layer):
    """Spreads are one draw of the perturbation, whose signs are flipped for every point."""

    def forward(self, x: Tensor) -> Tensor:
        (weight, weight_noise), (bias, bias_noise) = self.pairs["weight"], self.pairs["bias"]
        mean = self.map(x, weight, bias)
        perturbation = self.map(x * _signs(x), weight_noise, bias_noise)
        return torch.addcmul(mean, perturbation, _signs(mean))


def _signs(like: Tensor) -> Tensor:
    """Return random signs per point and channel."""
    shape = [*like.shape[:2], *[1] * (like.dim() - 2)]
    return torch.randint(0, 2, shape, dtype=like.dtype, device=like.device).mul_(2).sub_(1)


class Layerwise(MeanField):
    """Base of the methods that need layers of their own."""

    layer: type[_Layer]

    def __init__(self, net: nn.Module, num_points: int, scale: float) -> None:
        super().__init__(net, num_points, scale)
        replaced: dict[str, _Layer] = {}
        self.places: list[tuple[_Layer, str]] = []
        for name in self.names:
            path, _, kind = name.rpartition(".")
            if path not in replaced:
                replaced[path] = self.layer(self.net.get_submodule(path))
            self.places.append((replaced[path], kind))
        for path, layer in replaced.items():
            self.net.set_submodule(path, layer)

    def run(self, x: Tensor, spreads: list[Tensor]) -> Tensor:
        """Hand each layer its pairs, and run the net."""
        for (layer, kind), loc, spread in zip(self.places, self.locs, spreads, strict=True):
            layer.pairs[kind] = (loc, spread)
        return self.net(x)


class LocalReparameterization(Layerwise):
    """No weight is drawn."""

    layer = _LocalLayer

    def data_term(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Run the net on variances `exp(2 rho)`."""
        variances = list(torch._foreach_exp(torch._foreach_mul(self.rhos, 2.0)))
        return F.cross_entropy(self.run(x, variances), y), variances


class Flipout(Layerwise):
    """One perturbation for the batch, flipped for every point."""

    layer = _FlippedLayer

    def data_term(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Run the net on perturbations `exp(rho) * eps`."""
        scales = torch._foreach_exp(self.rhos)
        noise = [torch.randn_like(loc) for loc in self.locs]
        perturbations = list(torch._foreach_mul(scales, noise))
        with torch.no_grad():
            variances = torch._foreach_mul(scales, scales)
        return F.cross_entropy(self.run(x, perturbations), y), list(variances)


# --------------------------------------------------------------------------- prediction


class Predictor:
    """Draws from `N(net's parameters, scale^2)` over linear and convolution layers.

    Args:
        net: is copied, and runs in eval mode.
        scale: of all weights.
        num_predictions: number of draws.
    """

    def __init__(self, net: nn.Module, scale: float, num_predictions: int) -> None:
        self.net, self.num_predictions = copy.deepcopy(net).eval(), num_predictions
        self.names = bayesian_names(net)
        own = [self.net.get_parameter(name) for name in self.names]
        self.locs = [p.detach().clone() for p in own]
        self.scales = [torch.full_like(p, scale) for p in self.locs]

    @torch.no_grad()
    def loop(self, x: Tensor) -> Tensor:
        """Draw into the net's own parameters, one forward after the other."""
        places = [self.net.get_parameter(name).data for name in self.names]
        noise = [torch.empty_like(loc) for loc in self.locs]
        outputs = []
        for _ in range(self.num_predictions):
            for loc, scale, eps, place in zip(self.locs, self.scales, noise, places, strict=True):
                torch.randn(eps.shape, out=eps)
                torch.addcmul(loc, scale, eps, out=place)
            outputs.append(self.net(x))
        return aggregated(torch.stack(outputs))

    @torch.no_grad()
    def vmapped(self, x: Tensor, chunk: int = 8) -> Tensor:
        """Draw several sets of weights, and run them in one batched forward."""

        def forward(*weights: Tensor) -> Tensor:
            return functional_call(self.net, dict(zip(self.names, weights, strict=True)), (x,))

        outputs = []
        for size in _chunks(self.num_predictions, chunk):
            weights = [
                torch.addcmul(loc, scale, torch.randn(size, *loc.shape))
                for loc, scale in zip(self.locs, self.scales, strict=True)
            ]
            outputs.append(torch.vmap(forward)(*weights))
        return aggregated(torch.cat(outputs))


def _chunks(total: int, size: int) -> Iterator[int]:
    for start in range(0, total, size):
        yield min(size, total - start)


def aggregated(logits: Tensor) -> Tensor:
    """Return the log of the mean probabilities over draws."""
    return logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))


# --------------------------------------------------------------------------- MCMC


# --------------------------------------------------------------------------- all weights together


class Joint:
    """A Gaussian over all weights as one vector, the optimiser and the step.

    Covariance `L L^T`, or `diag(scale^2) + F F^T` with a rank. The KL to `N(0, 1)` is in closed
    form, by the determinant lemma for the latter.
    """

    def __init__(self, net: nn.Module, num_points: int, scale: float, rank: int | None) -> None:
        self.net, self.num_points, self.rank = copy.deepcopy(net), num_points, rank
        own = dict(self.net.named_parameters())
        self.names, self.shapes = list(own), [p.shape for p in own.values()]
        flat = torch.cat([p.detach().flatten() for p in own.values()])
        self.loc = flat.clone().requires_grad_()
        self.rho = torch.full_like(flat, math.log(scale)).requires_grad_()
        size = (len(flat), len(flat) if rank is None else rank)
        factor = torch.zeros(size) if rank is None else scale * torch.randn(size)
        self.factor = factor.requires_grad_()
        for parameter in own.values():
            parameter.requires_grad_(False)
        parameters = [self.loc, self.rho, self.factor]
        self.optimizer = torch.optim.Adam(parameters, lr=1e-3, fused=True)

    def step(self, x: Tensor, y: Tensor) -> None:
        """Make one step."""
        self.optimizer.zero_grad()
        scale = self.rho.exp()
        if self.rank is None:
            root = scale[:, None] * (self.factor.tril(-1) + torch.eye(len(scale)))
            weights = self.loc + root @ torch.randn_like(self.loc)
            squares, log_det = root.square().sum(), 2 * self.rho.sum()
        else:
            noise = self.factor @ torch.randn(self.rank)
            weights = self.loc + scale * torch.randn_like(scale) + noise
            white = self.factor / scale[:, None]
            inner = torch.eye(self.rank) + white.mT @ white
            squares = scale.square().sum() + self.factor.square().sum()
            log_det = 2 * self.rho.sum() + torch.linalg.slogdet(inner).logabsdet
        kl = 0.5 * (squares + self.loc.square().sum() - len(scale) - log_det)
        parts = weights.split([shape.numel() for shape in self.shapes])
        drawn = {n: p.view(s) for n, p, s in zip(self.names, parts, self.shapes, strict=True)}
        nll = F.cross_entropy(functional_call(self.net, drawn, (x,)), y)
        (nll + kl / self.num_points).backward()
        self.optimizer.step()
