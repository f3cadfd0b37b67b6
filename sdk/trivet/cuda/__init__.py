"""Kernels of the delegate "cuda": CUDA C written for the nodes of a part, and its compilation by NVRTC."""
