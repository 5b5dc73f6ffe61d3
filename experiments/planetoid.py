"""Download Cora with Planetoid's split, check it, and write data/cora.npz.

    python experiments/planetoid.py

Planetoid's files are pickles, which may run code when they are read. Here they may only build
arrays, sparse matrices and lists, and the graph that comes out must be the known one: the SHA-256
of what it holds is compared before the file is written.
"""

import collections
import copyreg
import hashlib
import io
import pickle
import sys
import urllib.request

import common
import numpy as np

ADDRESS = "https://github.com/kimiyoung/planetoid/raw/master/data/ind.cora."
PARTS = ("allx", "tx", "ally", "ty", "graph", "test.index")
LABELLED, VALIDATION = 140, 500
DIGEST = "d544f8e9476b7ba6d29393ebc6df4a8335081fbd0b62e9cb11045cb86aa19a80"


class Unpickler(pickle.Unpickler):
    """Builds arrays, sparse matrices and lists, and refuses everything else."""

    def find_class(self, module, name):
        from scipy.sparse import csr_matrix

        known = {
            "_reconstruct": np.empty(0).__reduce__()[0],
            "_reconstructor": copyreg._reconstructor,
            "csr_matrix": csr_matrix,
            "defaultdict": collections.defaultdict,
            "dtype": np.dtype,
            "list": list,
            "ndarray": np.ndarray,
            "object": object,
        }
        if name not in known:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a graph")
        return known[name]


def read(content, part):
    """Return the array of a file, or of `graph` the edges that it lists, `(2, E)`."""
    if part == "test.index":
        return np.array(content.split(), dtype=np.int64)
    found = Unpickler(io.BytesIO(content), encoding="latin1").load()
    if part == "graph":
        return np.array([(i, j) for i, others in found.items() for j in others], np.int64).T
    if hasattr(found, "toarray"):
        found.check_format(full_check=True)  # before indices of the file become addresses
        found = found.toarray()
    return np.asarray(found)


def assembled(files):
    """Return the arrays of cora.npz: edges both ways, each once, and none to its own node."""
    found = {part: read(files[part], part) for part in PARTS}
    test, count = found["test.index"], len(found["allx"]) + len(found["tx"])
    features = np.concatenate([found["allx"], found["tx"]]).astype(np.float32)
    labels = np.concatenate([found["ally"], found["ty"]]).argmax(1)
    # Rows of the test nodes stand in the order of their list.
    features[test], labels[test] = features[np.sort(test)], labels[np.sort(test)]
    source, target = found["graph"]
    both = np.concatenate([source * count + target, target * count + source])
    edges = np.stack(np.divmod(np.unique(both), count))
    places = np.arange(count)
    return {
        "features": features,
        "labels": labels.astype(np.int64),
        "edge_index": edges[:, edges[0] != edges[1]],
        "train_mask": places < LABELLED,
        "val_mask": (places >= LABELLED) & (places < LABELLED + VALIDATION),
        "test_mask": np.isin(places, test),
    }


def digest(arrays):
    """Return the SHA-256 of names, shapes and contents."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name].astype({"f": "<f4", "i": "<i8", "b": "?"}[arrays[name].dtype.kind])
        found.update(f"{name} {array.shape} {array.dtype.str}".encode() + array.tobytes())
    return found.hexdigest()


def fetched():
    files = {}
    for part in PARTS:
        with urllib.request.urlopen(ADDRESS + part, timeout=60) as answer:
            files[part] = answer.read()
    return files


def download():
    """Return the path of data/cora.npz, made anew.

    Raises:
        OSError: there is no network.
        ValueError: what came is not Cora.
    """
    files = fetched()
    try:
        arrays = assembled(files)
    except Exception as error:  # whatever a damaged file makes of arrays
        raise ValueError(f"a file of {ADDRESS}* is damaged: {error!r}") from error
    if (found := digest(arrays)) != DIGEST:
        raise ValueError(f"{ADDRESS}* hold another graph: its SHA-256 is {found}, not {DIGEST}")
    path = common.ROOT / "data" / "cora.npz"
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, **arrays)
    return path


if __name__ == "__main__":
    try:
        print(f"wrote {download()}")
    except (OSError, ValueError) as error:
        sys.exit(f"could not download Cora: {error}")
