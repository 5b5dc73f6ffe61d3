"""The examples on binary networks run, resume, and report what they found."""

import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from torch import nn

import tyxe
from tests.test_examples import PNG, ROOT, images_stood_in_for, run

OPTIONS = ("--smoke-test", "--out")


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch):
    """Make the examples' own modules importable."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def cells_of(table: str) -> dict[str, list[str]]:
    """Return a Markdown table's cells by the name of the row; of two tables, those of the last."""
    rows = [[cell.strip() for cell in line[2:-2].split(" | ")] for line in table.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) > 1}


def test_binary(tmp_path: Path):
    images_stood_in_for(tmp_path, ("mnist", "fashion_mnist"))
    data = {"TYXE_DATA": str(tmp_path)}
    options = (*OPTIONS, str(tmp_path))
    some = run("binary.py", *options, "--net", "mlp", "--rows", "STE", "Beta, delta 0", **data)
    assert (some.returncode, some.stderr) == (0, ""), some.stderr
    ran = [line.split(", seed")[0] for line in some.stdout.splitlines()[:3]]
    assert ran == ["mlp, STE", "mlp, STE ensemble", "mlp, Beta, delta 0"]
    # what is there is not run again
    rest = run("binary.py", *options, **data)
    assert (rest.returncode, rest.stderr) == (0, ""), rest.stderr
    assert "mlp, STE" not in rest.stdout
    assert "mlp, Bernoulli, tau 1, seed 0" in rest.stdout
    content = json.loads((tmp_path / "binary_mnist.json").read_text())
    assert {"command", "seed", "versions", "machine", "settings"} <= content.keys()
    assert len(content["commands"]) == 2
    assert content["command"].startswith("python examples/binary.py --smoke-test")
    assert content["settings"].keys() - {"published"} == content["published settings"].keys()
    # table and figure come from the file alone
    (tmp_path / "binary_mnist.png").unlink()
    table = run("binary.py", "--figure", "--out", str(tmp_path)).stdout
    assert (tmp_path / "binary_mnist.png").read_bytes().startswith(PNG)
    assert rest.stdout.endswith(table)
    assert list(content["cells"]) == ["cnn", "mlp"]
    for kind, title in (("cnn", "Convolutional"), ("mlp", "Fully connected")):
        rows = cells_of(table.partition(f"**{title}**")[2].partition("**")[0])
        for row, seeds in content["cells"][kind].items():
            (cell,) = seeds.values()
            check_cell(row, cell)
            assert rows[row][0].split()[0] == f"{cell['accuracy %']:.2f}"
            assert rows[row][1].split()[0] == f"{cell['NLL']:.3f}"


def check_cell(row: str, cell: dict) -> None:
    curves = cell["curves"]
    assert 0 <= cell["accuracy %"] <= 100
    assert 0 <= cell["ECE %"] <= 100
    assert 0 <= cell["OOD entropy"] <= math.log(10) + 1e-6
    assert cell["NLL"] > 0
    assert ("weight entropy" in cell) == row.startswith(("Bernoulli", "Beta"))
    if "weight entropy" in cell:
        by_site = cell["weight entropy by site"].values()
        assert 0 < min(by_site) <= cell["weight entropy"] <= max(by_site) <= math.log(2) + 1e-6
    shares = curves["share of OOD"]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    # Below a tenth no maximal probability of ten classes falls.
    assert 0 <= curves["accuracy above"][0] <= 1
    assert len(curves["probability"]) == len(curves["frequency"]) == 10


def test_binary_continual(tmp_path: Path):
    images_stood_in_for(tmp_path, ("mnist",))
    data, options = {"TYXE_DATA": str(tmp_path)}, (*OPTIONS, str(tmp_path))
    some = run("binary_continual.py", *options, "--rows", "STE", **data)
    assert (some.returncode, some.stderr) == (0, ""), some.stderr
    rest = run("binary_continual.py", *options, **data)
    assert (rest.returncode, rest.stderr) == (0, ""), rest.stderr
    assert "STE, seed 0" not in rest.stdout
    content = json.loads((tmp_path / "binary_continual.json").read_text())
    assert {"command", "seed", "versions", "machine", "settings"} <= content.keys()
    assert content["settings"].keys() == content["published settings"].keys()
    table = run("binary_continual.py", "--table", "--out", str(tmp_path)).stdout
    assert rest.stdout.endswith(table)
    rows = cells_of(table)
    for row, seeds in content["cells"].items():
        (cell,) = seeds.values()
        matrix = cell["accuracy %"]
        assert [len(seen) for seen in matrix] == [1, 2, 3]
        assert all(0 <= accuracy <= 100 for seen in matrix for accuracy in seen)
        last = matrix[-1]
        expected = [statistics.fmean(last), last[0], last[-1]]
        assert rows[row][1:4] == [f"{value:.2f}" for value in expected]
        assert ("weight entropy" in cell) == (not row.startswith("STE"))
        for after in cell.get("weight entropy", []):
            assert all(0 < value <= math.log(2) + 1e-6 for value in after.values())
    assert (tmp_path / "binary_continual.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("name", ["binary", "binary_continual"])
def test_a_table_of_no_results_names_the_missing_file(name: str, tmp_path: Path):
    done = run(f"{name}.py", "--published", "--table", "--out", str(tmp_path))
    assert done.returncode == 2
    # the published settings have files of their own, so that neither run drops the other's cells
    assert "_published.json; run without --table and --figure first" in done.stderr


@pytest.mark.usefixtures("helper")
def test_nets_are_the_papers():
    from _binary import NETS

    x = torch.zeros(2, 1, 28, 28)
    for kind, widths, weights in (
        ("cnn", [64, 128, 2048], 9 * 64 + 9 * 64 * 128 + 49 * 128 * 2048 + 20_480),
        ("mlp", [100, 100], 78_400 + 10_000 + 1_000),
    ):
        net = NETS[kind](widths)
        assert sum(parameter.numel() for parameter in net.parameters()) == weights
        assert net(x).shape == (2, 10)


@pytest.mark.usefixtures("helper")
def test_gradients_pass_straight_through_the_sign():
    from _binary import by_sign_

    net = nn.Sequential(nn.Linear(4, 3, bias=False))
    with torch.no_grad():
        net[0].weight.copy_(torch.linspace(-0.7, 0.4, 12).view(3, 4))
    start = net[0].weight.clone()
    by_sign_(net)
    assert torch.equal(net[0].weight, 0.5 * torch.where(start < 0, -1.0, 1.0))
    (real,) = net.parameters()
    torch.testing.assert_close(real, (start / 0.5).clamp(-1, 1))
    x, target = torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0])
    nn.functional.cross_entropy(net(x), target).backward()
    # The same as of the weights themselves, times the scale.
    weight = net[0].weight.detach().clone().requires_grad_()
    nn.functional.cross_entropy(x @ weight.T, target).backward()
    torch.testing.assert_close(real.grad, 0.5 * weight.grad)


@pytest.mark.usefixtures("helper")
def test_straight_through_finds_signs_and_keeps_real_weights_in_their_interval():
    from _binary import batches, by_sign_, fit

    torch.manual_seed(0)
    teacher = torch.where(torch.rand(2, 16) < 0.5, -0.25, 0.25)
    x = torch.randn(400, 16)
    net = by_sign_(nn.Sequential(nn.Linear(16, 2, bias=False)))
    fit(net, batches(x, (x @ teacher.T).argmax(-1), 50), 30, 0.1, [0.5], clip=True)
    agree = (net[0].weight.diff(dim=0) * teacher.diff(dim=0)).sum() / teacher.diff(
        dim=0
    ).norm() ** 2
    assert agree > 0.8
    assert all(parameter.abs().max() <= 1 for parameter in net.parameters())


@pytest.mark.usefixtures("helper")
def test_rates_fall_after_shares_of_the_epochs():
    from _binary import stepwise

    adam = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, rates = stepwise(adam, 8, [0.125, 0.625]), []
    for _ in range(8):
        rates.append(adam.param_groups[0]["lr"])
        adam.step()
        schedule.step()
    assert rates == pytest.approx([1] + 4 * [0.1] + 3 * [0.01])


@pytest.mark.usefixtures("helper")
def test_curves_of_binary_nets():
    from _binary_report import CONFIDENCES, ENTROPIES, curves, mean_of

    known = torch.tensor([[0.95, 0.05], [0.7, 0.3], [0.2, 0.8]])
    unknown = torch.tensor([[0.5, 0.5], [0.99, 0.01]])
    found = curves(known, torch.tensor([0, 1, 1]), unknown)
    assert found["probability"][9] == pytest.approx(0.95)
    assert found["frequency"][9] == 1
    assert (found["probability"][7], found["frequency"][7]) == (pytest.approx(0.7), 0)
    assert found["probability"][5] is None
    below = dict(zip(ENTROPIES, found["share of OOD"], strict=True))
    assert [share for v, share in below.items() if v < 0.05] == [0.0]
    assert {share for v, share in below.items() if 0.1 < v < 0.6} == {0.5}
    above = dict(zip(CONFIDENCES, found["accuracy above"], strict=True))
    assert above[0.1] == pytest.approx(2 / 5)
    assert above[0.75] == pytest.approx(2 / 3, abs=1e-5)  # recorded to five digits
    assert above[0.99] == 0
    assert mean_of([{"a": [1.0, None]}, {"a": [2.0, None]}]) == {"a": [1.5, None]}


@pytest.mark.usefixtures("helper")
def test_entropy_of_weights():
    from _binary import weight_entropy

    net = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False))
    guide = tyxe.guides.AutoBernoulli
    likelihood = tyxe.likelihoods.Categorical(5)
    bnn = tyxe.VariationalBNN(net, tyxe.priors.BinaryPrior(), likelihood, guide)
    with torch.no_grad():
        bnn.net_guide.get_logits("0.weight").zero_()
        bnn.net_guide.get_logits("1.weight").fill_(200.0)
    mean, by_site = weight_entropy(bnn)
    assert by_site == {"0.weight": pytest.approx(math.log(2)), "1.weight": pytest.approx(0)}
    assert mean == pytest.approx(6 / 8 * math.log(2))
