"""experiments/prior_precision.py: cells, which precision is chosen, and histograms."""

import math

import prior_precision
import torch


def test_prior_precision(smoke):
    found = smoke(prior_precision.experiment)
    assert list(found.cells) == [("digits", "cnn", precision, "0") for precision in ("1", "10")]
    for cell in found.cells.values():
        assert list(cell["rows"]) == list(prior_precision.ROWS)
        for name, row in cell["rows"].items():
            assert all(math.isfinite(value) and value >= 0 for value in row.values())
            known, unknown = cell["entropies, known and unknown"][name]
            assert sum(known) == sum(unknown) == 50
            assert len(known) == prior_precision.BINS
    assert found.page.startswith("**digits 0 to 7, CNN**, NLL by prior precision:")
    names = {path.name for path in found.record.path.parent.iterdir()}
    assert {"prior_precision.png", "prior_precision_digits_cnn.png"} < names


def test_validation_images_choose_and_test_images_do_not():
    def cell(validation, test):
        return {"rows": {"MAP": {"validation NLL": validation, "NLL": test}}}

    found = {0.1: [cell(0.4, 0.1), cell(0.5, 0.1)], 1.0: [cell(0.3, 0.9), cell(0.5, 0.9)]}
    assert prior_precision.chosen(found, "MAP") == 1.0


def test_no_entropy_is_out_of_the_bins():
    ends = torch.tensor([0.0, math.log(10)])
    counts = prior_precision.of_bins(ends)
    assert counts[0] == counts[-1] == 1
    assert counts.sum() == 2
