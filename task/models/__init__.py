"""The networks of the clients: one contract, a zoo of bodies, and who gets which.

A *body* is any ``nn.Module`` that turns images ``(B, channels, height, width)`` into features
``(B, width)`` of a width of its own. ``split`` completes it to the shape that all clients share: features
``(B, K)`` and logits ``(B, C)``. A body of your own is one file in this folder with a class or a function
that takes ``image_shape`` and keyword settings, named by ``_target_`` in a YAML of ``conf/model/``.
"""
