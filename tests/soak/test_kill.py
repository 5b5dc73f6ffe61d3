"""A slice of kills and full disks, and that the suite finds what it looks for."""

import hashlib
import io
from pathlib import Path

import pytest
import torch

import tyxe
from tests.soak import kill
from tests.soak.kill import Trial, fate_of, full_disk

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")


@pytest.mark.forks
def test_a_killed_training_loses_nothing() -> None:
    found = kill.run(count=8, seed=1)
    assert found["kills"] == 8
    assert found["aimed at writes"] == 4
    assert found["killed while saving"] >= 4
    assert found["full disks"] == 1
    assert found["lost"] == 0


def _in_place(path: Path, content: object) -> None:
    """Write as `tyxe.files.write` does, into the file that is there."""
    torch.save(content, memory := io.BytesIO())
    data = memory.getvalue()
    with path.open("wb") as file:
        file.write(tyxe.files._MAGIC + len(data).to_bytes(8, "little"))
        file.write(hashlib.sha256(data).digest() + data)


@pytest.mark.forks
def test_a_write_in_place_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tyxe.files, "write", _in_place)
    where, fate = fate_of(Trial("VariationalBNN", 3, "bytes", 1, 0.5, 0))
    assert where == "saving"
    assert fate.startswith("lost")
    with pytest.raises(EOFError):
        full_disk(300)  # the child ends, because it cannot read the file
    monkeypatch.undo()
    assert full_disk(300) == []
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    assert full_disk(300) == ["a part of a file is left"]
