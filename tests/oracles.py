"""The papers' formulas as slow plain-Python loops, written from the text and independent of the product."""

import math
from collections.abc import Sequence

Vector = Sequence[float]


def distance(a: Vector, b: Vector) -> float:
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def mean(vectors: Sequence[Vector]) -> list[float]:
    return [sum(column) / len(vectors) for column in zip(*vectors, strict=True)]


def contrastive_loss(
    received: Sequence[Vector], classes: Sequence[int], protos: Sequence[Vector], margin: float
) -> float:
    """FedTGP's L_P, averaged over the received prototypes."""
    total = 0.0
    for vector, c in zip(received, classes, strict=True):
        own = math.exp(-(distance(vector, protos[c]) + margin))
        others = sum(math.exp(-distance(vector, proto)) for j, proto in enumerate(protos) if j != c)
        total += -math.log(own / (own + others))
    return total / len(received)


def max_pair(centroids: Sequence[Vector]) -> float:
    return max(distance(a, b) for a in centroids for b in centroids)


def max_of_min(centroids: Sequence[Vector]) -> float:
    nearest = [min(distance(a, b) for j, b in enumerate(centroids) if j != i) for i, a in enumerate(centroids)]
    return max(nearest)


def class_mean_distance(feats: Sequence[Vector], labels: Sequence[int], protos: dict[int, Vector]) -> float:
    """E over the classes of a batch that have a prototype of |class mean - prototype|."""
    terms = []
    for c in sorted(set(labels)):
        if c in protos:
            own = mean([feat for feat, label in zip(feats, labels, strict=True) if label == c])
            terms.append(distance(own, protos[c]))
    return sum(terms) / len(terms) if terms else 0.0


def sample_squared_error(feats: Sequence[Vector], labels: Sequence[int], protos: dict[int, Vector]) -> float:
    width, total = len(feats[0]), 0.0
    for feat, label in zip(feats, labels, strict=True):
        if label in protos:
            total += sum((x - y) ** 2 for x, y in zip(feat, protos[label], strict=True))
    return total / (len(feats) * width)


def log_softmax(logits: Vector) -> list[float]:
    total = math.log(sum(math.exp(value) for value in logits))
    return [value - total for value in logits]


def cross_entropy(logits: Sequence[Vector], labels: Sequence[int]) -> float:
    return sum(-log_softmax(row)[label] for row, label in zip(logits, labels, strict=True)) / len(labels)


def divergence(logits: Sequence[Vector], targets: Sequence[Vector]) -> float:
    """The mean over samples of KL(target || prediction), each a sum over the classes."""
    total = 0.0
    for row, target_row in zip(logits, targets, strict=True):
        for own, target in zip(log_softmax(row), log_softmax(target_row), strict=True):
            total += math.exp(target) * (target - own)
    return total / len(logits)


def mean_squared_error(rows: Sequence[Vector], others: Sequence[Vector]) -> float:
    squares = [(x - y) ** 2 for a, b in zip(rows, others, strict=True) for x, y in zip(a, b, strict=True)]
    return sum(squares) / len(squares)


def smallest_rank(singular_values: Vector, energy: float) -> int:
    """FedKD: the least number of leading singular values, from 1, whose squares hold the share ``energy``."""
    squares = [value**2 for value in singular_values]
    return next(rank for rank in range(1, len(squares) + 1) if sum(squares[:rank]) >= energy * sum(squares))


def rank_of_the_public_code(singular_values: Vector, energy: float) -> int:
    """The loop of FedKD's public code: it tries ranks from 0 and never all, and keeps 0 where none suffices."""
    squares, rank = [value**2 for value in singular_values], 0
    for tried in range(len(squares)):
        if sum(squares[:tried]) > energy * sum(squares):
            rank = tried
            break
    return rank
