"""Online Laplace against batch posteriors of linear streams, and penalties written out."""

import pytest
import torch
import torch.distributions as td

from tests.oracles import streams
from tests.oracles.streams import EXACT, NOISE, NORMAL
from tyxe.linalg import Kronecker, Sum

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("sizes", [[12], [5, 7], [2, 9, 1], [1] * 6])
@pytest.mark.parametrize("order", [1, -1])
def test_a_linear_stream_ends_in_the_batch_posterior(sizes, order):
    tasks, bnn = streams.stream(sizes)[::order], streams.linear_bnn()
    for x, y in tasks:
        streams.maximize(bnn, x, y)
        streams.four_lines(bnn)
    mean, precision = streams.batch_posterior(tasks)
    torch.testing.assert_close(streams.mode(bnn), mean, **EXACT)
    torch.testing.assert_close(bnn.net_guide.precision.to_dense(), precision, **EXACT)
    (joint,) = bnn.net_prior.joints()
    torch.testing.assert_close(joint.precision.to_dense(), precision, **EXACT)


@pytest.mark.parametrize("structure", ["full", "kron", "lowrank"])
def test_the_evidences_of_a_linear_stream_add_up(structure):
    # log p(y_1) + log p(y_2 | y_1) + ... = log p(y). One output: kron is exact for each task.
    tasks, bnn, total = streams.stream([5, 3, 4]), streams.linear_bnn(structure), 0.0
    for x, y in tasks:
        streams.maximize(bnn, x, y)
        total = total + bnn.log_marginal_likelihood()
        streams.four_lines(bnn)
        assert abs(float(bnn.log_marginal_likelihood())) < 1e-9  # no data since
    x, y = (torch.cat(parts) for parts in zip(*tasks, strict=True))
    design = torch.cat([x, torch.ones(len(x), 1)], 1)
    covariance = NOISE**2 * torch.eye(len(x)) + NORMAL.scale**2 * design @ design.mT
    exact = td.MultivariateNormal(torch.zeros(len(x)), covariance).log_prob(y[:, 0])
    torch.testing.assert_close(total, exact, **EXACT)


def dense_blocks(operator):
    """What a Kronecker posterior is by `torch.kron`, written out."""
    blocks = []
    for block in operator.blocks.values():
        terms = block.terms.values() if isinstance(block, Sum) else [block]
        total = 0.0
        for term in terms:
            assert isinstance(term, Kronecker)
            g = term.out_basis @ term.out_eigenvalues.diag() @ term.out_basis.mT
            a = term.in_basis @ term.in_eigenvalues.diag() @ term.in_basis.mT
            total = total + term.scale * torch.kron(g, a) + term.shift * torch.eye(term.size)
        blocks.append(total)
    return torch.block_diag(*blocks)


@pytest.mark.parametrize("accumulate", ["sum", "average"])
def test_the_kronecker_penalty_is_the_dense_quadratic_form(accumulate):
    # [T 3.62-3.70]: tr(D^T Hb D Qb) summed over layers and tasks, and the prior's term.
    bnn = streams.classifier(accumulate=accumulate, curvature_weight=3.0)
    for task in range(3):
        bnn.fit_curvature([streams.labels(seed=task)])
        streams.four_lines(bnn)
    dense = dense_blocks(bnn.net_guide.precision)
    for seed in range(3):
        torch.manual_seed(seed)
        step = torch.randn(len(dense))
        torch.testing.assert_close(streams.penalty_of(bnn, step), step @ dense @ step / 2, **EXACT)


def test_the_sum_is_that_of_the_tasks_curvatures():
    bnn, total = streams.classifier(curvature_weight=2.5, temperature=0.5), 0.0
    for task in range(3):
        bnn.fit_curvature([streams.labels(seed=task)])
        total = total + 2.5 / 0.5 * bnn.state.curvature.operator.to_dense()
        streams.four_lines(bnn)
    expected = total + torch.eye(len(total)) / NORMAL.scale**2
    torch.testing.assert_close(bnn.net_guide.precision.to_dense(), expected, **EXACT)


def test_the_average_weighs_tasks_by_their_points():
    # [T 3.60] as it has to be: factors averaged over all points of both tasks.
    bnn = streams.classifier(accumulate="average", curvature_weight=2.0)
    tasks = [streams.labels(10, seed=0), streams.labels(40, seed=1)]
    for x, y in tasks:
        bnn.likelihood.dataset_size = len(x)
        bnn.fit_curvature([(x, y)])
        streams.four_lines(bnn)
    together = streams.classifier(curvature_weight=2.0)
    together.likelihood.dataset_size = 50
    together.fit_curvature(tasks)
    found, expected = (one.net_guide.precision for one in (bnn, together))
    torch.testing.assert_close(found.to_dense(), expected.to_dense(), **EXACT)
    assert all(isinstance(block, Kronecker) for block in found.blocks.values())


def test_a_diagonal_penalty_per_task_is_elastic_weight_consolidation():
    # sum_t lambda / 2 F_t (w - w_t)^2, and the prior's own term [T 3.71, Kirkpatrick 2017].
    bnn = streams.classifier("diag", accumulate="per_task", curvature_weight=4.0)
    known = []
    for task in range(3):
        bnn.fit([streams.labels(seed=task)], streams.ADAM, 5, progress=False)
        curvature = bnn.state.curvature
        known.append((streams.mode(bnn), 4.0 * curvature.operator.diagonal()))
        streams.four_lines(bnn)
    for seed in range(3):
        torch.manual_seed(seed)
        first, second = torch.randn(2, len(known[0][0]))
        values = [separate(bnn, v) for v in (first, second)]
        expected = [
            sum((f * (v - m).square()).sum() for m, f in known) / 2
            + v.square().sum() / 2 / NORMAL.scale**2
            for v in (first, second)
        ]
        found = streams.energy(bnn, values[0]) - streams.energy(bnn, values[1])
        torch.testing.assert_close(found, expected[0] - expected[1], **EXACT)


def separate(bnn, vector):
    return bnn.state.curvature.blocks.unflatten(vector)


@pytest.mark.parametrize("small", [True, False])
def test_kronecker_penalties_about_each_mode(monkeypatch, small):
    if not small:
        monkeypatch.setattr("tyxe.linalg.checks.SMALL", 5)
    bnn = streams.classifier(accumulate="per_task")
    known = []
    for task in range(3):
        bnn.fit([streams.labels(seed=task)], streams.ADAM, 5, progress=False)
        known.append((streams.mode(bnn), bnn.state.curvature.operator.to_dense()))
        posterior = streams.four_lines(bnn)
    (joint,) = bnn.net_prior.joints()
    assert (len(joint.terms) == 1) is small
    v, w = torch.randn(2, len(known[0][0]))

    def expected(u):
        own = u.square().sum() / 2 / NORMAL.scale**2
        return own + sum((u - m) @ f @ (u - m) for m, f in known) / 2

    found = streams.energy(bnn, separate(bnn, v)) - streams.energy(bnn, separate(bnn, w))
    torch.testing.assert_close(found, expected(v) - expected(w), **EXACT)
    if not small:
        with pytest.raises(ValueError, match="neither moments nor draws: it is a penalty"):
            posterior["0.bias"].sample()
