"""The one train loop."""
