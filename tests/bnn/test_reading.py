"""Sites that a net never reads are named, and gradients that are missing are errors."""

import copy
import functools
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tyxe
from tests.oracles.bnns import ADAM, NORMAL, STILL, mean_field
from tests.oracles.nets import ReadLast
from tyxe.bnn.reading import look_at_sites
from tyxe.guides import AutoNormal
from tyxe.likelihoods import HomoskedasticGaussian

N = 6
X = torch.linspace(-1, 1, 3 * N).view(N, 3)
DATA = [(X, X[:, :1])]
LIKELIHOOD = HomoskedasticGaussian(N, scale=0.5)


class Two(nn.Module):
    """A body and a head, which subclasses call in ways of their own."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


class Cached(Two):
    weight = None

    def forward(self, x):
        if self.weight is None:
            self.weight = self.body.weight.detach().clone()
        return self.head(torch.tanh(x @ self.weight.mT + self.body.bias))


class Unused(Two):
    def forward(self, x):
        return self.head(x.new_ones(len(x), 4))


class NoGrad(Two):
    def forward(self, x):
        with torch.no_grad():
            hidden = torch.tanh(self.body(x))
        return self.head(hidden)


def patched():
    net = Two()
    net.forward = lambda x: net.head(torch.tanh(net.body(x)))
    return net


def replaced():
    net, other = Two(), Two()
    net.body.register_forward_hook(lambda module, inputs, output: other.body(*inputs))
    return net


def cached():
    net = Cached()
    net(X)
    return net


def variational(net):
    return mean_field(net, LIKELIHOOD).fit(DATA, ADAM, 2)


def predicted(net):
    return mean_field(net, LIKELIHOOD).predict(X, num_predictions=2)


def linearised(net):
    return mean_field(net, LIKELIHOOD).predict(X, predictive="glm")


def laplace(net):
    return tyxe.LaplaceBNN(net, NORMAL, LIKELIHOOD).fit_curvature(DATA)


def chains(kernel, **options):
    def fit(net):
        bnn = tyxe.MCMC_BNN(net, NORMAL, LIKELIHOOD, kernel)
        return bnn.fit(DATA, num_samples=2, progress=False, **options)

    return fit


def pytorch(net):
    return tyxe.PytorchBNN(net, NORMAL, AutoNormal)(X)


def ensemble(net):
    def make(_):
        net.body.weight.data.normal_()
        return mean_field(net, LIKELIHOOD)

    return tyxe.EnsembleBNN(make, 2).fit(DATA, torch.optim.Adam, 1, vectorize=True)


FITS = {
    "mean field": variational,
    "Laplace": laplace,
    "HMC": chains(STILL, warmup_steps=2, compile=False),
    "SGLD": chains(tyxe.samplers.SGLD(0.01)),
    "PytorchBNN": pytorch,
    "glm": linearised,
}
USES = {**FITS, "prediction": predicted, "members in one tensor": ensemble}
BODY, HEAD = "net.body.bias, net.body.weight", "net.head.bias, net.head.weight"
UNREAD = {
    "patched": (patched, f"{BODY}, {HEAD}"),
    "cached": (cached, "net.body.weight"),
    "replaced": (replaced, BODY),
    "unused": (Unused, BODY),
}


@pytest.mark.parametrize(
    ("net", "use"),
    [*itertools.product(UNREAD, (*FITS, "prediction")), ("replaced", "members in one tensor")],
)
def test_what_is_never_read_is_named(net, use) -> None:
    make, names = UNREAD[net]
    with pytest.warns(tyxe.TyxeWarning, match=f"do not depend on site {names}, whose draws"):
        USES[use](make())


@pytest.mark.parametrize("fit", [*FITS.values(), ensemble])
def test_a_missing_gradient_is_an_error(fit) -> None:
    with pytest.raises(RuntimeError, match=f"depend on {BODY} with"):
        fit(NoGrad())


def test_predictions_need_no_gradient_and_later_fits_do() -> None:
    bnn = mean_field(NoGrad(), LIKELIHOOD)
    bnn.predict(X, num_predictions=2)
    with pytest.raises(RuntimeError, match="without a gradient"):
        bnn.fit(DATA, ADAM, 1)


class Auxiliary(Two):
    """A net of which a part is for training only, as in GoogLeNet."""

    def __init__(self):
        super().__init__()
        self.norm, self.more = nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.norm(torch.tanh(self.body(x)))
        return self.head(hidden) + (self.more(hidden) if self.training else 0.0)


class Checkpointed(Two):
    reentrant = False

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4, bias=False)

    def forward(self, x):
        x = x.clone().requires_grad_()
        return self.head(
            checkpoint(lambda x: torch.tanh(self.body(x)), x, use_reentrant=self.reentrant)
        )


class Reentrant(Checkpointed):
    reentrant = True


class Slope(Two):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 1, bias=False)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.head(torch.tanh(self.body(x))).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0][:, :1]


class SlopeByFunc(Slope):
    def forward(self, x):
        energy = lambda row: self.head(torch.tanh(self.body(row))).sum()  # noqa: E731
        return torch.func.vmap(torch.func.grad(energy))(x)[:, :1]


class Dead(Two):
    """A net of which nothing moves at its values."""

    def forward(self, x):
        return self.head(torch.relu(self.body(x) - 100)) + 0 * x[:, :1]


class Dictionary(Two):
    def forward(self, x):
        return {"logits": super().forward(x), "name": "a word"}


RECURRENT = functools.partial(ReadLast, nn.LSTM, 1, 2, 1)
READ = [Two, Auxiliary, Checkpointed, Slope, SlopeByFunc, Dead, RECURRENT]


def looked_at(net):
    """Look as a fit does; draws of several sites in a reentrant checkpoint are none it takes."""
    bnn = mean_field(net, LIKELIHOOD)
    look_at_sites(bnn, X, needs_gradients=True)
    assert bnn._runtime.read == {*bnn._slots}


@pytest.mark.parametrize(
    ("net", "use"),
    [(net, use) for net in READ for use in (variational, predicted)]
    + [(Reentrant, predicted), (Reentrant, looked_at)],
)
def test_what_is_read_is_not_named(net, use) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(net())


def test_a_net_is_looked_at_once_and_nothing_is_left_behind() -> None:
    class Counts(Two):
        calls = 0

        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.calls, noise = self.calls + 1, torch.rand(())
            self.seen += 1
            return super().forward(x) + 0 * noise

    found = []
    for is_known in (False, True):
        torch.manual_seed(0)
        bnn = mean_field(Counts(), LIKELIHOOD)
        if is_known:
            bnn._runtime.met = {*bnn._slots}
        torch.manual_seed(1)
        outputs = [bnn.predict(X, num_predictions=2, aggregate=False) for _ in range(2)]
        found.append((torch.stack(outputs), bnn.net.calls, float(bnn.net.seen)))
        assert copy.deepcopy(bnn)._runtime.met == set()
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


def test_outputs_in_containers_are_looked_at() -> None:
    class Half(Dictionary):
        def forward(self, x):
            return {"logits": self.head(x.new_ones(len(x), 4))}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tyxe.PytorchBNN(Dictionary(), NORMAL, AutoNormal, output="logits").predict(X)
    bnn: Any = tyxe.PytorchBNN(Half(), NORMAL, AutoNormal)
    with pytest.warns(tyxe.TyxeWarning, match=r"site net\.body\.bias, net\.body\.weight"):
        bnn.predict(X)
