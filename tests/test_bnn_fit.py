"""`fit`: whatever optimiser, loader and options a user brings."""

import functools
import io
import sys
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tyxe
from tyxe.bnn import elbo_terms
from tyxe.bnn.batches import batches_of, collect
from tyxe.guides import AutoNormal
from tyxe.likelihoods import Categorical, HomoskedasticGaussian

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")

SEED = torch.Generator().manual_seed(0)
X = torch.randn(10, 2, generator=SEED)
Y = torch.randint(0, 3, (10,), generator=SEED)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)
PRIOR = tyxe.priors.IIDPrior(dist.Normal(0, 1))
HIDE_NORMS = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])


def make(net=None, prior=None, guide=AutoNormal, likelihood=None, seed=0):
    pyro.set_rng_seed(seed)
    # A bias before a norm has no gradient but rounding errors, of which Adam makes whole steps.
    first = nn.Linear(2, 4, bias=False)
    net = net or nn.Sequential(first, nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    return tyxe.VariationalBNN(net, prior or HIDE_NORMS, likelihood or Categorical(10), guide)


def trainable(bnn):
    return {n: p.detach().clone() for n, p in bnn.named_parameters() if p.requires_grad}


def fitted(optim, epochs=3, **options):
    """The parameters after a fit from the same start and seed."""
    bnn = make()
    pyro.set_rng_seed(7)
    bnn.fit([(X[:6], Y[:6]), (X[6:], Y[6:])], optim(bnn), epochs, **options)
    return trainable(bnn)


def assert_equal(left, right, **tolerance):
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(
            value, right[name], **(tolerance or {"rtol": 0, "atol": 0}), msg=name
        )


# --------------------------------------------------------------------------- optimisers


SAME_ADAM = {
    "class with defaults": lambda bnn: torch.optim.Adam,
    "partial": lambda bnn: functools.partial(torch.optim.Adam, lr=1e-3),
    "function": lambda bnn: lambda groups: torch.optim.Adam(groups, lr=1e-3),
    "instance": lambda bnn: torch.optim.Adam(bnn.parameters(), lr=1e-3),
    "pyro, a dictionary": lambda bnn: pyro.optim.Adam({"lr": 1e-3}),
    "pyro, a function of the name": lambda bnn: pyro.optim.Adam(lambda name: {"lr": 1e-3}),
    "pyro, of module and name": lambda bnn: pyro.optim.Adam(lambda module, name: {"lr": 1e-3}),
    "pyro, any class": lambda bnn: pyro.optim.PyroOptim(torch.optim.Adam, {"lr": 1e-3}),
    "pyro, a constant schedule": lambda bnn: pyro.optim.ExponentialLR(
        {"optimizer": torch.optim.Adam, "optim_args": {"lr": 1e-3}, "gamma": 0.5}
    ),
}


@pytest.mark.parametrize("optim", SAME_ADAM)
def test_every_spelling_of_adam_is_adam(optim):
    bnn = make()
    start = trainable(bnn)
    pyro.set_rng_seed(7)
    optimizer = torch.optim.Adam([p for p in bnn.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(3):
        for rows in (slice(0, 6), slice(6, 10)):
            optimizer.zero_grad()
            terms = elbo_terms(bnn.model, bnn.guide, X[rows], Y[rows])
            ((terms.kl - terms.data) / 10).backward()
            optimizer.step()
    by_hand = trainable(bnn)
    found = fitted(SAME_ADAM[optim])
    assert_equal(found, by_hand, rtol=1e-5, atol=1e-7)
    assert all(not torch.equal(found[name], start[name]) for name in start)


def test_pyro_function_of_the_name_sets_rates():
    def rates(name):
        return {"lr": 0.0 if name.startswith("net.") else 0.1}

    start, end = trainable(make()), fitted(lambda bnn: pyro.optim.Adam(rates))
    for name in start:
        assert torch.equal(start[name], end[name]) == name.startswith("net."), name


def test_pyros_clipped_adam():
    optim = pyro.optim.ClippedAdam({"lr": 0.01, "clip_norm": 1.0, "lrd": 0.9})
    bnn = make()
    bnn.fit([(X, Y)], optim, 3)
    assert isinstance(bnn.optimizer, pyro.optim.clipped_adam.ClippedAdam)
    assert bnn.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**3)


def test_pyro_scheduler_is_stepped_by_the_caller():
    optim = pyro.optim.ExponentialLR(
        {"optimizer": torch.optim.SGD, "optim_args": {"lr": 0.1}, "gamma": 0.5}
    )
    bnn, rates = make(), []

    def callback(bnn, epoch, loss):
        rates.append(bnn.optimizer.param_groups[0]["lr"])
        optim.step()

    bnn.fit([(X, Y)], optim, 4, callback)
    assert rates == pytest.approx([0.1, 0.05, 0.025, 0.0125])


def test_torch_scheduler_over_an_instance():
    bnn, rates = make(), []
    optimizer = torch.optim.SGD(bnn.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)

    def callback(bnn, epoch, loss):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()

    bnn.fit([(X, Y)], optimizer, 3, callback)
    assert rates == pytest.approx([0.1, 0.01, 0.001])


def test_clip_norm_clips_all_parameters_together():
    bnn = make()
    start = trainable(bnn)
    bnn.fit([(X, Y)], functools.partial(torch.optim.SGD, lr=1.0), 1, clip_norm=1e-2)
    moved = torch.cat([(v - start[n]).flatten() for n, v in trainable(bnn).items()])
    assert moved.norm() == pytest.approx(1e-2, rel=1e-3)


def test_second_fit_with_a_pyro_optimiser_goes_on_with_its_state():
    optim, bnn = pyro.optim.Adam({"lr": 0.01}), make()
    loader = [(X, Y)]
    bnn.fit(loader, optim, 2)
    first = bnn.optimizer
    bnn.fit(loader, optim, 3)
    assert bnn.optimizer is first
    assert {state["step"].item() for state in first.state.values()} == {5}


def test_second_fit_with_a_class_starts_afresh():
    bnn = make()
    bnn.fit([(X, Y)], ADAM, 2)
    bnn.fit([(X, Y)], ADAM, 3)
    assert {state["step"].item() for state in bnn.optimizer.state.values()} == {3}


def test_one_pyro_optimiser_serves_two_bnns():
    optim, left, right = pyro.optim.Adam({"lr": 0.01}), make(), make()
    left.fit([(X, Y)], optim, 1)
    before = trainable(left)
    right.fit([(X, Y)], optim, 1)
    assert left.optimizer is not right.optimizer
    assert_equal(trainable(left), before)


# --------------------------------------------------------------------------- rates by kind


def rates_of(bnn):
    """The learning rate of each parameter by name."""
    rates = {id(p): group["lr"] for group in bnn.optimizer.param_groups for p in group["params"]}
    return {n: rates[id(p)] for n, p in bnn.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("guide", [AutoNormal, AutoDiagonalNormal])
@pytest.mark.parametrize(
    "optim",
    [
        functools.partial(torch.optim.SGD, lr=0.1),
        pyro.optim.SGD({"lr": 0.1}),
        pyro.optim.SGD(lambda name: {"lr": 0.1}),
    ],
)
def test_rates_by_kind(optim, guide):
    bnn = make(guide=guide)
    bnn.fit([(X, Y)], optim, 1, lr_multipliers={"loc": 0.5, "scale": 10, "deterministic": 2})
    rates = rates_of(bnn)
    kinds = {0.05: set(), 1.0: set(), 0.2: set()}
    for name, rate in rates.items():
        kinds[round(rate, 9)].add(name)
    assert kinds[0.2] == {"net.1.weight", "net.1.bias"}
    assert kinds[1.0] == {n for n in rates if "scale" in n}
    assert kinds[0.05] == {n for n in rates if "loc" in n}
    assert all(kinds.values())


def test_kinds_not_named_keep_their_rate():
    bnn = make()
    bnn.fit([(X, Y)], functools.partial(torch.optim.SGD, lr=0.1), 1, lr_multipliers={"scale": 10})
    for name, rate in rates_of(bnn).items():
        assert rate == pytest.approx(1.0 if "scale" in name else 0.1), name


def test_likelihoods_variables_have_kinds_too():
    likelihood = HomoskedasticGaussian(10, scale=dist.LogNormal(0.0, 1.0))
    bnn = tyxe.VariationalBNN(
        nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)), likelihood, AutoNormal, AutoNormal
    )
    optim = functools.partial(torch.optim.SGD, lr=0.01)
    bnn.fit([(X, X[:, :1])], optim, 1, lr_multipliers={"scale": 10})
    rates = rates_of(bnn)
    assert rates["likelihood_guide.locs.scale"] == pytest.approx(0.01)
    assert rates["likelihood_guide.unconstrained_scales.scale"] == pytest.approx(0.1)


# --------------------------------------------------------------------------- the objective


def step_gradient(**options):
    """The gradient that one step of SGD follows."""
    bnn = make()
    start = trainable(bnn)
    pyro.set_rng_seed(7)
    bnn.fit([(X, Y)], functools.partial(torch.optim.SGD, lr=1.0), 1, **options)
    return {n: start[n] - v for n, v in trainable(bnn).items()}


def gradient_by_hand(beta=1.0, closed_form_kl=True, particles=1):
    bnn = make()
    pyro.set_rng_seed(7)
    loss = 0.0
    for _ in range(particles):
        terms = elbo_terms(bnn.model, bnn.guide, X, Y, closed_form_kl=closed_form_kl)
        loss = loss + (beta * terms.kl - terms.data) / 10 / particles
    loss.backward()
    return {n: p.grad for n, p in bnn.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("clip", [{"clip_norm": 1e-2}, {"clip_value": 1e-3}])
def test_pyro_clip_args_clip_each_parameter(clip):
    bnn = make()
    start = trainable(bnn)
    pyro.set_rng_seed(7)
    bnn.fit([(X, Y)], pyro.optim.SGD({"lr": 1.0}, clip), 1)
    for name, gradient in gradient_by_hand().items():
        if "clip_norm" in clip:
            expected = gradient * min(1.0, 1e-2 / gradient.norm().item())
        else:
            expected = gradient.clamp(-1e-3, 1e-3)
        moved = start[name] - trainable(bnn)[name]
        # A difference of parameters of size 1 in float32.
        torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("options", "by_hand"),
    [
        ({}, {}),
        ({"beta": 0.25}, {"beta": 0.25}),
        ({"beta": 0}, {"beta": 0.0}),
        ({"beta": lambda epoch: 0.5 + epoch}, {"beta": 0.5}),
        ({"closed_form_kl": False}, {"closed_form_kl": False}),
        ({"num_particles": 5}, {"particles": 5}),
        (
            {"num_particles": 3, "closed_form_kl": False, "beta": 2.0},
            {"particles": 3, "closed_form_kl": False, "beta": 2.0},
        ),
    ],
)
def test_a_step_follows_the_gradient_per_point(options, by_hand):
    assert_equal(step_gradient(**options), gradient_by_hand(**by_hand), rtol=1e-4, atol=1e-5)


def test_schedule_of_beta_sees_epochs_and_history_the_unweighted_kl():
    bnn, seen = make(), []

    def schedule(epoch):
        seen.append(epoch)
        return epoch / 4

    history = bnn.fit([(X, Y)], functools.partial(torch.optim.SGD, lr=0.0), 4, beta=schedule)
    assert seen == [0, 1, 2, 3]
    assert len(set(history.kl)) == 1
    for epoch in range(4):
        loss = epoch / 4 * history.kl[epoch] - history.log_likelihood[epoch]
        assert history.loss[epoch] == pytest.approx(loss, rel=1e-9)


def test_history_of_particles_is_their_mean():
    bnn = make()
    pyro.set_rng_seed(7)
    frozen = functools.partial(torch.optim.SGD, lr=0.0)
    history = bnn.fit([(X, Y)], frozen, 1, num_particles=4, closed_form_kl=False)
    bnn = make()
    pyro.set_rng_seed(7)
    terms = [elbo_terms(bnn.model, bnn.guide, X, Y, closed_form_kl=False) for _ in range(4)]
    assert history.kl[0] == pytest.approx(sum(t.kl.item() for t in terms) / 4, rel=1e-5)
    assert history.log_likelihood[0] == pytest.approx(
        sum(t.data.item() for t in terms) / 4, rel=1e-5
    )


# --------------------------------------------------------------------------- callback and modes


@pytest.mark.parametrize(("answer", "epochs"), [(True, 2), (None, 5), (False, 5)])
def test_callback_stops_on_true(answer, epochs):
    bnn, seen = make(), []

    def callback(self, epoch, loss):
        assert self is bnn
        assert self.training
        seen.append((epoch, loss))
        return answer if epoch == 1 else None

    history = bnn.fit([(X, Y)], ADAM, 5, callback)
    assert [epoch for epoch, _ in seen] == list(range(epochs))
    assert [loss for _, loss in seen] == history.loss


class Boom(Exception):
    pass


ENDINGS = {"normal": None, "an error": Boom, "Ctrl-C": KeyboardInterrupt}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("modes", ["train", "eval", "mixed"])
def test_modes_come_back_whatever_the_end(modes, ending):
    bnn = make()
    bnn.train(modes != "eval")
    if modes == "mixed":
        bnn.net[1].eval()  # a BatchNorm with frozen statistics
    before = {name: module.training for name, module in bnn.named_modules()}
    seen = []

    def callback(bnn, epoch, loss):
        seen.append({name: module.training for name, module in bnn.named_modules()})
        if ENDINGS[ending] is not None:
            raise ENDINGS[ending]
        bnn.eval()  # a callback that evaluates

    if ENDINGS[ending] is None:
        bnn.fit([(X, Y)], ADAM, 1, callback)
    else:
        with pytest.raises(ENDINGS[ending]):
            bnn.fit([(X, Y)], ADAM, 3, callback)
    assert {name: module.training for name, module in bnn.named_modules()} == before
    if modes == "mixed":
        assert seen[0] == before
        assert bnn.net[1].running_mean.abs().sum() == 0
    else:
        assert all(seen[0].values())
        assert bnn.net[1].running_mean.abs().sum() > 0


def test_handlers_around_fit_are_left_as_they_were():
    depth = len(pyro.poutine.runtime._PYRO_STACK)
    bnn = make()

    def callback(*_):
        raise Boom

    with pytest.raises(Boom), tyxe.poutine.local_reparameterization():
        bnn.fit([(X, Y)], ADAM, 1, callback)
    assert len(pyro.poutine.runtime._PYRO_STACK) == depth
    assert all(isinstance(p, nn.Parameter) for p in bnn.net.parameters())


def test_validation_and_module_local_params_do_not_leak():
    settings = pyro.settings.get()
    with pyro.validation_enabled(False):
        inside = pyro.settings.get()
        make(guide=AutoDiagonalNormal).fit([(X, Y)], ADAM, 2)
        assert pyro.settings.get() == inside
    make(guide=AutoDiagonalNormal).fit([(X, Y)], ADAM, 2)
    assert pyro.settings.get() == settings
    assert len(pyro.get_param_store()) == 0


# --------------------------------------------------------------------------- progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("terminal", "progress", "shown"),
    [
        (False, None, False),
        (True, None, True),
        (True, False, False),
        (False, True, True),
    ],
)
def test_bar_is_for_terminals(monkeypatch, terminal, progress, shown):
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    bnn = make()
    bnn.fit([(X, Y)], ADAM, 2, progress=progress)
    assert ("fit" in stream.getvalue()) == shown
    if shown:
        assert "loss=" in stream.getvalue()


def test_nothing_is_printed(capfd):
    make().fit([(X, Y)], ADAM, 2)
    assert capfd.readouterr() == ("", "")


# --------------------------------------------------------------------------- data in any shape


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(1, 3), nn.Linear(1, 3)

    def forward(self, left, right):
        return self.left(left) - self.right(right)


STRUCTURES = {
    "tuple": lambda x: (x[:, :1], x[:, 1:]),
    "list": lambda x: [x[:, :1], x[:, 1:]],
    "mapping": lambda x: {"right": x[:, 1:], "left": x[:, :1]},
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_inputs_of_every_structure_mean_the_same(structure):
    def run(inputs):
        bnn = make(Two())
        pyro.set_rng_seed(7)
        bnn.fit([(inputs, Y)], ADAM, 2, device="cpu")
        pyro.set_rng_seed(8)
        return trainable(bnn), bnn.predict(inputs, num_predictions=2)

    reference, output = run(STRUCTURES["tuple"](X))
    found, same = run(STRUCTURES[structure](X))
    assert_equal(found, reference)
    assert torch.equal(output, same)


@pytest.mark.parametrize(
    "as_loader",
    [
        lambda: [(X, Y)],
        lambda: [[X, Y]],
        lambda: ((X, Y),),
        lambda: iter([(X, Y)]),
        lambda: (batch for batch in [(X, Y)]),
        lambda: DataLoader(TensorDataset(X, Y), batch_size=10),
    ],
)
def test_loaders_of_every_kind_mean_the_same(as_loader):
    bnn = make()
    loader = as_loader()
    generator = torch.Generator().manual_seed(0)
    if isinstance(loader, DataLoader):
        loader.generator = generator  # else it draws its seed from the global one
    pyro.set_rng_seed(7)
    bnn.fit(loader, ADAM, 1)
    reference = make()
    pyro.set_rng_seed(7)
    reference.fit([(X, Y)], ADAM, 1)
    assert_equal(trainable(bnn), trainable(reference))


def test_device_moves_batches():
    inputs, targets = next(iter(batches_of([((X, {"a": X}), Y)], "meta")))
    assert targets.is_meta
    assert inputs[0].is_meta
    assert inputs[1]["a"].is_meta


def test_zero_epochs_change_nothing():
    bnn = make()
    before = trainable(bnn)
    history = bnn.fit([(X, Y)], ADAM, 0)
    assert history.loss == []
    assert_equal(trainable(bnn), before)


def test_same_seed_same_run_and_another_another():
    def run(seed):
        bnn = make()
        pyro.set_rng_seed(seed)
        bnn.fit(DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True), ADAM, 2)
        return trainable(bnn)

    assert_equal(run(1), run(1))
    assert not torch.equal(run(1)["net_guide.locs.0.weight"], run(2)["net_guide.locs.0.weight"])


@pytest.mark.parametrize("train", [{"train_loc": False}, {"train_scale": False}])
def test_what_a_guide_does_not_train_stays(train):
    bnn = make(guide=functools.partial(AutoNormal, init_loc_fn=tyxe.guides.init_to_sample, **train))
    before = {n: p.detach().clone() for n, p in bnn.named_parameters()}
    bnn.fit([(X, Y)], ADAM, 2)
    stays = "net_guide.locs" if "train_loc" in train else "net_guide.unconstrained_scales"
    for name, value in bnn.named_parameters():
        site = name.removeprefix("net.") in bnn.net_prior.names()
        assert torch.equal(value, before[name]) == (name.startswith(stays) or site), name


def test_the_loss_goes_down():
    x = torch.linspace(-1, 1, 40)[:, None]
    y = torch.sin(3 * x)
    net = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))
    bnn = make(
        net,
        tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        likelihood=HomoskedasticGaussian(40, scale=0.1),
        guide=functools.partial(
            AutoNormal, init_loc_fn=tyxe.guides.init_to_normal_radford, init_scale=0.01
        ),
    )
    history = bnn.fit([(x, y)], functools.partial(torch.optim.Adam, lr=0.02), 300)
    assert history.loss[-1] < 0.2 * history.loss[0]
    error, _ = bnn.evaluate(x, y, num_predictions=8, reduction="mean")
    assert error < 0.05


class Rounded(nn.Sequential):
    """A net whose output is in another precision, as under autocast."""

    def __init__(self, dtype, then=None):
        super().__init__(nn.Linear(2, 3))
        self.dtype, self.then = dtype, then or dtype

    def forward(self, x):
        return super().forward(x).to(self.dtype).to(self.then)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("likelihood", [Categorical, HomoskedasticGaussian])
def test_data_term_of_half_predictions_is_summed_in_single_precision(likelihood, dtype):
    x, labels = torch.randn(128, 2), torch.randint(0, 3, (128,))
    if likelihood is Categorical:
        given, y = Categorical(60_000), labels
    else:
        given, y = HomoskedasticGaussian(60_000, scale=0.3), nn.functional.one_hot(labels).float()

    def history(module):
        bnn = make(module, PRIOR, likelihood=given)
        pyro.set_rng_seed(7)
        return bnn.fit([(x, y)], ADAM, 2)

    seed = torch.get_rng_state()
    found = history(Rounded(dtype))
    torch.set_rng_state(seed)
    assert found == history(Rounded(dtype, torch.float32))
    # More nats than a half can hold; a NaN or infinity would have stopped the fit.
    assert all(value < -50_000 for value in found.log_likelihood)


# --------------------------------------------------------------------------- parameters set free


@pytest.mark.parametrize(
    "optim",
    [
        lambda: pyro.optim.Adam({"lr": 0.01}),
        lambda: pyro.optim.Adam(lambda name: {"lr": 0.01}),
        lambda: pyro.optim.ExponentialLR(
            {"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.01}, "gamma": 0.9}
        ),
    ],
)
@pytest.mark.parametrize("layer", [0, 3])
def test_a_pyro_optimiser_trains_parameters_set_free_since(optim, layer):
    hide = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_modules=["0", "1"])
    bnn, optim = make(prior=hide), optim()
    held = bnn.net[0] if layer == 0 else bnn.net_guide.locs
    for parameter in held.parameters():
        parameter.requires_grad_(False)
    before = [parameter.detach().clone() for parameter in held.parameters()]
    bnn.fit([(X, Y)], optim, 1)
    assert all(map(torch.equal, held.parameters(), before))
    for parameter in held.parameters():
        parameter.requires_grad_(True)
    start = trainable(bnn)
    bnn.fit([(X, Y)], optim, 1)
    assert not any(torch.equal(value, start[name]) for name, value in trainable(bnn).items())


# --------------------------------------------------------------------------- modes of the net


class KeepsNorms(nn.Sequential):
    """The usual recipe for fine-tuning: statistics of the norms stay."""

    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self


@pytest.mark.parametrize("mode_before", ["train", "eval"])
def test_a_net_that_keeps_its_norms_in_eval_mode_keeps_them(mode_before):
    bnn = make(KeepsNorms(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3)))
    assert [part.training for part in bnn.net] == [True, False, True, True]
    getattr(bnn, mode_before)()
    bnn.fit([(X, Y)], ADAM, 2)
    assert bnn.net[1].num_batches_tracked == 0
    assert torch.equal(bnn.net[1].running_mean, torch.zeros(4))


@pytest.mark.parametrize("training", [True, False])
def test_frozen_parts_keep_their_modes(training):
    frozen = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout()).requires_grad_(False)
    net = nn.Sequential(frozen, nn.Dropout(), nn.Linear(4, 3)).eval()
    frozen.train(training)
    bnn = make(net, PRIOR)
    assert [part.training for part in bnn.net[0].modules()] == [training] * 4
    assert [part.training for part in (bnn.net, bnn.net[1], bnn.net[2])] == [True] * 3
    bnn.fit([(X, Y)], ADAM, 2)
    assert (bnn.net[0][1].num_batches_tracked == 0) == (not training)


def test_a_part_whose_parameters_are_sites_is_not_frozen():
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    bnn = make(net.requires_grad_(False), tyxe.priors.IIDPrior(dist.Normal(0, 1), expose=["*"]))
    assert all(part.training for part in bnn.modules())


def test_a_net_in_eval_mode_is_trained_in_train_mode_and_exported_in_eval_mode():
    bnn = make(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval())
    assert all(part.training for part in bnn.modules())
    bnn.fit([(X, Y)], ADAM, 2)
    assert bnn.net[1].num_batches_tracked == 2
    for sample in (False, True):
        assert not any(part.training for part in bnn.to_module(sample).modules())
    assert all(part.training for part in bnn.modules())


# --------------------------------------------------------------------------- named tuples


class OfPacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRU(2, 4), nn.Linear(4, 3)

    def forward(self, packed):
        assert isinstance(packed, nn.utils.rnn.PackedSequence)
        return self.head(self.cell(packed)[1][0])


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_a_packed_sequence_is_one_argument(enforce_sorted, device):
    lengths = [5, 3, 3, 1]
    packed = nn.utils.rnn.pack_padded_sequence(
        torch.randn(5, 4, 2), lengths, enforce_sorted=enforce_sorted
    )
    bnn = make(OfPacked(), PRIOR, likelihood=Categorical(4))
    bnn.fit([(packed, Y[:4])], ADAM, 1, device=device)
    assert bnn(packed).shape == (4, 3)
    assert bnn.predict(packed, num_predictions=2).shape == (4, 3)
    _, log_likelihood = bnn.evaluate(packed, Y[:4], num_predictions=2)
    assert log_likelihood.isfinite()
    pyro.set_rng_seed(1)
    alone = bnn.predict(packed, num_predictions=2)
    pyro.set_rng_seed(1)
    torch.testing.assert_close(bnn.predict([(packed, Y[:4])].__iter__(), num_predictions=2), alone)


class Points(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class OfPoints(Two):
    def forward(self, points):
        return super().forward(points.left, points.right)


def test_named_tuples_are_cut_and_joined_as_such():
    points = Points(X[:, :1], X[:, 1:])
    bnn = make(OfPoints(), PRIOR)
    bnn.fit([(points, Y)], ADAM, 1, device="cpu")

    def predict(**options):
        pyro.set_rng_seed(1)
        return bnn.predict(points, num_predictions=2, **options)

    torch.testing.assert_close(predict(batch_size=3), predict())
    halves = [(Points(X[r, :1], X[r, 1:]), Y[r]) for r in (slice(0, 4), slice(4, 10))]
    joined, labels = collect(halves)
    assert isinstance(joined, Points)
    assert torch.equal(joined.left, points.left)
    assert torch.equal(joined.right, points.right)
    assert torch.equal(labels, Y)


def test_rows_of_a_packed_sequence_are_not_cut():
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 2), [5, 3], enforce_sorted=False)
    bnn = make(OfPacked(), PRIOR, likelihood=Categorical(2))
    with pytest.raises(TypeError, match="batch_size cannot cut a PackedSequence; pass a loader"):
        bnn.predict(packed, batch_size=1)


def test_a_packed_sequence_moves_as_a_whole():
    # Its lengths stay on the CPU, whatever the device.
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 2), [5, 3])
    moved, _ = next(iter(batches_of([(packed, Y[:2])], "meta")))
    assert moved.data.is_meta
    assert moved.batch_sizes.device.type == "cpu"
