"""Training what speculation needs and users do not have: Medusa heads for a base model, or for a base with a LoRA.

Plain Transformers, PEFT and safetensors; nothing of the engine. `medusa` is the way in.
"""
