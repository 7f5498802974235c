"""The science of ProtoFed: data, models, methods, metrics. It knows nothing of servers, clients or transport.

Layers, lowest first; a module imports only from its own row or the rows above it::

    seeding, config                        names of random streams; the checked configuration
    prototypes, losses, metrics            tensors in, tensors out
    models, data                           what a client owns
    methods                                one file per paper, free functions on tensors
    messages, payload                      what travels between server and client (the only file that names records)
    launch, report                         the two console scripts

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
