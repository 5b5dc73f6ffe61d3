"""experiments/leaderboard.py: every row on sets that stand in for real ones; choices and scores."""

import math
from functools import partial
from itertools import product
from types import SimpleNamespace

import leaderboard
import leaderboard_data
import pytest
import torch
from leaderboard_methods import METHODS, Fitted, Method

S = leaderboard.experiment.at("smoke")


# Runs of seconds are too short for what they adapt.
@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("names", [["digits"], ["cifar10"], ["cora"], ["yacht", "energy"]])
def test_every_row_on_every_kind_of_set(names, smoke, every_set):
    # Of a ResNet, whose steps take long, those that differ by how they treat its norms.
    rows = ["ML", "SWAG", "Laplace, last layer", "radial"] if names == ["cifar10"] else [*METHODS]
    found = smoke(leaderboard.experiment, "--data", *names, "--methods", *rows)
    for name, row in product(names, rows):
        method = METHODS[row]
        if row in leaderboard.NOT_RUN.get(name, {}):
            assert found.cells[name, row, "none"].keys() == {"reason", "CPU seconds"}
            continue
        choice, cell = found.cells[name, row, "choice"], found.cells[name, row, "0"]
        if row == "ML, temperature" and "reason" in cell:  # of labels without a pattern
            assert cell["reason"].startswith("no temperature is the best")
            continue
        assert choice["knob"] == S.grids[method.knob][0]
        assert choice["temperature"] == (0.1 if method.tempered and method.like != "ML" else 1.0)
        if row not in ("ML", "ML, temperature", "MC dropout"):
            assert cell["bytes"] > found.cells[name, "ML", "0"]["bytes"]
        assert ("OOD AUROC" in cell) == (name in leaderboard_data.IMAGES)
        assert ("RMSE" in cell) == (name in leaderboard_data.UCI)
    family = "uci" if len(names) > 1 else names[0]
    page = (found.record.path.parent / f"leaderboard_{family}.md").read_text()
    assert [row for row in rows if f"| {row} | " not in page] == []
    assert ("- radial: not among the leading rows" in page) == (family == "cifar10")


@pytest.fixture
def rows(monkeypatch, every_set):
    """Let rows of known scores stand in; the names of what they are fitted at are listed."""
    seen = []

    def scored(on, name):
        seen.append((name, on.knob, on.temperature))
        if on.knob == 3.0:
            raise RuntimeError("the loss is nan\nat step 7")
        value = (on.knob - 2) ** 2 + (on.temperature - 0.5) ** 2
        return Fitted(SimpleNamespace(predict=lambda *inputs, **how: value))

    monkeypatch.setattr(leaderboard, "tested", lambda s, bnn, parts, how, told: told)
    monkeypatch.setattr(
        leaderboard, "validated", lambda outputs, targets: {"validation NLL": outputs}
    )
    monkeypatch.setitem(METHODS, "known", Method(partial(scored, name="known"), knob="known"))
    monkeypatch.setitem(METHODS, "lost", Method(partial(scored, name="lost"), knob="lost"))
    grids = S.grids | {"known": [1.0, 2.0, 3.0], "lost": [3.0]}
    s = leaderboard.experiment.at("smoke", grids=grids, temperatures=[1.0, 0.5, 0.1], seeds=[0, 1])
    return s, seen


def test_a_knob_is_chosen_first_and_then_the_temperature(rows):
    s, seen = rows
    found = leaderboard.choose(s, {}, "digits", "known")
    tried = [(1.0, 1.0), (2.0, 1.0), (3.0, 1.0), (2.0, 0.5), (2.0, 0.1)]
    assert [pair for _, *pair in seen] == [[*pair] for pair in tried]
    assert (found["choice"]["knob"], found["choice"]["temperature"]) == (2.0, 0.5)
    assert found["choice"]["validation NLL"] == {
        "1 1": 1.25, "2 1": 0.25, "3 1": None, "2 0.5": 0.0, "2 0.1": pytest.approx(0.16)
    }  # fmt: skip
    assert found["0"]["validation NLL"] == 0.0


def test_ensembles_have_what_was_chosen_for_their_members(rows, monkeypatch):
    s, seen = rows
    monkeypatch.setitem(METHODS, "known", METHODS["known"]._replace(like="SWAG"))
    like = {"knob": 2.0, "temperature": 0.1}
    found = leaderboard.choose(s, {("digits", "SWAG", "choice"): like}, "digits", "known")
    assert seen == [("known", 2.0, 0.1)]
    assert found["choice"] == like | {"validation NLL": {"2 0.1": pytest.approx(0.16)}}
    lost = {("digits", "SWAG", "choice"): {"reason": "no"}}
    assert leaderboard.choose(s, lost, "digits", "known")["0"] == {"reason": "no"}


def record_of(cells):
    return leaderboard.runner.Record(None, ("data", "method", "seed"), cells=cells)


def cell(nll, seconds=1.0, **more):
    costs = {"train s": seconds, "predict s": seconds, "bytes": 10 * seconds}
    return {"NLL": nll, "error %": 1.0, "ECE %": 1.0, **costs, **more}


def test_costs_are_in_units_of_ml_of_that_seed_and_the_best_are_bold():
    cells = {("digits", "ML", str(i)): cell(0.30 + 0.1 * i, 2.0 + i) for i in range(3)}
    cells |= {("digits", "MAP", str(i)): cell(0.10, 4.0 + 2 * i) for i in range(3)}
    cells |= {("digits", "SWAG", str(i)): cell(0.09 + 0.02 * i) for i in range(3)}
    cells["digits", "IVON", "none"] = {"reason": "it is said here"}
    page = leaderboard.table(record_of(cells))["_digits"]
    assert "| ML | 0.400 ± 0.058 |" in page
    assert "| MAP | **0.100 ± 0.000** | **1.0 ± 0.0** | **1.0 ± 0.0** | 2 | 2 | 2 |" in page
    assert "| SWAG | **0.110 ± 0.006** |" not in page
    assert "| IVON |  |" in page
    assert page.endswith("- IVON: it is said here")


def test_ranks_of_regression_are_those_of_each_set_and_seed():
    rmse = {"RMSE": 1.0, "interval error %": 1.0}
    cells = {("yacht", "ML", "0"): cell(3.0, **rmse), ("yacht", "MAP", "0"): cell(2.0, **rmse)}
    cells |= {("energy", "ML", "0"): cell(1.0, **rmse), ("energy", "SWAG", "0"): cell(0.5, **rmse)}
    cells["energy", "MAP", "0"] = cell(2.0, 4.0, **rmse)
    found = leaderboard.ranks(record_of(cells), ["yacht", "energy"], "NLL")
    assert found == {"ML": [2, 2], "MAP": [1, 3], "SWAG": [1]}
    page = leaderboard.table(record_of(cells))["_uci"]
    assert "| MAP | **2.0 ± 1.0** |" in page
    assert "| 2 | 2 | 2 |" in page  # the geometric mean of 1 and 4


def test_scores_of_numbers_are_those_of_mixtures():
    known = torch.randn(400, 1, generator=torch.Generator().manual_seed(0)).double()
    draws = known + torch.tensor([-0.2, 0.3]).double().view(2, 1, 1)
    found = leaderboard_data.validated(draws, known)
    noise = found["noise"]
    # Of a mixture of two with the errors -0.2 and 0.3, at each point.
    densities = [math.exp(-0.5 * (e / noise) ** 2) / noise for e in (-0.2, 0.3)]
    nll = 0.5 * math.log(2 * math.pi) - math.log(sum(densities) / 2)
    assert found["validation NLL"] == pytest.approx(nll)
    row = leaderboard_data.scores({"test": draws}, known, noise)
    assert row["NLL"] == pytest.approx(nll)
    assert row["RMSE"] == pytest.approx(0.05)
    assert noise in leaderboard_data.NOISES.tolist()
    others = [leaderboard_data.mixture_nll(draws, known, noise * f) for f in (0.5, 1.0, 2.0)]
    assert min(others) == others[1]


def test_intervals_of_the_true_noise_have_their_coverage():
    y = torch.randn(20_000, 1, generator=torch.Generator().manual_seed(0))
    zeros = torch.zeros(1, 20_000, 1)
    assert leaderboard_data.validated(zeros, y)["noise"] == pytest.approx(1.0)
    found = leaderboard_data.scores({"test": zeros}, y, 1.0)
    # Coverages are means of 20,000 coins: the mean of nine has no larger error.
    assert found["interval error %"] < 100 * 4 * 0.5 / math.sqrt(20_000)


def test_a_net_of_nodes_is_the_same_in_blocks(every_set):
    own = leaderboard_data.problem(S, "cora", 0)
    torch.manual_seed(0)
    net = own.make_net().eval()
    loader, parts = own.by_nodes(7)
    ((nodes,), labels), ((blocks,), same) = own.parts["test"], parts["test"]
    torch.testing.assert_close(torch.cat([net(*x) for x, _ in blocks]), net(nodes))
    assert torch.equal(torch.cat([y for _, y in blocks]), labels)
    assert torch.equal(same, labels)
    assert sum(len(y) for _, y in loader) == len(own.loader.x)


def test_parts_of_regression_are_standardised_by_those_to_train(every_set):
    own = leaderboard_data.problem(S, "yacht", 0, 0.5)
    assert own.unit == 0.25
    torch.testing.assert_close(own.loader.y.std(0), torch.ones(1))
    counts = [len(own.parts[part][1]) for part in ("validation", "test")]
    assert [len(own.loader.x), *counts] == [38, 10, 12]  # of 60 rows


def test_a_probability_of_zero_in_single_precision_has_a_finite_nll():
    outputs = torch.tensor([[[0.0, 200.0]], [[0.0, 300.0]]])
    found = leaderboard_data.scores({"test": outputs}, torch.tensor([0]))["NLL"]
    assert found == pytest.approx(200 + math.log(2), abs=1e-4)
