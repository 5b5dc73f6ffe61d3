"""experiments/task_sequences.py, split_tasks.py."""

import common
import numpy as np
import pytest
import sequence_data
import split_tasks
import task_sequences
import torch
from torch import nn


def test_permuted_tasks_are_orders_of_the_same_images(stand_ins):
    s = task_sequences.experiments["online"].at("smoke")
    _, tasks, part = sequence_data.permuted(s, 0)
    first, second = (part(task, 0)[0] for task in tasks)
    assert torch.equal(first.sort(1).values, second.sort(1).values)
    assert not torch.equal(first, second)
    assert torch.equal(first, sequence_data.mnist(s)[0][0])
    assert torch.equal(sequence_data.permuted(s, 0)[2]("2", 1)[0], part("2", 1)[0])
    assert not torch.equal(sequence_data.permuted(s, 1)[2]("2", 1)[0], part("2", 1)[0])


def test_batches_at_once_are_of_all_tasks(stand_ins):
    s = task_sequences.experiments["online"].at("smoke", tasks=4)
    _, tasks, part = sequence_data.permuted(s, 0)
    batches = sequence_data.AtOnce(part, tasks, 50)
    assert (len(batches), batches.points) == (5, 250)
    known = {tuple(row) for task in tasks for row in part(task, 0)[0].tolist()}
    assert all({tuple(row) for row in x.tolist()} <= known for x, _ in batches)


def test_own_classes_leave_the_others_out():
    outputs = torch.tensor([[3.0, 2.0, 1.0], [0.0, 5.0, 6.0], [1.0, 0.0, 9.0]])
    # Of the classes 0 and 1 alone: 0, 1, 0.
    labels = torch.tensor([0, 1, 1])
    found = sequence_data.own_classes(lambda x: outputs, None, labels)
    assert found == pytest.approx(2 / 3)


def test_an_offset_mends_outputs_that_are_too_low_by_one_number():
    labels = torch.arange(4).repeat(50)
    outputs = nn.functional.one_hot(labels).double() + torch.tensor([-8.0, -8.0, 0.0, 0.0])
    old, new = ((outputs[own], labels[own]) for own in (labels < 2, labels > 1))
    found = sequence_data.with_offset(nn.Identity(), lambda _: old, lambda _: new)
    assert found["with offset"] == [1.0, 1.0]
    assert 7 <= found["offset"] <= 9
    # Where classes are not told apart, no offset helps.
    alike = sequence_data.with_offset(lambda x: 0 * x, lambda _: old, lambda _: new)
    assert sum(alike["with offset"]) <= 1


def test_flat_labels_are_of_all_classes_for_a_share_of_images():
    torch.manual_seed(0)
    sure = torch.tensor([20.0, 0.0, 0.0, 0.0]).expand(10_000, 4)
    assert not sequence_data.flat_labels(nn.Identity(), sure, 0.0).any()
    counts = sequence_data.flat_labels(nn.Identity(), sure, 0.4).bincount() / 10_000
    assert counts.tolist() == pytest.approx([0.7, 0.1, 0.1, 0.1], abs=0.02)


def test_outputs_of_other_classes_count_for_nothing_in_training():
    net = sequence_data.OwnClasses(nn.Linear(3, 4))
    net.classes = torch.tensor([0, 2])
    nn.functional.cross_entropy(net(torch.ones(5, 3)), torch.tensor([0, 2, 0, 2, 0])).backward()
    assert net.net.weight.grad.abs().sum(1).bool().tolist() == [True, False, True, False]
    net.classes = None
    assert torch.equal(net(torch.ones(1, 3)), net.net(torch.ones(1, 3)))


def test_split_mnist_is_five_pairs_of_digits(stand_ins):
    train, test = split_tasks.tasks()
    assert list(train) == list(test) == ["0/1", "2/3", "4/5", "6/7", "8/9"]
    assert sum(len(y) for _, y in train.values()) == 300
    x, y = test["2/3"]
    with np.load(stand_ins / "mnist.npz") as arrays:
        labels = arrays["y_test"]
        wanted = np.isin(labels, (2, 3))
        pixels = arrays["x_test"][wanted].reshape(-1, 784) / np.float32(255)
    assert torch.equal(x, torch.from_numpy(pixels))
    assert y.shape == (wanted.sum(), 1)
    assert y[:, 0].tolist() == (labels[wanted] == 3).tolist()
    assert [len(part[1]) for part in split_tasks.tasks(7)[0].values()] == [7] * 5


def test_later_tasks_of_split_cifar_have_two_classes_of_each_set(every_set):
    settings = split_tasks.split_cifar.at(images=50, test_images=30, later_images=20)
    sets, (train, _) = (
        split_tasks.tasks_of_cifar(settings),
        common.images("cifar10_subset", "train"),
    )
    assert [len(y) for _, y in sets["CIFAR-10"]] == [50, 30]
    mean, scale = (part((0, 2, 3))[:, None, None] for part in (train.mean, train.std))
    torch.testing.assert_close(sets["CIFAR-10"][0][0][3], (train[3] - mean) / scale)
    pairs = (common.images("svhn_subset", split) for split in ("train", "test"))
    x, y = map(torch.cat, zip(*pairs, strict=True))
    for number in range(5):
        (own, labels), (tested, others) = sets[f"task {number + 2}"]
        # Of a class 20 images of FashionMNIST and notMNIST, 16 of SVHN; a fifth of all is tested.
        assert labels.bincount().tolist() == [16] * 4 + [12, 13]
        assert others.bincount().tolist() == [4] * 4 + [4, 3]
        digits = torch.cat([own[labels == 5], tested[others == 5]]).flatten(1)
        known = ((x - mean) / scale)[y == 2 * number + 1].flatten(1)
        digits, known = (part[part.sum(-1).argsort()] for part in (digits, known))
        torch.testing.assert_close(digits, known)
