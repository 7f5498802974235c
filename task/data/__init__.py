"""What a client owns: images from a source, prepared once, split among clients, served in batches.

=================  =====================================================================================
``sources``        the contract of a source; the embedded set, scikit-learn's digits, ``.npz`` files
``vision``         torchvision's data sets
``folders``        folders of image files, Tiny-ImageNet
``noise``          what stands in, on request, for images that are not there
``pfllib``         folders as HtFLlib and PFLlib write them, read without running their pickles
``prepare``        source -> plain arrays in the cache, memory-mapped by every process
``labels``         any labels -> 0..C-1
``partition``      whose sample is whose, and which of them are for testing
``loaders``        one client's tensors in batches, on its device
``augment``        weak and strong random views of a batch; ``randaugment``, ``simclr_ops``, ``image_ops``: its parts
=================  =====================================================================================
"""
