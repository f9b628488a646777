"""Who drafts for which sequence, and how much: proposers, their choice and their length. Verification is sampling's."""
