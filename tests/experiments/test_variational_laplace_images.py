"""experiments/variational_laplace_images.py and fixed_variance.py: cells, choices, nets, steps."""

import fixed_variance
import pytest
import torch
import variational_laplace_images as images


def test_classifiers_run_once_and_report(smoke):
    found = smoke(images.experiment)
    # Two betas of three methods; two more multipliers of VL and VI; the best betas again.
    assert len(found.cells) >= 2 * 3 + 2 * 2 + 3
    assert {key[0] for key in found.cells} == {"digits"}
    assert {key[3] for key in found.cells} == {"1", "10"}
    assert {key[4] for key in found.cells} == {"0", "1"}
    for key, cell in found.cells.items():
        assert set(cell["scores"]) == ({"mean"} if key[1] == "MAP" else {"mean", "draws"})
        assert len(cell["ELBO by epoch"]) == found.content["settings"]["small"]["epochs"]
    names = {path.name for path in found.record.path.parent.iterdir()}
    stem = "variational_laplace_images"
    assert names == {
        f"{stem}{e}" for e in (".json", ".md", "_early_stopping.md", "_early_stopping.png")
    }


def test_best_beta_is_that_of_the_first_seed_s_validation():
    cells = {}
    for beta, first, second in ((1.0, 0.5, 0.1), (0.1, 0.4, 0.3), (0.01, 0.6, 0.2)):
        for seed, value in ((3, first), (4, second)):
            row = {"scores": {"mean": {"validation NLL": value}}}
            cells["digits", "VL", f"{beta:g}", "10", str(seed)] = row
        other = {"scores": {"mean": {"validation NLL": 0.0}}}
        cells["digits", "VL", f"{beta:g}", "30", "3"] = other
        cells["mnist", "VL", f"{beta:g}", "10", "3"] = other
    found = images.jobs(cells, "digits")
    assert ("VL", 0.01, 30.0, 3) in found
    assert images.best_beta(found, "VL", "mean") == 0.1


def test_other_seeds_run_at_the_best_beta_only():
    row = {"scores": {way: {"validation NLL": 0.5} for way in ("mean", "draws")}}
    s = images.experiment.at(sets=["mnist"], betas=[1.0, 0.1], seeds=[0, 1], multipliers=[10.0])
    found, keys = {}, []
    for key, _ in images.cells(s, found):
        keys.append(key)
        found["mnist", key[1], f"{key[2]:g}", f"{key[3]:g}", str(key[4])] = row
    assert len([key for key in keys if key[4] == 0]) == 2 * 3 + 2 * 2
    assert [key[1:3] for key in keys if key[4] == 1] == [("VL", 1.0), ("VI", 1.0), ("MAP", 1.0)]


# --- one fixed variance -------------------------------------------------------------------------


def test_fixed_variance(smoke):
    found = smoke(fixed_variance.experiment)
    # Two methods at two standard deviations and MAP, for each batch size.
    assert len(found.cells) == 2 * (2 * 2 + 1)
    assert {cell["steps"] for cell in found.cells.values()} == {16}
    for (name, _, method, sd, _), cell in found.cells.items():
        assert name == "digits"
        assert (sd == "0") == (method == "MAP")
        assert set(cell["scores"]) == ({"mean"} if method == "MAP" else {"mean", "draws"})
    assert found.page.count("**digits**, batches of") == 2


@pytest.mark.parametrize("method", ["VL", "VI"])
def test_every_weight_keeps_the_standard_deviation(method, monkeypatch):
    s, seen = fixed_variance.experiment.at("smoke"), []
    scores = fixed_variance.images.scores

    def look(bnn, *how):
        seen.extend(d.base_dist.scale for d in bnn.net_guide.get_detached_distributions().values())
        return scores(bnn, *how)

    monkeypatch.setattr(fixed_variance.images, "scores", look)
    fixed_variance.run(s, "digits", 32, method, 0.1, 0)
    assert len(seen) == 2 * 8
    for scale in seen:
        torch.testing.assert_close(scale, torch.full_like(scale, 0.1))


def test_no_image_is_of_two_parts():
    s = fixed_variance.experiment.at("smoke")
    (train, _), (validation, _), (test, _), other = fixed_variance.load(s, "digits")
    assert [len(part) for part in (train, validation, test, other)] == [64, 32, 32, 32]
    assert not (train.flatten(1)[:, None] == validation.flatten(1)).all(-1).any()


def test_a_step_may_average_several_draws(monkeypatch):
    seen, fit = [], fixed_variance.tyxe.VariationalBNN.fit

    def look(self, *how, **options):
        seen.append(options["num_particles"])
        return fit(self, *how, **options)

    monkeypatch.setattr(fixed_variance.tyxe.VariationalBNN, "fit", look)
    for method in ("VI", "VI8", "VL"):
        fixed_variance.run(fixed_variance.experiment.at("smoke"), "digits", 32, method, 0.1, 0)
    assert seen == [1, 8, 1]
