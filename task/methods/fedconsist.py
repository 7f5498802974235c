"""FedConsist: pseudo-labels on clients without labels, and a mean in which labelled clients keep a share of their own.

Yang, Xu, Li, Myronenko, Roth and others: "Federated semi-supervised learning for COVID region segmentation in chest CT
using multi-national data from China, Italy, Japan", Medical Image Analysis 70, 2021, arXiv:2011.11750.

====================  ==========================================================================
here                  meaning
====================  ==========================================================================
``labelled_share``    rho, the part of the global model that the labelled clients of a round make up
``examples``          N_i, the training samples of each client
====================  ==========================================================================

Departures from the paper, which segments images: the loss of a client without labels is that of FixMatch
(``task/methods/fixmatch.py``), with one strong view in place of noise on the input. The shares of the two groups are
reconstructed from how later comparisons use the method: 0.5 each.
"""

from collections.abc import Sequence


def group_weights(examples: Sequence[int], labelled: Sequence[bool], labelled_share: float) -> list[float]:
    """Return the weight of each client's model, in the order given; they sum to 1.

    Labelled clients share ``labelled_share`` by their samples, the others share the rest by theirs. Where one of the
    groups is absent, or has no sample, the other takes all.

    Parameters
    ----------
    examples : sequence of int
        N_i of the round's clients, at least 0.
    labelled : sequence of bool
        Which of them have labels.
    labelled_share : float
        rho, in [0, 1].

    Raises
    ------
    ValueError
        No client has a sample.
    """
    assert len(examples) == len(labelled)
    labelled_total = sum(n for n, own in zip(examples, labelled, strict=True) if own)
    other_total = sum(examples) - labelled_total
    if not labelled_total + other_total:
        raise ValueError(f"examples={list(examples)} cannot weigh models: at least one client needs a sample")
    share = labelled_share if labelled_total and other_total else float(labelled_total > 0)
    per_sample = {True: share / max(labelled_total, 1), False: (1 - share) / max(other_total, 1)}
    return [n * per_sample[own] for n, own in zip(examples, labelled, strict=True)]
