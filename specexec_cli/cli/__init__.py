"""The command line: options in, text out; one file per command."""

import sys

# The memory and files of other systems are reached in ways that Windows does not have, so that
# imports of other rooms would fail here first.
if sys.platform == "win32":
    sys.exit(
        "error: specexec does not run on Windows itself: install it in WSL2, the Linux that comes "
        "with Windows (wsl --install)"
    )
