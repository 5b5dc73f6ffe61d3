"""experiments/evidence.py: every set at a small size; the adapters' problem."""

import math

import evidence
import pytest
import torch

S = evidence.Settings.at("smoke")
LORA = [*evidence.SHARES]
# Of transformers 5, in a property that peft reads.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")


@pytest.mark.parametrize("names", [["digits"], ["fashion"], ["cora"], ["energy"], LORA])
def test_every_row_of_every_set(names, smoke, every_set):
    if names == LORA:
        pytest.importorskip("peft", reason="it is of the extra 'huggingface'")
        pytest.importorskip("transformers", reason="it is of the extra 'huggingface'")
    found = smoke(evidence.experiment, "--data", *names)
    for name in names:
        rows = found.cells[name, "0"]["rows"]
        assert len(rows) == {"digits": 8, "fashion": 3, "cora": 3}.get(name, 4)
        for how, row in rows.items():
            assert math.isfinite(row["NLL"])
            assert how == "MAP" or row["precision"] > 0
            assert ("gamma / N" in row) == ("evidence" in how)
            assert ("warned" in row) == (how.endswith((", evidence", "held out")))
        assert ("1 - sum p^2" in rows["MAP"]) == (name != "energy")
    assert found.page.count("uncertainty of the training data") == len({*names} - {"energy"})


def test_adapters_are_what_is_trained():
    pytest.importorskip("peft", reason="it is of the extra 'huggingface'")
    pytest.importorskip("transformers", reason="it is of the extra 'huggingface'")
    p = evidence.adapted(S, "lora", 0)
    first, second = p.make_net(), p.make_net()
    bnn = evidence.tyxe.LaplaceBNN(first, evidence.common.normal(**p.rules), p.likelihood)
    sites = [*bnn.in_places()]
    assert len(sites) == 2 * 2 * 2  # layers, maps, factors
    assert all("lora_" in name for name in sites)
    body = {n: w for n, w in first.named_parameters() if "lora_" not in n and "classif" not in n}
    other = dict(second.named_parameters())
    assert all(torch.equal(w, other[name]) for name, w in body.items())
