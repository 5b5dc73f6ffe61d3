"""experiments/large_graph.py: its graph, what is measured, and its table."""

import large_graph
import pytest
import torch
from large_graph import block_model, experiment


def test_smoke(smoke):
    found = smoke(large_graph.experiment, "--backend", "torch")
    ways = "sampled", "whole graph"
    assert {*found.cells} == {(m, w, "torch", "0") for w in ways for m in large_graph.METHODS}
    for (_, way, *_), cell in found.cells.items():
        # A peak that was not measured would be absent; it is never below what was there.
        assert cell["peak MB"] >= 0
        assert ("NLL" in cell) == (way == "sampled")
    assert "| plain net | sampled | torch | 1 |" in found.page
    assert "| mean field, local reparam. | whole graph | torch | 1 |  |  |  |" in found.page


def test_block_model_has_the_degrees_it_is_asked_for():
    s = experiment.at(nodes=20_000, labelled=2_000, inside=6.0, outside=3.0)
    graph = block_model(s, 0)
    source, target = graph.edges.source, graph.edges.target
    own = source == target
    assert int(own.sum()) == s.nodes
    # both ways, and each once
    codes = source * s.nodes + target
    assert len(codes.unique()) == len(codes)
    assert torch.equal((target * s.nodes + source).sort()[0], codes.sort()[0])
    is_inside = (graph.labels[source] == graph.labels[target]) & ~own
    inside, outside = int(is_inside.sum()), int((~is_inside & ~own).sum())
    # Drawn were 3 and 1.5 a node, less those that fall together or on their own node: of n draws
    # among m places n^2 / 2m are lost at most to the former, and n / 2,000 to the latter.
    assert inside == pytest.approx(6 * s.nodes, rel=4e-3)
    assert outside == pytest.approx(3 * s.nodes, rel=1e-3)
    assert int(graph.masks["train"].sum()) == int(graph.masks["test"].sum()) == s.labelled
    assert not bool((graph.masks["train"] & graph.masks["test"]).any())


def test_features_tell_classes_in_part():
    s = experiment.at(nodes=10_000, labelled=1_000)
    graph = block_model(s, 0)
    train, test = (graph.features[graph.masks[name]] for name in ("train", "test"))
    of_train, of_test = (graph.labels[graph.masks[name]] for name in ("train", "test"))
    centres = torch.stack([train[of_train == k].mean(0) for k in range(s.classes)])
    accuracy = (torch.cdist(test, centres).argmin(1) == of_test).float().mean()
    assert 0.3 < accuracy < 0.8  # by chance 0.1; the graph has the rest


def test_a_peak_is_that_of_the_function():
    megabytes = 200
    result, peak = large_graph.peak_above(lambda: torch.ones(megabytes * 2**18).sum().item())
    assert result == megabytes * 2**18
    if peak is None:
        pytest.skip("no /proc/self/clear_refs")
    # Linux counts pages in batches.
    assert 0.99 * megabytes <= peak < megabytes + 50
    assert large_graph.peak_above(lambda: None)[1] < 50
