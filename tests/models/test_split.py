import math

import pytest
import torch
from torch import nn

from task.models.split import PoolToWidth, SplitModel, batchnorm_in_eval, make_head, parameter_count

torch.set_num_threads(1)
NATIVE = [1, 64, 128, 256, 500, 512, 700, 768, 1024, 1280, 2048]


@pytest.mark.parametrize("native", NATIVE)
def test_pool_is_adaptive_average_pooling(native: int) -> None:
    features = torch.randn(3, native, dtype=torch.float64)
    ours, theirs = features.clone().requires_grad_(), features.clone().requires_grad_()
    pooled, expected = PoolToWidth(512)(ours), nn.AdaptiveAvgPool1d(512)(theirs)
    torch.testing.assert_close(pooled, expected)
    weights = torch.randn(3, 512, dtype=torch.float64)
    (pooled * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("native", [64, 1280, 2048])
def test_pool_windows_by_the_formula(native: int) -> None:
    features = torch.randn(2, native, dtype=torch.float64)
    pooled = PoolToWidth(512)(features)
    for j in range(512):
        start, stop = j * native // 512, math.ceil((j + 1) * native / 512)
        assert stop - start == {64: 1, 1280: 3, 2048: 4}[native]
        torch.testing.assert_close(pooled[:, j], features[:, start:stop].mean(1))


def test_narrow_features_are_repeated() -> None:
    assert PoolToWidth(512)(torch.randn(1, 64)).unique().numel() == 64


def test_split_model_contract() -> None:
    model = SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(12, 20)), make_head(8, [], 5), 8)
    images = torch.randn(4, 3, 2, 2)
    assert model.features(images).shape == (4, 8)
    assert model(images).shape == (4, 5)
    torch.testing.assert_close(model(images), model.head(model.features(images)))
    assert set(model.state_dict()) == {"base.body.1.weight", "base.body.1.bias", "head.weight", "head.bias"}
    assert not model.has_batchnorm


@pytest.mark.parametrize(("hidden", "count"), [([], 51_300), ([512], 313_956), ([256], 157_028), ([128], 78_564)])
def test_head_counts(hidden: list[int], count: int) -> None:
    assert parameter_count(make_head(512, hidden, 100)) == count
    assert parameter_count(make_head(512, hidden, 100, final_relu=True)) == count


@pytest.mark.parametrize("hidden", [[], [6], [6, 7]])
def test_head_layers_and_final_relu(hidden: list[int]) -> None:
    features = torch.randn(50, 4)
    torch.manual_seed(0)
    head = make_head(4, hidden, 3)
    torch.manual_seed(0)
    with_relu = make_head(4, hidden, 3, final_relu=True)
    assert (head(features) < 0).any()
    torch.testing.assert_close(with_relu(features), head(features).relu())


def _with_batchnorm() -> SplitModel:
    body = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.5), nn.BatchNorm1d(4))
    return SplitModel(body, make_head(4, [], 2), 4)


def test_batchnorm_in_eval_restores_and_keeps_statistics() -> None:
    model = _with_batchnorm().train()
    model.base.body[4].eval()  # frozen by the caller: must stay so
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    assert model.has_batchnorm
    with batchnorm_in_eval(model):
        assert [module.training for module in model.base.body] == [True, False, True, True, False]
        model(torch.randn(1, 3, 2, 2)).sum().backward()
    assert [module.training for module in model.base.body] == [True, True, True, True, False]
    for key, value in model.named_buffers():
        assert torch.equal(value, buffers[key]), key
    assert model.base.body[1].weight.grad is not None


def test_batchnorm_in_eval_restores_after_an_error() -> None:
    model = _with_batchnorm().train()
    with pytest.raises(RuntimeError), batchnorm_in_eval(model):
        model(torch.randn(1, 5, 2, 2))
    assert all(module.training for module in model.modules())


def test_batchnorm_in_eval_without_batchnorm_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    with batchnorm_in_eval(model):
        assert all(module.training for module in model.modules())
