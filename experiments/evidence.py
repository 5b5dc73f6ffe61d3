"""Prior precisions by evidence and by held-out data, for nets certain of their training data.

A net is trained under a N(0, 1) prior, and about it a Laplace approximation takes the prior
precision of the largest evidence, or of the best log-likelihood of held-out data:

  digits    a CNN on 578 digits (0 to 7): diagonal, Kronecker-factored and full curvature
  fashion   a CNN on 5,000 images of FashionMNIST, its last layer
  cora      a graph net on 140 nodes, its last layer
  lora      a transformer's adapters of rank 4 (BERT from config, trained on four kinds of
            sentences, then adapted to two others by 200 sentences); noisy, to sentences of which
            fewer tokens tell the kind
  energy    a tanh net of 492 points with a Gaussian noise of 0.1: numbers, to compare with

"along" lets evidence move the prior every tenth of a training of its own, so that the mode is that
of the prior it ends with. gamma / N are the weights that the data determine for each point, at the
precision found; "warned" is the share of seeds in which `optimize_prior_precision` did; the first
line of each set also has the mean of 1 - sum_c p_c^2 of training data. The LoRA rows need the extra
`huggingface`.
"""

import warnings
from functools import cache

import common
import runner
import tables
import torch
from leaderboard_data import UCI, problem, scores
from leaderboard_methods import Case, Problem, cosine, maximum_a_posteriori
from torch import nn

import tyxe

SHARES = {"lora": 0.6, "lora_noisy": 0.35}  # of a kind's own tokens in a sentence
DATA = ["digits", "fashion", "cora", *SHARES, "energy"]
STRUCTURES = {"digits": ["diag", "kron", "full"], "cora": ["full"]}
FORMS = {
    "NLL": ".3f",
    "error": ".3g",
    "ECE %": ".1f",
    "gamma / N": ".2f",
    "precision": ".3g",
    "warned": ".1f",
}


class Sentences(nn.Module):
    """BERT on sentences of tokens `(n, length)`, of which 0 is padding."""

    def __init__(self, kinds):
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2, num_labels=kinds)
        config.update({"num_attention_heads": 4, "intermediate_size": 64})
        config.update({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
        self.bert = BertForSequenceClassification(config)

    def forward(self, tokens):
        return self.bert(input_ids=tokens, attention_mask=(tokens != 0).long()).logits


def sentences(count, kinds, group, share):
    """Return sentences of up to 16 tokens, a share of them of their kind's own group."""
    y = torch.arange(count) % kinds
    own = 1 + group * y[:, None] + torch.randint(group, (count, 16))
    other = torch.randint(1, 60, (count, 16))
    tokens = torch.where(torch.rand(count, 16) < share, own, other)
    return tokens * (torch.arange(16) < torch.randint(6, 17, (count, 1))), y


def adapted(s, name, seed):
    """Return the problem of a trained transformer's adapters."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    net, before = Sentences(4), sentences(s.sentences_before, 4, 14, SHARES[name])
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ConstantLR(adam, 1.0)
    common.descend(net, common.Batches(*before, s.batch), 10, adam, schedule)
    parts = [
        sentences(count, 2, 25, SHARES[name]) for count in (s.sentences, s.validation_images, 2_000)
    ]
    config = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    state = net.bert.bert.state_dict()

    def make():
        own = Sentences(2)
        own.bert.bert.load_state_dict(state)
        own.bert = get_peft_model(own.bert, config)
        return own

    pairs = {
        name: ((x,), y) for name, (x, y) in zip(("validation", "test"), parts[1:], strict=True)
    }
    likelihood = tyxe.likelihoods.Categorical(s.sentences)
    rules = {"expose": ["*lora_*"]}
    loader = common.Batches(*parts[0], s.batch)
    return Problem(loader, pairs, make, likelihood, s.epochs[name], rules=rules)


@cache
def data(s, name, seed):
    return adapted(s, name, seed) if name in SHARES else problem(s, name, seed, s.noise)


def judged(s, name, p, bnn, net=None):
    """Return the scores of the linearised net's draws, or of a net at its weights."""
    (inputs, y), noise = p.parts["test"], s.noise if name in UCI else None
    torch.manual_seed(0)
    with torch.no_grad():
        how = {"num_predictions": s.draws, "aggregate": False, "batch_size": 250}
        draws = bnn.predict(*inputs, **how) if net is None else net.eval()(*inputs)[None]
    found = scores({"test": draws}, y, noise)
    names = {"RMSE": "error", "error %": "error", "interval error %": "ECE %"}
    return {names.get(key, key): value for key, value in found.items()}


def run(s, name, seed):
    p, noise = data(s, name, seed), name in UCI
    case = Case(p, s, None, s.rate, 1.0)
    is_last = name in ("fashion", "cora")
    torch.manual_seed(seed)
    fitted = maximum_a_posteriori(case).bnn
    net, rules = fitted.to_module(), case.head if is_last else p.rules
    rows = {"MAP": judged(s, name, p, None, net)}
    if not noise:
        with torch.no_grad():
            probs = torch.cat([net(x).softmax(-1) for x, _ in p.loader])
        rows["MAP"]["1 - sum p^2"] = float((1 - probs.square().sum(-1)).mean())
    loader = p.by_nodes(1_000)[0] if p.by_nodes else p.loader
    parts = p.by_nodes(1_000)[1] if p.by_nodes else p.parts
    (inputs, y) = parts["validation"]
    held_out = (
        inputs[0] if p.by_nodes else list(zip(inputs[0].split(250), y.split(250), strict=True))
    )

    def found(structure, how, bnn, precision):
        own = p if not p.by_nodes else Problem(None, parts, None, None, 0)
        row = judged(s, name, own, bnn) | {"precision": float(precision)}
        if how != "held out":  # at the maximum of the evidence, gamma is d |w* - m0|^2
            gamma = float(precision) * bnn.state.loc.square().sum().item()
            row["gamma / N"] = gamma / p.likelihood.dataset_size
        rows[f"{structure}, {how}"] = row

    for structure in STRUCTURES.get(name, ["kron"]):
        for how in ("evidence", "held out"):
            bnn = tyxe.LaplaceBNN(net, common.normal(**rules), p.likelihood, structure=structure)
            bnn.fit_curvature(loader, progress=False)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", tyxe.TyxeWarning)
                best = bnn.optimize_prior_precision(loader=held_out if how != "evidence" else None)
            found(structure, how, bnn, best)
            rows[f"{structure}, {how}"]["warned"] = float(len(caught))
        if name in ("digits", "energy", *SHARES) and structure == "kron":
            torch.manual_seed(seed)
            bnn = tyxe.LaplaceBNN(p.make_net(), common.normal(**rules), p.likelihood)
            every = max(p.epochs // 10, 1)
            how = {"evidence_every": every, "progress": False}
            bnn.fit(p.loader, case.adam(), p.epochs, cosine(p.epochs), **how)
            found("kron", "evidence, along", bnn, bnn.state.prior.precision.diagonal()[0])
    return {"rows": rows}


def table(record):
    blocks = []
    for name in DATA:
        if own := record.of(name):
            rows = tables.rows(own)
            about = f"**{name}**"
            if name not in UCI:
                spread = tables.over_seeds([row["1 - sum p^2"] for row in rows["MAP"]], ".4f")
                about += f", uncertainty of the training data {spread}"
            blocks += [about + ":", tables.score_table(rows, FORMS)]
    return "\n\n".join(blocks)


cells = runner.every(run, data="data", seed="seeds")
experiment = runner.Experiment("evidence", cells, table, choices={"data": DATA})
