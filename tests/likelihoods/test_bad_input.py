"""What likelihoods refuse, with the remedy where there is one."""

import math

import pytest
import torch

from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    Censored,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Joint,
    Ordinal,
    Poisson,
    StudentT,
)

VALUE, TYPE = ValueError, TypeError
POINT, COLUMN, PAIR = torch.zeros(()), torch.zeros(3, 1), torch.zeros(3, 2)
LOGITS, PAIRS = torch.tensor([[2.0, -1.0], [0.0, 1.0]]), torch.tensor([[[1.0, 2.0]]] * 3)
KINDS, COUNTS, UNIT = Categorical(6), Poisson(3), HomoskedasticGaussian(3, scale=1.0)
SPREAD = HeteroskedasticGaussian(3)
SIGNED = torch.tensor([1.0, -1.0])

CONSTRUCTED = (
    (lambda: HomoskedasticGaussian(9), VALUE, "exactly one of them"),
    (lambda: HomoskedasticGaussian(9, 1.0, 1.0), VALUE, "exactly one of them"),
    (lambda: HomoskedasticGaussian(9, 0.0), VALUE, "scale is 0; expected"),
    (lambda: HomoskedasticGaussian(9, precision=-1.0), VALUE, "precision is -1"),
    (lambda: HomoskedasticGaussian(9, math.nan), VALUE, "scale is nan; expected"),
    (lambda: HomoskedasticGaussian(9, SIGNED), VALUE, "expected positive numbers"),
    (lambda: StudentT(4, df=2.0), VALUE, r"df is 2\.0; expected a number above 2"),
    (lambda: Bernoulli(8, pos_weight=-1.0), VALUE, "pos_weight is -1; expected"),
    (lambda: Categorical(8, class_weights=SIGNED), VALUE, "class_weights ranges from -1 to 1; exp"),
    (lambda: Categorical(8, class_weights=torch.zeros(2)), VALUE, "the sum of class_weights is 0"),
    (lambda: Ordinal(3, 1), VALUE, "num_classes is 1; expected 2 or more"),
    (lambda: Ordinal(3, 4, cut_points=torch.zeros(2)), VALUE, r"expected \(3,\)"),
    (lambda: Ordinal(3, 3, cut_points=torch.zeros(2)), VALUE, "numbers that grow"),
    (lambda: Censored(3), TYPE, "base is 3; expected"),
    (lambda: Censored(KINDS), TYPE, "Categorical; expected a likelihood of numbers"),
    (lambda: Censored(Joint(a=COUNTS)), TYPE, "Joint; expected a likelihood"),
    (lambda: Censored(Censored(UNIT)), TYPE, "Censored; expected a likelihood"),
    (Joint, VALUE, "needs parts by name"),
    (lambda: Joint(joint=COUNTS), VALUE, "none of them"),
    (lambda: Joint(kind=3), TYPE, "kind is 3; expected a likelihood"),
    (lambda: Joint(kind=KINDS, count=COUNTS), VALUE, r"different dataset_size.*6.*3"),
    (lambda: Joint(a=KINDS, weights={"b": 2.0}), VALUE, "part of weights is 'b'"),
    (lambda: Joint(a=KINDS, weights={"a": -1}), VALUE, "weight of a is -1; expected"),
    (lambda: Joint(a=KINDS, weights={"a": 0.0}), VALUE, "the sum of weights is 0"),
    (lambda: Joint(a=KINDS, weights=KINDS), TYPE, "weights is a Categorical"),
)

PREDICTED = (
    *(
        (lambda kind=kind: kind(POINT), VALUE, "no dimension counts data points")
        for kind in (Bernoulli(9), UNIT, COUNTS)
    ),
    *(
        (lambda call=call: call(PAIR, torch.zeros(3)), TYPE, r"pass targets.long\(")
        for call in (KINDS.log_likelihood, KINDS.error, KINDS)
    ),
    *(
        (lambda f=f: SPREAD(f), VALUE, "a mean and a scale for each")
        for f in (torch.zeros(4), torch.zeros(4, 3))
    ),
    *(
        (lambda kind=kind: kind(2, False).check_predictions(LOGITS), VALUE, "logit_predictions=T")
        for kind in (Bernoulli, Categorical)
    ),
    (lambda: KINDS.check_predictions(POINT), VALUE, "average over the batch"),
    (lambda: Ordinal(3, 3).log_likelihood(PAIR, POINT), VALUE, "one number for each target"),
    (lambda: Censored(UNIT).check_targets(COLUMN, PAIRS.flip(-1)), VALUE, r"expected pairs \(low"),
    (lambda: scored(UNIT, COLUMN), VALUE, r"\(3, 1, 2\).*; make them by censored_targets"),
    (lambda: scored(COUNTS, PAIRS), TYPE, "discrete"),
    (lambda: scored(StudentT(3), PAIRS), TYPE, r"\bStudentT has no cdf.*log_tails\.register"),
    (lambda: Censored(SPREAD).hessian_counts(PAIRS, PAIR), TYPE, "each; curvature='empirical'"),
    *(
        (lambda bad=bad: Ordinal(3, 3).check_targets(COLUMN, torch.tensor(bad)), VALUE, "outside")
        for bad in ([0, 1, 3], [0.0, 1.5, 2.0])
    ),
)


def scored(base, targets):
    return Censored(base).log_likelihood(COLUMN, targets)


@pytest.mark.parametrize(("call", "error", "match"), [*CONSTRUCTED, *PREDICTED])
def test_what_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()
