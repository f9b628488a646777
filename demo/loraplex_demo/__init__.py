"""The demo's world: a small model, its adapters, the records that they were trained on, and the script that made them.

`records` draws records, `formats` says what the right answer is, `train` makes the weights, `world` finds the
committed ones. Nothing in the engine knows this package; it is a user of the engine like any other.
"""
