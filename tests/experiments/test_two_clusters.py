"""experiments/two_clusters.py and transformer.py."""

import math

import pytest
import torch
import transformer
import two_clusters


# Chains as short as these get advice.
@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_regression(smoke):
    found = smoke(two_clusters.experiments["regression"], before=("regression",))
    (cell,) = found.cells.values()
    titles = ["(a) mean field, inside the handler", "(b) mean field, outside", "(c) NUTS"]
    assert list(cell["rows"]) == list(cell["curves"]) == titles
    for title, row in cell["rows"].items():
        # the noise, 0.1, is in every predictive standard deviation (float32, so not exactly)
        assert all(value > 0.0999 for value in row.values())
        assert f"| {title} | {row['sd at data']:.3f} | {row['sd between']:.3f} |" in found.page
        assert len(cell["curves"][title]["sd"]) == 401
    assert 0 <= cell["chain"]["acceptance"] <= 1
    assert len(cell["chain"]["r_hat"]) == 5
    assert found.content["settings"]["nuts samples"] == 4


def test_variational_laplace(smoke):
    name = "variational_laplace"
    found = smoke(two_clusters.experiments[name], before=(name,))
    (cell,) = found.cells.values()
    kinds, betas = ("Laplace", "inference"), ("1", "0.1", "0.01")
    assert list(cell["rows"]) == [f"variational {k}, beta {beta}" for beta in betas for k in kinds]
    assert all(math.isfinite(value) for row in cell["rows"].values() for value in row.values())
    assert found.page.splitlines()[-1].startswith(
        f"`python experiments/run.py two_clusters {name} --"
    )


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


def test_transformer(smoke):
    found = smoke(transformer.experiment)
    names = ["head", "attention", "linear maps"]
    rows = ["ML", "MAP", *(f"{how}, {name}" for how in ("mean field", "Laplace") for name in names)]
    (cell,) = found.cells.values()
    assert list(cell["rows"]) == rows
    grid = found.content["settings"]["prior precisions"]
    assert list(cell["prior precision"]) == rows[5:]
    assert all(precision in grid for precision in cell["prior precision"].values())
    for name, row in cell["rows"].items():
        assert all(math.isfinite(value) and value >= 0 for value in row.values())
        assert max(row["AUROC turned"], row["AUROC rows shuffled"]) <= 1
        cells = f"{row['accuracy %']:.2f} | {row['NLL']:.3f} | {row['ECE %']:.2f}"
        assert f"| {name} | {cells} |" in found.page
    assert torch.get_default_dtype() == torch.float32
