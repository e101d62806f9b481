"""Run language models far bigger than the device, losslessly, with streamed draft trees."""

__version__ = "0.1.0"
