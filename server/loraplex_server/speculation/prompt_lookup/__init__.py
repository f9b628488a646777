"""Prompt lookup: drafts copied from the text itself and from earlier outputs."""
