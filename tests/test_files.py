"""Files that are whole or not there, and values as bytes in tensors."""

import errno
import hashlib
import io
import os
import resource
import socket
import stat
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    for mmap in (False, True):
        assert torch.load(path, weights_only=True, mmap=mmap) == {"other": 1}
    assert [one.name for one in path.parent.iterdir()] == ["file"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def flipped(data: bytes, position: int) -> bytes:
    found = bytearray(data)
    found[position] ^= 4
    return bytes(found)


@pytest.mark.parametrize(
    ("damage", "place"),
    [
        *((flipped, position) for position in (0, 5, 12, 18, 30, 60, 200, -1)),
        *((lambda data, end: data[:end], end) for end in (0, 3, 12, 40, 52, 100, -1)),
    ],
)
def test_a_damaged_file_is_an_error(damage: Any, place: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write(path, CONTENT)
    path.write_bytes(damage(path.read_bytes(), place))
    with pytest.raises(ValueError, match=r"file is (no file of tyxe, or )?damaged"):
        files.read(path)


def sealed(payload: bytes, magic: bytes = b"tyxe file 1\n") -> bytes:
    """Return a file with a content that `write` would not write."""
    size = len(payload).to_bytes(8, "little")
    return magic + size + hashlib.sha256(payload).digest() + payload


def saved(content: object) -> bytes:
    torch.save(content, memory := io.BytesIO())
    return memory.getvalue()


def deflated(payload: bytes) -> bytes:
    records, memory = zipfile.ZipFile(io.BytesIO(payload)), io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as smaller:
        for record in records.infolist():
            smaller.writestr(record.filename, records.read(record))
    return memory.getvalue()


FOREIGN = {
    "code": lambda: saved({"thread": threading.Thread}),
    "an expanded tensor": lambda: saved({"a": torch.zeros(1).expand(3 * 10**9)}),
    "overlapping rows": lambda: saved([torch.zeros(40_000).as_strided((20_000, 20_000), (1, 1))]),
    "zeros without a place": lambda: saved({"a": [torch.zeros(10**9, device="meta")]}),
    "records that unpack": lambda: deflated(saved({"a": torch.zeros(10**7)})),
    "an archive of others": lambda: deflated(saved({}))[:-60],
    "text": lambda: b"accuracy: .9",
    "nothing": lambda: b"",
}


@pytest.mark.parametrize("what", FOREIGN)
def test_what_was_not_written_is_refused_before_it_takes_memory(what: str, tmp_path: Path) -> None:
    path, payload = tmp_path / "file", FOREIGN[what]()
    path.write_bytes(sealed(payload))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="has other things in it than what tyxe writes") as caught:
        files.read(path)
    assert "weights_only" not in str(caught.value)
    assert caught.value.__suppress_context__
    if payload.startswith(b"PK"):
        entry = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="an entry of the state dict is damaged") as entrys:
            files.of_bytes(entry)
        assert "weights_only" not in str(entrys.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_no_more_is_read_than_the_start_of_another_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(2**43)  # of holes
    with pytest.raises(ValueError, match="no file of tyxe, or damaged"):
        files.read(path)
    for start in (sealed(b"")[:-32], b"tyxe file 1\n" + bytes([255]) * 40):
        with path.open("r+b") as file:
            file.write(start)
        with pytest.raises(ValueError, match="it is not what was written; take an earlier"):
            files.read(path)


@pytest.mark.parametrize("number", [2, 9, 10, 123])
def test_a_newer_format_says_so(number: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(sealed(b"PK", b"tyxe file %d\n" % number))
    with pytest.raises(ValueError, match=rf"by a newer version \(format {number}\).*update tyxe"):
        files.read(path)


def test_expanded_tensors_are_written_in_full(tmp_path: Path) -> None:
    path, row = tmp_path / "file", torch.arange(3.0)
    files.write(path, {"rows": [row.expand(4, 3)]})
    found = files.read(path)["rows"][0]
    assert torch.equal(found, row.expand(4, 3))
    assert found.is_contiguous()
    assert torch.equal(files.of_bytes(files.as_bytes({"a": row.expand(4, 3)}))["a"], found)


# --- what is at the place already -----------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o604, 0o444])
def test_the_mode_of_an_earlier_file_is_kept_also_while_it_is_written(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, modes, fsync = tmp_path / "file", [], os.fsync

    def look(descriptor: int) -> None:
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        fsync(descriptor)

    files.write(path, CONTENT)
    path.chmod(mode)
    monkeypatch.setattr(os, "fsync", look)
    files.write(path, {"other": 1})
    assert modes[0] == stat.S_IMODE(path.stat().st_mode) == mode
    assert files.read(path) == {"other": 1}


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="files of others are root's")
@pytest.mark.parametrize("is_refused", [False, True])
def test_the_owner_of_an_earlier_file_is_kept_where_that_may_be(
    is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    path = tmp_path / "file"
    files.write(path, CONTENT)
    os.chown(path, 1234, 5678)
    if is_refused:
        monkeypatch.setattr(os, "chown", refuses)
    files.write(path, {"other": 1})
    assert files.read(path) == {"other": 1}
    assert is_refused or (path.stat().st_uid, path.stat().st_gid) == (1234, 5678)


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("relative", [True, False])
def test_a_link_stays_and_its_target_is_written(
    exists: bool, relative: bool, tmp_path: Path
) -> None:
    (tmp_path / "of links").mkdir()
    target, link, first = tmp_path / "target", tmp_path / "of links" / "a", tmp_path / "first"
    link.symlink_to(Path("..") / "target" if relative else target)
    first.symlink_to(link)
    if exists:
        files.write(target, {"other": 1})
        target.chmod(0o600)
    files.write(first, CONTENT)
    assert first.is_symlink()
    assert link.is_symlink()
    assert not target.is_symlink()
    assert_is_content(files.read(target))
    assert not exists or stat.S_IMODE(target.stat().st_mode) == 0o600


def test_links_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        files.write(tmp_path / "a", CONTENT)


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def a_device(path: Path) -> None:
    path.symlink_to("/dev/null")


@pytest.mark.skipif(os.name == "nt", reason="there are none of these")
@pytest.mark.parametrize("make", [a_pipe, a_socket, a_device, Path.mkdir])
def test_what_is_no_file_is_neither_replaced_nor_read(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    path = Path("it")
    make(path)
    before = path.lstat()
    for call in (lambda: files.write(path, CONTENT), lambda: files.read(path)):
        with pytest.raises(OSError, match="it is a folder, a device, a pipe or the like; name a"):
            call()
    assert path.lstat() == before
    assert os.listdir() == ["it"]


@pytest.mark.parametrize("name", ["n" * 255, "ä" * 127, "n" * 200])
def test_names_are_as_long_as_the_system_takes(name: str, tmp_path: Path) -> None:
    for _ in range(2):
        files.write(tmp_path / name, CONTENT)
    assert_is_content(files.read(tmp_path / name))
    assert os.listdir(tmp_path) == [name]
    with pytest.raises(OSError, match="name too long"):
        files.write(tmp_path / ("n" * 256), CONTENT)
    assert os.listdir(tmp_path) == [name]


def test_a_folder_that_cannot_be_read_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuses(path: Path, flags: int, *args: int, **options: int) -> int:
        if Path(path) == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuses)
    files.write(tmp_path / "file", CONTENT)
    monkeypatch.undo()
    assert_is_content(files.read(tmp_path / "file"))


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


@pytest.mark.parametrize("junk", ["a string", torch.ones(3), torch.zeros(0), None])
def test_other_bytes_are_refused(junk: object) -> None:
    with pytest.raises(RuntimeError, match="an entry of the state dict is damaged"):
        files.of_bytes(junk)


def test_a_file_with_its_seal_first_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(sealed(saved({"a": 1})))
    assert files.read(path) == {"a": 1}
