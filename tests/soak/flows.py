"""Each part on a device: fits, predictions, curvature, samples and states, by small flows."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import autoguide
from torch import Tensor, nn

import tyxe
from tests.oracles.architectures import N
from tests.soak import parts
from tyxe import calibration, poutine, priors
from tyxe.guides import AutoInducing

ADAM = functools.partial(torch.optim.Adam, lr=1e-3)
NORMAL = priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])
SIZES = {"inducing_rows": 2, "inducing_cols": 2, "everywhere": True}
INDUCING = functools.partial(AutoInducing, **SIZES)
GUIDES = parts.GUIDES | {
    "AutoInducing, matrix": functools.partial(
        INDUCING, q_inducing="matrix", max_lambda=0.5, max_scale_u=0.5
    ),
    "AutoInducing, not whitened": functools.partial(
        INDUCING, q_inducing="diagonal", whitened=False
    ),
    "AutoInducing, hierarchical": functools.partial(
        INDUCING, q_inducing="full", hierarchical=(2, 2)
    ),
}
Pair = tuple[Tensor, Tensor]


class Place(Protocol):
    """Where a flow runs, and how often the host has read a number there, by line of the package."""

    device: torch.device
    reads: collections.Counter[str]


class Device:
    """A device of which no reads are counted."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.reads = device, collections.Counter[str]()


class Flow(NamedTuple):
    """What is combined, by names. A call runs it, and returns what a step has read."""

    wrapper: str
    guide: str
    handler: str
    likelihood: str

    def __call__(self, place: Place) -> collections.Counter[str]:
        return WRAPPERS[self.wrapper](self, place)

    @property
    def data(self) -> parts.Data:
        return parts.LIKELIHOODS[self.likelihood]

    def make(self, place: Place) -> Any:
        """Return the BNN, there."""
        net, likelihood = make_net(self.data.width).to(place.device), self.data.likelihood(N)
        if self.wrapper == "PytorchBNN":
            return tyxe.PytorchBNN(net, NORMAL, GUIDES[self.guide])
        if self.wrapper == "LaplaceBNN":
            options = dict(zip(("structure", "curvature"), self.guide.split(), strict=True))
            return tyxe.LaplaceBNN(net, NORMAL, likelihood, **options)
        if self.wrapper == "MCMC_BNN":
            return tyxe.MCMC_BNN(net, NORMAL, likelihood, parts.KERNELS[self.guide])
        prior: Any = NORMAL
        if self.guide.startswith("AutoBernoulli"):
            prior = priors.BinaryPrior(hide_module_types=[nn.BatchNorm1d])
        own = autoguide.AutoNormal if "inferred" in self.likelihood else None
        return tyxe.VariationalBNN(net, prior, likelihood, GUIDES[self.guide], own)


def _handler(name: str, place: Place) -> Any:
    if name == "mask":
        mask = torch.arange(N // 2, device=place.device) > 0
        return poutine.selective_mask(mask=mask, expose=parts.DATA)
    return parts.HANDLERS[name]()


def make_net(outputs: int) -> nn.Module:
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, outputs)
    return nn.Sequential(*layers)


def make_batches(likely: parts.Data, place: Place) -> list[Pair]:
    x, outputs = torch.randn(N, 3, device=place.device), torch.Size([N, likely.width])
    y = likely.targets(outputs).to(place.device)
    return list(zip(x.split(N // 2), y.split(N // 2), strict=True))


class _Steps:
    """A loader that notes what is read in the step on its third batch, in the first pass."""

    def __init__(self, batches: list[Pair], place: Place) -> None:
        self.batches, self._place = batches, place
        self.reads: collections.Counter[str] = collections.Counter()
        self._passes = 0

    def __iter__(self) -> Iterator[Pair]:
        self._passes += 1
        for i, batch in enumerate(self.batches * 3):
            before = self._place.reads.copy()
            yield batch
            if (self._passes, i) == (1, 2):
                self.reads = self._place.reads - before


# --------------------------------------------------------------------------- flows


def assert_there(values: Any, place: Place) -> None:
    for value in values if isinstance(values, tuple) else (values,):
        assert value.device == place.device, f"the result is on {value.device}"


def _predict(bnn: Any, x: Tensor, y: Tensor, lazy: bool, place: Place) -> None:
    assert_there(bnn.predict(x, num_predictions=3), place)
    assert_there(bnn.predict(x, num_predictions=0), place)
    assert_there(bnn.evaluate(x, y, num_predictions=2), place)
    assert_there(bnn.sample_predictive(x, num_samples=2), place)
    if lazy:
        return
    pyro.set_rng_seed(0)
    whole = bnn.predict(x, num_predictions=3, aggregate=False)
    for options in ({"batch_size": 2}, {"vectorize": True}):
        pyro.set_rng_seed(0)
        again = bnn.predict(x, num_predictions=3, aggregate=False, **options)
        torch.testing.assert_close(again.cpu(), whole.cpu(), rtol=1e-4, atol=1e-5)


def _reload(bnn: Any, flow: Flow, x: Tensor, place: Place) -> None:
    """Assert that a state goes to the host and back."""
    state = {
        name: value.cpu() if isinstance(value, Tensor) else value
        for name, value in bnn.state_dict().items()
    }
    other = flow.make(place)
    other.load_state_dict(state)
    assert_there(other(x), place)
    bnn.to("cpu")
    bnn.to(place.device)
    assert_there(bnn(x), place)


def _variational(flow: Flow, place: Place) -> collections.Counter[str]:
    bnn, loader = flow.make(place), _Steps(make_batches(flow.data, place), place)
    with _handler(flow.handler, place):
        bnn.fit(loader, ADAM, 1)
        bnn.fit(loader.batches, pyro.optim.Adam({"lr": 1e-3}), 1, num_particles=2, clip_norm=1.0)
    lazy = flow.handler in ("local reparameterisation", "flipout")
    x, y = loader.batches[0]
    with _handler(flow.handler, place) if lazy else nullcontext():
        _predict(bnn, x, y, lazy, place)
    if flow.guide == "AutoNormal":
        assert_there(bnn.predict(x, num_predictions=3, predictive="glm"), place)
        bnn.update_prior(priors.DictPrior(bnn.net_guide.get_detached_distributions()))
    other = flow.make(place)
    other.load_checkpoint(bnn.checkpoint())
    with _handler(flow.handler, place):
        other.fit(loader.batches, pyro.optim.Adam({"lr": 1e-3}), 1)
    assert_there(bnn.to_module()(x), place)
    _reload(bnn, flow, x, place)
    return loader.reads


def _laplace(flow: Flow, place: Place) -> collections.Counter[str]:
    bnn, loader = flow.make(place), _Steps(make_batches(flow.data, place), place)
    bnn.fit(loader, ADAM, 1)
    bnn.fit_curvature(loader.batches)
    assert_there(bnn.log_marginal_likelihood(), place)
    bnn.optimize_prior_precision(num_steps=3)
    x, y = loader.batches[0]
    for predictive in ("glm", "bnn"):
        assert_there(bnn.evaluate(x, y, num_predictions=3, predictive=predictive), place)
    _of_curvature(bnn, loader.batches, x, place)
    _reload(bnn, flow, x, place)
    return loader.reads


def _of_curvature(bnn: Any, batches: list[Pair], x: Tensor, place: Place) -> None:
    bnn.optimize_prior_precision("grid", batches, grid=[0.5, 2.0])
    bnn.fit_gp(batches)
    for predictive in ("glm", "bnn", "gp"):
        assert_there(bnn.predict(x, num_predictions=3, predictive=predictive), place)
    assert_there(bnn.functional_variance(x), place)


def _pytorch(flow: Flow, place: Place) -> collections.Counter[str]:
    bnn, loader = flow.make(place), _Steps(make_batches(flow.data, place), place)
    optimizer = ADAM([p for p in bnn.parameters() if p.requires_grad])
    for x, _ in loader:
        optimizer.zero_grad()
        with _handler(flow.handler, place):
            (bnn(x).square().sum() + bnn.cached_kl_loss).backward()
        optimizer.step()
    with bnn.hold_sample():
        assert_there(bnn(x), place)
    assert_there(bnn.predict(x, num_predictions=2), place)
    _reload(bnn, flow, x, place)
    return loader.reads


def _mcmc(flow: Flow, place: Place) -> collections.Counter[str]:
    bnn, batches = flow.make(place), make_batches(flow.data, place)
    bnn.fit(batches, num_samples=3, warmup_steps=2, progress=False)
    _predict(bnn, *batches[0], False, place)
    return collections.Counter()


def batches_of_the_host(wrapper: str, place: Place) -> None:
    """Fit, predict, score, calibrate and diagnose a BNN that is there by batches that are not."""
    guide = {"LaplaceBNN": "kron ggn", "MCMC_BNN": "samplers HMC"}.get(wrapper, "AutoNormal")
    flow = Flow(wrapper, guide, "none", "classes")
    bnn = flow.make(place)
    if wrapper == "EnsembleBNN":
        bnn = tyxe.EnsembleBNN(lambda _: flow.make(place), 2)
    (x, y), *_ = batches = make_batches(flow.data, Device(torch.device("cpu")))
    if wrapper == "MCMC_BNN":
        bnn.fit(batches, 4, warmup_steps=1, progress=False)
    else:
        bnn.fit(batches, ADAM, 1, validation=batches)
    for inputs, data in (((x,), (x, y)), ((batches,), (batches,))):
        assert_there(bnn.predict(*inputs, num_predictions=2), place)
        assert_there(bnn.evaluate(*data, num_predictions=2), place)
    assert "error" in tyxe.diagnostics.scores(bnn, batches, num_predictions=2)
    sets = tyxe.calibration.SplitConformal(level=0.5).wrap(bnn, batches, num_predictions=2)
    assert_there(sets.predict(x), place)
    assert str(tyxe.diagnostics.diagnose(bnn, batches, batches, num_predictions=2))
    if wrapper == "LaplaceBNN":
        bnn.fit_curvature(batches)
        _of_curvature(bnn, batches, x, place)


class _Shifted(nn.Linear):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x) + shift


def outputs_of_the_host(place: Place) -> None:
    """Predict by a `PytorchBNN` that is there from arguments and batches that are not."""
    bnn = tyxe.PytorchBNN(_Shifted(3, 2).to(place.device), NORMAL, GUIDES["AutoNormal"])
    x, shift = torch.randn(6, 3), torch.ones(6, 2)
    expected = bnn.predict(x.to(place.device), shift.to(place.device), num_predictions=0)
    batches = [((x[:4], shift[:4]), None), ((x[4:], shift[4:]), None)]
    for given in ((x, shift), ({"x": x, "shift": shift},), (batches,)):
        found = bnn.predict(*given, num_predictions=0)
        torch.testing.assert_close(found.cpu(), expected.cpu())
        assert_there(found, place)
    assert_there(bnn.predict(x, shift=shift, num_predictions=2), place)


def simulations_of_inputs_of_the_host(place: Place) -> None:
    """Compare posteriors that are there with draws from the prior, at inputs that are not."""
    flow = Flow("VariationalBNN", "AutoNormal", "none", "Gaussian, inferred")
    found = tyxe.diagnostics.sbc(
        lambda: flow.make(place),
        lambda bnn, data: bnn.fit(data, ADAM, 1) and None,
        torch.randn(N, 3),
        num_simulations=2,
        num_draws=3,
    )
    assert all(len(ranks) == 2 for ranks in found.ranks.values())


def guide_of_the_host(place: Place) -> None:
    """Fit a BNN of a net that is there, whose guide Pyro makes elsewhere."""
    flow = Flow("VariationalBNN", "pyro AutoIAFNormal", "none", "Gaussian")
    bnn, ((x, y), *_) = flow.make(place), make_batches(flow.data, Device(torch.device("cpu")))
    assert {p.device for p in bnn.parameters()} == {place.device}
    bnn.fit([(x, y)], ADAM, 1)
    assert_there(bnn.predict(x, num_predictions=2), place)


def calibrate_by_targets_of_the_host(place: Place) -> None:
    """Fit calibrators to predictions that are there, and to targets that are not."""
    x, noise = torch.randn(40, 3), torch.randn(40, 3)
    logits, y = (3 * x).to(place.device), (x + 0.5 * noise).argmax(-1)
    assert_there(calibration.TemperatureScaling().fit(logits, y).predict(logits), place)
    sets, probs = calibration.SplitConformal(level=0.5), logits.softmax(-1)
    assert_there(sets.fit(probs, y).predict(probs), place)
    numbers = x.to(place.device), torch.ones(40, 3).to(place.device)
    for made in (calibration.ScaleFactor(), calibration.SplitConformal(level=0.5)):
        assert_there(made.fit(numbers, x + noise).predict(numbers), place)

    def train(x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        net = nn.Linear(3, 3).to(place.device)
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(len(x), scale=0.5)
        bnn = tyxe.VariationalBNN(net, NORMAL, likelihood, tyxe.guides.AutoNormal)
        bnn.fit([(x, y)], ADAM, 1)
        return functools.partial(bnn.predict, num_predictions=2)

    found = calibration.CVPlus(train, level=0.5, folds=2).fit(x, noise)
    assert_there(found.predict(x), place)
    for predicted, targets in ((sets.predict(probs), y), (made.predict(numbers), x + noise)):
        assert 0 < calibration.coverage(predicted, targets) <= 1
    risk = calibration.RiskControl(risk=0.4).fit(torch.cat(5 * [logits]), y.repeat(5))
    assert_there(risk.predict(logits), place)


# Uses of what is on the host, each a function of the place.
OF_THE_HOST = [
    calibrate_by_targets_of_the_host,
    guide_of_the_host,
    outputs_of_the_host,
    simulations_of_inputs_of_the_host,
]

WRAPPERS: dict[str, Callable[[Flow, Place], collections.Counter[str]]] = {
    "VariationalBNN": _variational,
    "LaplaceBNN": _laplace,
    "PytorchBNN": _pytorch,
    "MCMC_BNN": _mcmc,
}


# Of every part at least one.
ALONE = ["AutoNormal", "AutoNormal, capped", "AutoRadial", *(n for n in GUIDES if "Inducing" in n)]
ALONE += ["AutoBernoulli, relaxed", "pyro AutoDelta", "pyro AutoMultivariateNormal"]
FLOWS = [
    *(Flow("VariationalBNN", guide, "none", "classes") for guide in ALONE),
    Flow("VariationalBNN", "AutoBernoulli", "local reparameterisation", "Gaussian"),
    Flow("VariationalBNN", "AutoNormal", "flipout", "Gaussian, inferred"),
    Flow("VariationalBNN", "AutoNormal", "mask", "counts"),
    Flow("VariationalBNN", "AutoNormal", "scale", "heteroskedastic"),
    Flow("VariationalBNN", "AutoNormal", "variational Laplace", "binary, event"),
    Flow("VariationalBNN", "AutoInducing, full", "local reparameterisation", "Gaussian, learned"),
    Flow("PytorchBNN", "pyro low rank", "none", "Gaussian"),
    Flow("LaplaceBNN", "kron ggn", "none", "classes"),
    Flow("LaplaceBNN", "full empirical", "none", "heteroskedastic"),
    Flow("LaplaceBNN", "diag fisher", "none", "counts"),
    Flow("LaplaceBNN", "kron ggn", "none", "Gaussian, precision"),
    Flow("MCMC_BNN", "HMC", "none", "Gaussian, inferred"),
    Flow("MCMC_BNN", "samplers NUTS", "none", "Gaussian, inferred"),
    Flow("MCMC_BNN", "samplers MCLMC", "none", "classes"),
]
