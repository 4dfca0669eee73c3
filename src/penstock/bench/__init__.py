"""What a cluster's storage does for a training, measured on day one: reading samples, training on them, saving.

    input_rates     samples per second by threads and batch size, next to the limit and other loaders
    loaders         one pass over some samples by a named loader; `peer_torch` and `peer_tensorflow` are those of others
    training        a mini-training with and without prefetch, on `models` or steps of a fixed time
    saving          saves straight to slow and fast storage and through a burst buffer, by `savers`
    traffic         what devices and the network moved meanwhile
    checks          what all of these check before they begin

After "Characterizing Deep-Learning I/O Workloads in TensorFlow" (Chien et al. 2018, arXiv:1810.03035), section III.
"""
