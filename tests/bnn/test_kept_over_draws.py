"""What no site touches runs once for all draws, unless that changes what the net returns."""

import functools
import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

import tyxe
from tests.oracles import front_nets
from tests.oracles.front_nets import Drops, Net, Residual
from tests.oracles.nets import ReadLast
from tests.oracles.predictions import seeded
from tyxe.bnn import laplace_posterior
from tyxe.bnn.passes import NetOnBatch
from tyxe.bnn.potential import Potential, exclusive_unvalidated
from tyxe.predictive.prefix import SiteFreePrefix
from tyxe.priors import IIDPrior
from tyxe.samplers import HMC, NUTS

N = 6


class Counted(nn.Conv2d):
    """Counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


Recurrent = functools.partial(ReadLast, nn.LSTM, 3, 5, 1)


class Attends(nn.Module):
    """A layer of a transformer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.head = nn.TransformerEncoderLayer(4, 2, 8), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.front(x).mean(1))


def resnet() -> ResNet:
    net = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=3)
    net.conv1 = Counted(3, 64, 3, bias=False)
    return net


def last(layer: nn.Module) -> tyxe.priors.Prior:
    return tyxe.priors.IIDPrior(dist.Normal(0, 1), expose_all=False, expose_modules=[layer])


def classifier(net: nn.Module, layer: nn.Module) -> tyxe.VariationalBNN:
    likelihood = tyxe.likelihoods.Categorical(N)
    return tyxe.VariationalBNN(net, last(layer), likelihood, tyxe.guides.AutoNormal)


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SiteFreePrefix, "__call__", lambda self, forward: forward())


WAYS = {
    "loop": lambda bnn, x, y: bnn.predict(x, num_predictions=5, aggregate=False),
    "vmap": lambda bnn, x, y: bnn.predict(x, num_predictions=11, aggregate=False, vectorize=True),
    "pieces": lambda bnn, x, y: bnn.predict(x, num_predictions=5, batch_size=2),
    "loader": lambda bnn, x, y: bnn.predict([x, 2 * x], num_predictions=5),
    "one": lambda bnn, x, y: bnn.predict(x, num_predictions=1),
    "evaluate": lambda bnn, x, y: torch.stack(bnn.evaluate(x, y, num_predictions=5)),
    "samples": lambda bnn, x, y: bnn.sample_predictive(x, num_samples=5),
}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("handler", [None, tyxe.poutine.local_reparameterization])
def test_predictions_are_bit_for_bit_those_without(how, handler, monkeypatch) -> None:
    if handler is not None and how == "vmap":
        handler = tyxe.poutine.report
    net, x, y = resnet(), torch.randn(N, 3, 16, 16), torch.randint(3, (N,))
    bnn = classifier(net, net.fc)

    def run() -> Tensor:
        if handler is None:
            return seeded(WAYS[how], bnn, x, y)
        with handler():
            return seeded(WAYS[how], bnn, x, y)

    found = run()
    # The second pass of the first batch is compared with one of the whole net.
    assert bnn.net.conv1.calls == {"pieces": 4, "loader": 3, "one": 1}.get(how, 2)
    run()
    assert bnn.net.conv1.calls == {"pieces": 7, "loader": 5, "one": 2}.get(how, 3)
    without(monkeypatch)
    assert torch.equal(found, run())


def test_statistics_of_each_draw_are_met(monkeypatch) -> None:
    net = resnet()
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 0.1), hide_module_types=[nn.BatchNorm2d])
    bnn = tyxe.VariationalBNN(net, prior, tyxe.likelihoods.Categorical(N), tyxe.guides.AutoNormal)
    x = torch.randn(N, 3, 16, 16)
    bnn.update_norm_statistics([x])
    found = seeded(bnn.predict, x, num_predictions=3)
    without(monkeypatch)
    assert torch.equal(found, seeded(bnn.predict, x, num_predictions=3))


@pytest.mark.parametrize("kind", [Attends, Recurrent])
def test_fused_layers_are_bit_for_bit_those_without(kind, monkeypatch) -> None:
    net = kind()
    bnn, x = classifier(net, net.head), torch.randn(N, 7, 4 if kind is Attends else 3)
    found = seeded(bnn.predict, x, num_predictions=4, aggregate=False)
    without(monkeypatch)
    assert torch.equal(found, seeded(bnn.predict, x, num_predictions=4, aggregate=False))


def test_a_fit_trains_the_front_beside_the_sites() -> None:
    net = Recurrent()
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(N, scale=0.5)
    bnn = tyxe.VariationalBNN(net, last(net.head), likelihood, tyxe.guides.AutoNormal)
    x, y = torch.randn(N, 7, 3), torch.randn(N, 1)
    before = bnn.net.cell.weight_ih_l0.detach().clone()
    for _ in range(2):
        bnn.predict(x, num_predictions=3)
        bnn.fit([(x, y)], torch.optim.Adam, 2)
        assert not torch.equal(before, bnn.net.cell.weight_ih_l0)
        before = bnn.net.cell.weight_ih_l0.detach().clone()
        centre = bnn.predict(x, num_predictions=0)[0]
        with torch.no_grad():
            torch.testing.assert_close(centre, bnn.to_module()(x))


@pytest.mark.parametrize("kernel", [NUTS(), HMC(num_steps=3)], ids=["NUTS", "HMC"])
def test_chains_on_a_last_layer_are_those_on_its_features(kernel) -> None:
    net, x, y = Recurrent(), torch.randn(20, 7, 3), torch.randn(20, 1)
    with torch.no_grad():
        features = net.cell(x)[0][:, -1]
    found = {}
    for name, part, layer, inputs in (
        ("net.head", net, net.head, x),
        ("net.0", plain := nn.Sequential(net.head), plain[0], features),
    ):
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(20, scale=0.5)
        bnn = tyxe.MCMC_BNN(part, last(layer), likelihood, kernel)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tyxe.TyxeWarning)  # few samples
            run = seeded(bnn.fit, [(inputs, y)], 10, warmup_steps=10, num_chains=2)
        found[name] = run.get_samples()[f"{name}.weight"]
    assert torch.equal(found["net.head"], found["net.0"])


def test_potentials_are_bit_for_bit_those_without(monkeypatch) -> None:
    net, x, y = Recurrent(), torch.randn(20, 7, 3), torch.randn(20, 1)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(20, scale=0.5)
    bnn = tyxe.MCMC_BNN(net, last(net.head), likelihood, NUTS()).eval()
    potential = Potential(bnn, x, y)
    potential.look(potential.flatten(bnn._in_places())[None])
    at = potential.flatten(bnn._in_places()).requires_grad_()

    def energies() -> list[Tensor]:
        with exclusive_unvalidated():
            every = [potential.at(at) for _ in range(3)]
        return [one for e in every for one in (e.detach(), torch.autograd.grad(e, at)[0])]

    found = energies()
    without(monkeypatch)
    assert all(map(torch.equal, found, energies()))


# --------------------------------------------------------------------------- nets of all kinds


NETS = {kind.__name__: kind for one in (Net, Residual, Drops) for kind in one.__subclasses__()}
KEPT = {"Residual", "Recurrent", "Containers", "IgnoresReturn"}


@pytest.mark.parametrize("name", NETS)
def test_passes_are_those_of_the_net_whatever_it_does(name: str, monkeypatch) -> None:
    """Where a pass changes what is kept, such as in place, nothing is kept any more."""
    torch.manual_seed(0)
    net, x = NETS[name]().eval(), torch.randn(5, 3)
    x = (x @ x.mT).relu().to_sparse() if name == "Sparse" else x
    found = {}
    for keeps in (True, False):
        bnn = classifier(net, net.head).eval()
        if not keeps:
            without(monkeypatch)
        y = x.clone()  # which some nets change in place
        found[keeps] = seeded(bnn.predict, y, num_predictions=4, aggregate=False)
        if keeps and name in KEPT:
            assert bnn._runtime.keeps_prefix
    if name != "ChangesInput":  # whose inputs are others in each pass
        assert torch.equal(found[True], found[False])


BOX: list[Tensor] = []


class Hands(nn.Module):
    """Hands a draw to a module without sites, as a hypernet does: by an attribute or a global."""

    class Main(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.made = nn.Parameter(torch.ones(1)), None

        def forward(self, x: Tensor) -> Tensor:
            return self.gain * (BOX[-1] if self.made is None else self.made) + 0 * x[:, :1]

    def __init__(self, how: str) -> None:
        super().__init__()
        self.head, self.main, self.how = nn.Linear(3, 1, bias=False), self.Main(), how

    def forward(self, x: Tensor) -> Tensor:
        made = self.head(x)
        if self.how == "attribute":
            self.main.made = made
        else:
            BOX[:] = [made]
        return self.main(x)


def test_activations_in_place_are_kept_with_what_they_write_into() -> None:
    net = resnet()
    net.layer4[0].conv2 = last_conv = Counted(512, 512, 3, padding=1, bias=False)
    bnn = classifier(net, net.fc).eval()
    passes = NetOnBatch(bnn, torch.randn(N, 3, 16, 16), keeps=True)
    with torch.no_grad():
        for _ in range(5):
            passes(bnn._one_draw())
    assert last_conv.calls == 0
    assert bnn.net.layer4[0].conv2.calls == 2  # the second of the whole net


def test_what_is_kept_is_run_again_where_the_net_writes_into_it() -> None:
    class Caps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.cap = nn.Linear(3, 1), nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.body(x).clamp_(max=self.cap)

    prior = IIDPrior(dist.Normal(0, 1), expose=["cap"])
    bnn = tyxe.PytorchBNN(Caps(), prior, tyxe.guides.AutoNormal).eval()
    x = 10 * torch.randn(N, 3)
    passes = NetOnBatch(bnn, x, keeps=True)
    # The second does not show it, since it writes the same over what the first has written.
    for cap in (torch.tensor([c]) for c in (1.0, 0.5, 2.0)):
        with torch.no_grad():
            assert torch.equal(passes({"net.cap": cap}), 2 * bnn.net.body(x).clamp(max=cap))


@pytest.mark.parametrize("how", ["attribute", "global"])
@pytest.mark.parametrize("vectorize", [False, True])
def test_a_draw_that_is_handed_over_is_met_and_reported(how: str, vectorize: bool) -> None:
    net, x = Hands(how), torch.randn(N, 3)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(N, scale=0.5)
    bnn = tyxe.VariationalBNN(net, last(net.head), likelihood, tyxe.guides.AutoNormal)
    many = {"num_predictions": 400, "aggregate": False, "vectorize": vectorize}
    found = seeded(bnn.predict, x, **many)
    scale = bnn.net_guide.get_scale("head.weight").detach()
    expected = (x.square() @ scale.square().mT).sqrt()
    torch.testing.assert_close(found.std(0), expected, rtol=0.15, atol=0.0)
    with tyxe.poutine.report() as report:
        bnn.predict(x, num_predictions=2)
    assert "The whole net runs for each draw" in str(report)


class Force(nn.Module):
    """Returns a derivative of an energy, where each weight acts at places no map shows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.b(torch.tanh(self.a(x))).sum()
            return -torch.autograd.grad(energy, x, create_graph=True)[0]

    def by_hand(self, values: dict[str, Tensor], x: Tensor) -> Tensor:
        h = torch.tanh(x @ values["a.weight"].mT + values["a.bias"])
        return -((1 - h * h) * values["b.weight"][0]) @ values["a.weight"]


@pytest.mark.parametrize("name", ["full", "diag", "kron", "mean field"])
def test_every_linearised_wrapper_sees_a_derivative(name: str) -> None:
    """Its Jacobian is that of the derivative's formula."""
    torch.manual_seed(0)
    net, x, prior = Force().double(), torch.randn(N, 3).double(), IIDPrior(dist.Normal(0, 1))
    values = {n: p.detach() for n, p in net.named_parameters()}
    jacobians = torch.func.jacrev(lambda v: net.by_hand(v, x))(values)
    rows = torch.cat([each.reshape(N, 3, -1) for each in jacobians.values()], -1)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(N, scale=0.5)
    if name == "mean field":
        bnn: Any = tyxe.VariationalBNN(net, prior, likelihood, tyxe.guides.AutoNormal)
        scales = [bnn.net_guide.get_scale(n).detach().flatten() for n in values]
        covariance = torch.diag(torch.cat(scales).square())
        found = bnn._gaussian_predictives()["glm"](x)[1]
    else:
        bnn = tyxe.LaplaceBNN(net, prior, likelihood, structure=name)
        with tyxe.poutine.report() as report:
            bnn.fit_curvature([(x, x)])
        assert "are taken for each point" in str(report)
        curvature = torch.einsum("nkp,nkq->pq", rows, rows) / 0.25
        # Sites that take a gradient for each point have diagonals in the place of factors.
        curvature = curvature if name == "full" else torch.diag(curvature.diagonal())
        covariance = torch.linalg.inv(curvature + torch.eye(len(curvature)).double())
        found = bnn.functional_variance(x)
    torch.testing.assert_close(found, rows @ covariance @ rows.mT)


@pytest.mark.filterwarnings("ignore:MCMC does not fit")
@pytest.mark.parametrize(
    ("how", "init"), [("attribute", None), ("global", None), ("attribute", "net")]
)
def test_a_chain_meets_a_draw_that_is_handed_over(how: str, init: str | None) -> None:
    """Its posterior is the conjugate one, and not the prior."""
    torch.manual_seed(0)
    net, x = Hands(how), torch.randn(30, 3)
    y = x @ torch.tensor([[1.5], [-0.7], [0.2]]) + 0.5 * torch.randn(30, 1)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(30, scale=0.5)
    bnn = tyxe.MCMC_BNN(net, last(net.head), likelihood, NUTS())
    options = {"warmup_steps": 200, "num_chains": 2, "progress": False, "init": init}
    run = seeded(bnn.fit, [(x, y)], 200, **options)
    covariance = torch.linalg.inv(torch.eye(3) + x.T @ x / 0.25)
    mean = (covariance @ x.T @ y / 0.25).flatten()
    drawn = run.get_samples()["net.head.weight"].flatten(1)
    assert ((drawn.mean(0) - mean).abs() < 0.4 * covariance.diagonal().sqrt()).all()
    assert (drawn.std(0) < 1.5 * covariance.diagonal().sqrt()).all()


def test_hooks_and_modes_inside_of_what_is_kept_are_heeded(monkeypatch) -> None:
    net, x, seen = Residual(), torch.randn(N, 3), []
    first, last_layer = front_nets.Counted(3, 3), front_nets.Counted(3, 4)
    net.front = nn.Sequential(first, last_layer)
    bnn = classifier(net, net.head).eval()
    own_first, own_last = bnn.net.front
    own_last.register_forward_hook(lambda *args: seen.append(args[2].clone()))
    found = seeded(bnn.predict, x, num_predictions=4, aggregate=False)
    assert own_first.calls == 2
    # A kept module's own hooks run with what it returned, and one more pass looks at sites.
    assert len(seen) == own_last.calls + 4
    without(monkeypatch)
    assert torch.equal(found, seeded(bnn.predict, x, num_predictions=4, aggregate=False))


def test_a_net_that_has_changed_is_compared_again(monkeypatch) -> None:
    net, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), torch.randn(N, 3)
    bnn = tyxe.VariationalBNN(
        net, last(net[1]), tyxe.likelihoods.HomoskedasticGaussian(N, 0.5), tyxe.guides.AutoNormal
    )
    compared = []
    plain = NetOnBatch._compared
    monkeypatch.setattr(
        NetOnBatch, "_compared", lambda self, *args: compared.append(1) or plain(self, *args)
    )
    for _ in range(2):
        bnn.predict(x, num_predictions=3)
        assert compared == [1]
    bnn.net.note = "changed"
    bnn.predict(x, num_predictions=3)
    assert compared == [1, 1]


def test_draws_that_are_one_are_no_comparison() -> None:
    net, x = Residual(), torch.randn(N, 3)
    point = pyro.infer.autoguide.AutoDelta
    bnn = tyxe.VariationalBNN(net, last(net.head), tyxe.likelihoods.Categorical(N), point)
    bnn.predict(x, num_predictions=3)
    assert not bnn._runtime.compared


class Dense(nn.Module):
    """Returns classes of each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).movedim(1, -1)


def test_a_linearised_prediction_of_many_outputs_tells_what_it_takes(monkeypatch) -> None:
    prior, x = tyxe.priors.IIDPrior(dist.Normal(0, 1)), torch.randn(2, 1, 10, 10)
    bnn = tyxe.LaplaceBNN(Dense(), prior, tyxe.likelihoods.Categorical(2))
    bnn.fit_curvature([(x, torch.randint(3, (2, 10, 10)))])
    expected = seeded(bnn.predict, x, num_predictions=4)
    monkeypatch.setattr(laplace_posterior, "SLOW", 0.0)
    with pytest.warns(tyxe.TyxeWarning, match=r"300 backward passes .* s: predictive='bnn'"):
        found = seeded(bnn.predict, x, num_predictions=4)
    assert torch.equal(found, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bnn.predict(x, num_predictions=4, predictive="bnn")
        bnn.predict(x[..., :5, :5], num_predictions=4)
