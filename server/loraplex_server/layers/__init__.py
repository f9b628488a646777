"""The layers that every model is made of here, and what they share in a step."""
