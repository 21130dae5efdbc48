"""What a run prints, measures and records."""
