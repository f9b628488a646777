"""What lies between a model's products, in one launch each: RMS norms and rotary embeddings."""
