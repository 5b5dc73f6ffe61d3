"""experiments/large_graph.py: its graph, what is measured, and its table."""

import large_graph
import pytest
import torch
from large_graph import block_model, experiment


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


def test_a_peak_is_that_of_the_function():
    megabytes = 200
    result, peak = large_graph.peak_above(lambda: torch.ones(megabytes * 2**18).sum().item())
    assert result == megabytes * 2**18
    if peak is None:
        pytest.skip("no /proc/self/clear_refs")
    # Linux counts pages in batches.
    assert 0.99 * megabytes <= peak < megabytes + 50
    assert large_graph.peak_above(lambda: None)[1] < 50
