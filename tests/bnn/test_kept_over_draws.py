"""What no site touches runs once for all draws, unless that changes what the net returns."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

import tyxe
from tests.oracles import front_nets
from tests.oracles.bnns import NORMAL, mean_field
from tests.oracles.front_nets import Drops, Net, Residual
from tests.oracles.nets import NetOf, ReadLast
from tests.oracles.predictions import seeded
from tyxe.bnn.passes import NetOnBatch
from tyxe.predictive.forwards import SiteFreePrefix
from tyxe.priors import IIDPrior
from tyxe.samplers import HMC, NUTS

N = 6


class Counted(nn.Conv2d):
    """Counts its calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def resnet():
    net = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=3)
    net.conv1 = Counted(3, 64, 3, bias=False)
    return net


def recurrent():
    return ReadLast(nn.LSTM, 3, 5, 1)


def last(layer):
    return tyxe.priors.IIDPrior(dist.Normal(0, 1), expose_all=False, expose_modules=[layer])


def classifier(net, layer):
    return mean_field(net, tyxe.likelihoods.Categorical(N), last(layer))


def gaussian(n=N):
    return tyxe.likelihoods.HomoskedasticGaussian(n, scale=0.5)


def without(monkeypatch):
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
@pytest.mark.parametrize("handler", [tyxe.poutine.report, tyxe.poutine.local_reparameterization])
def test_predictions_are_bit_for_bit_those_without(how, handler, monkeypatch):
    if how == "vmap":
        handler = tyxe.poutine.report
    net, x, y = resnet(), torch.randn(N, 3, 16, 16), torch.randint(3, (N,))
    bnn = classifier(net, net.fc)

    def run():
        with handler():
            return seeded(WAYS[how], bnn, x, y)

    found = run()
    # The second pass of the first batch is compared with one of the whole net.
    assert bnn.net.conv1.calls == {"pieces": 4, "loader": 3, "one": 1}.get(how, 2)
    run()
    assert bnn.net.conv1.calls == {"pieces": 7, "loader": 5, "one": 2}.get(how, 3)
    without(monkeypatch)
    assert torch.equal(found, run())


def test_fused_layers_are_bit_for_bit_those_without(monkeypatch):
    """Those of a transformer's layer."""
    parts = {"front": nn.TransformerEncoderLayer(4, 2, 8), "head": nn.Linear(4, 2)}
    net, x = NetOf(lambda self, x: self.head(self.front(x).mean(1)), **parts), torch.randn(N, 7, 4)
    bnn = classifier(net, net.head)
    found = seeded(bnn.predict, x, num_predictions=4, aggregate=False)
    without(monkeypatch)
    assert torch.equal(found, seeded(bnn.predict, x, num_predictions=4, aggregate=False))


def test_statistics_of_each_draw_are_met(monkeypatch):
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 0.1), hide_module_types=[nn.BatchNorm2d])
    bnn = mean_field(resnet(), tyxe.likelihoods.Categorical(N), prior)
    x = torch.randn(N, 3, 16, 16)
    bnn.update_norm_statistics([x])
    found = seeded(bnn.predict, x, num_predictions=3)
    without(monkeypatch)
    assert torch.equal(found, seeded(bnn.predict, x, num_predictions=3))


def test_a_fit_trains_the_front_beside_the_sites():
    net = recurrent()
    bnn = mean_field(net, gaussian(), last(net.head))
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


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")  # few samples
@pytest.mark.parametrize("kernel", [NUTS(max_tree_depth=3), HMC(num_steps=3)], ids=["NUTS", "HMC"])
def test_chains_on_a_last_layer_are_those_on_its_features(kernel):
    net, x, y = recurrent(), torch.randn(20, 7, 3), torch.randn(20, 1)
    with torch.no_grad():
        features = net.cell(x)[0][:, -1]
    found = {}
    for name, part, layer, inputs in (
        ("net.head", net, net.head, x),
        ("net.0", plain := nn.Sequential(net.head), plain[0], features),
    ):
        bnn = tyxe.MCMC_BNN(part, last(layer), gaussian(20), kernel)
        run = seeded(bnn.fit, [(inputs, y)], 10, warmup_steps=10, num_chains=2)
        found[name] = run.get_samples()[f"{name}.weight"]
    assert torch.equal(found["net.head"], found["net.0"])


NETS = {kind.__name__: kind for one in (Net, Residual, Drops) for kind in one.__subclasses__()}
KEPT = {"Residual", "Recurrent", "Containers", "IgnoresReturn"}


@pytest.mark.parametrize("name", NETS)
def test_passes_are_those_of_the_net_whatever_it_does(name, monkeypatch):
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


BOX = []


def hands(how):
    """Return a net that hands a draw to a module without sites, by an attribute or a global."""

    def main(self, x):
        return self.gain * (BOX[-1] if self.made is None else self.made) + 0 * x[:, :1]

    def forward(self, x):
        made = self.head(x)
        if how == "attribute":
            self.main.made = made
        else:
            BOX[:] = [made]
        return self.main(x)

    part = NetOf(main, gain=nn.Parameter(torch.ones(1)), made=None)
    return NetOf(forward, head=nn.Linear(3, 1, bias=False), main=part)


def test_activations_in_place_are_kept_with_what_they_write_into():
    net = resnet()
    net.layer4[0].conv2 = last_conv = Counted(512, 512, 3, padding=1, bias=False)
    bnn = classifier(net, net.fc).eval()
    passes = NetOnBatch(bnn, torch.randn(N, 3, 16, 16), keeps=True)
    with torch.no_grad():
        for _ in range(5):
            passes(bnn._one_draw())
    assert last_conv.calls == 0
    assert bnn.net.layer4[0].conv2.calls == 2  # the second of the whole net


def test_what_is_kept_is_run_again_where_the_net_writes_into_it():
    parts = {"body": nn.Linear(3, 1), "cap": nn.Parameter(torch.ones(1))}
    net = NetOf(lambda self, x: 2 * self.body(x).clamp_(max=self.cap), **parts)
    prior = IIDPrior(dist.Normal(0, 1), expose=["cap"])
    bnn = tyxe.PytorchBNN(net, prior, tyxe.guides.AutoNormal).eval()
    x = 10 * torch.randn(N, 3)
    passes = NetOnBatch(bnn, x, keeps=True)
    # The second does not show it, since it writes the same over what the first has written.
    for cap in (torch.tensor([c]) for c in (1.0, 0.5, 2.0)):
        with torch.no_grad():
            assert torch.equal(passes({"net.cap": cap}), 2 * bnn.net.body(x).clamp(max=cap))


@pytest.mark.parametrize("how", ["attribute", "global"])
@pytest.mark.parametrize("vectorize", [False, True])
def test_a_draw_that_is_handed_over_is_met_and_reported(how, vectorize):
    net, x = hands(how), torch.randn(N, 3)
    bnn = mean_field(net, gaussian(), last(net.head))
    many = {"num_predictions": 400, "aggregate": False, "vectorize": vectorize}
    found = seeded(bnn.predict, x, **many)
    scale = bnn.net_guide.get_scale("head.weight").detach()
    expected = (x.square() @ scale.square().mT).sqrt()
    torch.testing.assert_close(found.std(0), expected, rtol=0.15, atol=0.0)
    with tyxe.poutine.report() as report:
        bnn.predict(x, num_predictions=2)
    assert "The whole net runs for each draw" in str(report)


def force(values, x):
    """A derivative of an energy, by hand."""
    h = torch.tanh(x @ values["a.weight"].mT + values["a.bias"])
    return -((1 - h * h) * values["b.weight"][0]) @ values["a.weight"]


def force_by_autograd(self, x):
    """The same, where each weight acts at places that no map shows."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = self.b(torch.tanh(self.a(x))).sum()
        return -torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize("name", ["full", "diag", "kron", "mean field"])
def test_every_linearised_wrapper_sees_a_derivative(name):
    """Its Jacobian is that of the derivative's formula."""
    parts = {"a": nn.Linear(3, 4), "b": nn.Linear(4, 1, bias=False)}
    net, x = NetOf(force_by_autograd, **parts).double(), torch.randn(N, 3).double()
    values = {n: p.detach() for n, p in net.named_parameters()}
    jacobians = torch.func.jacrev(lambda v: force(v, x))(values)
    rows = torch.cat([each.reshape(N, 3, -1) for each in jacobians.values()], -1)
    if name == "mean field":
        bnn = mean_field(net, gaussian())
        scales = [bnn.net_guide.get_scale(n).detach().flatten() for n in values]
        covariance = torch.diag(torch.cat(scales).square())
        found = bnn._gaussian_predictives()["glm"](x)[1]
    else:
        bnn = tyxe.LaplaceBNN(net, NORMAL, gaussian(), structure=name)
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
def test_a_chain_meets_a_draw_that_is_handed_over(how, init):
    """Its posterior is the conjugate one, and not the prior."""
    net, x = hands(how), torch.randn(30, 3)
    y = x @ torch.tensor([[1.5], [-0.7], [0.2]]) + 0.5 * torch.randn(30, 1)
    # A quarter of the period of standard deviations of about 0.1.
    kernel = HMC(step_size=0.03, num_steps=5, adapt_step_size=False, adapt_mass_matrix=False)
    bnn = tyxe.MCMC_BNN(net, last(net.head), gaussian(30), kernel)
    run = seeded(bnn.fit, [(x, y)], 100, warmup_steps=30, num_chains=2, init=init)
    covariance = torch.linalg.inv(torch.eye(3) + x.T @ x / 0.25)
    mean = (covariance @ x.T @ y / 0.25).flatten()
    drawn = run.get_samples()["net.head.weight"].flatten(1)
    assert ((drawn.mean(0) - mean).abs() < 0.4 * covariance.diagonal().sqrt()).all()
    assert (drawn.std(0) < 1.5 * covariance.diagonal().sqrt()).all()


def test_hooks_and_modes_inside_of_what_is_kept_are_heeded(monkeypatch):
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


def test_a_net_that_has_changed_is_compared_again(monkeypatch):
    net, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), torch.randn(N, 3)
    bnn, compared, plain = mean_field(net, gaussian(), last(net[1])), [], NetOnBatch._compared
    monkeypatch.setattr(
        NetOnBatch, "_compared", lambda self, *args: compared.append(1) or plain(self, *args)
    )
    for _ in range(2):
        bnn.predict(x, num_predictions=3)
        assert compared == [1]
    bnn.net.note = "changed"
    bnn.predict(x, num_predictions=3)
    assert compared == [1, 1]


def test_draws_that_are_one_are_no_comparison():
    net, point = Residual(), pyro.infer.autoguide.AutoDelta
    bnn = tyxe.VariationalBNN(net, last(net.head), tyxe.likelihoods.Categorical(N), point)
    bnn.predict(torch.randn(N, 3), num_predictions=3)
    assert not bnn._runtime.compared
