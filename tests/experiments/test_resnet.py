"""experiments/resnet.py: all inferences run, stopped runs go on, and bad input is named."""

from pathlib import Path

import common
import pytest
import resnet
import resnet_ood
import runner
import torch

import tyxe
from tests.experiments.conftest import check_numbers

NAMES = list(resnet.STARTS)
pytest.importorskip("torchvision", reason="the nets are torchvision's, extra `vision`")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a smoke test of everything."""
    folder = tmp_path_factory.mktemp("resnet")
    resnet.experiment.main(["--smoke-test", "--out", str(folder)])
    return folder


def cells(folder: Path) -> dict:
    s = resnet.experiment.at(out=folder)
    return resnet.experiment.record(s).read().cells


def without_seconds(cell: dict) -> dict:
    return {key: value for key, value in cell.items() if not key.endswith((" s", " seconds"))}


def test_all_inferences(whole: Path):
    found = cells(whole)
    assert list(found) == [(name, "0") for name in NAMES]
    for (name, _), cell in found.items():
        check_numbers(cell)
        assert ("weights drawn" in cell) == name.startswith("mean-field")
        assert sum(cell["curves"]["counts"]) == 30
        if "laplace" in name and name != "variational-laplace":
            assert cell["prior precision"] > 0
        else:
            starts_at_random = name in ("ml", "map", "inducing")
            assert len(cell["losses"]) == (3 if starts_at_random else 2)


def test_a_stopped_run_goes_on_as_if_it_had_not_been(whole: Path, tmp_path: Path):
    options = ["--smoke-test", "--inference", "mean-field", "inducing", "--out", str(tmp_path)]
    stops = [
        ("2", "resnet_ml_0: stopped after 2 of 3 epochs"),  # where the rate is cut
        ("1", "resnet_mean-field_0: stopped after 1 of 2 epochs"),
    ]
    for count, message in stops:
        with pytest.raises(SystemExit, match=message):
            resnet.experiment.main([*options, "--stop-after", count])
    resnet.experiment.main(options)
    assert [key[0] for key in cells(tmp_path)] == ["mean-field", "inducing"]
    for key, cell in cells(tmp_path).items():
        assert without_seconds(cell) == without_seconds(cells(whole)[key])


def test_low_precision_and_channels_last_change_little(whole: Path, tmp_path: Path):
    """On a processor, where bfloat16 has eight bits as on a GPU."""
    assert not resnet.is_low_precision(resnet.experiment.at())  # which is for GPUs
    names = ("mean-field", "inducing")
    options = ["--smoke-test", "--amp", "on", "--inference", *names, "--out", str(tmp_path)]
    resnet.experiment.main(options)
    for key, low in cells(tmp_path).items():
        full = cells(whole)[key]
        assert low["losses"] != full["losses"]
        # Twenty layers that round to eight bits, independently: 20 ** 0.5 * 2 ** -8.
        assert low["losses"] == pytest.approx(full["losses"], rel=0.0175)


def test_images_are_normalised_each_set_by_its_own(every_set):
    ((x, y), (x_test, y_test)), unknown = resnet.load(resnet.experiment.at(training_images=25))
    assert x.shape == (25, 3, 32, 32)
    assert (len(x_test), len(unknown)) == (80, 160)  # of a small SVHN both parts
    assert (y == torch.arange(25) % 10).all()
    assert (y_test == torch.arange(80) % 10).all()
    for images in (x, unknown):
        zeros, ones = torch.zeros(3), torch.ones(3)
        torch.testing.assert_close(images.mean((0, 2, 3)), zeros, atol=1e-5, rtol=0)
        torch.testing.assert_close(images.std((0, 2, 3)), ones)
    with pytest.raises(SystemExit, match="is 81, but there are 80"):
        resnet.load(resnet.experiment.at(training_images=81))
    # The test images by the training images' statistics.
    raw = common.images("cifar10_subset", "train")[0][:25]
    found = common.images("cifar10_subset", "test")[0]
    expected = (found - raw.mean((0, 2, 3), True)) / raw.std((0, 2, 3), keepdim=True)
    torch.testing.assert_close(x_test, expected)


@pytest.mark.parametrize("width", [4, 64])
def test_nets_are_torchvisions(width: int):
    from torchvision.models import resnet18

    own = resnet18(num_classes=10)
    for stem, positions in (("cifar", 32), ("strided", 16), ("imagenet", 8)):
        net = resnet.make_net(width, stem).eval()
        assert type(net) is type(own)
        assert list(net.state_dict()) == list(own.state_dict())
        seen = []
        net.layer1.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
        assert seen[0].shape == (2, width, positions, positions)
    kept = resnet.make_net(width, "cifar", channels_last=True).layer1[0].conv1.weight
    assert kept.is_contiguous(memory_format=torch.channels_last)
    if width == 64:  # the last one is torchvision's own throughout
        shapes = [p.shape for p in net.parameters()]
        assert shapes == [p.shape for p in own.parameters()]


def test_a_rise_is_from_the_net_that_a_mean_field_starts_at():
    def cell(auroc, test, train):
        scores = {"AUROC SVHN": auroc, "NLL": test, "training NLL": train}
        return scores | {"AUROC, right": 0.5, "accuracy %": 50.0, "ECE %": 1.0}

    cells = {
        ("a quarter", "ml", "0"): cell(0.6, 1.5, 1.25),
        ("a quarter", "ml", "1"): cell(0.625, 1.75, 1.25),
        ("a quarter", "ml, longer", "1"): cell(0.5, 2.0, 1.0),
        ("a quarter", "mean field", "0"): cell(0.5, 9.0, 9.0),
        ("a quarter", "mean field", "1"): cell(0.5, 9.0, 9.0),
        ("a quarter", "mean field about ml, longer", "1"): cell(0.75, 9.0, 9.0),
        ("two classes", "mean field", "0"): cell(0.1, 1.0, 1.0),  # its start was not run
    }
    record = runner.Record(Path("none"), ("setup", "row", "seed"), cells=cells)
    gap, svhn = "test - training NLL", "AUROC SVHN"
    expected = {
        ("a quarter", "ml"): [{gap: 0.25, svhn: -0.1}, {gap: 0.5, svhn: -0.125}],
        ("a quarter", "ml, longer"): [{gap: 1.0, svhn: 0.25}],
    }
    found = resnet_ood.rises(record)
    assert [*found] == [*expected]
    for key, rows in expected.items():
        assert found[key] == [pytest.approx(row) for row in rows]
    assert "| a quarter | ml, longer | 1 | 1.000 | 0.250 |" in resnet_ood.table(record)


def test_standard_deviations_at_their_cap():
    net = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Linear(1, 4, bias=False))
    guide = common.mean_field(net, init_scale=0.05, max_guide_scale=0.1)
    likelihood = tyxe.likelihoods.Categorical(5)
    bnn = tyxe.VariationalBNN(net, common.normal(), likelihood, guide)
    assert resnet_ood.at_cap(bnn, 0.1) == 0
    wide = common.mean_field(net, init_scale=0.0999, max_guide_scale=0.1)
    bnn = tyxe.VariationalBNN(net, common.normal(), likelihood, wide)
    assert resnet_ood.at_cap(bnn, 0.1) == 1
