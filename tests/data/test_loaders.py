import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from task.data import loaders
from task.data.loaders import ClientData, batch_bounds, fits, normalise


def _sizes(*arguments, **options):
    return [stop - start for start, stop in batch_bounds(*arguments, **options)]


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("total", "plain", "batchnorm", "dropped"),
    [
        (0, [], [], []),
        (1, [1], [1], []),
        (7, [7], [7], []),
        (10, [10], [10], [10]),
        (11, [10, 1], [11], [10]),
        (12, [10, 2], [10, 2], [10]),
        (21, [10, 10, 1], [10, 11], [10, 10]),
    ],
)
def test_batch_sizes(total, plain, batchnorm, dropped):
    assert _sizes(total, 10) == plain
    assert _sizes(total, 10, has_batchnorm=True) == batchnorm
    assert _sizes(total, 10, drop_last=True) == dropped
    assert _sizes(total, 10, drop_last=True, has_batchnorm=True) == dropped


def test_batches_of_one_stay_when_they_are_asked_for():
    assert _sizes(3, 1, has_batchnorm=True) == [1, 1, 1]


@given(st.integers(0, 200), st.integers(1, 50), st.booleans())
def test_bounds_cover_everything_in_order(total, batch_size, has_batchnorm):
    bounds = batch_bounds(total, batch_size, has_batchnorm=has_batchnorm)
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(total))


def test_normalisation_is_the_papers():
    images = torch.arange(256, dtype=torch.uint8).reshape(4, 1, 8, 8)
    expected = (images.double() / 255 - 0.5) / 0.5
    assert normalise(images).dtype == torch.float32
    torch.testing.assert_close(normalise(images).double(), expected, rtol=0, atol=2e-7)
    floats = torch.randn(2, 1, 8, 8)
    assert normalise(floats) is floats


@pytest.mark.parametrize("block_bytes", [1, 4 * 64 * 25, 2**20])
@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"has_batchnorm": True}, {"shuffle": False}])
def test_epoch_is_what_the_slow_way_gives(block_bytes, options, small_dataset, monkeypatch):
    monkeypatch.setattr(loaders, "BLOCK_BYTES", block_bytes)
    indices = np.arange(5, 36)
    data = ClientData.from_dataset(small_dataset, indices)
    order = torch.randperm(31, generator=_generator()).tolist() if options.get("shuffle", True) else range(31)
    bounds = batch_bounds(31, 10, **{k: v for k, v in options.items() if k != "shuffle"})
    batches = list(data.train_batches(10, _generator(), **options))
    assert len(batches) == len(bounds)
    for (images, labels), (start, stop) in zip(batches, bounds, strict=True):
        chosen = indices[list(order)[start:stop]]
        expected = (torch.from_numpy(small_dataset.images[chosen]).float() / 255 - 0.5) / 0.5
        torch.testing.assert_close(images, expected, rtol=0, atol=1e-6)
        assert labels.tolist() == small_dataset.labels[chosen].tolist()


def test_epochs_differ_and_seeds_repeat(small_dataset):
    data = ClientData.from_dataset(small_dataset, np.arange(60))

    def epochs(seed):
        generator = _generator(seed)
        return [torch.cat([y for _, y in data.train_batches(7, generator)]).tolist() for _ in range(2)]

    first, second = epochs(0)
    assert first != second
    assert epochs(0) == [first, second]
    assert epochs(1)[0] != first


def test_evaluation_sees_everything_in_order(small_dataset):
    data = ClientData.from_dataset(small_dataset, np.arange(11))
    batches = list(data.eval_batches(5))
    assert [len(y) for _, y in batches] == [5, 5, 1]
    assert torch.cat([y for _, y in batches]).tolist() == small_dataset.labels[:11].tolist()


def test_client_without_samples_has_no_batch(small_dataset):
    data = ClientData.from_dataset(small_dataset, np.zeros(0, dtype=np.int64))
    assert len(data) == 0
    assert list(data.train_batches(10, _generator())) == []
    assert list(data.eval_batches(10)) == []


def test_channels_last(small_dataset):
    data = ClientData.from_dataset(small_dataset, np.arange(20), channels_last=True)
    for images, _ in data.train_batches(8, _generator()):
        assert images.is_contiguous(memory_format=torch.channels_last)


def test_float_data_are_not_altered(small_dataset):
    floats = np.random.default_rng(0).normal(size=(60, 1, 8, 8)).astype(np.float32)
    object.__setattr__(small_dataset, "images", floats)
    data = ClientData.from_dataset(small_dataset, np.arange(60))
    images, _ = next(data.eval_batches(60))
    np.testing.assert_array_equal(images.numpy(), floats)


def test_the_client_owns_its_memory(small_dataset):
    small_dataset.images.flags.writeable = False
    data = ClientData.from_dataset(small_dataset, np.arange(3))
    data.images.zero_()
    assert small_dataset.images[:3].any()


def test_small_data_stay_on_a_gpu_and_large_data_do_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    assert fits(250, torch.device("cuda"))
    assert not fits(251, torch.device("cuda"))
    assert fits(10**15, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("resident", [True, False, None])
@pytest.mark.parametrize("channels_last", [True, False])
def test_gpu_batches_equal_those_of_the_cpu(resident, channels_last, small_dataset, monkeypatch):
    monkeypatch.setattr(loaders, "BLOCK_BYTES", 4 * 64 * 20)
    host = ClientData.from_dataset(small_dataset, np.arange(60))
    device = ClientData.from_dataset(
        small_dataset, np.arange(60), "cuda", channels_last=channels_last, resident=resident
    )
    assert device.resident == (resident is not False)
    for one, other in zip(host.train_batches(7, _generator()), device.train_batches(7, _generator()), strict=True):
        assert other[0].is_cuda
        assert other[1].is_cuda
        torch.testing.assert_close(one[0], other[0].cpu(), rtol=0, atol=2e-7)
        assert torch.equal(one[1], other[1].cpu())
