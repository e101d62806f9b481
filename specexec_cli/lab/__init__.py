"""The lab: benchmarks, the papers' tables, simulations and training, apart from the program itself.

Nothing outside this package imports it. Its commands are added to the command line by the entry
points `specexec.commands` in pyproject.toml, as any other package's commands can be.
"""
