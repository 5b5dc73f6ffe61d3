"""Options of fits by tyxe's samplers: what they are checked for, and what becomes of them."""

import copy
import functools
import itertools
import os
import pickle
import shutil
import signal
import warnings

import pyro.distributions as dist
import pyro.infer.mcmc
import pytest
import torch
from torch import nn

import tyxe
import tyxe.bnn.chains
import tyxe.samplers.run
from tests.oracles.bnns import mean_field, mlp
from tests.oracles.chains import NOISE, PRIOR, N, data, posterior
from tests.oracles.nets import NetOf
from tyxe.likelihoods import HomoskedasticGaussian, Poisson
from tyxe.samplers import HMC, MCLMC, NUTS, warm_start

# Short runs get advice.
pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
KERNEL = HMC(step_size=0.15, num_steps=3, adapt_step_size=False, adapt_mass_matrix=False)
FREE = MCLMC(step_size=0.1, momentum_length=3.0)
PAIR = tuple(part.float() for part in data())


def make(kernel=KERNEL, net=None, likelihood=None, prior=PRIOR):
    likelihood = likelihood or HomoskedasticGaussian(N, scale=NOISE)
    return tyxe.MCMC_BNN(net or nn.Linear(1, 1), prior, likelihood, kernel)


@pytest.mark.parametrize("kept", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("net", [torch.float32, torch.float64])
def test_samples_of_any_dtype_predict(net, kept):
    bnn = make(net=nn.Linear(1, 1).to(net))
    x, y = (part.to(net) for part in PAIR)
    bnn.fit([(x, y)], 20, dtype=kept)
    assert bnn.samples["net.weight"].dtype == kept
    outputs = bnn.predict(x, num_predictions=80, aggregate=False)
    assert outputs.dtype == net
    samples = {name: value.to(net) for name, value in bnn.get_samples().items()}
    expected = x * samples["net.weight"] + samples["net.bias"][:, None]
    torch.testing.assert_close(outputs, expected)
    at_mean = bnn.predict(x, num_predictions=0, aggregate=False)
    torch.testing.assert_close(at_mean[0], expected.mean(0), rtol=2e-3, atol=2e-3)
    assert bnn.to_ensemble(5)(x)[0].isfinite().all()


def of_layer(function):
    return NetOf(function, layer=nn.Linear(1, 1))


BAD = {
    "whole numbers": (KERNEL, {"dtype": torch.int32}, ValueError, r"dtype is torch\.int32"),
    "a name": (KERNEL, {"dtype": "float16"}, ValueError, "dtype is 'float16'; expected"),
    "yes": (KERNEL, {"compile": "yes"}, ValueError, "compile is 'yes'; expected one of None"),
    "no thinning": (KERNEL, {"thinning": 0}, ValueError, "thinning is 0"),
    "no chains": (KERNEL, {"num_chains": 0}, ValueError, "num_chains is 0"),
    "thin": (KERNEL, {"thin": 2}, TypeError, r"no option thin for kernels of tyxe\.samplers"),
    "nothing to resume": (KERNEL, {"resume": True}, RuntimeError, "no run to resume"),
    "ours for Pyro's": (pyro.infer.mcmc.HMC, {"thinning": 2}, TypeError, "kernels of Pyro; expec"),
    "misspelt": (
        functools.partial(NUTS, stepsize=0.1),
        {},
        TypeError,
        "unexpected keyword argument 'stepsize'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_options_are_checked_before_the_run(case):
    kernel, options, error, message = BAD[case]
    with pytest.raises(error, match=message):
        make(kernel).fit([PAIR], 3, **options)


@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_what_is_there_is_not_written_to(is_link, late, tmp_path, monkeypatch):
    """Nor what comes there after the options were checked."""
    path, bnn, disk_usage = tmp_path / "samples", make(), shutil.disk_usage

    def comes(folder):
        path.symlink_to(path.with_name("other")) if is_link else path.touch()
        return disk_usage(folder)

    if late:
        monkeypatch.setattr(shutil, "disk_usage", comes)
    else:
        comes(tmp_path)
    with pytest.raises(FileExistsError, match=r"samples'?( is there, .* or delete it)?$"):
        bnn.fit([PAIR], 5, file=path)
    assert [one.name for one in tmp_path.iterdir()] == ["samples"]
    assert is_link or not path.stat().st_size
    assert not len(bnn.samples)


READS = {
    "predict": lambda bnn: bnn.predict(PAIR[0]),
    "forward": lambda bnn: bnn(PAIR[0]),
    "get_samples": lambda bnn: bnn.get_samples(),
    "state_dict": lambda bnn: bnn.state_dict(),
    "save": lambda bnn: bnn.save("saved"),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "to": lambda bnn: bnn.double(),
    "to_module": lambda bnn: bnn.to_module(),
    "the run": lambda bnn: bnn._chains.get_samples(),
}
CUT = "samples was cut to 10 of [0-9,]+ bytes.* load a saved state into a new BNN"


@pytest.mark.parametrize("read", READS)
def test_samples_in_a_file_that_was_cut_are_an_error(read, tmp_path):
    """The process would end by a signal."""
    path, bnn = tmp_path / "samples", make(net=nn.Linear(1, 3000))
    bnn.fit([(PAIR[0], PAIR[1].expand(-1, 3000))], 5, file=path)
    copied = copy.deepcopy(bnn)
    os.truncate(path, 10)
    with pytest.raises(RuntimeError, match=CUT):
        READS[read](bnn)
    assert copied.predict(PAIR[0])[0].isfinite().all()
    path.unlink()


def in_file(path):
    """Return a BNN whose samples are in a file, and its prediction."""
    bnn = make()
    bnn.fit([PAIR], 5, file=path)
    return bnn, bnn.predict(PAIR[0])[0]


def test_a_file_that_was_deleted_is_read_on(tmp_path):
    path = tmp_path / "samples"
    bnn, expected = in_file(path)
    path.unlink()
    path.write_text("")
    assert torch.equal(bnn.predict(PAIR[0])[0], expected)


def test_samples_that_were_moved_into_memory_need_no_file(tmp_path):
    bnn, expected = in_file(tmp_path / "samples")
    bnn.double()
    os.truncate(tmp_path / "samples", 0)
    torch.testing.assert_close(bnn.predict(PAIR[0].double())[0].float(), expected)


def test_a_file_is_found_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bnn, _ = in_file("samples")
    monkeypatch.chdir("/")
    os.truncate(tmp_path / "samples", 10)
    with pytest.raises(RuntimeError, match=CUT):
        bnn.predict(PAIR[0])


@pytest.mark.parametrize("resumed", [False, True])
def test_a_file_that_is_cut_during_a_run_is_an_error(resumed, tmp_path):
    path, calls = tmp_path / "samples", itertools.count(1)

    def cuts(self, x):
        if next(calls) == 40:
            signal.raise_signal(signal.SIGINT) if resumed else os.truncate(path, 10)
        return self.layer(x)

    bnn, options = make(net=of_layer(cuts)), {"warmup_steps": 1, "file": path}
    if resumed:
        with pytest.raises(KeyboardInterrupt):
            bnn.fit([PAIR], 50, **options)
        os.truncate(path, 10)
        options = {"warmup_steps": 1, "resume": True}
    with pytest.raises(RuntimeError, match=CUT):
        bnn.fit([PAIR], 50, **options)


OTHERS = {
    "more samples": ([PAIR], 9, {}, "num_samples=9 in place of 6"),
    "other chains": ([PAIR], 6, {"num_chains": 9}, "num_chains=9 in place of 4"),
    "another warm-up": ([PAIR], 6, {"warmup_steps": 5}, "num_warmup=5 in place of 6"),
    "another thinning": ([PAIR], 6, {"thinning": 7}, "thinning=7 in place of 1"),
    "other data": ([(PAIR[0], PAIR[1] + 100)], 6, {}, "takes no other data"),
    "other starts": ([PAIR], 6, {"init": "net"}, "takes no init"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_run_is_not_gone_on_with(case):
    loader, count, options, message = OTHERS[case]
    bnn = make()
    bnn.fit([PAIR], 6)
    with pytest.raises(ValueError, match=message):
        bnn.fit(loader, count, resume=True, **options)
    bnn.fit([PAIR], 6, warmup_steps=6, thinning=1, num_chains=4, resume=True)


def test_members_in_training_let_interrupts_in():
    steps = []

    class Interrupted(torch.optim.SGD):
        def step(self, closure=None):
            steps.append(1)
            if len(steps) == 3:
                signal.raise_signal(signal.SIGINT)
            return super().step(closure)

    with pytest.raises(KeyboardInterrupt):
        make(FREE).starts([PAIR], warm_start(Interrupted, 50, batch_size=N))
    assert len(steps) == 3


def test_starts_are_members_that_fits_take():
    bnn = make(FREE, net=mlp(1, 8, 1))
    before = {name: value.clone() for name, value in bnn.net.named_parameters()}
    adam = functools.partial(torch.optim.AdamW, lr=0.03)
    starts = bnn.starts([PAIR], warm_start(adam, 200, batch_size=4, validation=0), 3)
    assert starts["net.0.weight"].shape == (3, 8, 1)
    assert len(starts["net.0.weight"].flatten().unique()) == 24
    x, y = PAIR
    design = torch.cat([x, torch.ones_like(x)], 1)
    line = (design @ torch.linalg.lstsq(design, y).solution - y).square().mean()
    for index in range(3):
        fitted = bnn._run_net({name: value[index] for name, value in starts.items()}, x)
        assert float((fitted - y).square().mean()) < line
    run = bnn.fit([PAIR], 2, warmup_steps=0, init=starts)
    torch.testing.assert_close(run.potential.unflatten(run.run.starts), starts)
    assert all(torch.equal(before[name], value) for name, value in bnn.net.named_parameters())


STEEP = functools.partial(torch.optim.SGD, lr=1e30)
NO_MEMBERS = {
    "nothing": (N, lambda _: None, TypeError, r"optim makes is None; expected one of torch\.optim"),
    "steep": (N, STEEP, ValueError, r"loss of members \[0, 1\] was never finite"),
    "one point": (1, torch.optim.SGD, ValueError, "pass validation=0"),
}


@pytest.mark.parametrize("case", NO_MEMBERS)
def test_members_that_cannot_be_trained(case):
    count, optim, error, message = NO_MEMBERS[case]
    bnn = make(FREE, likelihood=HomoskedasticGaussian(count, scale=1.0))
    with pytest.raises(error, match=message):
        bnn.starts([tuple(part[:count] for part in PAIR)], warm_start(optim, 3), 2)


def test_starts_of_numpy_and_of_another_net():
    bnn = make(net=nn.Linear(1, 2))
    pair = PAIR[0], PAIR[1].expand(-1, 2)
    values = {"net.weight": torch.randn(3, 2, 1).numpy(), "net.bias": torch.randn(3, 2).numpy()}
    starts = bnn.starts([pair], values)
    assert torch.equal(starts["net.bias"], torch.from_numpy(values["net.bias"]))
    other = mean_field(nn.Linear(1, 1), HomoskedasticGaussian(N, scale=1.0), PRIOR)
    with pytest.raises(ValueError, match=r"'net\.\w+' has shape \(1,.*expected \(2,"):
        bnn.starts([pair], other)


def test_thousands_of_chains_are_one_argument():
    bnn, count = make(net=nn.Linear(1, 1).double()), 2_000
    bnn.fit([data()], 1, warmup_steps=200, num_chains=count)
    drawn = bnn.get_samples()
    both = torch.cat([drawn["net.weight"].flatten(1), drawn["net.bias"]], 1)
    assert both.shape == (count, 2)
    mean, covariance = posterior()
    variance = covariance.diag()
    # Within four standard errors of independent draws: each chain has one.
    assert ((both.mean(0) - mean).abs() < 4 * (variance / count).sqrt()).all()
    assert ((both.var(0) - variance).abs() < 4 * variance * (2 / count) ** 0.5).all()


def test_a_run_prints_in_a_line():
    run = make().fit([PAIR], 5)
    assert repr(run).startswith("MCMCRun(Run(HMC(")
    assert repr(run).endswith("4 chains in 2 dimensions, 5 samples))")


def test_starts_of_noise_whose_prior_has_no_mean():
    bnn = make(likelihood=HomoskedasticGaussian(N, scale=dist.HalfCauchy(1.0)))
    assert bnn.starts([PAIR], "net")["likelihood.scale"].isfinite().all()


def test_starts_from_where_chains_cannot_move_are_refused():
    bnn = make(likelihood=Poisson(N))
    starts = {"net.weight": torch.zeros(2, 1, 1), "net.bias": torch.tensor([[0.0], [500.0]])}
    with pytest.raises(ValueError, match=r'not .* of chains \[1\].* init="prior", "net"'):
        bnn.fit([(PAIR[0], torch.ones(N, 1))], 3, init=starts)
    assert not len(bnn.samples)


def test_draws_from_the_prior_are_those_that_can_move():
    """A Poisson rate of `exp(w x + b)` overflows for every third draw of these."""
    prior = tyxe.priors.IIDPrior(dist.Normal(0.0, 100.0))
    bnn = make(likelihood=Poisson(N), prior=prior)
    pair = torch.ones(N, 1), torch.ones(N, 1)
    starts = bnn.starts([pair], "prior", 20)
    assert bool(((starts["net.weight"][..., 0] + starts["net.bias"]) < 89).all())
    assert float(starts["net.bias"].std()) > 50
    bnn.fit([pair], 3, num_chains=20)


def counts(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    return self.layer(x) + self.calls


def draws_noise(self, x):
    return self.layer(x) + torch.randn(x.shape, dtype=x.dtype)


def branches(self, x):
    out = self.layer(x)
    return out if out.sum() > 0 else 2 * out


@pytest.mark.parametrize("function", [counts, draws_noise])
def test_nets_that_are_no_functions_are_refused(function):
    with pytest.raises(ValueError, match="other outputs for the same weights and inputs"):
        make(net=of_layer(function)).fit([PAIR], 2)


def test_nets_that_branch_are_sampled_and_not_compiled():
    with pytest.raises(RuntimeError, match=r"control flow depends on numbers; pass compile"):
        make(net=of_layer(branches)).fit([PAIR], 2, compile=True)
    bnn = make(FREE, net=of_layer(branches))
    with pytest.warns(tyxe.TyxeWarning, match=r"in a loop.*torch\.vmap does not take this net"):
        bnn.fit([PAIR], 2, warmup_steps=0, init=warm_start(torch.optim.SGD, 3), num_chains=2)
    assert bnn.samples["net.layer.weight"].shape == (2, 2, 1, 1)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (HMC(step_size=0.1, num_steps=3), ["acceptance=", "leapfrogs=", "diverged="]),
        (NUTS(step_size=0.1), ["acceptance=", "depth=", "diverged="]),
        (MCLMC(step_size=0.1), ["energy variance=", "undone="]),
    ],
)
def test_the_bar_tells_of_the_latest_transitions(kernel, words, capsys, monkeypatch):
    # As if every step took a second.
    monkeypatch.setattr(tyxe.bnn.chains.time, "monotonic", itertools.count().__next__)
    make(kernel).fit([PAIR], 2, warmup_steps=3, num_chains=2, progress=True)
    shown = capsys.readouterr().err
    assert [word for word in ("warm up", "step size=", *words) if word not in shown] == []
    make(kernel).fit([PAIR], 2, warmup_steps=1, num_chains=2)
    assert capsys.readouterr().err == ""


def test_a_long_run_is_compiled_on_the_way(monkeypatch):
    monkeypatch.setattr(tyxe.samplers.run, "_WORTH_COMPILING", 20)
    found = []
    for compile in (None, False):
        torch.manual_seed(3)
        bnn = make(net=nn.Linear(1, 1).double())
        run = bnn.fit([data()], 30, warmup_steps=10, num_chains=2, compile=compile)
        assert run.run.is_compiled is (compile is None)
        found.append(bnn.samples["net.weight"])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_samples_are_kept_where_warnings_are_errors():
    bnn = make(HMC(step_size=50.0, adapt_step_size=False, adapt_mass_matrix=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(tyxe.TyxeWarning, match="diverged"):
            bnn.fit([PAIR], 3, warmup_steps=0)
    assert bnn.samples["net.weight"].shape == (4, 3, 1, 1)
