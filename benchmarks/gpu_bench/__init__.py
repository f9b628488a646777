"""GPU benchmark: steps of the real runner on a random model, and kernels.

Needs torch, transformers, safetensors and numpy; uses triton and peft where they are. Runs on a CPU too, at a tiny
shape, where its figures mean nothing and its code is tested.
"""
