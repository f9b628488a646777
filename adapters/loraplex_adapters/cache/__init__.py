"""The adapter cache: names, keys, tiers, budgets, pins, loads in the background."""
