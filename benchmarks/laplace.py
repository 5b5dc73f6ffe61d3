"""Time of a Laplace approximation: curvature, evidence and linearised predictive of a small CNN."""

from __future__ import annotations

from collections.abc import Callable

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from _harness import Case, Contestant, run
from _laplace_by_hand import Batches, HandLaplace, sampled_residuals, softmax_roots
from torch import Tensor, nn

import tyxe

BATCH = 100
STEPS = 100
# structure and curvature of all layers, and the columns by hand.
PASSES = {
    "kron exact": ("kron", "ggn", softmax_roots),
    "kron MC Fisher": ("kron", "fisher", sampled_residuals),
    "diag exact": ("diag", "ggn", softmax_roots),
    "diag MC Fisher": ("diag", "fisher", sampled_residuals),
}


def cnn(smoke_test: bool) -> nn.Sequential:
    """Return the net: convolutions of 16 and 32 channels, 128 hidden units, 10 classes."""
    narrow, wide, hidden, side = (2, 3, 5, 2) if smoke_test else (16, 32, 128, 7)
    return nn.Sequential(
        nn.Conv2d(1, narrow, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(narrow, wide, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(wide * side**2, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )


def data(smoke_test: bool) -> Batches:
    """Return 2,000 random images with one channel, and labels, in batches."""
    count, side = (8, 8) if smoke_test else (2000, 28)
    x, y = torch.randn(count, 1, side, side), torch.randint(10, (count,))
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def points_in(batches: Batches) -> int:
    """Return the number of images."""
    return sum(len(x) for x, _ in batches)


def epoch(net: nn.Module, batches: Batches) -> Callable[[], None]:
    """Return one epoch of plain training."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def train() -> None:
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

    return train


def make_bnn(
    net: nn.Sequential, points: int, structure: str, curvature: str = "ggn", last: bool = False
) -> tyxe.LaplaceBNN:
    """Return the net with a standard normal prior on all weights, or on the last layer's."""
    options = {"expose_modules": [net[-1]], "expose_all": False} if last else {}
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), **options)
    likelihood = tyxe.likelihoods.Categorical(points)
    return tyxe.LaplaceBNN(net, prior, likelihood, structure=structure, curvature=curvature)


def our_pass(bnn: tyxe.LaplaceBNN, batches: Batches) -> Callable[[], None]:
    """Return the pass that makes a trained net Bayesian."""
    return lambda: bnn.fit_curvature(batches, progress=False)


def pairs(net: nn.Sequential, batches: Batches) -> list[Contestant]:
    """Return every curvature pass by hand and ours."""
    points, hand = points_in(batches), HandLaplace(net)
    found = []
    for name, (structure, curvature, roots) in PASSES.items():
        by_hand = hand.kron if structure == "kron" else hand.diag
        bnn = make_bnn(net, points, structure, curvature)
        limit = f"{name}, by hand"
        found += [
            Contestant(limit, lambda f=by_hand, r=roots: f(batches, r), "by hand"),
            Contestant(f"{name}, ours", our_pass(bnn, batches), "ours", limit),
        ]
    for structure, by_hand in (("kron", hand.head_kron), ("full", hand.head_full)):
        bnn = make_bnn(net, points, structure, last=True)
        limit = f"last layer {structure}, by hand"
        found += [
            Contestant(limit, lambda f=by_hand: f(batches), "by hand"),
            Contestant(f"last layer {structure}, ours", our_pass(bnn, batches), "ours", limit),
        ]
    return found


def curvature_case(smoke_test: bool) -> Case:
    """Return the case of the passes over the data."""
    batches, net = data(smoke_test), cnn(smoke_test)
    plain = Contestant("plain epoch", epoch(cnn(smoke_test), batches), "plain")
    title = "Curvature of conv16-conv32-fc128-fc10, 2,000 images"
    return Case("curvature", title, "pass", 7, [plain, *pairs(net, batches)])


def evidence_case(smoke_test: bool) -> Case:
    """Return the case of one prior precision for all layers."""
    batches, net = data(smoke_test), cnn(smoke_test)
    hand, bnn = HandLaplace(net), make_bnn(net, points_in(batches), "kron")
    hand.kron(batches, softmax_roots)
    bnn.fit_curvature(batches, progress=False)

    def by_hand() -> None:
        hand.ascend(STEPS)

    def ours() -> None:
        bnn.optimize_prior_precision()

    plain = Contestant("plain epoch", epoch(cnn(smoke_test), batches), "plain")
    found = [
        plain,
        Contestant("100 steps, by hand", by_hand, "by hand"),
        Contestant("to its maximum, ours", ours, "ours", "100 steps, by hand"),
    ]
    return Case("evidence", "Prior precision by the evidence, kron", "run", 15, found)


def predictors(net: nn.Sequential, batches: Batches, x: Tensor) -> list[Contestant]:
    """Return every linearised predictive by hand and ours."""
    hand, points = HandLaplace(net), points_in(batches)
    hand.kron(batches, softmax_roots)
    hand.head_kron(batches)
    hand.head_full(batches)
    hand.head_factorize()
    rows = {
        "all layers kron": (hand.predict, make_bnn(net, points, "kron")),
        "last layer kron": (hand.head_predict_kron, make_bnn(net, points, "kron", last=True)),
        "last layer full": (hand.head_predict_full, make_bnn(net, points, "full", last=True)),
    }
    found = []
    for name, (by_hand, bnn) in rows.items():
        bnn.fit_curvature(batches, progress=False)
        limit = f"{name}, by hand"
        found += [
            Contestant(limit, lambda f=by_hand: void(f(x)), "by hand"),
            Contestant(
                f"{name}, ours", lambda b=bnn: void(b.predict(x, link="probit")), "ours", limit
            ),
        ]
    return found


def void(_: Tensor) -> None:
    """Drop a result."""


def predictive_case(smoke_test: bool) -> Case:
    """Return the case of the linearised predictive with the probit link."""
    batches, net = data(smoke_test), cnn(smoke_test)
    x = batches[0][0]

    @torch.no_grad()
    def forward() -> None:
        net(x)

    plain = Contestant("plain forward", forward, "plain")
    found = [plain, *predictors(net, batches, x)]
    return Case("predictive", "glm predictive of 100 images, probit link", "batch", 15, found)


if __name__ == "__main__":
    run(
        "Seconds of a curvature pass, of a hundred steps of the prior precision and of a "
        "linearised prediction, and ratios to an epoch or a forward of the plain net and to the "
        "same by hand.",
        {"curvature": curvature_case, "evidence": evidence_case, "predictive": predictive_case},
    )
