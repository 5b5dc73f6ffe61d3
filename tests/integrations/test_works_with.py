"""docs/works_with.json says what works with what: each cell is tried anew."""

import importlib.util
import json
import os

import pytest

from tests.integrations.works_with import COLUMNS, DOCS, ROWS, row, table

os.environ.setdefault("HF_HUB_OFFLINE", "1")
RECORD = json.loads((DOCS / "works_with.json").read_text())


def test_the_record_has_every_cell():
    assert [*RECORD] == [*ROWS]
    assert all([*cells] == [*COLUMNS] for cells in RECORD.values())
    assert table(RECORD).count("\n| ") == len(ROWS) + 1


@pytest.mark.parametrize("name", ROWS)
def test_every_cell_is_as_recorded(name):
    missing = [package for package in ROWS[name][1] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed: it is of an extra")
    assert row(name) == RECORD[name]
