"""Wrapper x guide x handler x likelihood on a pretend accelerator, and what the host reads."""

from __future__ import annotations

import collections
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import autoguide
from pyro.infer.mcmc import HMC
from torch import Tensor, nn

import tyxe
from tests.soak.pretend import DEVICE, DeviceMismatch, Host, pretend
from tyxe import guides, likelihoods, poutine, priors, samplers

__all__ = ["FLOWS", "Flow", "Seen", "follow", "run"]

POINTS, ADAM = 12, functools.partial(torch.optim.Adam, lr=1e-3)
NORMAL = priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])
Pair = tuple[Tensor, Tensor]


class Flow(NamedTuple):
    """What is combined, by names."""

    wrapper: str
    guide: str
    handler: str
    likelihood: str


class Seen(NamedTuple):
    """What a flow showed: the mismatch of devices that ended it, and reads by the line of code.

    `step` are those of one training step after the first.
    """

    mismatch: str | None
    step: collections.Counter[str]


# --------------------------------------------------------------------------- parts


def _inducing(family: str, **options: Any) -> Any:
    sizes = {"inducing_rows": 2, "inducing_cols": 2, "everywhere": True}
    return functools.partial(guides.AutoInducing, q_inducing=family, **sizes, **options)


GUIDES: dict[str, Any] = {
    "AutoNormal": guides.AutoNormal,
    "AutoNormal, capped": functools.partial(guides.AutoNormal, max_guide_scale=0.5),
    "AutoRadial": guides.AutoRadial,
    "AutoInducing, diagonal": _inducing("diagonal"),
    "AutoInducing, full": _inducing("full"),
    "AutoInducing, matrix": _inducing("matrix", max_lambda=0.5, max_scale_u=0.5),
    "AutoInducing, ensemble": _inducing("ensemble"),
    "AutoInducing, not whitened": _inducing("diagonal", whitened=False),
    "AutoInducing, hierarchical": _inducing("full", hierarchical=(2, 2)),
    "AutoBernoulli": guides.AutoBernoulli,
    "AutoBernoulli, relaxed": functools.partial(guides.AutoBernoulli, relaxed=0.5),
    "pyro AutoDelta": autoguide.AutoDelta,
    "pyro AutoNormal": autoguide.AutoNormal,
    "pyro AutoDiagonalNormal": autoguide.AutoDiagonalNormal,
    "pyro AutoMultivariateNormal": autoguide.AutoMultivariateNormal,
    "pyro AutoLowRankMultivariateNormal": autoguide.AutoLowRankMultivariateNormal,
}
ONE_BY_ONE = [name for name in GUIDES if name.startswith(("AutoNormal", "AutoRadial"))]
ONE_BY_ONE += ["AutoBernoulli, relaxed", "pyro AutoDelta"]
KERNELS: dict[str, Any] = {
    "pyro HMC": functools.partial(HMC, step_size=1e-3, num_steps=2),
    "samplers HMC": samplers.HMC(step_size=1e-3, num_steps=2),
    "samplers NUTS": samplers.NUTS(step_size=1e-3, max_tree_depth=3),
    "samplers MCLMC": samplers.MCLMC(),
}
HANDLERS: dict[str, Callable[[], Any]] = {
    "none": nullcontext,
    "local_reparameterization": poutine.local_reparameterization,
    "flipout": poutine.flipout,
    "selective_mask": lambda: poutine.selective_mask(
        mask=torch.arange(POINTS // 2, device=DEVICE) > 1, expose=["likelihood.data"]
    ),
    "selective_scale": lambda: poutine.selective_scale(scale=0.5, expose=["net.0.weight"]),
    "variational_laplace": poutine.variational_laplace,
    "report": poutine.report,
}


class Likely(NamedTuple):
    """A likelihood, how many outputs it takes, and its targets."""

    build: Callable[[], likelihoods.Likelihood]
    outputs: int
    targets: Callable[[], Tensor]
    has_latents: bool = False


def _numbers() -> Tensor:
    return torch.randn(POINTS, 2, device=DEVICE)


LIKELIHOODS = {
    "Categorical": Likely(
        lambda: likelihoods.Categorical(POINTS), 3, lambda: torch.arange(POINTS, device=DEVICE) % 3
    ),
    "Bernoulli": Likely(
        lambda: likelihoods.Bernoulli(POINTS, event_dim=1), 2, lambda: (_numbers() > 0).float()
    ),
    "Poisson": Likely(
        lambda: likelihoods.Poisson(POINTS, event_dim=1), 2, lambda: _numbers().abs().round()
    ),
    "Gaussian": Likely(lambda: likelihoods.HomoskedasticGaussian(POINTS, scale=0.5), 2, _numbers),
    "Gaussian, learned": Likely(
        lambda: likelihoods.HomoskedasticGaussian(POINTS, scale=0.5, learn_scale=True), 2, _numbers
    ),
    "Gaussian, inferred": Likely(
        lambda: likelihoods.HomoskedasticGaussian(POINTS, scale=dist.LogNormal(0.0, 0.3)),
        2,
        _numbers,
        has_latents=True,
    ),
    "heteroskedastic": Likely(lambda: likelihoods.HeteroskedasticGaussian(POINTS), 4, _numbers),
}


def _net(outputs: int) -> nn.Module:
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, outputs)
    return nn.Sequential(*layers)


def _batches(likely: Likely) -> list[Pair]:
    x = torch.randn(POINTS, 3, device=DEVICE)
    return list(zip(x.split(POINTS // 2), likely.targets().split(POINTS // 2), strict=True))


class _Steps:
    """A loader that notes what is read in the step on its third batch, in the first pass."""

    def __init__(self, batches: list[Pair], host: Host) -> None:
        self.batches, self.host = batches, host
        self.reads: collections.Counter[str] = collections.Counter()
        self._passes = 0

    def __iter__(self) -> Iterator[Pair]:
        self._passes += 1
        for i, batch in enumerate(self.batches * 3):
            before = self.host.reads.copy()
            yield batch
            if (self._passes, i) == (1, 2):
                self.reads = self.host.reads - before


# --------------------------------------------------------------------------- flows


def _on_device(values: Any) -> None:
    for value in values if isinstance(values, tuple) else (values,):
        assert value.device == DEVICE, f"the result is on {value.device}"


def _predict(bnn: Any, x: Tensor, y: Tensor, lazy: bool) -> None:
    _on_device(bnn.predict(x, num_predictions=3))
    _on_device(bnn.predict(x, num_predictions=0))
    _on_device(bnn.evaluate(x, y, num_predictions=2))
    _on_device(bnn.sample_predictive(x, num_samples=2))
    if lazy:
        return
    pyro.set_rng_seed(0)
    whole = bnn.predict(x, num_predictions=3, aggregate=False)
    for options in ({"batch_size": 4}, {"vectorize": True}):
        pyro.set_rng_seed(0)
        again = bnn.predict(x, num_predictions=3, aggregate=False, **options)
        torch.testing.assert_close(again.cpu(), whole.cpu(), rtol=1e-4, atol=1e-5)


def _reload(bnn: Any, make: Callable[[], Any], x: Tensor) -> None:
    """Assert that a state goes to the host and back."""
    state = {
        name: value.cpu() if isinstance(value, Tensor) else value
        for name, value in bnn.state_dict().items()
    }
    other = make()
    other.load_state_dict(state)
    _on_device(other(x))
    bnn.to("cpu")
    bnn.to(DEVICE)
    _on_device(bnn(x))


def _variational(flow: Flow, host: Host) -> collections.Counter[str]:
    likely = LIKELIHOODS[flow.likelihood]
    binary = flow.guide.startswith("AutoBernoulli")
    prior = priors.BinaryPrior(hide_module_types=[nn.BatchNorm1d]) if binary else NORMAL

    def make() -> tyxe.VariationalBNN:
        net = _net(likely.outputs).to(DEVICE)
        own = autoguide.AutoNormal if likely.has_latents else None
        return tyxe.VariationalBNN(net, prior, likely.build(), GUIDES[flow.guide], own)

    bnn, loader = make(), _Steps(_batches(likely), host)
    with HANDLERS[flow.handler]():
        bnn.fit(loader, ADAM, 1)
        bnn.fit(loader.batches, pyro.optim.Adam({"lr": 1e-3}), 1, num_particles=2, clip_norm=1.0)
    lazy = flow.handler in ("local_reparameterization", "flipout")
    x, y = loader.batches[0]
    with HANDLERS[flow.handler]() if lazy else nullcontext():
        _predict(bnn, x, y, lazy)
    if flow.guide == "AutoNormal":
        _on_device(bnn.predict(x, num_predictions=3, predictive="glm"))
        bnn.update_prior(priors.DictPrior(bnn.net_guide.get_detached_distributions()))
    other = make()
    other.load_checkpoint(bnn.checkpoint())
    with HANDLERS[flow.handler]():
        other.fit(loader.batches, pyro.optim.Adam({"lr": 1e-3}), 1)
    _on_device(bnn.to_module()(x))
    _reload(bnn, make, x)
    return loader.reads


def _laplace(flow: Flow, host: Host) -> collections.Counter[str]:
    likely = LIKELIHOODS[flow.likelihood]
    structure, curvature = flow.guide.split()

    def make() -> tyxe.LaplaceBNN:
        return tyxe.LaplaceBNN(
            _net(likely.outputs).to(DEVICE),
            NORMAL,
            likely.build(),
            structure=structure,
            curvature=curvature,
        )

    bnn, loader = make(), _Steps(_batches(likely), host)
    bnn.fit(loader, ADAM, 1)
    bnn.fit_curvature(loader.batches)
    _on_device(bnn.log_marginal_likelihood())
    bnn.optimize_prior_precision(num_steps=3)
    bnn.optimize_prior_precision("grid", loader.batches, grid=[0.5, 2.0])
    x, y = loader.batches[0]
    for predictive in ("glm", "bnn"):
        _on_device(bnn.predict(x, num_predictions=3, predictive=predictive))
        _on_device(bnn.evaluate(x, y, num_predictions=3, predictive=predictive))
    _on_device(bnn.functional_variance(x))
    bnn.fit_gp(loader.batches)
    _on_device(bnn.predict(x, predictive="gp"))
    _reload(bnn, make, x)
    return loader.reads


def _pytorch(flow: Flow, host: Host) -> collections.Counter[str]:
    likely = LIKELIHOODS[flow.likelihood]

    def make() -> tyxe.PytorchBNN:
        return tyxe.PytorchBNN(_net(likely.outputs).to(DEVICE), NORMAL, GUIDES[flow.guide])

    bnn, loader = make(), _Steps(_batches(likely), host)
    optimizer = ADAM([p for p in bnn.parameters() if p.requires_grad])
    for x, _ in loader:
        optimizer.zero_grad()
        with HANDLERS[flow.handler]():
            (bnn(x).square().sum() + bnn.cached_kl_loss).backward()
        optimizer.step()
    with bnn.hold_sample():
        _on_device(bnn(x))
    _on_device(bnn.predict(x, num_predictions=2))
    _reload(bnn, make, x)
    return loader.reads


def _mcmc(flow: Flow, host: Host) -> collections.Counter[str]:
    likely = LIKELIHOODS[flow.likelihood]
    net = _net(likely.outputs).to(DEVICE)
    bnn = tyxe.MCMC_BNN(net, NORMAL, likely.build(), KERNELS[flow.guide])
    batches = _batches(likely)
    bnn.fit(batches, num_samples=3, warmup_steps=2, progress=False)
    _predict(bnn, *batches[0], lazy=False)
    return collections.Counter()


WRAPPERS: dict[str, Callable[[Flow, Host], collections.Counter[str]]] = {
    "VariationalBNN": _variational,
    "LaplaceBNN": _laplace,
    "PytorchBNN": _pytorch,
    "MCMC_BNN": _mcmc,
}


def _is_possible(flow: Flow) -> bool:
    """Whether the library takes a combination, and does not refuse it by an error."""
    if flow.handler == "variational_laplace":
        return flow.guide == "AutoNormal"
    if flow.handler == "selective_scale":
        # A KL of several sites cannot be scaled one by one.
        return flow.guide in ONE_BY_ONE and not LIKELIHOODS[flow.likelihood].has_latents
    return flow.guide != "AutoBernoulli" or flow.handler == "local_reparameterization"


def _flows() -> Iterator[Flow]:
    handlers = [name for name in HANDLERS if name not in ("selective_mask", "variational_laplace")]
    binary = [name for name in GUIDES if not name.startswith("AutoBernoulli")]
    structures = itertools.product(("kron", "diag", "full"), ("ggn", "fisher", "empirical"))
    laplace = [" ".join(pair) for pair in structures]
    normal = [
        name for name in LIKELIHOODS if name not in ("Gaussian, learned", "Gaussian, inferred")
    ]
    yield from (
        Flow("VariationalBNN", *f) for f in itertools.product(GUIDES, HANDLERS, LIKELIHOODS)
    )
    yield from (Flow("PytorchBNN", *f) for f in itertools.product(binary, handlers, ["Gaussian"]))
    yield from (Flow("LaplaceBNN", *f) for f in itertools.product(laplace, ["none"], normal))
    # MCMC trains no parameters.
    sampled = [name for name in LIKELIHOODS if name != "Gaussian, learned"]
    yield from (Flow("MCMC_BNN", *f) for f in itertools.product(KERNELS, ["none"], sampled))


FLOWS = [flow for flow in _flows() if _is_possible(flow)]


def follow(flow: Flow, seed: int = 0) -> Seen:
    """Run one flow on the pretend device.

    Any other error than a mismatch of devices is raised: each flow is one that the library takes.
    """
    pyro.set_rng_seed(seed)
    with pretend() as host:
        try:
            return Seen(None, WRAPPERS[flow.wrapper](flow, host))
        except DeviceMismatch as mismatch:
            return Seen(str(mismatch), collections.Counter())


def run(count: int, seed: int) -> dict[str, int]:
    """Run so many flows, chosen by a seed; return the figures.

    The largest number of host reads in a training step is listed by guide.
    """
    chosen = random.Random(seed).sample(FLOWS, min(count, len(FLOWS)))
    found = {"flows": len(chosen), "device mismatches": 0}
    for flow in chosen:
        seen = follow(flow, seed)
        found["device mismatches"] += seen.mismatch is not None
        key = f"host reads a step, {flow.guide}"
        found[key] = max(found.get(key, 0), seen.step.total())
    return found
