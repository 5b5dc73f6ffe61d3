"""For inducing.py: a full covariance for each layer, and an objective of many draws at once."""

import math

import torch
import torch.distributions as td
from torch import nn

import tyxe
from tyxe.distributions import JointDistribution, SiteProduct
from tyxe.guides import init_to_median
from tyxe.util import SiteTensors


class LayerNormal(JointDistribution):
    """A Normal over a layer's weight and bias, one vector.

    Args:
        shapes: of the sites, by name.
        loc: means, `(P,)`.
        scale_tril: Cholesky factor of the covariance, `(P, P)`.
    """

    def __init__(self, shapes, loc, scale_tril):
        self.shapes, self.loc, self.scale_tril = shapes, loc, scale_tril
        super().__init__(tuple(shapes), loc.shape)

    @property
    def mean(self):
        return self.loc

    @property
    def variance(self):
        return self.scale_tril.square().sum(-1)

    def rsample(self, sample_shape=()):
        noise = self.loc.new_empty((*sample_shape, len(self.loc))).normal_()
        return self.loc + noise @ self.scale_tril.mT

    def log_prob(self, value):
        return td.MultivariateNormal(self.loc, scale_tril=self.scale_tril).log_prob(value)

    def separate(self, value):
        parts = value.split([shape.numel() for shape in self.shapes.values()], -1)
        named = zip(self.shapes.items(), parts, strict=True)
        return {name: part.unflatten(-1, shape) for (name, shape), part in named}

    def marginal_log_prob(self, name, value):
        part = self.separate(torch.arange(len(self.loc)))[name].reshape(-1)
        root = self.scale_tril[part]
        normal = td.MultivariateNormal(self.loc[part], root @ root.mT)
        return normal.log_prob(value.reshape(*value.shape[: -len(self.shapes[name])], -1))


@td.register_kl(LayerNormal, SiteProduct)
def _kl(q, p):
    """Return the KL from independent zero-mean Normals."""
    scale = torch.cat([p.priors[name].base_dist.scale.reshape(-1) for name in q.shapes])
    squares = ((q.variance + q.mean.square()) / scale.square() - 1).sum() / 2
    return squares + scale.log().sum() - q.scale_tril.diagonal().log().sum()


class AutoFullByLayer(tyxe.guides.Guide):
    """A full covariance for each layer of a net (FCG-W).

    Args:
        module: the program that samples the sites; a BNN passes its own.
        init_loc_fn: where means start, from a site's message.
        init_scale: where standard deviations start; correlations start at zero.
    """

    def __init__(self, module, init_loc_fn=init_to_median, init_scale=1e-2):
        super().__init__(module)
        self.shapes, locs = {}, {}
        for site in self.sites:
            layer = site.own_name.rpartition(".")[0]
            self.shapes.setdefault(layer, {})[site.name] = site.shape
            start = init_loc_fn(self.messages[site.name]).detach().reshape(-1)
            locs[layer] = torch.cat([locs[layer], start]) if layer in locs else start
        self.locs = SiteTensors(locs)
        start = {n: torch.full_like(loc, math.log(init_scale)) for n, loc in locs.items()}
        self.log_scales = SiteTensors(start)
        start = {n: loc.new_zeros(len(loc), len(loc)) for n, loc in locs.items()}
        self.scale_factors = SiteTensors(start)
        self.messages = {}

    def joints(self):
        found = []
        for layer, shapes in self.shapes.items():
            scale, factor = self.log_scales[layer].exp(), self.scale_factors[layer]
            unit = factor.tril(-1) + torch.eye(len(scale)).to(factor)
            found.append(LayerNormal(shapes, self.locs[layer], scale[:, None] * unit))
        return found

    def site_distribution(self, site):
        raise AssertionError("every site is in a layer")


class Elbo(nn.Module):
    """The ELBO by many draws at once: nets of a few units cost calls, not arithmetic.

    Args:
        bnn: its guide is fitted; its likelihood is used as it is.
        priors: of the net's parameters, by their own names.
        x: inputs.
        y: targets.
        draws: number of draws of each step.
    """

    def __init__(self, bnn, priors, x, y, draws):
        super().__init__()
        self.bnn, self.x, self.y, self.draws = bnn, x, y, draws
        self.priors = {f"net.{name}": prior for name, prior in priors.items()}

    def forward(self):
        """Return the expected log-likelihood and the KL, in nats."""
        guide, priors = self.bnn.net_guide, self.priors
        joints = list(guide.joints())
        values, kl = {}, 0.0
        for q in joints:
            values |= q.separate(q.rsample((self.draws,)))
            kl = kl + td.kl_divergence(q, SiteProduct({n: priors[n] for n in q.names}))
        for site in guide.sites:
            if site.name not in values:
                q = guide.site_distribution(site)
                values[site.name] = q.rsample((self.draws,))
                kl = kl + td.kl_divergence(q, priors[site.name])
        outputs = torch.vmap(self.bnn.run_net, in_dims=(0, None))(values, self.x)
        targets = self.y.repeat(self.draws, 1)
        total = self.bnn.likelihood.log_likelihood(outputs.flatten(0, 1), targets, "sum")
        return total / self.draws, kl
