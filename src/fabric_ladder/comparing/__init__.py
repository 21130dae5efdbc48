"""Laying runs side by side: reading logs, refusing unlike runs, and a table, a page and pictures of the rest."""
