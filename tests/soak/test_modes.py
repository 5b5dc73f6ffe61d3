"""Every wrapper where gradients are off and in inference mode: the numbers of neither."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import tyxe
from tests.contracts.wrappers import WRAPPERS
from tyxe.integrations.sklearn import METHODS, BayesianRegressor
from tyxe.likelihoods import HomoskedasticGaussian
from tyxe.priors import IIDPrior
from tyxe.util import last_layer

POINTS = 12

# What is made, and what is asked of it.
Case = tuple[Callable[[], Any], Callable[[Any], Any]]


def _classes(wrapper: Any) -> Any:
    x, y = torch.linspace(-1, 1, 2 * POINTS).view(POINTS, 2), torch.arange(POINTS) % 3
    scores = wrapper.evaluate([(x[:6], y[:6]), (x[6:], y[6:])], num_predictions=2)
    samples = wrapper.sample_predictive(x, num_samples=2).float()
    draws, centre = (wrapper.predict(x, num_predictions=count) for count in (3, 0))
    return draws, centre, *scores, samples


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def _regression() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 2 * POINTS).view(POINTS, 2)
    return x, x[:, :1].sin() + 0.1 * torch.cos(9 * x[:, 1:])


def _laplace(structure: str, only_last: bool = False, **options: Any) -> Any:
    net, likelihood = _net(), HomoskedasticGaussian(POINTS, scale=0.3)
    chosen: dict[str, Any] = {"expose_all": False, "expose_modules": [last_layer(net)]}
    prior = IIDPrior(dist.Normal(0, 1), **(chosen if only_last else {}))
    bnn = tyxe.LaplaceBNN(net, prior, likelihood, structure=structure, **options)
    bnn.fit_curvature([_regression()])
    return bnn


def _of_laplace(bnn: Any) -> Any:
    x, y = _regression()
    return (
        *bnn.predict(x),
        bnn.predict(x, predictive="bnn", num_predictions=2)[0],
        bnn.functional_variance(x, joint=True),
        bnn.log_marginal_likelihood(),
        *bnn.evaluate(x, y),
    )


def _with_precision(bnn: Any) -> Any:
    bnn.optimize_prior_precision()
    return _of_laplace(bnn)


def _with_grid(bnn: Any) -> Any:
    bnn.optimize_prior_precision(loader=[_regression()], grid=[0.1, 1.0, 10.0])
    return _of_laplace(bnn)


def _of_gp(bnn: Any) -> Any:
    bnn.fit_gp([_regression()], 8)
    return bnn.predict(_regression()[0], predictive="gp")


def _refined(method: str) -> Callable[[Any], Any]:
    return lambda bnn: bnn.refine([_regression()], method, num_steps=20).predict(_regression()[0])


def _pytorch() -> Any:
    return tyxe.PytorchBNN(_net(), IIDPrior(dist.Normal(0, 1)), tyxe.guides.AutoNormal)


def _variational() -> Any:
    likelihood = HomoskedasticGaussian(POINTS, scale=0.3)
    prior = IIDPrior(dist.Normal(0, 1))
    bnn = tyxe.VariationalBNN(_net(), prior, likelihood, tyxe.guides.AutoNormal)
    bnn.fit([_regression()], torch.optim.Adam, 2)
    return bnn


def _glm(bnn: Any) -> Any:
    return bnn.predict(_regression()[0], predictive="glm")


def _estimator(method: str) -> Any:
    x, y = (part.numpy() for part in _regression())
    epochs = 80 if method == "swag" else 4  # which takes a snapshot in each of the last 20
    hidden = () if method == "nuts" else (4,)  # for shallow trees
    model = BayesianRegressor(hidden=hidden, num_epochs=epochs, method=method, random_state=0)
    return model.fit(x, y[:, 0])


def _of_estimator(estimator: Any) -> Any:
    mean, sd = estimator.predict(_regression()[0].numpy(), return_std=True)
    return torch.from_numpy(np.asarray(mean)), torch.from_numpy(np.asarray(sd))


def _diagnosed(bnn: Any) -> Any:
    report = tyxe.diagnostics.diagnose(bnn, [_regression()], [_regression()], num_predictions=4)
    return torch.tensor([line.value for line in report.values()]).nan_to_num()


def _copied(bnn: Any) -> Any:
    other = _variational()
    other.load_state_dict(bnn.state_dict())
    other.update_prior(IIDPrior(dist.Normal(torch.zeros(()), 2.0)))
    other.fit([_regression()], torch.optim.Adam, 1)
    module, ensemble = other.to_module(), other.to_ensemble(2)
    x = _regression()[0]
    return other.predict(x, num_predictions=2)[0], module(x).detach(), ensemble(x)[0].detach()


CASES: dict[str, Case] = (
    {name: (make, _classes) for name, make in WRAPPERS.items()}
    | {
        "full": (lambda: _laplace("full"), _of_laplace),
        "diag": (lambda: _laplace("diag"), _of_laplace),
        "kron": (lambda: _laplace("kron"), _of_laplace),
        "empirical": (lambda: _laplace("kron", curvature="empirical"), _of_laplace),
        "last layer": (lambda: _laplace("full", only_last=True), _of_laplace),
        "evidence": (lambda: _laplace("kron"), _with_precision),
        "grid": (lambda: _laplace("kron"), _with_grid),
        "gp": (lambda: _laplace("full"), _of_gp),
        "refined": (lambda: _laplace("full"), _refined("laplace")),
        "refined by draws": (lambda: _laplace("full"), _refined("variational")),
        "linearised mean field": (_variational, _glm),
        "diagnosed": (_variational, _diagnosed),
        "copies": (_variational, _copied),
        "PytorchBNN": (_pytorch, lambda bnn: bnn.predict(_regression()[0], num_predictions=3)),
    }
    | {
        f"estimator, {method}": (lambda method=method: _estimator(method), _of_estimator)  # type: ignore[misc]
        for method in METHODS
    }
)


NO_GRAD, INFERENCE = torch.no_grad, torch.inference_mode
# Where it is made, and where it is used.
WAYS: dict[str, tuple[Any, Any]] = {
    "made in inference mode": (INFERENCE, nullcontext),
    "used in inference mode": (nullcontext, INFERENCE),
    "inference mode": (INFERENCE, INFERENCE),
    "no_grad": (NO_GRAD, NO_GRAD),
}


def differing(case: Case) -> list[str]:
    """Return the ways whose numbers are not those of the plain call."""
    expected = _seeded(case, nullcontext, nullcontext)
    return [name for name, way in WAYS.items() if not _equal(_seeded(case, *way), expected)]


def _seeded(case: Case, making: Any, using: Any) -> list[Tensor]:
    pyro.set_rng_seed(0)
    with making():
        made = case[0]()
    pyro.set_rng_seed(1)
    with using():
        found = case[1](made)
    return [found] if isinstance(found, Tensor) else [*found]


def _equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in pairs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_those_outside(name: str) -> None:
    assert differing(CASES[name]) == []


def test_a_wrong_number_is_found() -> None:
    case = (lambda: None, lambda _: torch.tensor(float(torch.is_inference_mode_enabled())))
    assert differing(case) == ["used in inference mode", "inference mode"]
