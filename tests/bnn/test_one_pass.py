"""Draws run in one pass where that is faster, unless it would show or give other numbers."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer.autoguide import AutoNormal as PyroAutoNormal
from torch import Tensor, nn

import tyxe
from tests.oracles.bnns import NORMAL, laplace, mean_field, mlp
from tests.oracles.nets import NetOf
from tests.oracles.predictions import seeded
from tyxe.bnn import outputs, passes
from tyxe.bnn.passes import NetOnBatch
from tyxe.guides import AutoNormal
from tyxe.predictive import forwards

N, DRAWS = 6, 7
X, Y = torch.randn(N, 4), torch.randint(3, (N,))
CLASSES = tyxe.likelihoods.Categorical(N)
WIDE = partial(AutoNormal, init_scale=0.3)
NOISE = tyxe.likelihoods.HomoskedasticGaussian(N, scale=dist.LogNormal(0.0, 1.0))


def net_with_head(*after: nn.Module) -> nn.Sequential:
    return mlp(4, 20, 3).extend(after)


def only(*layers: nn.Module) -> tyxe.priors.Prior:
    return tyxe.priors.IIDPrior(dist.Normal(0, 1), expose_all=False, expose_modules=layers)


def classifier(net: nn.Module, *layers: nn.Module) -> tyxe.VariationalBNN:
    return tyxe.VariationalBNN(net, only(*layers), CLASSES, WIDE)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return how many passes of many draws there have been since it was called last."""
    made: list[int] = []
    plain = NetOnBatch.at_once

    def at_once(net: NetOnBatch, together: dict[str, Tensor], size: int | None = None) -> Tensor:
        made.append(len(next(iter(together.values()))))
        return plain(net, together, size)

    monkeypatch.setattr(NetOnBatch, "at_once", at_once)

    def since() -> int:
        found = len(made)
        made.clear()
        return found

    return since


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all be as on a GPU."""
    monkeypatch.setattr(forwards, "FASTER", dict.fromkeys(forwards.FASTER, ("cpu",)))
    monkeypatch.setattr(outputs, "DRAWS_AT_ONCE", ("cpu",))


def test_what_has_no_sites_has_no_stacks(on_gpu: None) -> None:
    """Draws of masks, for one, are no draws of weights."""
    net = nn.Sequential(nn.Linear(4, 20), nn.Dropout(0.5), nn.Linear(20, 3))
    bnn = tyxe.DropoutBNN(net, CLASSES)
    assert bnn.predict(X, num_predictions=DRAWS, aggregate=False).shape == (DRAWS, N, 3)


WAYS = {
    "predict": lambda bnn, **how: bnn.predict(X, num_predictions=DRAWS, **how),
    "raw": lambda bnn, **how: bnn.predict(X, num_predictions=DRAWS, aggregate=False, **how),
    "pieces": lambda bnn, **how: bnn.predict(X, num_predictions=DRAWS, batch_size=4, **how),
    "evaluate": lambda bnn, **how: torch.stack(bnn.evaluate(X, Y, num_predictions=DRAWS, **how)),
    "samples": lambda bnn, **how: bnn.sample_predictive(X, num_samples=DRAWS, **how),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_last_layer_is_one_product_for_all_draws(way: str, count: Callable[[], int]) -> None:
    net = net_with_head(nn.Softplus())
    bnn = classifier(net, net[2])
    expected = seeded(WAYS[way], bnn, vectorize=False)
    assert count() == 0
    for _ in range(2):  # the first is compared with single passes
        torch.testing.assert_close(seeded(WAYS[way], bnn), expected)
        assert count() == (2 if way == "pieces" else 1)


def net_that(sees: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    """Return a body and a head whose forward is another function of the head's output."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return sees(net, net.head(net.body(x).tanh()))

    return NetOf(forward, body=nn.Linear(4, 20), head=nn.Linear(20, 3))


def kept(net: nn.Module, x: Tensor) -> Tensor:
    net.features = x
    return x


SEEING = {
    "value": lambda _, x: x if float(x.sum()) < 1e9 else -x,
    "noise": lambda _, x: x + 0 * torch.rand(3),
    "numpy": lambda _, x: x + torch.as_tensor(x.detach().numpy().mean()),
    "attribute": kept,
}


@pytest.mark.parametrize("name", SEEING)
def test_a_net_that_sees_single_draws_runs_them_one_by_one(name: str, count) -> None:
    net = net_that(SEEING[name])
    bnn = classifier(net, net.head)
    run = partial(bnn.predict, X, num_predictions=DRAWS, aggregate=False)
    expected = seeded(run, vectorize=False)
    assert torch.equal(seeded(run), expected)
    count()  # which may have tried
    assert torch.equal(seeded(run), expected)
    assert count() == 0
    if name == "attribute":
        torch.testing.assert_close(bnn.net.features, expected[-1])
    with tyxe.poutine.report() as told:
        run()
    assert "one by one" in "".join(told.notes)


@pytest.mark.parametrize("case", ["middle", "two", "all", "hook", "scale", "gradients", "lazy"])
def test_what_is_not_to_run_at_once_does_not(case: str, count: Callable[[], int]) -> None:
    net = net_with_head(*[nn.Linear(3, 40), nn.Linear(40, 3)] * (case == "middle"))
    layers = {"two": (net[0], net[2]), "all": tuple(net)}.get(case, (net[2],))
    bnn, seen = classifier(net, *layers), []
    if case == "hook":
        bnn.net[2].register_forward_hook(lambda *given: seen.append(given[2]))
    handler = {
        "scale": partial(poutine.scale, scale=2.0),
        "lazy": tyxe.poutine.local_reparameterization,
    }.get(case)
    run = partial(bnn.predict, X, num_predictions=DRAWS, aggregate=False)
    run = partial(run, enable_grad=case == "gradients")
    if handler is not None:
        run = handler()(run)
    for _ in range(2):
        assert torch.equal(seeded(run), seeded(run, vectorize=False))
    assert count() == 0
    assert all(one.shape == (N, 3) for one in seen)


def test_a_pass_that_gives_other_numbers_is_refused(monkeypatch, count) -> None:
    net = net_with_head()
    bnn = classifier(net, net[2])
    wrong = NetOnBatch.at_once
    monkeypatch.setattr(NetOnBatch, "at_once", lambda *given: wrong(*given).flip(0))
    run = partial(bnn.predict, X, num_predictions=DRAWS, aggregate=False)
    for _ in range(2):
        assert torch.equal(seeded(run), seeded(run, vectorize=False))
    assert count() == 1


PLAIN, NAN, INF = torch.randn(9, 5), torch.nan, torch.inf
MIXED = torch.tensor([[1.0, INF, NAN], [2.0, INF, NAN]])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        # Rounding is less than what draws differ by.
        (1 + PLAIN + 1e-3 * torch.randn(9, 5), 1 + PLAIN, True),
        (1 + 1e-3 * PLAIN + 1e-3 * torch.randn(9, 5), 1 + 1e-3 * PLAIN, False),
        (PLAIN.long(), PLAIN.long(), True),
        (PLAIN.long(), 1 + PLAIN.long(), False),
        (PLAIN, PLAIN.double(), False),
        (MIXED, MIXED.clone(), True),
        *(
            (torch.where(MIXED.isposinf(), other, MIXED), MIXED, False)
            for other in (-INF, 0.0, NAN)
        ),
        (torch.where(MIXED.isnan(), 0.0, MIXED), MIXED, False),
    ],
)
def test_outputs_are_alike_up_to_rounding(one: Tensor, other: Tensor, same: bool) -> None:
    assert forwards.are_alike(one, other) is same


def test_a_pass_without_memory_is_made_in_parts(monkeypatch) -> None:
    net, sizes = net_with_head(), []
    bnn = classifier(net, net[2])
    plain = NetOnBatch.at_once
    run = partial(bnn.predict, X, num_predictions=DRAWS, aggregate=False)
    expected = seeded(run)

    def at_once(net: NetOnBatch, together: dict[str, Tensor], size: int | None = None) -> Tensor:
        sizes.append(size)
        if size is None or size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(net, together, size)

    monkeypatch.setattr(NetOnBatch, "at_once", at_once)
    for _ in range(3):
        torch.testing.assert_close(seeded(run), expected)
    assert sizes == [None, 3, 1]


def test_a_pass_without_memory_holds_none_while_draws_run_in_turn() -> None:
    made, runs = [], forwards.OnePass()
    runs(lambda: PLAIN, lambda: PLAIN)

    def together() -> Tensor:
        half = torch.ones(2)
        made.append(weakref.ref(half))
        raise torch.OutOfMemoryError("CUDA out of memory")

    def in_turn() -> Tensor:
        assert made[0]() is None
        return PLAIN

    assert runs(together, in_turn) is PLAIN


def test_large_draws_and_batches_go_through_in_parts(monkeypatch, on_gpu) -> None:
    net = net_with_head()
    bnn = classifier(net, net[2])  # of 63 weights
    run = partial(bnn.predict, X, num_predictions=DRAWS, aggregate=False)
    run()
    monkeypatch.setattr(passes, "MOST_GIVEN", 3 * X.numel())
    monkeypatch.setattr(outputs, "MOST_DRAWN", {True: 4 * 63, False: 1})
    torch.testing.assert_close(seeded(run), seeded(run, vectorize=False))
    assert [len(each["net.2.bias"]) for each in bnn._at_once(DRAWS)] == [4, 3]


# --------------------------------------------------------------------------- as on a GPU


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(-1, (1, 2, 2)), nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(2, 3)
    )


def variational(net: nn.Module, guide: Any = WIDE) -> tyxe.VariationalBNN:
    return tyxe.VariationalBNN(net, NORMAL, CLASSES, guide)


def chains() -> tyxe.MCMC_BNN:
    bnn = tyxe.MCMC_BNN(net_with_head(), NORMAL, CLASSES, tyxe.samplers.HMC(step_size=0.1))
    bnn._take({n: torch.randn(2, 9, *s) for n, s in bnn._site_shapes().items()})
    return bnn


INDUCING = partial(tyxe.guides.AutoInducing, inducing_rows=2, inducing_cols=2)
MADE = {
    "linear maps": lambda: variational(net_with_head()),
    "convolutions": lambda: variational(convolutional()),
    "noise": lambda: mean_field(nn.Linear(4, 2), NOISE, likelihood_guide_builder=AutoNormal),
    "Laplace": lambda: laplace(net_with_head(), CLASSES, [(X, Y)]),
    "chains": chains,
    "inducing": lambda: variational(net_with_head(), INDUCING),
    "Pyro": lambda: variational(net_with_head(), PyroAutoNormal),
}


@pytest.mark.parametrize("name", MADE)
def test_all_ways_have_the_same_draws(name: str, on_gpu, count: Callable[[], int]) -> None:
    bnn = MADE[name]()
    run = partial(bnn.predict, X, num_predictions=DRAWS, aggregate=False, predictive="bnn")
    expected = seeded(run, vectorize=False)
    assert count() == 0
    for how in ({}, {}, {"vectorize": True}, {"batch_size": 2}):
        torch.testing.assert_close(seeded(run, **how), expected)
        assert count() == (3 if "batch_size" in how else 1)
    assert expected.std(0).min() > 0
    told = seeded(bnn.predict, X, num_predictions=DRAWS, predictive="bnn")
    torch.testing.assert_close(seeded(bnn.to_ensemble, DRAWS)(X), told)
    if name == "linear maps":
        members = tyxe.EnsembleBNN(lambda _: MADE[name](), 2)
        run = partial(members.predict, X, num_predictions=DRAWS, aggregate=False)
        torch.testing.assert_close(seeded(run), seeded(run, vectorize=False))


@pytest.mark.parametrize("name", ["linear maps", "noise", "Laplace", "inducing"])
def test_draws_at_once_have_the_moments_of_single_ones(name: str, on_gpu) -> None:
    bnn, size = MADE[name](), 10_000
    sampler = bnn._sampler()
    assert sampler is not None
    with torch.no_grad():
        together = seeded(sampler, size)
        alone = passes.stacked(seeded(lambda: [*bnn._draws(size // 10)]))
    for site, values in together.items():
        other = alone[site]
        assert values.shape[1:] == other.shape[1:]
        error = (values.var(0) / size + other.var(0) / len(other)).sqrt()
        assert ((values.mean(0) - other.mean(0)).abs() < 5 * error + 1e-12).all()
        ratio = (
            values.log().std(0) / other.log().std(0)
            if "data" in site
            else (values.std(0) / other.std(0))
        )
        assert ((ratio - 1).abs() < 5 * (2 * len(other)) ** -0.5).all()


def clipped(net: Any, x: Tensor) -> Tensor:
    """Read a number where inputs are large, which no transform can."""
    y = net.head(net.body(x).tanh())
    return y.clamp(max=float(y.max()) / 2) if x.max() > 100 else y


def test_a_later_batch_that_torch_vmap_refuses_runs_one_by_one() -> None:
    net = NetOf(clipped, body=nn.Linear(4, 5), head=nn.Linear(5, 3))
    bnn = classifier(net, net.head)
    for x in (X, 1000 * X, X):
        found, expected = (
            seeded(bnn.predict, x, num_predictions=DRAWS, vectorize=how) for how in (None, False)
        )
        torch.testing.assert_close(found, expected)
