"""The shortcuts of the curvature equal the long way round."""

import copy
import itertools
from functools import partial

import pyro.distributions as dist
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint

import tyxe
from tyxe.curvature import accumulate, covariance
from tyxe.curvature.uses import UseRecorder, patches
from tyxe.poutine import Draw


def record(function, x, weight, *args, **kwargs):
    with UseRecorder() as recorder:
        function(x, Draw("w", None, weight), None, *args, **kwargs)
    (use,) = recorder.uses
    return use


CONVOLUTIONS = {
    "positional": (F.conv2d, (3, 4, 6, 7), (5, 4, 2, 3), ((2, 1), (0, 1), (1, 2)), {}),
    "torch's own": (torch.conv2d, (3, 4, 6, 7), (5, 4, 2, 3), (2, 1, 2), {}),
    "by name": (F.conv2d, (3, 4, 6, 7), (6, 2, 2, 3), (), {"groups": 2, "padding": 1}),
    "same, even kernel": (F.conv2d, (3, 4, 6, 7), (5, 4, 2, 4), (), {"padding": "same"}),
    "same, dilated": (F.conv1d, (3, 4, 9), (5, 4, 4), (1, "same", 3), {}),
    "valid": (F.conv1d, (3, 4, 9), (5, 4, 3), (2, "valid"), {}),
    "one dimension": (F.conv1d, (3, 4, 9), (4, 1, 3), (2, 1, 2, 4), {}),
    "three dimensions": (F.conv3d, (2, 2, 4, 5, 6), (3, 2, 2, 1, 3), (2, 1, 1), {}),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "expanded"])
def test_patches_are_what_the_kernel_covers(name, layout):
    """The convolution itself, by patches times the weight's matrices."""
    torch.manual_seed(0)
    function, shape, weight_shape, args, kwargs = CONVOLUTIONS[name]
    x = torch.randn(shape).double()
    if layout == "channels last":
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    elif layout == "expanded":
        x = x[:1].expand(shape)
    weight = torch.randn(weight_shape).double()
    use = record(function, x, weight, *args, **kwargs)
    found = patches(use, len(x))
    matrices = weight.reshape(use.groups, -1, weight[0].numel())
    outputs = torch.einsum("nrgi,goi->ngor", found, matrices).flatten(1, 2)
    expected = function(x, weight, None, *args, **kwargs)
    torch.testing.assert_close(outputs, expected.flatten(2), rtol=1e-12, atol=1e-12)
    with_one = patches(use, len(x), with_one=True)
    assert torch.equal(with_one[..., :-1], found)
    assert bool((with_one[..., -1] == 1).all())


def test_patches_of_an_input_with_one_more_batch_dimension_become_positions():
    x = torch.randn(2, 3, 4, 5, 5).double()
    use = record(F.conv2d, x.flatten(0, 1), torch.randn(2, 4, 3, 3).double())
    apart, together = patches(use, 6), patches(use, 2)
    assert torch.equal(together, apart.reshape(2, 3 * 9, 1, 36))


class Changes(nn.Module):
    """Changes the last map's output in place, or not at all."""

    def __init__(self, factor, inplace=False):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=inplace))
        self.head = nn.Linear(4, 2)
        self.factor = factor

    def forward(self, x):
        outputs = self.head(self.body(x))
        return outputs if self.factor is None else outputs.mul_(self.factor)


def laplace(net, structure="full", likelihood=None, points=5, **options):
    likelihood = tyxe.likelihoods.Categorical(points) if likelihood is None else likelihood
    prior = tyxe.priors.IIDPrior(
        dist.Normal(torch.zeros(()).double(), torch.ones(()).double()),
        **options.pop("rules", {}),
    )
    return tyxe.LaplaceBNN(net.double(), prior, likelihood, structure=structure, **options)


def jacobian_of(net, x, names):
    values = {name: p.detach() for name, p in net.named_parameters() if name in names}

    def outputs(values):
        return torch.func.functional_call(net, values, (x,))

    found = torch.func.jacrev(outputs)(values)
    return torch.cat([found[name].flatten(2) for name in names], 2)


@pytest.mark.parametrize("factor", [None, 3.0])
@pytest.mark.parametrize("inplace", [False, True])
def test_activations_and_outputs_may_be_changed_in_place(factor, inplace):
    torch.manual_seed(0)
    net, x = Changes(factor, inplace).double(), torch.randn(5, 3).double()
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
    found = torch.linalg.eigvalsh(bnn.net_guide.curvature.operator.to_dense())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_the_last_layer_takes_no_backward_and_leaves_no_graph(monkeypatch):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    bnn = laplace(net, rules={"expose_all": False, "expose_modules": [net[2]]})
    kept = []
    monkeypatch.setattr(torch.autograd, "grad", None)
    hook = bnn.net[1].register_forward_hook(lambda _, __, out: kept.append(out.requires_grad))
    x = torch.randn(5, 3).double()
    bnn.fit_curvature([(x, torch.zeros(5).long())], progress=False)
    hook.remove()
    assert kept
    assert not any(kept)
    hidden = [p for name, p in bnn.net.named_parameters() if name.startswith("0.")]
    assert all(p.requires_grad for p in hidden)


def test_hidden_parameters_are_as_before_after_an_error():
    class Fails(nn.Linear):
        def forward(self, x):
            if torch.is_grad_enabled():
                raise RuntimeError("no more")
            return super().forward(x)

    net = nn.Sequential(nn.Linear(3, 4), Fails(4, 2))
    bnn = laplace(net, rules={"expose_all": False, "expose_modules": [net[1]]})
    with pytest.raises(RuntimeError, match="no more"):
        bnn.fit_curvature([(torch.randn(5, 3).double(), torch.zeros(5).long())], progress=False)
    assert all(p.requires_grad for p in bnn.net[0].parameters())


@pytest.mark.parametrize("budget", [2**24, 1])
@pytest.mark.parametrize("curvature", ["ggn", "fisher"])
def test_the_full_matrix_of_outer_products(monkeypatch, budget, curvature):
    """All cotangents of a batch together, as many as fit: the same as one Jacobian at a time."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(5, 3).double()
    batches = [(x[:2], torch.zeros(2).long()), (x[2:], torch.zeros(3).long())]
    monkeypatch.setattr(accumulate, "BUDGET", budget)
    torch.manual_seed(1)
    bnn = laplace(net, curvature=curvature)
    bnn.fit_curvature(batches, progress=False)
    monkeypatch.setattr(accumulate, "_is_outer", lambda rows: False)
    torch.manual_seed(1)
    slow = laplace(net, curvature=curvature)
    slow.fit_curvature(batches, progress=False)
    found, expected = (b.net_guide.curvature.operator.to_dense() for b in (bnn, slow))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_covariances_come_in_chunks(monkeypatch, structure):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)).double()
    x = torch.randn(5, 1, 4, 4).double()
    bnn = laplace(net, structure)
    bnn.fit_curvature([(x, torch.zeros(5).long())], progress=False)
    whole = bnn.functional_variance(x)
    monkeypatch.setattr(covariance, "CACHED", 1)
    monkeypatch.setattr(covariance, "BUDGET", 1)
    torch.testing.assert_close(bnn.functional_variance(x), whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("positions", "outputs", "inputs", "classes"), [
    (2, 5, 7, 3), (50, 2, 3, 4), (6, 5, 3, 4), (6, 2, 9, 1),
])  # fmt: skip
def test_sums_are_turned_before_or_after(positions, outputs, inputs, classes):
    torch.manual_seed(0)
    sizes = outputs, inputs
    factors = [(r := torch.randn(s, s).double()) @ r.mT for s in sizes]
    precision = tyxe.linalg.Kronecker.from_factors(*factors).add_diagonal(0.3)
    a = torch.randn(4, positions, inputs).double()
    g = torch.randn(4, classes, positions, outputs).double()
    rows = torch.einsum("ncro,nri->ncoi", g, a).flatten(-2)
    torch.testing.assert_close(
        precision.inverse_quadratic_summed(a, g), precision.inverse_quadratic(rows)
    )


def test_factored_rows_of_the_wrong_size_are_refused():
    kron = tyxe.linalg.Kronecker.from_factors(torch.eye(2), torch.eye(3)).add_diagonal(1.0)
    with pytest.raises(ValueError, match=r"expected inputs \(..., R, 3\)"):
        kron.inverse_quadratic_summed(torch.ones(4, 5, 2), torch.ones(4, 1, 5, 2))
    with pytest.raises(ValueError, match="do not make rows of 6 elements"):
        tyxe.linalg.Dense(torch.eye(6)).inverse_quadratic_factored(
            torch.ones(4, 2), torch.ones(4, 1, 2)
        )


@pytest.mark.parametrize("per_site", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize(
    ("structure", "damping"), [("kron", False), ("kron", True), ("diag", False), ("full", False)]
)
def test_from_anywhere_the_search_ends_where_the_evidence_is_flat(
    structure, damping, temperature, per_site
):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 2, groups=2), nn.Flatten(), nn.Linear(16, 3), nn.LayerNorm(3)
    )
    x, y = torch.randn(6, 2, 3, 3).double(), torch.arange(6) % 3
    options = {"temperature": temperature, "damping": damping}
    torch.nn.init.normal_(net[3].bias)
    bnn = laplace(net, structure, points=6, **options)
    bnn.fit_curvature([(x, y)], progress=False)
    groups = bnn.net_guide.curvature.groups
    owner = {site: g.name if per_site else "" for g in groups for site in g.sites}
    ends = []
    for start in (1e-4, 1.0, 1e4):
        bnn.update_prior(tyxe.priors.IIDPrior(dist.Normal(0.0, start**-0.5)))
        found = bnn.optimize_prior_precision(per_site=per_site)
        numbers = {f"net.{key}": v for key, v in found.items()} if per_site else {"": found}
        logs = {name: value.log().requires_grad_() for name, value in numbers.items()}
        given = {site: logs[name].exp() for site, name in owner.items()}
        slopes = torch.autograd.grad(bnn.log_marginal_likelihood(given), list(logs.values()))
        assert all(abs(slope) < 1e-6 for slope in slopes)
        ends.append(numbers)
    assert all(number > 0 for number in ends[0].values())
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-6, atol=0)


def test_a_search_that_cannot_end_says_so():
    bnn = laplace(nn.Linear(3, 2))
    data = [(torch.randn(5, 3).double(), torch.zeros(5).long())]
    bnn.fit_curvature(data, progress=False)
    with pytest.warns(tyxe.TyxeWarning, match=r"not converged in num_steps=2: its logarithm"):
        before = bnn.optimize_prior_precision(num_steps=2)
    with torch.no_grad():
        for loc in bnn.net_guide.parameters():
            loc.zero_()
    bnn.fit_curvature(data, progress=False)
    with pytest.warns(tyxe.TyxeWarning, match=r"the weights of the net are at the prior's mean"):
        found = bnn.optimize_prior_precision()
    torch.testing.assert_close(float(found), float(before))


def test_numbers_and_tensors_give_one_evidence():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for structure, number in itertools.product(("kron", "diag", "full"), (0.5, 3.0)):
        bnn = laplace(net, structure)
        bnn.fit_curvature([(torch.randn(5, 3).double(), torch.zeros(5).long())], progress=False)
        full = {n: torch.full_like(p, number) for n, p in net.named_parameters()}
        by_number = bnn.log_marginal_likelihood(number)
        torch.testing.assert_close(bnn.log_marginal_likelihood(full), by_number, rtol=1e-12, atol=0)


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
        dense.append(bnn.net_guide.curvature.operator.to_dense())
    size = len(dense[1])
    assert bool(dense[1].any())
    torch.testing.assert_close(dense[1], dense[0][:size, :size], rtol=1e-12, atol=1e-12)


def test_a_net_under_no_grad_has_no_curvature_in_it():
    """A last map outside the graph is no shortcut: its gradient is zero."""

    class Stopped(nn.Linear):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    bnn = laplace(Stopped(3, 2))
    bnn.fit_curvature([(torch.randn(5, 3).double(), torch.zeros(5).long())], progress=False)
    assert not bool(bnn.net_guide.curvature.operator.to_dense().any())


def test_every_batch_is_checked_on_the_forward_of_the_pass():
    bnn = laplace(nn.Linear(3, 2))
    x, y = torch.randn(5, 3).double(), torch.zeros(5).long()
    forwards = []
    bnn.net.register_forward_hook(lambda *_: forwards.append(1))
    bnn.fit_curvature([(x[:3], y[:3]), (x[3:], y[3:])], progress=False)
    assert len(forwards) == 2
    for wrong in (y[:3] + 9, y[3:] + 9):
        batches = [(x[:3], wrong if len(wrong) == 3 else y[:3])]
        batches += [(x[3:], wrong if len(wrong) == 2 else y[3:])]
        with pytest.raises(ValueError, match="targets lie outside"):
            bnn.fit_curvature(batches, progress=False)
    assert len(forwards) == 2 + 1 + 2


class Flagged(nn.Module):
    """Takes a tensor and arguments that are none; its norm has no factors."""

    def __init__(self, recurrent):
        super().__init__()
        self.cell = nn.GRU(3, 3, batch_first=True) if recurrent else None
        self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 2)

    def forward(self, x, power, offset=None, how="tanh", scale=1.0):
        if self.cell is not None:
            x = self.cell(x[:, None])[0][:, 0]
        x = self.norm(x) ** power * scale
        x = x if offset is None else x + offset
        return self.head(x.tanh() if how == "tanh" else x)


ARGUMENTS = {
    "an int": lambda x: (x, 3),
    "None and a string": lambda x: (x, 1, None, "plain"),
    "by name": lambda x: {"x": x, "power": 2, "how": "plain", "offset": None},
    "a tensor that is a number": lambda x: {"x": x, "power": 1, "scale": torch.tensor(0.7)},
}


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_without_rows_are_the_same_for_all_points(arguments, structure, recurrent):
    torch.manual_seed(0)
    net, given = Flagged(recurrent), ARGUMENTS[arguments]
    bnn = laplace(net, structure)
    x, y = torch.randn(5, 3).double(), torch.zeros(5).long()
    bnn.fit_curvature([(given(x[:3]), y[:3]), (given(x[3:]), y[3:])], progress=False)

    class Fixed(nn.Module):
        """The same net with its arguments inside."""

        def __init__(self):
            super().__init__()
            self.inner = copy.deepcopy(net)

        def forward(self, x):
            arguments = given(x)
            if isinstance(arguments, dict):
                return self.inner(**arguments)
            return self.inner(*arguments)

    fixed = laplace(Fixed(), structure)
    fixed.fit_curvature([(x, y)], progress=False)
    found, expected = (b.net_guide.curvature.operator.to_dense() for b in (bnn, fixed))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    inputs = given(x)
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    bnn.fit_gp([(given(x[:3]), y[:3]), (given(x[3:]), y[3:])])
    fixed.fit_gp([(x, y)])
    for predictive in ("glm", "gp"):
        options = {"link": "probit", "predictive": predictive}
        found = bnn.predict(*arguments, batch_size=2, **options)
        torch.testing.assert_close(found, fixed.predict(x, **options), rtol=1e-9, atol=1e-12)


def test_batches_with_different_constants_do_not_make_one():
    bnn = laplace(Flagged(False))
    x, y = torch.randn(5, 3).double(), torch.zeros(5).long()
    batches = [((x[:3], 1), y[:3]), ((x[3:], 2), y[3:])]
    bnn.fit_curvature(batches, progress=False)
    with pytest.raises(ValueError, match="is 1 in one batch and something else in another"):
        bnn.fit_gp(batches)


def test_arguments_that_cannot_be_taken_apart_are_refused():
    class OfPoints(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 2)

        def forward(self, points):
            return self.head(self.norm(points.x))

    class Points:
        def __init__(self, x):
            self.x = x

    bnn = laplace(OfPoints())
    with pytest.raises(TypeError, match="a Points has no rows to take apart: pass the net tensors"):
        bnn.fit_curvature([(Points(torch.randn(5, 3).double()), torch.zeros(5).long())])


class Through(nn.Module):
    """A map of positions within another order than points first, then one of what they sum to."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.inner, self.outer = kind, nn.Linear(3, 4), nn.Linear(4, 2)
        self.conv = nn.Conv1d(3, 4, 1) if "convolution" in kind else None
        self.encoder = nn.TransformerEncoderLayer(3, 1, 5, 0.0) if kind == "encoder" else None
        self.lstm = nn.LSTM(3, 3) if kind == "recurrent" else None

    def forward(self, x):
        n, steps, _ = x.shape
        if self.kind == "second":
            h = self.inner(x.transpose(0, 1)).tanh()[-1]
        elif self.kind == "first step":
            h = self.inner(x.transpose(0, 1)).tanh()[0]
        elif self.kind == "third":
            h = self.inner(x.transpose(0, 1)[None]).tanh().sum((0, 1))
        elif self.kind == "folded":
            h = self.inner(x.transpose(0, 1).reshape(-1, 3)).tanh().view(steps, n, 4).sum(0)
        elif self.kind == "folded, points first":
            h = self.inner(x.reshape(-1, 3)).tanh().view(n, steps, 4).sum(1)
        elif self.kind == "folded convolution":
            h = self.conv(x.reshape(-1, 3, 1)).tanh().view(n, steps, 4).sum(1)
        elif self.kind == "encoder":
            h = self.inner(self.encoder(x.transpose(0, 1))).tanh()[0]
        else:
            h = self.inner(self.lstm(x.transpose(0, 1))[0]).tanh().sum(0)
        return self.outer(h)


KINDS_OF_ORDER = ["second", "first step", "third", "folded", "folded, points first"]
KINDS_OF_ORDER += ["folded convolution", "encoder", "recurrent"]


@pytest.mark.parametrize("kind", KINDS_OF_ORDER)
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_points_are_found_where_a_map_holds_them(kind, structure):
    """As by one point after the other, for which there is no order."""
    torch.manual_seed(0)
    net = Through(kind)
    x, y = torch.randn(5, 4, 3).double(), torch.arange(5) % 2
    bnn = laplace(net, structure)
    bnn.fit_curvature([(x[n : n + 1], y[n : n + 1]) for n in range(5)], progress=False)
    expected = bnn.net_guide.precision.to_dense()
    # A first batch of one point tells nothing of where a second has them.
    for split in (2, 1, 4):
        batches = [(x[:split], y[:split]), (x[split:], y[split:])]
        bnn.fit_curvature(batches, progress=False)
        found = bnn.net_guide.precision.to_dense()
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    variance = bnn.functional_variance(x)
    alone = torch.cat([bnn.functional_variance(x[n : n + 1]) for n in range(5)])
    torch.testing.assert_close(variance, alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["second", "folded", "recurrent"])
def test_a_first_batch_that_does_not_tell_where_the_points_are(kind):
    """Its sequences are of one step: any order would do."""
    torch.manual_seed(0)
    short, long = torch.randn(3, 1, 3).double(), torch.randn(6, 4, 3).double()
    y = torch.arange(9) % 2
    bnn = laplace(Through(kind), "diag", points=9)
    points = [*short.split(1), *long.split(1)]
    bnn.fit_curvature([(x, y[n : n + 1]) for n, x in enumerate(points)], progress=False)
    expected = bnn.net_guide.precision.to_dense()
    for batches in ([(short, y[:3]), (long, y[3:])], [(long, y[3:]), (short, y[:3])]):
        bnn.fit_curvature(batches, progress=False)
        found = bnn.net_guide.precision.to_dense()
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_points_that_influence_each_other_have_no_curvature(structure):
    class Mixed(Through):
        def forward(self, x):
            h = self.inner(x).tanh().sum(1)
            return self.outer(h - h.mean(0))

    bnn = laplace(Mixed(""), structure)
    with pytest.raises(ValueError, match=r"'net\.inner\.weight'.*\(5, 4, 4\) for 5 data points"):
        bnn.fit_curvature([(torch.randn(5, 4, 3).double(), torch.zeros(5).long())], progress=False)


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
@pytest.mark.parametrize("kept", [5, 3])
def test_nodes_of_a_graph_influence_each_other(structure, kept):
    """In a batch of all nodes, and in one of some with what they depend on."""

    class Convolved(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
            self.adjacency = torch.eye(5).double() + torch.eye(5).double().roll(1, 0)
            self.adjacency[0] = self.adjacency[:, 0] = torch.eye(5)[0]  # a node by itself

        def forward(self, x):
            h = self.first(self.adjacency @ x).tanh()
            return self.second((self.adjacency @ h)[:kept])

    data = [(torch.randn(5, 3).double(), torch.zeros(kept).long())]
    with pytest.raises(ValueError, match=r"'net\.first\.weight'.*as nodes of a graph do"):
        laplace(Convolved(), structure).fit_curvature(data, progress=False)
    last = laplace(Convolved(), structure, rules={"hide_modules": ["first"]})
    last.fit_curvature(data, progress=False)
    assert last.functional_variance(data[0][0]).shape == (kept, 2, 2)


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


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_a_cell_stepped_by_hand_is_the_layer(kind, structure):
    """Neither has factors nor goes through torch.vmap."""

    class Stepped(nn.Module):
        def __init__(self, by_cell):
            super().__init__()
            self.recurrent = (
                getattr(nn, f"{kind}Cell")(3, 2) if by_cell else getattr(nn, kind)(3, 2)
            )
            self.norm, self.head = nn.LayerNorm(2), nn.Linear(2, 2)

        def forward(self, x):
            state = None
            if isinstance(self.recurrent, nn.RNNBase):
                h = self.recurrent(x.transpose(0, 1))[0][-1]
            else:
                for step in x.unbind(1):
                    state = self.recurrent(step, state)
                h = state[0] if kind == "LSTM" else state
            return self.head(self.norm(h))

    torch.manual_seed(0)
    layer, cell = Stepped(False).double(), Stepped(True).double()
    for own, other in zip(cell.parameters(), layer.parameters(), strict=True):
        own.data.copy_(other)
    x, y = torch.randn(5, 4, 3).double(), torch.arange(5) % 2
    found = []
    for net in (layer, cell):
        bnn = laplace(net, structure)
        bnn.fit_curvature([(x, y)], progress=False)
        found.append((bnn.net_guide.precision.to_dense(), bnn.functional_variance(x)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)
