"""The science of ProtoFed: data, models, methods, metrics. It knows nothing of servers, clients or transport.

Layers, lowest first; a module imports only from its own row or the rows above it::

    seeding, requirements, privacy,        random streams by name; the checked configuration
    schema, config, resume
    prototypes, losses, averaging,         tensors in, tensors out
    contrastive_gradient, descents
    models, data                           what a client owns
    metrics, methods                       evaluation; one file a paper, free functions on tensors
    npy, foreign, messages, payload        what travels between server and client, how it is written down and checked
    result_files, results, comparison,     reading result folders, tables and figures,
    tables, communication, drawing,        and the console script ``protofed-report``
    figures, report
    jobs, progress, processes, superlink,  a private SuperLink and what runs on it,
    launch                                 and the console script ``protofed``

``server_app`` and ``client_app`` import this package and Flower, never each other.

Symbols, used everywhere in names and docstrings:

    ======  ==============================================================================
    B       batch size
    C       number of classes
    K       width of the features and of the prototypes
    M       number of clients
    N       number of prototypes that the server received in a round
    ======  ==============================================================================

A suffix gives a tensor's shape: ``feats_BK`` is a ``(B, K)`` tensor of features.
"""
