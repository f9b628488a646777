"""The model on native CPU kernels: prepacked linears, paged attention, and stacks of decoder layers in one call."""
