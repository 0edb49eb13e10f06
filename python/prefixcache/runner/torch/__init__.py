"""The runner on torch: of CUDA devices, and the reference of all kernels on a CPU."""
