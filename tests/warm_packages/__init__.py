"""Proves which packages suit a preload, and writes the list that ships (`make prove-packages`).

`packages`      what is examined, and how it is installed
`environments`  a clean virtual environment for each package
`observe`       imports a package in a fresh process, and writes down what it reads, keeps and changes
`values`        the values and random generators that an import leaves; two processes are compared
`judgement`     one graph of all observed modules: rows of the list, or the reason why there is none
`four_starts`   a script that imports the package sees the same at every launch
`tables`        rewrites src/phalanx/helpers/preload/packages.py and the table of docs/warm.md

Nothing of this is part of the wheel. `observe` and `values` run in the environment under test: standard
library only.
"""
