"""The terms of the ELBO, expected log-likelihood and KL, for any guide and model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pyro.poutine as poutine
import torch
from pyro.poutine import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from tyxe import check
from tyxe.distributions import independent_moments
from tyxe.guides.kl import is_joint, log_prob_of, sum_of_kls
from tyxe.poutine import Draw
from tyxe.util import Inputs


class ElboTerms(NamedTuple):
    """One estimate of the two terms of the ELBO, `data - kl`.

    Attributes:
        data: expected log-likelihood, in nats, scaled to the whole data set.
        kl: divergence of the guide from the prior, in nats.
        points: number of data points of the batch that count, or the sum of their weights.
        values: the guide's draws by site.
    """

    data: Tensor
    kl: Tensor
    points: int | Tensor
    values: dict[str, Tensor]


@check.arguments
def elbo_terms(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    closed_form_kl: bool = True,
    **kwargs: Any,
) -> ElboTerms:
    """Estimate both terms of the ELBO from one draw of the guide.

    `sum_n E_q log p(y_n | f(x_n, w)) - KL(q || p)` [T 4.6, VL 10]. The terms of a site are scaled
    and masked as by plates and other handlers. The KL of a latent site is in closed form if
    `torch.distributions.kl` knows the pair, and otherwise `log q(w) - log p(w)` at the draw. Sites
    that a `JointDistribution` couples, as posterior or prior, have one common KL. The result equals
    that of Pyro's `Trace_ELBO` (without closed forms) and `TraceMeanField_ELBO` on the same draws.
    But the latter leaves out the log-density of deltas, which holds the Jacobians of Pyro's
    autoguides on constrained sites.

    The terms are differentiable in the parameters of model and guide.

    Args:
        model: a Pyro program with observed sites, called with `args` and `kwargs`.
        guide: a Pyro program that samples the model's latent sites, called with the same.
        closed_form_kl: use closed forms of the KL where they exist.

    Raises:
        ValueError: guide and model have different sites; a distribution lacks the rsample that
            gradients need; a sampled KL of a discrete site; coupled sites with different scales.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> def model():
        ...     w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal(w, 1.0), obs=torch.tensor(0.5))
        >>> def guide():
        ...     pyro.sample("w", dist.Normal(0.5, 0.5))
        >>> elbo_terms(model, guide).kl
        tensor(0.4431)
    """
    return draw_terms(model, guide, *args, closed_form_kl=closed_form_kl, **kwargs)


def draw_terms(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    closed_form_kl: bool,
    **kwargs: Any,
) -> ElboTerms:
    """Compute `elbo_terms` without checking its arguments in every step of a fit."""
    # A program that is wrapped in a trace raises other errors than its own, with a table of shapes.
    with poutine.trace() as guide_messenger:
        guide(*args, **kwargs)
    guide_trace = guide_messenger.trace
    with poutine.trace() as model_messenger, poutine.replay(trace=guide_trace):
        model(*args, **kwargs)
    model_trace = model_messenger.trace
    latents = _samples(guide_trace, observed=False)
    _check_guide(latents, closed_form_kl)
    data, count = data_term(model_trace)
    pairs = {name: (site, model_trace.nodes.get(name)) for name, site in latents}
    kl = sum_of_kls(pairs, closed_form_kl)
    for name, _ in _samples(model_trace, observed=False):
        check_samples(name, pairs)
    values = {name: site["value"] for name, site in latents}
    check_gradients(values)
    return ElboTerms(data, torch.as_tensor(kl), count, values)


class MeanWeight:
    """How much points weigh on average in the steps so far, where some have weights or are missing.

    A data term is a mean by the weights of its batch. Where these are heavier than others, each
    point would count for less than in another batch, and small batches would lose the weights.
    Likewise a point beside missing ones would count for more.
    """

    def __init__(self, likelihood: Any) -> None:
        self._likelihood = likelihood
        self.sums = [0.0, 0.0]  # of weights, and of points

    def of(self, targets: Any) -> list[float]:
        """Return the sum of a batch's weights, and its number of points, missing ones included."""
        return [float(self._likelihood.count(targets)), float(len(targets))]

    def load(self, weight: float, points: float) -> float | None:
        """Return how much a step's points weigh in units of those of all steps, itself included.

        It is None where points weigh 1 on average, in these as in all.
        """
        weights, number = self.sums[0] + weight, self.sums[1] + points
        if weights == number and weight == points:
            return None
        return weight * number / (points * weights) if weight else 1.0

    def add(self, weight: float, points: float) -> None:
        """Count a step."""
        self.sums = [self.sums[0] + weight, self.sums[1] + points]

    def load_of(self, targets: Any) -> float | None:
        """Return the `load` of a step on one batch, and count it."""
        counts = self.of(targets)
        found = self.load(*counts)
        self.add(*counts)
        return found


class Objective(nn.Module):
    """The loss of one draw, `(beta KL - data) / N / num_particles`, as a module to be wrapped.

    `bnn` is a `SupervisedBNN` with a `_guide` program. `terms` are those of the latest forward,
    with their graph, until `take_terms` removes them.
    """

    def __init__(self, bnn: Any, closed_form_kl: bool, num_particles: int) -> None:
        super().__init__()
        self.bnn = bnn
        self.closed_form_kl, self.num_particles = closed_form_kl, num_particles
        self.load = 1.0  # for what takes gradients of `data_at` itself
        self.terms: ElboTerms | None = None

    def forward(
        self, inputs: Inputs, targets: Tensor, beta: float, load: float | Tensor | None = None
    ) -> Tensor:
        """Return one draw's part of the loss, in nats per data point.

        `load` multiplies the data term, see `MeanWeight`.
        """
        own = self.bnn.model, self.bnn._guide
        self.terms = terms = draw_terms(*own, inputs, targets, closed_form_kl=self.closed_form_kl)
        scale = 1.0 / (self.bnn.likelihood.dataset_size * self.num_particles)
        data = terms.data if load is None else load * terms.data
        return (beta * terms.kl - data) * scale

    def data_at(self, values: Any, inputs: Inputs, targets: Any) -> tuple[Tensor, Any]:
        """Return the log-likelihood, scaled to the data set, at sites' values; and the points."""
        with poutine.trace() as messenger:
            self.bnn.likelihood(self.bnn._run_net(values, inputs), targets)
        return data_term(messenger.trace)

    def take_terms(self) -> ElboTerms:
        """Return the terms of the latest forward, and remove them."""
        terms, self.terms = self.terms, None
        assert terms is not None
        return terms


def _samples(trace: Trace, observed: bool) -> list[tuple[str, Any]]:
    return [
        (name, site)
        for name, site in trace.nodes.items()
        if site["type"] == "sample"
        and site["is_observed"] == observed
        and not site_is_subsample(site)
    ]


def data_term(trace: Trace) -> tuple[Tensor, int | Tensor]:
    """Return the log-density of a trace's observed sites, and the number of their points."""
    total: Any = 0.0
    count: Any = 0
    observed = _samples(trace, observed=True)
    for _, site in observed:
        total = total + log_prob_of(site)
        # Without a batch, a site is the only data point, or a factor or deterministic site.
        alone = 1 if len(observed) == 1 else 0
        rows = site["fn"].batch_shape[-1] if site["fn"].batch_shape else alone
        rows = site["mask"].sum() if isinstance(site["mask"], Tensor) else rows
        count = count + site["infer"].get("points", rows)
    return torch.as_tensor(total), count


def check_samples(name: str, found: Mapping[str, Any]) -> None:
    """Raise a ValueError if a site is not among those that the guide samples."""
    if name not in found:
        raise ValueError(
            f"the guide does not sample {name!r}; it samples {', '.join(found) or 'nothing'}"
        )


def check_gradients(values: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if gradients are recorded and the value of a lazy draw has none.

    `values` are draws by site, after the net has used them.
    """
    for name, value in values.items():
        if torch.is_grad_enabled() and isinstance(value, Draw) and value.lost_its_gradient:
            raise ValueError(
                f"a value of {name!r} was drawn, and its distribution has no rsample, so no "
                "gradient reaches its parameters: only linear maps under tyxe.poutine."
                "local_reparameterization() spare the draw. For other uses of a binary weight "
                "(norms, embeddings, recurrent cells, hold_sample) train with "
                "AutoBernoulli(relaxed=0.5), or hide the parameter from the prior"
            )


def _check_guide(sites: list[tuple[str, Any]], closed_form_kl: bool) -> None:
    """Raise where the estimate, or its gradient, would be silently wrong."""
    for name, site in sites:
        q = site["fn"]
        if not (q.has_rsample or isinstance(site["value"], Draw)) and torch.is_grad_enabled():
            mend = "use one that has"
            if independent_moments(q) is not None:
                mend = "train inside `with tyxe.poutine.local_reparameterization():`"
            raise ValueError(
                f"the guide's distribution of {name!r}, {type(q).__name__}, has no rsample, so "
                f"no gradient reaches its parameters; {mend}"
            )
        if not closed_form_kl and q.support.is_discrete:
            raise ValueError(
                f"{name!r} is discrete, and its KL cannot be sampled with gradients; leave "
                "closed_form_kl=True"
            )
    joint = {n for _, site in sites if is_joint(site) for n in (site["name"], *site["fn"].names)}
    rest = [site for name, site in sites if name not in joint]
    auxiliary = [site["scale"] for site in rest if site["infer"].get("is_auxiliary")]
    scales = [site["scale"] for site in rest]
    if auxiliary and any(scale is not scales[0] and scale != scales[0] for scale in scales):
        raise ValueError(
            "this guide draws its sites from a variable of its own, so their KL cannot be scaled "
            "one by one; use tyxe.guides.AutoNormal with selective_scale"
        )
