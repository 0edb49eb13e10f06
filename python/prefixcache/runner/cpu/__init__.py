"""The runner of a CPU: numpy and our own kernels, whose rows do not depend on the batch."""
