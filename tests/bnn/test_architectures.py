"""Nets that have to work unmodified: under plain draws, local reparameterisation and flipout."""

import functools

import pyro
import pytest
import torch
from torch import nn

import tyxe
from tests.oracles.architectures import (
    CLASSES,
    HANDLERS,
    NETS,
    SPARSE,
    N,
    TiedLanguageModel,
    WithBuffers,
    flat,
    image,
    make,
    targets,
    tokens,
)
from tests.oracles.bnns import mean_field
from tyxe.likelihoods import Categorical, HomoskedasticGaussian

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")


def sites_of(bnn):
    return tyxe.util.pyro_sample_sites(bnn.net)


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("name", [*NETS, *SPARSE])
def test_trains_and_predicts_unmodified(name, handler):
    build, batch = {**NETS, **SPARSE}[name]
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
    net, inputs = build(), batch()
    bnn = make(net)
    with torch.no_grad():
        expected = tyxe.util.call_with(net.eval(), inputs)
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        found = bnn.predict(*arguments, num_predictions=0, aggregate=False)
        exported = tyxe.util.call_with(bnn.to_module().eval(), inputs)
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(exported, expected, rtol=1e-5, atol=1e-6)


def test_tied_weights_are_one_site_and_one_draw():
    bnn, seen = make(TiedLanguageModel()), []
    assert sites_of(bnn) == ["embedding.weight", "hidden.weight", "hidden.bias"]
    values = {n: v.detach() for n, v in bnn.guide().items()}
    for part in (bnn.net.embedding, bnn.net.head):
        part.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    bnn._run_net(values, tokens())
    assert len(seen) == 2
    assert all(weight is values["net.embedding.weight"] for weight in seen)
    exported = bnn.to_module()
    assert exported.head.weight is exported.embedding.weight


def test_buffers_are_the_copys_own_and_norms_learn_in_fit_only():
    net = WithBuffers()
    bnn = make(net)
    bnn.predict(flat(), num_predictions=4)
    assert (bnn.net.calls, net.calls) == (4, 0)
    bnn, x = make(NETS["CNN"][0]()), image()
    bnn.fit([(x, targets())], torch.optim.Adam, 2)
    bnn.predict(x, num_predictions=5)
    # One update a step: not for the check of the first batch, nor for the prediction.
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


def test_prefixed_names_of_two_bnns_in_one_model():
    left, right = (mean_field(nn.Linear(2, 3), Categorical(N), name=name) for name in "ab")
    trace = pyro.poutine.trace(lambda: (left.guide(), right.guide())).get_trace()
    names = {f"{name}.net.{part}" for name in "ab" for part in ("weight", "bias")}
    assert set(trace.stochastic_nodes) == names
    left.fit([(flat(), targets())], torch.optim.Adam, 1)
