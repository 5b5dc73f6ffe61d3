"""Smoke tests of experiments, most of whose numbers and tables are judged by `smoke` itself."""

import functools
import math
import shlex

import agreement
import binary
import evidence
import image_laplace
import inducing_images
import large_graph
import mile
import posteriors
import pytest
import resnet_ood
import run
import runner
import sequence_data
import task_sequences
import torch
import two_clusters
import uci

import tyxe

# Fits and chains of seconds are too short to be any good.
pytestmark = [
    pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning"),
    # Of transformers 5, in a property that peft reads.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]
FIELDS = ["(a) mean field, inside the handler", "(b) mean field, outside", "(c) NUTS"]
BETAS = [
    f"variational {k}, beta {b}" for b in ("1", "0.1", "0.01") for k in ("Laplace", "inference")
]
PARTS = [
    f"{how}, {name}"
    for how in ("mean field", "Laplace")
    for name in ("head", "attention", "linear maps")
]
STEP = ["true posterior", "Laplace, Hessian", "Laplace, GGN", "Laplace, GGN damped", "HMC"]
SMALL = ["last_layer_laplace", "mean_field, 2", "swag, 1"]
LINKS = ["mc, 50 samples", "mc, 2 samples", "probit", "bridge", "the mode"]
INDUCING = ["deterministic", "FFG-W, 10 % kept", "FFG-U, 25 % kept", "ensemble-U"]
ONLINE = "--tasks 4 --strengths 3 --decay 0.5 --methods"
SPLIT = runner.SETTINGS["split_mnist"]["methods"]["choices"]
# Commands with their options, how many cells there are, and the rows of the table.
CASES = [
    ("agreement --data yacht", len(agreement.ROWS), agreement.ROWS),
    ("agreement --data digits --methods MAP ensemble", 2, ["MAP", "ensemble"]),
    ("augmentation", 1 + 2 * len(resnet_ood.CHANGES), ["kron, as they are, untuned"]),
    ("binary", 2 * len(binary.ROWS), binary.ROWS),
    ("binary_continual", 9, ["Beta, delta 0"]),
    ("binary_gap", 2 * len(binary.CHANGES), binary.CHANGES),
    ("corruptions", 4, inducing_images.PAPER),
    ("ddp", 1, ["1 process"]),  # of several processes in tests/bnn/test_parallel.py
    ("fixed_variance", 2 * (2 * 2 + 1), []),
    ("image_laplace", 2, image_laplace.ROWS),
    ("inducing_images --parts table ablation", 9, INDUCING),
    ("inducing_toy", len(two_clusters.METHODS) + 1, two_clusters.METHODS),
    ("laplace_toys cubic --seeds 1 0", 2, ["net"]),
    ("laplace_toys step", 1, STEP),
    ("large_graph --backend torch", 2 * len(large_graph.METHODS), large_graph.METHODS),
    ("links", 4, LINKS),
    ("low_rank", 2, ["full", "kron", "diag", "rank 3"]),
    ("mile --data airfoil", len(mile.METHODS), [f"airfoil | {name}" for name in mile.METHODS]),
    ("mile_beside_bde --methods 'deep ensemble' MILE", 2, ["deep ensemble", "MILE"]),
    ("mile_digits", 1, mile.METHODS[:-1]),
    ("moments", 2 * len(posteriors.METHODS), posteriors.METHODS),
    ("next_task", 1, [f"10 units, {name}" for name in task_sequences.CHANGES]),
    ("prior_precision", 2, image_laplace.BY_PRECISION),
    ("resnet_ood --setups 'two classes'", len(resnet_ood.ROWS), resnet_ood.ROWS),
    ("sbc", 2 * len(posteriors.SBC_METHODS), posteriors.SBC_METHODS),
    (f"sklearn_methods --data friedman wine --rows {shlex.join(SMALL)}", 2 * len(SMALL), SMALL),
    ("split_cifar", 3, ["VCL 0.1"]),
    (f"split_mnist --methods {shlex.join(SPLIT)}", len(SPLIT), ["VCL, 2 epochs"]),
    (f"task_sequences online {ONLINE} {shlex.join(task_sequences.ONLINE)}", 5, []),
    ("task_sequences disjoint", 7, ["ML"]),
    ("task_sequences permuted", 3, ["ML"]),
    ("task_sequences vision", 7, ["ML"]),
    ("transformer", 1, ["ML", "MAP", *PARTS]),
    ("two_clusters regression", 1, FIELDS),
    (f"uci --data digits --columns {shlex.join(uci.COLUMNS)}", len(uci.COLUMNS), ["digits"]),
    ("two_clusters variational_laplace", 1, BETAS),
]


@pytest.mark.parametrize(("line", "count", "rows"), CASES)
def test_a_run_of_seconds_has_all_its_rows(
    line: str, count: int, rows, smoke, every_set, monkeypatch
):
    # Before steps are adapted, trees would be as deep as they may.
    short = functools.partial(tyxe.samplers.NUTS, max_tree_depth=4)
    monkeypatch.setattr(tyxe.samplers, "NUTS", short)
    kind = sequence_data.LeNet
    monkeypatch.setattr(sequence_data, "LeNet", lambda: kind(3, 4, 5))
    known, words = run.catalogue(), shlex.split(line)
    command = next(c for c in (" ".join(words[:2]), words[0]) if c in known)
    if command in ("links", "sklearn_methods"):
        pytest.importorskip("sklearn", minversion="1.6", reason="the extra `sklearn`")
    found = smoke(known[command], *words[len(command.split()) :])
    assert len(found.cells) == count
    assert all(f"\n| {row} | " in found.page for row in rows)
    CHECKS.get(command, lambda cells: None)(found.cells)


# --------------------------------------------------------------------------- what they have besides


def of_agreement(cells):
    assert not any("reason" in cell for cell in cells.values())
    assert all(cell.get("wasserstein2", 1) > 0 for cell in cells.values())


def of_moments(cells):
    for (model, *_), cell in cells.items():
        assert len(cell["error"]) == {"linear": 4, "logistic": 2}[model]
        assert all(ratio > 0 for ratio in cell["ratio"])


def of_step(cells):
    # The integral does not depend on how long anything was fitted.
    truth = cells[("42",)]["rows"]["true posterior"]
    assert truth["p at x = 4"] == pytest.approx(0.992, abs=1e-3)
    assert truth["P(w1 < 0)"] < 1e-5


def of_links(cells):
    assert all(0 < cell["common to all logits"] < 1 for cell in cells.values())


def of_mile(cells):
    # What takes longest is run last.
    assert [method for _, method, _ in cells] == [*mile.METHODS]
    assert [cell["draws"] for cell in cells.values()] == [1, 2, 2 * 4, 4, 4, 2 * 4]


def of_mile_digits(cells):
    assert [row["draws"] for row in cells[("0",)]["rows"].values()] == [1, 2, 2 * 2, 4, 4]


def of_next_task(cells):
    rows = cells["10", "0"]["rows"].values()
    assert len({row["earlier, before"] for row in rows}) == 1  # all start from the same net
    # The more the newest task counts, the farther the net moves for it.
    assert len({row["rise of their NLL"] for row in rows}) == len(rows)


def of_prior_precision(cells):
    for cell in cells.values():
        for counts in cell["entropies, known and unknown"].values():
            assert [(len(part), sum(part)) for part in counts] == [(image_laplace.BINS, 50)] * 2


def of_sbc(cells):
    s = posteriors.sbc.at("smoke")
    for ranks in (ranks for cell in cells.values() for ranks in cell["ranks"].values()):
        assert len(ranks) == s.simulations
        assert all(0 <= rank <= s.draws for rank in ranks)


def of_regression(cells):
    # The noise, 0.1, is in every predictive standard deviation (float32, so not exactly).
    cell = cells[("42",)]
    assert all(sd > 0.0999 for row in cell["rows"].values() for sd in row.values())
    assert len(cell["chain"]["r_hat"]) == 5


def of_ddp(cells):
    assert torch.get_default_dtype() == torch.float32
    for curve in cells["1 process", "0"]["curves"].values():
        assert curve[-1] < curve[0]


def of_binary_gap(cells):
    # Another rate is another fit; a row changes nothing that it does not name.
    own = [cell["NLL"] for (net, *_), cell in cells.items() if net == "mlp"]
    assert len({*own}) == len(binary.CHANGES)
    changes = [binary.BASE | changed for changed in binary.CHANGES.values()]
    for changed in changes:
        assert sum(changed[key] != value for key, value in binary.BASE.items()) <= 1


def of_binary(cells):
    for (_, row, _), cell in cells.items():
        assert ("weight entropy" in cell) == row.startswith(("Bernoulli", "Beta"))
        assert cell["curves"]["share of OOD"][-1] == 1


def of_cubic(cells):
    # Chains take long, and are run for the first data alone.
    assert ["HMC, untuned, bnn" in cell["rows"] for cell in cells.values()] == [True, False]


def of_inducing_images(cells):
    tables = [cell["rows"] for key, cell in cells.items() if key[0] == "table"]
    rows = {name: row for table in tables for name, row in table.items()}
    # 1,384 parameters of the net; of those in norms there is one of each, of the others two
    counts = {name: row["parameters"] for name, row in rows.items()}
    assert (counts["deterministic"], counts["ensemble"]) == (1_384, 2 * 1_384)
    weights = counts["FFG-W"] - 1_384
    dropped = weights - 10 - round(0.1 * (weights - 10))  # of all but the biases
    assert counts["FFG-W"] - counts["FFG-W, 10 % kept"] == 2 * dropped


def of_inducing_toy(cells):
    for cell in cells.values():
        # The noise, 0.1, is in every predictive standard deviation.
        assert all(0.0999 < value < math.inf for value in cell["sd"])


def of_tasks(cells):
    for cell in cells.values():
        # After each task, on all so far.
        seen = [len(row) for row in cell["accuracy"]]
        assert seen == list(range(1, len(cell["tasks"]) + 1))


def of_split_mnist(cells):
    for cell in cells.values():
        assert [len(row) for row in cell["accuracy"]] == [1, 2, 3, 4, 5]
        # Two steps a task, in which Adam moves each of the 8 x 784 weights by its rate at most.
        for row in cell["moves"].values():
            assert row["updates"] == 2
            assert 0 < row["means moved"] < 2.01e-3 * math.sqrt(8 * 784)


def of_seen_and_unseen(cells):
    for cell in cells.values():
        for scores in (cell, cell.get("weights drawn", cell)):
            share = scores["accuracy %"] / 100
            right, wrong = (scores.get(f"AUROC, {part}", 0) for part in ("right", "wrong"))
            own = share * right + (1 - share) * wrong
            assert scores["AUROC SVHN"] == pytest.approx(own, abs=2e-4)


CHECKS = {
    "agreement": of_agreement,
    "binary": of_binary,
    "binary_gap": of_binary_gap,
    "ddp": of_ddp,
    "inducing_images": of_inducing_images,
    "inducing_toy": of_inducing_toy,
    "laplace_toys cubic": of_cubic,
    "laplace_toys step": of_step,
    "links": of_links,
    "mile": of_mile,
    "mile_digits": of_mile_digits,
    "moments": of_moments,
    "next_task": of_next_task,
    "prior_precision": of_prior_precision,
    "resnet_ood": of_seen_and_unseen,
    "sbc": of_sbc,
    "split_cifar": of_tasks,
    "split_mnist": of_split_mnist,
    **{f"task_sequences {kind}": of_tasks for kind in ("disjoint", "online", "permuted", "vision")},
    "two_clusters regression": of_regression,
}


@pytest.mark.parametrize("names", [["digits"], ["fashion"], ["cora"], ["energy"], ["lora"]])
def test_evidence_on_every_set(names, smoke, every_set):
    for module in ("peft", "transformers") if names == ["lora"] else ():
        pytest.importorskip(module, reason="it is of the extra 'huggingface'")
    found = smoke(evidence.experiment, "--data", *names)
    for name in names:
        rows = found.cells[name, "0"]["rows"]
        assert len(rows) == {"digits": 8, "fashion": 3, "cora": 3}.get(name, 4)
        for how, row in rows.items():
            assert how == "MAP" or row["precision"] > 0
            assert ("gamma / N" in row) == ("evidence" in how)
            assert ("warned" in row) == (how.endswith((", evidence", "held out")))
        assert ("1 - sum p^2" in rows["MAP"]) == (name != "energy")
    assert found.page.count("uncertainty of the training data") == len({*names} - {"energy"})


# --------------------------------------------------------------------------- parts of them


def test_the_grid_is_wide_and_fine_enough():
    """Its moments are those of importance sampling from a wide t-distribution."""
    x, y, _, scale, mean, sd = posteriors.problem("logistic")
    torch.manual_seed(0)
    wide = torch.distributions.StudentT(5.0, mean, 1.5 * sd)
    w = wide.sample((400_000,))
    logits = w[:, :1] * x[:, 0] + w[:, 1:]
    joint = torch.distributions.Bernoulli(logits=logits).log_prob(y[:, 0]).sum(1)
    joint = joint + torch.distributions.Normal(0.0, scale).log_prob(w).sum(1)
    weights = (joint - wide.log_prob(w).sum(1)).softmax(0)
    found = weights @ w
    torch.testing.assert_close(found, mean, atol=0.01, rtol=0)
    spread = (weights @ (w - found).square()).sqrt()
    torch.testing.assert_close(spread, sd, atol=0.01, rtol=0)


def test_validation_images_choose_a_prior_and_all_entropies_are_in_bins():
    def cell(validation, test):
        return {"rows": {"MAP": {"validation NLL": validation, "NLL": test}}}

    found = {0.1: [cell(0.4, 0.1), cell(0.5, 0.1)], 1.0: [cell(0.3, 0.9), cell(0.5, 0.9)]}
    assert image_laplace.chosen(found, "MAP") == 1.0
    counts = image_laplace.of_bins(torch.tensor([0.0, math.log(10)]))  # the least and the most
    assert counts[0] == counts[-1] == 1


def test_ranks_of_seeds_are_pooled():
    names = ("first", "middle", "square", "log likelihood")
    cell = {"ranks": {name: [0, 9, 4, 5] for name in names}}
    cells = {("regression", "NUTS", seed): cell for seed in ("0", "1")}
    record = runner.Record(None, posteriors.sbc.by, {"settings": {"draws": 9}}, cells)
    found = posteriors.pooled(record, "regression", "NUTS")
    assert torch.equal(found.ranks["first"], torch.tensor([0, 9, 4, 5] * 2))
    assert posteriors.outer(found) == 0.5


def test_outputs_of_mile_are_a_mean_and_a_scale():
    outputs = mile.LogScale()(torch.tensor([[1.0, 0.0], [-2.0, math.log(3)]]))
    torch.testing.assert_close(outputs, torch.tensor([[1.0, 1.0], [-2.0, 3.0]]))


def test_regions_are_where_the_data_are_and_are_not():
    x = two_clusters.grid().flatten()
    found = two_clusters.regions(x.abs())
    assert found["sd beyond"] == pytest.approx(1.5, abs=1e-2)
    # Two intervals, of means 0.85 and 0.75, the second of 5 / 8 of the length.
    assert found["sd at data"] == pytest.approx(0.85 * 3 / 8 + 0.75 * 5 / 8, abs=1e-2)
    assert found["sd in the middle"] < found["sd between"] < 0.4
    x, y = two_clusters.draw(1_000)
    noise = y - two_clusters.truth(x)
    # six standard errors of a standard deviation from 2,000 points
    assert noise.std().item() == pytest.approx(0.1, abs=6 * 0.1 / math.sqrt(4_000))
    assert bool((((x >= -1) & (x <= -0.7)) | ((x >= 0.5) & (x <= 1))).all())
