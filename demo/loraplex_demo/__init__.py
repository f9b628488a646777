"""Demo models, adapters and the script that trains them.

`records` draws records, `formats` renders the right answers, `train` makes the weights, `world` finds the committed
ones. The engine does not import this package.
"""
