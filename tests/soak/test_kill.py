"""A slice of kills, full disks and interrupts, and that the suite finds what it looks for."""

import hashlib
import io
import signal
from pathlib import Path

import pytest
import torch

import tyxe
from tests.soak import interrupts, kill, subjects
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


def test_interrupts_leave_nothing_behind() -> None:
    found = interrupts.run(count=60, seed=2)
    assert found["interrupts"] == 60
    assert found["left behind"] == 0, found


LEAKS = {
    "gradients": lambda bnn: torch.set_grad_enabled(False),
    "modes": lambda bnn: bnn.net.train(not bnn.net.training),
    "the prediction": lambda bnn: next(bnn.net_guide.parameters()).data.add_(1.0),
    "handler of SIGINT": lambda bnn: signal.signal(signal.SIGINT, lambda *_: None),
}


@pytest.mark.parametrize("what", LEAKS)
def test_what_is_left_behind_is_found_out(what: str, tmp_path: Path) -> None:
    one = subjects.subject("VariationalBNN", tmp_path)
    before = interrupts._Before(one)
    assert before.changed("predict") == []
    before = interrupts._Before(one)
    LEAKS[what](one.bnn)
    try:
        assert what in before.changed("predict")
    finally:
        before.restore()
