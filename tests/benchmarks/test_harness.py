"""Contestants take turns, ratios are taken within rounds, and tables show what was found."""

import subprocess
import sys
import time

import pytest

from tests.benchmarks.helpers import Helper


def test_contestants_take_turns(helper: Helper) -> None:
    harness = helper("_harness")
    calls: list[str] = []
    contestants = [
        harness.Contestant(name, lambda name=name: calls.append(name), "plain") for name in "ABC"
    ]
    seconds = harness.interleaved(contestants, repeats=2)
    assert "".join(calls) == "ABC" * 3
    assert [len(times) for times in seconds.values()] == [2, 2, 2]


def test_ratios_and_differences_are_taken_within_rounds(helper: Helper) -> None:
    seconds, harness = {"plain": [1.0, 10.0, 2.0], "ours": [2.0, 30.0, 8.0]}, helper("_harness")
    ratio = harness.ratio(seconds, "ours", "plain")
    assert ratio == {"median": 3.0, "q1": 2.5, "q3": 3.5}
    difference = harness.difference(seconds, "ours", "plain")
    assert difference == {"median": 6.0, "q1": 3.5, "q3": 13.0}


def test_processor_time_counts_children(helper: Helper) -> None:
    clock = helper("_harness").processor_time
    start, own = clock(), time.process_time()
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert clock() - start - (time.process_time() - own) >= 0.25


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


def test_what_cannot_be_built_is_reported(helper: Helper) -> None:
    harness = helper("_harness")
    good = harness.Contestant("good", lambda: None, "ours")

    def bad() -> None:
        raise ValueError("no such thing\nas this")

    found, errors = harness.buildable({"good": lambda: good, "bad": bad})
    assert found == [good]
    assert errors == {"bad": "fails, ValueError: no such thing as this"}


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (-0.01234, "-0.0123"), (1234.0, "1230")])
def test_numbers_in_tables(helper: Helper, value: float, text: str) -> None:
    assert helper("_tables").number(value) == text
