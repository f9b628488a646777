"""Mixers that keep a state: recurrences over packed rows, and their installation."""
