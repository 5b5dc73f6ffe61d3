"""experiments/planetoid.py: the known graph is written, and what is damaged or hostile is not."""

import collections
import io
import pickle
from pathlib import Path

import common
import numpy as np
import planetoid
import pytest

sparse = pytest.importorskip("scipy.sparse", reason="Planetoid's matrices are SciPy's")


def files_of(arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    """Return files in Planetoid's layout: test nodes in an order of their own, labels one-hot."""
    test = np.random.default_rng(0).permutation(arrays["test_mask"].nonzero()[0])
    features, labels = arrays["features"].copy(), np.eye(7, dtype=np.int32)[arrays["labels"]]
    first = len(features) - len(test)
    graph = collections.defaultdict(list, {i: [i, i] for i in range(len(features))})
    for i, j in arrays["edge_index"].T.tolist():
        graph[i].append(j)
    found = {
        "allx": sparse.csr_matrix(features[:first]),
        "ally": labels[:first],
        "graph": graph,
        # Row k of tx and ty is node test[k].
        "tx": sparse.csr_matrix(features[test]),
        "ty": labels[test],
    }
    content = {part: pickle.dumps(value, protocol=4) for part, value in found.items()}
    return content | {"test.index": "\n".join(map(str, test)).encode()}


@pytest.fixture
def small() -> dict[str, np.ndarray]:
    """Return a graph of 700 nodes, of which the last 40 are for testing."""
    rng, count = np.random.default_rng(1), 700
    places, pairs = np.arange(count), rng.integers(0, count, (2, 900))
    pairs = pairs[:, pairs[0] != pairs[1]]
    codes = np.unique(np.concatenate([pairs[0] * count + pairs[1], pairs[1] * count + pairs[0]]))
    return {
        "features": (rng.random((count, 12)) < 0.2).astype(np.float32),
        "labels": rng.integers(0, 7, count),
        "edge_index": np.stack(np.divmod(codes, count)),
        "train_mask": places < 140,
        "val_mask": (places >= 140) & (places < 640),
        "test_mask": places >= 660,
    }


@pytest.fixture
def served(small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Return the files that the address has, and let the small graph be the known one."""
    files = files_of(small)

    def urlopen(address: str, timeout: float) -> io.BytesIO:
        return io.BytesIO(files[address.removeprefix(planetoid.ADDRESS)])

    monkeypatch.setattr(planetoid.urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(planetoid, "DIGEST", planetoid.digest(small))
    monkeypatch.setattr(common, "ROOT", tmp_path)
    return files


def test_the_known_graph_is_written(served, small, tmp_path: Path):
    assert planetoid.download() == tmp_path / "data" / "cora.npz"
    with np.load(tmp_path / "data" / "cora.npz") as found:
        assert set(found) == set(small)
        for name, array in small.items():
            np.testing.assert_array_equal(found[name], array)


def test_the_digest_is_that_of_cora():
    if (path := common.find("cora.npz")) is None:
        pytest.skip(common.looked("cora.npz"))
    with np.load(path) as arrays:
        cora = dict(arrays)
    assert planetoid.digest(cora) == planetoid.DIGEST
    assert planetoid.digest(planetoid.assembled(files_of(cora))) == planetoid.DIGEST


def test_other_files_are_refused(served, small, tmp_path: Path):
    whole, other = dict(served), {**small, "features": small["features"].copy()}
    other["features"][3, 4] = 1 - other["features"][3, 4]
    beyond = sparse.csr_matrix(np.eye(3, dtype=np.float32))
    beyond.indices[1] = 10**6
    changes = [
        *(({part: whole[part][:-99]}, "is damaged|another graph") for part in planetoid.PARTS),
        (files_of(other), r"hold another graph: its SHA-256 is [0-9a-f]{64}, not"),
        ({"tx": pickle.dumps(beyond, protocol=4)}, "is damaged"),
    ]
    for change, message in changes:
        served.update(whole | change)
        with pytest.raises(ValueError, match=message):
            planetoid.download()
    assert not (tmp_path / "data").exists()


class Hostile:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_no_code_of_a_file_runs(served, tmp_path: Path):
    mark = tmp_path / "ran"
    served["graph"] = pickle.dumps(Hostile(mark), protocol=4)
    pickle.loads(served["graph"])  # to see that it would
    mark.unlink()
    with pytest.raises(ValueError, match="is no part of a graph"):
        planetoid.download()
    assert not mark.exists()
