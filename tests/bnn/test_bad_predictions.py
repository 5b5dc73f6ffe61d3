"""Mistakes in `predict` and `evaluate`, and probabilities where logits belong."""

import functools

import pytest
from torch import nn
from torch.utils.data import DataLoader

import tyxe
from tests.oracles.bnns import NOTHING
from tests.oracles.nets import ReadLast
from tests.oracles.rejections import ADAM, LABELS, PRIOR, N, X, Y, make, net, rejects
from tyxe.guides import AutoNormal
from tyxe.likelihoods import Bernoulli, Categorical

EVALUATIONS = [
    ((X,), {}, r"expected targets, once: evaluate\(inputs, y\), or evaluate\(loader\)"),
    ((DataLoader(X, batch_size=4), Y), {}, "expected targets, once"),
    ((DataLoader(X, batch_size=4),), {}, r"yields no targets; evaluate needs \(inputs, y\)"),
    ((X[:0], Y[:0]), {"reduction": "mean"}, "there are no points, and so"),
]


@pytest.mark.parametrize(("arguments", "options", "message"), EVALUATIONS)
def test_evaluate_rejects(arguments, options, message):
    bnn = make()
    # A DataLoader draws a seed when it is iterated over.
    error = rejects(
        bnn, ValueError, message, lambda: bnn.evaluate(*arguments, **options), draws=True
    )
    assert error.__cause__ is error.__context__ is None


def logits_or_probabilities(likelihood, outputs, softmax):
    module = nn.Sequential(nn.Linear(2, outputs), *softmax)
    nn.init.normal_(module[0].weight, std=3.0)
    centre = tyxe.guides.PretrainedInitializer.from_net(module)
    guide = functools.partial(AutoNormal, init_loc_fn=centre)
    return make(module, likelihood=likelihood, guide=guide)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets"),
    [(Categorical, 3, LABELS), (Bernoulli, 1, (LABELS > 0).float()[:, None])],
)
def test_logits_for_probabilities_are_refused(likelihood, outputs, targets):
    bnn = logits_or_probabilities(likelihood(N, logit_predictions=False), outputs, [])
    message = "it looks like logits: use logit_predictions=True"
    rejects(bnn, ValueError, message, lambda: bnn.fit([(X, targets)], ADAM, 1))


def test_probabilities_for_logits_are_warned_of():
    bnn = logits_or_probabilities(Categorical(N), 3, [nn.Softmax(-1)])
    with pytest.warns(tyxe.TyxeWarning, match="drop the net's softmax, or use logit_pr") as caught:
        bnn.fit([(X, LABELS)], ADAM, 2)
    assert [w.filename for w in caught] == [__file__]


@pytest.mark.filterwarnings("error")
def test_each_kind_of_prediction_where_it_belongs_is_silent():
    probabilities = Categorical(N, logit_predictions=False)
    for likelihood, last in ((probabilities, [nn.Softmax(-1)]), (Categorical(N), [])):
        history = logits_or_probabilities(likelihood, 3, last).fit([(X, LABELS)], ADAM, 1)
        assert len(history.loss) == 1


def of_numpy(tensor):
    return pytest.importorskip("numpy").asarray(tensor)


def pytorch():
    return tyxe.PytorchBNN(net(), PRIOR, AutoNormal)


NAMES = "options go by name, such as num_predictions=32, and targets to evaluate"
INPUTS = "inputs are a ndarray; pass a tensor"
TARGETS = r"targets is a ndarray; expected a tensor: torch.as_tensor\(targets\)"
POSTERIOR = "no Gaussian posterior to linearise about: predict with predictive='bnn'"
CALLS = [
    (lambda bnn: bnn.predict(X, 32), NAMES),
    (lambda bnn: bnn.predict(X, Y), NAMES),
    (lambda bnn: bnn.interval(X, 0.9), NAMES),
    (lambda bnn: bnn.sample_predictive(X, 100), NAMES),
    (lambda bnn: bnn.predict(of_numpy(X)), INPUTS),
    (lambda bnn: bnn.evaluate(of_numpy(X), Y), INPUTS),
    (lambda bnn: bnn.sample_predictive(of_numpy(X)), INPUTS),
    (lambda bnn: pytorch().predict(of_numpy(X)), INPUTS),
    (lambda bnn: bnn.evaluate(X, of_numpy(Y)), TARGETS),
    (lambda bnn: bnn.evaluate(X, of_numpy(Y), batch_size=3), TARGETS),
    (lambda bnn: bnn.evaluate([(X, of_numpy(Y))]), TARGETS),
    (lambda bnn: make(prior=NOTHING, guide=None).predict(X, predictive="glm"), POSTERIOR),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_arguments_of_another_kind_are_told_what_they_have_to_be(call, message):
    bnn = make()
    rejects(bnn, TypeError, message, lambda: call(bnn), draws=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"link": "logit"}, ValueError, "link is 'logit'; expected one of"),
        ({"num_predictions": 1.5}, TypeError, "num_predictions is 1.5; expected an integer"),
        ({"batch_size": 0}, ValueError, "batch_size is 0; expected 1 or more"),
        ({"aggregate": X}, TypeError, "aggregate is a Tensor; expected True or False"),
        ({"predictive": []}, ValueError, "predictive is a list; expected one of 'bnn'"),
        ({"predictive": 3}, ValueError, "is 3; expected one of 'bnn', 'glm', or a function"),
    ],
)
def test_predict_rejects(options, error, message):
    bnn = make()
    rejects(bnn, error, message, lambda: bnn.predict(X, **options))
    rejects(bnn, error, message, lambda: bnn.evaluate(X, Y, **options))


def test_a_net_that_does_not_run_under_vmap():
    message = "vectorize=True needs a net that runs under torch.vmap, .*; leave vectorize out"
    with pytest.raises(ValueError, match=message):
        make(ReadLast(nn.LSTM, 1, 1, 1)).predict(X, vectorize=True)


def test_an_error_of_the_net_itself_is_the_nets_under_vmap_too():
    bnn = make()
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        bnn.predict(X[:, :1], num_predictions=2, vectorize=True)
