"""From text to token ids and back: the tokenizer, incremental detokenisation, stop strings. Knows no tensors."""
