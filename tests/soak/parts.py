"""Priors, likelihoods, guides, handlers and optimisers for the fuzz."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import autoguide
from pyro.infer.mcmc import HMC, NUTS
from torch import Tensor, nn

import tyxe
from tests.oracles.architectures import CLASSES, NORMS, N
from tyxe import samplers
from tyxe.guides import AutoBernoulli, AutoInducing, AutoNormal, AutoRadial
from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Poisson,
)
from tyxe.priors import BinaryPrior, DictPrior, IIDPrior, LambdaPrior, LayerwiseNormalPrior

Table = dict[str, Callable[..., Any]]

# --------------------------------------------------------------------------- priors of a net


def _hierarchy(name: str, module: nn.Module, param: Tensor) -> Any:
    def prior() -> Any:
        scale = pyro.sample(f"{name}_scale", dist.LogNormal(param.new_zeros(()), 0.1))
        return dist.Normal(torch.zeros_like(param), scale)

    return prior


def _by_name(net: nn.Module) -> DictPrior:
    names = {name: p.shape for name, p in net.named_parameters() if p.requires_grad}
    return DictPrior({name: dist.Normal(0, 1).expand(shape) for name, shape in names.items()})


def _iid(distribution: Any, **rules: Any) -> Callable[[nn.Module], IIDPrior]:
    return lambda net: IIDPrior(distribution, **rules)


def _last(net: nn.Module) -> IIDPrior:
    return IIDPrior(dist.Normal(0, 1), expose_modules=[list(net.modules())[-1]])


NORMAL = dist.Normal(0, 1)
PRIORS: Table = {
    "Normal": _iid(NORMAL),
    "Normal, no norms": _iid(NORMAL, hide_module_types=NORMS),
    "Normal, wide": _iid(dist.Normal(torch.tensor(0.0), torch.tensor(10.0))),
    "weights only": _iid(NORMAL, expose_fn=lambda module, name: "weight" in name),
    "last module": _last,
    "first parameter": lambda net: IIDPrior(NORMAL, expose=[*dict(net.named_parameters())][:1]),
    "hide all": _iid(NORMAL, hide_all=True),
    "radford": lambda net: LayerwiseNormalPrior(method="radford"),
    "kaiming": lambda net: LayerwiseNormalPrior(method="kaiming", hide_module_types=NORMS),
    "xavier": lambda net: LayerwiseNormalPrior(method="xavier"),
    "Laplace": _iid(dist.Laplace(0.0, 1.0)),
    "Student": _iid(dist.StudentT(5.0, 0.0, 1.0)),
    "half Normal": _iid(dist.HalfNormal(1.0)),
    "LogNormal": _iid(dist.LogNormal(-1.0, 0.5)),
    "Uniform": _iid(dist.Uniform(-2.0, 2.0)),
    "Gumbel": _iid(dist.Gumbel(0.0, 1.0)),
    "mixture": _iid(
        dist.MixtureSameFamily(
            dist.Categorical(torch.ones(2)),
            dist.Normal(torch.tensor([0.0, 0.0]), torch.tensor([0.1, 1.0])),
        )
    ),
    "by name": _by_name,
    "function": lambda net: LambdaPrior(lambda n, m, p: dist.Normal(0.0, 1.0).expand(p.shape)),
    "hierarchy": lambda net: LambdaPrior(_hierarchy),
    "binary": lambda net: BinaryPrior(scale=0.5),
    "binary weights": lambda net: BinaryPrior(
        delta=0.1, scale="radford", expose_fn=lambda module, name: isinstance(module, nn.Linear)
    ),
}
# --------------------------------------------------------------------------- likelihoods


class Data(NamedTuple):
    """A likelihood for `n` points, the width of a net's output, and targets for its shape."""

    likelihood: Callable[[int | None], Any]
    width: int
    targets: Callable[[torch.Size], Tensor]


def _classes(shape: torch.Size) -> Tensor:
    return torch.randint(shape[-1], shape[:-1]) if len(shape) > 1 else torch.zeros(shape).long()


def _half(shape: torch.Size) -> Tensor:
    return torch.randn(*shape[:-1], shape[-1] // 2) if len(shape) > 1 else torch.randn(shape)


def _gaussian(**noise: Any) -> Data:
    return Data(lambda n: HomoskedasticGaussian(n, **noise), 2, torch.randn)


def _binary(shape: torch.Size) -> Tensor:
    return torch.randint(2, shape).float()


def _counts(shape: torch.Size) -> Tensor:
    return torch.randint(4, shape).float()


LIKELIHOODS: dict[str, Data] = {
    "classes": Data(Categorical, CLASSES, _classes),
    "classes, event": Data(lambda n: Categorical(n, event_dim=1), CLASSES, _classes),
    "binary": Data(Bernoulli, 1, _binary),
    "binary, bool": Data(Bernoulli, 1, lambda shape: _binary(shape).bool()),
    "binary, event": Data(lambda n: Bernoulli(n, event_dim=1), 2, _binary),
    "Gaussian": _gaussian(scale=0.5),
    "Gaussian, precision": _gaussian(precision=torch.tensor([4.0, 1.0])),
    "Gaussian, learned": _gaussian(scale=0.5, learn_scale=True),
    "Gaussian, inferred": _gaussian(scale=dist.LogNormal(-1.0, 0.3)),
    "Gaussian, no event": _gaussian(scale=0.5, event_dim=0),
    "heteroskedastic": Data(HeteroskedasticGaussian, 4, _half),
    "counts": Data(Poisson, 1, _counts),
    "counts, integers": Data(Poisson, 2, lambda shape: _counts(shape).long()),
}


# --------------------------------------------------------------------------- guides

GUIDES: Table = {
    "none": None,
    "AutoNormal": AutoNormal,
    "AutoNormal, from zero": functools.partial(AutoNormal, init_loc_fn=tyxe.guides.init_to_zero),
    "AutoNormal, capped": functools.partial(AutoNormal, max_guide_scale=0.1, init_scale=0.01),
    "AutoNormal, means fixed": functools.partial(AutoNormal, train_loc=False),
    "AutoNormal, sampled": functools.partial(AutoNormal, init_loc_fn=tyxe.guides.init_to_sample),
    "AutoRadial": AutoRadial,
    "AutoInducing": functools.partial(AutoInducing, inducing_rows=1, inducing_cols=1),
    "AutoInducing, ensemble": functools.partial(
        AutoInducing, inducing_rows=1, inducing_cols=1, q_inducing="ensemble", everywhere=True
    ),
    "AutoInducing, full": functools.partial(
        AutoInducing, inducing_rows=2, inducing_cols=2, q_inducing="full", everywhere=True
    ),
    "AutoBernoulli": AutoBernoulli,
    "AutoBernoulli, relaxed": functools.partial(AutoBernoulli, relaxed=0.5),
    "pyro AutoDelta": autoguide.AutoDelta,
    "pyro AutoNormal": autoguide.AutoNormal,
    "pyro AutoDiagonalNormal": autoguide.AutoDiagonalNormal,
    "pyro AutoMultivariateNormal": autoguide.AutoMultivariateNormal,
    "pyro low rank": functools.partial(autoguide.AutoLowRankMultivariateNormal, rank=1),
    "pyro AutoIAFNormal": autoguide.AutoIAFNormal,
    "pyro AutoGaussian": autoguide.AutoGaussian,
    "pyro AutoStructured": autoguide.AutoStructured,
    "pyro AutoLaplaceApproximation": autoguide.AutoLaplaceApproximation,
}
# With fixed steps: adapted ones may become so small that a trajectory takes minutes.
_FIXED = {"step_size": 0.01, "adapt_step_size": False}
KERNELS: Table = {
    "HMC": functools.partial(HMC, num_steps=2, **_FIXED),
    "HMC, adapting masses": functools.partial(HMC, num_steps=1, full_mass=True, **_FIXED),
    "NUTS": functools.partial(NUTS, max_tree_depth=1, **_FIXED),
    "samplers HMC": functools.partial(samplers.HMC, num_steps=2, **_FIXED),
    "samplers NUTS": samplers.NUTS(max_tree_depth=2, **_FIXED),
    "samplers MCLMC": samplers.MCLMC,
}
# --------------------------------------------------------------------------- handlers

MASK = torch.arange(N) != 1
DATA = ["likelihood.data"]
HANDLERS: Table = {
    "none": contextlib.nullcontext,
    "local reparameterisation": tyxe.poutine.local_reparameterization,
    "flipout": tyxe.poutine.flipout,
    "report": tyxe.poutine.report,
    "mask": lambda: tyxe.poutine.selective_mask(mask=MASK, expose=DATA),
    "scale": lambda: tyxe.poutine.selective_scale(scale=0.5, expose=DATA),
    "variational Laplace": tyxe.poutine.variational_laplace,
    "variational Laplace, empirical": functools.partial(
        tyxe.poutine.variational_laplace, curvature="empirical"
    ),
    "pyro scale": lambda: pyro.poutine.scale(scale=0.5),
    "pyro block": lambda: pyro.poutine.block(expose=["nothing"]),
    "pyro seed": lambda: pyro.poutine.seed(rng_seed=0),
}


def suits(taken: dict[str, str]) -> bool:
    """Whether parts, by their names, are likely to go together."""
    wrapper, prior, guide = taken["wrapper"], taken["prior"], taken["guide"]
    likelihood, net, handler = taken["likelihood"], taken["net"], taken["handler"]
    is_binary, is_gaussian = "binary" in prior, prior in GAUSSIAN
    variational = wrapper in ("VariationalBNN", "PytorchBNN")
    return (
        (is_binary == guide.startswith("AutoBernoulli") or wrapper == "LaplaceBNN" or is_gaussian)
        and not (guide.startswith("AutoBernoulli") and not is_binary)
        and not (is_binary and variational and handler != "local reparameterisation")
        and (guide == "none") == (prior == "hide all")
        and not (guide.startswith("AutoInducing") and not is_gaussian)
        and not ("variational Laplace" in handler and not guide.startswith("AutoNormal"))
        and not (wrapper == "LaplaceBNN" and (not is_gaussian or "inferred" in likelihood))
        and not (wrapper == "MCMC_BNN" and is_binary)
        and not (net == "one number per point" and likelihood.startswith(("classes", "hetero")))
    )


# Names of priors that are Normal in each weight.
GAUSSIAN = {"Normal", "Normal, no norms", "Normal, wide", "weights only", "last module"}
GAUSSIAN |= {"first parameter", "radford", "kaiming", "xavier", "by name", "function"}

# --------------------------------------------------------------------------- options of fit


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


OPTIMISERS: Table = {
    "Adam": lambda bnn: _adam,
    "SGD, momentum": lambda bnn: functools.partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
    "AdamW": lambda bnn: functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
    "an instance": lambda bnn: _adam(bnn.parameters()),
    "pyro Adam": lambda bnn: pyro.optim.Adam({"lr": 1e-3}),
    "pyro ClippedAdam": lambda bnn: pyro.optim.ClippedAdam({"lr": 1e-3, "clip_norm": 1.0}),
    "pyro scheduler": lambda bnn: pyro.optim.ExponentialLR(
        {"optimizer": torch.optim.Adam, "optim_args": {"lr": 1e-3}, "gamma": 0.9}
    ),
}
BETAS = [1.0, 0.0, 0.5, lambda epoch: 1.0 / (1 + epoch), 2]
CLIPS = [None, 1.0, 1e-3]
MULTIPLIERS = [None, {"scale": 10}, {"loc": 0.5, "deterministic": 2.0}]

# --------------------------------------------------------------------------- options of predict

DRAWS = [0, 1, 2, 3]
SIZES = [None, None, 4, 6, 100]
PREDICTIVES = [None, None, "bnn", "glm"]
LINKS = ["mc", "mc", "probit", "bridge"]
REDUCTIONS = ["sum", "mean", "none"]
