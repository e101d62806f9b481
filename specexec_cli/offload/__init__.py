"""Where weights lie on disk, and how their bytes reach the CPU or GPU that multiplies by them."""
