"""The command line: options in, text out; one file per command."""

import sys

# Checked before other rooms are imported: they reach memory and files in ways that Windows does
# not have, and their imports would fail there.
if sys.platform == "win32":
    sys.exit(
        "error: specexec does not run on Windows itself: install it in WSL2, the Linux that comes "
        "with Windows (wsl --install)"
    )
