import numpy as np
import pytest

from task.data.labels import encode_labels


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (np.arange(1, 11), [str(n) for n in range(1, 11)]),
        (np.array(["dog", "cat", "dog"]), ["cat", "dog"]),
        (np.array([b"dog", b"cat", b"dog"]), ["cat", "dog"]),
        (np.array([9, 0, 5, 5]), ["0", "5", "9"]),
        (np.array([2.0, 1.0, 2.0]), ["1", "2"]),
        (np.array([2, 1, 2], dtype=np.uint8), ["1", "2"]),
    ],
)
def test_sorted_order_gives_the_index(labels, names):
    indices, found, mapping = encode_labels(labels)
    assert list(found) == names
    assert mapping == {name: index for index, name in enumerate(names)}
    assert indices.dtype == np.int64
    texts = [label.decode() if isinstance(label, bytes) else label for label in labels.tolist()]
    assert [found[i] for i in indices] == [str(int(t)) if isinstance(t, float) else str(t) for t in texts]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.5])
def test_unusable_float_labels_are_named(bad):
    with pytest.raises(ValueError, match=rf"label {bad} of sample 1 is not a whole number"):
        encode_labels(np.array([1.0, bad]))


def test_python_objects_and_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="whole numbers or strings"):
        encode_labels(np.array([None, "a"], dtype=object))
    with pytest.raises(ValueError, match="shape"):
        encode_labels(np.zeros((3, 2), dtype=np.int64))


def test_named_classes_keep_their_place_even_without_a_sample():
    indices, names, mapping = encode_labels(np.array([2, 0]), ("a", "b", "c"))
    assert indices.tolist() == [2, 0]
    assert names == ("a", "b", "c")
    assert mapping == {"0": 0, "2": 2}
    assert encode_labels(np.array(["c", "a"]), ("a", "b", "c"))[0].tolist() == [2, 0]


def test_names_of_labels_with_gaps_follow_sorted_order():
    indices, names, mapping = encode_labels(np.array([9, 0, 5]), ("zero", "five", "nine"))
    assert indices.tolist() == [2, 0, 1]
    assert mapping == {"0": 0, "5": 1, "9": 2}
    assert names[2] == "nine"


def test_labels_without_a_class_are_named():
    with pytest.raises(ValueError, match=r"label 7 is outside 0\.\.2"):
        encode_labels(np.array([0, 7]), ("a", "b", "c"))
    with pytest.raises(ValueError, match="label 'x' is not among"):
        encode_labels(np.array(["x"]), ("a", "b"))
    with pytest.raises(ValueError, match="different"):
        encode_labels(np.array([0]), ("a", "a"))


def test_minus_one_is_no_label_where_the_classes_have_names():
    names = tuple("abcdefghij")
    indices, found, mapping = encode_labels(np.array([-1, 3, 9, -1]), names)
    assert indices.tolist() == [-1, 3, 9, -1]
    assert found == names
    assert mapping == {"3": 3, "9": 9}
    # Nine classes and none: as many different numbers as there are names.
    assert encode_labels(np.arange(-1, 9), names)[0].tolist() == list(range(-1, 9))
    assert encode_labels(np.full(3, -1), names)[0].tolist() == [-1, -1, -1]
    with pytest.raises(ValueError, match=r"label 10 is outside 0\.\.9"):
        encode_labels(np.array([-1, 10]), names)


def test_minus_one_is_a_class_of_two_signs_and_of_sources_without_names():
    assert encode_labels(np.array([-1, 1, 1]), ("no", "yes"))[0].tolist() == [0, 1, 1]
    indices, found, _ = encode_labels(np.array([-1, 1, 0]))
    assert indices.tolist() == [0, 2, 1]
    assert found == ("-1", "0", "1")
