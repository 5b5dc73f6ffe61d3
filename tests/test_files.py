"""Files that are whole or not there, and values packed into tensors."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from tyxe import files

CONTENT = {"numbers": torch.arange(300.0), "name": "a", "list": [1, (2.5, None)]}


def assert_is_content(found: object) -> None:
    assert isinstance(found, dict)
    assert torch.equal(found.pop("numbers"), CONTENT["numbers"])
    assert found == {"name": "a", "list": [1, (2.5, None)]}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    files.write(path, CONTENT)
    assert_is_content(files.read(path))
    files.write(str(path), {"other": 1})
    assert files.read(str(path)) == {"other": 1}
    assert [one.name for one in path.parent.iterdir()] == ["file"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("folder", [".", "new"])
def test_a_folder_is_no_file(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(folder).mkdir(exist_ok=True)
    with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
        files.write(folder, CONTENT)


@pytest.mark.parametrize("position", [0, 5, 12, 18, 30, 60, 200, -1])
def test_a_flipped_bit_is_an_error(position: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write(path, CONTENT)
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"file is (no file of tyxe, or )?damaged"):
        files.read(path)


@pytest.mark.parametrize("length", [0, 3, 12, 40, 52, 100, -1])
def test_a_file_that_was_cut_is_an_error(length: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write(path, CONTENT)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match="damaged"):
        files.read(path)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write(path, {"thread": threading.Thread})
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        files.read(path)


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_full_disk_leaves_the_last_file(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    files.write(path, CONTENT)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if fails == "fsync" else (Path, "replace")), full)
    with pytest.raises(OSError, match="No space left"):
        files.write(path, {"other": 1})
    monkeypatch.undo()
    assert_is_content(files.read(path))
    assert len(list(tmp_path.iterdir())) == 1


def test_several_writers_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [{"numbers": torch.full((10_000,), float(i))} for i in range(8)]
    threads = [threading.Thread(target=files.write, args=(path, one)) for one in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files.read(path)["numbers"].unique().numel() == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("value", ["Normal", 3, {}, {"a": [torch.ones(2), "b", None], "c": 2**60}])
def test_what_is_packed_is_unpacked(value: object) -> None:
    tensor = files.packed(value)
    assert tensor.dtype == torch.uint8
    assert tensor.dim() == 1
    assert str(files.unpacked(tensor)) == str(value)
    assert torch.equal(files.packed(value), tensor)


@pytest.mark.parametrize("junk", ["a string", torch.ones(3), torch.zeros(0), None])
def test_junk_is_not_unpacked(junk: object) -> None:
    with pytest.raises(RuntimeError, match="an entry of the state dict is damaged"):
        files.unpacked(junk)
