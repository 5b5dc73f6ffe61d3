"""Priors, likelihoods, guides, handlers and optimisers for the fuzz; `ODD_...` have to be refused.

An odd part may work where its mistake does not matter; what works then has to pass all checks.
"""

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
from tyxe.guides import AutoBernoulli, AutoInducing, AutoNormal, AutoRadial, PretrainedInitializer
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
ODD_PRIORS: Table = {
    "no prior": lambda net: NORMAL,
    "None": lambda net: None,
    "a class": lambda net: IIDPrior,
    "of a class": lambda net: IIDPrior(dist.Normal),
    "of a number": lambda net: IIDPrior(1.0),
    "a vector": _iid(dist.Normal(torch.zeros(7), 1.0)),
    "a point": _iid(dist.Delta(torch.tensor(0.0))),
    "discrete": _iid(dist.Bernoulli(0.5)),
    "counts": _iid(dist.Poisson(1.0)),
    "an empty mapping": lambda net: DictPrior({}),
    "another net's mapping": lambda net: DictPrior({"other": NORMAL}),
    "a function of a number": lambda net: LambdaPrior(lambda n, m, p: 1.0),
    "a function of two arguments": lambda net: LambdaPrior(lambda n, m: NORMAL),
    "a function, misshapen": lambda net: LambdaPrior(lambda n, m, p: NORMAL.expand([9])),
    "an unknown name": _iid(NORMAL, expose=["nothing.weight"]),
    "names that match nothing": _iid(NORMAL, hide_parameters=["nothing"]),
    "another net's module": _iid(NORMAL, hide_modules=[nn.Linear(1, 1)]),
    "a string for a list": lambda net: IIDPrior(NORMAL, hide="weight"),
    "a type that is none": lambda net: IIDPrior(NORMAL, hide_module_types=["Linear"]),
    "a bare type": lambda net: IIDPrior(NORMAL, hide_module_types=nn.Linear),
    "an unknown method": lambda net: LayerwiseNormalPrior(method="lecun"),
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


def _loss(n: int | None) -> Any:
    return nn.MSELoss()


ODD_LIKELIHOODS: dict[str, Data] = {
    "none": Data(lambda n: None, CLASSES, _classes),
    "a class": Data(lambda n: Categorical, CLASSES, _classes),
    "a loss": Data(_loss, 2, torch.randn),
    "too small": Data(lambda n: Categorical(2), CLASSES, _classes),
    "unknown size": Data(lambda n: Categorical(None), CLASSES, _classes),
    "size zero": Data(lambda n: Categorical(0), CLASSES, _classes),
    "probabilities of logits": Data(lambda n: Categorical(n, logit_predictions=False), 3, _classes),
    "binary probabilities": Data(lambda n: Bernoulli(n, logit_predictions=False), 1, _binary),
    "no noise": Data(HomoskedasticGaussian, 2, torch.randn),
    "negative noise": Data(lambda n: HomoskedasticGaussian(n, scale=-1.0), 2, torch.randn),
    "noise of another width": _gaussian(scale=torch.ones(3)),
    "noise of two kinds": _gaussian(scale=1.0, precision=1.0),
    "noise of any sign": _gaussian(scale=dist.Normal(0.0, 1.0)),
    "odd width": Data(HeteroskedasticGaussian, 3, torch.randn),
    "many events": Data(lambda n: HomoskedasticGaussian(n, scale=1.0, event_dim=5), 2, torch.randn),
    "negative events": Data(lambda n: Categorical(n, event_dim=-1), CLASSES, _classes),
}

# What a mistake makes of targets; the last ones may be right for some likelihoods.
ODD_TARGETS: Table = {
    "NaN": lambda y: torch.full(y.shape, torch.nan),
    "infinite": lambda y: torch.full(y.shape, torch.inf),
    "too large": lambda y: (y.long() + 100).to(y.dtype) if y.dtype != torch.bool else y[:-1],
    "fewer": lambda y: y[:-1],
    "one dimension more": lambda y: y.unsqueeze(-1),
    "first alone": lambda y: y[:1],
    "a list": Tensor.tolist,
    "an array": lambda y: y.numpy(),
    "None": lambda y: None,
    "complex": lambda y: y.to(torch.complex64),
    "no points": lambda y: y[:0],
    "a number": lambda y: y.float().sum(),
    "negative": lambda y: -1 - y.float().abs() if y.is_floating_point() else -1 - y.long(),
}
# What targets of some likelihoods may well be, by parts of their names.
ALLOWED = {
    # Missing.
    "NaN": ("Gaussian", "heteroskedastic", "counts", "noise", "events", "odd width", "binary"),
    "too large": ("Gaussian", "heteroskedastic", "counts", "noise", "events"),
    "negative": ("Gaussian", "heteroskedastic", "noise", "odd width", "events"),
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
ODD_GUIDES: Table = {
    "none": None,
    "None": lambda: None,
    "a kernel": lambda: HMC,
    "a string": lambda: "AutoNormal",
    "built": lambda: autoguide.AutoDelta(lambda: pyro.sample("w", NORMAL)),
    "a number": lambda: lambda program: 3,
    "negative scale": lambda: functools.partial(AutoNormal, init_scale=-1.0),
    "zero scale": lambda: functools.partial(AutoNormal, init_scale=0.0),
    "no rows": lambda: functools.partial(AutoInducing, inducing_rows=0, inducing_cols=0),
    "no sizes": lambda: AutoInducing,
    "unknown family": lambda: functools.partial(
        AutoInducing, inducing_rows=1, inducing_cols=1, q_inducing="other"
    ),
    "another net's values": lambda: functools.partial(
        AutoNormal, init_loc_fn=PretrainedInitializer.from_net(nn.Linear(9, 9))
    ),
    "no values": lambda: functools.partial(AutoNormal, init_loc_fn=3),
    "discrete": lambda: autoguide.AutoDiscreteParallel,
    "unknown option": lambda: functools.partial(AutoNormal, scale=1.0),
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
ODD_KERNELS: Table = {
    "None": lambda: None,
    "a guide": lambda: AutoNormal,
    "a string": lambda: "NUTS",
    "a kernel, built": lambda: NUTS(lambda: pyro.sample("w", NORMAL)),
    "a function of nothing": lambda: lambda model: None,
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
ODD_HANDLERS: Table = {
    "mask of another length": lambda: tyxe.poutine.selective_mask(mask=MASK[:3], expose=DATA),
    "mask of nothing": lambda: tyxe.poutine.selective_mask(mask=MASK & False, expose=DATA),
    "mask of numbers": lambda: tyxe.poutine.selective_mask(mask=MASK.float(), expose=DATA),
    "mask of a matrix": lambda: tyxe.poutine.selective_mask(mask=MASK[None], expose=DATA),
    "a string to expose": lambda: tyxe.poutine.selective_scale(scale=2.0, expose=DATA[0]),
    "negative scale": lambda: tyxe.poutine.selective_scale(scale=-1.0, expose=DATA),
    "tensor scale": lambda: tyxe.poutine.selective_scale(scale=torch.ones(2), expose=DATA),
    "unknown curvature": lambda: tyxe.poutine.variational_laplace(curvature="kfac"),
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
ODD_OPTIMISERS: Table = {
    "a string": lambda bnn: "adam",
    "None": lambda bnn: None,
    "LBFGS": lambda bnn: torch.optim.LBFGS,
    "another net's": lambda bnn: _adam(nn.Linear(1, 1).parameters()),
    "a learning rate": lambda bnn: 1e-3,
}
ODD_COUNTS = [-1, 1.5, "2", None, True]

BETAS = [1.0, 0.0, 0.5, lambda epoch: 1.0 / (1 + epoch), 2]
ODD_BETAS = [-1.0, lambda epoch: -1.0, "1", torch.nan, None]
CLIPS = [None, 1.0, 1e-3]
ODD_CLIPS = [0.0, -1.0, "1"]
MULTIPLIERS = [None, {"scale": 10}, {"loc": 0.5, "deterministic": 2.0}]
ODD_MULTIPLIERS = [{"mean": 2.0}, {"scale": -1.0}, 2.0]

# --------------------------------------------------------------------------- options of predict

DRAWS = [0, 1, 2, 3]
ODD_DRAWS = [-1, 1.5, "3"]
SIZES = [None, None, 4, 6, 100]
ODD_SIZES = [0, -2, 1.5, "4"]
PREDICTIVES = [None, None, "bnn", "glm"]
ODD_PREDICTIVES = ["kron", "laplace", 3]
LINKS = ["mc", "mc", "probit", "bridge"]
ODD_LINKS = ["logit", None, 3]
REDUCTIONS = ["sum", "mean", "none"]
ODD_REDUCTIONS = ["max", None, 3]


def _of_tensors(function: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    def on(inputs: Any) -> Any:
        if isinstance(inputs, tuple):
            return tuple(map(on, inputs))
        if isinstance(inputs, dict):
            return {name: on(value) for name, value in inputs.items()}
        return function(inputs) if isinstance(inputs, Tensor) else inputs

    return on


ODD_INPUTS: Table = {
    "fewer features": _of_tensors(lambda x: x[..., :-1]),
    "a list": _of_tensors(Tensor.tolist),
    "an array": _of_tensors(Tensor.numpy),
    "no points": _of_tensors(lambda x: x[:0]),
    "doubles": _of_tensors(Tensor.double),
    "integers": _of_tensors(Tensor.long),
    "None": lambda x: None,
    "a string": lambda x: "x",
    "a mapping of another name": lambda x: {"other": x},
    "too many": lambda x: (x, x, x, x),
    "NaN": _of_tensors(lambda x: x.double() * torch.nan),
    "one point without its dimension": _of_tensors(lambda x: x[0]),
}
