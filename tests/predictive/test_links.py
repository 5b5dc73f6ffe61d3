"""Links: integrals, formulas, bounds and shapes."""

import math

import pytest
import torch

from tests.oracles.links import MEANS, VARIANCES, covariances, expected_sigmoid
from tyxe.errors import TyxeWarning
from tyxe.predictive import links


def probabilities(link):
    return lambda *gaussian: link(*gaussian).exp()


mc, probit, bridge = map(probabilities, (links.log_mc, links.log_probit, links.log_bridge))


# --- mc -----------------------------------------------------------------------------------------


def test_binary_mc_is_the_integral(monkeypatch):
    mean, variance = torch.meshgrid(MEANS, VARIANCES, indexing="ij")
    found = links.logit_integral(mean, variance)
    torch.testing.assert_close(found.sigmoid(), expected_sigmoid(mean, variance))
    single = links.logit_integral(mean.float(), variance.float())
    torch.testing.assert_close(single, found.float(), rtol=1e-4, atol=1e-5)
    for variance_of_all, most in ((600.0, 1e-5), (1e4, 1e-2), (1e8, 0.016)):
        wide = torch.full((301,), variance_of_all, dtype=torch.float64)
        # A step is least exact beside a node.
        means = torch.linspace(-0.15, 0.15, 301).double() * wide.sqrt()
        error = links.logit_integral(means, wide).sigmoid() - expected_sigmoid(means, wide)
        assert error.abs().max() < most
    monkeypatch.setattr("tyxe.predictive.links.CHUNK", 100)
    torch.testing.assert_close(links.logit_integral(mean, variance), found)


def test_samples_have_the_mean_and_the_covariance():
    mean = torch.randn(3, 4).double()
    covariance = torch.stack([covariances(4), covariances(4, rank=2), torch.zeros(4, 4).double()])
    num_samples = 50_000
    samples = links.sample_outputs(mean, covariance, num_samples)
    assert samples.shape == (num_samples, 3, 4)
    variances = covariance.diagonal(dim1=-2, dim2=-1)
    error = (variances / num_samples).sqrt()
    assert bool(((samples.mean(0) - mean).abs() <= 4.5 * error + 1e-12).all())
    centred = samples - mean
    actual = torch.einsum("sni,snj->nij", centred, centred) / num_samples
    # Var(a b) = Var a Var b + Cov(a, b)^2 for Gaussians.
    products = variances.unsqueeze(-1) * variances.unsqueeze(-2) + covariance.square()
    assert bool(((actual - covariance).abs() <= 4.5 * (products / num_samples).sqrt()).all())


def test_singular_covariances_leave_no_variance_in_their_null_space():
    # Exactly singular for a softmax's functional covariance: it has none along the ones.
    centring = torch.eye(5).double() - 1 / 5
    covariance = centring @ covariances(7, 5) @ centring
    samples = links.sample_outputs(torch.zeros(7, 5).double(), covariance, 200)
    assert samples.sum(-1).abs().max() < 1e-6
    singular = covariances(7, 5, rank=1)
    samples = links.sample_outputs(torch.zeros(7, 5).double(), singular, 200)
    eigenvalues = torch.linalg.eigvalsh(torch.einsum("sni,snj->nij", samples, samples))
    assert bool((eigenvalues[:, :-1].abs() < 1e-6 * eigenvalues[:, -1:]).all())


def test_a_covariance_that_is_none_warns():
    indefinite = torch.diag(torch.tensor([1.0, -0.5])).unsqueeze(0)
    with pytest.warns(TyxeWarning, match=r"eigenvalue -0\.5"):
        samples = links.sample_outputs(torch.zeros(1, 2), indefinite, 10)
    # No variance at all rather than the negative one's size.
    assert bool((samples[..., 1] == 0).all())
    assert bool((samples[..., 0] != 0).all())


def test_mc_in_chunks_is_one_average(monkeypatch):
    mean, covariance = torch.randn(3, 4).double(), covariances(3, 4)
    monkeypatch.setattr("tyxe.predictive.links.CHUNK", 30)  # 2 of 7 samples at once
    torch.manual_seed(3)
    chunked = mc(mean, covariance, 7)
    torch.manual_seed(3)
    parts = [links.sample_outputs(mean, covariance, size).softmax(-1) for size in (2, 2, 2, 1)]
    torch.testing.assert_close(chunked, torch.cat(parts).mean(0))


# --- probit -------------------------------------------------------------------------------------


def test_probit_is_its_formula():
    mean, covariance = torch.randn(4, 3).double(), covariances(4, 3)
    expected = torch.empty_like(mean)
    for n in range(4):
        each = []
        for i in range(3):
            total = 0.0
            for j in range(3):
                own, other = covariance[n, i, i], covariance[n, j, j]
                variance = own + other - covariance[n, i, j] - covariance[n, j, i]
                scale = math.sqrt(1 + math.pi / 8 * 3 / 4 * variance)
                total += math.exp((mean[n, j] - mean[n, i]) / scale)
            each.append(1 / total)
        expected[n] = torch.tensor([p / sum(each) for p in each], dtype=torch.float64)
    torch.testing.assert_close(probit(mean, covariance), expected, rtol=1e-12, atol=0)
    variance = mean.square()
    by_hand = mean / (1 + math.pi / 8 * variance).sqrt()
    torch.testing.assert_close(links.logit_probit(mean, variance), by_hand, rtol=1e-12, atol=0)


# --- bridge -------------------------------------------------------------------------------------


def bridge_by_hand(mean: torch.Tensor, covariance: torch.Tensor) -> list[float]:
    num = len(mean)
    rows = [sum(covariance[i, k].item() for k in range(num)) for i in range(num)]
    total = sum(rows)
    mu = [mean[i].item() - rows[i] * mean.sum().item() / total for i in range(num)]
    var = [covariance[i, i].item() - rows[i] ** 2 / total for i in range(num)]
    inverse = sum(math.exp(-m) for m in mu)
    alpha = [
        (1 - 2 / num + math.exp(m) / num**2 * inverse) / v for m, v in zip(mu, var, strict=True)
    ]
    return [math.log(a) for a in alpha]


@pytest.mark.parametrize("num_classes", [2, 3, 7])
def test_bridge_is_its_formula(num_classes):
    mean = torch.randn(5, num_classes).double()
    covariance = covariances(5, num_classes)
    expected = torch.tensor(
        [bridge_by_hand(m, c) for m, c in zip(mean, covariance, strict=True)], dtype=torch.float64
    )
    log_alpha = links.bridge_log_concentration(mean, covariance)
    torch.testing.assert_close(log_alpha, expected, rtol=1e-9, atol=1e-10)
    dirichlet = torch.distributions.Dirichlet(log_alpha.exp())
    torch.testing.assert_close(bridge(mean, covariance), dirichlet.mean)
    torch.testing.assert_close(bridge(mean, covariance).sum(-1), torch.ones(5).double())


def test_probit_of_a_class_that_the_net_masks():
    mean = torch.tensor([[0.5, -1.0, -torch.inf]], dtype=torch.float64)
    covariance = torch.diag_embed(torch.tensor([[1.0, 2.0, 0.0]], dtype=torch.float64))
    expected = links.log_probit(mean.clamp_min(-1e6), covariance)
    expected[0, 2] = -torch.inf
    torch.testing.assert_close(links.log_probit(mean, covariance), expected)
    mean[0, 2] = torch.finfo(mean.dtype).min  # as some nets mask
    assert links.log_probit(mean, covariance)[0, 2].isfinite()
    mean = torch.tensor([[0.5, -1.0, -torch.inf]]).requires_grad_()
    (gradient,) = torch.autograd.grad(links.log_probit(mean, torch.eye(3)[None])[0, 0], mean)
    torch.testing.assert_close(gradient[0, 0], -gradient[0, 1])
    assert gradient[0, 2] == 0


def test_probit_of_many_classes_is_that_of_all_at_a_time(monkeypatch):
    mean, covariance = torch.randn(2, 3, 70).double(), covariances(6, 70).view(2, 3, 70, 70)
    found = links.log_probit(mean, covariance)
    monkeypatch.setattr(links, "AT_A_TIME", 70)
    torch.testing.assert_close(found, links.log_probit(mean, covariance), rtol=1e-12, atol=1e-12)


def test_bridge_refuses_masked_classes():
    mean, covariance = torch.tensor([[0.0, 1.0, -torch.inf]]), torch.eye(3)[None]
    with pytest.raises(ValueError, match="take link='probit' or 'mc'"):
        links.log_bridge(mean, covariance)
    for link in (links.log_probit, links.log_mc):
        assert torch.equal(link(mean, covariance).exp()[0, 2], torch.tensor(0.0))


def test_bridge_inverts_the_map_from_dirichlets_to_logits():
    # The other direction: mu_k = log alpha_k - mean log alpha, with covariance
    # diag(1/alpha) - (1/C)(1/alpha_k + 1/alpha_l) + 1/C^2 sum 1/alpha, singular along the ones.
    alpha = torch.rand(6, 4).double() * 10 + 0.1
    inverse = alpha.reciprocal()
    pairs = (inverse.unsqueeze(-1) + inverse.unsqueeze(-2)) / 4
    covariance = torch.diag_embed(inverse) - pairs + inverse.sum(-1)[:, None, None] / 16
    mean = alpha.log() - alpha.log().mean(-1, keepdim=True)
    actual = links.bridge_log_concentration(mean, covariance).exp()
    torch.testing.assert_close(actual, alpha, rtol=1e-10, atol=0)
    # There the sum has no variance, so a constant on all logits is only centred away.
    torch.testing.assert_close(
        bridge(mean + 5, covariance), alpha / alpha.sum(-1, keepdim=True), rtol=1e-10, atol=0
    )


def test_bridge_of_small_covariances_and_of_logits_far_apart():
    mean, covariance = torch.randn(5, 3).double(), covariances(5, 3)
    log_alpha = links.bridge_log_concentration(mean, covariance)
    for factor in (1e-3, 1e-6, 1e-12):
        torch.testing.assert_close(
            links.bridge_log_concentration(mean, factor * covariance), log_alpha - math.log(factor)
        )
        torch.testing.assert_close(bridge(mean, factor * covariance), bridge(mean, covariance))
    certain = bridge(mean, torch.zeros(5, 3, 3).double())
    isotropic = bridge(mean, torch.eye(3).double().expand(5, 3, 3))
    torch.testing.assert_close(certain, isotropic)
    apart = bridge(torch.tensor([[200.0, 0.0, -200.0]]), torch.eye(3)[None])
    torch.testing.assert_close(apart, torch.tensor([[1.0, 0.0, 0.0]]))


# --- every link ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", links.CLASS_LINKS)
@pytest.mark.parametrize("shape", [(3,), (4, 3), (4, 2, 5, 3), (0, 3)])
def test_class_links_keep_shapes_and_sum_to_one(name, shape):
    mean, covariance = torch.randn(shape), torch.diag_embed(torch.rand(shape))
    probs = links.CLASS_LINKS[name](mean, covariance, 5).exp()
    assert probs.shape == shape
    torch.testing.assert_close(probs.sum(-1), torch.ones(shape[:-1]))
    logits = links.BINARY_LINKS[name](mean, mean.square(), 5)
    assert logits.shape == shape
    assert bool(logits.isfinite().all())
    # Without uncertainty they are softmax and sigmoid.
    torch.testing.assert_close(links.BINARY_LINKS[name](mean, torch.zeros(shape), 5), mean)
    if name != "bridge":
        certain = links.CLASS_LINKS[name](mean, torch.zeros_like(covariance), 5)
        torch.testing.assert_close(certain, mean.log_softmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_links_promote_half_precision(dtype):
    expected = torch.promote_types(dtype, torch.float32)
    mean, variance = torch.randn(4, 3).to(dtype), torch.rand(4, 3).to(dtype)
    for link in links.CLASS_LINKS.values():
        assert link(mean, torch.diag_embed(variance), 5).dtype == expected
    for link in links.BINARY_LINKS.values():
        assert link(mean, variance, 5).dtype == expected
    assert probit(mean, torch.diag_embed(variance).double()).dtype == torch.float64


TO_CLASSES = r"expected \(4, 3, 3\): pass torch\.diag_embed\(variance\)"
TO_BINARY = r"covariance\.diagonal\(dim1=-2, dim2=-1\)"


@pytest.mark.parametrize(
    ("link", "spread", "num_samples", "message"),
    [
        *((link, torch.ones(4, 3), 5, TO_CLASSES) for link in links.CLASS_LINKS.values()),
        *((link, torch.ones(4, 3, 3), 5, TO_BINARY) for link in links.BINARY_LINKS.values()),
        (mc, torch.ones(4, 3, 3), 0, "num_samples is 0; expected 1 or more"),
        (links.sample_outputs, torch.ones(4, 3, 3), 0, "num_samples is 0; expected 1 or more"),
    ],
)
def test_bad_input(link, spread, num_samples, message):
    with pytest.raises(ValueError, match=message):
        link(torch.zeros(4, 3), spread, num_samples)
