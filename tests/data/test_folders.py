import numpy as np
import pytest
from PIL import Image

from task.data.folders import ImageFolder, TinyImagenet


def _save(path, mode="RGB", size=(12, 10), value=7):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode in ("L", "I;16", "P", "1") else tuple([value] * len(mode))).save(path)


def test_classes_are_sorted_folder_names(tmp_path):
    _save(tmp_path / "dog" / "a.png", value=1)
    _save(tmp_path / "cat" / "deep" / "b.PNG", value=2)
    (tmp_path / "empty").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "dog" / "notes.txt").write_text("not an image")
    raw = ImageFolder(str(tmp_path)).read()
    assert raw.class_names == ("cat", "dog", "empty")
    assert raw.labels.tolist() == ["cat", "dog"]
    assert raw.images.shape == (2, 10, 12, 3)
    assert raw.images[:, 0, 0, 0].tolist() == [2, 1]


def test_train_and_test_folders(tmp_path):
    _save(tmp_path / "train" / "cat" / "a.png", "L")
    _save(tmp_path / "test" / "dog" / "b.png", "L")
    raw = ImageFolder(str(tmp_path)).read()
    assert raw.class_names == ("cat", "dog")
    assert raw.is_test.tolist() == [False, True]
    assert raw.images.shape == (2, 10, 12)


def test_mixed_sizes_are_named_unless_resized(tmp_path):
    _save(tmp_path / "a" / "1.png")
    _save(tmp_path / "a" / "2.png", size=(9, 10))
    with pytest.raises(ValueError, match=r"2\.png: is 9x10 pixels, 1\.png is 12x10; set data\.source\.resize"):
        ImageFolder(str(tmp_path)).read()
    assert ImageFolder(str(tmp_path), resize=16).read().images.shape == (2, 16, 16, 3)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "CMYK"])
def test_unusual_modes_need_a_decision(mode, tmp_path):
    suffix = "jpg" if mode == "CMYK" else "png"
    _save(tmp_path / "a" / f"1.{suffix}", mode)
    with pytest.raises(ValueError, match=rf"1\.{suffix}: has mode {mode}, expected L or RGB"):
        ImageFolder(str(tmp_path)).read()
    assert ImageFolder(str(tmp_path), mode="rgb").read().images.shape == (1, 10, 12, 3)
    assert ImageFolder(str(tmp_path), mode="grey").read().images.shape == (1, 10, 12)


def test_grey_among_colour_is_named(tmp_path):
    _save(tmp_path / "a" / "1.png")
    _save(tmp_path / "a" / "2.png", "L")
    with pytest.raises(ValueError, match=r"2\.png: is not RGB"):
        ImageFolder(str(tmp_path)).read()


def test_sixteen_bits_are_refused(tmp_path):
    _save(tmp_path / "a" / "1.png", "I;16")
    for mode in ("auto", "grey"):
        with pytest.raises(ValueError, match=r"1\.png: has mode I;16"):
            ImageFolder(str(tmp_path), mode=mode).read()


def test_broken_file_is_named(tmp_path):
    _save(tmp_path / "a" / "1.png")
    (tmp_path / "a" / "2.png").write_bytes((tmp_path / "a" / "1.png").read_bytes()[:40])
    with pytest.raises(ValueError, match=r"2\.png: cannot be read as an image"):
        ImageFolder(str(tmp_path)).read()


def test_empty_and_missing_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match="has no sub-folder"):
        ImageFolder(str(tmp_path / "none")).read()
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match="holds no image"):
        ImageFolder(str(tmp_path)).read()
    with pytest.raises(ValueError, match="train/"):
        TinyImagenet(str(tmp_path)).read()


def test_settings_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"data\.source\.mode: must be one of auto, rgb, grey"):
        ImageFolder(str(tmp_path), mode="bgr")
    with pytest.raises(ValueError, match=r"data\.source\.root: must be an absolute path"):
        ImageFolder("images")


def test_tiny_imagenet_reads_the_training_folder_only(tmp_path):
    for word in ("n02", "n01"):
        _save(tmp_path / "train" / word / "images" / f"{word}_0.JPEG", "L", (64, 64))
        (tmp_path / "train" / word / f"{word}_boxes.txt").write_text("boxes")
    _save(tmp_path / "val" / "images" / "val_0.JPEG", "RGB", (64, 64))
    raw = TinyImagenet(str(tmp_path)).read()
    assert raw.images.shape == (2, 64, 64, 3)
    assert raw.class_names == ("n01", "n02")
    assert raw.labels.tolist() == ["n01", "n02"]
    assert len(list(TinyImagenet(str(tmp_path)).files())) == 2
    assert np.all(~raw.is_test)
