"""The Laplace approximation of one small CNN under softmax, as an engineer would write it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]
Factors = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Eigen:
    """The eigenbases of a layer's factors, and the products of their eigenvalues `(out, in)`."""

    gradient_basis: Tensor
    input_basis: Tensor
    values: Tensor


@dataclass(frozen=True)
class Recorded:
    """A forward: the outputs, and each layer's input (with its one) and output.

    Inputs are `(n, in + 1, positions)` for convolutions and `(n, in + 1)` for linear layers.
    """

    outputs: Tensor
    inputs: dict[str, Tensor]
    layers: dict[str, Tensor]

    def gradients(self, cotangent: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradient in each layer's output, `(n, out, positions)` or `(n, out)`."""
        found = torch.autograd.grad(
            self.outputs, list(self.layers.values()), cotangent, retain_graph=True
        )
        for name, gradient in zip(self.layers, found, strict=True):
            yield name, gradient.flatten(2) if gradient.dim() > 2 else gradient


def windows(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Return the patches of a convolution of stride one, and a one, `(n, in + 1, positions)`.

    A view of windows and one copy is a third of the time of `F.unfold`.
    """
    (height, width), (top, left) = layer.kernel_size, layer.padding
    padded = F.pad(x, (left, left, top, top))
    view = padded.unfold(2, height, 1).unfold(3, width, 1).permute(0, 1, 4, 5, 2, 3)
    fan = view.shape[1:4].numel()
    found = x.new_empty(len(x), fan + 1, *view.shape[-2:])
    found[:, :fan].unflatten(1, view.shape[1:4]).copy_(view)
    found[:, fan] = 1.0
    return found.flatten(2)


def with_one(x: Tensor) -> Tensor:
    """Append the one that a bias multiplies."""
    return torch.cat([x, x.new_ones(len(x), 1)], 1)


def gram(x: Tensor) -> Tensor:
    """Return `sum x x^T` over points, and positions where there are any."""
    return x.mT @ x if x.dim() == 2 else torch.bmm(x, x.mT).sum(0)


def softmax_roots(logits: Tensor) -> Iterator[Tensor]:
    """Yield the columns of the Cholesky factor of `diag(p) - p p^T`, one fewer than classes."""
    probs = logits.softmax(1)
    tails = probs.flip(1).cumsum(1).flip(1).clamp_min(1e-30)
    for k in range(logits.shape[1] - 1):
        scale = (probs[:, k] * tails[:, k + 1] / tails[:, k]).sqrt()
        column = torch.zeros_like(probs)
        column[:, k] = scale
        column[:, k + 1 :] = -(scale / tails[:, k + 1])[:, None] * probs[:, k + 1 :]
        yield column


def sampled_residuals(logits: Tensor) -> Iterator[Tensor]:
    """Yield the gradient of the log-likelihood of one sampled label a point."""
    probs = logits.softmax(1)
    labels = torch.multinomial(probs, 1)
    yield F.one_hot(labels[:, 0], logits.shape[1]) - probs


class HandLaplace:
    """Curvature, evidence and linearised predictive for convolutions and linear layers.

    Args:
        net: ends in a linear layer.
    """

    def __init__(self, net: nn.Sequential) -> None:
        self.net = net
        self.parts = {
            name: layer
            for name, layer in net.named_children()
            if isinstance(layer, nn.Conv2d | nn.Linear)
        }
        self.body, self.head = net[:-1], net[-1]
        self.precision = 1.0

    def record(self, x: Tensor) -> Recorded:
        """Run the net with a hook on each layer."""
        inputs, layers = {}, {}

        def hook(name: str) -> Callable[..., None]:
            def note(layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
                given = args[0].detach()
                is_conv = isinstance(layer, nn.Conv2d)
                inputs[name] = windows(layer, given) if is_conv else with_one(given)
                layers[name] = output

            return note

        handles = [part.register_forward_hook(hook(name)) for name, part in self.parts.items()]
        outputs = self.net(x)
        for handle in handles:
            handle.remove()
        return Recorded(outputs, inputs, layers)

    # ------------------------------------------------------------------ curvature

    def kron(self, batches: Batches, roots: Callable[[Tensor], Iterator[Tensor]]) -> None:
        """Sum the factors over the data, and take their eigenbases."""
        factors: dict[str, list[Tensor]] = {}
        for x, _ in batches:
            seen = self.record(x)
            for name, given in seen.inputs.items():
                positions = given.shape[2] if given.dim() > 2 else 1
                add(factors, name, 0, gram(given) / positions)
            for column in roots(seen.outputs.detach()):
                for name, gradient in seen.gradients(column):
                    add(factors, name, 1, gram(gradient))
        points = sum(len(x) for x, _ in batches)
        self.eigen = {name: eigen(a / points, g) for name, (a, g) in factors.items()}

    def diag(self, batches: Batches, roots: Callable[[Tensor], Iterator[Tensor]]) -> None:
        """Sum the squares of every point's gradients."""
        found = {name: torch.zeros(()) for name in self.parts}
        for x, _ in batches:
            seen = self.record(x)
            squares = {n: a.square() for n, a in seen.inputs.items() if a.dim() == 2}
            for column in roots(seen.outputs.detach()):
                for name, gradient in seen.gradients(column):
                    if name in squares:
                        found[name] = found[name] + gradient.square().mT @ squares[name]
                    else:
                        each = torch.bmm(gradient, seen.inputs[name].mT)
                        found[name] = found[name] + each.square_().sum(0)
        self.diagonal = found

    @torch.no_grad()
    def head_kron(self, batches: Batches) -> None:
        """Sum the last layer's factors: no backward at all."""
        inputs = gradients = torch.zeros(())
        for features, probs in self.features(batches):
            inputs = inputs + gram(features)
            gradients = gradients + probs.sum(0).diag() - probs.mT @ probs
        points = sum(len(x) for x, _ in batches)
        self.head_eigen = eigen(inputs / points, gradients)

    @torch.no_grad()
    def head_full(self, batches: Batches) -> None:
        """Sum the last layer's matrix, a product for each pair of classes."""
        classes, columns = self.head.out_features, self.head.in_features + 1
        total = self.head.weight.new_zeros(classes, columns, classes, columns)
        for features, probs in self.features(batches):
            for c in range(classes):
                for d in range(c + 1):
                    weight = probs[:, c] * (float(c == d) - probs[:, d])
                    total[c, :, d] += (features * weight[:, None]).mT @ features
        for c in range(classes):
            total[:c, :, c] = total[c, :, :c].transpose(0, 1)
        self.head_matrix = total.reshape(classes * columns, -1)

    def features(self, batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the last layer's inputs, and the class probabilities."""
        for x, _ in batches:
            features = self.body(x)
            yield with_one(features), self.head(features).softmax(1)

    # ------------------------------------------------------------------ evidence

    def ascend(self, num_steps: int) -> None:
        """Maximise the evidence in one prior precision, by its logarithm."""
        values = torch.cat([one.values.flatten() for one in self.eigen.values()])
        with torch.no_grad():
            norm = sum(p.square().sum() for p in self.net.parameters())
        log = torch.tensor(math.log(self.precision), requires_grad=True)
        optimizer = torch.optim.Adam([log], lr=0.1, maximize=True)
        for _ in range(num_steps):
            optimizer.zero_grad()
            tau = log.exp()
            (0.5 * (len(values) * log - tau * norm) - 0.5 * (values + tau).log().sum()).backward()
            optimizer.step()
        self.precision = float(log.detach().exp())

    # ------------------------------------------------------------------ predictive

    def predict(self, x: Tensor) -> Tensor:
        """Return class probabilities under the Kronecker posterior, by the probit link."""
        seen = self.record(x)
        classes = seen.outputs.shape[1]
        rows: dict[str, list[Tensor]] = {}
        for c in range(classes):
            cotangent = torch.zeros_like(seen.outputs)
            cotangent[:, c] = 1.0
            for name, gradient in seen.gradients(cotangent):
                rows.setdefault(name, []).append(gradient)
        variance = sum(
            self.layer_variance(self.eigen[name], seen.inputs[name], torch.stack(each, 1))
            for name, each in rows.items()
        )
        return probit(seen.outputs.detach(), variance)

    def layer_variance(self, basis: Eigen, a: Tensor, g: Tensor) -> Tensor:
        """Return one layer's part of the outputs' covariance, `(n, classes, classes)`.

        Args:
            basis: of the layer's factors.
            a: the layer's inputs.
            g: gradients, `(n, classes, out[, positions])`.
        """
        inverse = (basis.values + self.precision).reciprocal()
        if a.dim() == 2:
            rotated = g @ basis.gradient_basis
            each = (a @ basis.input_basis).square() @ inverse.mT
            return (rotated * each[:, None]) @ rotated.mT
        # There are fewer positions than rows of the Jacobian, so inputs are turned first.
        rotated = g.flatten(1, 2) @ (basis.input_basis.mT @ a).mT
        rotated = rotated.unflatten(1, g.shape[1:3])
        white = (basis.gradient_basis.mT @ rotated).mul_(inverse.sqrt()).flatten(2)
        return white @ white.mT

    @torch.no_grad()
    def head_predict_kron(self, x: Tensor) -> Tensor:
        """Return likewise under the last layer's posterior: the Jacobian is its input."""
        features, basis = self.body(x), self.head_eigen
        inverse = (basis.values + self.precision).reciprocal()
        each = (with_one(features) @ basis.input_basis).square() @ inverse.mT
        u = basis.gradient_basis
        return probit(self.head(features), (u * each[:, None]) @ u.mT)

    @torch.no_grad()
    def head_factorize(self) -> None:
        """Take the inverse of the last layer's Cholesky factor, a matrix for each class."""
        size, classes = len(self.head_matrix), self.head.out_features
        identity = torch.eye(size, dtype=self.head_matrix.dtype)
        lower = torch.linalg.cholesky(self.head_matrix + self.precision * identity)
        root = torch.linalg.solve_triangular(lower, identity, upper=False)
        self.head_root = root.mT.reshape(classes, -1, size).contiguous()

    @torch.no_grad()
    def head_predict_full(self, x: Tensor) -> Tensor:
        """Return likewise under the last layer's full posterior."""
        features = self.body(x)
        white = (with_one(features) @ self.head_root).transpose(0, 1)
        return probit(self.head(features), white @ white.mT)


def add(factors: dict[str, list[Tensor]], name: str, which: int, term: Tensor) -> None:
    """Add to one of a layer's two sums."""
    sums = factors.setdefault(name, [torch.zeros(()), torch.zeros(())])
    sums[which] = sums[which] + term


def eigen(inputs: Tensor, gradients: Tensor) -> Eigen:
    """Return eigenbases and products of eigenvalues, in float64 as small ones matter."""
    (d_a, u_a), (d_g, u_g) = (torch.linalg.eigh(f.double()) for f in (inputs, gradients))
    values = torch.outer(d_g.clamp_min(0), d_a.clamp_min(0))
    return Eigen(*(tensor.to(inputs.dtype) for tensor in (u_g, u_a, values)))


def probit(logits: Tensor, covariance: Tensor) -> Tensor:
    """Return probabilities by differences of logits over their standard deviations."""
    own, classes = covariance.diagonal(dim1=1, dim2=2), logits.shape[1]
    variance = own.unsqueeze(2) + own.unsqueeze(1) - 2 * covariance
    scale = (1 + math.pi / 8 * classes / (2 * classes - 2) * variance).sqrt()
    differences = (logits.unsqueeze(1) - logits.unsqueeze(2)) / scale
    return (-differences.logsumexp(2)).softmax(1)
