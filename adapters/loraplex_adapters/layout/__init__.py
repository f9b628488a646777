"""The one allocation that holds an adapter's weights."""
