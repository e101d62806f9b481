"""The lab's commands: options in, text out."""
