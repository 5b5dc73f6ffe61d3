"""`PytorchBNN`: a module with random weights in anybody's training loop."""

import contextlib

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoMultivariateNormal
from torch import nn
from torch.utils.data import DataLoader

import tyxe
from tests.oracles.bnns import HIDE_NORMS, NORMAL, NOTHING, mlp, two_layers
from tests.oracles.predictions import seeded
from tyxe.bnn import elbo_terms
from tyxe.guides import AutoNormal

HANDLERS = [tyxe.poutine.local_reparameterization, tyxe.poutine.flipout]
N = 10


def make(net=None, guide=AutoNormal, prior=NORMAL, **options):
    return tyxe.PytorchBNN(net or mlp(2, 4, 1), prior, guide, **options)


def x():
    return torch.randn(N, 2, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "guide", [AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal, AutoDelta]
)
@pytest.mark.parametrize("closed_form_kl", [True, False])
def test_output_and_kl_are_of_one_draw(guide, closed_form_kl):
    net = mlp(2, 4, 1)
    bnn = make(net, guide, closed_form_kl=closed_form_kl)
    output = seeded(bnn, x())
    terms = seeded(elbo_terms, bnn.net_prior, bnn.net_guide, closed_form_kl=closed_form_kl)
    torch.testing.assert_close(bnn.cached_kl_loss, terms.kl, rtol=0, atol=0)
    own = {n.removeprefix("net."): v for n, v in terms.values.items() if n.startswith("net.")}
    torch.testing.assert_close(output, torch.func.functional_call(net, own, (x(),)))


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_an_ordinary_loop_is_variational_inference():
    # The same seed, the same optimiser: the same parameters as VariationalBNN.fit.
    net = mlp(2, 4, 1).double()
    inputs, targets = x().double(), torch.randn(N, 1).double()
    bnn = make(net)
    optimizer = torch.optim.Adam(bnn.parameters(), lr=0.01)
    pyro.set_rng_seed(5)
    for _ in range(5):
        optimizer.zero_grad()
        log_likelihood = dist.Normal(bnn(inputs), 0.5).log_prob(targets).sum()
        ((bnn.cached_kl_loss - log_likelihood) / N).backward()
        optimizer.step()

    likelihood = tyxe.likelihoods.HomoskedasticGaussian(N, scale=0.5)
    reference = tyxe.VariationalBNN(net, NORMAL, likelihood, AutoNormal)
    pyro.set_rng_seed(5)
    reference.fit([(inputs, targets)], torch.optim.Adam(reference.parameters(), lr=0.01), 5)
    expected = dict(reference.net_guide.named_parameters())
    for name, value in bnn.net_guide.named_parameters():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("guide", [AutoNormal, AutoDiagonalNormal])
def test_pytorch_parameters_are_all_there_before_the_first_forward(guide):
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), expose_modules=["2"])
    bnn = make(guide=guide, prior=prior)
    before = bnn.pytorch_parameters(x())
    assert {id(p) for p in before} == {id(p) for p in bnn.parameters() if p.requires_grad}
    bnn(x())
    assert [id(p) for p in bnn.pytorch_parameters()] == [id(p) for p in before]
    assert {n for n, p in bnn.net.named_parameters() if p.requires_grad} == {"0.weight", "0.bias"}


# --------------------------------------------------------------------------- held draws


def test_held_draw_serves_all_forwards():
    bnn = make()
    with bnn.hold_sample() as held:
        assert held is bnn
        whole = bnn(x())
        kl = bnn.cached_kl_loss
        chunks = torch.cat([bnn(part) for part in x().split(3)])
        with bnn.hold_sample():  # nested, it is the outer one's draw
            assert torch.equal(bnn(x()), whole)
        assert not torch.equal(*bnn.predict(x(), num_predictions=2))
        assert torch.equal(bnn(x()), whole)
        assert bnn.cached_kl_loss is kl
    torch.testing.assert_close(chunks, whole)
    assert not torch.equal(bnn(x()), whole)
    with bnn.hold_sample():
        assert not torch.equal(bnn(x()), whole)


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("handler", HANDLERS)
def test_held_draw_is_one_draw_under_a_handler_too(handler):
    bnn = make()
    with handler():
        with bnn.hold_sample():
            whole = bnn(x())
            if handler is tyxe.poutine.local_reparameterization:
                torch.testing.assert_close(torch.cat([bnn(p) for p in x().split(3)]), whole)
                assert torch.equal(bnn(x()[:1].expand(2, -1))[0], bnn(x()[:1].expand(2, -1))[1])
        assert not torch.equal(bnn(x()), whole)


def test_a_hold_ends_with_an_error():
    bnn = make()
    with pytest.raises(RuntimeError, match="shapes cannot"), bnn.hold_sample():
        bnn(x().mT)
    assert not torch.equal(bnn(x()), bnn(x()))
    assert not bnn._held  # nor is a draw kept


def test_predict_leaves_statistics_modes_and_kl():
    bnn = make(two_layers(2, 4, 1, nn.BatchNorm1d(4), nn.Dropout(0.5)), prior=HIDE_NORMS)
    loss = bnn(x()).sum() + bnn.cached_kl_loss
    tracked = bnn.net[1].num_batches_tracked.item()
    outputs = bnn.predict(x(), num_predictions=5)
    assert outputs.shape == (5, N, 1)
    assert not outputs.requires_grad
    assert bnn.net[1].num_batches_tracked == tracked
    assert all(module.training for module in bnn.modules())
    assert bnn.cached_kl_loss.requires_grad
    (loss + bnn.cached_kl_loss).backward()


class Mixed(nn.Linear):
    def forward(self, left, right, *, scale=1.0):
        return scale * super().forward(left + right)


def test_predict_takes_what_other_wrappers_take():
    bnn = make(Mixed(2, 1))
    with bnn.hold_sample():
        torch.testing.assert_close(bnn(x(), right=x(), scale=3.0), 3 * bnn(x(), x()))
    separate = bnn.predict(x(), x(), num_predictions=0)
    assert separate.shape == (1, N, 1)
    torch.testing.assert_close(separate[0], bnn.to_module()(x(), x()))
    for given in ((x(), x()), {"left": x(), "right": x()}):
        torch.testing.assert_close(bnn.predict(given, num_predictions=0), separate)
    with_keyword = bnn.predict(x(), right=x(), scale=3.0, num_predictions=0)
    torch.testing.assert_close(with_keyword, 3 * separate)
    batches = [((x()[:4], x()[:4]), None), ((x()[4:], x()[4:]), None)]
    torch.testing.assert_close(bnn.predict(batches, num_predictions=0), separate)
    with pytest.raises(ValueError, match="num_predictions is -1; expected 0 or more"):
        bnn.predict(x(), x(), num_predictions=-1)


@pytest.mark.parametrize("handler", [contextlib.nullcontext, tyxe.poutine.local_reparameterization])
def test_a_list_is_a_loader_whose_batches_meet_the_same_draws(handler):
    bnn = make()
    with handler():
        found = bnn.predict([x()[:4], x()[4:]], num_predictions=3)
    assert found.shape == (3, N, 1)
    assert not torch.equal(found[0], found[1])
    again = bnn.predict(DataLoader(torch.cat([x(), x()]), batch_size=N), num_predictions=2)
    torch.testing.assert_close(again[:, :N], again[:, N:])


def test_outputs_in_containers_are_stacked_in_them():
    class Several(nn.Linear):
        def forward(self, x):
            return {"mean": super().forward(x), "parts": (super().forward(2 * x), None)}

    found = make(Several(2, 1)).predict(x(), num_predictions=3)
    assert found["mean"].shape == found["parts"][0].shape == (3, N, 1)
    assert found["parts"][1] is None


def test_all_hidden_is_the_net_itself():
    net = nn.Linear(2, 1)
    bnn = tyxe.PytorchBNN(net, NOTHING)
    assert torch.equal(bnn(x()), net(x()))
    assert bnn.cached_kl_loss == 0
    assert torch.equal(bnn.to_module()(x()), net(x()))
    assert len(bnn.pytorch_parameters()) == 2


def test_update_prior_moves_the_kl_and_to_module_is_at_the_centre_or_a_draw():
    bnn = make()
    assert torch.equal(bnn.to_module()[0].weight, bnn.net_guide.get_loc("0.weight"))
    drawn = seeded(bnn.to_module, sample=True)
    torch.testing.assert_close(drawn(x()), seeded(bnn, x()))
    bnn.update_prior(tyxe.priors.DictPrior(bnn.net_guide.get_detached_distributions()))
    bnn(x())
    assert bnn.cached_kl_loss.item() == pytest.approx(0.0, abs=1e-5)
