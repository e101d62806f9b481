"""Triton kernels beside their PyTorch references, and the CPU dequantizer."""
