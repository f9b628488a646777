"""From logits to tokens: penalties, truncation, counter-based noise, logprobs, and the verification of drafts."""
