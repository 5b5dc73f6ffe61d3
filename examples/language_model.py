"""A language model with 32,000 words, Bayesian in its LoRA factors.

A GPT-2 with a vocabulary of 32,000 and random weights, so that nothing is downloaded, is adapted to
the sentences of a small language by `peft`: 16 of its words, each with a usual successor. Two
curvatures then give the factors a posterior, and the 32,000 x 32,000 Hessians of next words are
never formed. `"lowrank"` multiplies vectors by them; `"diag"` draws a label for each word
(`curvature="fisher"`). With so many classes predictions are averages over draws of the factors
(`predictive="bnn"`), since the linearised net needs covariances of all classes.

The factors learn the 32 sentences nearly by heart. A posterior makes the predictions for other
sentences less certain, and better.

For your own model change the net, the sentences, the layers with factors, and the rank.

Needs the extra `huggingface`: pip install -e ".[huggingface]". About 100 seconds.
"""

import argparse
import functools

import pyro.distributions as dist
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import tyxe
from tyxe import metrics
from tyxe.integrations.huggingface import unpack

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--smoke-test", action="store_true", help="a small one, in seconds: no result")
smoke_test = parser.parse_args().smoke_test
sizes = (99, 4, 6, 1, 2) if smoke_test else (32000, 32, 16, 60, 10)
vocabulary, count, length, epochs, rank = sizes
torch.manual_seed(0)

words = torch.randperm(vocabulary)[:16]
successor = torch.randperm(16)


def sentences(count):
    """Words that are followed by their successors four times of five, or else by any."""
    places = [torch.randint(16, (count,))]
    for _ in range(length - 1):
        is_usual = torch.rand(count) < 0.8
        places.append(torch.where(is_usual, successor[places[-1]], torch.randint(16, (count,))))
    return [{"input_ids": one, "labels": one} for one in words[torch.stack(places, 1)]]


train, held_out, test = (
    DataLoader(sentences(size), batch_size=4) for size in (count, count // 8 or 1, count // 2)
)
config = GPT2Config(
    vocab_size=vocabulary,
    n_positions=length,
    n_embd=128,
    n_layer=2,
    n_head=4,
    initializer_range=0.2,
    bos_token_id=0,
    eos_token_id=0,
    use_cache=False,
)
layers = ["c_attn", "c_fc", "c_proj"]
lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=layers, fan_in_fan_out=True)
net = get_peft_model(GPT2LMHeadModel(config), lora)

prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), expose=["*lora_*"])
likelihood = tyxe.likelihoods.Categorical(count, event_dim=1, ignore_index=-100)
how = {"output": "logits", "unpack": functools.partial(unpack, shift=True)}
options = tyxe.LaplaceOptions(rank=rank)
bnn = tyxe.LaplaceBNN(net, prior, likelihood, structure="diag", curvature="fisher", **how)
bnn.fit(train, functools.partial(torch.optim.Adam, lr=5e-3), epochs, progress=False)
trained = bnn.to_module()
low = tyxe.LaplaceBNN(trained, prior, likelihood, structure="lowrank", options=options, **how)
low.fit_curvature(train, progress=False)


def row(name, bnn, num_predictions):
    """Print scores of the words that have a next one."""
    predict = functools.partial(bnn.predict, predictive="bnn", num_predictions=num_predictions)
    probs, labels = [], []
    for batch in test:
        inputs, targets = how["unpack"](batch)
        probs.append(predict(inputs)[:, :-1].softmax(-1).flatten(0, 1))
        labels.append(targets[:, :-1].flatten())
    scored = torch.cat(probs), torch.cat(labels)
    perplexity = float(torch.as_tensor(metrics.nll(*scored)).exp())
    error = float(metrics.expected_calibration_error(*scored))
    print(f"{name:<10} {perplexity:10.1f} {error:10.1%}")


print("           perplexity  calibration error")
row("MAP", bnn, 0)
for name, each in {"diag": bnn, "lowrank": low}.items():
    each.optimize_prior_precision("grid", held_out, grid=[1e1, 1e2, 1e3, 1e4], predictive="bnn")
    row(name, each, 8)
