"""IVON: a mean-field Normal posterior by Newton's method, from gradients at its draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor
from torch.optim import Optimizer

from tyxe import check
from tyxe.check import described
from tyxe.distributions import FactorizedNormal
from tyxe.distributions.normal import gaussian_event
from tyxe.distributions.normal_kl import known_numbers
from tyxe.guides import AutoNormal
from tyxe.threads import handlers
from tyxe.util import without_events

# A site's name, posterior (of the guide's parameters), prior, and the prior's mean and precision.
_Site = tuple[str, FactorizedNormal, td.Distribution, Any, Any]


class IVON(Optimizer):
    r"""Variational online Newton for `VariationalBNN.fit` with `AutoNormal` and Normal priors.

    With `lambda = N / beta` and the prior `N(mu, 1/(lambda delta))` of a weight, a step draws
    `w = m + e` from the guide's `N(m, 1/(lambda (h + delta)))`, and with the gradient `g` of the
    mean loss at `w` sets `hhat = lambda (h + delta) g e`, `gm <- b1 gm + (1 - b1) g`,
    `h <- b2 h + (1 - b2) hhat + 1/2 (1 - b2)^2 (h - hhat)^2 / (h + delta)`, and
    `m <- m - lr (gm / (1 - b1^t) + delta (m - mu)) / (h + delta)`. Parameters without a posterior
    move by `-lr gm / (1 - b1^t)`: SGD with momentum [Shen et al. 2024, algorithm 1].

    Args:
        params: passed by `fit`, to which you give IVON as a `functools.partial`.
        lr: learning rate; .1 is a usual start.
        betas: `b1` and `b2`; `h` remembers its start for `1/(1 - b2)` steps; use .995 to .999 for
            few steps.
        hess_init: start of `h`, in nats per point. Standard deviations start at `1/sqrt(N h)`,
            which should be a few percent of the weights: .1 to 1 for classes and 50,000 points,
            more for fewer.

    Raises:
        TypeError, ValueError: `lr` or `hess_init` not positive, `betas` not two in [0, 1).

    Example:
        >>> import functools, pyro.distributions as dist, tyxe
        >>> bnn = tyxe.VariationalBNN(
        ...     torch.nn.Linear(1, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(5, scale=1.0), tyxe.guides.AutoNormal)
        >>> optim = functools.partial(IVON, lr=0.1, betas=(0.9, 0.99))
        >>> history = bnn.fit([(torch.ones(5, 1), torch.ones(5, 1))], optim, num_epochs=2)
    """

    # By means. The latest draws' lambda until their step, and that of the scales in the guide.
    _sites: dict[Tensor, _Site]
    _drawn: float | None = None
    _written: float | None = None

    def __init__(
        self, params: Any, lr: float, betas: Any = (0.9, 0.99999), hess_init: float = 1.0
    ) -> None:
        first, second = (check.number("one of betas", beta, least=0, below=1) for beta in betas)
        options = {
            "lr": check.number("lr", lr, above=0),
            "betas": (first, second),
            "hess_init": check.number("hess_init", hess_init, above=0),
        }
        super().__init__(params, options)

    def particle_of(self, objective: Any, options: Any) -> Callable[..., tuple[Any, ...]]:
        """Return a fit's particle, see `ParticleOptimizer`; a ValueError says what IVON needs."""
        self._sites = _sites_of(objective.bnn, options, self.param_groups)
        self._drawn = self._written = None
        for group in self.param_groups:
            for p in self._sites.keys() & {*group["params"]}:
                if not self.state[p]:
                    self.state[p].update(step=0, momentum=torch.zeros_like(p))
                    self.state[p]["hessian"] = torch.full_like(p, group["hess_init"])
        points = objective.bnn.likelihood.dataset_size

        def particle(inputs: Any, targets: Tensor, beta: float) -> tuple[Any, ...]:
            check.number("beta", beta, above=0, hint=", the temperature of IVON")
            kl, values, deviations = self._draw(points / beta)
            data, count = objective.data_at(values, inputs, targets)
            (data * (-objective.load / (points * options.num_particles))).backward()
            for loc, e in deviations.items():
                name, q, *_ = self._sites[loc]
                g = values[name].grad
                g = torch.zeros_like(e) if g is None else g  # the net has not used the weight
                for p, found in ((loc, g), (q.log_scale, e.mul_(g))):
                    p.grad = found if p.grad is None else p.grad.add_(found)
            self._drawn = points / beta
            return data, kl, count, values

        return particle

    @torch.no_grad()
    def _draw(self, size: float) -> tuple[Any, dict[str, Tensor], dict[Tensor, Tensor]]:
        kl, values, deviations = torch.zeros((), device="cpu"), {}, {}
        for loc, (name, own, prior, _, precision) in self._sites.items():
            log_scale = own.log_scale.detach()
            if self._written != size:
                log_scale = self.state[loc]["hessian"] + precision / size
                log_scale.mul_(size).log_().mul_(-0.5)
            q = FactorizedNormal(loc.detach(), log_scale)
            kl = kl + td.kl_divergence(q, prior)
            deviations[loc] = torch.randn_like(q.loc).mul_(q.scale)
            values[name] = (q.loc + deviations[loc]).requires_grad_()
        return kl, values, deviations

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the update; without a particle, as in a loop of your own, a RuntimeError."""
        drawn, self._drawn = self._drawn, None
        size = check.known(
            drawn,
            "IVON takes gradients at draws of its own: give it to VariationalBNN.fit, as "
            "functools.partial(tyxe.optim.IVON, lr=...), and call no step()",
        )
        scales = {q.log_scale for _, q, *_ in self._sites.values()}
        for group in self.param_groups:
            lr, (b1, b2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None or p in scales:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, momentum=torch.zeros_like(p))
                state["step"] += 1
                gm, correction = state["momentum"].lerp_(p.grad, 1 - b1), 1 - b1 ** state["step"]
                if p in self._sites:
                    _newton(self._sites[p], gm, state["hessian"], size, lr, b2, correction)
                else:
                    p.sub_(gm, alpha=lr / correction)
        self._written = size


def _newton(
    site: _Site, gm: Tensor, h: Tensor, size: float, lr: float, b2: float, correction: float
) -> None:
    """Update `h`, `m` and the logarithms of the scales in few passes, in the class's symbols."""
    _, own, _, mean, precision = site
    delta = precision / size
    q = h + delta
    # u = (h - hhat) / q takes q to q (1 - (1 - b2) u + (1 - b2)^2 u^2 / 2), which is positive.
    u = (h / q).sub_(own.log_scale.grad, alpha=size)
    h.addcmul_(q, torch.addcmul(u, u, u, value=(b2 - 1) / 2), value=b2 - 1)
    torch.add(h, delta, out=q)
    own.loc.addcdiv_((own.loc - mean).mul_(delta).add_(gm, alpha=1 / correction), q, value=-lr)
    torch.mul(q.mul_(size).log_(), -0.5, out=own.log_scale)


def _sites_of(bnn: Any, options: Any, groups: Any) -> dict[Tensor, _Site]:
    """Return what IVON needs of each site, by means, or raise for what it does not serve."""
    guide: Any = getattr(bnn, "net_guide", None)
    held = {id(p) for group in groups for p in group["params"]}
    refused = {
        "an active handler": bool(handlers()),
        "parallel": options.parallel is not None,
        "closed_form_kl=False": not options.closed_form_kl,
        "lr_multipliers of scales": (options.lr_multipliers or {}).get("scale", 1) != 1,
        "a guide of the likelihood": getattr(bnn, "likelihood_guide", None) is not None,
        f"the guide {described(guide)}": not isinstance(guide, AutoNormal),
    }
    found: dict[Tensor, _Site] = {}
    posterior = guide.posterior() if isinstance(guide, AutoNormal) else {}
    for own, given in bnn.net_prior.priors() if posterior else ():
        name = bnn.net_prior.prefix + own
        q: Any = posterior[name]
        prior: Any = gaussian_event(given)
        plain = isinstance(q, FactorizedNormal) and held >= {id(q.loc), id(q.log_scale)}
        plain = plain and q.loc.element_size() >= 4  # small changes of h are lost in others
        of = f"{name!r} with the posterior {described(q)} and the prior "
        of += described(without_events(given))
        refused[of] = not plain or prior is None
        if not refused[of]:
            normal = without_events(prior)
            numbers = known_numbers(normal) or normal
            found[q.loc] = (name, q, prior, numbers.loc, numbers.scale**-2)
    for what in (what for what, is_so in refused.items() if is_so):
        raise ValueError(
            f"IVON does not serve {what}: it needs a VariationalBNN with tyxe.guides.AutoNormal, "
            "whose means and scales are trained, uncapped, unpruned and in float32 or float64, "
            "independent Normals as priors, and a plain fit in one process; change it, or use Adam"
        )
    return found
