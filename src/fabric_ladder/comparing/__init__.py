"""Compare runs: read them, refuse unlike ones, and write a table, a page and charts. It needs no torch."""
