"""Sampling: penalties, truncation, counter-based noise, logprobs and verification of drafts."""
