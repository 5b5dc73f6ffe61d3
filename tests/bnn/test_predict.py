"""`predict`: one set of draws however the rows are cut."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tyxe
from tests.oracles.predictions import N, S, inputs, make, net, seeded
from tyxe.bnn.passes import ReplayedDraws
from tyxe.likelihoods import Categorical, HomoskedasticGaussian


def test_draws_are_shared_by_rows_and_differ_among_predictions():
    bnn = make()
    x = inputs()[:1].expand(3, -1)
    outputs = bnn.predict(x, num_predictions=4, aggregate=False)
    torch.testing.assert_close(outputs[:, 0], outputs[:, 2], rtol=1e-12, atol=0)
    assert (outputs[0] - outputs[1]).abs().min() > 0


def test_outputs_are_the_net_at_the_guides_draws():
    bnn, x, plain = make(), inputs(), net()
    outputs = seeded(bnn.predict, x, num_predictions=S, aggregate=False)
    draws = seeded(lambda: [*ReplayedDraws().over(bnn._draws(S))])
    for output, values in zip(outputs, draws, strict=True):
        own = {name.removeprefix("net."): value for name, value in values.items()}
        by_hand = torch.func.functional_call(plain, own, (x,))
        torch.testing.assert_close(output, by_hand, rtol=1e-12, atol=1e-14)


def test_empty_loader():
    for call in (make().predict, make().evaluate):
        with pytest.raises(ValueError, match="loader is empty"):
            call(iter([]))


def test_handlers_are_active_in_predict():
    bnn, x = make(), inputs()[:1].expand(3, -1)
    with tyxe.poutine.report() as report, tyxe.poutine.local_reparameterization():
        outputs = bnn.predict(x, num_predictions=2, aggregate=False)
        means = bnn.predict(x, num_predictions=0, aggregate=False)
    assert {row.treatment for row in report} == {"moments", "drawn"}  # drawn: at the mean
    assert (outputs[:, 0] - outputs[:, 1]).abs().min() > 0  # noise of its own for each row
    torch.testing.assert_close(means[:, 0], means[:, 1])
    with (
        pytest.raises(ValueError, match="vectorize=True needs drawn weights"),
        tyxe.poutine.local_reparameterization(),
    ):
        bnn.predict(x, vectorize=True)


@pytest.mark.parametrize("modes", ["train", "eval", "mixed"])
def test_predict_is_in_eval_mode_and_gives_modes_back(modes):
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    bnn, x = make(net.double()), inputs()
    bnn.train(modes != "eval")
    if modes == "mixed":
        bnn.net[1].eval()
    before = {name: module.training for name, module in bnn.named_modules()}
    state = copy.deepcopy(bnn.state_dict())
    first, second = (seeded(bnn.predict, x, num_predictions=2) for _ in range(2))
    seeded(bnn.evaluate, x, torch.zeros(N).long())
    assert torch.equal(first, second)  # no dropout
    assert {name: module.training for name, module in bnn.named_modules()} == before
    for name, value in bnn.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, state[name]), name


class Jittered(Dataset):
    """Data whose transform draws from torch's global generator, and keeps what it gave."""

    def __init__(self):
        self.given = []

    def __len__(self):
        return 6

    def __getitem__(self, index):
        x = 1.0 + torch.rand(1).double()
        self.given.append(x)
        return x, 0.0


@pytest.mark.parametrize("vectorize", [True, False])
def test_a_loaders_randomness_goes_on_while_the_draws_are_the_same(vectorize):
    bnn = make(nn.Linear(1, 1, bias=False), HomoskedasticGaussian(6, scale=0.1))
    dataset = Jittered()
    outputs = bnn.predict(
        DataLoader(dataset, batch_size=2), num_predictions=3, aggregate=False, vectorize=vectorize
    )
    x = torch.stack(dataset.given)
    assert len(x.unique()) == len(x) == 6
    weights = outputs / x
    torch.testing.assert_close(weights, weights[:, :1].expand_as(weights))
    assert len(weights[:, 0].unique()) == 3


@pytest.mark.parametrize("handler", ["local_reparameterization", "flipout"])
def test_noise_of_a_handler_is_not_repeated_in_the_next_chunk(handler):
    bnn = make(nn.Linear(4, 1, bias=False), HomoskedasticGaussian(6, scale=0.1))
    x = torch.ones(6, 4).double()

    def noise(**options):
        with getattr(tyxe.poutine, handler)():
            return bnn.predict(x, num_predictions=3, aggregate=False, **options)

    for outputs in (noise(batch_size=2), noise(batch_size=1)):
        pieces = outputs.flatten(1).T  # equal rows, of three draws
        distances = torch.cdist(pieces, pieces)[~torch.eye(6, dtype=torch.bool)]
        assert bool((distances > 0).all())


class Signed(nn.Linear):
    """Takes a tensor, a number, a flag and maybe another tensor."""

    def forward(self, x, sign, flag, other=None):
        assert flag == "on"
        return sign * super().forward(x if other is None else x + other)


@pytest.mark.parametrize("batch_size", [1, 4, 2 * N])
def test_arguments_without_rows_go_into_every_piece(batch_size):
    bnn, x = make(Signed(2, 3).double()), inputs()
    for arguments in ((x, -1, "on"), (x, torch.tensor(-1.0).double(), "on", x), (x, 2, "on", None)):
        whole = seeded(bnn.predict, *arguments, num_predictions=S)
        found = seeded(bnn.predict, *arguments, num_predictions=S, batch_size=batch_size)
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-14)
    with pytest.raises(ValueError, match="the inputs have 10 and 11 rows; batch_size cuts"):
        bnn.predict(x, 1, "on", x[1:], batch_size=4)
    with pytest.raises(ValueError, match="the inputs have no rows"):
        bnn.predict(1, batch_size=4)


def test_samples_of_gaussian_outputs_are_others_for_other_batch_sizes():
    """As documented: each row has samples of its own, so they agree within their error."""
    bnn, x = make(likelihood=Categorical(N)), inputs()
    count = 4_000
    options = {"predictive": "glm", "num_predictions": count}
    whole = seeded(bnn.predict, x, **options).exp()
    pieces = seeded(bnn.predict, x, batch_size=4, **options).exp()
    outputs = bnn.predict(x, aggregate=False, **options)
    error = outputs.softmax(-1).std(0) * math.sqrt(2 / count)
    assert not torch.equal(whole, pieces)
    assert bool(((whole - pieces).abs() <= 6 * error).all())
    for link in ("probit", "bridge"):
        found = bnn.predict(x, predictive="glm", link=link, batch_size=4)
        torch.testing.assert_close(found, bnn.predict(x, predictive="glm", link=link))
