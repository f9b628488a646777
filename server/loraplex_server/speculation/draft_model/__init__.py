"""Draft models: smaller models that draft, of the same or of another tokenizer."""
