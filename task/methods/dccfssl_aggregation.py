"""DCCFSSL, the server's half: authentication-reweighted aggregation of models (AMA) and of prototypes (APA).

The paper, the client's half and its symbols are in ``task/methods/dccfssl.py``.

======================  ==========================================================================
here                    paper
======================  ==========================================================================
``protos_MCK``          o^i, the latest prototypes of each client, zero where it has none
``counts_MC``           v^i, the number of authentication samples behind each
``authentic``           A_i, the sum of v^i over the classes
``expansion``           mu = m / n, clients without labels for each labelled one
``examples``            N_i, the training samples of a client
======================  ==========================================================================

Departures from the paper, which does not say: with labelled clients alone mu is 1, where 0 would erase every prototype;
a class that nobody supports keeps its last prototype; models are weighed by A_i as it is, and by mu A_i for labelled
clients with ``expansion``; when no client of a round has an authentication sample, its labelled clients are averaged by
their numbers of samples, and without these the global model stays; integer buffers come from the client that weighs
most. The ablation -ARA is ``model_weights(authenticate=False)`` and expansion 1, with prototypes of all samples.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from task.averaging import weighted_mean


def expansion_factor(labelled: int, unlabelled: int) -> float:
    """Return mu, by which the counts of labelled clients are multiplied: m / n of the whole population, 1 for m = 0.

    Raises
    ------
    ValueError
        No client is labelled.
    """
    if labelled < 1:
        raise ValueError(f"{labelled} labelled clients and {unlabelled} others: at least 1 labelled client is needed")
    return unlabelled / labelled if unlabelled else 1.0


def fresh(uploaded_M: Tensor, number: int, max_age: int | None) -> Tensor:
    """Return the ``(M,)`` bool mask of the clients whose stored prototypes count in round ``number``.

    Parameters
    ----------
    uploaded_M : Tensor
        ``(M,)`` int64 round (from 1) of each client's latest upload, 0 for none yet.
    number : int
        The round.
    max_age : int or None
        How many rounds old an upload may be; None for any age (the paper), 0 for those of this round alone.
    """
    stored_M = uploaded_M > 0
    return stored_M if max_age is None else stored_M & (number - uploaded_M <= max_age)


def aggregate_prototypes(
    protos_MCK: Tensor,
    counts_MC: Tensor,
    labelled_M: Tensor,
    expansion: float,
    previous_CK: Tensor,
    known_C: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the global prototypes, means of the clients' weighted by counts, labelled ones ``expansion`` times.

    Parameters
    ----------
    protos_MCK, counts_MC : Tensor
        ``(M, C, K)`` prototypes and ``(M, C)`` int64 counts of all clients; a client that is to be left out has count
        0, and then its vectors do not matter.
    labelled_M : Tensor
        ``(M,)`` bool.
    expansion : float
        mu of ``expansion_factor``; 1 for a mean by counts alone.
    previous_CK, known_C : Tensor
        ``(C, K)`` global prototypes so far and the ``(C,)`` bool mask of those that exist.

    Returns
    -------
    tuple of Tensor
        New ``(C, K)`` global prototypes and their ``(C,)`` mask; a class without any count keeps its previous one.

    References
    ----------
    DCCFSSL, authentication-reweighted prototype aggregation, the update of O_j.
    """
    weights_MC = counts_MC.double()
    weights_MC[labelled_M] *= expansion
    held_MCK = protos_MCK.double().masked_fill((counts_MC == 0).unsqueeze(2), 0)
    totals_C = weights_MC.sum(dim=0)
    supported_C = totals_C > 0
    means_CK = torch.einsum("mc,mck->ck", weights_MC, held_MCK) / totals_C.masked_fill(~supported_C, 1).unsqueeze(1)
    aggregated_CK = torch.where(supported_C.unsqueeze(1), means_CK.to(previous_CK.dtype), previous_CK)
    return aggregated_CK, known_C | supported_C


def model_weights(
    authentic: Sequence[int],
    examples: Sequence[int],
    labelled: Sequence[bool],
    *,
    authenticate: bool = True,
    expansion: float = 1.0,
) -> list[float]:
    """Return the weight of each client's model in the round's mean, not normalised.

    Parameters
    ----------
    authentic, examples : sequence of int
        A_i and N_i of the round's clients.
    labelled : sequence of bool
        Which of them have labels.
    authenticate : bool
        True: A_i; where all are 0, N_i of the labelled clients and 0 for the others. False: N_i (-ARA).
    expansion : float
        What A_i of labelled clients is multiplied by: 1, or mu for the other reading of the paper.

    Returns
    -------
    list of float
        All 0 when the round has nothing to learn from.

    References
    ----------
    DCCFSSL, authentication-reweighted model aggregation.
    """
    assert len(authentic) == len(examples) == len(labelled)
    if not authenticate:
        return [float(n) for n in examples]
    if any(authentic):
        return [count * (expansion if own else 1.0) for count, own in zip(authentic, labelled, strict=True)]
    return [float(n) if own else 0.0 for n, own in zip(examples, labelled, strict=True)]


def aggregate_models(
    states: Sequence[Mapping[str, Tensor]], weights: Sequence[float], previous: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weighted mean of the clients' models; ``previous``, bit for bit, when all weights are 0.

    Models of weight 0 are left out, whatever they hold; integer buffers come from the model of the largest weight.
    """
    return weighted_mean(states, weights, counters="heaviest") if any(weights) else dict(previous)
