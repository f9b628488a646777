"""Between the wire and the engine: text to tokens, submission, tokens back to text. Knows no protobuf and no
tensors."""
