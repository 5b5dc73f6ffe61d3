"""tyxe.integrations.huggingface: batches with labels, Trainer, Accelerate, safetensors."""

import functools
import os

import pyro.distributions as dist
import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers", reason="it is of the extra 'huggingface'")
pytest.importorskip("accelerate", reason="it is of the extra 'huggingface'")
import accelerate
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback, TrainingArguments

import tyxe
from tests.integrations import texts
from tests.oracles.fits import assert_equal, trainable
from tyxe.integrations.huggingface import TrainerBNN, unpack

NORMAL = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide=["*LayerNorm*", "*embeddings*"])
ALL = tyxe.priors.IIDPrior(dist.Normal(0, 1))
ADAM = functools.partial(torch.optim.Adam, lr=1e-2)
CAUSAL = functools.partial(unpack, shift=True)
# Of accelerate 1.15 on machines without an accelerator.
pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


def variational(net=None, likelihood=None, prior=NORMAL):
    torch.manual_seed(0)
    likelihood = likelihood or tyxe.likelihoods.Categorical(texts.SIZE)
    net = net or texts.bert().eval()  # without dropout, so that its draws are the only ones
    guide = functools.partial(tyxe.guides.AutoNormal, init_scale=1e-2)
    return tyxe.VariationalBNN(net, prior, likelihood, guide, output="logits")


# --- batches ------------------------------------------------------------------------------------


def test_unpacked_batches_are_fitted_as_pairs_are():
    pairs = [({k: v for k, v in b.items() if k != "labels"}, b["labels"]) for b in texts.batches()]
    one, two = variational(), variational()
    torch.manual_seed(1)
    one.fit(pairs, ADAM, 2, beta=1e-3)
    torch.manual_seed(1)
    two.fit(texts.batches(), ADAM, 2, beta=1e-3, unpack=unpack)
    assert_equal(trainable(one), trainable(two))
    assert two.predict(texts.batches(), unpack=unpack).shape == (texts.SIZE, 2)
    without = [{k: v for k, v in b.items() if k != "labels"} for b in texts.batches()]
    assert two.predict(without, unpack=unpack).shape == (texts.SIZE, 2)


def test_tokens_are_targets_of_those_before():
    """The loss is that of the model itself, which shifts its labels."""
    net = texts.gpt2_language().eval()
    data = texts.Sentences(6)
    labels = data.tokens.masked_fill(data.mask == 0, -100)
    likelihood = tyxe.likelihoods.Categorical(6, ignore_index=-100)
    bnn = tyxe.VariationalBNN(
        net, tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True), likelihood, output="logits"
    )
    batch = {"input_ids": data.tokens, "attention_mask": data.mask, "labels": labels}
    _, log_likelihood = bnn.evaluate([batch], num_predictions=0, unpack=CAUSAL)
    with torch.no_grad():
        expected = -net(**batch).loss * (labels[:, 1:] != -100).sum()
    torch.testing.assert_close(log_likelihood, expected)


# --- Trainer ------------------------------------------------------------------------------------


def trainer(folder, bnn, epochs=2, **arguments):
    common = {
        "num_train_epochs": epochs,
        "per_device_train_batch_size": 10,
        "learning_rate": 1e-2,
        "remove_unused_columns": False,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "epoch",
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(output_dir=str(folder), **(common | arguments))
    model = TrainerBNN(bnn, num_predictions=4)
    return Trainer(model, arguments, train_dataset=texts.Sentences())


def test_trainer_learns_and_evaluates(tmp_path):
    bnn = variational()
    own = trainer(tmp_path, bnn, epochs=20, save_strategy="no")
    before = own.evaluate(texts.Sentences(seed=1))["eval_loss"]
    own.train()
    found = own.evaluate(texts.Sentences(seed=1))["eval_loss"]
    assert found < 0.5 < before
    predicted = own.predict(texts.Sentences(seed=1))
    assert predicted.predictions.shape == (texts.SIZE, 2)
    assert (predicted.predictions.argmax(-1) == predicted.label_ids).mean() > 0.8
    torch.manual_seed(0)
    held_out = texts.batches(texts.Sentences(seed=1))
    _, own_score = bnn.evaluate(held_out, num_predictions=64, unpack=unpack, reduction="mean")
    assert found == pytest.approx(-float(own_score), abs=0.1)


@pytest.mark.parametrize("class_weights", [None, torch.tensor([0.2, 3.0])])
def test_trainer_resumes_as_if_it_had_not_stopped(tmp_path, class_weights):
    likelihood = tyxe.likelihoods.Categorical(3 * texts.SIZE, class_weights=class_weights)
    whole, half, rest = (variational(likelihood=likelihood) for _ in range(3))
    trainer(tmp_path / "whole", whole, 4).train()
    first = trainer(tmp_path / "half", half, 4)
    first.add_callback(StopsAfterTwo())
    first.train()
    checkpoint = str(tmp_path / "half" / "checkpoint-8")
    trainer(tmp_path / "half", rest, 4).train(resume_from_checkpoint=checkpoint)
    assert_equal(trainable(whole), trainable(rest))


class StopsAfterTwo(TrainerCallback):
    """Stop after two epochs, as a machine that goes down would."""

    def on_epoch_end(self, args, state, control, **_):
        control.should_training_stop = state.epoch >= 2


def test_accumulated_steps_are_those_of_a_large_batch(tmp_path):
    """By the loss, a mean over points: of a net without draws."""
    ml = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True)

    def make():
        net = texts.bert().eval()
        net.requires_grad_(False).classifier.requires_grad_(True)
        likelihood = tyxe.likelihoods.Categorical(texts.SIZE)
        return tyxe.VariationalBNN(net, ml, likelihood, output="logits")

    found, options = [], {"save_strategy": "no", "optim": "sgd"}
    for size, steps in ((20, 1), (10, 2)):
        options["per_device_train_batch_size"] = size
        options["gradient_accumulation_steps"] = steps
        trainer(tmp_path, bnn := make(), **options).train()
        found.append(trainable(bnn))
    assert_equal(*found, rtol=1e-4, atol=1e-6)


def test_a_batch_that_is_masked_as_a_whole_has_no_loss():
    likelihood = tyxe.likelihoods.Categorical(texts.SIZE, ignore_index=-100)
    model = TrainerBNN(variational(likelihood=likelihood), num_predictions=0).eval()
    batch = texts.batches()[0]
    whole = model(**batch)
    none = model(**{**batch, "labels": torch.full_like(batch["labels"], -100)})
    assert none["loss"] == 0 < whole["loss"]
    assert torch.equal(none["logits"], whole["logits"])
    batch["labels"][5:] = -100
    each = -whole["logits"][:5].log_softmax(-1).gather(1, batch["labels"][:5, None])
    torch.testing.assert_close(model(**batch)["loss"], each.mean())


def test_without_labels_it_predicts_and_cannot_be_trained():
    model = TrainerBNN(variational(), num_predictions=2).eval()
    batch = texts.batches()[0]
    del batch["labels"]
    assert model(**batch)["logits"].shape == (10, 2)
    with pytest.raises(ValueError, match="the loader yields"):
        model.train()(**batch)


# --- Accelerate, safetensors --------------------------------------------------------------------


def test_accelerate_saves_and_resumes(tmp_path):
    def prepared(bnn):
        accelerator = accelerate.Accelerator(cpu=True)
        module = tyxe.Trainable(bnn, unpack=unpack, handler=tyxe.poutine.local_reparameterization)
        return accelerator, *accelerator.prepare(module, ADAM(module.parameters()))

    def steps(accelerator, module, optimizer, count):
        for batch in texts.batches()[:count]:
            optimizer.zero_grad()
            accelerator.backward(module(batch))
            optimizer.step()

    whole, half, rest = variational(), variational(), variational()
    first = prepared(whole)
    torch.manual_seed(1)
    steps(*first, 2)
    steps(*first, 2)
    second, third = prepared(half), prepared(rest)
    torch.manual_seed(1)
    steps(*second, 2)
    second[0].save_state(str(tmp_path))
    assert (tmp_path / "model.safetensors").exists()
    third[0].load_state(str(tmp_path))
    steps(*third, 2)
    assert_equal(trainable(whole), trainable(rest))


def test_states_go_through_safetensors(tmp_path):
    """Weights that are tied, as those of a language model's ends, would be refused."""
    likelihood, make = tyxe.likelihoods.Categorical(6, ignore_index=-100), texts.gpt2_language
    one, two = (TrainerBNN(variational(make().eval(), likelihood, ALL)) for _ in range(2))
    with torch.no_grad():
        for parameter in one.parameters():
            parameter += 0.1
    save_file(one.state_dict(), tmp_path / "model.safetensors")
    two.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_equal(trainable(one.bnn), trainable(two.bnn))
    head = two.bnn.net.lm_head.weight
    assert head is two.bnn.net.transformer.wte.weight
