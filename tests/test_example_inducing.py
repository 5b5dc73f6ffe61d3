"""The examples of inducing weights: what they write, and the parts that they are made of."""

import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td

import tyxe
from tyxe.distributions import SiteProduct
from tyxe.testing import check_guide

ROOT = Path(__file__).resolve().parents[1]
PNG = b"\x89PNG\r\n\x1a\n"


def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, f"examples/{name}", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def smoke(name: str, result: str, folder: Path):
    """Run a smoke test; return what it printed and its JSON, after looking at the rest."""
    done = run(name, "--smoke-test", "--out", str(folder))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert (folder / f"{result}.png").read_bytes().startswith(PNG)
    content = json.loads((folder / f"{result}.json").read_text())
    assert {"command", "seed", "versions", "machine", "settings"} <= content.keys()
    assert content["command"].startswith(f"python examples/{name} --smoke-test")
    return done.stdout, content


def test_inducing(tmp_path: Path):
    stdout, content = smoke("inducing.py", "inducing_toy", tmp_path)
    assert list(content["cells"]) == ["FFG-W", "FCG-W", "FFG-U", "FCG-U", "ensemble-U", "NUTS"]
    for title, cell in content["cells"].items():
        assert len(cell["mean"]) == len(cell["sd"]) == 201
        assert f"{title}: {{" in stdout
        # the noise, 0.1, is in every predictive standard deviation
        assert all(0.0999 < value < math.inf for value in cell["sd"])
    # what is there is not run again, and the table comes from the file alone
    table = run("inducing.py", "--table", "--out", str(tmp_path)).stdout
    assert stdout.endswith(table)
    again, same = smoke("inducing.py", "inducing_toy", tmp_path)
    assert again == stdout[stdout.index("wrote") :]
    assert same["cells"] == content["cells"]
    lines = table.splitlines()
    assert lines[0].startswith("| | sd at data | sd between | sd in the middle | sd beyond |")
    beyond = content["cells"]["FFG-W"]["sd"]
    beyond = [value for i, value in enumerate(beyond) if not 50 <= i <= 150]
    assert lines[2].split(" | ")[4] == f"{sum(beyond) / len(beyond):.3f}"


@pytest.mark.parametrize("name", ["inducing", "inducing_images"])
def test_a_table_of_no_results_names_the_missing_file(name: str, tmp_path: Path):
    done = run(f"{name}.py", "--table", "--out", str(tmp_path))
    assert done.returncode == 2
    assert ".json; run without --table first" in done.stderr


INDUCING = {"inducing_rows": {"0.weight": 3, "2.weight": 1}}
INDUCING |= {"inducing_cols": {"0.weight": 2, "2.weight": 3}}


@pytest.mark.parametrize("name", ["FCG-W", "FFG-W", "FFG-U"])
def test_elbo_of_many_draws_is_the_mean_of_that_of_one(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from _inducing_toy import AutoFullByLayer, Elbo

    torch.manual_seed(0)
    builders = {
        "FCG-W": partial(AutoFullByLayer, init_scale=0.3),
        "FFG-W": tyxe.guides.AutoNormal,
        "FFG-U": partial(tyxe.guides.AutoInducing, **INDUCING),
    }
    net = torch.nn.Sequential(torch.nn.Linear(1, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    prior = tyxe.priors.LayerwiseNormalPrior("radford")
    priors = prior.sites(net.double())
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(7, scale=0.5)
    bnn = tyxe.VariationalBNN(net, prior, likelihood, builders[name])
    x, y = torch.randn(7, 1).double(), torch.randn(7, 1).double()
    if name == "FCG-W":
        for factor in bnn.net_guide.scale_factors.parameters():
            torch.nn.init.normal_(factor)
    data, kl = Elbo(bnn, priors, x, y, draws=4_000)()
    with torch.no_grad():
        single = [tyxe.bnn.elbo_terms(bnn.model, bnn.guide, x, y) for _ in range(200)]
    # the prior's standard deviation is a float32 number in one of them
    torch.testing.assert_close(kl, single[0].kl, rtol=1e-6, atol=0)
    each = torch.stack([terms.data for terms in single])
    # four standard errors, of the mean of 200 draws and of that of 4,000
    error = each.std() * math.sqrt(1 / 200 + 1 / 4_000)
    assert abs(data - each.mean()) < 4 * error


def test_full_by_layer_is_a_guide(monkeypatch: pytest.MonkeyPatch):
    """Its densities and KL are those of PyTorch's Normals, and it keeps the contract."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from _inducing_toy import AutoFullByLayer, LayerNormal

    check_guide(AutoFullByLayer)
    torch.manual_seed(0)
    shapes = {"net.weight": torch.Size([2, 3]), "net.bias": torch.Size([2])}
    loc, tril = torch.randn(8).double(), torch.randn(8, 8).double().tril() + 3 * torch.eye(8)
    normal = td.MultivariateNormal(loc, scale_tril=tril)
    joint = LayerNormal(shapes, loc, tril)
    scale = torch.linspace(1, 2, 8).double()
    sites = joint.separate(scale)
    priors = {n: dist.Normal(torch.zeros_like(s), s).to_event(s.dim()) for n, s in sites.items()}
    p = td.MultivariateNormal(torch.zeros(8).double(), torch.diag(scale.square()))
    torch.testing.assert_close(
        td.kl_divergence(joint, SiteProduct(priors)), td.kl_divergence(normal, p)
    )
    weight = torch.randn(5, 2, 3).double()
    own = td.MultivariateNormal(loc[:6], normal.covariance_matrix[:6, :6])
    torch.testing.assert_close(
        joint.marginal("net.weight").log_prob(weight), own.log_prob(weight.flatten(1))
    )


def test_inducing_images(tmp_path: Path):
    options = ("--smoke-test", "--parts", "table", "ablation", "--out", str(tmp_path))
    first = run("inducing_images.py", *options)
    assert (first.returncode, first.stderr) == (0, ""), first.stderr
    # what is there is not run again, and the tables come from the file alone
    table = run("inducing_images.py", "--smoke-test", "--table", "--out", str(tmp_path)).stdout
    second = run("inducing_images.py", *options)
    assert second.stdout.splitlines()[0].startswith("wrote")
    assert first.stdout.endswith(table)
    assert second.stdout.endswith(table)
    assert (tmp_path / "inducing_digits.png").read_bytes().startswith(PNG)
    content = json.loads((tmp_path / "inducing_digits.json").read_text())
    assert {"command", "seed", "versions", "machine", "settings"} <= content.keys()
    assert content["settings"].keys() == content["published settings"].keys()
    assert content["published settings"]["inducing"]["epochs"] == 300
    rows = {}
    for cell in content["table"]["0"].values():
        rows |= cell["rows"]
    assert list(rows) == [
        *("deterministic", "ensemble"),
        *("FFG-W", "FFG-W, 10 % kept", "FFG-W, 1 % kept"),
        *("FFG-U", "FFG-U, 50 % kept", "FFG-U, 25 % kept", "ensemble-U"),
    ]
    assert len(content["ablation"]["0"]) == 5  # 2 + 2 + 2 values, their common point once
    sizes = [line.split()[2] for line in table.splitlines() if line.startswith("| M ")]
    assert sizes == sorted(sizes, key=lambda size: float(size.rstrip(",")))
    assert table.count("| M ") == 5
    for name, row in rows.items():
        scores = {key: value for key, value in row.items() if key not in ("KL", "loss")}
        assert all(math.isfinite(value) and value >= 0 for value in scores.values())
        assert all(value <= 100 for key, value in scores.items() if "%" in key)
        assert ("AUROC 8-9" in row) == ("kept" not in name)
        assert row.get("AUROC 8-9", 0) <= 1
        assert content["summary"][name]["NLL"] == {"mean": row["NLL"], "standard error": None}
        assert f"| {name} | {row['accuracy %']:.2f} | {row['NLL']:.3f} |" in table
    # 1,384 parameters of the net; of those in norms there is one of each, of the others two
    counts = {name: row["parameters"] for name, row in rows.items()}
    assert (counts["deterministic"], counts["ensemble"]) == (1_384, 2 * 1_384)
    weights = counts["FFG-W"] - 1_384
    dropped = weights - 10 - round(0.1 * (weights - 10))  # of all but the biases
    assert counts["FFG-W"] - counts["FFG-W, 10 % kept"] == 2 * dropped


def test_inducing_images_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from _inducing_images import CORRUPTIONS, LEVELS, Batches, augmented, make_net

    torch.manual_seed(0)
    x = torch.rand(20, 2, 6, 6)
    # random windows of the reflected images, each at its own place, half of them flipped
    windows = torch.nn.functional.pad(x, (4, 4, 4, 4), mode="reflect").unfold(2, 6, 1)
    windows = windows.unfold(3, 6, 1)  # (20, 2, 9, 9, 6, 6)
    places, flips = set(), 0
    for own, image in zip(windows, augmented(x), strict=True):
        candidates = own.permute(1, 2, 0, 3, 4).flatten(0, 1)
        straight, flipped = (
            (candidates == each).flatten(1).all(1).nonzero() for each in (image, image.flip(-1))
        )
        assert len(straight) + len(flipped) >= 1
        flips += len(straight) == 0
        places.add(int(torch.cat([straight, flipped])[0]))
    assert len(places) > 5
    assert 0 < flips < 20
    batches = list(Batches(x, torch.arange(20), 8, augment=False))
    assert [len(labels) for _, labels in batches] == [8, 8, 4]
    assert all(torch.equal(x[labels], images) for images, labels in batches)
    # each level is further from the image than the one before, and the same at every call
    x = torch.rand(20, 3, 12, 12)
    for corrupt in CORRUPTIONS.values():
        distances = [0.0]
        for level in LEVELS:
            found = corrupt(x, level)
            assert found.shape == x.shape
            assert torch.equal(found, corrupt(x, level))
            assert 0 <= found.min() <= found.max() <= 1
            distances.append((found - x).abs().mean().item())
        assert distances == sorted(distances)
    constant = torch.full((1, 3, 12, 12), 0.3)
    torch.testing.assert_close(CORRUPTIONS["blur"](constant, 5), constant)
    torch.testing.assert_close(CORRUPTIONS["contrast"](x, 3).mean((-1, -2)), x.mean((-1, -2)))
    assert make_net(4, 1)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert sum(parameter.numel() for parameter in make_net(16, 1).parameters()) == 77_754
    pytest.importorskip("torchvision", reason="the paper's nets are torchvision's")
    resnet = make_net("resnet50", 3)
    assert sum(parameter.numel() for parameter in resnet.parameters()) == 23_520_842
