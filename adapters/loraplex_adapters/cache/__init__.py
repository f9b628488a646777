"""The adapter cache: names, tiers, budgets, evictions, background loading."""
