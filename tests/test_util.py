"""Names, fans by brute force, activations, containers."""

import copy
import math
import pickle

import pyro.distributions as dist
import pyro.nn
import pytest
import torch
import torch.nn as nn

import tyxe
from tyxe.util import aligned, at_each

# --- fans ---------------------------------------------------------------------------------------

FANS = {
    "linear": nn.Linear(5, 3),
    "conv1d": nn.Conv1d(2, 3, 4),
    "conv2d": nn.Conv2d(3, 4, (2, 3)),
    "conv2d, grouped": nn.Conv2d(4, 6, 3, groups=2),
    "conv2d, depthwise": nn.Conv2d(3, 6, 2, groups=3),
    "conv2d, dilated": nn.Conv2d(2, 3, 2, dilation=2),
    "conv3d": nn.Conv3d(2, 3, 2),
    "conv_transpose1d": nn.ConvTranspose1d(2, 5, 3),
    "conv_transpose2d, grouped": nn.ConvTranspose2d(6, 4, (3, 2), groups=2),
    "conv_transpose3d": nn.ConvTranspose3d(2, 2, 2),
    "kernel 3, stride 2": nn.ConvTranspose1d(2, 5, 3, stride=2),
    "kernel 2, stride 3": nn.ConvTranspose1d(2, 5, 2, stride=3),
    "kernel 4, stride 2, dilated": nn.ConvTranspose1d(2, 3, 4, stride=2, dilation=2),
    "two strides": nn.ConvTranspose2d(4, 2, (3, 4), stride=(1, 2), padding=1),
    "grouped, stride 3": nn.ConvTranspose2d(6, 4, 3, stride=3, output_padding=1, groups=2),
}


def in_the_middle(counts, size, strides):
    """Return the mean of counts `(channels, *size)` over a period of the strides."""
    counts = counts.reshape(-1, *size)
    for dim, stride in enumerate(strides, 1):
        counts = counts.narrow(dim, counts.shape[dim] // 2, stride)
    return counts.mean().item()


@pytest.mark.parametrize("name", FANS)
def test_fans_are_what_the_layer_connects(name):
    """With all weights 1 the Jacobian of the output by the input counts connections."""
    layer = copy.deepcopy(FANS[name]).double()
    for parameter in layer.parameters():
        nn.init.constant_(parameter, float(parameter is layer.weight))
    strides = getattr(layer, "stride", ())
    size = {0: [], 1: [12], 2: [8, 8], 3: [4, 4, 4]}[len(strides)]
    x = torch.randn(
        layer.weight.shape[1] if name == "linear" else layer.in_channels, *size
    ).double()
    outputs, jacobian = layer(x), torch.autograd.functional.jacobian(layer, x)
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
        (nn.LSTM(5, 3, bidirectional=True), "weight_ih_l0_reverse", (5.0, 3.0)),
        (nn.LSTM(5, 3, proj_size=2), "weight_hr_l0", (3.0, 2.0)),
        (nn.LSTM(5, 3, proj_size=2), "weight_hh_l0", (2.0, 3.0)),
        (nn.GRU(5, 3), "weight_ih_l0", (5.0, 3.0)),
        (nn.LSTMCell(5, 3), "weight_ih", (5.0, 3.0)),
        (nn.RNNCell(5, 3), "weight_ih", (5.0, 3.0)),
        (nn.MultiheadAttention(6, 2), "in_proj_weight", (6.0, 6.0)),
        (nn.MultiheadAttention(6, 2, kdim=4, vdim=5), "k_proj_weight", (4.0, 6.0)),
        (nn.MultiheadAttention(6, 2, kdim=4, vdim=5), "v_proj_weight", (5.0, 6.0)),
        (nn.Embedding(9, 4), "weight", (1.0, 4.0)),
        (nn.EmbeddingBag(9, 4), "weight", (1.0, 4.0)),
        (nn.LayerNorm(6), "weight", (1.0, 1.0)),
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
        (nn.MultiheadAttention(6, 2), "in_proj_bias", "in_proj_weight"),
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


def test_the_gain_of_kaiming_is_that_of_the_nonlinearity():
    weight = torch.zeros(10, 20)
    assert tyxe.util.calculate_prior_std("kaiming", weight) == pytest.approx(math.sqrt(2 / 20))
    found = tyxe.util.calculate_prior_std("kaiming", weight, nonlinearity="linear")
    assert found == pytest.approx(20**-0.5)


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


def test_sites_of_a_net_written_for_pyro():
    net = nn.Sequential(nn.Linear(2, 1))
    tyxe.util.to_pyro_module_(net)
    net[0].weight = pyro.nn.PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))
    assert tyxe.util.pyro_sample_sites(net) == ["0.weight"]


# --- activations ----------------------------------------------------------------------------------


def test_activations_are_replaced_at_any_depth():
    net = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(1, 1), nn.ReLU()), nn.Tanh())
    assert tyxe.util.replace_activations_(net, nn.ReLU, nn.Softplus) is net
    assert [type(net[0]), type(net[1][1]), type(net[2])] == [nn.Softplus, nn.Softplus, nn.Tanh]
    assert net[0] is not net[1][1]
    with pytest.raises(ValueError, match="no submodule of type ReLU; a functional call"):
        tyxe.util.replace_activations_(net, nn.ReLU, nn.Softplus)


# --- containers -----------------------------------------------------------------------------------


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
        assert tyxe.util.pyro_sample_sites(one) == ["0.weight"]
        assert tyxe.util.pyro_sample_sites(one.net) == ["0.weight"]
        one.update_prior(tyxe.priors.IIDPrior(dist.Normal(0.0, 3.0)))
        ((_, prior),) = tyxe.util.named_pyro_samples(one)
        assert prior.stddev.max() == 3


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
    for value in (*again.parameters(), *again.buffers()):
        nn.init.constant_(value, 3)
    assert tyxe.util.reset_parameters_(again) is again
    assert all(map(torch.equal, fresh.buffers(), again.buffers()))
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


def test_a_part_of_a_vector_is_copied_where_a_parameter_would_start_elsewhere():
    vector = torch.empty(9, device="meta")
    whole, part, even = vector, vector[1:], vector[4:]
    assert aligned(whole) is whole
    assert aligned(even) is even
    assert aligned(part) is not part


def test_passes_at_many_draws_use_no_fused_layers(monkeypatch):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x, parameters = torch.randn(6, 5, 8), dict(layer.named_parameters())
    stacked = {name: torch.stack([p.detach(), 2 * p.detach()]) for name, p in parameters.items()}
    fused, calls = torch._transformer_encoder_layer_fwd, []

    def noted(*args):
        calls.append(args)
        return fused(*args)

    def run(values):
        return torch.func.functional_call(layer, values, x)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", noted)
    with torch.no_grad():
        found = at_each(run, stacked)
        assert not calls
        for row, expected in enumerate(found):
            one = run({name: rows[row] for name, rows in stacked.items()})
            torch.testing.assert_close(one, expected)
    assert len(calls) == 2
