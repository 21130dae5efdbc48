"""Tools beside training: generation, model cards, the doctor."""
