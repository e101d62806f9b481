"""Kernels: Triton for GPUs and LLVM for CPUs, held against references in plain PyTorch."""
