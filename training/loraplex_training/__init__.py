"""Training of Medusa heads for a base model, with or without a LoRA.

Uses plain Transformers, PEFT and safetensors, and nothing of the engine. `medusa` is the entry point.
"""
