"""Nets that have to work unmodified: under plain draws, local reparameterisation and flipout."""

import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoLowRankMultivariateNormal
from torch import nn

import tyxe
from tests.oracles.architectures import (
    CLASSES,
    HANDLERS,
    NETS,
    PRIOR,
    N,
    TiedLanguageModel,
    WithBuffers,
    flat,
    frozen_backbone,
    image,
    make,
    targets,
    tokens,
)
from tyxe.guides import AutoNormal, PretrainedInitializer
from tyxe.likelihoods import Categorical, HomoskedasticGaussian

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("name", NETS)
def test_trains_and_predicts_unmodified(name, handler):
    build, batch = NETS[name]
    bnn, inputs = make(build()), batch()
    before = {n: p.detach().clone() for n, p in bnn.named_parameters()}
    optimizer = torch.optim.SGD(bnn.parameters(), lr=0.3)
    reached = set()

    def callback(bnn, epoch, loss):
        reached.update(n for n, p in bnn.named_parameters() if p.grad is not None and p.grad.any())

    with HANDLERS[handler]():
        history = bnn.fit([(inputs, targets())], optimizer, 2, callback, beta=0.0)
        outputs = bnn.predict(inputs, num_predictions=3, aggregate=False)
        error, log_likelihood = bnn.evaluate(inputs, targets(), num_predictions=2)
    # With beta = 0 the gradient comes through the net alone: it has to reach every mean and
    # every scale, and every parameter that is not frozen.
    trainable = {n for n, p in bnn.named_parameters() if p.requires_grad}
    assert reached == trainable
    for parameter_name, value in bnn.named_parameters():
        moved = not torch.equal(value, before[parameter_name])
        assert moved == (parameter_name in trainable), parameter_name
    assert outputs.shape == (3, N, CLASSES)
    assert (outputs[0] - outputs[1]).abs().max() > 0
    assert bool(outputs.isfinite().all())
    assert torch.isfinite(torch.tensor(history.loss)).all()
    assert 0 <= error <= N
    assert log_likelihood < 0


@pytest.mark.parametrize("name", NETS)
def test_the_net_at_the_mean_is_the_net_itself(name):
    build, batch = NETS[name]
    net = build()
    bnn, inputs = make(net), batch()
    with torch.no_grad():
        expected = tyxe.util.call_with(net.eval(), inputs)
        found = bnn.predict(
            *(inputs if isinstance(inputs, tuple) else (inputs,)),
            num_predictions=0,
            aggregate=False,
        )
        exported = tyxe.util.call_with(bnn.to_module().eval(), inputs)
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(exported, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["MLP", "CNN", "GroupNorm", "TransformerEncoder", "embedding"])
def test_the_elbo_goes_up(name):
    build, batch = NETS[name]
    bnn, inputs = make(build()), batch()
    history = bnn.fit(
        [(inputs, targets())], functools.partial(torch.optim.Adam, lr=0.02), 60, beta=0.01
    )
    assert sum(history.loss[-5:]) < 0.9 * sum(history.loss[:5])


def test_tied_weights_are_one_site_and_one_draw():
    net = TiedLanguageModel()
    bnn = make(net)
    assert tyxe.util.pyro_sample_sites(bnn.net) == [
        "embedding.weight",
        "hidden.weight",
        "hidden.bias",
    ]
    values = {n: v.detach() for n, v in bnn.guide().items()}
    seen = []
    for part in (bnn.net.embedding, bnn.net.head):
        part.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    bnn._run_net(values, tokens())
    assert len(seen) == 2
    assert all(weight is values["net.embedding.weight"] for weight in seen)
    exported = bnn.to_module()
    assert exported.head.weight is exported.embedding.weight


def test_frozen_parameters_are_no_sites_unless_exposed():
    bnn = make(frozen_backbone())
    assert tyxe.util.pyro_sample_sites(bnn.net) == ["3.weight", "3.bias"]
    exposed = tyxe.priors.IIDPrior(dist.Normal(0, 1), expose=["0.weight"])
    assert tyxe.util.pyro_sample_sites(make(frozen_backbone(), prior=exposed).net) == ["0.weight"]


def test_buffers_are_the_copys_own():
    net = WithBuffers()
    bnn = make(net)
    bnn.predict(flat(), num_predictions=4)
    assert bnn.net.calls == 4
    assert net.calls == 0


def test_hidden_batchnorm_keeps_its_statistics_in_fit_only():
    net = NETS["CNN"][0]()
    bnn, x = make(net), image()
    bnn.fit([(x, targets())], torch.optim.Adam, 2)
    # One update a step: not for the check of the first batch, nor for the prediction.
    assert bnn.net[1].num_batches_tracked == 2
    bnn.predict(x, num_predictions=5)
    assert bnn.net[1].num_batches_tracked == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("handler", HANDLERS)
def test_nets_of_other_precision(dtype, handler):
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    bnn = make(net, likelihood=HomoskedasticGaussian(N, scale=0.5))
    x, y = flat().to(dtype), flat(1).to(dtype)
    assert {p.dtype for p in bnn.parameters()} == {dtype}
    with HANDLERS[handler]():
        history = bnn.fit([(x, y)], functools.partial(torch.optim.SGD, lr=0.01), 3)
        mean, scale = bnn.predict(x, num_predictions=4)
    assert mean.dtype == scale.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.isfinite(torch.tensor(history.loss)).all()
    assert all(value.isfinite().all() for value in bnn.parameters())


def test_autocast_around_fit():
    bnn, x = make(NETS["MLP"][0]()), flat()
    with torch.autocast("cpu", torch.bfloat16), tyxe.poutine.local_reparameterization():
        history = bnn.fit([(x, targets())], torch.optim.Adam, 2)
    assert torch.isfinite(torch.tensor(history.loss)).all()
    assert {p.dtype for p in bnn.parameters()} == {torch.float32}


@pytest.fixture(scope="module")
def resnet():
    models = pytest.importorskip("torchvision.models", reason="needs the extra `vision`")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return models.resnet18(num_classes=CLASSES)


def pictures():
    return torch.randn(4, 3, 32, 32), torch.arange(4) % CLASSES


@pytest.mark.parametrize("handler", [name for name in HANDLERS if name != "plain"])
def test_resnet_with_hidden_batchnorm_from_its_own_weights(resnet, handler):
    guide = functools.partial(
        AutoNormal,
        init_loc_fn=PretrainedInitializer.from_net(resnet),
        init_scale=1e-4,
        max_guide_scale=0.1,
    )
    bnn = make(resnet, guide, likelihood=Categorical(4))
    sites = tyxe.util.pyro_sample_sites(bnn.net)
    assert len(sites) == 22  # 20 convolutions, and the head's weight and bias
    assert not any(".bn" in site for site in sites)
    x, y = pictures()
    with torch.no_grad():
        expected = resnet.eval()(x)
    resnet.train()
    found = bnn.predict(x, num_predictions=0, aggregate=False)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with HANDLERS[handler](), tyxe.poutine.report() as report:
        history = bnn.fit([(x, y)], functools.partial(torch.optim.Adam, lr=1e-3), 1, beta=0.0)
    treatment = {"flipout": "flipped"}.get(handler, "moments")
    for site in sites:
        assert treatment in report.treatments(site), site
    assert len(history.loss) == 1
    assert all(p.grad.any() for p in bnn.parameters() if p.requires_grad)
    assert all(bnn.net_guide.get_scale(site).max() < 0.1 for site in sites)


def test_resnet_last_layer_only_with_a_low_rank_guide(resnet):
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), expose_modules=[resnet.fc])
    guide = functools.partial(
        AutoLowRankMultivariateNormal,
        rank=2,
        init_loc_fn=PretrainedInitializer.from_net(resnet),
        init_scale=1e-4,
    )
    bnn = make(resnet, guide, prior, Categorical(4))
    assert tyxe.util.pyro_sample_sites(bnn.net) == ["fc.weight", "fc.bias"]
    # Sites alone are fitted: the backbone is frozen by the user.
    for name, parameter in bnn.net.named_parameters():
        if not name.startswith("fc."):
            parameter.requires_grad_(False)
    backbone = bnn.net.conv1.weight.clone()
    x, y = pictures()
    bnn.fit([(x, y)], functools.partial(torch.optim.Adam, lr=1e-2), 2)
    assert torch.equal(bnn.net.conv1.weight, backbone)
    outputs = bnn.predict(x, num_predictions=3, aggregate=False)
    assert outputs.shape == (3, 4, CLASSES)
    assert all(p.grad.any() for p in bnn.net_guide.parameters())


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mean, self.log_scale = nn.Linear(2, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return self.mean(hidden), self.log_scale(hidden)


def test_several_outputs_are_one_clear_error_of_a_likelihood():
    bnn = make(TwoHeads(), likelihood=HomoskedasticGaussian(N, scale=0.5))
    before = {n: v.clone() for n, v in bnn.named_parameters()}
    with pytest.raises(TypeError, match=r"returns a tuple.*likelihood needs a tensor.*PytorchBNN"):
        bnn.fit([(flat(), flat(1))], torch.optim.Adam, 1)
    assert all(torch.equal(v, before[n]) for n, v in bnn.named_parameters())


def test_several_outputs_of_a_pytorch_bnn():
    bnn = tyxe.PytorchBNN(TwoHeads(), PRIOR, AutoNormal)
    mean, log_scale = bnn(flat())
    loss = -dist.Normal(mean, log_scale.exp()).log_prob(flat(1)).sum() + bnn.cached_kl_loss
    loss.backward()
    assert all(p.grad is not None for p in bnn.parameters() if p.requires_grad)


def test_prefixed_names_of_two_bnns_in_one_model():
    left, right = (
        tyxe.VariationalBNN(nn.Linear(2, 3), PRIOR, Categorical(N), AutoNormal, name=name)
        for name in ("left", "right")
    )
    trace = pyro.poutine.trace(lambda: (left.guide(), right.guide())).get_trace()
    assert set(trace.stochastic_nodes) == {
        "left.net.weight",
        "left.net.bias",
        "right.net.weight",
        "right.net.bias",
    }
    left.fit([(flat(), targets())], torch.optim.Adam, 1)
