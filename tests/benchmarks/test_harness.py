"""Ratios are taken within rounds, and tables show what was found."""

import time

from tests.benchmarks.helpers import Helper


def test_ratios_and_differences_are_taken_within_rounds(helper: Helper) -> None:
    seconds, harness = {"plain": [1.0, 10.0, 2.0], "ours": [2.0, 30.0, 8.0]}, helper("_harness")
    ratio = harness.ratio(seconds, "ours", "plain")
    assert ratio == {"median": 3.0, "q1": 2.5, "q3": 3.5}
    difference = harness.difference(seconds, "ours", "plain")
    assert difference == {"median": 6.0, "q1": 3.5, "q3": 13.0}


def test_a_case_has_its_own_quantity_references_and_findings(helper: Helper) -> None:
    harness = helper("_harness")
    values = {"small": 2.0, "large": 6.0}
    apples = harness.Quantity("apples", "kA", 1e-3, lambda contestant, _: values[contestant.name])
    contestants = [
        harness.Contestant("small", lambda: None, "plain", facts={"trees": 3.0}),
        harness.Contestant("large", lambda: None, "ours", plain="large"),
    ]
    case = harness.Case(
        "case",
        "Title",
        "day",
        2,
        contestants,
        quantity=apples,
        findings=lambda numbers: {"sum": sum(map(sum, numbers.values()))},
    )
    results = harness.measured(case, 2, time.perf_counter)
    small, large = results["contestants"]
    assert small["apples"]["median"] == 2.0
    assert small["facts"] == {"trees": 3.0}
    assert large["to_plain"]["median"] == 1.0
    assert results["findings"] == {"sum": 16.0}
    lines = helper("_tables").table(results).splitlines()
    assert lines[2] == "| contestant | kA per day | ratio to its reference | trees |"
    assert lines[4] == "| small | 0.00200 (0.00200 to 0.00200) |  | 3.00 |"
    assert lines[-1] == "- sum: 16.0"
