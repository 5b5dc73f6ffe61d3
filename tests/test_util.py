"""Names, fans by brute force, activations, containers."""

import collections
import copy
import math
import pickle

import pyro.distributions as dist
import pyro.nn
import pytest
import torch
import torch.nn as nn

import tyxe

# --- fans ---------------------------------------------------------------------------------------


def counted_fans(layer, shape):
    """The most inputs that one output reads through the weight, and outputs that one input feeds.

    With all weights 1 the Jacobian of the output by the input counts connections; a large input
    with stride 1 has positions that see the whole kernel.
    """
    layer = copy.deepcopy(layer).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.fill_(0.0 if "bias" in name else 1.0)
    x = torch.randn(shape).double()
    jacobian = torch.autograd.functional.jacobian(layer, x)
    counts = jacobian.reshape(layer(x).numel(), x.numel())
    return counts.sum(1).max().item(), counts.sum(0).max().item()


FANS = {
    "linear": (nn.Linear(5, 3), (5,)),
    "conv1d": (nn.Conv1d(2, 3, 4), (1, 2, 12)),
    "conv2d": (nn.Conv2d(3, 4, (2, 3)), (1, 3, 6, 7)),
    "conv2d, grouped": (nn.Conv2d(4, 6, 3, groups=2), (1, 4, 8, 8)),
    "conv2d, depthwise": (nn.Conv2d(3, 6, 2, groups=3), (1, 3, 5, 5)),
    "conv2d, dilated": (nn.Conv2d(2, 3, 2, dilation=2), (1, 2, 7, 7)),
    "conv3d": (nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4)),
    "conv_transpose1d": (nn.ConvTranspose1d(2, 5, 3), (1, 2, 8)),
    "conv_transpose2d": (nn.ConvTranspose2d(4, 3, (2, 3)), (1, 4, 5, 6)),
    "conv_transpose2d, grouped": (nn.ConvTranspose2d(6, 4, 3, groups=2), (1, 6, 7, 7)),
    "conv_transpose3d": (nn.ConvTranspose3d(2, 2, 2), (1, 2, 4, 4, 4)),
}


@pytest.mark.parametrize(("layer", "shape"), FANS.values(), ids=FANS.keys())
def test_fans_are_what_the_layer_connects(layer, shape):
    assert tyxe.util.fan_in_fan_out(layer.weight, layer) == counted_fans(layer, shape)


STRIDED = {
    "kernel 3, stride 2": (nn.ConvTranspose1d(2, 5, 3, stride=2), 12),
    "kernel 2, stride 3": (nn.ConvTranspose1d(2, 5, 2, stride=3), 12),
    "kernel 4, stride 2, dilated": (nn.ConvTranspose1d(2, 3, 4, stride=2, dilation=2), 16),
    "two dimensions": (nn.ConvTranspose2d(4, 2, (3, 4), stride=(1, 2), padding=1), 8),
    "grouped": (nn.ConvTranspose2d(6, 4, 3, stride=3, output_padding=1, groups=2), 8),
}


def in_the_middle(counts, size, strides):
    """Return the mean of counts `(channels, *size)` over a period of the strides."""
    counts = counts.reshape(-1, *size)
    for dim, stride in enumerate(strides, 1):
        counts = counts.narrow(dim, counts.shape[dim] // 2, stride)
    return counts.mean().item()


@pytest.mark.parametrize(("layer", "size"), STRIDED.values(), ids=STRIDED.keys())
def test_fans_of_strided_transposed_layers_are_means_over_positions(layer, size):
    strides = layer.stride
    layer = copy.deepcopy(layer).double()
    x = torch.randn(layer.in_channels, *[size] * len(strides)).double()
    for parameter in layer.parameters():
        nn.init.constant_(parameter, float(parameter is layer.weight))
    outputs = layer(x)
    jacobian = torch.autograd.functional.jacobian(layer, x)
    counts = jacobian.reshape(outputs.numel(), x.numel())
    fan_in, fan_out = tyxe.util.fan_in_fan_out(layer.weight, layer)
    assert fan_in == pytest.approx(in_the_middle(counts.sum(1), outputs.shape[1:], strides))
    assert fan_out == pytest.approx(in_the_middle(counts.sum(0), x.shape[1:], strides))


def test_fans_without_a_module_are_those_of_the_shape():
    fans = {(3, 5): (5.0, 3.0), (3, 5, 2, 2): (20.0, 12.0), (7,): (1.0, 1.0), (): (1.0, 1.0)}
    assert {shape: tyxe.util.fan_in_fan_out(torch.zeros(shape)) for shape in fans} == fans


@pytest.mark.parametrize(
    ("layer", "name", "expected"),
    [
        # Each gate of a cell reads the input: gates are several maps in one tensor.
        (nn.LSTM(5, 3), "weight_ih_l0", (5.0, 3.0)),
        (nn.LSTM(5, 3), "weight_hh_l0", (3.0, 3.0)),
        (nn.LSTM(5, 3, num_layers=2), "weight_ih_l1", (3.0, 3.0)),
        (nn.LSTM(5, 3, bidirectional=True), "weight_ih_l0_reverse", (5.0, 3.0)),
        (nn.LSTM(5, 3, proj_size=2), "weight_hr_l0", (3.0, 2.0)),
        (nn.LSTM(5, 3, proj_size=2), "weight_hh_l0", (2.0, 3.0)),
        (nn.GRU(5, 3), "weight_ih_l0", (5.0, 3.0)),
        (nn.RNN(5, 3), "weight_ih_l0", (5.0, 3.0)),
        (nn.LSTMCell(5, 3), "weight_ih", (5.0, 3.0)),
        (nn.GRUCell(5, 3), "weight_hh", (3.0, 3.0)),
        (nn.RNNCell(5, 3), "weight_ih", (5.0, 3.0)),
        (nn.MultiheadAttention(6, 2), "in_proj_weight", (6.0, 6.0)),
        (nn.MultiheadAttention(6, 2, kdim=4, vdim=5), "k_proj_weight", (4.0, 6.0)),
        (nn.MultiheadAttention(6, 2, kdim=4, vdim=5), "v_proj_weight", (5.0, 6.0)),
        (nn.Embedding(9, 4), "weight", (1.0, 4.0)),
        (nn.EmbeddingBag(9, 4), "weight", (1.0, 4.0)),
        (nn.LayerNorm(6), "weight", (1.0, 1.0)),
        (nn.LayerNorm((2, 6)), "weight", (1.0, 1.0)),
        (nn.BatchNorm2d(3), "weight", (1.0, 1.0)),
        (nn.PReLU(3), "weight", (1.0, 1.0)),
        (nn.Bilinear(2, 3, 4), "weight", (6.0, 12.0)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_fans_of_stacked_and_other_parameters(layer, name, expected):
    assert tyxe.util.fan_in_fan_out(getattr(layer, name), layer) == expected


@pytest.mark.parametrize(
    ("layer", "bias", "weight"),
    [
        (nn.Linear(5, 3), "bias", "weight"),
        (nn.LSTM(5, 3, num_layers=2), "bias_hh_l1", "weight_hh_l1"),
        (nn.GRUCell(5, 3), "bias_ih", "weight_ih"),
        (nn.MultiheadAttention(6, 2), "in_proj_bias", "in_proj_weight"),
        (nn.BatchNorm1d(4), "bias", "weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_bias_takes_its_layers_weight(layer, bias, weight):
    assert tyxe.util.layer_weight(layer, bias) is getattr(layer, weight)
    assert tyxe.util.layer_weight(layer, weight) is getattr(layer, weight)


def test_a_bias_without_a_weight_stands_for_itself():
    class Shift(nn.Module):
        """A bias alone."""

        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(3))

    assert tyxe.util.fan_in_fan_out(tyxe.util.layer_weight(Shift(), "bias")) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("radford", {}, 20**-0.5),
        ("xavier", {}, math.sqrt(2 / 30)),
        ("kaiming", {}, math.sqrt(2 / 20)),
        ("kaiming", {"nonlinearity": "linear"}, 20**-0.5),
    ],
)
def test_layerwise_standard_deviations(method, options, expected):
    found = tyxe.util.calculate_prior_std(method, torch.zeros(10, 20), **options)
    assert found == pytest.approx(expected)
    known = "'radford', 'xavier', 'kaiming'"
    with pytest.raises(ValueError, match=f"method is 'lecun'; expected one of {known}"):
        tyxe.util.calculate_prior_std("lecun", torch.zeros(2, 2))


# --- names --------------------------------------------------------------------------------------


def test_names_resolve_in_either_spelling():
    for name in ("0.weight", "net.0.weight"):
        assert tyxe.util.resolve_site_name(name, ["0.weight", "0.bias"]) == "0.weight"
        assert tyxe.util.resolve_site_name(name, ["net.0.weight", "net.0.bias"]) == "net.0.weight"
    # A net whose own child is called `net`.
    assert tyxe.util.resolve_site_name("net.weight", ["weight", "net.weight"]) == "net.weight"
    with pytest.raises(ValueError, match=r"no site 'c'; expected one of a, b"):
        tyxe.util.resolve_site_name("c", ["a", "b"])
    with pytest.raises(ValueError, match="expected one of none"):
        tyxe.util.resolve_site_name("c", [])


def test_sites_of_a_net():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert tyxe.util.pyro_sample_sites(net) == []
    tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0), hide_modules=["1"]).apply_(net)
    assert tyxe.util.pyro_sample_sites(net) == ["0.weight", "0.bias"]
    assert all(prior.mean.sum() == 0 for _, prior in tyxe.util.named_pyro_samples(net))


def test_sites_of_a_net_written_for_pyro():
    net = nn.Sequential(nn.Linear(2, 1))
    tyxe.util.to_pyro_module_(net)
    net[0].weight = pyro.nn.PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))
    assert tyxe.util.pyro_sample_sites(net) == ["0.weight"]


# --- activations ----------------------------------------------------------------------------------


def test_activations_are_replaced_at_any_depth():
    net = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(1, 1), nn.ReLU()), nn.Tanh())
    assert tyxe.util.replace_activations_(net, nn.ReLU, nn.Softplus) is net
    kinds = collections.Counter(type(module) for module in net.modules())
    assert kinds[nn.Softplus] == 2
    assert kinds[nn.ReLU] == 0
    assert kinds[nn.Tanh] == 1
    assert net[0] is not net[1][1]
    with pytest.raises(ValueError, match="no submodule of type ReLU; a functional call"):
        tyxe.util.replace_activations_(net, nn.ReLU, nn.Softplus)


# --- containers -----------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "first second")


def test_inputs_are_passed_by_position_or_keyword():
    def function(a, b=0):
        return a, b

    assert tyxe.util.call_with(function, 1) == (1, 0)
    assert tyxe.util.call_with(function, (1, 2)) == tyxe.util.call_with(function, [1, 2]) == (1, 2)
    assert tyxe.util.call_with(function, {"b": 2, "a": 1}) == (1, 2)


def test_trees_keep_their_structure():
    one = torch.ones(1)
    tree = {"a": (one, 3), "b": [one, "text"], "c": Pair(one, None)}
    doubled = tyxe.util.tree_map_tensors(lambda t: 2 * t, tree)
    assert doubled["a"] == (2.0, 3)
    assert doubled["b"] == [2.0, "text"]
    assert isinstance(doubled["c"], Pair)
    assert doubled["c"].first == 2.0


SHAPES = {"0.weight": (2, 1), "0.bias": (2,), "1.inner.weight": (1, 2), "scale": ()}


@pytest.mark.parametrize("trainable", [True, False, None])
def test_site_tensors_hold_their_tensors_under_dotted_names(trainable):
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    held = tyxe.util.SiteTensors(tensors, trainable)
    assert list(held) == list(SHAPES)
    assert len(held) == 4
    assert set(held.state_dict()) == set(SHAPES)
    for name, tensor in held.items():
        assert torch.equal(tensor, tensors[name])
        assert tensor.data_ptr() != tensors[name].data_ptr()
        assert tensor.requires_grad is bool(trainable)
    for copied in (copy.deepcopy(held), pickle.loads(pickle.dumps(held))):
        assert torch.equal(copied["0.weight"], held["0.weight"])
        with torch.no_grad():
            copied["0.weight"].zero_()
        assert torch.equal(held["0.weight"], tensors["0.weight"])
    assert held.double()["1.inner.weight"].dtype == torch.float64
    held.load_state_dict({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    assert held["scale"] == 0
    with pytest.raises(KeyError):
        held["1.weight"]


def test_the_last_layer():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3), nn.LayerNorm(3))
    assert tyxe.util.last_layer(net) is net[2]
    assert tyxe.util.last_layer(net[2]) is net[2]
    with pytest.raises(ValueError, match=r"ReLU has no layer with a matrix"):
        tyxe.util.last_layer(nn.ReLU())


@pytest.mark.parametrize("name", ["", "first"])
def test_sites_of_a_bnn_are_those_of_its_net(name):
    prior = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0), hide_parameters=["bias"])
    bnn = tyxe.PytorchBNN(nn.Sequential(nn.Linear(2, 1)), prior, tyxe.guides.AutoNormal, name)
    for one in (bnn, copy.deepcopy(bnn), pickle.loads(pickle.dumps(bnn))):
        assert (
            tyxe.util.pyro_sample_sites(one) == tyxe.util.pyro_sample_sites(one.net) == ["0.weight"]
        )
        one.update_prior(tyxe.priors.IIDPrior(dist.Normal(0.0, 3.0)))
        assert [float(prior.stddev.max()) for _, prior in tyxe.util.named_pyro_samples(one)] == [
            3.0
        ]


def test_a_net_starts_anew_in_every_part() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.MultiheadAttention(4, 2), nn.BatchNorm1d(4))
    net[2].running_mean += 1
    before = {name: value.clone() for name, value in net.named_parameters()}
    torch.manual_seed(1)
    assert tyxe.util.reset_parameters_(net) is net
    after = dict(net.named_parameters())
    drawn = [n for n in before if after[n].unique().numel() > 1]
    assert len(drawn) >= 3
    assert all(not torch.equal(before[n], after[n]) for n in drawn)
    assert not net[2].running_mean.any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Transformer(32, 2, 1, 1, 64, batch_first=True),
        lambda: nn.MultiheadAttention(64, 2),
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LSTM(8, 8)),
    ],
    ids=["transformer", "attention", "layers"],
)
def test_a_net_starts_anew_as_one_that_is_made(make) -> None:
    fresh, again = make(), make()
    for p in again.parameters():
        nn.init.constant_(p, 3.0)
    tyxe.util.reset_parameters_(again)
    for (name, p), other in zip(fresh.named_parameters(), again.parameters(), strict=True):
        if p.std() == 0:
            torch.testing.assert_close(other, p, msg=name)
        elif p.numel() > 500:
            torch.testing.assert_close(other.std(), p.std(), rtol=0.15, atol=0.0, msg=name)


def test_a_part_that_cannot_start_anew_is_named() -> None:
    holder = nn.Module()
    holder.register_parameter("offset", nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match=r"'1\.offset' has no reset_parameters"):
        tyxe.util.reset_parameters_(nn.Sequential(nn.Linear(2, 1), holder))

    class Parent(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 1)
            self.child = holder

    with pytest.raises(ValueError, match=r"'child\.offset' has no reset_parameters"):
        tyxe.util.reset_parameters_(Parent())
