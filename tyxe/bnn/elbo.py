"""The terms of the ELBO, expected log-likelihood and KL, for any guide and model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import pyro.distributions as dist
import pyro.poutine as poutine
import torch
import torch.distributions as td
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import Message
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from tyxe.bnn.predict import SupervisedBNN
from tyxe.distributions import JointMarginal, independent_moments
from tyxe.distributions.normal_kl import AddedKL
from tyxe.guides import Guide
from tyxe.guides.kl import is_joint, log_prob_of, sum_of_kls
from tyxe.likelihoods import Likelihood
from tyxe.poutine import Draw
from tyxe.poutine.linear_map import LinearMapMessenger
from tyxe.threads import handlers


class ElboTerms(NamedTuple):
    """One estimate of the two terms of the ELBO, `data - kl`.

    Attributes:
        data: expected log-likelihood, in nats, scaled to the whole data set.
        kl: divergence of the guide from the prior, in nats.
        points: number of data points of the batch that count: a sum, where there are weights.
        values: the guide's draws by site.
    """

    data: Tensor
    kl: Tensor
    points: int | Tensor
    values: dict[str, Tensor]


def elbo_terms(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    closed_form_kl: bool = True,
    **kwargs: Any,
) -> ElboTerms:
    """Estimate both terms of the ELBO from one draw of the guide.

    `sum_n E_q log p(y_n | f(x_n, w)) - KL(q || p)` [T 4.6, VL 10]. The terms of a site are scaled
    and masked as by plates and other handlers. The KL of a latent site is in closed form where
    `torch.distributions.kl` knows the pair, else `log q(w) - log p(w)` at the draw; sites that a
    `JointDistribution` couples, as posterior or prior, have one KL together. The result equals that
    of Pyro's `Trace_ELBO` (without closed forms) and `TraceMeanField_ELBO` on the same draws,
    except that the latter leaves out the log-density of deltas, which has the Jacobians of Pyro's
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
        if name not in guide_trace.nodes:
            raise ValueError(
                f"the guide does not sample {name!r}; it samples "
                f"{', '.join(n for n, _ in latents) or 'nothing'}"
            )
    values = {name: site["value"] for name, site in latents}
    check_gradients(values)
    return ElboTerms(data, torch.as_tensor(kl), count, values)


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
        total = total + log_prob_of(site, site["infer"].get("is_bounded", False))
        # Without a batch, a site is the only data point, or a factor or deterministic site.
        alone = 1 if len(observed) == 1 else 0
        rows = site["fn"].batch_shape[-1] if site["fn"].batch_shape else alone
        rows = site["mask"].sum() if isinstance(site["mask"], Tensor) else rows
        count = count + site["infer"].get("points", rows)
    return torch.as_tensor(total), count


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


# --------------------------------------------------------------------------- without a trace

Posterior = Mapping[str, td.Distribution]


# As the package has them, whatever is assigned to the classes later.
_MODEL, _LIKELIHOOD = SupervisedBNN.model, (Likelihood.forward, Likelihood.sample_latents)


def runs_own_programs(bnn: Any, guide: Callable[..., Any], parts: Iterable[nn.Module]) -> bool:
    """Say whether model and guide of a `SupervisedBNN` are the package's, the latter `guide`.

    `parts` are modules that the guide calls; a hook, or a forward of one of them alone, is a change
    of the program.
    """
    kind, likelihood = type(bnn), type(bnn.likelihood)
    own = kind.model is _MODEL and kind.guide is guide
    own = own and (likelihood.forward, likelihood.sample_latents) == _LIKELIHOOD
    called = (*parts, bnn.likelihood, bnn.net_prior)
    return own and not {"model", "guide"} & bnn.__dict__.keys() and all(map(_is_as_made, called))


def _is_as_made(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks
    return not hooks and "forward" not in module.__dict__


def statements_of(bnn: Any, terms: ElboTerms) -> set[str]:
    """Return the names of the samples of model and guide, where these are the package's own."""
    prefix, latents = bnn.likelihood.prefix, bnn.likelihood.latent_priors()
    own = {f"{prefix}.{name}" for name in latents} | {*bnn.likelihood.statements}
    return own | {bnn.net_prior.prefix + name for name in bnn.net_prior.names()} | {*terms.values}


class Names(Messenger):
    """A handler that collects the names of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def _pyro_sample(self, msg: Message) -> None:
        self.found.add(msg["name"])


def untraced_terms(
    bnn: Any, inputs: Any, targets: Any, closed_form_kl: bool
) -> tuple[ElboTerms, AddedKL] | None:
    """Return what `elbo_terms` does for a BNN's own programs, without Pyro's traces.

    The numbers drawn are the same. A part of the KL has no graph: its gradients are for the caller
    to add, after the backward.

    Returns:
        None where traces are needed: handlers that are not of linear maps alone, a prior that is a
        program or holds several sites, programs, guides or hooks of the user's, statements in the
        net, which has run once then.
    """
    priors = bnn.net_prior.fixed()
    if priors is None or not all(map(_is_of_linear_maps, handlers())):
        return None
    posterior = bnn.own_posterior()  # the last, because some guides take turns
    if posterior is None:
        return None
    sites = {site["name"]: site for site in _sampled(posterior)}
    values = {name: site["value"] for name, site in sites.items() if name in posterior}
    with Names() as names:
        predictions = bnn.run_net(values, inputs)
    if names.found:
        return None  # statements that only some forwards have
    observed = bnn.likelihood.observed_site(predictions, targets, values)
    infer = observed["infer"]
    data = log_prob_of(observed, infer["is_bounded"])
    latents = bnn.likelihood.latent_priors().items()
    priors |= {f"{bnn.likelihood.prefix}.{name}": prior for name, prior in latents}
    models = {name: _site(name, prior, values[name]) for name, prior in priors.items()}
    pairs = {name: (site, models.get(name)) for name, site in sites.items()}
    added = AddedKL()
    kl = sum_of_kls(pairs, closed_form_kl, added)
    kl = torch.as_tensor(kl + added.value() if len(added) else kl)
    check_gradients(values)
    points = infer.get("points", infer.get("kept", len(observed["value"])))
    drawn = {name: site["value"] for name, site in sites.items()}
    return ElboTerms(data, kl, points, drawn), added


# Messages that steps without traces raise as well.
_RAISED = {"_pyro_linear_map", "_pyro_lazy", "_pyro_substitute_site", "_pyro_post_draw_value"}


def _is_of_linear_maps(handler: Any) -> bool:
    kind: Any = type(handler)
    return isinstance(handler, LinearMapMessenger) and _adds_nothing(kind)


@functools.cache
def _adds_nothing(kind: type) -> bool:
    """Say whether handlers of a kind do to samples what all handlers of linear maps do."""
    base = LinearMapMessenger
    asked = {name for name in dir(kind) if name.startswith("_pyro_")} - _RAISED
    asked |= {"_process_message", "_postprocess_message"}
    return all(getattr(kind, name) is getattr(base, name, None) for name in asked)


def _sampled(posterior: Posterior) -> Iterator[dict[str, Any]]:
    """Yield a site for each posterior, at a draw, and one for each joint posterior before them."""
    values = Guide.sample_from(posterior)
    joints = {q.joint.name: q.joint for q in posterior.values() if isinstance(q, JointMarginal)}
    for name, joint in joints.items():
        yield _site(name, joint, joint.flatten(values), is_auxiliary=True)
    for name, q in posterior.items():
        if isinstance(q, JointMarginal):
            q = dist.Delta(values[name], event_dim=values[name].dim())
        yield _site(name, q, values[name])


def _site(name: str, fn: Any, value: Tensor, is_auxiliary: bool = False) -> dict[str, Any]:
    infer = {"is_auxiliary": is_auxiliary}
    return {"name": name, "fn": fn, "value": value, "scale": 1.0, "mask": None, "infer": infer}
