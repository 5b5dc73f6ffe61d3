"""Which models work with which inference: docs/works_with.json, and the table of its page.

    python -m tests.integrations.works_with [--rows LSTM BERT] [--device cuda]

fits each model, small and from its library's own classes, for an epoch or a few samples under each
inference, predicts, evaluates, and saves and loads. A cell is "yes" where all of that goes and its
numbers are finite, else the first sentence of the error. With a GPU it is docs/works_with_gpu.json.
"""

import argparse
import functools
import json
import re
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoDelta
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tyxe
from tests.oracles.nets import ReadLast
from tyxe.poutine import flipout, local_reparameterization, variational_laplace

DOCS = Path(__file__).resolve().parents[2] / "docs"
SIZE, CLASSES = 4, 3
ADAM = functools.partial(torch.optim.Adam, lr=1e-3)
SGD = functools.partial(torch.optim.SGD, lr=1e-3)


@dataclass
class Model:
    """A net, its batches, and what tyxe needs to be told."""

    net: nn.Module
    loader: list[Any]
    output: Any = None
    unpack: Callable[[Any], Any] | None = None
    likelihood: Any = field(default_factory=lambda: tyxe.likelihoods.Categorical(SIZE))
    rules: dict[str, Any] = field(default_factory=dict)
    head: nn.Module | None = None
    predictive: str | None = None
    curvature: str = "ggn"

    def prior(self, is_last: bool = False) -> tyxe.priors.Prior:
        rules = self.rules
        if is_last:
            rules = {"expose_modules": [self.head or tyxe.util.last_layer(self.net)]}
        return tyxe.priors.IIDPrior(dist.Normal(0, 1), **rules)

    def arguments(self, **options: Any) -> tuple[Any, ...]:
        return self.net, self.prior(**options), self.likelihood


# --- rows ---------------------------------------------------------------------------------------


def labels() -> Tensor:
    return torch.arange(SIZE) % CLASSES


def halves(inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(inputs.split(2), targets.split(2), strict=True))


def lstm() -> Model:
    return Model(ReadLast(nn.LSTM, 3, 5, CLASSES), halves(torch.randn(SIZE, 6, 3), labels()))


class Encoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(1))


def transformer() -> Model:
    return Model(Encoded(), halves(torch.randn(SIZE, 6, 8), labels()))


def mobile_net() -> Model:
    from torchvision.models import mobilenet_v3_small

    net = mobilenet_v3_small(num_classes=CLASSES)
    # At 32 pixels its last norms would average two numbers, which makes rounding errors large.
    return Model(net, halves(torch.randn(SIZE, 3, 48, 48), labels()))


def lraspp() -> Model:
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    net = lraspp_mobilenet_v3_large(weights_backbone=None, num_classes=CLASSES)
    pixels = torch.arange(SIZE * 32 * 32).reshape(SIZE, 32, 32) % CLASSES
    pixels[:, :4] = 255
    likelihood = tyxe.likelihoods.Categorical(SIZE, class_dim=1, ignore_index=255)
    rules = {"expose_modules": [net.classifier]}
    batches = halves(torch.randn(SIZE, 3, 32, 32), pixels)
    # By draws: a linearised net has a covariance of all of an image's pixels; and for an exact
    # curvature, a backward for each of their classes.
    how = {"predictive": "bnn", "curvature": "fisher", "head": net.classifier.high_classifier}
    return Model(net, batches, "out", likelihood=likelihood, rules=rules, **how)


def box_head() -> Model:
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead

    net = nn.Sequential(TwoMLPHead(8, 16), FastRCNNPredictor(16, CLASSES))
    likelihood = tyxe.likelihoods.Joint(
        kind=tyxe.likelihoods.Categorical(SIZE),
        box=tyxe.likelihoods.HomoskedasticGaussian(SIZE, scale=1.0),
    )
    boxes = torch.randn(SIZE, 4 * CLASSES)
    features = torch.randn(SIZE, 2, 2, 2)
    batches = [
        (x, {"kind": y, "box": b})
        for x, y, b in zip(features.split(2), labels().split(2), boxes.split(2), strict=True)
    ]
    return Model(net, batches, likelihood=likelihood)


def timm_vit() -> Model:
    import timm

    net = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=16,
        patch_size=8,
        embed_dim=12,
        depth=2,
        num_heads=2,
        num_classes=CLASSES,
    )
    return Model(net, halves(torch.randn(SIZE, 3, 16, 16), labels()))


def of_texts(net: nn.Module, **options: Any) -> Model:
    from tests.integrations import texts
    from tyxe.integrations.huggingface import unpack

    data = texts.Sentences(SIZE)
    return Model(net, texts.batches(data, 2), "logits", unpack, **options)


def text_model(name: str) -> Model:
    from tests.integrations import texts

    return of_texts(getattr(texts, name)())


def lora() -> Model:
    import peft

    from tests.integrations import texts

    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    net = peft.get_peft_model(texts.bert(), config)
    head = net.base_model.model.classifier.modules_to_save["default"]
    return of_texts(net, rules={"expose": ["*lora_*"]}, head=head)


def graph() -> Model:
    from torch_geometric.data import Data
    from torch_geometric.nn import GCN

    from tyxe.integrations.pyg import unpack

    edges = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 0, 3, 2, 5, 4]])
    mask = torch.arange(6) < SIZE
    data = Data(x=torch.randn(6, 3), edge_index=edges, y=torch.arange(6) % CLASSES, mask=mask)
    masked = functools.partial(unpack, mask="mask")
    return Model(GCN(3, 8, 2, CLASSES), [data], unpack=masked)


class Ode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        from torchdiffeq import odeint

        times = torch.linspace(0, 1, 3)
        return self.head(odeint(lambda _, state: self.field(state), x, times, method="rk4")[-1])


def ode() -> Model:
    return Model(Ode(), halves(torch.randn(SIZE, 3), labels()))


ROWS: dict[str, tuple[Callable[[], Model], tuple[str, ...]]] = {
    "LSTM": (lstm, ()),
    "TransformerEncoder": (transformer, ()),
    "MobileNetV3 (torchvision)": (mobile_net, ("torchvision",)),
    "LR-ASPP, segmentation (torchvision)": (lraspp, ("torchvision",)),
    "box head of a detector (torchvision)": (box_head, ("torchvision",)),
    "ViT (timm)": (timm_vit, ("timm",)),
    "BERT (transformers)": (functools.partial(text_model, "bert"), ("transformers",)),
    "GPT-2 (transformers)": (functools.partial(text_model, "gpt2"), ("transformers",)),
    "LoRA of BERT (peft)": (lora, ("transformers", "peft")),
    "GCN (PyTorch Geometric)": (graph, ("torch_geometric",)),
    "neural ODE (torchdiffeq)": (ode, ("torchdiffeq",)),
}


# --- columns ------------------------------------------------------------------------------------


def variational(m: Model, handler: Any = nullcontext, guide: Any = None, beta: float = 1.0) -> Any:
    guide = guide or functools.partial(tyxe.guides.AutoNormal, init_scale=1e-3)
    bnn = tyxe.VariationalBNN(*m.arguments(), guide, output=m.output)
    yield bnn
    with handler():
        bnn.fit(m.loader, ADAM, 1, beta=beta, unpack=m.unpack)


def laplace(m: Model, is_last: bool) -> Any:
    bnn = tyxe.LaplaceBNN(*m.arguments(is_last=is_last), curvature=m.curvature, output=m.output)
    yield bnn
    bnn.fit_curvature(m.loader, unpack=m.unpack)


def swag(m: Model) -> Any:
    bnn = tyxe.SWAG_BNN(*m.arguments(), rank=2, output=m.output)
    yield bnn
    bnn.fit(m.loader, SGD, 8, unpack=m.unpack)


def chains(m: Model, kernel: Any, is_last: bool) -> Any:
    bnn = tyxe.MCMC_BNN(*m.arguments(is_last=is_last), kernel, output=m.output)
    yield bnn
    bnn.fit(m.loader, 4, warmup_steps=2, unpack=m.unpack)


def ensemble(m: Model) -> Any:
    def member(_: int) -> Any:
        net, prior, likelihood = m.arguments()
        return tyxe.VariationalBNN(net, prior, likelihood, AutoDelta, output=m.output)

    bnn = tyxe.EnsembleBNN(member, 2)
    yield bnn
    bnn.fit(m.loader, ADAM, 1, unpack=m.unpack)


def dropout(m: Model) -> Any:
    bnn = tyxe.DropoutBNN(m.net, m.likelihood, output=m.output)
    yield bnn
    bnn.fit(m.loader, ADAM, 1, unpack=m.unpack)


NUTS = functools.partial(tyxe.samplers.NUTS, max_tree_depth=2)
# Each yields the BNN as it is made, then fits it.
COLUMNS: dict[str, Callable[[Model], Any]] = {
    "mean field": variational,
    "local reparameterisation": functools.partial(variational, handler=local_reparameterization),
    "flipout": functools.partial(variational, handler=flipout),
    "variational Laplace": functools.partial(variational, handler=variational_laplace),
    "Laplace, last layer": functools.partial(laplace, is_last=True),
    "Laplace, all layers": functools.partial(laplace, is_last=False),
    "SWAG": swag,
    "NUTS, last layer": functools.partial(chains, kernel=NUTS, is_last=True),
    "SGLD": functools.partial(chains, kernel=tyxe.samplers.SGLD(1e-4), is_last=False),
    "ensemble": ensemble,
    "MC dropout": dropout,
}


def is_finite(tree: Any) -> bool:
    return all(bool(leaf.isfinite().all()) for leaf in tree_leaves(tree) if torch.is_tensor(leaf))


def found(m: Model, make: Callable[[Model], Any], device: str) -> str:
    """Return "yes", or the first sentence of the error by which a cell is refused."""
    torch.manual_seed(0)
    try:
        fitting = make(m)
        bnn = next(fitting).to(device)
        for _ in fitting:
            pass
    except (TypeError, ValueError, RuntimeError) as error:
        said = str(error).replace(type(m.net).__name__, "net")
        said = re.sub(r"( \S+ \(\w+\))(, \S+ \(\w+\))+", r"\1 and others", said)
        return f"no: {re.split('[.:;] ', said)[0]}"
    one = predictions(m, bnn)
    assert is_finite(one), "predictions are not finite"
    scores = bnn.evaluate(m.loader, num_predictions=2, unpack=m.unpack, predictive=m.predictive)
    assert is_finite(scores), "scores are not finite"
    with tempfile.TemporaryDirectory() as folder:
        bnn.save(f"{folder}/bnn.pt")
        again = next(make(m)).to(device)
        again.load(f"{folder}/bnn.pt")
    if bnn._averages_norms:  # by a loader, which is not saved
        again.update_norm_statistics(tyxe.data.unpacked(m.loader, m.unpack))
    pairs = zip(tree_leaves(one), tree_leaves(predictions(m, again)), strict=True)
    for first, second in pairs:
        torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-3)
    return "yes"


def predictions(m: Model, bnn: Any) -> Any:
    torch.manual_seed(0)
    return bnn.predict(m.loader, num_predictions=2, unpack=m.unpack, predictive=m.predictive)


def row(name: str, device: str = "cpu") -> dict[str, str]:
    """Return what is found for a model on a device, by inference."""
    cells = {}
    for column, make in COLUMNS.items():
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of fits that are too short to be any good
            cells[column] = found(ROWS[name][0](), make, device)
    return cells


def table(record: dict[str, dict[str, str]], elsewhere: dict[str, Any] | None = None) -> str:
    """Return the record as Markdown, beside that of a GPU, with numbered reasons below."""
    reasons: dict[str, int] = {}

    def shown(cell: str) -> str:
        answer, _, reason = cell.partition(": ")
        number = reasons.setdefault(reason, len(reasons) + 1) if reason else None
        return answer if number is None else f"{answer} ({number})"

    lines = [["", *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
    there = {} if elsewhere is None else elsewhere["rows"]
    for name, cells in record.items():
        line = [name]
        for column in COLUMNS:
            here, other = cells[column], there.get(name, {}).get(column)
            answer = shown(here)
            if other == here == "yes":
                answer = "yes, GPU"
            elif other is not None and other != here:
                answer += f"; GPU: {shown(other)}"
            line.append(answer)
        lines.append(line)
    notes = [f"{number}. {reason}." for reason, number in reasons.items()]
    if elsewhere is not None:
        notes.append(f"\nThe GPU: {elsewhere['device']}.")
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *notes]) + "\n"


def written() -> str:
    """Return the table of what is recorded."""
    paths = DOCS / "works_with.json", DOCS / "works_with_gpu.json"
    records = [json.loads(path.read_text()) if path.exists() else None for path in paths]
    return table(*records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=[*ROWS], choices=[*ROWS], metavar="ROW")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=DOCS)
    options = parser.parse_args()
    is_gpu = options.device != "cpu"
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / ("works_with_gpu.json" if is_gpu else "works_with.json")
    record = json.loads(path.read_text()) if path.exists() else {}
    rows = record.get("rows", {}) if is_gpu else record
    for name in options.rows:
        rows[name] = row(name, options.device)
        print(name, rows[name], flush=True)
    rows = {name: rows[name] for name in ROWS if name in rows}
    if is_gpu:
        rows = {"device": torch.cuda.get_device_name(options.device), "rows": rows}
    path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
