"""Inducing weights by hand (FFG-U), as fast as plain PyTorch lets us write them.

Every linear and convolution layer has `M x M` inducing weights with independent Normals, whitened;
the prior of a layer's weights (its bias is one more column) is `N(0, 1 / fan_in)`. All layers have
the same `M`, so factorisations and the inducing weights' KL are one batched call each.
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from _by_hand import aggregated
from torch import Tensor, nn
from torch.func import functional_call

Factors = list[tuple[Tensor, Tensor]]


class InducingByHand:
    """Parameters, draws, the step and predictions.

    Args:
        net: is copied; layers with their names, norms as they are.
        num_points: size of the data set.
        m: rows and columns of each layer's inducing weights.
        max_lambda: cap of the conditional posteriors' scales.
        max_scale: cap of the inducing weights' standard deviations.
    """

    def __init__(
        self, net: nn.Module, num_points: int, m: int, max_lambda: float, max_scale: float
    ) -> None:
        self.net, self.num_points, self.m = copy.deepcopy(net), num_points, m
        self.caps = max_lambda, max_scale
        self.layers = {
            name: module
            for name, module in self.net.named_modules()
            if isinstance(module, nn.Linear | nn.Conv2d)
        }
        self.shapes, self.fans = [], []
        for module in self.layers.values():
            rows, fan_in = len(module.weight), module.weight[0].numel()
            self.shapes.append((rows, fan_in + (module.bias is not None)))
            self.fans.append(fan_in)
            module.requires_grad_(False)
        count = len(self.shapes)
        # Rows of all layers, then columns of all layers.
        self.maps = [
            _leaf(torch.randn(m, d) / m**0.5) for side in (0, 1) for d in self._sizes(side)
        ]
        self.log_d = _leaf(torch.full((2 * count, m), math.log(1e-3)))
        self.raw_lambda = _leaf(torch.full((count,), _logit(1e-3 / max_lambda)))
        self.loc = _leaf(torch.randn(count, m, m))
        self.raw_scale = _leaf(torch.full((count, m, m), _logit(math.sqrt(1e-3) / max_scale)))
        rest = [p for p in self.net.parameters() if p.requires_grad]
        own = [*self.maps, self.log_d, self.raw_lambda, self.loc, self.raw_scale]
        self.optimizer = torch.optim.Adam([*own, *rest], lr=1e-3, fused=True)

    def _sizes(self, side: int) -> list[int]:
        return [shape[side] for shape in self.shapes]

    # ------------------------------------------------------------------ draws

    def factors(self) -> Factors:
        """Return `(B, H)` of rows, then of columns, by layer: one batched Cholesky for all."""
        wide = [z.double() for z in self.maps]
        d = torch.diag_embed(self.log_d.double().exp())
        psi = torch.stack([z @ z.mT for z in wide]) + d.square()
        trils = torch.linalg.cholesky_ex(psi)[0]
        residuals = torch.linalg.solve_triangular(trils, d, upper=False).to(self.loc)
        bases = [
            torch.linalg.solve_triangular(tril, z, upper=False).to(self.loc).mT
            for tril, z in zip(trils, wide, strict=True)
        ]
        return list(zip(bases, residuals, strict=True))

    def scales(self) -> tuple[Tensor, Tensor]:
        """Return the logarithms of `lambda` by layer, and of the standard deviations of `U`."""
        max_lambda, max_scale = self.caps
        log_lambda = F.logsigmoid(self.raw_lambda) + math.log(max_lambda)
        return log_lambda, F.logsigmoid(self.raw_scale) + math.log(max_scale)

    def draw(self, factors: Factors, scales: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Draw all weights, by name."""
        lambdas, u_scales = scales[0].exp(), scales[1].exp()
        count, values = len(self.shapes), {}
        for i, (name, module) in enumerate(self.layers.items()):
            (b_r, h_r), (b_c, h_c) = factors[i], factors[count + i]
            u = torch.addcmul(self.loc[i], u_scales[i], torch.randn_like(self.loc[i]))
            rows, columns = self.shapes[i]
            shapes = (rows, columns), (rows, self.m), (self.m, self.m)
            e1, e2, e3 = (lambdas[i] * u.new_empty(shape).normal_() for shape in shapes)
            prior = b_r.mT @ (e1 @ b_c + e2 @ h_c.mT) + h_r @ e3
            s = self.fans[i] ** -0.5
            drawn = torch.addmm(e1, b_r @ (u - prior), b_c.mT, beta=s, alpha=s)
            values[f"{name}.weight"] = drawn[:, : self.fans[i]].view_as(module.weight)
            if module.bias is not None:
                values[f"{name}.bias"] = drawn[:, -1]
        return values

    def kl(self, scales: tuple[Tensor, Tensor]) -> Tensor:
        """Return `R(lambda) + KL[q(U) || p(U)]` of all layers."""
        log_lambda, log_scale = scales
        sizes = self.loc.new_tensor([rows * columns for rows, columns in self.shapes])
        conditional = sizes @ ((2 * log_lambda).exp() / 2 - log_lambda - 0.5)
        u = ((2 * log_scale).exp() + self.loc.square() - 1) / 2 - log_scale
        return conditional + u.sum()

    # ------------------------------------------------------------------ training, prediction

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy of one draw plus `KL / N`."""
        scales = self.scales()
        output = functional_call(self.net, self.draw(self.factors(), scales), (x,))
        return F.cross_entropy(output, y) + self.kl(scales) / self.num_points

    def step(self, x: Tensor, y: Tensor) -> None:
        """Make one step."""
        self.optimizer.zero_grad()
        self.loss(x, y).backward()
        self.optimizer.step()

    @torch.no_grad()
    def predict(self, x: Tensor, count: int) -> Tensor:
        """Average the probabilities of some draws, which share the factors."""
        net = self.net.eval()
        factors, scales = self.factors(), self.scales()
        outputs = [functional_call(net, self.draw(factors, scales), (x,)) for _ in range(count)]
        net.train()
        return aggregated(torch.stack(outputs))


def _leaf(start: Tensor) -> Tensor:
    return start.requires_grad_()


def _logit(ratio: float) -> float:
    return math.log(ratio / (1 - ratio))
