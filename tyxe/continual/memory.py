"""What keeps earlier tasks in a net: coresets, and penalties on weights that mattered."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from tyxe import check
from tyxe.bnn import BNN
from tyxe.continual.heads import Heads, check_shapes
from tyxe.errors import warn
from tyxe.util import at_least_float32, pyro_sample_sites


def k_center(inputs: Tensor, size: int) -> Tensor:
    """Return indices, `(size,)`, of points that cover the others, starting from a random one.

    Each is the point farthest from those before it, in Euclidean distance. The largest distance of
    any point to the nearest of them is at most twice the smallest possible. It takes `n * size`
    distances.

    Reference:
        Gonzalez (1985), Clustering to minimize the maximum intercluster distance; Nguyen et al.
        (2018), Variational continual learning, 3.
    """
    # Differences of unsigned bytes would wrap around, and squares overflow in half precision.
    points = at_least_float32(inputs.reshape(len(inputs), -1))
    chosen = [int(torch.randint(len(points), (), device="cpu"))]
    nearest = points.new_full((len(points),), torch.inf)
    while len(chosen) < size:
        nearest = nearest.minimum((points - points[chosen[-1]]).square().sum(-1))
        # Below zero, the distance of points that coincide with a chosen one: none is chosen twice.
        nearest[chosen[-1]] = -1.0
        chosen.append(int(nearest.argmax()))
    return torch.tensor(chosen, device=inputs.device)


CORESETS: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "random": lambda inputs, size: torch.randperm(len(inputs), device=inputs.device)[:size],
    "k-center": k_center,
}


@check.arguments
def coreset_indices(inputs: Tensor, size: int, method: str = "random") -> Tensor:
    """Choose a coreset.

    Args:
        inputs: the inputs of a task, `(n, ...)`.
        size: number of points.
        method: `"random"`, or `"k-center"`: each point is the one farthest from those before it.

    Returns:
        Indices, `(size,)`.

    Raises:
        ValueError: an unknown method; a size below 1, or not below that of the task.

    Example:
        >>> len(coreset_indices(torch.randn(20, 3), 4, "k-center").unique())
        4
    """
    check.choice("method", method, CORESETS)
    hint = ": a coreset has at least one point of the task, and leaves some for training"
    check.number("size", check.count("size", size, 0), above=0, below=len(inputs), hint=hint)
    return CORESETS[method](inputs, size)


@dataclass(frozen=True)
class GaussianPenalty:
    r"""`1/2 sum_i lambda_i (w_i - m_i)^2`: minus the log-density of a Normal, up to a constant.

    `means` are `m` and `precisions` `lambda`, by name. The caller decides whether to add the
    penalty to a sum or to a mean over data.
    """

    means: Mapping[str, Tensor]
    precisions: Mapping[str, Tensor]

    def __call__(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the penalty of weights by name, differentiable in them."""
        squares = [
            (self.precisions[name] * (values[name] - mean).square()).sum()
            for name, mean in self.means.items()
        ]
        return torch.stack(squares).sum() / 2

    def gradient(self, name: str, value: Tensor) -> Tensor:
        """Return `lambda (w - m)` of one weight."""
        return self.precisions[name] * (value - self.means[name])


class SynapticIntelligence:
    r"""The penalty `c sum Omega (w - w*)^2`, with `Omega` summed up while the net is trained.

    A task adds `max(0, omega) / (Delta^2 + xi)` to a weight's `Omega`, where `Delta` is how far the
    weight has moved, and `omega = -sum_steps g dw` how much its steps have reduced the loss; `g` is
    the gradient of the task's loss alone. This loss is the *mean* over data (nats per point), as
    in `fit`, and `c` is relative to it: for a sum over `N` points the penalty corresponds to a
    Normal prior of precision `2 c N Omega`. It is for maximum likelihood: no weight may be a site.

    `watch` each optimiser once, fit with it, and `update` at a task's end.

    Args:
        bnn: a wrapper whose prior hides everything.
        c: strength of the penalty.
        xi: keeps the quotient finite; positive.
        heads: parts that each task has for itself; they are not penalised.

    Attributes:
        penalty: that on the mean loss, with precisions `2 c Omega` about the last task's weights.

    Raises:
        ValueError: the BNN has sites; `c` or `xi` is not positive.

    Reference:
        Zenke, Poole, Ganguli (2017), Continual learning through synaptic intelligence, eq. 4-5.

    Example:
        >>> import pyro.distributions as dist, tyxe
        >>> bnn = tyxe.VariationalBNN(
        ...     torch.nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True),
        ...     tyxe.likelihoods.HomoskedasticGaussian(3, scale=1.0))
        >>> intelligence = SynapticIntelligence(bnn, c=1.0)
        >>> adam = intelligence.watch(torch.optim.Adam(bnn.parameters()))
        >>> _ = bnn.fit([(torch.eye(3, 2), torch.ones(3, 1))], adam, 5, progress=False)
        >>> intelligence.update()
        >>> bool((intelligence.penalty.precisions["net.weight"] > 0).all())
        True
    """

    @check.arguments
    def __init__(
        self, bnn: BNN, c: float = 0.1, xi: float = 0.1, heads: Heads | None = None
    ) -> None:
        if sites := pyro_sample_sites(bnn.net):
            raise ValueError(
                f"synaptic intelligence holds plain weights, but {sites[0]!r} is a site of the "
                "prior: build the BNN with hide_all=True"
            )
        self.c, self.xi = check.number("c", c, above=0), check.number("xi", xi, above=0)
        own = set() if heads is None else {f"net.{name}" for name in heads.parameter_names()}
        self._parameters = {
            name: parameter
            for name, parameter in bnn.named_parameters()
            if parameter.requires_grad and name not in own
        }
        self._start = self._values()
        self._omega = {name: torch.zeros_like(value) for name, value in self._start.items()}
        self._importance = copy.deepcopy(self._omega)
        self._watched: WeakSet[Optimizer] = WeakSet()
        self.penalty = self._formed()

    def _formed(self) -> GaussianPenalty:
        precisions = {name: 2 * self.c * value for name, value in self._importance.items()}
        return GaussianPenalty(self._start, precisions)

    @check.arguments
    def watch(self, optimizer: Optimizer) -> Optimizer:
        """Add the penalty's gradient to every step of an optimiser, and sum up `omega`.

        The penalty is that of the tasks ended so far, so an optimiser may serve one task or all.
        Where `fit` clips gradients, it clips the task's gradient alone.

        Returns:
            The optimiser.

        Raises:
            ValueError: it is watched already.
        """
        if optimizer in self._watched:
            raise ValueError("this optimiser is watched already; each needs it once")
        self._watched.add(optimizer)
        noted: dict[str, tuple[Tensor, Tensor]] = {}

        @torch.no_grad()
        def note(*_: Any) -> None:
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    noted[name] = parameter.grad.clone(), parameter.detach().clone()
                    parameter.grad += self.penalty.gradient(name, parameter)

        @torch.no_grad()
        def gather(*_: Any) -> None:
            for name, (gradient, before) in noted.items():
                self._omega[name] -= gradient * (self._parameters[name] - before)
            noted.clear()

        optimizer.register_step_pre_hook(note)
        optimizer.register_step_post_hook(gather)
        return optimizer

    def update(self) -> None:
        """End a task: its `omega` is added to the penalty, and its weights become `w*`.

        Warns if no step of a watched optimiser was recorded since the last update.
        """
        if not any(bool(omega.any()) for omega in self._omega.values()):
            warn(
                "no step of a watched optimiser was noted since the last update, so this task's "
                "weights are not held: fit with intelligence.watch(optimizer)",
            )
        now = self._values()
        for name, value in now.items():
            moved, omega = value - self._start[name], self._omega[name]
            self._importance[name] += omega.clamp(min=0) / (moved.square() + self.xi)
            omega.zero_()
        self._start = now
        self.penalty = self._formed()

    def _values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._parameters.items()}

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return `omega`, `Omega` and `w*`."""
        state = {"omega": self._omega, "importance": self._importance, "start": self._start}
        return copy.deepcopy(state)

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load what `state_dict` returned; optimisers that are watched stay so.

        Raises:
            ValueError: it is of other parameters or shapes; nothing is changed.
        """
        for part in ("omega", "importance", "start"):
            check_shapes("the state is of", state[part], self._parameters)
        self._omega, self._importance, self._start = (
            {name: state[part][name].to(p, copy=True) for name, p in self._parameters.items()}
            for part in ("omega", "importance", "start")
        )
        self.penalty = self._formed()
