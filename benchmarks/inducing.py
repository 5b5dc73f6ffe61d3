"""Time and size of inducing weights: the plain net, a mean field, FFG-U by hand, and ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext

import pyro.distributions as dist
from _harness import Case, Contestant, Numbers, ratio, run
from _inducing_by_hand import InducingByHand
from _nets import images, resnet18
from prediction import plain_forwards
from torch import Tensor, nn
from training_step import our_step, plain_step

import tyxe
from tyxe.guides import AutoInducing, AutoNormal, parameter_count

POINTS, SIZE, MAX_LAMBDA, MAX_SCALE, MEMBERS = 50_000, 64, 0.03, 0.1, 5
DRAWS = (1, 5, 10, 20)
Bnn = tyxe.VariationalBNN
NORMS = {"hide_module_types": [nn.BatchNorm2d]}


def ffg_w(net: nn.Module) -> Bnn:
    """Return a mean field of the weights."""
    guide = functools.partial(
        AutoNormal,
        init_scale=1e-4,
        max_guide_scale=MAX_SCALE,
    )
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), **NORMS)
    return Bnn(net, prior, tyxe.likelihoods.Categorical(POINTS), guide)


def inducing(net: nn.Module, m: int, kind: str = "diagonal") -> Bnn:
    """Return inducing weights, `m x m` in every layer."""
    guide = functools.partial(
        AutoInducing,
        inducing_rows=m,
        inducing_cols=m,
        q_inducing=kind,
        everywhere=True,
        max_lambda=MAX_LAMBDA,
        max_scale_u=MAX_SCALE,
        ensemble_size=MEMBERS,
    )
    prior = tyxe.priors.LayerwiseNormalPrior("radford", **NORMS)
    return Bnn(net, prior, tyxe.likelihoods.Categorical(POINTS), guide)


def by_hand(net: nn.Module, m: int) -> InducingByHand:
    """Return FFG-U by hand."""
    return InducingByHand(net, POINTS, m, MAX_LAMBDA, MAX_SCALE)


def methods(smoke_test: bool) -> dict[str, Callable[[], Bnn]]:
    """Return what makes our BNN of each method."""
    net, m = resnet18(smoke_test), 2 if smoke_test else SIZE
    return {
        "FFG-W": lambda: ffg_w(net),
        "FFG-U": lambda: inducing(net, m),
        "ensemble-U": lambda: inducing(net, m, "ensemble"),
    }


def size(bnn: Bnn, net: nn.Module) -> dict[str, float]:
    """Return the number of parameters, relative to those of the plain net."""
    norms = sum(p.numel() for p in bnn.net.parameters() if p.requires_grad)
    return {"parameters, to plain": (parameter_count(bnn.net_guide) + norms) / parameter_count(net)}


def relative(numbers: Numbers) -> dict[str, dict[str, float]]:
    """Return the times of FFG-U by those of FFG-W."""
    pairs = [(name, name.replace("FFG-U", "FFG-W")) for name in numbers if "FFG-U, ours" in name]
    return {f"{own} / {other}": ratio(numbers, own, other) for own, other in pairs}


def step_case(smoke_test: bool) -> Case:
    """Return the training step's case."""
    x, y = images(2 if smoke_test else 32, smoke_test)
    net = resnet18(smoke_test)
    hand = by_hand(net, 2 if smoke_test else SIZE)
    found = [
        Contestant("plain PyTorch", plain_step(resnet18(smoke_test), x, y), "plain"),
        Contestant("FFG-U, by hand", lambda: hand.step(x, y), "by hand"),
    ]
    for name, make in methods(smoke_test).items():
        bnn = make()
        facts, limit = size(bnn, net), "FFG-U, by hand" if name == "FFG-U" else None
        step = our_step(bnn, nullcontext, x, y)
        found.append(Contestant(f"{name}, ours", step, "ours", limit, facts=facts))
    title = "ResNet-18 on 32 x 32 images, batch 32, M = 64"
    return Case("step", title, "step", 7, found, findings=relative)


def predict_case(smoke_test: bool) -> Case:
    """Return the predictions' case: some draws against as many forwards."""
    x, _ = images(2 if smoke_test else 32, smoke_test)
    net = resnet18(smoke_test)
    hand = by_hand(net, 2 if smoke_test else SIZE)
    bnns = {name: make() for name, make in methods(smoke_test).items()}
    found = []
    for count in (1, 2) if smoke_test else DRAWS:
        plain, limit = f"{count} x plain forward", f"FFG-U, by hand, {count}"
        forwards = plain_forwards(net, x, count)
        members = {"parameters, to plain": float(count)}  # as many nets
        found.append(Contestant(plain, forwards, "plain", plain=plain, facts=members))
        hands = functools.partial(hand.predict, x, count)
        found.append(Contestant(limit, _quietly(hands), "by hand", plain=plain))
        for name, bnn in bnns.items():
            predict = functools.partial(bnn.predict, x, num_predictions=count)
            own = limit if name == "FFG-U" else None
            title = f"{name}, ours, {count}"
            found.append(
                Contestant(title, _quietly(predict), "ours", own, plain, facts=size(bnn, net))
            )
    title = "Predictions of ResNet-18 for 32 images by S draws, M = 64"
    return Case("predict", title, "prediction", 3, found, warm_up=False, findings=relative)


def _quietly(function: Callable[[], Tensor]) -> Callable[[], None]:
    """Return a function that gives its result away: the harness takes one for a count."""

    def call() -> None:
        function()

    return call


if __name__ == "__main__":
    run(
        "Seconds of a training step with inducing weights and of predictions by 1 to 20 draws, "
        "relative to the plain net, to FFG-U by hand, and to a mean field of the weights; sizes.",
        {"step": step_case, "predict": predict_case},
    )
