"""The contract of wrappers: what is relied on of everything that predicts."""

from __future__ import annotations

import copy
import functools
import pickle
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoDelta, AutoLowRankMultivariateNormal
from torch import Tensor, nn

import tyxe
from tyxe.testing.asserts import assert_close, assert_raises

_N = 12
_X, _Y = torch.linspace(-1, 1, 2 * _N).view(_N, 2), torch.arange(_N) % 3
_LOADER = [(_X[:6], _Y[:6]), (_X[6:], _Y[6:])]
_NORMAL = tyxe.priors.IIDPrior(dist.Normal(0, 1))
_NOTHING = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True)
_LIKELIHOOD = tyxe.likelihoods.Categorical(_N)
_SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.5)
_IVON = functools.partial(tyxe.optim.IVON, lr=0.05, hess_init=10.0)
_SHORT: dict[str, Any] = {"warmup_steps": 4, "num_chains": 2, "compile": False}


def _net(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), *more, nn.Linear(4, 3))


def _variational(guide: Any, prior: Any = _NORMAL, optim: Any = _SGD) -> Any:
    return _trained(tyxe.VariationalBNN(_net(), prior, _LIKELIHOOD, guide), optim, 3)


def _mean_field(_: int) -> Any:
    return tyxe.VariationalBNN(_net(), _NORMAL, _LIKELIHOOD, tyxe.guides.AutoNormal)


def _swag(_: int) -> Any:
    return tyxe.SWAG_BNN(_net(), _NORMAL, _LIKELIHOOD, rank=2)


def _trained(bnn: Any, *arguments: Any, **options: Any) -> Any:
    bnn.fit(_LOADER, *arguments, **options)
    return bnn


def _chains(kernel: Any, **options: Any) -> Any:
    return _trained(tyxe.MCMC_BNN(_net(), _NORMAL, _LIKELIHOOD, kernel), 6, **options)


# Each makes a wrapper and fits it, to classes of 12 points.
WRAPPERS: dict[str, Callable[[], Any]] = {
    "maximum likelihood": lambda: _variational(None, _NOTHING),
    "MAP": lambda: _variational(AutoDelta),
    "mean field": lambda: _variational(tyxe.guides.AutoNormal),
    "low rank": lambda: _variational(functools.partial(AutoLowRankMultivariateNormal, rank=2)),
    "Laplace": lambda: _trained(tyxe.LaplaceBNN(_net(), _NORMAL, _LIKELIHOOD), _SGD, 3),
    "IVON": lambda: _variational(tyxe.guides.AutoNormal, optim=_IVON),
    "HMC": lambda: _chains(tyxe.samplers.HMC(num_steps=2), **_SHORT),
    "NUTS": lambda: _chains(tyxe.samplers.NUTS(max_tree_depth=3), **_SHORT),
    "MCLMC": lambda: _chains(tyxe.samplers.MCLMC(), **_SHORT),
    "SGLD": lambda: _chains(tyxe.samplers.SGLD(0.01)),
    "SGHMC": lambda: _chains(tyxe.samplers.SGHMC(0.01)),
    "SWAG": lambda: _trained(_swag(0), _SGD, 4, start=0.0),
    "dropout": lambda: _trained(tyxe.DropoutBNN(_net(nn.Dropout(0.2)), _LIKELIHOOD), _SGD, 3),
    "ensemble": lambda: _trained(tyxe.EnsembleBNN(_mean_field, 2), _SGD, 3),
    "ensemble in one tensor": lambda: _trained(
        tyxe.EnsembleBNN(_mean_field, 2), _SGD, 3, vectorize=True
    ),
    "Multi-SWAG": lambda: _trained(tyxe.EnsembleBNN(_swag, 2), _SGD, 4, start=0.0),
}


def _by(optim: Any, **options: Any) -> Callable[..., Any]:
    return lambda bnn, epochs, callback: _trained(bnn, optim, epochs, callback, **options)


# Each trains one of these for some epochs with a callback, if what is saved there can go on.
TRAINING: dict[str, Callable[..., Any]] = {
    name: _by(_SGD) for name in ("maximum likelihood", "MAP", "mean field", "low rank", "dropout")
} | {"IVON": _by(_IVON), "SWAG": _by(_SGD, start=0.0)}


def check_wrapper(
    make: Callable[[], Any],
    inputs: Any = _X,
    targets: Tensor = _Y,
    train: Callable[..., Any] | None = None,
) -> None:
    """Assert that a wrapper of classes predicts and keeps its state as all others do.

    Args:
        make: returns a fitted wrapper, with the same structure at each call.
        inputs: of its net.
        targets: `(n,)`.
        train: called as `train(wrapper, num_epochs, callback)`, where what a callback saves with
            `training=True` can go on.
    """
    torch.manual_seed(0)
    wrapper = make()
    _check_predictions(wrapper, inputs, targets)
    _check_scores(wrapper, inputs, targets)
    _check_bystanders(wrapper, inputs)
    _check_state(wrapper, make, inputs)
    _check_bad_input(wrapper, inputs, targets)
    if train is not None:
        _check_going_on(wrapper, make, train)


def _seeded(call: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    return call()


def _check_predictions(wrapper: Any, inputs: Any, targets: Tensor) -> None:
    n, predict = len(targets), functools.partial(wrapper.predict, inputs)
    draws = predict(num_predictions=4, aggregate=False)
    assert (len(draws) % 4, draws.shape[1]) == (0, n), "draws are not (draws, n, ...)"
    for count in (0, 1, 4):
        assert predict(num_predictions=count).shape == draws.shape[1:], "the aggregate's shape"
    first, again = (_seeded(lambda: predict(num_predictions=4)) for _ in range(2))
    assert_close(again, first, "a seed gives other predictions")
    assert_close(predict(num_predictions=0), predict(num_predictions=0), "the centre is random")
    if _draws_weights(wrapper):
        cut = _seeded(lambda: predict(num_predictions=4, batch_size=5))
        assert_close(cut, first, "predictions depend on batch_size", rtol=1e-4)
        halves = [inputs[: n // 2], inputs[n // 2 :]]
        loaded = _seeded(lambda: wrapper.predict(halves, num_predictions=4))
        assert_close(loaded, first, "a loader's predictions are others", rtol=1e-4)
    assert wrapper.sample_predictive(inputs, num_samples=7).shape == (7, n), "samples' shape"


def _draws_weights(wrapper: Any) -> bool:
    """Whether draws are of weights, and not of masks or Gaussian outputs of each row."""
    kind = getattr(wrapper, "_default_predictive", "bnn")
    return kind == "bnn" and not isinstance(wrapper, tyxe.DropoutBNN)


def _check_scores(wrapper: Any, inputs: Any, targets: Tensor) -> None:
    evaluate = functools.partial(wrapper.evaluate, inputs, targets, 4)
    error, found = _seeded(lambda: evaluate(reduction="none"))
    for name, reduce in (("sum", torch.sum), ("mean", torch.mean)):
        both = _seeded(lambda name=name: evaluate(reduction=name))  # type: ignore[misc]
        assert_close(torch.stack([*both]), torch.stack([reduce(error), reduce(found)]), name)
    if getattr(wrapper, "_default_predictive", "bnn") == "bnn":
        draws = _seeded(lambda: wrapper.predict(inputs, num_predictions=4, aggregate=False))
        picked = draws.log_softmax(-1).gather(-1, targets.expand(len(draws), -1)[..., None])
        mixture = picked[..., 0].exp().mean(0).log()
        assert_close(found, mixture, "the log-likelihood is not the mixture's", rtol=1e-4)


def _check_bystanders(wrapper: Any, inputs: Any) -> None:
    wrapper.train()
    modes = [module.training for module in wrapper.modules()]
    outputs = wrapper.predict(inputs, num_predictions=2)
    assert [module.training for module in wrapper.modules()] == modes, "predict changes modes"
    assert not outputs.requires_grad, "predictions have a graph"
    expected = _seeded(lambda: wrapper.predict(inputs, num_predictions=0))
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(wrapper.predict, inputs, num_predictions=0).result()
    assert_close(found, expected, "another thread predicts something else")


def _check_state(wrapper: Any, make: Callable[[], Any], inputs: Any) -> None:
    def predictions(one: Any) -> Any:
        return _seeded(lambda: one.predict(inputs, num_predictions=4))

    expected, fresh, saved = predictions(wrapper), make(), make()
    fresh.load_state_dict(wrapper.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        wrapper.save(f"{folder}/wrapper")
        saved.load(f"{folder}/wrapper")
    pickled, copied = pickle.loads(pickle.dumps(wrapper)), copy.deepcopy(wrapper)
    copies = {"load_state_dict": fresh, "load": saved, "pickle": pickled, "deepcopy": copied}
    for what, one in copies.items():
        assert_close(predictions(one), expected, f"{what} gives other predictions")
    before = copy.deepcopy(fresh.state_dict())
    assert_raises(RuntimeError, lambda: fresh.load_state_dict({"weight": inputs}), "another state")
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, before[name]), "a wrong state dict changes something"
    if not isinstance(wrapper, tyxe.EnsembleBNN):
        centre = wrapper.predict(inputs, num_predictions=0, aggregate=False)[0]
        assert_close(wrapper.to_module()(inputs), centre, "to_module is not at the centre")
    if isinstance(wrapper, tyxe.DropoutBNN):
        assert_raises(TypeError, lambda: wrapper.to_ensemble(2), "masks as draws")
    else:
        shape = wrapper.predict(inputs).shape
        assert wrapper.to_ensemble(2)(inputs).shape == shape, "to_ensemble's shape"


def _check_bad_input(wrapper: Any, inputs: Any, targets: Tensor) -> None:
    for what, call in {
        "a negative number": lambda: wrapper.predict(inputs, num_predictions=-1),
        "no samples": lambda: wrapper.sample_predictive(inputs, num_samples=0),
        "no targets": lambda: wrapper.evaluate(inputs),
        "targets of another shape": lambda: wrapper.evaluate(inputs, targets[:, None]),
        "another reduction": lambda: wrapper.evaluate(inputs, targets, reduction="max"),
    }.items():
        assert_raises(ValueError, call, what)


def _check_going_on(wrapper: Any, make: Callable[[], Any], train: Callable[..., Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:

        def save(bnn: Any, epoch: int, loss: float) -> None:
            if epoch == 1:
                bnn.save(f"{folder}/wrapper", training=True)

        train(wrapper, 4, save)
        loaded = make()
        loaded.load(f"{folder}/wrapper")
        train(loaded, 2, None)
    for name, value in wrapper.state_dict().items():
        assert_close(loaded.state_dict()[name], value, f"a loaded training differs in {name}")
