"""The lab: benchmarks, the papers' tables, simulations and training, beside the program itself.

Nothing outside this package imports it. Its commands join the command line through the entry points
`specexec.commands` of pyproject.toml, as those of any other package can.
"""
