"""The shortcuts of the curvature equal the long way round."""

import copy
from functools import partial
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn as nn
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tyxe
from tests.oracles.curvature import jacobian_of, laplace
from tests.oracles.nets import NetOf
from tyxe.curvature import accumulators, gradients, layer_calls, linearize, output_covariance
from tyxe.curvature.gradients import OuterProductGradients
from tyxe.curvature.linearize import Linearization
from tyxe.data import Targets
from tyxe.likelihoods import Bernoulli, Categorical, HeteroskedasticGaussian, HomoskedasticGaussian
from tyxe.likelihoods.output_hessian import OutputHessians


class LargestTensor(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(found) if isinstance(t, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return found


def changes(factor, inplace=False):
    """A net that changes the last map's output in place, or not at all."""

    def forward(net, x):
        outputs = net.head(net.body(x))
        return outputs if factor is None else outputs.mul_(factor)

    body = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=inplace))
    return NetOf(forward, body=body, head=nn.Linear(4, 2))


def normed(channels, length, dtype, scale):
    """A BNN of a map whose bias has no curvature, since a norm takes it away again, and inputs."""
    torch.manual_seed(0)
    conv = nn.Conv1d(channels, channels, 3, padding=1)
    norm = nn.Sequential(nn.InstanceNorm1d(channels), nn.Tanh(), nn.Flatten())
    net = nn.Sequential(conv, norm, nn.Linear(channels * length, 10)).to(dtype)
    x = torch.randn(32, channels, length).to(dtype)
    prior = dist.Normal(*torch.tensor([0.0, scale], dtype=dtype))
    prior = tyxe.priors.IIDPrior(prior, expose_all=False, expose_modules=[net[0]])
    bnn = tyxe.LaplaceBNN(net, prior, Categorical(32), structure="diag")
    bnn.fit_curvature([(x, torch.arange(32) % 10)], progress=False)
    return bnn, x


def test_weights_without_curvature_have_none_by_rounding_nor_less():
    bnn, _ = normed(64, 8, torch.float32, 1.0)
    (block,) = bnn.state.curvature.operator.blocks.values()
    assert (block.entries >= 0).all()


def test_variances_of_weights_without_curvature_do_not_enter_by_rounding():
    (bnn, x), (exact, wide) = (normed(16, 4, t, 1e4) for t in (torch.float32, torch.float64))
    found, expected = bnn.functional_variance(x), exact.functional_variance(wide)
    assert torch.linalg.eigvalsh(found).min() > 0
    assert (found - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("factor", [None, 3.0])
@pytest.mark.parametrize("inplace", [False, True])
def test_activations_and_outputs_may_be_changed_in_place(factor, inplace):
    torch.manual_seed(0)
    net, x = changes(factor, inplace).double(), torch.randn(5, 3).double()
    bnn = laplace(net)
    bnn.fit_curvature([(x, torch.zeros(5).long())], progress=False)
    # Weights of the first layer and bias in one matrix, row by row: compare what has no order.
    plain = copy.deepcopy(net)
    plain.body[1].inplace = False
    names = [name for name, _ in net.named_parameters()]
    rows = jacobian_of(plain, x, names)
    probs = net(x).softmax(-1).detach()
    hessian = torch.diag_embed(probs) - probs.unsqueeze(-1) * probs.unsqueeze(-2)
    expected = torch.linalg.eigvalsh((rows.mT @ hessian @ rows).sum(0))
    found = torch.linalg.eigvalsh(bnn.state.curvature.operator.to_dense())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_the_last_layer_takes_no_backward_and_leaves_no_graph(monkeypatch):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    bnn = laplace(net, rules={"expose_all": False, "expose_modules": [net[2]]})
    kept = []
    x = torch.randn(5, 3).double()
    bnn.fit_curvature([(x, torch.zeros(5).long())], progress=False)  # compared with autograd's
    monkeypatch.setattr(torch.autograd, "grad", None)
    hook = bnn.net[1].register_forward_hook(lambda _, __, out: kept.append(out.requires_grad))
    bnn.fit_curvature([(x, torch.zeros(5).long())], progress=False)
    hook.remove()
    assert kept
    assert not any(kept)
    hidden = [p for name, p in bnn.net.named_parameters() if name.startswith("0.")]
    assert all(p.requires_grad for p in hidden)


@pytest.mark.parametrize("budget", [2**24, 1])
@pytest.mark.parametrize("curvature", ["ggn", "fisher"])
def test_the_full_matrix_of_outer_products(monkeypatch, budget, curvature):
    """All cotangents of a batch together, as many as fit: the same as one Jacobian at a time."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(5, 3).double()
    batches = [(x[:2], torch.zeros(2).long()), (x[2:], torch.zeros(3).long())]
    monkeypatch.setattr(gradients, "BUDGET", budget)
    torch.manual_seed(1)
    bnn = laplace(net, curvature=curvature)
    bnn.fit_curvature(batches, progress=False)
    monkeypatch.setattr(OuterProductGradients, "is_single", False)
    torch.manual_seed(1)
    slow = laplace(net, curvature=curvature)
    slow.fit_curvature(batches, progress=False)
    found, expected = (b.state.curvature.operator.to_dense() for b in (bnn, slow))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_gradients_and_covariances_come_in_chunks(monkeypatch, structure):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)).double()
    data = [(torch.randn(5, 1, 4, 4).double(), torch.zeros(5).long())]
    found = []
    for _ in range(2):
        bnn = laplace(copy.deepcopy(net), structure)
        bnn.fit_curvature(data, progress=False)
        operator = bnn.state.curvature.operator.to_dense()
        found.append((operator, bnn.functional_variance(data[0][0])))
        monkeypatch.setattr(gradients, "BUDGET", 1)
        monkeypatch.setattr(output_covariance, "CACHED_ROWS", 1)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("net_of", [nn.LayerNorm, nn.BatchNorm1d])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_a_trainable_part_that_is_hidden_leaves_the_rest_its_curvature(structure, net_of):
    """A norm has no factors: its gradients are taken in a vmap, past which the head is frozen."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), net_of(4), nn.Tanh(), nn.Linear(4, 2))
    data = [(torch.randn(5, 3).double(), torch.arange(5) % 2)]
    dense = []
    for hidden in ([], ["3"]):
        bnn = laplace(copy.deepcopy(net), structure, rules={"hide_modules": hidden})
        bnn.fit_curvature(data, progress=False)
        assert all(p.requires_grad for name, p in bnn.net.named_parameters() if name[0] in hidden)
        dense.append(bnn.state.curvature.operator.to_dense())
    size = len(dense[1])
    assert bool(dense[1].any())
    torch.testing.assert_close(dense[1], dense[0][:size, :size], rtol=1e-12, atol=1e-12)


def test_a_net_under_no_grad_is_an_error():
    bnn = laplace(NetOf(torch.no_grad()(lambda net, x: net.layer(x)), layer=nn.Linear(3, 2)))
    with pytest.raises(
        RuntimeError, match=r"depend on net\.layer\.bias, net\.layer\.weight without a gradient"
    ):
        bnn.fit_curvature([(torch.randn(5, 3).double(), torch.zeros(5).long())], progress=False)


def test_every_batch_is_checked_on_the_forward_of_the_pass():
    bnn = laplace(nn.Linear(3, 2))
    x, y = torch.randn(5, 3).double(), torch.zeros(5).long()
    forwards = []
    bnn.net.register_forward_hook(lambda *_: forwards.append(1))
    bnn.fit_curvature([(x[:3], y[:3]), (x[3:], y[3:])], progress=False)
    # For each of two sizes one more is compared with, and one looks whether sites are read.
    assert len(forwards) == 5
    for wrong in (y[:3] + 9, y[3:] + 9):
        batches = [(x[:3], wrong if len(wrong) == 3 else y[:3])]
        batches += [(x[3:], wrong if len(wrong) == 2 else y[3:])]
        with pytest.raises(ValueError, match="targets lie outside"):
            bnn.fit_curvature(batches, progress=False)
    assert len(forwards) == 5 + 1 + 2


def test_a_net_that_saves_activations_has_the_curvature_of_its_mode():
    """What is computed anew in the backward is so at the fitted weights, not at the net's own."""

    class Checkpointed(nn.Sequential):
        def forward(self, x):
            inner = nn.Sequential(*self[:-1])
            return self[-1](torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False))

    layers = [nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3), nn.Tanh()]
    net = nn.Sequential(*layers, nn.Linear(3, 2))
    data = [(torch.randn(5, 3).double(), torch.arange(5) % 2)]
    found = []
    for kind in (nn.Sequential, Checkpointed):
        bnn = laplace(kind(*copy.deepcopy(net)), "full")
        bnn.fit(data, partial(torch.optim.Adam, lr=0.1), 20, progress=False)
        found.append((bnn.net_guide.precision.to_dense(), bnn.functional_variance(data[0][0])))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


def last_layer(likelihood, structure, outputs=4, ends=()):
    """A BNN over the last layer of a net, and inputs."""
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs), *ends).double()
    rules = {"expose_all": False, "expose_modules": [net[2]]}
    return laplace(net, structure, likelihood, rules=rules), torch.randn(20, 3).double()


LAST = {
    "categorical": (Categorical, {}, torch.arange(6) % 4),
    "probabilities": (Categorical, {"logit_predictions": False}, torch.arange(6) % 4),
    "bernoulli": (Bernoulli, {"event_dim": 1}, (torch.arange(24).view(6, 4) % 2).double()),
    "gaussian": (HomoskedasticGaussian, {"scale": 0.5}, torch.randn(6, 4).double()),
    "noise learned": (
        HomoskedasticGaussian,
        {"scale": 0.5, "learn_scale": True},
        torch.randn(6, 4).double(),
    ),
    "heteroskedastic": (HeteroskedasticGaussian, {}, torch.randn(6, 2).double()),
}


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("counts", [None, "mask", "weights"])
@pytest.mark.parametrize("kind", LAST)
def test_the_last_layer_is_summed_and_covaries_as_by_its_gradients(
    kind, counts, structure, monkeypatch
):
    torch.manual_seed(0)
    make, options, y = LAST[kind]
    ends = [nn.Softmax(-1)] if kind == "probabilities" else []
    bnn, x = last_layer(make(20, **options), structure, ends=ends)
    some = torch.tensor([True, False, True, True, False, True])
    targets = {
        None: y,
        "mask": Targets(y, mask=some) if y.dim() == 1 else Targets(y).masked(some),
        "weights": Targets(y, torch.arange(6).double()),
    }[counts]
    found = []
    for _ in range(2):
        bnn.fit_curvature([(x[:6], targets)], progress=False)
        found.append((bnn.state.curvature.operator.to_dense(), bnn.functional_variance(x)))
        monkeypatch.setattr(Linearization, "last_inputs", lambda linear: {})
        for accumulator in accumulators.ACCUMULATORS.values():
            monkeypatch.setattr(accumulator, "add_last", lambda *given: False)
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_hessians_of_certain_points_are_no_rounding(scale):
    """In float32, where `p - p^2` would be nothing."""
    torch.manual_seed(0)
    logits = scale * torch.randn(20, 5)
    hessians = OutputHessians(Categorical(20), logits)
    probs = logits.double().softmax(-1)
    exact = torch.diag_embed(probs) - probs.unsqueeze(-1) * probs.unsqueeze(-2)
    torch.testing.assert_close(hessians.total().double(), exact.sum(0), rtol=1e-5, atol=0)
    diagonals = exact.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(hessians.diagonals().double(), diagonals, rtol=1e-6, atol=1e-13)


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_many_classes_take_no_matrix_for_each_point(structure):
    bnn, x = last_layer(Categorical(20), structure, outputs=1000)
    with LargestTensor() as largest:
        bnn.fit_curvature([(x, torch.arange(20))], progress=False)
    assert largest.numel <= 1000**2


REFUSALS = {
    False: r"covariances of 20 points' outputs, 4 x 4 each.* smaller batches .* predictive='bnn'",
    True: r"covariance of all outputs of 20 points, 80 x 80, .* leave joint out",
}


@pytest.mark.parametrize("joint", REFUSALS)
def test_covariances_too_large_are_refused_before_they_are_made(joint, monkeypatch):
    bnn, x = last_layer(Categorical(20), "kron")
    bnn.fit_curvature([(x, torch.arange(20) % 4)], progress=False)
    monkeypatch.setattr("tyxe.check.MEMORY_LIMIT", 1_000)
    with pytest.raises(ValueError, match=REFUSALS[joint]):
        bnn.functional_variance(x, joint=joint)


def test_factors_beyond_a_devices_memory_are_refused(monkeypatch):
    bnn, x = last_layer(Categorical(20), "kron")
    monkeypatch.setattr("tyxe.check._memory_of", lambda device: 100)
    with pytest.raises(
        ValueError, match=r"factors of 1 layers would take .* and the limit of cpu is"
    ):
        bnn.fit_curvature([(x, torch.arange(20) % 4)], progress=False)


@pytest.mark.parametrize("conv", [
    nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.Conv2d(4, 6, (3, 5), padding=(1, 2), groups=2),
    nn.Conv2d(3, 4, 3, stride=2, dilation=2, padding=2), nn.Conv2d(3, 4, (3, 1), stride=(1, 2)),
    nn.Conv2d(3, 4, 3, padding="same", padding_mode="circular"), nn.Conv1d(3, 4, 5, padding=2),
    nn.Conv3d(2, 3, (3, 2, 1), padding=1),
])  # fmt: skip
def test_windows_have_the_second_moment_of_their_patches(monkeypatch, conv):
    torch.manual_seed(0)
    dims = conv.weight.dim() - 2
    x = torch.randn(30, conv.in_channels, *(9, 8, 7)[:dims]).double()
    head = nn.Flatten(), nn.Linear(conv(x[:1].float()).numel(), 2)
    net, used, found = nn.Sequential(conv, *head), [], []
    rules = {"hide_modules": ["2"]}  # whose factor is larger than that of the convolution
    known = layer_calls.moment_of_windows
    watched = lambda *given: (used.append(given), known(*given))[1]  # noqa: E731
    monkeypatch.setattr(layer_calls, "moment_of_windows", watched)
    for _ in range(2):
        torch.manual_seed(1)
        bnn = laplace(copy.deepcopy(net), "kron", Categorical(30), rules=rules)
        bnn.fit_curvature([(x, torch.arange(30) % 2)], progress=False)
        found.append(next(iter(bnn.state.curvature.operator.blocks.values())).to_dense())
        monkeypatch.setattr(layer_calls, "_is_shifted", lambda _: False)
    assert len(used) == 1
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("budget", [2**24, 1])
@pytest.mark.parametrize(("positions", "count"), [(1, 1), (1, 9), (4, 9), (16, 2)])
def test_squares_of_several_cotangents(monkeypatch, budget, positions, count):
    torch.manual_seed(0)
    a, g = torch.randn(5, positions, 1, 40).double(), torch.randn(count, 5, positions, 1, 50)
    held = [OuterProductGradients(SimpleNamespace(rows=a), each.double()) for each in g]
    expected = torch.stack([each.dense().square().sum(0) for each in held]).sum(0)
    monkeypatch.setattr(gradients, "BUDGET", budget)
    torch.testing.assert_close(gradients.squared_sums(held), expected, rtol=1e-10, atol=1e-12)


class Doubled(torch.autograd.Function):
    """Twice the input, by a backward that reads a number, which `torch.vmap` does not take."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad if grad.sum().item() < torch.inf else grad


class Same(torch.autograd.Function):
    """The input itself, by a rule for `torch.vmap` that is wrong."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return Same.apply(grad)

    @staticmethod
    def vmap(info, in_dims, x):
        return 3 * x, in_dims[0]


MIDDLES = {
    "plain": lambda: nn.BatchNorm2d(4),
    "reads": lambda: NetOf(lambda net, x: Doubled.apply(x)),
    "wrong rule": lambda: NetOf(lambda net, x: Same.apply(x)),
}


def of_images(structure, curvature, middle):
    """The curvature, covariances and joint covariance of a net of convolutions, and its notes."""
    torch.manual_seed(0)
    middle = MIDDLES[middle]()
    net = nn.Sequential(nn.Conv2d(2, 4, 3), middle, nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    x, y = torch.randn(6, 2, 4, 4), torch.tensor([0, 1, 2, 3, 4, 0])
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm2d])
    options = {"structure": structure, "curvature": curvature}
    bnn = tyxe.LaplaceBNN(net, prior, Categorical(6), **options)
    pyro.set_rng_seed(0)
    bnn.fit_curvature([(x, y)], progress=False)
    found = bnn.log_marginal_likelihood(), bnn.functional_variance(x)
    joint = bnn.functional_variance(x, joint=True), bnn.predict(x, link="probit")
    return [torch.as_tensor(one) for one in (*found, *joint)], bnn._runtime.linearized


@pytest.mark.parametrize("middle", MIDDLES)
@pytest.mark.parametrize("most", [2**29, 2 * 6 * 21])  # numbers of gradients: all, or of two
@pytest.mark.parametrize("curvature", ["ggn", "fisher"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_one_backward_of_several_cotangents(structure, curvature, most, middle, monkeypatch):
    monkeypatch.setattr(linearize, "MOST_AT_ONCE", {})
    expected, _ = of_images(structure, curvature, middle)
    monkeypatch.setattr(linearize, "MOST_AT_ONCE", {"cpu": most})
    found, known = of_images(structure, curvature, middle)
    assert known.takes_several == (middle == "plain")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
